"""The statistics of judging, spelled out: every pair, sign, subset and resample.

A sample is a list of tasks, each a list of seeds.
"""

import math
from fractions import Fraction
from itertools import chain, combinations, product


def interquartile_mean(tasks):
    everything = sorted(chain.from_iterable(tasks))
    for _ in range(len(everything) // 4):
        everything.remove(min(everything))
        everything.remove(max(everything))
    return math.fsum(everything) / len(everything)


def mean_of_means(tasks):
    return math.fsum(math.fsum(task) / len(task) for task in tasks) / len(tasks)


def points_of(a, b):
    return 1.0 if a > b else 0.5 if a == b else 0.0


def every_draw(tasks):
    """Every way to draw as many seeds of each task as it has."""
    return product(*(product(task, repeat=len(task)) for task in tasks))


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
