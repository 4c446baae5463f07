"""Tables of the evidence in Markdown: every cell is read from the ledger."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, nan
from typing import Final

import numpy as np

from esper.experiment.statistics import (
    Interval,
    iqm_difference,
    iqm_interval,
    mean_interval,
    paired_improvement,
)
from evidence.claims import Claim, Versus
from evidence.readout import BASELINE, LEARNED, Cells, Readout, Row

HOUR: Final = 3_600.0
NOTHING: Final = "nothing"
"""The ablation in which nothing is missing."""


def claims_table(rows: Sequence[Claim]) -> list[str]:
    """Goals, verdicts and figures."""
    body = [[row.goal, f"**{row.verdict}**", row.figures] for row in rows]
    return table(["Tamiyo is", "verdict", "figures"], body, align="lll")


def arms_table(
    readout: Readout,
    cells: Cells,
    tasks: Sequence[str],
    against: Mapping[str, Versus],
    arms: Sequence[str],
    resamples: int,
) -> list[str]:
    """Everybody over all tasks, the highest first."""
    added, work = readout.figure("added"), readout.figure("training_macs")
    rows = []
    for arm in arms:
        done = cells.done(arm, tasks)
        if not done:
            continue
        height = iqm_interval(cells.of(arm, done), resamples=resamples)
        versus = against.get(arm)
        rows.append(
            (
                height.estimate,
                [
                    _bold(arm),
                    ranged(height, "+.3f"),
                    f"{_plain_mean(cells, arm, done):+.3f}".replace("-", "−"),
                    "" if versus is None else ranged(versus.improvement, ".2f"),
                    f"{1.0 + _over_tasks(added, arm, done):.2f} ×",
                    _multiple(work, arm, done),
                    f"{cells.count(arm, done)}",
                    f"{len(done)}",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    header = [
        "arm",
        "normalised objective [95 %]",
        "plain mean",
        "P(Tamiyo above it)",
        "parameters",
        "training MACs",
        "n",
        "tasks",
    ]
    return table(header, [row for _, row in rows])


def _plain_mean(cells: Cells, arm: str, tasks: Sequence[str]) -> float:
    """Over all cells, of which an interquartile mean leaves out the outer half."""
    return float(np.nanmean(np.concatenate([c.ravel() for c in cells.of(arm, tasks)])))


def task_table(
    readout: Readout,
    cells: Cells,
    task: str,
    against: Mapping[str, Versus],
    arms: Sequence[str],
    resamples: int,
) -> list[str]:
    """Everybody on one task, the highest first."""
    columns = ("test", "added", "macs", "training_macs", "seconds")
    figures = {name: readout.figure(name) for name in columns}
    rows = []
    for arm in arms:
        if not cells.count(arm, [task]):
            continue
        height = iqm_interval(cells.of(arm, [task]), resamples=resamples)
        row = against[arm].tasks.get(task) if arm in against else None
        test = iqm_interval(figures["test"].of(arm, [task]), resamples=resamples)
        rows.append(
            (
                height.estimate,
                [
                    _bold(arm),
                    ranged(height, "+.3f"),
                    "" if row is None else ranged(row.difference, "+.3f"),
                    ""
                    if row is None or row.adjusted is None
                    else f"{row.adjusted:.2g}",
                    ranged(test, ".1f", 100.0),
                    f"{1.0 + _mean(figures['added'], arm, task):.2f} ×",
                    f"{_mean(figures['macs'], arm, task):.2f} ×",
                    f"{_mean(figures['training_macs'], arm, task) / 1e9:.3f}",
                    f"{_mean(figures['seconds'], arm, task):.2f}",
                    f"{cells.count(arm, [task])}",
                ],
            )
        )
    rows.sort(key=lambda row: -row[0])
    header = [
        "arm",
        "normalised objective [95 %]",
        "Tamiyo less it",
        "p (Holm)",
        "test score, %",
        "parameters",
        "MACs",
        "training GMAC",
        "seconds",
        "n",
    ]
    return table(header, [row for _, row in rows])


def rents_table(
    readout: Readout, tasks: Sequence[str], arms: Sequence[str], resamples: int
) -> list[str]:
    """Normalised objective at each rent by itself."""
    heads = [f"rent {readout.terms[name].rent:g}" for name in readout.rents]
    columns = {name: readout.normalised([name]) for name in readout.rents}
    rows = []
    for arm in arms:
        shown = []
        for cells in columns.values():
            done = cells.done(arm, tasks)
            height = (
                iqm_interval(cells.of(arm, done), resamples=resamples) if done else None
            )
            shown.append(_counted(height, "+.3f", cells.count(arm, done)))
        if any(shown):
            rows.append([_bold(arm), *shown])
    return table(["arm", *heads], rows)


def budgets_table(
    readout: Readout, tasks: Sequence[str], arms: Sequence[str], resamples: int
) -> list[str]:
    """Test score at each budget, mean over tasks."""
    names = readout.budgets
    heads = [f"{readout.terms[name].budget:g} × host" for name in names]
    columns = {name: readout.figure("test", [name]) for name in names}
    # Scores of several tasks are averaged over the same tasks for everybody: those
    # that Tamiyo was judged on at every budget.
    common = [
        task
        for task in tasks
        if all(cells.done(LEARNED, [task]) for cells in columns.values())
    ]
    rows = []
    for arm in arms:
        ran = [cells for cells in columns.values() if cells.done(arm, common)]
        done = [task for task in common if all(c.done(arm, [task]) for c in ran)]
        if not ran or not done:
            continue
        shown = []
        for cells in columns.values():
            there = cells.done(arm, done)
            mean = (
                mean_interval(cells.of(arm, done), resamples=resamples)
                if there
                else None
            )
            shown.append(_counted(mean, ".1f", cells.count(arm, done), 100.0))
        rows.append([_bold(arm), *shown, f"{len(done)}"])
    return table(["arm", *heads, "tasks"], rows)


def rates_table(
    readout: Readout, tasks: Sequence[str], arms: Sequence[str]
) -> list[str]:
    """The learning rate that everybody was counted with."""
    rates: dict[tuple[str, str], set[float]] = {}
    for row in readout.rows:
        rates.setdefault((row["arm"], row["task"]), set()).add(row["rate"])
    done = [task for task in tasks if any((arm, task) in rates for arm in arms)]
    rows = [
        [
            _bold(arm),
            *(
                ", ".join(f"{rate:g}" for rate in sorted(rates.get((arm, task), ())))
                for task in done
            ),
        ]
        for arm in arms
    ]
    return table(["arm", *done], rows) if done else []


def ablations_table(
    cells: Cells, tasks: Sequence[str], names: Sequence[str], resamples: int
) -> list[str]:
    """What controllers are worth that were trained without something.

    They are compared with those from which nothing was taken and that were trained as
    long, if there are such, else with Tamiyo.
    """
    whole = NOTHING if NOTHING in names else LEARNED
    rows = []
    for arm in sorted(names, key=lambda name: name != NOTHING):
        done = [task for task in cells.done(arm, tasks) if cells.done(whole, [task])]
        if not done:
            continue
        mine, theirs = cells.of(arm, done), cells.of(whole, done)
        versus = [
            ranged(iqm_difference(theirs, mine, resamples=resamples), "+.3f"),
            ranged(paired_improvement(theirs, mine, resamples=resamples), ".2f"),
        ]
        rows.append(
            [
                arm,
                ranged(iqm_interval(mine, resamples=resamples), "+.3f"),
                *(["", ""] if arm == whole else versus),
                f"{len(cells.members[arm])}",
                f"{cells.count(arm, done)}",
                ", ".join(done),
            ]
        )
    header = [
        "ablation",
        "normalised objective [95 %]",
        f"{whole} less it",
        f"P({whole} above it)",
        "controllers",
        "n",
        "tasks",
    ]
    return table(header, rows)


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], align: str | None = None
) -> list[str]:
    """Lines of a table; none if it has no rows."""
    if not rows:
        return []
    sides = align or "l" + "r" * (len(header) - 1)
    rules = ["---" if side == "l" else "---:" for side in sides]
    lines = [header, rules, *rows]
    return [f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines]


def ranged(it: Interval, spec: str, scale: float = 1.0) -> str:
    """An interval, or the estimate alone if there is none."""
    if not isfinite(it.estimate):
        return ""
    figure = f"{scale * it.estimate:{spec}}"
    if isfinite(it.low):
        figure += f" [{scale * it.low:{spec}}, {scale * it.high:{spec}}]"
    return figure.replace("-", "−")


def _counted(it: Interval | None, spec: str, count: int, scale: float = 1.0) -> str:
    return "" if it is None else f"{ranged(it, spec, scale)} ({count})"


def _cell(text: str) -> str:
    if set(text) <= {"-", ":"}:
        return text
    return text.replace("|", "\\|")


def _bold(arm: str) -> str:
    return f"**{arm}**" if arm == LEARNED else arm


def _mean(cells: Cells, arm: str, task: str) -> float:
    figures = cells.at(arm, task)
    known = figures[np.isfinite(figures)]
    return float(known.mean()) if known.size else nan


def _over_tasks(cells: Cells, arm: str, tasks: Sequence[str]) -> float:
    return float(np.mean([_mean(cells, arm, task) for task in tasks]))


def _multiple(work: Cells, arm: str, tasks: Sequence[str]) -> str:
    """Work as a multiple of that of a network that is not grown."""
    shares = [_mean(work, arm, t) / _mean(work, BASELINE, t) for t in tasks]
    share = float(np.mean(shares))
    return f"{share:.2f} ×" if isfinite(share) else ""


def training_cost(trainings: Sequence[Row]) -> str:
    """What training one controller took, as a mean."""
    own = [row for row in trainings if row["arm"] == LEARNED]
    if not own:
        return ""
    hours = np.mean([row["seconds"] for row in own]) / HOUR
    steps = np.mean([row["env_steps"] for row in own])
    return (
        f"{len(own)} controllers were trained; each took {hours:.1f} hours of one core "
        f"and {steps:,.0f} decisions."
    )


def failures(rows: Iterable[Row], jobs: Sequence[Row]) -> list[str]:
    """What went wrong, a line each."""
    counted = [row for row in rows if row["stage"] == "counted"]
    panicked = Counter(row["arm"] for row in counted if row["panicked"])
    total = Counter(row["arm"] for row in counted)
    lines = [
        f"{count} of {total[arm]} networks of `{arm}` panicked: their numbers were no "
        "longer finite. They count as guessing nothing right."
        for arm, count in panicked.items()
    ]
    if counted and not panicked:
        lines.append(f"No network of {len(counted):,} panicked.")
    failed = [job for job in jobs if job["state"] == "failed"]
    lines += [f"The job `{job['id']}` failed: {_line(job['note'])}" for job in failed]
    if jobs and not failed:
        lines.append("No job failed.")
    return lines


def _line(text: object) -> str:
    return " ".join(str(text or "without a word").split())[:300]
