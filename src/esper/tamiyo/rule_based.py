"""Rule-based controllers: never, random, plateau, by rent.

All controllers that plant share `next_actions`, which takes the first legal rule:
prune a HOLDING seed whose measured contribution is below its rent; advance seeds that
trained or blended long enough; plant the offer with the highest score; fossilize a seed
that earns its rent; wait. They differ in the scores of the offers,
float [env, slot, blueprint], -inf where nothing is to be planted.
"""

from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.blueprints import NOMINAL_WIDTH, Form
from esper.contracts.checks import require_number
from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage
from esper.contracts.world import BlueprintOffers, ControllerState, Observation
from esper.simic.agent.distribution import sample
from esper.tamiyo.policy.heads import HEAD_GROUPS, relevant, rows_by_group

TIE: Final = 1e-5
"""Less than any difference of scores that matters."""
TRAINING_STEPS: Final = 2
"""Steps that a seed trains before it is blended."""
BLEND_HEADS: Final = HEADS[HEAD["blueprint"] + 1 :]
"""Heads that choose how a seed is blended."""


class Never:
    """Always waits."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Return WAIT everywhere."""
        envs = masks.op.shape[0]
        waits = torch.zeros(envs, NUM_HEADS, dtype=torch.int64, device=masks.op.device)
        return waits, None


class Random:
    """Samples each head uniformly from its legal choices."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Sample one legal action per environment."""
        groups, picked, choice = rows_by_group(masks), [], None
        for _ in HEAD_GROUPS:
            rows = groups.send(choice)
            even = torch.zeros(rows.shape, device=rows.device)
            choice = sample(even, rows, generator)
            picked.append(choice.view(len(choice), -1))
        return torch.cat(picked, dim=1), None


def blend_distances(*preferred: str) -> Float[Tensor, "head choice"]:
    """Return the distance of every choice of `BLEND_HEADS` to the preferred one."""
    widest = max(len(head.choices) for head in BLEND_HEADS)
    distance = torch.full((len(BLEND_HEADS), widest), torch.inf)
    for row, head, name in zip(distance, BLEND_HEADS, preferred, strict=True):
        values = torch.tensor([float(value) for value in head.choices.values()])
        row[: len(values)] = (values - head.choices[name]).abs()
    return distance


def _default_blend() -> Float[Tensor, "head choice"]:
    distance = blend_distances("ADD", "STANDARD", "FULL", "FAST", "COSINE")
    tempo = [head.name for head in BLEND_HEADS].index("tempo")
    distance[tempo, [*BLEND_HEADS[tempo].choices].index("AT_ONCE")] = -1.0
    return distance


STANDARD_BLEND: Final = _default_blend()
"""Blend fully: at once if allowed, else with the tempo nearest to STANDARD."""
BLEND_AT_ONCE: Final = blend_distances("ADD", "AT_ONCE", "FULL", "INSTANT", "LINEAR")
"""Blend fully with the next batch."""


class SizePreference:
    """Plants the offer that is due: widening before all others, then by size.

    Of equal offers it takes the one at the place where it has planted least. It prunes
    no seed that is worth its rent, so seeds can be kept as soon as they hold.
    """

    blending = STANDARD_BLEND

    def __init__(self, spec: ActionSpec) -> None:
        # Widenings score in [1.5, 2), all other blueprints in (-1, 1).
        self._widening = torch.tensor(
            [
                2.0 - 1.0 / (1.0 + known.units(NOMINAL_WIDTH))
                if known.form is Form.WIDEN
                else 0.0
                for known in spec.blueprints
            ]
        )

    def scores(self, offers: BlueprintOffers) -> Float[Tensor, "env slot blueprint"]:
        """Return scores in (-1, 2)."""
        size, kinds = offers.parameters, len(self._widening)
        if size.shape[2] != kinds:
            raise InvalidInputError(
                f"offers must have the {kinds} blueprints of this controller's action "
                f"space, got {size.shape[2]}. Use the same spec."
            )
        widening = self._widening.to(size.device, size.dtype)
        return torch.where(widening > 0.0, widening, size_scores(offers))

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Plant what is due; the state counts seeds planted at every place."""
        planted, place = planted_at_places(state, observation)
        scores = self.scores(observation.offers)
        scores = scores - TIE * planted.gather(1, place)[:, :, None]
        scores = torch.where(self._due(observation), scores, -torch.inf)
        actions = next_actions(observation, masks, scores, self.blending)
        return actions, count_planted(planted, place, actions)

    def keeps(self, observation: Observation) -> Bool[Tensor, " env"]:
        """Return where holding seeds will not be pruned any more."""
        return torch.ones_like(observation.episode_start, dtype=torch.bool)

    def _due(self, observation: Observation) -> Bool[Tensor, "env _ _"]:
        """Return which offers may be planted now."""
        raise NotImplementedError


class Plateau(SizePreference):
    """Plants when the score has not improved for a while and no seed is growing.

    Args:
        spec: The action space.
        patience: Fraction of the horizon without improvement.
    """

    def __init__(self, spec: ActionSpec, patience: float = 0.1) -> None:
        require_number("patience", patience, 0.0, 1.0)
        super().__init__(spec)
        self.patience = patience

    def _due(self, observation: Observation) -> Bool[Tensor, "env 1 1"]:
        stage = observation.slots.stage
        growing = (stage == Stage.TRAINING.value) | (stage == Stage.BLENDING.value)
        due = (observation.host.plateau >= self.patience) & ~growing.any(dim=1)
        return due[:, None, None]


class ByRent(SizePreference):
    """Widens as soon as possible, as long as the rent stays below a limit.

    Args:
        spec: The action space.
        limit: Maximum rent of all added parameters, in units of the score.
    """

    blending = BLEND_AT_ONCE

    def __init__(self, spec: ActionSpec, limit: float = 0.02) -> None:
        require_number("limit", limit)
        super().__init__(spec)
        self.limit = limit

    def _due(self, observation: Observation) -> Bool[Tensor, "env slot blueprint"]:
        host = observation.host
        size = host.added[:, None, None] + observation.offers.parameters
        return host.rent[:, None, None] * size <= self.limit


def size_scores(offers: BlueprintOffers) -> Float[Tensor, "env slot blueprint"]:
    """Return a score in (-1, 1) that increases with the parameters of an offer."""
    return offers.parameters / (1.0 + offers.parameters.abs())


def next_actions(
    observation: Observation,
    masks: ActionMasks,
    scores: Float[Tensor, "env slot blueprint"],
    blending: Float[Tensor, "setting choice"] = STANDARD_BLEND,
    prunes: Bool[Tensor, "env slot"] | None = None,
) -> Int64[Tensor, "env head"]:
    """Return the legal action of the highest priority in every environment.

    Args:
        observation: The observation.
        masks: Legal actions.
        scores: Scores of the offers; not planted where -inf or NaN.
        blending: `blend_distances`; the nearest allowed choices are taken.
        prunes: Seeds to prune regardless of their contribution.
    """
    slots, rent = observation.slots, observation.host.rent
    wanted = masks.blueprint & (scores > -torch.inf)
    best, offer = torch.where(wanted, scores, -torch.inf).flatten(1).max(dim=1)
    num_slots, kinds = scores.shape[1:]
    order = torch.arange(num_slots, device=scores.device)
    chosen = (order == (offer // kinds)[:, None]) & (best > -torch.inf)[:, None]

    earns = slots.contribution > rent[:, None] * slots.parameters
    holding = slots.stage == Stage.HOLDING.value
    measured = holding & slots.contribution_measured
    useless = measured & ~earns
    if prunes is not None:
        useless = useless | prunes
    ready = (slots.stage != Stage.TRAINING.value) | (slots.age >= TRAINING_STEPS)
    never = torch.zeros_like(slots.stage)
    priorities = {
        Op.WAIT: never,
        Op.GERMINATE: chosen * 2,
        Op.ADVANCE: ready * 3,
        Op.SET_ALPHA: never,
        Op.PRUNE: useless * 4,
        Op.FOSSILIZE: (measured & ~useless) * 1,
    }
    table = torch.stack([priorities[op] for op in Op], dim=1) * masks.slot
    # Without a rule that applies, argmax returns the first zero, which is WAIT.
    choice = table.flatten(1).argmax(dim=1)

    allowed = masks.fixed[:, -len(BLEND_HEADS) :, : blending.shape[1]]
    blend = torch.where(allowed, blending.to(scores.device), torch.inf).argmin(dim=2)
    first = torch.stack([choice // num_slots, choice % num_slots, offer % kinds], dim=1)
    actions = torch.cat([first, blend], dim=1)
    return torch.where(relevant(actions), actions, 0)


def planted_at_places(
    state: ControllerState, observation: Observation
) -> tuple[Int64[Tensor, "env slot"], Int64[Tensor, "env slot"]]:
    """Return seeds planted at every place in the episode, and the place of every slot.

    Slots are free again when seeds were folded into layers, so they do not show it.
    """
    depth = observation.slots.depth
    # Slot s is at place s % places, and places differ in depth.
    per_place = (depth == depth[:, :1]).sum(dim=1).clamp(min=1)
    places = (depth.shape[1] // per_place)[:, None]
    place = torch.arange(depth.shape[1], device=depth.device) % places
    if not isinstance(state, Tensor):
        return torch.zeros_like(place), place
    return torch.where(observation.episode_start[:, None], 0, state), place


def count_planted(
    planted: Int64[Tensor, "env slot"],
    place: Int64[Tensor, "env slot"],
    actions: Int64[Tensor, "env head"],
) -> Int64[Tensor, "env slot"]:
    """Return the counts of `planted_at_places` after some actions."""
    at = place.gather(1, actions[:, HEAD["slot"], None])
    new = (actions[:, HEAD["op"], None] == Op.GERMINATE).long()
    return planted.scatter_add(1, at, new)


def explain_no_planting(observation: Observation, masks: ActionMasks) -> str:
    """Return why nothing was planted in the first environment; reads the device."""
    if masks.op[0, Op.GERMINATE]:
        return "the controller chose to wait"
    if not masks.fixed[0, HEAD["op"], Op.GERMINATE]:
        return "this run does not allow planting"
    stages = observation.slots.stage[0].tolist()
    if Stage.DORMANT not in stages:
        counts = ((stages.count(stage), stage.name.lower()) for stage in Stage)
        filled = ", ".join(f"{count} {name}" for count, name in counts if count)
        return f"no slot is free ({filled})"
    free = observation.slots.stage[0] == Stage.DORMANT.value
    fits = observation.offers.fits[0] & free[:, None]
    costs = observation.offers.parameters[0][fits]
    if not len(costs):
        return "nothing fits the free slots"
    return (
        "no blueprint fits the budget left "
        f"({observation.host.budget_left[0].item():.3g} x host): "
        f"the smallest takes {costs.min().item():.3g} x host"
    )
