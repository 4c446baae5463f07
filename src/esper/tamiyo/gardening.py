"""What controllers that do not learn share: tending seeds, and preferring offers.

`tend` is one table of scores over (op, slot), highest legal one first: remove a
holding seed that was measured not to earn its rent, keep any other one, move on what
has trained or blended long enough, plant what is wished for most, and otherwise wait.
Controllers differ only in what they wish for: a score over (slot, blueprint), -inf
where nothing shall be planted. `Preference` is the wish of those who do not look at
promises.
"""

from difflib import get_close_matches
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.blueprints import Form
from esper.contracts.errors import BadInput
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import BlueprintOffers, Observation
from esper.contracts.stages import Stage
from esper.simic.agent.distribution import relevant

PATIENCE: Final = 2
"""Steps a seed trains before it is blended in."""

SETTINGS: Final = HEADS[HEAD["blueprint"] + 1 :]
"""The heads that say how something is blended."""


def manner(**chosen: str) -> Float[Tensor, "head choice"]:
    """How far every choice of the `SETTINGS` is from the one that is liked best."""
    widest = max(len(head.choices) for head in SETTINGS)
    distance = torch.full((len(SETTINGS), widest), torch.inf)
    for row, head in zip(distance, SETTINGS, strict=True):
        values = torch.tensor([float(value) for value in head.choices.values()])
        row[: len(values)] = (values - head.choices[chosen[head.name]]).abs()
    return distance


GENTLE: Final = manner(
    style="ADD",
    tempo="STANDARD",
    alpha_target="FULL",
    alpha_speed="FAST",
    alpha_curve="COSINE",
)
"""Neither at once nor slowly, and all the way."""
SLOW: Final = manner(
    style="ADD",
    tempo="SLOW",
    alpha_target="FULL",
    alpha_speed="SLOW",
    alpha_curve="SIGMOID",
)
"""As slowly as the run allows, and all the way."""


def tend(
    observation: Observation,
    masks: ActionMasks,
    wish: Float[Tensor, "env slot blueprint"],
    *,
    patience: int | Int64[Tensor, " env"] = PATIENCE,
    manner: Float[Tensor, "setting choice"] = GENTLE,
    prunes: Bool[Tensor, " env"] | None = None,
) -> Int64[Tensor, "env head"]:
    """The most urgent legal sentence of every environment.

    Args:
        observation: What is seen.
        masks: What is possible.
        wish: How much each offer is wanted; -inf or NaN: not at all.
        patience: Steps a seed trains before it is blended in. A blended one moves on
            as soon as its alpha has arrived.
        manner: How seeds are blended in and out; the nearest choice that is allowed.
        prunes: Where seeds that do not earn are removed rather than kept; None:
            everywhere.
    """
    slots, rent = observation.slots, observation.host.rent
    wanted = masks.blueprint & (wish > -torch.inf)
    best, offer = torch.where(wanted, wish, -torch.inf).flatten(1).max(dim=1)
    places, kinds = wish.shape[1:]
    order = torch.arange(places, device=wish.device)
    chosen = (order == (offer // kinds)[:, None]) & (best > -torch.inf)[:, None]

    earns = slots.contribution > rent[:, None] * slots.parameters
    useless = slots.contribution_measured & ~earns
    if prunes is not None:
        useless = useless & prunes[:, None]
    if isinstance(patience, Tensor):
        patience = patience[:, None]
    holding = slots.stage == Stage.HOLDING.value
    ready = (slots.stage != Stage.TRAINING.value) | (slots.age >= patience)
    never = torch.zeros_like(slots.stage)
    scores = {
        Op.WAIT: never,
        Op.GERMINATE: chosen * 1,
        Op.ADVANCE: ready * 2,
        Op.SET_ALPHA: never,
        Op.PRUNE: (holding & useless) * 3,
        Op.FOSSILIZE: (holding & ~useless) * 4,
    }
    table = torch.stack([scores[op] for op in Op], dim=1) * masks.slot
    # Where nothing is due, the first of all zeros is WAIT.
    choice = table.flatten(1).argmax(dim=1)

    allowed = masks.fixed[:, -len(SETTINGS) :, : manner.shape[1]]
    settings = torch.where(allowed, manner.to(wish.device), torch.inf).argmin(dim=2)
    said = torch.stack([choice // places, choice % places, offer % kinds], dim=1)
    actions = torch.cat([said, settings], dim=1)
    return torch.where(relevant(actions), actions, 0)


class Preference:
    """Widening first, the larger the better; then whatever adds most parameters.

    Args:
        spec: The action space.
        blueprint: The only blueprint that is ever wanted; any if None.
    """

    def __init__(self, spec: ActionSpec, blueprint: str | None = None) -> None:
        names = [known.name for known in spec.blueprints]
        if blueprint is not None and blueprint not in names:
            near = get_close_matches(blueprint, names, n=1, cutoff=0.0)
            raise BadInput(
                f"no blueprint {blueprint!r} in this action space; did you mean "
                f"{near[0]!r}?"
            )
        # Sizes are squeezed into [1.5, 2), above all parameters in (-1, 1).
        self._widening = torch.tensor(
            [
                2.0 - 1.0 / (1.0 + known.size) if known.form is Form.WIDEN else 0.0
                for known in spec.blueprints
            ]
        )
        self._wanted = torch.tensor(
            [blueprint is None or name == blueprint for name in names]
        )

    def scores(self, offers: BlueprintOffers) -> Float[Tensor, "env slot blueprint"]:
        """How much each offer is liked, in (-1, 2); -inf if it is not wanted."""
        size = offers.parameters
        if size.shape[2] != len(self._wanted):
            raise BadInput(
                f"offers must have the {len(self._wanted)} blueprints of this "
                f"controller's action space, got {size.shape[2]}; pass the same spec."
            )
        widening = self._widening.to(size.device, size.dtype)
        liked = torch.where(widening > 0.0, widening, by_size(offers))
        return torch.where(self._wanted.to(size.device), liked, -torch.inf)

    def wish(
        self, offers: BlueprintOffers, due: Bool[Tensor, " env"]
    ) -> Float[Tensor, "env slot blueprint"]:
        """The scores where planting is due, -inf elsewhere."""
        return torch.where(due[:, None, None], self.scores(offers), -torch.inf)


def by_size(offers: BlueprintOffers) -> Float[Tensor, "env slot blueprint"]:
    """A score in (-1, 1) that grows with the parameters of an offer."""
    return offers.parameters / (1.0 + offers.parameters.abs())


def explain(observation: Observation, masks: ActionMasks, env: int = 0) -> str:
    """Why nothing was planted in one environment, in words; reads from the device."""
    envs = len(masks.op)
    if not 0 <= env < envs:
        raise BadInput(f"env must lie in 0..{envs - 1}, got {env}.")
    if masks.op[env, Op.GERMINATE]:
        return "the controller chose to wait"
    if not masks.fixed[env, HEAD["op"], Op.GERMINATE]:
        return "this run does not allow planting"
    stages = observation.slots.stage[env].tolist()
    if Stage.DORMANT not in stages:
        counts = ((stages.count(stage), stage.name.lower()) for stage in Stage)
        filled = ", ".join(f"{count} {name}" for count, name in counts if count)
        return f"no slot is free ({filled})"
    free = observation.slots.stage[env] == Stage.DORMANT.value
    fits = observation.offers.fits[env] & free[:, None]
    costs = observation.offers.parameters[env][fits]
    if not len(costs):
        return "nothing fits the free slots"
    return (
        "no blueprint fits the budget left "
        f"({observation.host.budget_left[env].item():.3g} x host): "
        f"the smallest takes {costs.min().item():.3g} x host"
    )
