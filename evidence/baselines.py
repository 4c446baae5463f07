"""Baselines made from a policy's own decisions: replayed, or matched at random.

If a policy does no better than its own actions of another episode, its observations
did not matter; if no better than seeds of random kinds at random places and times, as
many as it planted and in the same part of the horizon, its choices did not.
"""

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, NUM_HEADS, ActionMasks, ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.world import ControllerState, Observation
from esper.simic.agent.distribution import legal_rows, relevant
from esper.tamiyo.rule_based import episode_count, germinates, next_actions


class Replay:
    """Repeats recorded actions: the open-loop baseline.

    An action that is not legal becomes WAIT, as does everything after the end of the
    recording. The state is the number of decisions since the start of the episode.

    Args:
        actions: int64 [time, head], or [time, env, head] with one recording for each
            environment.
    """

    def __init__(self, actions: Tensor) -> None:
        if (
            actions.dtype is not torch.int64
            or actions.ndim not in (2, 3)
            or actions.shape[-1] != NUM_HEADS
        ):
            raise BadInput(
                f"actions must be int64 [time, {NUM_HEADS}] or [time, env, "
                f"{NUM_HEADS}], got {actions.dtype} {[*actions.shape]}."
            )
        if actions.ndim == 2:
            actions = actions.unsqueeze(1)
        end = actions.new_zeros(1, *actions.shape[1:])
        self._actions = torch.cat([actions, end])  # the end is WAIT, for ever

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """The action recorded for this time, or WAIT if it is not legal."""
        envs, device = masks.op.shape[0], masks.op.device
        if self._actions.shape[1] not in (1, envs):
            raise BadInput(
                f"the recording is of {self._actions.shape[1]} environments, got "
                f"{envs}; replay as many, or one sequence [time, {NUM_HEADS}] for all."
            )
        self._actions = self._actions.to(device)
        time = episode_count(state, observation)
        row = time.clamp(max=len(self._actions) - 1)
        every = self._actions.expand(-1, envs, -1)
        actions = every[row, torch.arange(envs, device=device)]
        return _legal_or_wait(actions, masks), time + 1


class MatchedRandom:
    """Plants a given number of seeds at decisions drawn uniformly from a range.

    A planting that could not be made is made up for later. Every legal offer is equally
    likely. The state is the number of plantings of the episode, and how many are due by
    each decision.

    Args:
        spec: The action space.
        counts: Seeds to plant in each environment, int64 [env].
        first: Share of the horizon at the first decision of the range, [env].
        last: Share of the horizon at its last decision, [env].
        horizon: Decisions of an episode.
    """

    def __init__(
        self,
        spec: ActionSpec,
        counts: Tensor,
        first: Tensor,
        last: Tensor,
        *,
        horizon: int,
    ) -> None:
        shapes = [[*given.shape] for given in (counts, first, last)]
        if counts.ndim != 1 or shapes[1:] != [shapes[0]] * 2:
            raise BadInput(
                "counts, first and last must have one number for each environment, "
                f"got {shapes[0]}, {shapes[1]} and {shapes[2]}."
            )
        if horizon < 1 or bool((counts < 0).any()):
            raise BadInput("horizon must be at least 1 and no count negative.")
        self._kinds, self._counts = len(spec.blueprints), counts
        decision = torch.arange(horizon, device=counts.device)
        # Shares are of whole decisions, give or take what rounding does to them.
        low, high = (torch.round(share * horizon)[:, None] for share in (first, last))
        self._inside = (decision >= low) & (decision <= high)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Follow the rules, and plant a random offer if it is due."""
        if masks.blueprint.shape[::2] != (len(self._counts), self._kinds):
            raise BadInput(
                f"expected {len(self._counts)} environments and {self._kinds} "
                f"blueprints, got {masks.blueprint.shape[0]} and "
                f"{masks.blueprint.shape[2]}."
            )
        drawn = self._draw(generator)
        planted, due = torch.zeros_like(drawn[:, 0]), drawn
        if isinstance(state, tuple):
            planted = torch.where(observation.first, 0, state[0])
            due = torch.where(observation.first[:, None], drawn, state[1])
        horizon = due.shape[1]
        now = torch.round(observation.host.progress * horizon).long()
        wanted = due.gather(1, now.clamp(0, horizon - 1)[:, None]).squeeze(1)
        lot = torch.rand(
            masks.blueprint.shape, generator=generator, device=generator.device
        ).to(masks.blueprint.device)
        scores = torch.where((planted < wanted)[:, None, None], lot, -torch.inf)
        actions = next_actions(observation, masks, scores)
        return actions, (planted + germinates(actions), due)

    def _draw(self, generator: Generator) -> Int64[Tensor, "env decision"]:
        """Draw how many seeds are due by each decision."""
        inside = self._inside
        lot = torch.rand(inside.shape, generator=generator, device=generator.device)
        lot = torch.where(inside, lot.to(inside.device), 2.0)
        rank = lot.argsort(dim=1).argsort(dim=1)
        chosen = inside & (rank < self._counts[:, None])
        by_now = chosen.long().cumsum(dim=1)
        # More than fit into the range are due from its end on.
        missing = self._counts - by_now[:, -1]
        latest = inside.shape[1] - 1 - inside.flip(1).long().argmax(dim=1)
        decision = torch.arange(inside.shape[1], device=inside.device)
        return by_now + torch.where(decision >= latest[:, None], missing[:, None], 0)


def _legal_or_wait(
    actions: Int64[Tensor, "env head"], masks: ActionMasks
) -> Int64[Tensor, "env head"]:
    """The actions with unused heads set to 0; WAIT where illegal."""
    sizes = [masks.fixed.shape[2]] * NUM_HEADS
    sizes[HEAD["op"]] = masks.op.shape[1]
    sizes[HEAD["slot"]], sizes[HEAD["blueprint"]] = masks.blueprint.shape[1:]
    last = torch.tensor(sizes, device=actions.device) - 1
    inside = actions.clamp(torch.zeros_like(last), last)
    used = relevant(inside)
    inside = torch.where(used, inside, 0)
    legal = legal_rows(masks, inside).gather(2, inside.unsqueeze(2)).squeeze(2)
    legal &= (inside == actions) | ~used
    return torch.where(legal.all(dim=1, keepdim=True), inside, 0)
