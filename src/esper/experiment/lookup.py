"""Runs by name or by folder."""

from difflib import get_close_matches
from pathlib import Path

from esper.contracts.errors import BadInput
from esper.experiment.run import CONFIG, Run
from esper.experiment.storage.disk import said, short


def find_run(text: str, root: Path) -> Path:
    """The folder of a run.

    Args:
        text: Its name in `root`, or its folder.
        root: Where runs are.
    """
    if "\0" in text or not text:
        raise BadInput(f"expected the name or folder of a run, got {said(text)}.")
    for path in (root / text, Path(text)):
        if (path / CONFIG).is_file():
            return path
    names = [each.name for each in Run.list(root)]
    near = get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ". See esper runs."
    raise BadInput(f"there is no run {said(text)} in {short(root)}{hint}")
