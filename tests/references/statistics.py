"""The statistics of judging, spelled out: every pair, sign, subset and resample."""

import math
from fractions import Fraction
from itertools import chain, combinations, product


def interquartile_mean(scores):
    """`scores` is a list of tasks, each a list of seeds."""
    everything = sorted(chain.from_iterable(scores))
    for _ in range(len(everything) // 4):
        everything.remove(min(everything))
        everything.remove(max(everything))
    return math.fsum(everything) / len(everything)


def probability_of_improvement(x, y):
    per_task = []
    for ours, theirs in zip(x, y, strict=True):
        points = [_points(a, b) for a in ours for b in theirs]
        per_task.append(sum(points) / len(points))
    return float(sum(per_task) / len(per_task))


def paired_improvement(x, y):
    points = [
        _points(a, b)
        for ours, theirs in zip(x, y, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return float(sum(points) / len(points))


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


def stratified_resamples(scores):
    """Every way to draw the seeds of each task anew; all are equally likely."""
    return product(*(product(task, repeat=len(task)) for task in scores))


def hierarchical_resamples(scores):
    """Every way to draw controllers and then, for each one drawn, its seeds."""
    for controllers in product(scores, repeat=len(scores)):
        yield from product(*(stratified_resamples(each) for each in controllers))


def hierarchical_resamples_of_shared_seeds(scores):
    """The same, but one draw of seeds serves all controllers."""
    places = [range(len(task)) for task in scores[0]]
    for controllers in product(scores, repeat=len(scores)):
        for seeds in stratified_resamples(places):
            yield [
                [
                    [task[seed] for seed in drawn]
                    for task, drawn in zip(each, seeds, strict=True)
                ]
                for each in controllers
            ]


def _points(a, b):
    return Fraction(1) if a > b else Fraction(1, 2) if a == b else Fraction(0)
