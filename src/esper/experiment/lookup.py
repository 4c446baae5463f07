"""Runs by name or by folder."""

import os
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
    if not text.isprintable() or not text:
        raise BadInput(f"expected the name or folder of a run, got {said(text)}.")
    # os.path says no of what cannot be looked at; Path would raise.
    there = [path for path in (root / text, Path(text)) if os.path.isdir(path)]
    for path in there:
        if os.path.isfile(path / CONFIG):
            return path if path.name not in ("", "..") else path.resolve()
    if there:
        raise BadInput(f"{short(there[0])} is no run: it has no {CONFIG}.")
    names = [each.name for each in Run.list(root)]
    near = get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ". See esper runs."
    raise BadInput(f"there is no run {said(text)} in {short(root)}{hint}")
