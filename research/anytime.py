"""Does growing pay when compute counts and nobody knows when training will end?

Runs before this one led to the design below: the first charged networks for looks that
were not taken; timetables were added after 48 had been tried on seven of these tasks,
test rows included; a third chose timetables on drawn tasks whatever size did for them;
a fourth trained all networks at constant learning rates, and learning rates that fall
with compute turned out to be better for static and, more so, for growing networks.
Random seeds that were used then are not used here. Written down before the seeds that
count were run:

- Eight tasks; flat rows, one hidden layer. W = 64 units is the largest size, W/16 the
  starting host, C the compute of 600 batches of W, for every task. The learning rate
  of every network falls with compute to the power of -0.3, whatever C is. The test
  score is taken at seven stops, C/64, C/32, ... C; what counts is its mean over them
  less rent times the size beyond the starting host.
- Neither timetables nor static networks look at decision rows, so nothing is charged
  for that.
- Static arms: W/16, W/8, W/4, W/2, W from the start. Growing arms: timetables that
  double the width at given octaves of compute. One of them is chosen for each rent, by
  the decision rows of tasks that are drawn (`tasks.family`), never of these: of the
  first 40 that are drawn, those for which size matters, where W is at least 2 points
  above W/16 at C. With `--chosen-on same` one is chosen by decision rows of random
  seeds of these tasks that are not counted.
- Every arm's learning rate is the best of a grid for each task and rent, by the
  decision rows of three random seeds that are not counted. Counted: ten others, paired.
- Compared with the best static size *chosen per task in hindsight*, by the very figures
  that are reported; with W; with the envelope, the best static size at every stop; and
  with successive halving over the five sizes within C, at its end.
- A second time with the scale unknown: hosts of 4 to 32 units, statics up to eight
  times as wide, and C from 60 to 6,000 batches of the host, drawn on a log scale, four
  times for every task; here the best multiple of the host's size is chosen per task in
  hindsight, and the timetable on drawn tasks at drawn scales.
- The same in seconds instead of multiply-adds: those of this engine, and of plain
  PyTorch on one thread, where small layers cost nearly as much as large ones.

The whole takes about half an hour on two cores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Generator

from benchmarks import timing
from benchmarks.timing import Report, alternate
from esper.contracts.errors import unknown
from esper.environment.cohort import Cohort
from esper.evaluation.sizes import best_sizes, halved
from esper.evaluation.statistics import Interval, mean_interval
from esper.tamiyo.schedule import Schedule
from research.timetables import (
    NEVER,
    Curves,
    Episodes,
    Floats,
    Study,
    best_rates,
    over_stops,
    task_of,
    train_all,
)

TASKS: Final = (
    "letter",
    "mnist1d",
    "penbased",
    "satimage",
    "optdigits",
    "texture",
    "text",
    "mnist5k",
)
DRAWN: Final = tuple(f"drawn {number}" for number in range(40))
MATTERS: Final = 0.02
"""How far W is above W/16 at C, at least, on drawn tasks for which size matters."""
RENTS: Final = (0.0, 0.002, 0.01)
RATES: Final = (8e-3, 1.6e-2, 3.2e-2, 6.4e-2, 1.28e-1)
TIMETABLES: Final = tuple(
    Schedule(count=count, start=start, every=every, scale="octaves")
    for start in (4.0, 5.5)
    for every in (1.67, 2.33, 3.0)
    for count in (1, 2, 3, 4)
    if count > 1 or every == 3.0  # one doubling has no interval
)
SCALES: Final = 4
"""Drawn hosts and lengths of every task, where the scale is unknown."""
SEEDS: Final = 10
TUNING: Final = 3
CHOOSING: Final = 2
Arm = tuple[Study, float, Schedule]
Counted = Mapping[tuple[Arm, float], Curves]
"""Curves of every arm at the learning rate that is best for a rent."""


def run(
    processes: int = 2,
    plot: str = "",
    scales: int = SCALES,
    chosen_on: str = "drawn",
    rng_seed: int = 4_000,
) -> list[Report]:
    """Choose timetables, tune, train and compare.

    Args:
        processes: Trainings at the same time.
        plot: A file to draw the curves into, as SVG.
        scales: Draws of each task where the scale is unknown; 0 leaves that out.
        chosen_on: Where timetables are chosen: on `drawn` tasks, or on other random
            seeds of the `same` tasks.
        rng_seed: Of the hosts on which timetables are chosen; a thousand more for
            learning rates, two thousand more for those that count.
    """
    if chosen_on not in ("drawn", "same"):
        raise unknown("chosen_on must be drawn or same; got", chosen_on, ["drawn"])
    quick = timing.QUICK
    tasks, drawn = (TASKS[1:2], DRAWN[:1]) if quick else (TASKS, DRAWN)
    tables = TIMETABLES[:2] if quick else TIMETABLES
    rates, seeds = (RATES[:1], 2) if quick else (RATES, SEEDS)
    batches = {"batches": 4} if quick else {}
    studies = [Study(name, **batches) for name in tasks]
    places = [Study(name, **batches) for name in drawn]
    processes = 1 if quick else processes
    if chosen_on == "same":
        places = studies
    elif not quick:
        places = where_size_matters(places, rates[1:4], processes, rng_seed)
    chosen = choose(places, tables, rates[1:4] or rates, processes, rng_seed)
    counted = count(studies, chosen, rates, seeds, processes, rng_seed)
    if plot:
        draw(counted, chosen, Path(plot))
    overall = compared(counted, chosen)
    overall.notes.append(f"Chosen on {len(places)} tasks.")
    reports = [
        overall,
        by_task(counted, chosen),
        in_seconds(counted, chosen),
    ]
    if quick or not scales:
        return reports
    where = scaled(drawn[:16], 1, 0)
    anywhere = choose(where, tables[::3], rates[1:4], processes, rng_seed)
    where = scaled(tasks, scales, 1)
    found = count(where, anywhere, rates[1:], TUNING, processes, rng_seed)
    return [*reports, at_any_scale(found, anywhere)]


def scaled(tasks: Sequence[str], scales: int, rng_seed: int) -> list[Study]:
    """Hosts and compute of any scale, so many times for every task."""
    chance = np.random.default_rng(rng_seed)
    studies = []
    for name in tasks:
        for _ in range(scales):
            units = int(4 * 2 ** chance.integers(0, 4))
            compute = float(60 * 100 ** chance.random())
            study = Study(name, largest=8 * units, start=1 / 8)
            ratio = study.host(1).macs / study.host(study.start).macs
            studies.append(replace(study, batches=compute / ratio))
    return studies


def where_size_matters(
    places: Sequence[Study], rates: Sequence[float], processes: int, rng_seed: int
) -> list[Study]:
    """The tasks on which the largest network ends well above the smallest."""
    arms = [(place, share, NEVER) for place in places for share in (place.start, 1.0)]
    found = best_rates(arms, rates, CHOOSING, rng_seed, processes)

    def end(place: Study, share: float) -> float:
        return max(curves.score[-1].mean() for curves in found[place, share, NEVER])

    return [each for each in places if end(each, 1.0) > end(each, each.start) + MATTERS]


def choose(
    places: Sequence[Study],
    tables: Sequence[Schedule],
    rates: Sequence[float],
    processes: int,
    rng_seed: int,
) -> dict[float, Schedule]:
    """The best timetable of each rent, by the decision rows of drawn tasks."""
    arms = [(place, place.start, table) for place in places for table in tables]
    found = best_rates(arms, rates, CHOOSING, rng_seed, processes)

    def worth(table: Schedule, rent: float) -> float:
        own = [found[place, place.start, table] for place in places]
        means = [
            max(over_stops(curves, rent, "score").mean() for curves in each)
            for each in own
        ]
        return float(np.mean(means))

    return {rent: max(tables, key=lambda t: worth(t, rent)) for rent in RENTS}


def count(
    studies: Sequence[Study],
    chosen: Mapping[float, Schedule],
    rates: Sequence[float],
    seeds: int,
    processes: int,
    rng_seed: int,
) -> Counted:
    """Curves of every arm for every rent, at its best learning rate for that rent."""
    tables = [*dict.fromkeys(chosen.values())]
    arms: list[Arm] = []
    for study in studies:
        arms += [(study, share, NEVER) for share in study.sizes]
        arms += [(study, study.start, table) for table in tables]
    tuned = best_rates(arms, rates, TUNING, rng_seed + 1_000, processes)
    wanted = {
        (arm, rent): Episodes(
            *arm, _best(tuned[arm], rates, rent), seeds, rng_seed + 2_000
        )
        for arm in arms
        for rent in RENTS
    }
    many = [*dict.fromkeys(wanted.values())]
    found = dict(zip(many, train_all(many, processes), strict=True))
    return {key: found[what] for key, what in wanted.items()}


def _best(curves: Sequence[Curves], rates: Sequence[float], rent: float) -> float:
    means = [over_stops(each, rent, "score").mean() for each in curves]
    return rates[int(np.nanargmax(means))]


def _studies(counted: Counted) -> list[Study]:
    return [*dict.fromkeys(arm[0] for arm, _ in counted)]


def _at_stops(curves: Curves, rent: float, rows: str = "test") -> Floats:
    """Score less rent at every stop, `[stop, host]`."""
    at = ~np.isnan(curves.test[:, 0])
    worth: Floats = getattr(curves, rows)[at] - rent * curves.added[at]
    return worth


def figures(
    counted: Counted,
    study: Study,
    grown: Schedule,
    rent: float,
) -> dict[str, Floats]:
    """Differences of the growing arm to each of the others, `[host]`, in points."""
    curves = [counted[(study, size, NEVER), rent] for size in study.sizes]
    static, shown = (
        np.stack([_at_stops(each, rent, rows) for each in curves])
        for rows in ("test", "score")
    )  # [size, stop, host]
    mine = _at_stops(counted[(study, study.start, grown), rent], rent)
    best = static[static.mean(axis=(1, 2)).argmax()]
    stops = np.arange(static.shape[1])
    envelope = static[best_sizes(static), stops]
    return {
        "the best size of the task": 100 * (mine - best).mean(axis=0),
        "the largest size": 100 * (mine - static[-1]).mean(axis=0),
        "the envelope": 100 * (mine.mean(axis=0) - envelope.mean()),
        "the largest size, at C": 100 * (mine - static[-1])[-1],
        "successive halving, at C": 100 * (mine[-1] - halved(static, shown)),
    }


def compared(counted: Counted, chosen: Mapping[float, Schedule]) -> Report:
    """The growing arm less each of the others, over all tasks."""
    report = Report(
        "Growing less ..., points of test score net of rent, mean over the stops",
        ("rent", "less", "difference", "95 % interval", "tasks above 0"),
        notes=[f"rent {rent}: {_words(table)}." for rent, table in chosen.items()],
    )
    for rent, table in chosen.items():
        each = [figures(counted, s, table, rent) for s in _studies(counted)]
        for name in each[0]:
            found = [one[name] for one in each]
            interval = pooled(found)
            ahead = sum(one.mean() > 0 for one in found)
            report.add(
                rent,
                name,
                interval.estimate,
                f"{interval.low:+.2f} {interval.high:+.2f}",
                f"{ahead} of {len(found)}",
            )
    return report


def at_any_scale(counted: Counted, chosen: Mapping[float, Schedule]) -> Report:
    """Growing less the best multiple of the host's size of each task."""
    report = Report(
        "The same where the scale is unknown: hosts of 4 to 32 units, any compute",
        ("rent", "less", "difference", "95 % interval", "tasks above 0"),
        notes=[f"rent {rent}: {_words(table)}." for rent, table in chosen.items()],
    )
    studies = _studies(counted)
    for rent, table in chosen.items():
        best: list[Floats] = []
        largest: list[Floats] = []
        for name in dict.fromkeys(study.name for study in studies):
            own = [study for study in studies if study.name == name]
            static = np.array(
                [
                    [over_stops(counted[(s, at, NEVER), rent], rent) for at in s.sizes]
                    for s in own
                ]
            )  # [scale, size, host]
            mine = np.array(
                [over_stops(counted[(s, s.start, table), rent], rent) for s in own]
            )
            size = int(static.mean(axis=(0, 2)).argmax())
            best.append(100 * (mine - static[:, size]).flatten())
            largest.append(100 * (mine - static[:, -1]).flatten())
        for name, found in (("best size", best), ("the largest size", largest)):
            interval = pooled(found)
            bounds = f"{interval.low:+.2f} {interval.high:+.2f}"
            ahead = sum(one.mean() > 0 for one in found)
            ahead_of = f"{ahead} of {len(found)}"
            report.add(rent, name, interval.estimate, bounds, ahead_of)
    return report


def pooled(found: Sequence[Floats]) -> Interval:
    """Mean over tasks of the mean over hosts, hosts resampled."""
    return mean_interval(found)


def by_task(counted: Counted, chosen: Mapping[float, Schedule]) -> Report:
    """Mean over the stops of every arm on every task, without rent."""
    rent = RENTS[0]
    names = [f"W/{round(1 / share)}" for share in _studies(counted)[0].sizes]
    report = Report(
        "Test score, %, mean over the stops, no rent",
        ("task", *names, "growing", "at C: W", "at C: growing"),
    )
    for study in _studies(counted):
        arms = [(study, share, NEVER) for share in study.sizes]
        grown = counted[(study, study.start, chosen[rent]), rent]
        means = [100 * over_stops(counted[arm, rent], rent).mean() for arm in arms]
        mine = _at_stops(grown, rent)
        largest = _at_stops(counted[arms[-1], rent], rent)
        report.add(
            study.name,
            *means,
            100 * mine.mean(),
            100 * largest[-1].mean(),
            100 * mine[-1].mean(),
        )
    return report


# Seconds.


def seconds_per_batch(study: Study, share: float) -> dict[str, float]:
    """Of one training batch: this engine's and plain PyTorch's, one thread."""
    host, task = study.host(share), task_of(study.name)
    chance = Generator().manual_seed(0)
    cohort = Cohort(1, host, batch=task.batch)
    network = host.build(chance)
    cohort.set_host(0, network)
    rows = task.splits(0).train
    x, y = rows.features.flatten(1).float(), rows.labels
    picked = torch.randint(0, len(y), (1, 8, task.batch), generator=chance)
    alpha = torch.zeros(1, 8, cohort.slots)
    still = alpha, alpha.bool()
    rates = torch.full((1, 8), 1e-3)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)

    def plain() -> None:
        optimizer.zero_grad()
        chosen = picked[0, 0]
        torch.nn.functional.cross_entropy(network(x[chosen]), y[chosen]).backward()
        optimizer.step()

    best = alternate(
        {
            "engine": lambda: cohort.train(x[None], y[None], picked, *still, rates),
            "PyTorch": plain,
        },
        seconds=0.2,
    )
    return {"engine": best["engine"] / 8, "PyTorch": best["PyTorch"]}


def in_seconds(counted: Counted, chosen: Mapping[float, Schedule]) -> Report:
    """The same comparison where time counts instead of multiply-adds."""
    report = Report(
        "Growing less the best size of the task, where seconds count, no rent",
        ("whose seconds", "difference", "95 % interval", "W over W/16, time per batch"),
        notes=["Scores between two stops are interpolated along the log of time."],
    )
    rent, found, ratio = RENTS[0], {"engine": [], "PyTorch": []}, {}
    for study in _studies(counted):
        costs = [seconds_per_batch(study, share) for share in study.sizes]
        macs = [study.host(share).macs for share in study.sizes]
        for whose, each in found.items():
            took = [cost[whose] for cost in costs]
            ratio.setdefault(whose, []).append(took[-1] / took[0])
            arms = [(study, share, NEVER) for share in study.sizes]
            arms.append((study, study.start, chosen[rent]))
            each.append(_by_time([counted[a, rent] for a in arms], macs, took))
    for whose, each in found.items():
        interval = pooled(each)
        report.add(
            whose,
            interval.estimate,
            f"{interval.low:+.2f} {interval.high:+.2f}",
            float(np.mean(ratio[whose])),
        )
    return report


def _by_time(
    arms: Sequence[Curves], macs: Sequence[float], took: Sequence[float]
) -> Floats:
    """Points of the last arm above the best other, at stops of equal time."""
    clocks, scores = [], []
    for curves in arms:
        seconds = np.interp(curves.macs, macs, took) * curves.batches
        at = ~np.isnan(curves.test[:, 0])
        clocks.append(seconds.cumsum(axis=0)[at])
        scores.append(curves.test[at])
    # From when all have been scored to when the first is through.
    start = max(clock[0].max() for clock in clocks)
    end = max(start * 1.01, min(clock[-1].min() for clock in clocks))
    stops = np.geomspace(start, end, 13)
    means = []
    for clock, score in zip(clocks, scores, strict=True):
        hosts = range(score.shape[1])
        own = [
            np.interp(np.log(stops), np.log(clock[:, h] + 1e-12), score[:, h]).mean()
            for h in hosts
        ]
        means.append(np.array(own))
    best = max(means[:-1], key=lambda own: own.mean())
    return 100 * (means[-1] - best)


# The picture.


def _words(table: Schedule) -> str:
    octaves = f"first at 2^{table.start:g} batches of the starting host"
    return f"{table.count} doublings, {octaves}, then every {table.every:g} octaves"


def draw(
    counted: Counted,
    chosen: Mapping[float, Schedule],
    file: Path,
) -> None:
    """Score against compute: every static size thin, the growing run over them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from esper.report.style import LIGHT, STYLE

    studies, rent = _studies(counted), RENTS[0]
    columns = min(4, len(studies))
    rows = -(-len(studies) // columns)
    with mpl.rc_context(STYLE | {"axes.titlelocation": "left"}):
        figure = Figure(figsize=(2.9 * columns, 2.5 * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis, study in zip(axes, studies, strict=False):
            for n, share in enumerate(study.sizes):
                x, y = _line(counted[(study, share, NEVER), rent])
                shade = 0.25 + 0.15 * n
                axis.plot(x, y, color=LIGHT["grey"], alpha=shade, linewidth=1.2)
                label = f"W/{round(1 / share)}" if share < 1 else "W"
                axis.annotate(
                    label, (x[-1], y[-1]), xytext=(3, 0), fontsize=7,
                    textcoords="offset points", color=LIGHT["muted"], va="center",
                )  # fmt: skip
            x, y = _line(counted[(study, study.start, chosen[rent]), rent])
            axis.plot(x, y, color=LIGHT["orange"], linewidth=2.6)
            axis.set_title(study.name)
            axis.set_xticks(range(-6, 1, 2))
            axis.set_xticklabels(["C/64", "C/16", "C/4", "C"])
        axes[0].set_ylabel("test score, %")
        figure.suptitle(
            "One growing network (orange) against every fixed size (grey), by training "
            "compute",
            x=0.01,
            ha="left",
        )
        figure.savefig(file, format="svg", metadata={"Date": None})


def _line(curves: Curves) -> tuple[Floats, Floats]:
    at = ~np.isnan(curves.test[:, 0])
    octaves: Floats = np.log2(curves.times[at] / curves.times[-1])
    return octaves, 100 * curves.test[at].mean(axis=1)
