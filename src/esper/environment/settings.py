"""The choices behind a growing world, as plain values that any caller can write.

    GrowSettings(task="digits", horizon=10, rent=(0.0, 0.05)).world(1, rng_seed=0)

A term is a number or a range to draw from anew in every episode.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Final

from esper.contracts.errors import BadInput
from esper.contracts.observation import Observation
from esper.environment.growing import GrowingWorld
from esper.environment.terms import Terms, as_range
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

Term = float | tuple[float, float]

TERMS: Final = tuple(field.name for field in fields(Terms))
"""What an episode can be told."""


class RememberingWorld(GrowingWorld):
    """A growing world that keeps what was seen last of episodes that ended."""

    last: Observation | None = None
    """Every environment just before the ended ones began anew; None at first."""

    def _begin(self, envs: Iterable[int]) -> None:
        if self.ended is not None:
            self.last = self._observe()
        super()._begin(envs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowSettings:
    """What a growing world is made of."""

    task: str | Task = "digits"
    """The task or its name."""
    horizon: int | None = None
    """Decisions of an episode; the task's own if None."""
    decision_every: int | None = None
    """Batches between two decisions; the task's own if None."""
    blueprints: tuple[str, ...] | None = None
    """What may be planted; None: what is offered to hosts of the task's kind."""
    seeds_per_slot: int = 2
    """Seeds that each place can hold."""
    rent: Term = 0.01
    """Score charged per added multiple of the host's parameters."""
    budget: Term = 4.0
    """Parameters that may be added, as a multiple of the host's."""
    rate: Term = 1.0
    """Learning rate against the task's own."""
    measure_every: int = 4
    """Decisions between two looks at contributions and promises."""
    penalty: float = 0.01
    """Reward taken for an action that is not possible."""
    device: str = "cpu"
    """Where the networks live."""

    @classmethod
    def named(cls, settings: Mapping[str, Any]) -> "GrowSettings":
        """Settings by name, as keywords of others; refuses names that are unknown."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                near = get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise BadInput(
                    f"expected settings out of {', '.join(known)}; got {name!r}; did "
                    f"you mean {near!r}?"
                )
        return cls(**settings)

    def world(
        self,
        num_envs: int,
        rng_seed: int,
        options: Mapping[str, Any] | None = None,
    ) -> RememberingWorld:
        """A world that was not reset yet.

        Args:
            num_envs: How many hosts.
            rng_seed: Decides data, hosts, batches and terms.
            options: Terms (rent, budget, rate) that replace the settings' own.
        """
        if not isinstance(options, Mapping | None):
            raise BadInput(f"options must be a dict of terms, got {options!r:.99}.")
        told = {name: getattr(self, name) for name in TERMS} | dict(options or {})
        if unknown := told.keys() - {*TERMS}:
            raise BadInput(
                f"options may have {', '.join(TERMS)}; got {min(map(repr, unknown))}."
            )
        task = find_task(self.task) if isinstance(self.task, str) else self.task
        if not isinstance(task, Task):
            raise BadInput(f"task must be a Task or the name of one, got {task!r:.99}.")
        changed = {
            name: value
            for name in ("horizon", "decision_every")
            if (value := getattr(self, name)) is not None
        }
        return RememberingWorld(
            replace(task, **changed),
            num_envs,
            rng_seed,
            blueprints=None if self.blueprints is None else tuple(self.blueprints),
            seeds_per_slot=self.seeds_per_slot,
            terms=Terms(**{name: as_range(name, told[name]) for name in TERMS}),
            measure_every=self.measure_every,
            penalty=self.penalty,
            device=self.device,
        )
