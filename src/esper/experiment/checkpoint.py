"""Checkpoints that are whole or not there, and are believed only when they verify.

    checkpoints/000123.safetensors    every number of the run; in the header: step,
                                      score, facts, and SHA-256 of the file itself

A checkpoint is written under a hidden name and gets its own in one rename. It is read
again before an older one is removed. There is no file that names the newest: it is the
highest step that verifies, so nothing can disagree.

The digest is that of the file with zeros in the digest's place, so any changed byte
shows. It detects damage; it is no signature. What safetensors lets through is checked
besides: bytes that are no bool, and numbers that are not finite. Nothing in a file is
ever executed.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import torch
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from esper import __version__
from esper.contracts.errors import BadInput, StorageTrouble
from esper.contracts.state import Tensors
from esper.experiment.files import Disk, discard, publish, storage, unfinished
from esper.experiment.messages import one_line, quoted, short

SCHEMA: Final = "2"
MAX_HEADER: Final = 8 << 20
MAX_BYTES: Final = 4 << 30
"""That are read of a file; what is longer does not verify."""
MAY_BE_NAN: Final = "first_loss"
"""End of the names of tensors that are NaN before the first loss of an episode."""
BLANK: Final = b"0" * 64
STEP: Final = re.compile(r"([0-9]{6}|[1-9][0-9]{6,8})\.safetensors", re.ASCII)
SEAL: Final = re.compile(b'"sha256":"([0-9a-f]{64})"')


@validated(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Manifest:
    """The description of a checkpoint."""

    step: Annotated[int, Field(ge=0)]
    """How far the run was."""
    score: Annotated[float, Field(allow_inf_nan=False)] | None
    """How good it was; the checkpoint with the highest is kept."""
    facts: dict[str, Any]
    """What the run wants to know again: configuration digest, action space."""
    made_by: dict[str, str]
    """Versions of Esper, PyTorch and Python."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that verified."""

    path: Path
    manifest: Manifest
    tensors: Tensors = field(repr=False)
    rejected: tuple[str, ...] = ()
    """Why newer ones were passed over, one line each."""


class CheckpointFolder:
    """The checkpoints of one run; one process writes, any may read.

    Args:
        path: The folder; it is made when the first checkpoint is.
        disk: What writes.
        keep: How many of the newest are kept, besides the one with the best score.
    """

    def __init__(self, path: Path, disk: Disk | None = None, *, keep: int = 3) -> None:
        self.path, self._disk, self._keep = path, disk or Disk(), keep

    def publish(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        facts: Mapping[str, Any],
        *,
        score: float | None = None,
    ) -> Path:
        """Save a state; when this returns it survives a loss of power.

        Args:
            step: How far the run is; later than every checkpoint that verifies.
            tensors: The state by name.
            facts: What JSON can hold, given back by `load`.
            score: How good this state is, if that was measured.
        """
        target = self._file(step)
        made_by = {"esper": __version__, "torch": str(torch.__version__)}
        manifest = Manifest(step=step, score=score, facts=dict(facts), made_by=made_by)
        data = pack(tensors, manifest)
        with storage(target, "save"):
            self._require_later(step)
            if not self.path.is_dir():
                self._disk.mkdir(self.path)
                self._disk.sync_folder(self.path.parent)
            for leftover in unfinished(self.path):  # of an interrupted save
                discard(self._disk, leftover)
            publish(self._disk, target, data)
            try:
                self.load(step)
            except BadInput as error:
                raise StorageTrouble(
                    f"{short(target)} does not read back as it was written; nothing "
                    "older was removed. Check the disk."
                ) from error
            self._prune(step)
        return target

    def latest(self) -> Loaded | None:
        """The newest that verifies, with what was passed over; None if there is none.

        Refuses if there are some but none verifies.
        """
        found, rejected = self._first_good(reversed(self.steps()))
        if found is None and rejected:
            line = f"none of {len(rejected)} checkpoints verifies: {rejected[0]}"
            raise BadInput(one_line(line))
        return found

    def best(self) -> Loaded | None:
        """The one with the highest score that verifies, the earliest of equals."""
        scored = [
            (-each.score, each.step)
            for each in self.manifests()
            if each.score is not None
        ]
        return self._first_good(step for _, step in sorted(scored))[0]

    def load(self, which: int | Path) -> Loaded:
        """One checkpoint, by step or by its file; refuses unless all verifies."""
        file = self._file(which)
        if not file.exists():
            raise BadInput(f"{short(file)} is no checkpoint; expected a file.")
        with storage(file, "read"):
            data = self._disk.read(file, MAX_BYTES)
        tensors, manifest = unpack(short(file), data)
        if isinstance(which, int) and manifest.step != which:
            raise BadInput(
                f"{short(file)} holds step {manifest.step}; files were renamed or "
                "mixed up. Use another checkpoint."
            )
        return Loaded(path=file, manifest=manifest, tensors=tensors)

    def steps(self) -> list[int]:
        """Steps at which there should be a checkpoint, in order."""
        if not self.path.is_dir():
            return []
        with storage(self.path, "list"):
            names = {path.name for path in self.path.iterdir()}
        found = [STEP.fullmatch(name) for name in names]
        return sorted(int(match[1]) for match in found if match)

    def manifests(self) -> list[Manifest]:
        """What those say that have a good header, oldest first; not yet verified."""
        found = []
        for step in self.steps():
            file = self._file(step)
            with suppress(BadInput), storage(file, "read"):
                manifest = read_manifest(short(file), self._disk.read(file, MAX_HEADER))
                if manifest.step == step:
                    found.append(manifest)
        return found

    def _first_good(self, steps: Iterable[int]) -> tuple[Loaded | None, list[str]]:
        """The first that verifies, and why those before it do not."""
        rejected: list[str] = []
        for step in steps:
            try:
                return replace(self.load(step), rejected=tuple(rejected)), rejected
            except (BadInput, StorageTrouble) as error:
                rejected.append(str(error))
        return None, rejected

    def _require_later(self, step: int) -> None:
        """Refuse to go back behind a good checkpoint; damaged ones are replaced."""
        for later in [there for there in self.steps() if there >= step]:
            try:
                self.load(later)
            except BadInput:
                continue
            raise BadInput(
                f"{short(self.path)} has another state at step {later}, which is not "
                f"before {step}; resume from it or start another run."
            )

    def _prune(self, newest: int) -> None:
        """Remove what is older than the last `keep` good ones, except the best."""
        good = [each.step for each in self.manifests() if each.step <= newest]
        best, first = self.best(), good[-self._keep :][0]
        for step in self.steps():
            if step < first and (best is None or step != best.manifest.step):
                self._disk.unlink(self._file(step))

    def _file(self, which: int | Path) -> Path:
        if isinstance(which, Path):
            return which
        return self.path / f"{which:06d}.safetensors"


def read_manifest(name: str, data: bytes) -> Manifest:
    """The manifest in the header of a file; does not verify the digest.

    Args:
        name: What the file is called in an error.
        data: Its first bytes, the header included.
    """
    why = "damaged, or no checkpoint"
    try:
        size = int.from_bytes(data[:8], "little")
        found = json.loads(data[8 : 8 + min(size, MAX_HEADER)])["__metadata__"]
        schema = str(found["schema"])
        if schema != SCHEMA:
            why = (
                f"of schema {quoted(schema)}, Esper {__version__} reads {SCHEMA}; use "
                "the Esper that wrote it"
            )
        else:
            return _ADAPTER.validate_json(found["manifest"])
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise BadInput(f"{name} is {why}; use another checkpoint.")


_ADAPTER: Final = TypeAdapter(Manifest)


def pack(tensors: Mapping[str, Tensor], manifest: Manifest | None = None) -> bytes:
    """The bytes of a file; with a manifest, those of a checkpoint with its digest."""
    ready = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    if strange := _strange(ready):
        raise BadInput(f"{strange} and is not saved; go back to a good checkpoint.")
    metadata = None
    if manifest is not None:
        text = json.dumps(asdict(manifest), sort_keys=True, allow_nan=False)
        metadata = {"schema": SCHEMA, "manifest": text, "sha256": BLANK.decode()}
    data: bytes = save_bytes(ready, metadata)
    if found := SEAL.search(data, 0, MAX_HEADER) if metadata else None:
        digest = hashlib.sha256(data).hexdigest().encode()
        data = data[: found.start(1)] + digest + data[found.end(1) :]
    return data


def unpack(name: str, data: bytes) -> tuple[Tensors, Manifest]:
    """The tensors in the bytes of a checkpoint, on the CPU, and its manifest.

    Args:
        name: What the file is called in an error.
        data: All of it.
    """
    manifest = read_manifest(name, data)
    found = SEAL.search(data, 0, MAX_HEADER)
    blank = data if not found else data[: found.start(1)] + BLANK + data[found.end(1) :]
    if not found or hashlib.sha256(blank).hexdigest().encode() != found[1]:
        raise BadInput(f"{name} is damaged: its content is not what was saved.")
    try:
        tensors: Tensors = load_bytes(data)
        why = _strange(tensors)
    except (SafetensorError, RuntimeError) as error:  # of a kind torch does not count
        why = quoted(str(error).rpartition("deserializing: ")[2])
    if why:
        raise BadInput(f"{name} cannot be trusted: {why}; use another checkpoint.")
    return tensors, manifest


def _strange(tensors: Mapping[str, Tensor]) -> str:
    """Which tensor holds what no tensor should, or nothing."""
    for name, values in tensors.items():
        if values.dtype is torch.bool and bool((values.view(torch.uint8) > 1).any()):
            return f"{quoted(name)} holds bytes that are no bool"
        known = not values.is_floating_point() or bool(values.isfinite().all())
        if not known and not name.endswith(MAY_BE_NAN):
            return f"{quoted(name)} holds NaN or infinity"
    return ""
