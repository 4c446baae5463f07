"""Is a network that was widened as good as one that had its size from the start?

Written down before any run that is counted:

- Six tasks, one and two hidden layers. The host has 8 units in each, is widened
  fourfold (new units of neighbouring layers feed each other) before the first batch or
  after a tenth of the run, and is compared with the static network of the shape that it
  is exported in, 32 units in each, at equal batches: 480 of 64 rows, AdamW, one cycle
  of the learning rate over the run.
- Every arm's learning rate is the best of one grid for each task, by the decision rows
  of three random seeds that are not counted. Counted: twelve others, paired: the same
  rows, the same order of batches.
- A difference is a share of the errors that the host makes if it is never widened.

About five minutes on two cores.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from benchmarks import timing
from benchmarks.anytime import pooled
from benchmarks.timetables import (
    NEVER,
    Episodes,
    Floats,
    Study,
    best_rates,
    over_stops,
    train_all,
)
from benchmarks.timing import Report
from esper.tamiyo.schedule import Schedule

TASKS: Final = ("letter", "mnist1d", "penbased", "satimage", "optdigits", "texture")
RATES: Final = (4e-3, 8e-3, 1.6e-2, 3.2e-2)
BATCHES: Final = 480
WIDENED: Final = {
    moment: Schedule(blueprint="widen_x4", count=1, start=start, every=0.0)
    for moment, start in (("at the start", 0.0), ("after a tenth", 0.1))
}
SEEDS, TUNING = 12, 3


def run(processes: int = 2) -> list[Report]:
    """Tune, train and compare; `--processes` trainings at the same time."""
    quick = timing.QUICK
    tasks, rates, seeds = (TASKS[1:2], RATES[:1], 2) if quick else (TASKS, RATES, SEEDS)
    batches = 40 if quick else BATCHES
    studies = [
        Study(name, 32, layers, batches, "end", 1 / 4)
        for name in tasks
        for layers in (1, 2)
    ]
    arms = [
        (study, *kind)
        for study in studies
        for kind in (
            (0.25, NEVER),
            (1.0, NEVER),
            *((0.25, w) for w in WIDENED.values()),
        )
    ]
    processes = 1 if quick else processes
    tuned = best_rates(arms, rates, TUNING, 2_000, processes)
    best = {
        arm: rates[int(np.argmax([over_stops(c, 0.0, "score").mean() for c in curves]))]
        for arm, curves in tuned.items()
    }
    many = [Episodes(*arm, best[arm], seeds, 3_000) for arm in arms]
    found = dict(zip(arms, train_all(many, processes), strict=True))
    return tables(studies, {arm: over_stops(found[arm], 0.0) for arm in arms}, best)


def tables(
    studies: Sequence[Study],
    test: dict[tuple[Study, float, Schedule], Floats],
    rates: dict[tuple[Study, float, Schedule], float],
) -> list[Report]:
    """Every task, and all together."""
    each = Report(
        "Test score, %: never widened, as wide from the start, widened",
        ("task", "layers", "widened", "never", "static", "grown", "share", "rates"),
    )
    shares: dict[tuple[int, str], list[Floats]] = {}
    for study in studies:
        never, static = (test[study, share, NEVER] for share in (0.25, 1.0))
        for moment, schedule in WIDENED.items():
            grown = test[study, 0.25, schedule]
            share = (grown - static) / (1 - never.mean())
            shares.setdefault((study.layers, moment), []).append(share)
            each.add(
                study.name,
                study.layers,
                moment,
                *(100 * one.mean() for one in (never, static, grown)),
                share.mean(),
                f"{rates[study, 1.0, NEVER]:g} {rates[study, 0.25, schedule]:g}",
            )
    pool = Report(
        "Widened less static, as a share of the errors of the host that never is",
        ("layers", "widened", "difference", "95 % interval"),
    )
    groups: dict[tuple[int | str, str], list[Floats]] = {**shares}
    together = zip(*shares.values(), strict=True)
    groups["all", "all"] = [np.concatenate(found) for found in together]
    for (layers, moment), found in groups.items():
        interval = pooled(found)
        bounds = f"{interval.low:+.4f} {interval.high:+.4f}"
        pool.add(layers, moment, interval.estimate, bounds)
    return [each, pool]
