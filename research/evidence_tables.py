"""Tables and the picture of `research.evidence`, made of the rows of its ledger."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.timing import Report
from esper.environment.settings import LEAST_ERROR
from esper.evaluation.sizes import best_sizes
from esper.evaluation.statistics import Interval
from esper.runs.records import LADDER
from research.crossed import crossed_interval

Floats = NDArray[np.float64]
RENTS: Final = (0.002, 0.01, 0.04)
TAMIYO: Final = "Tamiyo"
FIRST_CONTROLLER: Final = "tamiyo "
"""What names of controllers begin with; a number follows."""
TITLES: Final = {
    "known": "end known",
    "unknown": "end unknown, in compute",
    "scale": "end and scale unknown, drawn tasks",
}
LABELS: Final = ("interquartile mean", "plain mean")
COLOURS: Final = ("blue", "orange")
ORDER: Final = (
    TAMIYO,
    "boosting",
    "ridge",
    "timetable-by-rent",
    "by-rent",
    "early",
    "large-then-cut",
    "doubling",
    "random",
    "never",
    "static",
    "best-size",
    "envelope",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """What an arm had on the hosts of one task."""

    question: str
    task: str
    arm: str
    rent: float | None
    """None: of all rents."""
    rate: float
    """Learning rate against the task's own."""
    parameters: int | None
    """Of a plain network of a given size."""
    source: str
    """Digest of a learned arm; empty if it is not learned."""
    test: Floats
    """Score on test rows, `[stop, host]`."""
    added: Floats
    """Size beyond the host, as a multiple of it, `[stop, host]`."""

    @property
    def key(self) -> tuple[str, str, str, float | None]:
        """What it is a row of."""
        return self.question, self.task, self.arm, self.rent

    def worth(self, rent: float) -> Floats:
        """Score less rent, `[stop, host]`."""
        return self.test - rent * self.added

    def as_data(self) -> dict[str, Any]:
        """The row as JSON can hold it."""
        return asdict(self) | {
            name: getattr(self, name).tolist() for name in ("test", "added")
        }

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "Row":
        """The row of such data."""
        arrays = {name: np.array(data[name], float) for name in ("test", "added")}
        return cls(**data | arrays)


@dataclass(frozen=True)
class Arm:
    """Shares of never's errors of one arm: for each task `[rent, controller, host]`."""

    shares: dict[str, Floats]
    added: float
    """Size beyond the host at the end, mean over tasks, rents and controllers."""

    def figures(self) -> list[Floats]:
        """For each task `[controller, host]`, the mean over the rents."""
        return [share.mean(axis=0) for share in self.shares.values()]

    def of_controller(self, number: int) -> list[Floats]:
        """The same of one controller."""
        return [task[number : number + 1] for task in self.figures()]


def arms_of(rows: Sequence[Row], question: str) -> dict[str, Arm]:
    """All arms of a question, choices among plain networks included."""
    own = [row for row in rows if row.question == question]
    if not own:
        return {}
    names = [*dict.fromkeys(row.arm for row in own if row.arm not in LADDER)]
    static = [name for name in names if name.startswith("static of ")]
    learned = [name for name in names if name.startswith(FIRST_CONTROLLER)]
    groups = {name: [name] for name in names if name not in (*static, *learned)}
    groups |= {TAMIYO: learned, "static": static}
    tasks = [*dict.fromkeys(row.task for row in own)]
    found = {
        name: _arm({task: _worths(own, task, each) for task in tasks}, own)
        for name, each in groups.items()
        if each
    }
    sizes = {
        task: [row for row in own if row.task == task and row.arm in LADDER]
        for task in tasks
    }
    for name in ("best-size", "envelope"):
        if name == "best-size" or question != "known":
            chosen = {task: _chosen(name, sizes[task]) for task in tasks}
            found[name] = _arm(chosen, own)
    return {name: found[name] for name in ORDER if name in found}


Worths = tuple[Floats, Floats]
"""Worth `[rent, controller, stop, host]`, and the final size in the mean."""


def _worths(rows: Sequence[Row], task: str, arms: Sequence[str]) -> Worths:
    def row_of(arm: str, rent: float) -> Row:
        return next(
            row
            for row in rows
            if (row.task, row.arm) == (task, arm) and row.rent in (rent, None)
        )

    table = [[row_of(arm, rent) for arm in arms] for rent in RENTS]
    worth = np.array(
        [
            [row.worth(rent) for row in line]
            for rent, line in zip(RENTS, table, strict=True)
        ]
    )
    return worth, np.array([row.added[-1].mean() for line in table for row in line])


def _chosen(name: str, ladder: Sequence[Row]) -> Worths:
    """Of plain networks of several sizes the best for each rent, in hindsight."""
    worths, added = [], []
    for rent in RENTS:
        each = np.stack([row.worth(rent) for row in ladder])  # [size, stop, host]
        stops = np.arange(each.shape[1])
        best = best_sizes(each)
        if name == "best-size":
            best = np.full(len(stops), each.mean(axis=(1, 2)).argmax())
        worths.append([each[best, stops]])
        added.append(ladder[int(best[-1])].added[-1].mean())
    return np.array(worths), np.array(added)


def _arm(tasks: dict[str, Worths], rows: Sequence[Row]) -> Arm:
    shares = {}
    for task, (worth, _) in tasks.items():
        never = next(row for row in rows if (row.task, row.arm) == (task, "never"))
        error = max(1 - float(never.test.mean()), LEAST_ERROR)
        shares[task] = ((worth - never.test) / error).mean(axis=2)
    return Arm(shares, float(np.mean([added.mean() for _, added in tasks.values()])))


def reports(rows: Sequence[Row]) -> list[Report]:
    """For each question tables of arms, differences, controllers and tasks."""
    found = []
    for question, title in TITLES.items():
        arms = arms_of(rows, question)
        if TAMIYO in arms:
            found += [
                _arms_table(arms, title),
                _differences_table(arms, title),
                _controllers_table(arms, title),
                _tasks_table(arms, title),
            ]
    return found


def verdict(iqm: Interval, mean: Interval) -> str:
    """Above or below only if both intervals say so."""
    if min(iqm.low, mean.low) > 0:
        return "above"
    return "below" if max(iqm.high, mean.high) < 0 else "no difference shown"


def _arms_table(arms: dict[str, Arm], title: str) -> Report:
    report = Report(
        f"{title}: share of never's errors removed, net of rent",
        (
            "arm",
            "interquartile mean [95 %]",
            "mean [95 %]",
            *(f"rent {rent:g}" for rent in RENTS),
            "size",
        ),
    )
    for name, arm in arms.items():
        own = arm.figures()
        by_rent = np.mean([s.mean(axis=(1, 2)) for s in arm.shares.values()], axis=0)
        report.add(
            name,
            f"{crossed_interval(own):.3f}",
            f"{crossed_interval(own, plain=True):.3f}",
            *(f"{figure:.3f}" for figure in by_rent),
            f"{1 + arm.added:.2f} ×",
        )
    tasks = arms[TAMIYO].figures()
    report.notes.append(
        f"{len(tasks[0])} controllers, {len(tasks)} tasks, {tasks[0].shape[1]} hosts "
        "of each; by rent: plain means; size: parameters at the end against the host's"
    )
    return report


def differences(arms: dict[str, Arm]) -> dict[str, tuple[Interval, Interval]]:
    """Tamiyo less every other arm: of interquartile means and of plain means."""
    tamiyo = arms[TAMIYO].figures()
    return {
        name: (
            crossed_interval(tamiyo, arm.figures()),
            crossed_interval(tamiyo, arm.figures(), plain=True),
        )
        for name, arm in arms.items()
        if name != TAMIYO
    }


def _differences_table(arms: dict[str, Arm], title: str) -> Report:
    report = Report(
        f"{title}: Tamiyo less every other arm",
        ("arm", "interquartile mean [95 %]", "mean [95 %]", "Tamiyo is"),
    )
    for name, (iqm, mean) in differences(arms).items():
        report.add(name, f"{iqm:+.3f}", f"{mean:+.3f}", verdict(iqm, mean))
    return report


def _controllers_table(arms: dict[str, Arm], title: str) -> Report:
    report = Report(
        f"{title}: every controller on its own", ("controller", "IQM", "mean")
    )
    for number in range(len(arms[TAMIYO].figures()[0])):
        own = arms[TAMIYO].of_controller(number)
        report.add(
            f"{FIRST_CONTROLLER}{number + 1}",
            f"{crossed_interval(own):+.3f}",
            f"{crossed_interval(own, plain=True):+.3f}",
        )
    return report


def _tasks_table(arms: dict[str, Arm], title: str) -> Report:
    report = Report(f"{title}: plain mean of every task", ("task", *arms))
    for task in arms[TAMIYO].shares:
        means = [float(arm.shares[task].mean()) for arm in arms.values()]
        report.add(task, *(f"{mean:.3f}" for mean in means))
    return report


def draw(rows: Sequence[Row]) -> bytes:
    """Tamiyo less every other arm, one panel for each question, as SVG."""
    from esper.report.style import LIGHT, new_figure, plot_style, render

    questions = {
        question: arms
        for question in TITLES
        if TAMIYO in (arms := arms_of(rows, question))
    }
    names = [
        name for name in ORDER[1:] if any(name in arms for arms in questions.values())
    ]
    alt = []
    with plot_style():
        width = 250 * len(questions) + 110
        title = "Tamiyo less each arm, share of errors"
        figure = new_figure(title, 26 * len(names) + 120, width)
        axes = figure.subplots(1, len(questions), sharey=True, squeeze=False)[0]
        for axis, (question, arms) in zip(axes, questions.items(), strict=True):
            for name, both in differences(arms).items():
                for less, colour, shift in zip(
                    both, COLOURS, (-0.14, 0.14), strict=True
                ):
                    at = names.index(name) + shift
                    axis.plot([less.low, less.high], [at, at], color=LIGHT[colour])
                    axis.plot(less.estimate, at, "o", color=LIGHT[colour], markersize=5)
                alt.append(f"{question}, {name}: {both[0]:+.3f}")
            axis.axvline(0, color=LIGHT["muted"], linewidth=1)
            # Whoever loses by several times never's errors would squeeze the others.
            low, high = axis.get_xlim()
            axis.set_xlim(max(low, -0.5), min(high, 1.0))
            axis.set_title(TITLES[question])
            axis.set_xlabel("better than the arm →")
        axes[0].set_yticks(range(len(names)), names)
        axes[0].invert_yaxis()
        for label, colour in zip(LABELS, COLOURS, strict=True):
            axes[0].plot([], [], "o-", color=LIGHT[colour], label=label)
        figure.legend(loc="outside lower right", ncols=2)
        return render(figure, "evidence", "; ".join(alt)).svg
