"""What does PPO add to the start? Stored returns on validation hosts.

Validation hosts are the same in every round of a training, so its first round is
taken off host by host. The last round counts, not the best one, which these very hosts
choose. In the pooled row hosts are drawn again within every task of every training.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import mean_interval
from esper.evaluation.summary import validation_returns
from esper.runs.database import open_store, rows
from esper.runs.run import STORE

Floats = NDArray[np.float64]
Training = dict[int, list[Floats]]
"""Returns of each round: for each task those of its hosts, in order."""


def run(runs: str = "", plot: str = "") -> Report:
    """A row for every training, and one for all.

    Args:
        runs: Folders of trainings, with commas between them.
        plot: File to draw them into, as SVG.
    """
    found = {
        Path(each).name: read(Path(each)) for each in filter(None, runs.split(","))
    }
    if timing.QUICK:
        found = {"example": {0: [np.zeros(3)], 1: [np.arange(3.0)]}}
    if not found:
        raise InvalidInputError(
            "name at least one training: --runs runs/NAME,runs/OTHER."
        )
    if plot:
        draw([*found.values()], Path(plot))
    report = Report(
        "Share of never's errors removed on validation hosts, net of rent",
        ("training", "rounds", "start", "end", "change", "from", "to"),
        notes=["Means over hosts; 95 % over hosts."],
    )
    for name, training in found.items():
        _add(report, name, [training])
    if len(found) > 1:
        _add(report, "all", [*found.values()])
    return report


def read(folder: Path) -> Training:
    """Returns of a training on its validation hosts."""
    with closing(open_store(folder / STORE)) as db:
        found = validation_returns(rows(db, "live_evaluations"))
    if len(found) < 2:
        raise InvalidInputError(
            f"{folder} was not evaluated at two rounds; wait, or train longer."
        )
    return {number: _by_task(found[number]) for number in sorted(found)}


def _by_task(returns: Mapping[tuple[str, int], float]) -> list[Floats]:
    tasks: dict[str, list[float]] = {}
    for task, host in sorted(returns):
        tasks.setdefault(task, []).append(returns[task, host])
    return [np.array(own) for own in tasks.values()]


def changes(training: Training) -> list[Floats]:
    """The last round less the first, for each task host by host."""
    first, last = training[min(training)], training[max(training)]
    return [after - before for before, after in zip(first, last, strict=True)]


def _add(report: Report, name: str, trainings: Sequence[Training]) -> None:
    change = mean_interval([own for each in trainings for own in changes(each)])
    ends = [
        float(np.mean([np.mean(own) for each in trainings for own in each[end(each)]]))
        for end in (min, max)
    ]
    rounds = max(max(each) for each in trainings)
    report.add(name, rounds, *ends, change.estimate, change.low, change.high)


def draw(trainings: Sequence[Training], file: Path) -> None:
    """Every training as a thin line, their mean with its interval over them."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from esper.report.style import LIGHT, STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        panel = figure.subplots()
        for training in trainings:
            means = [
                np.mean([own.mean() for own in each]) for each in training.values()
            ]
            panel.plot([*training], means, color=LIGHT["grey"], linewidth=0.8)
        rounds = sorted(set.intersection(*(set(each) for each in trainings)))
        bands = [
            mean_interval([own for each in trainings for own in each[number]])
            for number in rounds
        ]
        panel.plot(rounds, [b.estimate for b in bands], "o-", color=LIGHT["orange"])
        low, high = zip(*((b.low, b.high) for b in bands), strict=True)
        panel.fill_between(rounds, low, high, color=LIGHT["orange"], alpha=0.2)
        panel.set_xlabel("rounds of PPO after the start from recordings")
        panel.set_ylabel("errors removed, net of rent")
        figure.savefig(file, format="svg", metadata={"Date": None})
