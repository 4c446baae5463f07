"""Intervals over hosts and over trained controllers together."""

from collections.abc import Sequence

import numpy as np

from esper.evaluation.statistics import (
    RESAMPLES,
    Counts,
    Floats,
    Interval,
    _iqm,
    _mean,
    _pair,
    _tasks,
    bootstrap,
)


def crossed_interval(
    tasks: Sequence[Floats],
    less: Sequence[Floats] | None = None,
    *,
    plain: bool = False,
    resamples: int = RESAMPLES,
) -> Interval:
    """Interval over seeds and controllers of scores `[controller, seed]` of each task.

    Seeds are drawn within each task, controllers once for all tasks; the count of a
    score is the product of both. Scores in `less` are subtracted. Arms without
    controllers have one row. `plain` takes the mean over tasks instead of the
    interquartile mean.
    """
    arms = [[*map(np.atleast_2d, arm)] for arm in (tasks, less) if arm is not None]
    controllers = max(len(task) for arm in arms for task in arm)
    # An arm without controllers is repeated for each controller of the other arm.
    same = [
        [np.broadcast_to(task, (controllers, task.shape[1])).ravel() for task in arm]
        for arm in arms
    ]
    sizes = [task.shape[1] for task in arms[0]]
    ours, *others = [_tasks(arm) for arm in same]
    for theirs in others:
        _pair(ours, theirs)
    center = _mean if plain else _iqm

    def statistic(*counts: Counts) -> Floats:
        *seeds, drawn = counts if controllers > 1 else (*counts, np.ones((1, 1), int))
        cells = [
            (drawn[:, :, None] * count[:, None]).reshape(len(count), -1)
            for count in seeds
        ]
        return center(ours, cells) - sum(center(theirs, cells) for theirs in others)

    groups = [*sizes, controllers] if controllers > 1 else sizes
    return bootstrap(groups, statistic, resamples=resamples)
