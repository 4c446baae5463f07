"""The report of a run: one page, and every plot as PNG and SVG.

The page is a Jinja2 template in which every value is escaped; styles and plots are in
it, there is no script, and its content security policy forbids the browser to load or
run anything. Everything is drawn before anything is written, and every file is replaced
as a whole, so that a report can be made again at any time, also while a run goes on.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from esper import __version__
from esper.contracts.errors import BadInput
from esper.experiment.files import Disk, publish, storage
from esper.experiment.messages import short
from esper.experiment.statistics import Interval, iqm_interval
from esper.experiment.summary import (
    ArmSummary,
    Summary,
    TaskSummary,
    headline,
    is_learned,
    summarise,
)
from esper.report.data import SHOWN_ENVS, RunData, read_run
from esper.report.plots import STAGES, TaskResults, draw_plots
from esper.report.style import COLOURS

PAGE: Final = "report.html"
PLOTS: Final = "plots"
MARK: Final = "esper report"
"""In the first bytes of every page, by which a report is recognised."""
PERIODIC: Final = 60
"""Evaluations during training that a curve shows, at most."""
SECTIONS: Final = (
    ("comparison", "Comparison of controllers"),
    ("learning", "Learning curves"),
    ("seeds", "Seeds of the last episodes"),
    ("blueprints", "Blueprints, slots and outcomes"),
    ("heads", "Entropy and KL of each head"),
    ("updates", "Health of the updates"),
    ("run", "The run itself"),
)
STATES: Final = {
    "finished": "The run is complete.",
    "running": "The run is still going on; this is what it has written so far.",
    "stopped": "The run stopped before its end; it can be resumed.",
}
Cell = tuple[str, str]
"""What a cell of a table shows, and what stands small below it."""


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write a page about a run, also while the run goes on.

    Args:
        run: The run's folder.
        out: Where to; None: `report.html` in the run's folder. Plots are put in the
            folder `plots` of the run, or for `NAME.html` elsewhere in `NAME-plots`.

    Returns:
        The page.
    """
    if out is not None and not out.name:
        raise BadInput(f"expected a file for the page, got {str(out)!r:.60}.")
    data = read_run(run)
    file = run / PAGE if out is None else out
    folder = run / PLOTS if out is None else out.with_name(f"{out.stem}-plots")
    _require_writable(file, folder)
    summary, trouble = None, ""
    try:
        summary = summarise(data.evaluations)
    except BadInput as error:
        trouble = str(error)
    plots = draw_plots(data, _results(data, summary))
    page = (
        _environment()
        .get_template("report.html")
        .render(
            run=data,
            plots=plots,
            trouble=trouble,
            version=__version__,
            mark=MARK,
            sections=SECTIONS,
            stages=STAGES.values(),
            shown_envs=SHOWN_ENVS,
            title_line=_title_line(data),
            tiles=_tiles(data),
            outcome=headline(summary) if summary else [],
            tables=_tables(data, summary),
            cells=_cells,
            conclusions=summary.conclusions if summary else [],
            attempts=_attempts(data),
            machine=[
                (name, _listed(value) if isinstance(value, list) else value)
                for name, value in data.versions.items()
            ],
            crowded=[
                f"{task} ({episodes.envs})"
                for task, episodes in data.last_episodes.items()
                if episodes.envs > SHOWN_ENVS
            ],
            light={name: pair[0] for name, pair in COLOURS.items()},
            dark={name: pair[1] for name, pair in COLOURS.items()},
        )
    )
    disk = Disk()
    with storage(folder, "make"):
        folder.mkdir(exist_ok=True)
    for plot in (one for several in plots.values() for one in several):
        publish(disk, folder / f"{plot.name}.svg", plot.svg)
        publish(disk, folder / f"{plot.name}.png", plot.png)
    publish(disk, file, page.encode())
    return file


def _require_writable(file: Path, folder: Path) -> None:
    """Refuse to write over anything but a report."""
    if not file.parent.is_dir():
        raise BadInput(f"{short(file.parent)} is no folder; make it first.")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{short(folder)} is no folder; remove it, plots go there.")
    if file.is_dir():
        raise BadInput(f"{short(file)} is a folder; name a file for the page.")
    if file.exists():
        with storage(file, "read"), file.open("rb") as stream:
            opening = stream.read(1_024)
        if opening and MARK.encode() not in opening:
            raise BadInput(f"{short(file)} is no report of Esper; name another file.")


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("esper.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"listed": _listed, "svg": Markup}
    return environment


def _visible(value: object) -> object:
    """Values as visible text, before they are escaped.

    Invisible characters could turn the direction of a line, or end a file for a reader.
    """
    if isinstance(value, Markup):
        return value
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else "�" for sign in str(value)
    )


def _title_line(run: RunData) -> str:
    tasks = _listed(run.tasks) or "no task"
    if not run.last_round:
        judged = "were judged" if run.evaluations else "have not been judged yet"
        return f"Controllers {judged} on {tasks}; none was trained. {STATES[run.state]}"
    return (
        f"Tamiyo was trained on {tasks} for {run.last_round:,} "
        f"round{'s' * (run.last_round != 1)}: {run.env_steps:,} decisions in "
        f"{_duration(run.seconds)}. {STATES[run.state]}"
    )


def _tiles(run: RunData) -> dict[str, str]:
    if not run.last_round:
        hosts = {(row["task"], row["host"]) for row in run.evaluations}
        arms = {row["controller"] for row in run.evaluations}
        return {
            "tasks": str(len(run.tasks)),
            "controllers": str(len(arms)),
            "hosts": str(len(hosts)),
        }
    speed = run.env_steps / run.seconds if run.seconds else 0.0
    return {
        "rounds": f"{run.last_round:,}",
        "decisions": f"{run.env_steps:,}",
        "training time": _duration(run.seconds),
        "decisions per second": f"{speed:,.0f}",
    }


def _ordered(run: RunData, summary: Summary | None) -> list[TaskSummary]:
    """Tables of the tasks, in the order of the configuration."""
    order = {name: index for index, name in enumerate(run.tasks)}
    tables = summary.tasks if summary else ()
    return sorted(tables, key=lambda table: order.get(table.task, len(order)))


def _results(run: RunData, summary: Summary | None) -> dict[str, TaskResults]:
    """Evaluations of each task, as plots show them."""
    returns: dict[str, dict[int, list[float]]] = defaultdict(dict)
    for row in run.evaluations:
        if row["stage"] == "watched" and is_learned(row["controller"]):
            value = nan if row["return"] is None else row["return"]
            returns[row["task"]].setdefault(row["round"], []).append(value)
    periodic = {}
    for task, rounds in returns.items():
        known = sorted(rounds)
        at = np.linspace(0, len(known) - 1, min(len(known), PERIODIC)).round()
        some = [known[int(index)] for index in at]
        periodic[task] = [
            (number, iqm_interval([np.array([rounds[number]])], resamples=1_000))
            for number in some
        ]
    arms = {table.task: table.arms for table in _ordered(run, summary)}
    return {
        task: TaskResults(periodic=periodic.get(task, ()), arms=arms.get(task, ()))
        for task in {**periodic, **arms}
    }


def _tables(
    run: RunData, summary: Summary | None
) -> list[tuple[str, str, TaskSummary]]:
    """Title, number of hosts and table: of all tasks, then of each."""
    tables = [(table.task, table) for table in _ordered(run, summary)]
    if summary and summary.aggregate:
        tables.insert(0, ("All tasks together", summary.aggregate))
    return [
        (title, f"{table.hosts} hosts{' of each task' * (table.tasks > 1)}", table)
        for title, table in tables
    ]


def _cells(arm: ArmSummary) -> list[Cell]:
    above = arm.above_never
    comparison: list[Cell] = [("–", "")] * 3
    if above is not None:
        comparison = [
            _interval(above.difference, "+.3f"),
            (f"{100 * above.improvement.estimate:.0f} %", ""),
            (f"{above.adjusted:.2g}", "shown" if above.shown else "not shown"),
        ]
    return [
        _interval(arm.returns, ".3f"),
        _interval(arm.test, ".3f"),
        _interval(arm.area, ".3f"),
        (_number(arm.parameters, ".2f", "×"), ""),
        (_number(arm.macs, ".2f", "×"), ""),
        (_engineering(arm.training_macs), ""),
        (_number(arm.seconds, ".2f"), ""),
        *comparison,
    ]


def _attempts(run: RunData) -> list[list[str]]:
    found = []
    for row in run.attempts:
        resumed, last = row["resumed_after"], row["last_round"]
        counts = "all of it" if last is None else f"up to round {last}"
        found.append(
            [
                str(row["attempt"]),
                row["started"].partition("+")[0].replace("T", " "),
                "the start" if resumed is None else f"round {resumed}",
                "none of it" if last == 0 else counts,
                f"{row['rows']:,}",
                str(row["versions"].get("esper", "")),
                str(row["versions"].get("torch", "")),
            ]
        )
    return found


def _interval(interval: Interval, spec: str) -> Cell:
    bounds = ""
    if isfinite(interval.low) and isfinite(interval.high):
        bounds = f"{_number(interval.low, spec)} to {_number(interval.high, spec)}"
    return _number(interval.estimate, spec), bounds


def _number(value: float, spec: str, unit: str = "") -> str:
    return f"{value:{spec}}{unit}".replace("-", "−") if isfinite(value) else "–"


def _engineering(value: float) -> str:
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 0 if value >= 100 * size else 1
            return f"{value / size:.{digits}f} {sign}"
    return _number(value, ".3g")


def _duration(seconds: float) -> str:
    """Time in the two largest units."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.3g} s"


def _listed(names: Sequence[object]) -> str:
    """Names in a sentence."""
    texts = [str(name) for name in names]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
