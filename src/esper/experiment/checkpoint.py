"""Checkpoints that are whole or not there, and are believed only when they verify.

    checkpoints/000123.safetensors    every number of the run; in the header: step,
                                      score, facts, and SHA-256 of the file itself

A checkpoint is written under a hidden name and gets its own in one rename. It is read
again before an older one is removed. There is no file that names the newest: it is the
highest step that verifies, so nothing can disagree.

The digest is that of the file with zeros in the digest's place, so any changed byte
shows. It detects damage; it is no signature. Names, sizes and shapes are judged by the
header alone, before anything is read; then the digest is verified piece by piece, and
only tensors that are wanted take memory. Bytes that are no bool and numbers that are
not finite are refused too. Nothing in a file is ever executed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from io import BufferedIOBase
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from esper import __version__
from esper.contracts.errors import BadInput, NotFinite, StorageTrouble
from esper.experiment.files import (
    Disk,
    discard,
    publish,
    require_no_link,
    storage,
    unfinished,
)
from esper.experiment.messages import one_line, quoted, short

if TYPE_CHECKING:  # a list of runs reads headers, and is there at once without torch
    from torch import Tensor

    from esper.contracts.state import Tensors

SCHEMA: Final = "3"
MAX_HEADER: Final = 1 << 20
MAX_BYTES: Final = 4 << 30
"""What is longer is refused."""
PIECE: Final = 1 << 20
"""Bytes that are read at once to verify a digest."""
KINDS: Final = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
}
"""What tensors may hold, by the names of safetensors: its name in torch, its bytes."""
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


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Entry:
    """Where a tensor is in a file, and what it is."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(KINDS)})$")]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return prod(self.shape) * KINDS[self.dtype][1]


@dataclass(frozen=True, kw_only=True)
class Header:
    """What the beginning of a file says."""

    manifest: Manifest
    entries: Mapping[str, Any] = field(repr=False)
    """Not yet judged; see `judged_entries`."""
    raw: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint that verified."""

    path: Path
    manifest: Manifest
    tensors: "Tensors" = field(repr=False)
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
        tensors: Mapping[str, "Tensor"],
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
        made_by = {"esper": __version__, "torch": version("torch")}
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
            self.prune(step)
        return target

    def latest(
        self, like: Mapping[str, "Tensor"] | None = None, within: str = ""
    ) -> Loaded | None:
        """The newest that verifies, with what was passed over; None if there is none.

        Refuses if there are some but none verifies. For arguments see `load`.
        """
        return self._first_good(reversed(self.steps()), [], like, within)

    def best(
        self, like: Mapping[str, "Tensor"] | None = None, within: str = ""
    ) -> Loaded | None:
        """That of the highest score that verifies, the earliest of equals.

        Without a score, the newest. As `latest` in all else.
        """
        headers, rejected = self._headers()
        scored = [
            (-each.score, each.step) for each in headers if each.score is not None
        ]
        rest = [each.step for each in headers if each.score is None]
        order = [*(step for _, step in sorted(scored)), *reversed(rest)]
        return self._first_good(order, rejected, like, within)

    def load(
        self,
        which: int | Path,
        like: Mapping[str, "Tensor"] | None = None,
        within: str = "",
    ) -> Loaded:
        """One checkpoint; refuses unless all verifies.

        Args:
            which: Its step, or its file.
            like: Names, dtypes and shapes that its tensors must have, which is judged
                before anything but the header is read.
            within: Read only tensors whose names begin with this.
        """
        file = self._file(which)
        if not os.path.lexists(file):
            raise BadInput(f"{short(file)} is no checkpoint; expected a file.")
        with storage(file, "read"), self._disk.open(file) as stream:
            tensors, manifest = read_checkpoint(short(file), stream, like, within)
        if isinstance(which, int) and manifest.step != which:
            raise _misplaced(file, manifest)
        return Loaded(path=file, manifest=manifest, tensors=tensors)

    def steps(self) -> list[int]:
        """Steps at which there should be a checkpoint, in order."""
        if not os.path.isdir(self.path):
            return []
        require_no_link(self.path)
        with storage(self.path, "list"):
            names = {path.name for path in self.path.iterdir()}
        found = [STEP.fullmatch(name) for name in names]
        return sorted(int(match[1]) for match in found if match)

    def manifests(self) -> list[Manifest]:
        """What those say that have a good header, oldest first; not yet verified."""
        return self._headers()[0]

    def _headers(self) -> tuple[list[Manifest], list[str]]:
        """Manifests of those that have a good header, and why others have none."""
        found, rejected = [], []
        for step in self.steps():
            file = self._file(step)
            try:
                with storage(file, "read"), self._disk.open(file) as stream:
                    manifest = read_header(short(file), stream).manifest
                if manifest.step != step:
                    raise _misplaced(file, manifest)
                found.append(manifest)
            except (BadInput, StorageTrouble) as error:
                rejected.append(str(error))
        return found, rejected

    def _first_good(
        self,
        steps: Iterable[int],
        rejected: list[str],
        like: Mapping[str, "Tensor"] | None,
        within: str,
    ) -> Loaded | None:
        """The first that verifies, with why others do not; None if there are none."""
        for step in steps:
            try:
                found = self.load(step, like, within)
                return replace(found, rejected=tuple(rejected))
            except (BadInput, StorageTrouble) as error:
                rejected.append(str(error))
        if rejected:
            line = f"none of {len(rejected)} checkpoints verifies: {rejected[0]}"
            raise BadInput(one_line(line))
        return None

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

    def prune(self, newest: int) -> None:
        """Remove what is older than the last `keep` good ones, except the best.

        What does not read as a checkpoint may be somebody else's and stays.
        """
        good = [each.step for each in self.manifests() if each.step <= newest]
        best = self.best()
        for step in good[: -self._keep]:
            if best is None or step != best.manifest.step:
                with storage(self._file(step), "remove"):
                    self._disk.unlink(self._file(step))

    def _file(self, which: int | Path) -> Path:
        if isinstance(which, Path):
            return which
        return self.path / f"{which:06d}.safetensors"


def _misplaced(file: Path, manifest: Manifest) -> BadInput:
    return BadInput(
        f"{short(file)} holds step {manifest.step}; files were renamed or mixed up. "
        "Use another checkpoint."
    )


def read_header(name: str, stream: BufferedIOBase) -> Header:
    """The header of a file; neither tensors nor digest are verified.

    Args:
        name: What the file is called in an error.
        stream: All of the file, at its beginning.
    """
    why = "damaged, or no checkpoint"
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    raw = first + stream.read(length if length <= MAX_HEADER else 0)
    try:
        entries = json.loads(raw[8:])
        about = entries.pop("__metadata__")
        schema = str(about["schema"])
        if schema != SCHEMA:
            why = (
                f"of schema {quoted(schema)}, Esper {__version__} reads {SCHEMA}; use "
                "the Esper that wrote it"
            )
        elif len(raw) == 8 + length:
            manifest = _MANIFEST.validate_json(about["manifest"])
            return Header(manifest=manifest, entries=entries, raw=raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise BadInput(f"{name} is {why}; use another checkpoint.")


_MANIFEST: Final = TypeAdapter(Manifest)
_ENTRIES: Final = TypeAdapter(dict[str, Entry])


def judged_entries(name: str, header: Header, size: int) -> dict[str, Entry]:
    """Where each tensor is; refuses unless they fill the file without holes.

    Args:
        name: What the file is called in an error.
        header: Of the file.
        size: Bytes of the file.
    """
    try:
        entries = _ENTRIES.validate_json(json.dumps(header.entries))
    except ValueError:
        raise _untrusted(name, "what it says of its tensors is none") from None
    end = 0
    for key, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        if entry.data_offsets != [end, end + entry.bytes]:
            raise _untrusted(name, f"{quoted(key)} is not where it should be")
        end += entry.bytes
    if len(header.raw) + end != size:
        expected = f"{len(header.raw) + end:,} bytes, it has {size:,}"
        raise BadInput(f"{name} is damaged: its tensors take {expected}.")
    if size > MAX_BYTES:
        raise _untrusted(name, f"it has {size:,} bytes, {MAX_BYTES:,} are the limit")
    return entries


def _untrusted(name: str, why: str) -> BadInput:
    return BadInput(f"{name} cannot be trusted: {why}; use another checkpoint.")


def read_checkpoint(
    name: str,
    stream: BufferedIOBase,
    like: Mapping[str, "Tensor"] | None = None,
    within: str = "",
) -> tuple["Tensors", Manifest]:
    """Tensors of a checkpoint, on the CPU, and its manifest.

    Args:
        name: What the file is called in an error.
        stream: All of the file.
        like: See `CheckpointFolder.load`.
        within: See there.
    """
    import torch

    from esper.contracts.state import check_fit

    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    header = read_header(name, stream)
    entries = {
        key: entry
        for key, entry in judged_entries(name, header, size).items()
        if key.startswith(within)
    }
    if like is not None:
        check_fit(like, {key: _tensor(entry, "meta") for key, entry in entries.items()})
    _verify_digest(name, header, stream)
    tensors = {}
    for key, entry in entries.items():
        stream.seek(len(header.raw) + entry.data_offsets[0])
        tensors[key] = _tensor(entry)
        if entry.bytes:
            room: Any = tensors[key].reshape(-1).view(torch.uint8).numpy()
            if stream.readinto(room) != entry.bytes:
                raise BadInput(f"{name} was changed while it was read; try again.")
    if why := _strange(tensors):
        raise _untrusted(name, why)
    return tensors, header.manifest


def _tensor(entry: Entry, device: str = "cpu") -> "Tensor":
    import torch

    kind = getattr(torch, KINDS[entry.dtype][0])
    return torch.empty(entry.shape, dtype=kind, device=device)


def _verify_digest(name: str, header: Header, stream: BufferedIOBase) -> None:
    """Refuse unless the digest is that of the header, blanked, and of what follows."""
    found = SEAL.search(header.raw)
    if found is not None:
        start, stop = found.span(1)
        digest = hashlib.sha256(header.raw[:start] + BLANK + header.raw[stop:])
        for piece in iter(partial(stream.read, PIECE), b""):
            digest.update(piece)
    if found is None or digest.hexdigest().encode() != found[1]:
        raise BadInput(f"{name} is damaged: its content is not what was saved.")


def pack(tensors: Mapping[str, "Tensor"], manifest: Manifest | None = None) -> bytes:
    """The bytes of a file; with a manifest, those of a checkpoint with its digest."""
    from safetensors.torch import save as save_bytes

    ready = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    if strange := _strange(ready):
        raise NotFinite(f"{strange} and is not saved; go back to a good checkpoint.")
    metadata = None
    if manifest is not None:
        text = json.dumps(asdict(manifest), sort_keys=True, allow_nan=False)
        metadata = {"schema": SCHEMA, "manifest": text, "sha256": BLANK.decode()}
    data: bytes = save_bytes(ready, metadata)
    if found := SEAL.search(data, 0, MAX_HEADER) if metadata else None:
        digest = hashlib.sha256(data).hexdigest().encode()
        data = data[: found.start(1)] + digest + data[found.end(1) :]
    return data


def _strange(tensors: Mapping[str, "Tensor"]) -> str:
    """Which tensor holds what no tensor should, or nothing."""
    import torch

    for name, values in tensors.items():
        if values.dtype is torch.bool and bool((values.view(torch.uint8) > 1).any()):
            return f"{quoted(name)} holds bytes that are no bool"
        known = not values.is_floating_point() or bool(values.isfinite().all())
        if not known and not name.endswith(MAY_BE_NAN):
            return f"{quoted(name)} holds NaN or infinity"
    return ""
