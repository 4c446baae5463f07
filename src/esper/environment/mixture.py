"""Several worlds side by side, as one: environments of the first come first.

The action space must be the same everywhere; hosts, data, horizons and terms may
differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.state import Stateful
from esper.contracts.world import EpisodeReport, Observation, StepResult, VectorWorld
from esper.environment.settings import check_actions
from esper.growth.measurements import together


class Mixture(Stateful, VectorWorld):
    """A world made of others.

    Args:
        worlds: At least one; all with the same action space.
    """

    STATE: ClassVar[tuple[str, ...]] = ("worlds",)
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def __init__(self, worlds: Sequence[VectorWorld]) -> None:
        if not worlds:
            raise BadInput("a mixture needs at least one world, got none.")
        for number, world in enumerate(worlds):
            if world.spec != worlds[0].spec:
                raise BadInput(
                    f"all worlds of a mixture must have one action space; number "
                    f"{number} differs from the first: {_describe(world.spec)}, not "
                    f"{_describe(worlds[0].spec)}."
                )
        self.worlds = list(worlds)
        self._counts = [world.num_envs for world in worlds]
        self.spec, self.num_envs = worlds[0].spec, sum(self._counts)
        sizes = {world.group_size for world in worlds}
        self.group_size = sizes.pop() if len(sizes) == 1 else 1

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        first: Observation = together([world.reset() for world in self.worlds])
        return first

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere, each world with its share of the actions."""
        check_actions(actions, self.num_envs)
        parts = actions.split(self._counts)
        results = [w.step(part) for w, part in zip(self.worlds, parts, strict=True)]
        final, illegal = None, [r.illegal for r in results if r.illegal is not None]
        if any(result.final is not None for result in results):
            # Read only where an episode was truncated: what stands elsewhere is free.
            final = together([r.final or r.observation for r in results])
        return StepResult(
            observation=together([result.observation for result in results]),
            reward=torch.cat([result.reward for result in results]),
            terminated=torch.cat([result.terminated for result in results]),
            truncated=torch.cat([result.truncated for result in results]),
            final=final,
            illegal=torch.cat(illegal) if len(illegal) == len(results) else None,
            report=_report(results, self._counts),
        )


class RedrawnMixture(Mixture):
    """A mixture whose worlds are drawn anew before every round.

    Between two rounds nothing is kept but how often worlds were drawn: what is drawn
    follows from that number.

    Args:
        make: The worlds that a number stands for.
    """

    STATE = ("drawn",)
    DERIVED = ("worlds",)

    def __init__(self, make: Callable[[int], Sequence[VectorWorld]]) -> None:
        super().__init__(make(0))
        self._make = make
        self.drawn = 0
        """How often worlds were drawn before."""

    def begin_round(self) -> Observation:
        """Draw the next worlds and reset them."""
        self.worlds = list(self._make(self.drawn))
        self.drawn += 1
        return self.reset()


def _report(
    results: Sequence[StepResult], counts: Sequence[int]
) -> EpisodeReport | None:
    """The reports of all worlds, by environment of the mixture."""
    starts = accumulate(counts, initial=0)
    found = [
        replace(result.report, env=result.report.env + start)
        for result, start in zip(results, starts, strict=False)
        if result.report is not None
    ]
    return together(found) if found else None


def _describe(spec: ActionSpec) -> str:
    names = ", ".join(blueprint.name for blueprint in spec.blueprints)
    return f"{spec.slots.max_slots} slots and {names}"
