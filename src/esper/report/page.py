"""Writes the report of a run: one HTML page, and every plot as PNG and SVG.

The page is a Jinja2 template that escapes every value. Styles and plots are inline,
there is no script, and the content security policy forbids loading anything. Files are
replaced atomically, so a report can be written again while the run continues.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from esper import __version__
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import short
from esper.evaluation.statistics import Interval, iqm_interval
from esper.evaluation.summary import Summary, TaskSummary, headline, summarise
from esper.files import Disk, publish, require_no_link, storage
from esper.report.data import SHOWN_ENVS, RunData, read_run
from esper.report.plots import STAGES, TaskResults, draw_plots
from esper.report.style import DARK, LIGHT
from esper.runs.records import TEST, VALIDATION, is_learned

PAGE: Final = "report.html"
PLOTS: Final = "plots"
MARK: Final = "esper report"
"""Identifies a report; in the first bytes of every page."""
MAX_EVALUATIONS: Final = 60
"""Maximum number of periodic evaluations in a learning curve."""
SECTIONS: Final = (
    ("comparison", "Comparison of controllers"),
    ("learning", "Learning curves"),
    ("seeds", "Seeds of the last episodes"),
    ("blueprints", "Blueprints, slots and outcomes"),
    ("heads", "Entropy and KL per head"),
    ("updates", "PPO updates"),
    ("run", "Run details"),
)
STATES: Final = {
    "finished": "The run is complete.",
    "running": "The run is in progress; the report shows its results so far.",
    "stopped": "The run stopped early; it can be resumed.",
}
CUT_OFF: Final = "The evaluation stopped early; start a new one."
PPO_SECTIONS: Final = ("learning", "heads", "updates", "run")
"""Sections of the report of `esper ppo`."""


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write the report of a run, which may be in progress; returns the path.

    The default of `out` is `report.html` in the folder of the run, with plots in
    `plots`. For any other `NAME.html`, plots are in the folder `NAME-plots` next to it.
    """
    if out is not None and not out.name:
        raise InvalidInputError(f"out must be a file, got {str(out)!r:.60}.")
    data = read_run(run)
    if data.versions.get("kind") == "grower":
        raise InvalidInputError(
            f"{short(run)} has no report: a Grower wrote it. Use esper watch, or call "
            "grower.plot()."
        )
    file = run / PAGE if out is None else out
    folder = run / PLOTS if out is None else out.with_name(f"{out.stem}-plots")
    _require_writable(file, folder)
    try:
        summary, problem = summarise(data.evaluations), ""
    except InvalidInputError as error:
        summary = Summary(tasks=(), aggregate=None, conclusions=())
        problem = str(error)
    order = {name: index for index, name in enumerate(data.tasks)}
    tables = sorted(summary.tasks, key=lambda t: order.get(t.task, len(order)))
    plots = draw_plots(data, _results(data, tables))
    is_ppo = data.versions.get("kind") in ("ppo", "learn")
    is_cut_off = data.versions.get("kind") == "evaluation" and data.state == "stopped"
    results = [text for _, kind, text in data.notes if kind == TEST]
    page = _template().render(
        run=data,
        plots=plots,
        problem=problem,
        version=__version__,
        mark=MARK,
        is_ppo=is_ppo,
        sections=[s for s in SECTIONS if not is_ppo or s[0] in PPO_SECTIONS],
        state=CUT_OFF if is_cut_off else STATES[data.state],
        stages=STAGES.values(),
        shown_envs=SHOWN_ENVS,
        outcome=results if is_ppo else headline(summary),
        tables=[*filter(None, [summary.aggregate]), *tables],
        conclusions=summary.conclusions,
        light=LIGHT,
        dark=DARK,
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
    """Raise InvalidInputError if the page would overwrite anything but a report."""
    if not file.parent.is_dir():
        raise InvalidInputError(f"{short(file.parent)} is not a folder. Create it.")
    require_no_link(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(
            f"{short(folder)} is not a folder, but plots are written there. Remove it."
        )
    if file.is_dir():
        raise InvalidInputError(f"{short(file)} is a folder. Name a file.")
    if os.path.lexists(file):
        with storage(file, "read"):
            opening = Disk().read(file, 1_024)
        if opening and MARK.encode() not in opening:
            raise InvalidInputError(
                f"{short(file)} is not a report of Esper. Name another file."
            )


def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("esper.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "svg": Markup,
        "number": _number,
        "bounds": _bounds,
        "engineering": _engineering,
        "duration": _duration,
    }
    return environment.get_template("report.html")


def _visible(value: object) -> object:
    """Replace unprintable characters: they could reverse or hide text."""
    if isinstance(value, Markup):
        return value
    return "".join(
        sign if sign.isprintable() or sign in "\n\t" else "�" for sign in str(value)
    )


def _results(run: RunData, tables: Sequence[TaskSummary]) -> dict[str, TaskResults]:
    """Periodic and final evaluations of each task."""
    returns: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.evaluations:
        if row["stage"] == VALIDATION and is_learned(row["controller"]):
            value = nan if row["return"] is None else row["return"]
            returns[row["task"]][row["round"]].append(value)
    arms = {table.task: table.arms for table in tables}
    return {
        task: TaskResults(periodic=_periodic(returns[task]), arms=arms.get(task, ()))
        for task in {**returns, **arms}
    }


def _periodic(returns: dict[int, list[float]]) -> list[tuple[int, Interval]]:
    known = sorted(returns)
    at = np.linspace(0, len(known) - 1, min(len(known), MAX_EVALUATIONS)).round()
    return [
        (number, iqm_interval(np.array(returns[number]), resamples=1_000))
        for number in (known[int(index)] for index in at)
    ]


def _bounds(interval: Interval, spec: str) -> str:
    ends = [_number(end, spec) for end in (interval.low, interval.high)]
    return "" if "–" in ends else " to ".join(ends)


def _number(value: float, spec: str, unit: str = "") -> str:
    return f"{value:{spec}}{unit}".replace("-", "−") if isfinite(value) else "–"


def _engineering(value: float) -> str:
    for size, sign in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 0 if value >= 100 * size else 1
            return f"{value / size:.{digits}f} {sign}"
    return _number(value, ".3g")


def _duration(seconds: float) -> str:
    """Time in hours and minutes, minutes and seconds, or seconds."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.3g} s"
