"""Draws of members and seeds, written out cell by cell."""

import math
from itertools import product


def cells(arm, members, seeds):
    """All cells of one draw, by task.

    `arm` is a list of tasks, each a list of members, each a list of seeds; `members`
    and `seeds` (of each task) are the places that were drawn, one by one.
    """
    return [
        [task[m][s] for m in members for s in drawn if not math.isnan(task[m][s])]
        for task, drawn in zip(arm, seeds, strict=True)
    ]


def interquartile_mean(tasks):
    everything = sorted(figure for task in tasks for figure in task)
    if not everything:
        return math.nan
    cut = len(everything) // 4
    kept = everything[cut : len(everything) - cut]
    return math.fsum(kept) / len(kept)


def mean_of_means(tasks):
    if not all(tasks):
        return math.nan
    return math.fsum(math.fsum(task) / len(task) for task in tasks) / len(tasks)


def improvement(x, y, members, others, seeds):
    """`others` is None if both follow the same members."""
    tasks = []
    for ours, theirs, drawn in zip(x, y, seeds, strict=True):
        points = []
        for s in drawn:
            pairs = [(m, m) for m in members]
            if others is not None:
                pairs = list(product(members, others))
            for m, k in pairs:
                a, b = ours[m][s], theirs[k][s]
                if not (math.isnan(a) or math.isnan(b)):
                    points.append(0.5 if a == b else float(a > b))
        tasks.append(points)
    return mean_of_means(tasks)


def every_draw(members, seeds):
    """Every way to draw all members but one, and as many seeds as a task has."""
    return product(
        product(range(members), repeat=max(1, members - 1)),
        product(*(product(range(count), repeat=count) for count in seeds)),
    )


def percentile(values, share):
    """Linear between the two nearest of all values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
