"""The choices behind a growing world, as plain values that any caller can write.

    GrowSettings(task="digits", horizon=10, rent=(0.0, 0.05)).world(1, rng_seed=0)

A term is a number or a range to draw from anew in every episode.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any, Final

from esper.contracts.errors import BadInput
from esper.contracts.observation import Observation
from esper.environment.growing import OFFERED, GrowingWorld
from esper.environment.terms import Terms
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

Term = float | tuple[float, float]

TERMS: Final[Mapping[str, float]] = {"rent": -inf, "budget": 0.0, "rate": 0.0}
"""What an episode can be told, and the least it can be."""


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
    blueprints: tuple[str, ...] = OFFERED
    """What may be planted."""
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
        told = {name: getattr(self, name) for name in TERMS} | dict(options or {})
        if unknown := told.keys() - TERMS.keys():
            raise BadInput(
                f"options may have {', '.join(TERMS)}; got {min(map(repr, unknown))}."
            )
        task = find_task(self.task) if isinstance(self.task, str) else self.task
        changed = {
            name: value
            for name in ("horizon", "decision_every")
            if (value := getattr(self, name)) is not None
        }
        return RememberingWorld(
            replace(task, **changed),
            num_envs,
            rng_seed,
            blueprints=tuple(self.blueprints),
            seeds_per_slot=self.seeds_per_slot,
            terms=Terms(**{name: _range(name, told[name]) for name in TERMS}),
            measure_every=self.measure_every,
            penalty=self.penalty,
            device=self.device,
        )


def _range(name: str, term: Any) -> tuple[float, float]:  # noqa: ANN401
    """A term as a range; refuses what cannot be drawn from."""
    try:
        low, high = (float(part) for part in _pair(term))
    except (TypeError, ValueError):
        low, high = inf, -inf
    if not (isfinite(low) and isfinite(high) and TERMS[name] <= low <= high):
        least = "" if TERMS[name] == -inf else f" from {TERMS[name]:g}"
        raise BadInput(
            f"{name} must be a finite number{least} or a range (low, high); got "
            f"{term!r}."
        )
    return low, high


def _pair(term: Any) -> tuple[Any, Any]:  # noqa: ANN401
    if isinstance(term, tuple | list):
        low, high = term
        return low, high
    return term, term
