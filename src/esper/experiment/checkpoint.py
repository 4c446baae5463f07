"""Checkpoints that are whole or not there, and are believed only when they verify.

    checkpoints/000123/state.safetensors    every number of the run
                       manifest.json        step, score, facts, size and SHA-256

A checkpoint is made in a hidden folder, the manifest last, and gets its name in one
rename. It is read again and compared before an older one is removed. There is no file
that names the newest: it is the highest step that verifies, so nothing can disagree.

safetensors checks that a header describes exactly the bytes behind it. Checked here is
what it lets through: tensors of other kinds, bytes that are no bool, and numbers that
are not finite unless the caller names the tensor. Nothing in a file is ever executed.
"""

import hashlib
import json
import platform
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from math import isfinite
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from esper import __version__
from esper.contracts.errors import BadInput, StorageTrouble
from esper.contracts.state import Tensors
from esper.experiment.files import Disk, beside, discard, storage, unfinished
from esper.experiment.messages import one_line, quoted, short

SCHEMA: Final = 1
STATE: Final = "state.safetensors"
MAX_MANIFEST: Final = 1 << 20
MAX_STEP: Final = 10**12
MANIFEST: Final = "manifest.json"
MAX_TENSORS: Final = 10_000
MAX_BYTES: Final = 4 << 30
MAX_RANK: Final = 16
KINDS: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)

DISGUISES: Final = {
    "a zip archive, as torch.save writes": (b"PK\x03\x04",),
    "a pickle": (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    "a Git LFS pointer; fetch it with git lfs pull": (b"version https://git-lfs",),
    "an HTML page; the download went wrong": (b"<!doctype", b"<html"),
    "a gzip archive": (b"\x1f\x8b",),
}
"""What a file is that begins so."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The description of a checkpoint: JSON in one form only, with its own SHA-256.

    Written again it gives the same bytes, so any changed byte shows. The digest detects
    damage; it is no signature.
    """

    step: int
    """How far the run was."""
    score: float | None
    """How good it was; the checkpoint with the highest is kept."""
    facts: Mapping[str, Any]
    """What the run wants to know again: configuration digest, action space."""
    made_by: Mapping[str, str]
    """Versions of Esper, PyTorch and Python."""
    size: int
    """Bytes of the state."""
    sha256: str
    """Digest of the state."""


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
        may_be_nan: Names, or patterns such as `*/first_loss`, of tensors that may hold
            numbers that are not finite; in all others they are refused.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk | None = None,
        *,
        keep: int = 3,
        may_be_nan: Collection[str] = (),
    ) -> None:
        if keep < 1:
            raise BadInput(f"keep must be at least 1, got {keep}.")
        self.path, self._disk = path, disk or Disk()
        self._keep, self._may_be_nan = keep, tuple(may_be_nan)

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
            step: How far the run is; later than every checkpoint that verifies. The
                same state at the same step is not written twice.
            tensors: The state by name.
            facts: What JSON can hold, given back by `load`.
            score: How good this state is, if that was measured.
        """
        state = pack(tensors, self._may_be_nan)
        sha256 = hashlib.sha256(state).hexdigest()
        manifest = write_manifest(
            Manifest(
                step=step,
                score=score,
                facts=facts,
                made_by=made_by(),
                size=len(state),
                sha256=sha256,
            )
        )
        target = self._folder(step)
        with storage(target, "save"):
            if not self._is_there(step, sha256):
                self._clean()
                self._write(target, {STATE: state, MANIFEST: manifest})
            self._disk.sync_folder(self.path)
            try:
                self.load(step)
            except BadInput as error:
                raise StorageTrouble(
                    f"{short(target)} does not read back as it was written; nothing "
                    "older was removed. Check the disk."
                ) from error
            self._prune(step)
            self._clean()
        return target

    def latest(self) -> Loaded | None:
        """The newest that verifies, with what was passed over; None if there is none.

        Refuses if there are some but none verifies.
        """
        rejected: list[str] = []
        for step in reversed(self.steps()):
            try:
                return replace(self.load(step), rejected=tuple(rejected))
            except (BadInput, StorageTrouble) as error:
                rejected.append(str(error))
        if rejected:
            line = f"none of {len(rejected)} checkpoints verifies: {rejected[0]}"
            raise BadInput(one_line(line))
        return None

    def best(self) -> Loaded | None:
        """The one with the highest score that verifies, the earliest of equals."""
        rejected: list[str] = []
        for manifest in sorted(self.manifests(), key=_rank, reverse=True):
            if manifest.score is None:
                break
            try:
                return replace(self.load(manifest.step), rejected=tuple(rejected))
            except (BadInput, StorageTrouble) as error:
                rejected.append(str(error))
        return None

    def load(self, which: int | Path) -> Loaded:
        """One checkpoint, by step or by its folder; refuses unless all verifies."""
        file = self._folder(which) / STATE
        with storage(file.parent, "read"):
            manifest = self._manifest(which)
            state = self._disk.read(file, manifest.size + 1)
        if hashlib.sha256(state).hexdigest() != manifest.sha256:
            why = "damaged: its content is not what was saved"
            raise BadInput(
                f"{short(file)} is {recognise(state) or why}; use another checkpoint."
            )
        tensors = unpack(short(file), state, self._may_be_nan)
        return Loaded(path=file.parent, manifest=manifest, tensors=tensors)

    def steps(self) -> list[int]:
        """Steps at which there should be a checkpoint, in order."""
        if not self.path.is_dir():
            return []
        with storage(self.path, "list"):
            names = [path.name for path in self.path.iterdir()]
        return sorted(
            int(name)
            for name in names
            if re.fullmatch("[0-9]{6,13}", name) and name == name_of(int(name))
        )

    def manifests(self) -> list[Manifest]:
        """What those say that have a good manifest, oldest first; cheap."""
        found = []
        for step in self.steps():
            with suppress(BadInput), storage(self._folder(step), "read"):
                found.append(self._manifest(step))
        return found

    def _is_there(self, step: int, sha256: str) -> bool:
        """Whether this very state is there; refuses to go back behind a good one."""
        for later in [there for there in self.steps() if there >= step]:
            try:
                manifest = self.load(later).manifest
            except BadInput:
                continue
            if later > step or manifest.sha256 != sha256:
                raise BadInput(
                    f"{short(self.path)} has another state at step {later}, which is "
                    f"not before {step}; resume from it or start another run."
                )
            return True
        return False

    def _write(self, target: Path, files: Mapping[str, bytes]) -> None:
        """Make a folder with files, and give it its name in one move."""
        disk, temporary = self._disk, beside(target)
        if not self.path.is_dir():
            disk.mkdir(self.path)
            disk.sync_folder(self.path.parent)
        try:
            disk.mkdir(temporary)
            for name, data in files.items():
                disk.create(temporary / name, data)
                disk.sync_file(temporary / name)
            disk.sync_folder(temporary)
            if target.exists():  # a damaged one; a good one was refused before
                disk.rename(target, beside(target.with_name(f"{target.name}.bad")))
            disk.rename(temporary, target)
        except OSError:
            with suppress(OSError):
                discard(disk, temporary)
            raise

    def _prune(self, newest: int) -> None:
        """Remove what is older than the last `keep` good ones, except the best."""
        good = [entry for entry in self.manifests() if entry.step <= newest]
        first = good[-self._keep :][0].step
        best = max(good, key=_rank)
        for step in self.steps():
            if step < first and (best.score is None or step != best.step):
                folder = self._folder(step)
                hidden = beside(folder.with_name(f"{folder.name}.old"))
                self._disk.rename(folder, hidden)
                self._disk.sync_folder(self.path)
                discard(self._disk, hidden)

    def _clean(self) -> None:
        """Remove what an interrupted save or removal left behind."""
        if self.path.is_dir():
            for leftover in unfinished(self.path):
                discard(self._disk, leftover)

    def _manifest(self, which: int | Path) -> Manifest:
        folder = self._folder(which)
        if not folder.is_dir():
            raise BadInput(f"{short(folder)} is no checkpoint; expected a folder.")
        there = sorted(path.name for path in folder.iterdir())
        if there != [MANIFEST, STATE]:
            odd = sorted({*there} ^ {MANIFEST, STATE})
            raise BadInput(
                f"{short(folder)} must hold {MANIFEST} and {STATE} only; missing or "
                f"odd: {quoted(odd[0])}. Use another checkpoint."
            )
        file = folder / MANIFEST
        data = self._disk.read(file, MAX_MANIFEST + 1)
        manifest = read_manifest(short(file), data)
        if isinstance(which, int) and manifest.step != which:
            raise BadInput(
                f"{short(folder)} holds step {manifest.step}; folders were renamed or "
                "mixed up. Use another checkpoint."
            )
        return manifest

    def _folder(self, which: int | Path) -> Path:
        return self.path / name_of(which) if isinstance(which, int) else which


def name_of(step: int) -> str:
    """The folder's name of a step."""
    if not 0 <= step <= MAX_STEP:
        raise BadInput(f"step must lie in 0 to {MAX_STEP:,}, got {step}.")
    return f"{step:06d}"


def _rank(manifest: Manifest) -> tuple[float, int]:
    score = manifest.score
    return (-float("inf") if score is None else score, -manifest.step)


def write_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest that `read_manifest` will accept."""
    score = manifest.score
    if score is not None and not isfinite(score):
        raise BadInput(f"score must be finite or None, got {score}.")
    body = {
        "schema": SCHEMA,
        "step": manifest.step,
        "score": None if score is None else float(score),
        "facts": manifest.facts,
        "made_by": manifest.made_by,
        "files": {STATE: {"bytes": manifest.size, "sha256": manifest.sha256}},
    }
    try:
        data = _seal(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"facts must be what JSON holds, all finite: {quoted(str(error))}."
        ) from error
    if len(data) > MAX_MANIFEST:
        raise BadInput(
            f"facts make a manifest of {len(data):,} bytes, at most {MAX_MANIFEST:,}; "
            "store large things elsewhere."
        )
    return data


def read_manifest(name: str, data: bytes) -> Manifest:
    """Refuse any byte that `write_manifest` would not have written.

    Args:
        name: What the file is called in an error.
        data: All of it, or more than `MAX_MANIFEST` bytes of it.
    """
    if len(data) > MAX_MANIFEST:
        raise BadInput(f"{name} is larger than {MAX_MANIFEST:,} bytes; use another.")
    try:
        body = json.loads(data.decode("ascii"))
        version = body.pop("schema")
        if type(version) is not int:
            raise TypeError("schema")
        if version != SCHEMA:
            raise BadInput(
                f"{name} has schema {quoted(str(version))}, Esper {__version__} reads "
                f"{SCHEMA}; use the Esper that wrote it."
            )
        del body["sha256"]
        if _seal({"schema": version, **body}) != data:
            raise KeyError("sha256")
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{name} is {recognise(data) or 'damaged'}; use another checkpoint."
        ) from error
    match body:
        case {
            "step": int(step),
            "score": int() | float() | None as score,
            "facts": dict(facts),
            "made_by": dict(versions),
            "files": {"state.safetensors": {"bytes": int(size), "sha256": str(sha256)}},
        } if (
            len(body) == 5
            and len(body["files"]) == 1
            and 0 <= step <= MAX_STEP
            and 0 < size <= MAX_BYTES
        ):
            return Manifest(
                step=step,
                score=None if score is None else float(score),
                facts=facts,
                made_by={name: str(version) for name, version in versions.items()},
                size=size,
                sha256=sha256,
            )
    raise BadInput(
        f"{name} is not as Esper writes it: it must list {STATE} alone, of at most "
        f"{MAX_BYTES:,} bytes; use another checkpoint."
    )


def made_by() -> dict[str, str]:
    """Versions that a checkpoint is made with."""
    return {
        "esper": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _seal(body: Mapping[str, Any]) -> bytes:
    """JSON in its one form, with a digest of itself."""
    digest = hashlib.sha256(_text(body).encode()).hexdigest()
    return _text({**body, "sha256": digest}).encode()


def _text(value: object) -> str:
    return json.dumps(value, allow_nan=False, indent=1, sort_keys=True) + "\n"


def pack(tensors: Mapping[str, Tensor], may_be_nan: Collection[str] = ()) -> bytes:
    """The bytes of a file that `unpack` will accept.

    Args:
        tensors: On any device; none may share memory with another.
        may_be_nan: Names, or patterns such as `*/first_loss`, of tensors that may hold
            numbers that are not finite.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__" or not name.isprintable():
            raise BadInput(f"a tensor cannot be called {quoted(name)}; rename it.")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise BadInput(f"tensor {quoted(name)} is sparse or has no data; fill it.")
    ready = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    if strange := _strange(ready, may_be_nan):
        raise BadInput(f"{strange} and is not saved; go back to a good checkpoint.")
    try:
        data: bytes = save_bytes(ready)
    except RuntimeError as error:
        raise BadInput("two tensors share memory; clone one before saving.") from error
    if len(data) > MAX_BYTES:
        raise BadInput(
            f"the state has {len(data):,} bytes, at most {MAX_BYTES:,} are saved; use "
            "fewer hosts."
        )
    return data


def unpack(name: str, data: bytes, may_be_nan: Collection[str] = ()) -> Tensors:
    """The tensors in the bytes of a file, on the CPU.

    Args:
        name: What the file is called in an error.
        data: All of it.
        may_be_nan: As for `pack`.
    """
    if disguise := recognise(data):
        raise BadInput(f"{name} is {disguise}; Esper reads safetensors only.")
    try:
        tensors: Tensors = load_bytes(data)
        why = _strange(tensors, may_be_nan)
    except SafetensorError as error:
        why = quoted(str(error).rpartition("deserializing: ")[2])
    if why:
        raise BadInput(f"{name} cannot be trusted: {why}; use another checkpoint.")
    return tensors


def recognise(opening: bytes) -> str:
    """What a file is that is not what it should be, or nothing if unknown."""
    start = opening[:64].lstrip().lower()
    for what, signs in DISGUISES.items():
        if opening.startswith(signs) or start.startswith(signs):
            return what
    return ""


def _strange(tensors: Mapping[str, Tensor], may_be_nan: Collection[str]) -> str:
    """Which tensor is or holds what no tensor should, or nothing."""
    if not 0 < len(tensors) <= MAX_TENSORS:
        return f"it has {len(tensors):,} tensors, expected 1 to {MAX_TENSORS:,},"
    for name, values in tensors.items():
        if values.dtype not in KINDS or values.ndim > MAX_RANK:
            return f"{quoted(name)} is of unknown kind {values.dtype} or shape"
        if values.dtype is torch.bool:
            if bool((values.view(torch.uint8) > 1).any()):
                return f"{quoted(name)} holds bytes that are no bool"
        elif values.is_floating_point() and not bool(values.isfinite().all()):
            if any(fnmatchcase(name, pattern) for pattern in may_be_nan):
                continue
            return f"{quoted(name)} holds NaN or infinity"
    return ""
