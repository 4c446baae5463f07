"""The records of a run: one round of training, and evaluations on hosts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from esper.tamiyo.registry import CONTROLLERS

if TYPE_CHECKING:
    from esper.simic.agent.metrics import UpdateRecord

ENDLESS: Final = 1_000_000
"""Number of rounds if only time limits the training."""
STATIC: Final = ("static", "longer")
"""Networks that do not grow, matched to the size or compute of another arm."""
LADDER: Final[Mapping[str, int]] = {f"static-x{n}": n for n in (1, 2, 4, 8, 16)}
"""Networks that do not grow, with hidden layers this many times as wide."""
SIZES: Final = ("best-size", "envelope", "halving")
"""Choices among the ladder, computed from its results."""

VALIDATION: Final = "validation"
"""Stage of the periodic evaluation, which selects the best checkpoint."""
TEST: Final = "test"
"""Stage of the final evaluation, on hosts that nothing was selected on."""

Floats = NDArray[np.float64]


def is_learned(name: str) -> bool:
    """Whether an arm of this name is a trained controller."""
    return name not in {*CONTROLLERS, *STATIC, *LADDER, *SIZES}


def reference_of(names: Iterable[str]) -> str | None:
    """The reference of static arms: the first trained arm, else `early`."""
    known = list(names)
    return min(filter(is_learned, known), default="early" if "early" in known else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRecord:
    """One round: a rollout and an update."""

    round: int
    """Counted from 1."""
    rounds: int
    env_steps: int
    """Decisions since the start, over all environments."""
    seconds: float
    """Time since the start."""
    episodes: int = 0
    """Episodes that ended in this rollout."""
    mean_return: float
    """Mean return of the episodes that ended in this rollout; NaN if none did. In
    relative worlds each counts as at least -1 and at most 1."""
    iqm_return: float = nan
    """Interquartile mean of the same returns."""
    mean_length: float = nan
    """Their mean length in steps."""
    recent_return: float = nan
    """Mean return of the last 100 episodes; NaN before the first one ends."""
    recent_length: float = nan
    """Mean length in steps of the same episodes."""
    learning_rate: float
    """Learning rate of the update."""
    mean_score: float | None = None
    """Mean final score of the episodes that ended, if the world has scores."""
    added: float | None = None
    """Mean number of parameters added, as a multiple of the host's."""
    update: "UpdateRecord"

    @property
    def refused(self) -> bool:
        """Whether all updates of the round were skipped as not finite."""
        return self.update.refused > 0 and self.update.steps_taken == 0

    def headline(self, *, relative: bool = False, details: bool = False) -> str:
        """The round in one line; `relative` if returns are fractions of errors."""
        parts = [f"return {self.mean_return:+.4f}"]
        if relative:
            both = f"{self.mean_return:+.1%} (IQM {self.iqm_return:+.1%})"
            parts = [f"{both} of the errors removed, net of rent"]
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
    """Figures of every host at every stop, `[stop, host]`."""

    times: Floats
    """Times of the stops on the clock, `[stop]`."""
    weights: Floats
    """Their weights in the return, `[stop]`."""
    first: Floats
    """Worth before training, `[host]`."""
    worth: Floats
    """Score on the validation split, less rent."""
    score: Floats
    test: Floats
    spent: Floats
    """Multiply-adds of the training so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """The results of one controller, one value per host."""

    returns: Floats
    """Gain of score on the validation split, less rent. In a relative world: the
    fraction of the never-grown host's errors that was removed, net of rent."""
    score: Floats
    """Final accuracy on the validation split."""
    test: Floats
    """Final accuracy on the test split."""
    area: Floats
    """Mean accuracy on the validation split over the decisions."""
    added: Floats
    """Parameters added, as a multiple of the host's."""
    macs: Floats
    """Multiply-adds per row, as a multiple of the host's."""
    training_macs: Floats
    """Multiply-adds of the training, measurements included."""
    seconds: Floats
    """Time of the training, divided by the number of hosts."""
    panicked: NDArray[np.bool_]
    """Whether values of the host were not finite."""
    stops: StopFigures | None = None
    """Not stored."""


Results = Mapping[str, EvalResult]
"""Results of the policy by task."""


def bounded(returns: Floats) -> Floats:
    """Returns within [-1, 1]: what a user gains, with one ruined host as one host."""
    return np.clip(returns, -1.0, 1.0)


def interquartile_mean(figures: Floats) -> float:
    """Mean without the lowest and the highest quarter; NaN without figures."""
    cut = len(figures) // 4
    kept = np.sort(figures)[cut : len(figures) - cut]
    return float(kept.mean()) if len(kept) else nan


def mean_return(results: Results) -> float:
    """Mean of bounded returns, over tasks with equal weights."""
    means = [float(bounded(result.returns).mean()) for result in results.values()]
    return sum(means) / len(means)


def iqm_return(results: Results) -> float:
    """Interquartile mean of the returns of all hosts."""
    return interquartile_mean(np.concatenate([r.returns for r in results.values()]))
