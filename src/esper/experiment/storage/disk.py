"""Files that are whole or not there, whatever happens while they are written.

A file is written under another name in the same folder, made durable, renamed, and the
rename made durable too:

    create -> sync_file -> rename -> sync_folder

Every change of a run's folder is one call of `Disk`, so that a test can stop at each of
them. An fsync that failed is not tried again on the same file: what it lost is lost.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from esper.contracts.errors import BadInput, StorageTrouble

CHUNK = 1 << 20
TEMPORARY = ".tmp-"
"""What the name of something unfinished holds; it also begins with a dot."""


class Disk:
    """What can be done to files; every method is one thing that can fail.

    Raises `OSError`; `storage` turns it into one line.
    """

    def mkdir(self, folder: Path) -> None:
        """Make a folder that is not there."""
        folder.mkdir()

    def create(self, file: Path, data: bytes) -> None:
        """Write a file that is not there; it may not survive a loss of power."""
        with file.open("xb") as stream:
            stream.write(data)

    def sync_file(self, file: Path) -> None:
        """Return when a file's content is durable."""
        _sync(file, os.O_RDONLY)

    def sync_folder(self, folder: Path) -> None:
        """Return when the names in a folder are durable."""
        _sync(folder, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name; takes the place of a file."""
        old.rename(new)

    def unlink(self, file: Path) -> None:
        """Remove a file, or a link but not what it leads to."""
        file.unlink()

    def rmdir(self, folder: Path) -> None:
        """Remove an empty folder."""
        folder.rmdir()

    def size(self, file: Path) -> int:
        """Bytes of a regular file."""
        with _opened(file) as stream:
            return os.fstat(stream.fileno()).st_size

    def read(self, file: Path, limit: int) -> bytes:
        """The first `limit` bytes of a regular file, or all if it has fewer."""
        with _opened(file) as stream:
            # A stream makes room for all it is asked for; a file may be far smaller.
            return stream.read(min(limit, os.fstat(stream.fileno()).st_size))

    def digest(self, file: Path) -> str:
        """SHA-256 of a regular file, of which only a part is in memory at a time."""
        found = hashlib.sha256()
        with _opened(file) as stream:
            while part := stream.read(CHUNK):
                found.update(part)
        return found.hexdigest()


def publish(disk: Disk, file: Path, data: bytes) -> None:
    """Put a file in place so that it is there whole, as before, or not at all."""
    temporary = beside(file)
    with storage(file, "write"):
        discard(disk, temporary)
        disk.create(temporary, data)
        disk.sync_file(temporary)
        disk.rename(temporary, file)
        disk.sync_folder(file.parent)


def beside(path: Path) -> Path:
    """Where something is made before it gets its name."""
    return path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}")


def unfinished(folder: Path) -> list[Path]:
    """What was being made or removed in a folder when a process died."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.name.startswith(".") and TEMPORARY in path.name
    )


def discard(disk: Disk, path: Path) -> None:
    """Remove a file or a folder with all it holds, or nothing if it is not there.

    A link is removed, not followed.
    """
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


@contextmanager
def storage(path: Path, verb: str) -> Iterator[None]:
    """Turn what the system says about a path into one line.

    Args:
        path: What is worked at.
        verb: What is being done to it, such as "write".
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, StorageTrouble):
            raise
        why = error.strerror or type(error).__name__
        raise StorageTrouble(
            f"cannot {verb} {short(path)}: {why}; check space and permissions of "
            "the disk. What was saved before is intact."
        ) from error


def short(path: Path) -> str:
    """The end of a path, fit for one line: no control characters, 72 at most."""
    text = "/".join(path.parts[-3:]).replace("//", "/")
    text = "".join(sign if sign.isprintable() else "?" for sign in text)
    return text if len(text) <= 72 else f"…{text[-71:]}"


def said(text: str) -> str:
    """A name or text of others, fit for one line."""
    return repr(text if len(text) <= 48 else f"{text[:47]}…")


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """A regular file for reading; a pipe would wait and a link lead elsewhere."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise BadInput(f"{short(file)} is not a regular file; remove it.")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(file, flags), "rb") as stream:
        yield stream
