"""Tables of the evidence in Markdown: every cell is read from the ledger."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, nan
from typing import Any, Final

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

SIZES: Final = (1, 2, 4, 5)
"""Of plain networks that are tried instead, as a multiple of the host's."""
HOUR: Final = 3_600.0
PLAIN: Final = "static"
NOTHING: Final = "nothing"
"""The ablation in which nothing is missing."""
Chance = Mapping[str, Any]
"""Draws and random seed of every interval."""


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
    chance: Chance,
) -> list[str]:
    """Everybody over all tasks, the highest first."""
    added, work = readout.figure("added"), readout.figure("training_macs")
    rows = []
    for arm in arms:
        done = cells.done(arm, tasks)
        if not done:
            continue
        height = iqm_interval(cells.of(arm, done), **chance)
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
    chance: Chance,
) -> list[str]:
    """Everybody on one task, the highest first."""
    columns = ("test", "added", "macs", "training_macs", "seconds")
    figures = {name: readout.figure(name) for name in columns}
    rows = []
    for arm in arms:
        if not cells.count(arm, [task]):
            continue
        height = iqm_interval(cells.of(arm, [task]), **chance)
        row = against[arm].tasks.get(task) if arm in against else None
        test = iqm_interval(figures["test"].of(arm, [task]), **chance)
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
    readout: Readout, tasks: Sequence[str], arms: Sequence[str], chance: Chance
) -> list[str]:
    """Normalised objective at each rent by itself."""
    heads = [f"rent {readout.terms[name].rent:g}" for name in readout.rents]
    columns = {name: readout.normalised([name]) for name in readout.rents}
    rows = []
    for arm in arms:
        shown = []
        for cells in columns.values():
            done = cells.done(arm, tasks)
            height = iqm_interval(cells.of(arm, done), **chance) if done else None
            shown.append(_counted(height, "+.3f", cells.count(arm, done)))
        if any(shown):
            rows.append([_bold(arm), *shown])
    return table(["arm", *heads], rows)


def budgets_table(
    readout: Readout, tasks: Sequence[str], arms: Sequence[str], chance: Chance
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
            mean = mean_interval(cells.of(arm, done), **chance) if there else None
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
    cells: Cells, tasks: Sequence[str], names: Sequence[str], chance: Chance
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
            ranged(iqm_difference(theirs, mine, **chance), "+.3f"),
            ranged(paired_improvement(theirs, mine, **chance), ".2f"),
        ]
        rows.append(
            [
                arm,
                ranged(iqm_interval(mine, **chance), "+.3f"),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What training a controller took, and what a use of it saves.

    Break-even: without a controller one trains the plain network at all `SIZES` and
    keeps the best; one use of the controller is one training.
    """

    controllers: int
    hours: float
    """Of one, on one core."""
    env_steps: float
    """Decisions of one."""
    use: float
    """Seconds of one network under her, mean over tasks."""
    plain: float
    """Seconds of one plain training of equal parameters, mean over the same tasks."""
    work: float
    """Multiply-adds of one use, as a share of those of all plain sizes."""

    @property
    def saved(self) -> float:
        """Seconds that one use saves; below 0: it costs more."""
        return len(SIZES) * self.plain - self.use

    @property
    def uses(self) -> int | None:
        """After how many uses she has paid for herself; None: never, or not known."""
        if not (self.saved > 0.0 and isfinite(self.hours)):
            return None
        return ceil(self.hours * HOUR / self.saved)


def cost(readout: Readout, trainings: Sequence[Row], tasks: Sequence[str]) -> Cost:
    """Read the cost of a controller from what its campaign noted.

    Args:
        readout: What was counted.
        trainings: Rows of the table of trainings.
        tasks: Those of the protocol.
    """
    own = [row for row in trainings if row["arm"] == LEARNED]
    seconds, macs = readout.figure("seconds"), readout.figure("training_macs")
    added = readout.figure("added")
    both = [t for t in seconds.done(LEARNED, tasks) if seconds.done(PLAIN, [t])]
    shares = []
    for task in both:
        # A plain network's work grows with its size.
        per_size = _mean(macs, PLAIN, task) / (1.0 + _mean(added, PLAIN, task))
        shares.append(_mean(macs, LEARNED, task) / (sum(SIZES) * per_size))
    return Cost(
        controllers=len(own),
        hours=_mean_of([float(row["seconds"]) for row in own]) / HOUR,
        env_steps=_mean_of([float(row["env_steps"]) for row in own]),
        use=_mean_of([_mean(seconds, LEARNED, task) for task in both]),
        plain=_mean_of([_mean(seconds, PLAIN, task) for task in both]),
        work=_mean_of(shares),
    )


def cost_sentences(found: Cost) -> list[str]:
    """The same in sentences."""
    if not found.controllers:
        return ["No controller is trained yet."]
    many = "controller" if found.controllers == 1 else "controllers"
    sentences = [
        f"Training one controller took {found.hours:.1f} hours of one core and "
        f"{found.env_steps:,.0f} decisions (mean of {found.controllers} {many})."
    ]
    if not isfinite(found.use):
        return sentences
    sizes = ", ".join(f"{size}×" for size in SIZES[:-1]) + f" and {SIZES[-1]}×"
    sentences.append(
        f"*Break-even.* Somebody without her would train the plain network at {sizes} "
        "the host's size and keep the best: each of these trainings is taken to last "
        f"as long as `{PLAIN}` did, {found.plain:.2f} seconds per network, and one use "
        f"of her took {found.use:.2f}. {_break_even(found)} In multiply-adds, which "
        f"leave out what small tensors cost, one use is {found.work:.2f} of the work "
        "of all those sizes."
    )
    return sentences


def failures(rows: Iterable[Row], jobs: Sequence[Row]) -> list[str]:
    """What went wrong, a line each."""
    counted = [row for row in rows if row["stage"] == "counted"]
    panicked = Counter(row["arm"] for row in counted if row["panicked"])
    total = Counter(row["arm"] for row in counted)
    sentences = [
        f"{count} of {total[arm]} networks of `{arm}` panicked: their numbers were no "
        "longer finite. They count as guessing nothing right."
        for arm, count in panicked.items()
    ]
    if counted and not panicked:
        sentences.append(f"No network of {len(counted):,} panicked.")
    failed = [job for job in jobs if job["state"] == "failed"]
    sentences += [
        f"The job `{job['id']}` failed: {_line(job['note'])}" for job in failed
    ]
    if jobs and not failed:
        sentences.append("No job failed.")
    return sentences


def found_facts(trainings: Sequence[Row]) -> list[str]:
    """What the search and the bandit found, as they wrote it."""
    sentences = []
    for row in trainings:
        if row["arm"] in ("searched", "bandit", "search"):
            facts = json.dumps(json.loads(row["facts"] or "{}"), sort_keys=True)
            short = facts if len(facts) <= 300 else f"{facts[:299]}…"
            sentences.append(
                f"`{row['name']}`: {row['env_steps']:,} decisions, "
                f"{row['seconds'] / HOUR:.2f} hours: `{short}`"
            )
    return sentences


def _break_even(found: Cost) -> str:
    if found.uses is None:
        return (
            "At this size a use of her takes longer than all of them, so in hours she "
            "never pays for her training."
        )
    return (
        f"A use saves {found.saved:.1f} seconds, so her training has paid for itself "
        f"after {found.uses:,} uses."
    )


def _mean_of(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else nan


def _line(text: object) -> str:
    return " ".join(str(text or "without a word").split())[:300]
