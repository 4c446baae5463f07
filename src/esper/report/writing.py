"""Writes the report of a run: one page, and every figure as PNG and SVG.

Everything is drawn before anything is written, and every file is there whole or not at
all. A report can be made again at any time, and takes the place of the last one.
"""

from pathlib import Path
from typing import Final

from esper.contracts.errors import BadInput
from esper.experiment.storage.disk import Disk, publish, short, storage
from esper.report.facts import read_facts
from esper.report.figures import draw
from esper.report.page import MARK, page
from esper.report.worth import Worth

PAGE: Final = "report.html"
PLOTS: Final = "plots"
OPENING: Final = 1_024
"""Bytes in which a page says who made it."""


def write_report(run: Path, out: Path | None = None) -> Path:
    """Write a page about a run, also while the run goes on.

    Args:
        run: The run's folder.
        out: Where to; None: `report.html` in the run's folder. Figures are put in the
            folder `plots` of the run, or for `NAME.html` elsewhere in `NAME-plots`.

    Returns:
        The page.
    """
    if out is not None and not out.name:
        raise BadInput(f"expected a file for the page, got {str(out)!r:.60}.")
    facts = read_facts(run)
    file = run / PAGE if out is None else out
    folder = run / PLOTS if out is None else out.with_name(f"{out.stem}-plots")
    _require_room(file, folder)
    worth = Worth(facts.evaluations, facts.tasks)
    drawings = draw(facts, worth.judgements(), worth.arms())
    text = page(facts, drawings, worth)
    disk = Disk()
    with storage(folder, "make"):
        folder.mkdir(exist_ok=True)
    for drawing in (one for several in drawings.values() for one in several):
        publish(disk, folder / f"{drawing.name}.svg", drawing.svg)
        publish(disk, folder / f"{drawing.name}.png", drawing.png)
    publish(disk, file, text.encode())
    return file


def _require_room(file: Path, folder: Path) -> None:
    """Refuse to write where something else is."""
    if not file.parent.is_dir():
        raise BadInput(f"{short(file.parent)} is no folder; make it first.")
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"{short(folder)} is no folder; remove it, figures go there.")
    if file.is_dir():
        raise BadInput(f"{short(file)} is a folder; name a file for the page.")
    if file.exists():
        with storage(file, "read"), file.open("rb") as stream:
            opening = stream.read(OPENING)
        if opening and MARK.encode() not in opening:
            raise BadInput(f"{short(file)} is no report of Esper; name another file.")
