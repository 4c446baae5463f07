"""The one reader and the one writer of files, whoever they come from.

A file is opened without following a link or waiting for a pipe, and only if it is a
regular file of limited size. A file of tensors is a safetensors file:

    header    names, dtypes, shapes and places of the tensors; a manifest; SHA-256
    data      the numbers, without holes

The header is checked first: tensors must fit what is expected and fill the file. Only
then memory is taken. The digest is that of the file with zeros in the digest's place,
so every changed byte is noticed; it is no signature. Nothing that a file holds is
executed, imported or looked up by name.

A file is written under a temporary name in the same folder, made durable and renamed:

    create -> sync_file -> rename -> sync_folder

Every change is one call of `Disk`, so that a test can stop at each of them. An fsync
that failed is not repeated on the same file: what it lost is lost.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from io import BufferedIOBase, BufferedReader
from math import prod
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated

from esper import __version__
from esper.contracts.errors import InvalidInputError, NotFiniteError, StorageError
from esper.contracts.messages import one_line, quoted, short

if TYPE_CHECKING:  # headers can be read without torch, so a list of runs is quick
    import torch
    from torch import Tensor

    from esper.contracts.state import Tensors

TEMPORARY: Final = ".tmp-"
"""In the names of unfinished files, which also begin with a dot."""
LEFT_OVER: Final = 600.0
"""Seconds after which an unfinished file of a dead process is removed: processes of
other machines, which share a disk, look dead from here."""
MAX_TEXT: Final = 1 << 20
"""Bytes of a file of text."""
MAX_HEADER: Final = 1 << 20
MAX_TENSORS: Final = 10_000
MAX_BYTES: Final = 4 << 30
"""Bytes of a file of tensors."""
CHUNK: Final = 1 << 20
"""Bytes that are read at once to verify a digest."""
SCHEMA: Final = "3"
"""Version of the manifest."""
DTYPES: Final = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "I16": ("int16", 2),
    "I32": ("int32", 4),
    "I64": ("int64", 8),
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "C64": ("complex64", 8),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F32": ("float32", 4),
    "F64": ("float64", 8),
}
"""What tensors may hold, by the names of safetensors: its name in torch, its bytes."""
MAY_BE_NAN: Final = "first_loss"
"""End of the names of tensors that are NaN before the first loss of an episode."""
BLANK: Final = b"0" * 64
SEAL: Final = re.compile(b'"sha256":"([0-9a-f]{64})"')


@validated(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Manifest:
    """What a sealed file says of itself."""

    step: Annotated[int, Field(ge=0)]
    """How far the training was."""
    score: Annotated[float, Field(allow_inf_nan=False)] | None
    """How good it was; the checkpoint with the highest is kept."""
    facts: dict[str, Any]
    """What the reader needs, as JSON can hold it."""
    made_by: dict[str, str]
    """Versions of Esper and PyTorch."""


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Entry:
    """Where a tensor is in a file, and what it is."""

    dtype: Annotated[str, Field(pattern=f"^({'|'.join(DTYPES)})$")]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=8)]
    data_offsets: Annotated[list[int], Field(min_length=2, max_length=2)]

    @property
    def bytes(self) -> int:
        """How many it takes."""
        return prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, kw_only=True)
class Header:
    """The beginning of a file of tensors."""

    manifest: Manifest | None
    """None: the file is not sealed."""
    entries: Mapping[str, Any] = field(repr=False)
    """Not yet checked."""
    raw: bytes = field(repr=False)


Fit = Callable[["Tensors", Manifest | None], object]
"""Called with tensors without memory and the manifest; raises if they do not fit."""


class Disk:
    """File operations; every method is one thing that can fail.

    Raises `OSError`; `storage` turns it into one line.
    """

    def mkdir(self, folder: Path) -> None:
        """Make a folder that does not exist."""
        folder.mkdir()

    def create(self, file: Path, data: bytes) -> None:
        """Write a file that does not exist; it may not survive a loss of power."""
        with file.open("xb") as stream:
            stream.write(data)

    def sync_file(self, file: Path) -> None:
        """Return when a file's content is durable."""
        _sync(file, os.O_RDONLY)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder are durable."""
        if hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder; replaces a file."""
        os.replace(old, new)

    def unlink(self, file: Path) -> None:
        """Remove a file, or a link but not its target."""
        file.unlink()

    def rmdir(self, folder: Path) -> None:
        """Remove an empty folder."""
        folder.rmdir()

    def read(self, file: Path, limit: int) -> bytes:
        """The first bytes of a regular file, or all if it has fewer."""
        with open_regular(file) as stream:
            # A stream makes room for all it is asked for; a file may be far smaller.
            return stream.read(min(limit, os.fstat(stream.fileno()).st_size))

    def open(self, file: Path) -> BufferedReader:
        """A regular file, to be read and closed."""
        return open_regular(file)


def publish(disk: Disk, file: Path, data: bytes) -> None:
    """Write a file so that it is there whole, as before, or not at all."""
    temporary = beside(file)
    with storage(file, "write"):
        discard_leftovers(disk, file.parent)
        try:
            disk.create(temporary, data)
            disk.sync_file(temporary)
            disk.rename(temporary, file)
        except OSError:
            with suppress(OSError):  # gives back room at once
                discard(disk, temporary)
            raise
        disk.sync_folder(file.parent)


def beside(path: Path) -> Path:
    """The temporary name of a file or folder while it is made."""
    return path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")


def unfinished(folder: Path) -> list[Path]:
    """What was being made or removed in a folder when a process died."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(".") and TEMPORARY in path.name
    )


def discard_leftovers(disk: Disk, folder: Path) -> None:
    """Remove what dead processes left unfinished in a folder, and this one before."""
    for path in unfinished(folder):
        owner = path.name.rpartition(TEMPORARY)[2]
        with suppress(FileNotFoundError):  # its process is faster
            old = time() - path.lstat().st_mtime > LEFT_OVER
            if owner == str(os.getpid()) or (old and not _is_alive(owner)):
                discard(disk, path)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):  # somebody else's, or no number
        pass
    return True


def discard(disk: Disk, path: Path) -> None:
    """Remove a file or a folder with all it holds, if it exists; follows no link."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(kind):
        disk.unlink(path)
        return
    for inner in sorted(path.iterdir()):
        discard(disk, inner)
    disk.rmdir(path)


def require_no_link(folder: Path) -> None:
    """Refuse a folder of a run that leads out of it."""
    if folder.is_symlink():
        raise InvalidInputError(
            f"{short(folder)} is a link, which could lead anywhere."
        )


@contextmanager
def storage(path: Path, verb: str) -> Iterator[None]:
    """Turn errors of the system about a path into one line.

    Args:
        path: The file or folder.
        verb: What is being done to it, such as "write".
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        why = error.strerror or type(error).__name__
        raise StorageError(
            f"cannot {verb} {short(path)}: {why}; check space and permissions of "
            "the disk. What was saved before is intact."
        ) from error


def open_regular(file: Path) -> BufferedReader:
    """A regular file, to be read and closed; a pipe would block, a link lead away."""
    kind = file.lstat().st_mode
    if stat.S_ISLNK(kind):
        raise InvalidInputError(
            f"{short(file)} is a link; name the file that it points to."
        )
    if not stat.S_ISREG(kind):
        raise InvalidInputError(f"{short(file)} is not a regular file; name another.")
    # Windows has neither flag.
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    binary = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(file, os.O_RDONLY | safe | binary)
    if not stat.S_ISREG(os.fstat(number).st_mode):  # replaced just now
        os.close(number)
        raise InvalidInputError(f"{short(file)} is not a regular file; remove it.")
    return open(number, "rb")


def read_bytes(file: Path, limit: int = MAX_TEXT, disk: Disk | None = None) -> bytes:
    """All bytes of a regular file; refuses one with more than a limit."""
    if not os.path.lexists(file):
        raise InvalidInputError(f"{short(file)} does not exist.")
    with storage(file, "read"):
        data = (disk or Disk()).read(file, limit + 1)
    if len(data) > limit:
        raise InvalidInputError(f"{short(file)} has more than {limit:,} bytes.")
    return data


def read_text(file: Path, limit: int = MAX_TEXT, disk: Disk | None = None) -> str:
    """The text of a small file in UTF-8."""
    try:
        return read_bytes(file, limit, disk).decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{short(file)} must be text in UTF-8; byte {error.start} is not."
        ) from None


def read_json(file: Path, disk: Disk | None = None) -> dict[str, Any]:
    """The JSON object in a small file."""
    return parse_json(read_text(file, disk=disk), short(file))


def parse_json(text: str | bytes, name: str) -> dict[str, Any]:
    """The JSON object in a text.

    Args:
        text: At most `MAX_TEXT` long.
        name: What it is called in an error.
    """
    found = None
    with suppress(ValueError, RecursionError):
        found = json.loads(text) if len(text) <= MAX_TEXT else None
    if not isinstance(found, dict):
        raise InvalidInputError(f"{name} is damaged: expected a JSON object.")
    return found


def read_safetensors(
    file: Path,
    fit: Fit | None = None,
    within: str = "",
    *,
    sealed: bool = True,
    finite: bool = True,
    limit: int = MAX_BYTES,
    disk: Disk | None = None,
) -> tuple["Tensors", Manifest | None]:
    """The tensors of a file, on the CPU, and its manifest; see `read_tensors`."""
    if not os.path.lexists(file):
        raise InvalidInputError(f"{short(file)} does not exist; name another file.")
    with storage(file, "read"), (disk or Disk()).open(file) as stream:
        return read_tensors(
            short(file), stream, fit, within, sealed=sealed, finite=finite, limit=limit
        )


def read_tensors(
    name: str,
    stream: BufferedIOBase,
    fit: Fit | None = None,
    within: str = "",
    *,
    sealed: bool = True,
    finite: bool = True,
    limit: int = MAX_BYTES,
) -> tuple["Tensors", Manifest | None]:
    """Tensors of a file, on the CPU, and its manifest; refuses unless all verifies.

    Args:
        name: What the file is called in an error.
        stream: All of the file.
        fit: Raises if names, dtypes and shapes are not as expected.
        within: Read only tensors whose names begin with this.
        sealed: Whether the file must have a manifest and a digest.
        finite: Whether NaN and infinity are refused.
        limit: Bytes of the file at most.
    """
    import torch

    header, entries = verify(name, stream, fit, within, sealed=sealed, limit=limit)
    tensors = {}
    for key, entry in entries.items():
        stream.seek(len(header.raw) + entry.data_offsets[0])
        tensors[key] = _tensor(entry)
        if entry.bytes:
            room: Any = tensors[key].reshape(-1).view(torch.uint8).numpy()
            if stream.readinto(room) != entry.bytes:
                raise InvalidInputError(
                    f"{name} was changed while it was read; try again."
                )
    if why := _strange(tensors, finite):
        raise _untrusted(name, why)
    return tensors, header.manifest


def verify(
    name: str,
    stream: BufferedIOBase,
    fit: Fit | None = None,
    within: str = "",
    *,
    sealed: bool = True,
    limit: int = MAX_BYTES,
) -> tuple[Header, dict[str, Entry]]:
    """Header and places of the tensors, if they fit and the digest is right.

    Takes no memory for tensors. For arguments see `read_tensors`.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    if size > limit:
        raise _untrusted(name, f"it has {size:,} bytes, {limit:,} are the limit")
    header = read_header(name, stream, sealed=sealed)
    entries = {
        key: entry
        for key, entry in _entries(name, header, size).items()
        if key.startswith(within)
    }
    if fit is not None:
        meta = {key: _tensor(entry, "meta") for key, entry in entries.items()}
        try:
            fit(meta, header.manifest)
        except InvalidInputError as error:
            raise InvalidInputError(one_line(f"{name}: {error}")) from error
    if header.manifest is not None:
        _verify_digest(name, header, stream)
    return header, entries


def read_header(name: str, stream: BufferedIOBase, *, sealed: bool = True) -> Header:
    """The header of a file; neither tensors nor digest are verified.

    Args:
        name: What the file is called in an error.
        stream: All of the file, at its beginning.
        sealed: Whether it must have a manifest.
    """
    why = "damaged, or no file of Esper"
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    raw = first + stream.read(length if length <= MAX_HEADER else 0)
    try:
        entries = json.loads(raw[8:])
        about = entries.pop("__metadata__", {})
        schema = str(about["schema"]) if sealed or "schema" in about else None
        if schema not in (None, SCHEMA):
            why = (
                f"of schema {quoted(schema)}, Esper {__version__} reads {SCHEMA}; use "
                "the Esper that wrote it"
            )
        elif len(raw) == 8 + length:
            manifest = schema and _MANIFEST.validate_json(about["manifest"])
            return Header(manifest=manifest or None, entries=entries, raw=raw)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise InvalidInputError(f"{name} is {why}; use another file.")


_MANIFEST: Final = TypeAdapter(Manifest)
_ENTRIES: Final = TypeAdapter(dict[str, Entry])


def require_explained(sizes: Mapping[str, int], tensors: Iterable["Tensor"]) -> None:
    """Refuse a size that no tensor of the same file has.

    Whoever wrote a file of a few bytes must not decide how much memory is taken.

    Args:
        sizes: Numbers of a configuration, such as widths and numbers of layers.
        tensors: What is in the file.
    """
    shapes = [tensor.shape for tensor in tensors]
    most = max([len(shapes), *(size for shape in shapes for size in shape)])
    for name, size in sizes.items():
        if type(size) is not int or not 0 <= size <= most:
            raise InvalidInputError(
                f"{quoted(name)} is {quoted(size)}, which no tensor of the file has."
            )


def _entries(name: str, header: Header, size: int) -> dict[str, Entry]:
    """Where each tensor is; refuses unless they fill the file without holes.

    Args:
        name: What the file is called in an error.
        header: Of the file.
        size: Bytes of the file.
    """
    try:
        entries = _ENTRIES.validate_json(json.dumps(header.entries))
    except ValueError:
        raise _untrusted(name, "its table of tensors is wrong") from None
    if len(entries) > MAX_TENSORS:
        raise _untrusted(name, f"it has more than {MAX_TENSORS:,} tensors")
    end = 0
    for key, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        if entry.data_offsets != [end, end + entry.bytes]:
            raise _untrusted(name, f"{quoted(key)} is not where it should be")
        end += entry.bytes
    if len(header.raw) + end != size:
        expected = f"{len(header.raw) + end:,} bytes, it has {size:,}"
        raise InvalidInputError(f"{name} is damaged: its tensors take {expected}.")
    return entries


def _untrusted(name: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{name} cannot be trusted: {why}; use another file.")


def _tensor(entry: Entry, device: str = "cpu") -> "Tensor":
    import torch

    kind = getattr(torch, DTYPES[entry.dtype][0])
    return torch.empty(entry.shape, dtype=kind, device=device)


def _verify_digest(name: str, header: Header, stream: BufferedIOBase) -> None:
    """Refuse unless the digest is that of the header, blanked, and of what follows."""
    found = SEAL.search(header.raw)
    if found is not None:
        start, stop = found.span(1)
        digest = hashlib.sha256(header.raw[:start] + BLANK + header.raw[stop:])
        stream.seek(len(header.raw))
        for chunk in iter(partial(stream.read, CHUNK), b""):
            digest.update(chunk)
    if found is None or digest.hexdigest().encode() != found[1]:
        raise InvalidInputError(
            f"{name} is damaged: its content is not what was saved."
        )


def pack(
    tensors: Mapping[str, "Tensor"],
    manifest: Manifest | None = None,
    *,
    finite: bool = True,
) -> bytes:
    """The bytes of a file; with a manifest, sealed by its digest.

    Args:
        tensors: By name.
        manifest: Of a sealed file.
        finite: Whether NaN and infinity are refused.
    """
    import torch

    # A single number may have any stride; a copy has the usual one.
    ready = {
        name: part.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, part in tensors.items()
    }
    if strange := _strange(ready, finite):
        raise NotFiniteError(
            f"{strange} and is not saved; go back to a good checkpoint."
        )
    header: dict[str, Any] = {}
    if manifest is not None:
        text = json.dumps(asdict(manifest), sort_keys=True, allow_nan=False)
        about = {"schema": SCHEMA, "manifest": text, "sha256": BLANK.decode()}
        header["__metadata__"] = about
    end, parts = 0, []
    # Larger numbers first, so that all are aligned.
    for name in sorted(ready, key=lambda name: (-ready[name].itemsize, name)):
        part = ready[name]
        if part.dtype not in (names := _dtype_names()):
            raise InvalidInputError(
                f"{quoted(name)} is of {part.dtype}, which has no file format."
            )
        place = [end, end := end + part.nbytes]
        entry = {"dtype": names[part.dtype], "shape": [*part.shape]}
        header[name] = {**entry, "data_offsets": place}
        parts.append(part.reshape(-1).view(torch.uint8).numpy().tobytes())
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER or len(ready) > MAX_TENSORS:
        raise InvalidInputError(f"{len(ready):,} tensors are too many for one file.")
    data = b"".join((len(raw).to_bytes(8, "little"), raw, *parts))
    if found := SEAL.search(data, 0, MAX_HEADER) if manifest else None:
        digest = hashlib.sha256(data).hexdigest().encode()
        data = data[: found.start(1)] + digest + data[found.end(1) :]
    return data


def _dtype_names() -> "dict[torch.dtype, str]":
    import torch

    return {getattr(torch, name): key for key, (name, _) in DTYPES.items()}


def manifest_of(
    facts: Mapping[str, Any], step: int = 0, score: float | None = None
) -> Manifest:
    """A manifest with the versions that are installed; see `Manifest`."""
    made_by = {"esper": __version__, "torch": version("torch")}
    # Through JSON: tuples become lists, as they will be when it is read.
    plain = json.loads(json.dumps(dict(facts), allow_nan=False))
    return Manifest(step=step, score=score, facts=plain, made_by=made_by)


def _strange(tensors: Mapping[str, "Tensor"], finite: bool) -> str:
    """Which tensor holds what no tensor should, or nothing."""
    import torch

    for name, values in tensors.items():
        if values.dtype is torch.bool and bool((values.view(torch.uint8) > 1).any()):
            return f"{quoted(name)} holds bytes that are no bool"
        if not finite or not values.is_floating_point() or name.endswith(MAY_BE_NAN):
            continue
        if not bool(values.isfinite().all()):
            return f"{quoted(name)} holds NaN or infinity"
    return ""


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        os.fsync(number)
    finally:
        os.close(number)
