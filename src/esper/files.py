"""Reading and writing of files, which may come from untrusted sources.

Only regular files of limited size are read; links and pipes are rejected. Tensors are
in safetensors files, with a manifest and a SHA-256 in the header. The header is checked
before memory is allocated. The digest is that of the file with zeros in the digest's
place. It detects damage and is not a signature. Nothing in a file is executed or
imported.

`require_readable` rejects files of other versions of Esper before they are interpreted.

Files are written atomically: create -> sync_file -> rename -> sync_folder. Every change
is one call of `Disk`, so that tests can interrupt each of them.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from io import BufferedIOBase, BufferedReader
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as validated
from safetensors import SafetensorError, safe_open

from esper import __version__
from esper.contracts.errors import InvalidInputError, NotFiniteError, StorageError
from esper.contracts.messages import one_line, quoted, short

if TYPE_CHECKING:  # headers are read without importing torch, to list runs quickly
    from torch import Tensor

    from esper.contracts.state import Tensors

TEMPORARY: Final = ".tmp-"
"""Part of the names of unfinished files, which also begin with a dot."""
LEFTOVER_SECONDS: Final = 600.0
"""Age at which an unfinished file of a dead process is removed. Processes of other
machines that share the disk look dead from here."""
MAX_TEXT: Final = 1 << 20
MAX_HEADER: Final = 1 << 20
MAX_BYTES: Final = 4 << 30
"""Maximum size of a file of tensors."""
DIGEST_CHUNK: Final = 1 << 20
OLDEST_READABLE: Final = (0, 2)
"""Major and minor version of the oldest Esper whose files this one reads."""
FORMAT: Final = 20
"""Format number of files that hold no version. Increase it with `OLDEST_READABLE`.
Esper 0.1.0 wrote smaller numbers."""
VERSION: Final = re.compile(
    r"([0-9]{1,4})\.([0-9]{1,4})([.+]?[0-9a-z]{1,8}){0,4}", re.ASCII
)
MAY_BE_NAN: Final = ("first_loss", "curve/points")
"""Suffixes of tensors that are NaN where nothing was measured."""
BLANK: Final = b"0" * 64
SEAL: Final = "esper"
"""Key of digest and manifest in the metadata of a file."""
DIGEST: Final = re.compile(rb'\\"digest\\": \\"([0-9a-f]{64})\\"')
UNREADABLE: Final = (SafetensorError, RuntimeError, TypeError, ValueError, LookupError)
"""What safetensors and torch raise about tensors of a file."""


@validated(frozen=True, kw_only=True, config=ConfigDict(strict=True, extra="forbid"))
class Manifest:
    """Metadata of a sealed file."""

    step: Annotated[int, Field(ge=0)]
    """Training step."""
    score: Annotated[float, Field(allow_inf_nan=False)] | None
    """Validation score; the checkpoint with the highest is kept."""
    facts: dict[str, Any]
    """JSON data for the reader."""
    made_by: dict[str, str]
    """Versions of Esper and PyTorch."""


UNSEALED: Final = Manifest(step=0, score=None, facts={}, made_by={})
"""Stands for the manifest of a file that has none."""
Fit = Callable[["Tensors", Manifest], object]
"""Called with tensors, not read yet, and the manifest; raises if they do not fit."""


class Disk:
    """File operations; each method is one operation that can fail with OSError."""

    def mkdir(self, folder: Path) -> None:
        """Create a new folder."""
        folder.mkdir()

    def create(self, file: Path, data: bytes) -> None:
        """Write a new file, which is not durable yet."""
        with file.open("xb") as stream:
            stream.write(data)

    def sync_file(self, file: Path) -> None:
        """Make a file's content durable."""
        _sync(file, os.O_RDONLY)

    def sync_folder(self, folder: Path) -> None:
        """Make the names in a folder durable."""
        if hasattr(os, "O_DIRECTORY"):  # Windows cannot open folders
            _sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder, replacing an existing file."""
        os.replace(old, new)

    def unlink(self, file: Path) -> None:
        """Remove a file or link."""
        file.unlink()

    def rmdir(self, folder: Path) -> None:
        """Remove an empty folder."""
        folder.rmdir()

    def read(self, file: Path, limit: int) -> bytes:
        """Return at most `limit` bytes of a regular file."""
        with open_regular(file) as stream:
            # `read` allocates all that it is asked for; the file may be far smaller.
            return stream.read(min(limit, os.fstat(stream.fileno()).st_size))

    def open(self, file: Path) -> BufferedReader:
        """Open a regular file for reading."""
        return open_regular(file)


def publish(disk: Disk, file: Path, data: bytes) -> None:
    """Write a file atomically."""
    temporary = temporary_name(file)
    with storage(file, "write"):
        discard_leftovers(disk, file.parent)
        try:
            disk.create(temporary, data)
            disk.sync_file(temporary)
            disk.rename(temporary, file)
        except OSError:
            with suppress(OSError):  # frees disk space at once
                discard(disk, temporary)
            raise
        disk.sync_folder(file.parent)


def temporary_name(path: Path) -> Path:
    """Return the name of a file or folder while it is being written."""
    return path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")


def unfinished(folder: Path) -> list[Path]:
    """Return the unfinished files and folders in a folder."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(".") and TEMPORARY in path.name
    )


def discard_leftovers(disk: Disk, folder: Path) -> None:
    """Remove unfinished files of this process and of dead ones."""
    for path in unfinished(folder):
        owner = path.name.rpartition(TEMPORARY)[2]
        with suppress(FileNotFoundError):  # removed by its process meanwhile
            old = time() - path.lstat().st_mtime > LEFTOVER_SECONDS
            if owner == str(os.getpid()) or (old and not _is_alive(owner)):
                discard(disk, path)


def _is_alive(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):  # of another user, or not a number
        pass
    return True


def discard(disk: Disk, path: Path) -> None:
    """Remove a file or a folder with its contents, if it exists; follows no link."""
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
    """Raise an error if a folder is a link."""
    if folder.is_symlink():
        raise InvalidInputError(f"{short(folder)} is a link. Use the folder itself.")


@contextmanager
def storage(path: Path, verb: str) -> Iterator[None]:
    """Turn an OSError about a path into a StorageError: "cannot {verb} {path}: ..."."""
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        why = error.strerror or type(error).__name__
        raise StorageError(
            f"cannot {verb} {short(path)}: {why}. Check space and permissions of "
            "the disk. What was saved before is intact."
        ) from error


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file for reading; reject links, pipes and devices."""
    kind = file.lstat().st_mode
    if stat.S_ISLNK(kind):
        raise InvalidInputError(
            f"{short(file)} is a link. Use the file that it points to."
        )
    if not stat.S_ISREG(kind):
        raise InvalidInputError(f"{short(file)} is not a regular file. Use another.")
    # Windows does not have these flags.
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    binary = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    number = os.open(file, os.O_RDONLY | safe | binary)
    if not stat.S_ISREG(os.fstat(number).st_mode):  # replaced since the first check
        os.close(number)
        raise InvalidInputError(f"{short(file)} is not a regular file. Remove it.")
    return open(number, "rb")


def read_bytes(file: Path, limit: int = MAX_TEXT, disk: Disk | None = None) -> bytes:
    """Return the bytes of a regular file of at most `limit` bytes."""
    if not os.path.lexists(file):
        raise InvalidInputError(f"{short(file)} does not exist.")
    with storage(file, "read"):
        data = (disk or Disk()).read(file, limit + 1)
    if len(data) > limit:
        raise InvalidInputError(f"{short(file)} has more than {limit:,} bytes.")
    return data


def read_text(file: Path, limit: int = MAX_TEXT, disk: Disk | None = None) -> str:
    """Return the text of a small UTF-8 file."""
    try:
        return read_bytes(file, limit, disk).decode()
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            f"{short(file)} must be text in UTF-8, but byte {error.start} is not."
        ) from None


def read_json(file: Path, disk: Disk | None = None) -> dict[str, Any]:
    """Return the JSON object in a small file."""
    text, found = read_text(file, disk=disk), None
    with suppress(ValueError, RecursionError):
        found = json.loads(text)
    if not isinstance(found, dict):
        raise InvalidInputError(f"{short(file)} is damaged: expected a JSON object.")
    return found


def require_readable(name: str, writer: object, advice: str) -> None:
    """Raise an error if this Esper does not read the files of another version.

    Args:
        name: Name of the file in the error message.
        writer: Version of Esper in the file, or its format number.
        advice: A sentence that tells what to do instead.
    """
    if type(writer) is int:
        known = {FORMAT: __version__}
        writer = known.get(writer, "0.1.0" if writer < FORMAT else None)
    found = VERSION.fullmatch(writer) if isinstance(writer, str) else None
    if found is not None:
        newest = tuple(map(int, __version__.split(".")[:2]))
        number = int(found[1]), int(found[2])
        if OLDEST_READABLE <= number <= newest:
            return
        advice = "Update Esper." if number > newest else advice
    which = f"Esper {found[0]}" if found else "an unknown version of Esper"
    raise InvalidInputError(
        f"{name} was written by {which} and this is Esper {__version__}. {advice}"
    )


def read_safetensors(
    file: Path,
    fit: Fit | None = None,
    within: str = "",
    *,
    sealed: bool = True,
    finite: bool = True,
    limit: int = MAX_BYTES,
    mapped: bool = False,
    disk: Disk | None = None,
) -> tuple["Tensors", Manifest]:
    """Return the tensors of a verified file, on the CPU, and its manifest.

    Args:
        file: Path of the file.
        fit: Raises if names, dtypes and shapes are not as expected.
        within: Read only tensors whose names begin with this.
        sealed: Whether the file must have a manifest and a digest.
        finite: Whether NaN and inf are errors.
        limit: Maximum size of the file in bytes.
        mapped: Return tensors that take no memory and change with the file, without a
            look at their numbers.
        disk: File operations.
    """
    name = short(file)
    if not os.path.lexists(file):
        raise InvalidInputError(f"{name} does not exist. Check the path.")
    with storage(file, "read"), (disk or Disk()).open(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise _untrusted(name, f"it has {size:,} bytes, the limit is {limit:,}")
        manifest, header = read_header(name, stream, sealed=sealed)
        tensors = _mapped(name, file, within)
        _require_fit(name, tensors, manifest, fit)
        if mapped:
            chunks: Iterable[bytes] = iter(partial(stream.read, DIGEST_CHUNK), b"")
            _verify_digest(name, manifest, header, chunks)
            return tensors, manifest
        # What is used comes from the one open file; the mapped one may be another.
        rest = stream.read()
    if len(header) + len(rest) != size:
        raise InvalidInputError(f"{name} was changed while it was read. Try again.")
    _verify_digest(name, manifest, header, [rest])
    tensors = _loaded(name, header + rest, within)
    _require_fit(name, tensors, manifest, fit)
    if why := _strange(tensors, finite):
        raise _untrusted(name, why)
    return tensors, manifest


def _mapped(name: str, file: Path, within: str) -> "Tensors":
    """Return tensors that take no memory until their numbers are used."""
    try:
        with safe_open(file, "pt") as opened:
            names = [key for key in opened.keys() if key.startswith(within)]  # noqa: SIM118
            return {key: opened.get_tensor(key) for key in names}
    except UNREADABLE as error:
        raise InvalidInputError(one_line(f"{name} is damaged: {error}.")) from None


def _loaded(name: str, data: bytes, within: str) -> "Tensors":
    from safetensors.torch import load

    try:
        found = load(data)
    except UNREADABLE as error:
        raise InvalidInputError(one_line(f"{name} is damaged: {error}.")) from None
    return {key: tensor for key, tensor in found.items() if key.startswith(within)}


def _require_fit(
    name: str, tensors: "Tensors", manifest: Manifest, fit: Fit | None
) -> None:
    try:
        if fit is not None:
            fit(tensors, manifest)
    except InvalidInputError as error:
        raise InvalidInputError(one_line(f"{name}: {error}")) from error


def read_header(
    name: str, stream: BufferedIOBase, *, sealed: bool = True
) -> tuple[Manifest, bytes]:
    """Return manifest and header of a file; tensors and digest are not verified."""
    damaged = f"{name} is damaged, or not a file of Esper. Use another file."
    first = stream.read(8)
    length = int.from_bytes(first, "little")
    header = first + stream.read(length if length <= MAX_HEADER else 0)
    try:
        found = json.loads(header[8:] if len(header) == 8 + length else b"")
        metadata = found.get("__metadata__", {})
        if SEAL not in metadata and not sealed:
            return UNSEALED, header
        about = json.loads(metadata[SEAL])["manifest"]
        writer = about.get("made_by", {}).get("esper")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InvalidInputError(damaged) from None
    require_readable(name, writer, "Create it again.")
    try:
        return Manifest(**about), header
    except ValueError:
        raise InvalidInputError(damaged) from None


def require_explained(sizes: Mapping[str, int], tensors: Iterable["Tensor"]) -> None:
    """Check that the sizes of a configuration occur in the tensors of the same file.

    Otherwise a small file could cause a large allocation.
    """
    shapes = [tensor.shape for tensor in tensors]
    most = max([len(shapes), *(size for shape in shapes for size in shape)])
    for name, size in sizes.items():
        if type(size) is not int or not 0 <= size <= most:
            raise InvalidInputError(
                f"{quoted(name)} is {quoted(size)}, which no tensor of the file has."
            )


def _untrusted(name: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{name} cannot be trusted: {why}. Use another file.")


def _verify_digest(
    name: str, manifest: Manifest, header: bytes, chunks: Iterable[bytes]
) -> None:
    """Check the digest of a sealed file, with zeros in the digest's place."""
    if manifest is UNSEALED:
        return
    found = DIGEST.search(header)
    if found is not None:
        start, stop = found.span(1)
        digest = hashlib.sha256(header[:start] + BLANK + header[stop:])
        for chunk in chunks:
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
    """Return the bytes of a file; with a manifest, sealed by its digest."""
    import torch
    from safetensors.torch import save

    # A tensor of one element may have any stride; the copy has the usual one.
    ready = {
        name: part.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, part in tensors.items()
    }
    if strange := _strange(ready, finite):
        raise NotFiniteError(
            f"{strange} and is not saved. Go back to a good checkpoint."
        )
    metadata = None
    if manifest is not None:
        about = {"digest": BLANK.decode(), "manifest": asdict(manifest)}
        # One key, since safetensors writes several in random order.
        metadata = {SEAL: json.dumps(about, sort_keys=True, allow_nan=False)}
    try:
        data = save(ready, metadata)
    except UNREADABLE as error:
        raise InvalidInputError(f"cannot save a tensor: {error!r}.") from None
    if int.from_bytes(data[:8], "little") > MAX_HEADER:
        raise InvalidInputError(f"{len(ready):,} tensors are too many for one file.")
    if found := DIGEST.search(data, 0, MAX_HEADER) if manifest else None:
        digest = hashlib.sha256(data).hexdigest().encode()
        data = data[: found.start(1)] + digest + data[found.end(1) :]
    return data


def manifest_of(
    facts: Mapping[str, Any], step: int = 0, score: float | None = None
) -> Manifest:
    """Return a manifest with the installed versions."""
    made_by = {"esper": __version__, "torch": version("torch")}
    # Through JSON, so that tuples become lists, as in a manifest that is read.
    plain = json.loads(json.dumps(dict(facts), allow_nan=False))
    return Manifest(step=step, score=score, facts=plain, made_by=made_by)


def _strange(tensors: Mapping[str, "Tensor"], finite: bool) -> str:
    """Return what is wrong with the first invalid tensor, or an empty string."""
    import torch

    for name, values in tensors.items():
        if values.dtype is torch.bool and bool((values.view(torch.uint8) > 1).any()):
            return f"{quoted(name)} holds bytes that are not bool"
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
