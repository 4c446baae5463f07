"""The report of a run: one page, and every plot as PNG and SVG.

The page is a Jinja2 template in which every value is escaped; styles and plots are in
it, there is no script, and its content security policy forbids the browser to load or
run anything. Everything is drawn before anything is written, and every file is replaced
as a whole, so that a report can be made again at any time, also while a run goes on.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from typing import Final

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from esper import __version__
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import short
from esper.evaluation.statistics import Interval, iqm_interval
from esper.evaluation.summary import (
    Summary,
    TaskSummary,
    headline,
    summarise,
)
from esper.files import Disk, publish, require_no_link, storage
from esper.report.data import SHOWN_ENVS, RunData, read_run
from esper.report.plots import STAGES, TaskResults, draw_plots
from esper.report.style import DARK, LIGHT
from esper.runs.records import is_learned

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
"""Where a run stands, in words."""
CUT_OFF: Final = "The evaluation stopped before its end; begin another one."
PPO_SECTIONS: Final = ("learning", "heads", "updates", "run")
"""Those of an agent in an environment, which plants nothing."""


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
        raise InvalidInputError(f"expected a file for the page, got {str(out)!r:.60}.")
    data = read_run(run)
    file = run / PAGE if out is None else out
    folder = run / PLOTS if out is None else out.with_name(f"{out.stem}-plots")
    _require_writable(file, folder)
    summary, trouble = Summary(tasks=(), aggregate=None, conclusions=()), ""
    try:
        summary = summarise(data.evaluations)
    except InvalidInputError as error:
        trouble = str(error)
    # Tables in the order of the configuration.
    order = {name: index for index, name in enumerate(data.tasks)}
    tables = sorted(summary.tasks, key=lambda t: order.get(t.task, len(order)))
    plots = draw_plots(data, _results(data, tables))
    is_ppo = data.versions.get("kind") == "ppo"
    is_cut_off = data.versions.get("kind") == "evaluation" and data.state == "stopped"
    judged = [text for _, kind, text in data.notes if kind == "judged"]
    page = (
        _environment()
        .get_template("report.html")
        .render(
            run=data,
            plots=plots,
            trouble=trouble,
            version=__version__,
            mark=MARK,
            is_ppo=is_ppo,
            sections=[
                each for each in SECTIONS if not is_ppo or each[0] in PPO_SECTIONS
            ],
            state=CUT_OFF if is_cut_off else STATES[data.state],
            stages=STAGES.values(),
            shown_envs=SHOWN_ENVS,
            outcome=judged if is_ppo else headline(summary),
            tables=[*filter(None, [summary.aggregate]), *tables],
            conclusions=summary.conclusions,
            light=LIGHT,
            dark=DARK,
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
        raise InvalidInputError(
            f"{short(file.parent)} is not a folder; create it first."
        )
    require_no_link(folder)
    if folder.exists() and not folder.is_dir():
        raise InvalidInputError(
            f"{short(folder)} is not a folder; remove it. Plots go there."
        )
    if file.is_dir():
        raise InvalidInputError(f"{short(file)} is a folder; name a file for the page.")
    if os.path.lexists(file):
        with storage(file, "read"):
            opening = Disk().read(file, 1_024)
        if opening and MARK.encode() not in opening:
            raise InvalidInputError(
                f"{short(file)} is no report of Esper; name another file."
            )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("esper.report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "listed": _listed,
        "svg": Markup,
        "number": _number,
        "bounds": _bounds,
        "engineering": _engineering,
        "duration": _duration,
    }
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


def _results(run: RunData, tables: Sequence[TaskSummary]) -> dict[str, TaskResults]:
    """Evaluations of each task, as plots show them."""
    returns: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.evaluations:
        if row["stage"] == "watched" and is_learned(row["controller"]):
            value = nan if row["return"] is None else row["return"]
            returns[row["task"]][row["round"]].append(value)
    arms = {table.task: table.arms for table in tables}
    return {
        task: TaskResults(periodic=_periodic(returns[task]), arms=arms.get(task, ()))
        for task in {**returns, **arms}
    }


def _periodic(returns: dict[int, list[float]]) -> list[tuple[int, Interval]]:
    known = sorted(returns)
    at = np.linspace(0, len(known) - 1, min(len(known), PERIODIC)).round()
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
    """Time in the two largest units."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.3g} s"


def _listed(names: Sequence[object]) -> str:
    """Names in a sentence."""
    texts = [str(name) for name in names]
    return " and ".join([*filter(None, [", ".join(texts[:-1])]), *texts[-1:]])
