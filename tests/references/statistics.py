"""The statistics of judging, spelled out: every pair, sign, subset and resample.

A sample is a list of tasks, each a list of members, each a list of seeds.
"""

import math
from fractions import Fraction
from itertools import chain, combinations, product


def interquartile_mean(tasks):
    """Of a list of tasks, each a flat list of figures."""
    everything = sorted(chain.from_iterable(tasks))
    if not everything:
        return math.nan
    for _ in range(len(everything) // 4):
        everything.remove(min(everything))
        everything.remove(max(everything))
    return math.fsum(everything) / len(everything)


def mean_of_means(tasks):
    if not all(tasks):
        return math.nan
    return math.fsum(math.fsum(task) / len(task) for task in tasks) / len(tasks)


def paired_improvement(x, y, members, others, seeds):
    """Of one draw; `others` is None if both follow the same members."""
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
                    points.append(points_of(a, b))
        tasks.append(points)
    return mean_of_means(tasks)


def points_of(a, b):
    return 1.0 if a > b else 0.5 if a == b else 0.0


def cells(arm, members, seeds):
    """All cells of one draw, by task; members and seeds are the places drawn."""
    return [
        [task[m][s] for m in members for s in drawn if not math.isnan(task[m][s])]
        for task, drawn in zip(arm, seeds, strict=True)
    ]


def every_draw(members, seeds):
    """Every way to draw all members but one, and as many seeds as a task has."""
    return product(
        product(range(members), repeat=max(1, members - 1)),
        product(*(product(range(count), repeat=count) for count in seeds)),
    )


def signed_ranks(differences):
    """Two-sided p-value; every choice of signs is tried."""
    left = [d for d in differences if d != 0]
    sizes = sorted(abs(d) for d in left)
    ranks = []
    for d in left:
        places = [i + 1 for i, size in enumerate(sizes) if size == abs(d)]
        ranks.append(Fraction(sum(places), len(places)))
    seen = sum(rank for rank, d in zip(ranks, left, strict=True) if d > 0)
    sums = [
        sum(rank for rank, positive in zip(ranks, signs, strict=True) if positive)
        for signs in product((False, True), repeat=len(left))
    ]
    below = Fraction(sum(s <= seen for s in sums), len(sums))
    above = Fraction(sum(s >= seen for s in sums), len(sums))
    return float(min(Fraction(1), 2 * min(below, above)))


def holm(p_values):
    """Closed testing: a test passes if every set of tests that holds it passes."""
    tests = range(len(p_values))
    sets = [s for size in tests for s in combinations(tests, size + 1)]
    return [
        max(min(1.0, len(s) * min(p_values[i] for i in s)) for s in sets if test in s)
        for test in tests
    ]
