"""What a run records: one round of training, and an evaluation on hosts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from esper.tamiyo.registry import CONTROLLERS

if TYPE_CHECKING:
    from esper.simic.agent.metrics import UpdateRecord

ENDLESS: Final = 1_000_000
"""Rounds of a training that only time ends."""
STATIC: Final = ("static", "longer")
"""Networks that are not grown, as large or as costly as another arm's."""
LADDER: Final[Mapping[str, int]] = {f"static-x{n}": n for n in (1, 2, 4, 8, 16)}
"""Networks that are not grown, with hidden layers so many times as wide."""
SIZES: Final = ("best-size", "envelope", "halving")
"""Choices among them, computed from their results."""

VALIDATION: Final = "validation"
"""Stage of the periodic evaluation, which selects the best checkpoint."""
TEST: Final = "test"
"""Stage of the final evaluation, on hosts that nothing was selected on."""

Floats = NDArray[np.float64]


def is_learned(name: str) -> bool:
    """Whether an arm of this name is a trained controller."""
    return name not in {*CONTROLLERS, *STATIC, *LADDER, *SIZES}


def reference_of(names: Iterable[str]) -> str | None:
    """The arm that static ones are measured by: the first learned one, else `early`."""
    known = list(names)
    return min(filter(is_learned, known), default="early" if "early" in known else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round: a rollout and an update."""

    round: int
    """Counted from 1."""
    rounds: int
    env_steps: int
    """Decisions taken since the start, over all environments."""
    seconds: float
    """Time since the start."""
    mean_return: float
    """Mean return of the episodes that ended in this rollout; NaN if none did."""
    learning_rate: float
    """Of the update."""
    mean_score: float | None = None
    """Mean final score of the episodes that ended, where the world knows one."""
    added: float | None = None
    """Parameters that they added, as a multiple of the host's, mean."""
    update: "UpdateRecord"

    @property
    def refused(self) -> bool:
        """Whether every update of the round was refused as not finite."""
        return self.update.refused > 0 and self.update.steps_taken == 0

    def headline(self, *, relative: bool = False, details: bool = False) -> str:
        """The round in one line.

        Args:
            relative: Whether returns are shares of the never-grown host's errors.
            details: Whether to tell what only people who tune a learner read.
        """
        parts = [f"return {self.mean_return:+.4f}"]
        if relative:
            parts = [f"{self.mean_return:+.1%} of the errors removed, net of rent"]
        if self.mean_score is not None and self.added is not None:
            size = f"{1 + self.added:.2f} times as large"
            parts += [f"score {self.mean_score:.3f}", size]
        if details:
            parts += [
                f"kl {self.update.kl:.4f}",
                f"entropy {self.entropies()}",
                f"{self.env_steps / self.seconds:,.0f} env-steps/s",
            ]
        return "  ".join(parts)

    def entropies(self) -> str:
        """Entropy of every head that had a choice."""
        return " ".join(
            f"{name} {head.entropy:.2f}"
            for name, head in self.update.heads.items()
            if isfinite(head.entropy) and head.openness > 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StopFigures:
    """What every host had at every stop, `[stop, host]`."""

    times: Floats
    """Moments of the stops by the clock, `[stop]`."""
    weights: Floats
    """What they weigh in the return, `[stop]`."""
    first: Floats
    """Worth before training, `[host]`."""
    worth: Floats
    """Score on the decision rows, less rent."""
    score: Floats
    test: Floats
    spent: Floats
    """Multiply-adds of the training so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The results of one controller, host by host."""

    returns: Floats
    """Score that was gained on the decision rows, less rent; in a relative world the
    share of the never-grown host's errors that was removed, net of rent."""
    score: Floats
    """Share of decision rows that the final network guesses right."""
    test: Floats
    """Share of test rows that the final network guesses right."""
    area: Floats
    """Mean share of decision rows that were guessed right, over the decisions."""
    added: Floats
    """Parameters added, as a multiple of the host's."""
    macs: Floats
    """Multiply-adds per row, as a multiple of the host's."""
    training_macs: Floats
    """Multiply-adds that the training took, with every pass that was only a look."""
    seconds: Floats
    """Time that the training took, hosts side by side."""
    panicked: NDArray[np.bool_]
    """Whether the host's numbers were no longer finite."""
    stops: StopFigures | None = None
    """Not stored."""


Results = Mapping[str, EvalResult]
"""Results of the policy by task."""


def mean_return(results: Results) -> float:
    """Mean return over tasks that count alike."""
    means = [float(judged.returns.mean()) for judged in results.values()]
    return sum(means) / len(means)
