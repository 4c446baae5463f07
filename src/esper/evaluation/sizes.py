"""Controls that choose a size of a network, computed from networks of every size.

    best-size   the one size that is best for a task, in hindsight
    envelope    at every stop the size that is best there, in hindsight
    halving     successive halving over the sizes, for as much compute in all as each
                of the others has (https://arxiv.org/abs/1502.07943)

Halving trains all sizes up to one stop, those that do best on decision rows up to
another, and the best of them on (`HALVING`), on the way in equal parts. What it has
between two stops is interpolated along the log of compute. Arrays of worth, score less
rent, are `[size, stop, host]`, smallest size first.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from esper.contracts.errors import InvalidInputError
from esper.environment.clock import STOPS, Clock
from esper.runs.records import EvalResult, Floats

HALVING: Final = ((5, 2), (2, 4), (1, 5))
"""Of successive halving: how many sizes are left, and up to which stop from the first.
With stops a factor of two apart, five sizes cost 15/16 of the compute of the last."""
LAST: Final = HALVING[-1][1]
"""The stop at which it ends."""


def check_halving(clock: Clock) -> None:
    """Refuse an episode within whose compute the sizes cannot be trained."""
    stops = int((clock.weights() > 0).sum())
    if clock.kind != "compute" or clock.stop != "anytime" or stops < STOPS:
        raise InvalidInputError(
            f"'halving' needs {STOPS} stops; clock {clock.kind!r} has {stops} here. "
            "Set world.clock to compute, world.stop to anytime and a longer horizon."
        )


def best_size(worth: Floats) -> int:
    """The size with the best mean over stops and hosts."""
    return int(worth.mean(axis=(1, 2)).argmax())


def best_sizes(worth: Floats) -> NDArray[np.int64]:
    """The size with the best mean over hosts at every stop."""
    best: NDArray[np.int64] = worth.mean(axis=2).argmax(axis=0)
    return best


def survivors(shown: Floats, host: int) -> list[list[int]]:
    """Sizes in every round of halving, those that do best on decision rows first."""
    left, stop, rounds = [*range(len(shown))], 0, []
    for keep, until in HALVING:
        left = sorted(left, key=lambda size: -shown[size, stop, host])[:keep]
        rounds.append(left)
        stop = min(until, shown.shape[1] - 1)
    return rounds


def halved(figure: Floats, shown: Floats) -> Floats:
    """A figure of the size that halving ends with, where it ends, of every host."""
    stop = min(LAST, shown.shape[1] - 1)
    hosts = range(shown.shape[2])
    return np.array([figure[survivors(shown, h)[-1][0], stop, h] for h in hosts])


def size_control(name: str, ladder: Sequence[EvalResult]) -> EvalResult:
    """One of the `SIZES` controls of a task.

    Args:
        name: Of the control.
        ladder: Results of static networks, with what they had at the stops.
    """
    stops = [arm.stops for arm in ladder if arm.stops is not None]
    if name == "best-size":
        return max(ladder, key=lambda arm: float(arm.returns.mean()))
    worth = np.stack([each.worth for each in stops])
    # A return is the weighted worth less that of the plain host, the same for all.
    weights = stops[0].weights
    start = weights @ worth[0] - ladder[0].returns
    unmeasured = np.full(len(start), np.nan)
    if name == "envelope":
        best = best_sizes(worth)
        last: EvalResult = replace(
            ladder[int(best[-1])],
            returns=weights @ worth[best, np.arange(len(best))] - start,
            area=unmeasured,
            seconds=unmeasured,
        )
        return last
    first = np.stack([each.first for each in stops])
    hosts = range(len(start))
    courses = [_course(worth[..., h], first[:, h], stops[0].times) for h in hosts]
    left = [survivors(worth, host) for host in hosts]
    size = np.array([rounds[-1][0] for rounds in left])
    spent = np.stack([each.spent for each in stops])

    def at_end(figure: str) -> Floats:
        return halved(np.stack([getattr(each, figure) for each in stops]), worth)

    def of_size(figure: str) -> NDArray[Any]:
        own: NDArray[Any] = np.stack([getattr(arm, figure) for arm in ladder])
        chosen: NDArray[Any] = own[size, [*hosts]]
        return chosen

    return EvalResult(
        returns=np.array(courses) @ weights - start,
        score=at_end("score"),
        test=at_end("test"),
        area=unmeasured,
        added=of_size("added"),
        macs=of_size("macs"),
        training_macs=np.array([_cost(spent[..., h], left[h]) for h in hosts]),
        seconds=unmeasured,
        panicked=of_size("panicked"),
    )


def _course(worth: Floats, first: Floats, times: Floats) -> Floats:
    """The best that halving has at every stop, if the compute of all sizes counts.

    Args:
        worth: On decision rows, `[size, stop]`.
        first: The same before training, `[size]`.
        times: Compute at the stops.
    """
    rounds = survivors(worth[..., None], 0)
    clock = np.log2(1 + np.array([0.0, *times]))
    course = []
    for total in times:
        reached, rest = 0.0, float(total)
        for left, (_, until) in zip(rounds, HALVING, strict=True):
            at = min(reached + rest / len(left), times[until])
            if at < times[until] or until == LAST:
                break
            rest -= len(left) * (at - reached)
            reached = at
        curves = [[first[size], *worth[size]] for size in left]
        course.append(max(np.interp(np.log2(1 + at), clock, own) for own in curves))
    return np.array(course)


def _cost(spent: Floats, rounds: Sequence[Sequence[int]]) -> float:
    """Multiply-adds of all sizes up to where each ended, of `[size, stop]`."""
    each = np.zeros(len(spent))
    for left, (_, until) in zip(rounds, HALVING, strict=True):
        each[[*left]] = spent[[*left], until]
    return float(each.sum())
