"""Baselines that choose a network size, computed from networks of every size.

    best-size   the size with the best return on a task, in hindsight
    envelope    at every stop the size that is best there, in hindsight
    halving     successive halving over the sizes, within the compute of one arm
                (https://arxiv.org/abs/1502.07943)

Halving trains all sizes up to one stop, the best on the validation split up to another,
and the best of these on (`HALVING`). Its worth between two stops is interpolated along
the log of compute. Arrays of worth (score less rent) are `[size, stop, host]`.
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
"""Number of sizes left, and the stop they train to. With stops a factor of two apart,
five sizes cost 15/16 of the compute of the last stop."""
LAST: Final = HALVING[-1][1]
"""The stop at which halving ends."""


def check_halving(clock: Clock) -> None:
    """Refuse an episode whose compute is too small to train the sizes."""
    stops = int((clock.weights() > 0).sum())
    if clock.kind != "compute" or clock.stop != "anytime" or stops < STOPS:
        raise InvalidInputError(
            f"'halving' needs {STOPS} stops; clock {clock.kind!r} has {stops} here. "
            "Set world.clock to compute, world.stop to anytime and a longer horizon."
        )


def best_sizes(worth: Floats) -> NDArray[np.int64]:
    """The size with the best mean over hosts at every stop."""
    best: NDArray[np.int64] = worth.mean(axis=2).argmax(axis=0)
    return best


def survivors(shown: Floats, host: int) -> list[list[int]]:
    """Sizes in every round of halving, best on the validation split first."""
    left, stop, rounds = [*range(len(shown))], 0, []
    for keep, until in HALVING:
        left = sorted(left, key=lambda size: -shown[size, stop, host])[:keep]
        rounds.append(left)
        stop = min(until, shown.shape[1] - 1)
    return rounds


def halved(figure: Floats, shown: Floats) -> Floats:
    """A figure of every host where halving ends, of the size it ends with."""
    stop = min(LAST, shown.shape[1] - 1)
    hosts = range(shown.shape[2])
    return np.array([figure[survivors(shown, h)[-1][0], stop, h] for h in hosts])


def size_baseline(name: str, ladder: Sequence[EvalResult]) -> EvalResult:
    """The result of one of the `SIZES` baselines, from results with their stops."""
    stops = [arm.stops for arm in ladder if arm.stops is not None]
    if name == "best-size":
        return max(ladder, key=lambda arm: float(arm.returns.mean()))
    worth = np.stack([each.worth for each in stops])
    # A return is the weighted worth less the plain host's, which all arms share.
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
    """The best worth at every stop, if the compute of all sizes counts."""
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
    """Multiply-adds of all sizes up to where each ended, from `[size, stop]`."""
    each = np.zeros(len(spent))
    for left, (_, until) in zip(rounds, HALVING, strict=True):
        each[[*left]] = spent[[*left], until]
    return float(each.sum())
