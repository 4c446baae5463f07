"""Checkpoints that are complete or absent, and are verified before use.

    checkpoints/000123.safetensors    all tensors of the run; in the header: step,
                                      score, facts, and SHA-256 of the file itself

A checkpoint is written to a hidden file and then renamed. It is read back before an
older one is removed. The newest checkpoint is the highest step that verifies; no other
file names it. `esper.files` reads and writes.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from esper.contracts.errors import InvalidInputError, StorageError
from esper.contracts.messages import one_line, short
from esper.files import (
    Disk,
    Fit,
    Manifest,
    discard,
    manifest_of,
    pack,
    publish,
    read_header,
    read_safetensors,
    require_no_link,
    storage,
    unfinished,
)

if TYPE_CHECKING:  # listing runs must not import torch
    from torch import Tensor

    from esper.contracts.state import Tensors

STEP: Final = re.compile(r"([0-9]{6}|[1-9][0-9]{6,8})\.safetensors", re.ASCII)
Like = Mapping[str, "Tensor"] | None
"""Names, dtypes and shapes that tensors must have; None: any."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that verified."""

    path: Path
    manifest: Manifest
    tensors: "Tensors" = field(repr=False)
    rejected: tuple[str, ...] = ()
    """Why newer ones were skipped, one line each."""


class CheckpointFolder:
    """The checkpoints of one run; one process writes, any may read.

    It keeps the `keep` newest checkpoints and the one with the best score.
    """

    def __init__(self, path: Path, disk: Disk | None = None, *, keep: int = 3) -> None:
        self.path, self._disk, self._keep = path, disk or Disk(), keep

    def publish(
        self,
        step: int,
        tensors: Mapping[str, "Tensor"],
        facts: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> Path:
        """Save a state, durably; `step` must be later than every good checkpoint's.

        `facts` are JSON values, which `load` returns. `score` is the quality of the
        state.
        """
        target = self._file(step)
        data = pack(tensors, manifest_of(facts, step, score))
        with storage(target, "save"):
            for later in [there for there in self.steps() if there >= step]:
                if self._is_good(later, tensors):
                    raise InvalidInputError(
                        f"{short(self.path)} has another state at step {later}, so "
                        f"step {step} cannot be saved. Resume from it, or start a new "
                        "run."
                    )
            if not self.path.is_dir():
                self._disk.mkdir(self.path)
                self._disk.sync_folder(self.path.parent)
            for leftover in unfinished(self.path):  # of an interrupted save
                discard(self._disk, leftover)
            publish(self._disk, target, data)
            if self._disk.read(target, len(data) + 1) != data:
                raise StorageError(
                    f"{short(target)} does not read back as it was written. Nothing "
                    "older was removed. Check the disk."
                )
            self.prune(step, tensors)
        return target

    def latest(self, like: Like = None, within: str = "") -> Loaded | None:
        """The newest that verifies; None if there are no checkpoints.

        Refuses if none verifies. For arguments see `load`.
        """
        return self._first_good(reversed(self.steps()), [], like, within)

    def best(self, like: Like = None, within: str = "") -> Loaded | None:
        """That of the highest score that verifies; without scores, the newest.

        Of equal scores the earliest. Otherwise like `latest`.
        """
        order, rejected = self._by_score()
        return self._first_good(order, rejected, like, within)

    def load(self, which: int | Path, like: Like = None, within: str = "") -> Loaded:
        """Load a checkpoint by step or file; refuses unless all of it verifies.

        `like` is checked before tensors are read. Only names with the prefix `within`
        are.
        """
        file = self._file(which)
        tensors, manifest = read_safetensors(file, _fit(like), within, disk=self._disk)
        if isinstance(which, int):
            _require_step(file, manifest, which)
        return Loaded(path=file, manifest=manifest, tensors=tensors)

    def steps(self) -> list[int]:
        """Steps of all checkpoint files, in order."""
        if not os.path.isdir(self.path):
            return []
        require_no_link(self.path)
        with storage(self.path, "list"):
            names = {path.name for path in self.path.iterdir()}
        found = [STEP.fullmatch(name) for name in names]
        return sorted(int(match[1]) for match in found if match)

    def manifests(self) -> list[Manifest]:
        """Manifests of files with a valid header, oldest first; not verified."""
        return self._headers()[0]

    def _headers(self) -> tuple[list[Manifest], list[str]]:
        """Manifests of files with a valid header, and errors of the others."""
        found, rejected = [], []
        for step in self.steps():
            file = self._file(step)
            try:
                with storage(file, "read"), self._disk.open(file) as stream:
                    manifest, _ = read_header(short(file), stream)
                _require_step(file, manifest, step)
                found.append(manifest)
            except (InvalidInputError, StorageError) as error:
                rejected.append(str(error))
        return found, rejected

    def _by_score(self) -> tuple[list[int], list[str]]:
        """Steps by score, best first, then those without one; and errors."""
        headers, rejected = self._headers()
        scored = [
            (-each.score, each.step) for each in headers if each.score is not None
        ]
        rest = [each.step for each in headers if each.score is None]
        return [*(step for _, step in sorted(scored)), *reversed(rest)], rejected

    def _first_good(
        self, steps: Iterable[int], rejected: list[str], like: Like, within: str
    ) -> Loaded | None:
        """The first that verifies, with errors of others; None if there are none."""
        for step in steps:
            try:
                found = self.load(step, like, within)
                return replace(found, rejected=tuple(rejected))
            except (InvalidInputError, StorageError) as error:
                rejected.append(str(error))
        if rejected:
            line = f"none of {len(rejected)} checkpoints verifies: {rejected[0]}"
            raise InvalidInputError(one_line(line))
        return None

    def _is_good(self, step: int, like: Like) -> bool:
        """Whether a checkpoint verifies; its tensors are not loaded."""
        file = self._file(step)
        try:
            _, manifest = read_safetensors(
                file, _fit(like), mapped=True, disk=self._disk
            )
            _require_step(file, manifest, step)
        except InvalidInputError:
            return False
        return True

    def prune(self, newest: int, like: Like = None) -> None:
        """Remove checkpoints older than the last `keep` good ones, except the best.

        Files that do not read as checkpoints may belong to someone else and stay.
        """
        good = [each.step for each in self.manifests() if each.step <= newest]
        order = self._by_score()[0]
        best = next((step for step in order if self._is_good(step, like)), None)
        for step in good[: -self._keep]:
            if step != best:
                with storage(self._file(step), "remove"):
                    self._disk.unlink(self._file(step))

    def _file(self, which: int | Path) -> Path:
        if isinstance(which, Path):
            return which
        return self.path / f"{which:06d}.safetensors"


def _fit(like: Like) -> Fit | None:
    """Compares the tensors of a file with the expected ones."""
    if like is None:
        return None
    from esper.contracts.state import check_fit

    return lambda tensors, manifest: check_fit(like, tensors)


def _require_step(file: Path, manifest: Manifest, step: int) -> None:
    if manifest.step != step:
        raise InvalidInputError(
            f"{short(file)} holds step {manifest.step}; files were renamed or mixed "
            "up. Use another checkpoint."
        )
