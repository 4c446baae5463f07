"""Files that are whole or absent, whatever happens while they are written, and locks.

A file is written under another name in the same folder, made durable, renamed, and the
rename made durable too:

    create -> sync_file -> rename -> sync_folder

Every change of a run's folder is one call of `Disk`, so that a test can stop at each of
them. An fsync that failed is not tried again on the same file: what it lost is lost.
"""

import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from esper.contracts.errors import BadInput, RunTaken, StorageTrouble
from esper.experiment.messages import quoted, short

TEMPORARY: Final = ".tmp-"
"""In the names of unfinished files, which also begin with a dot."""
LOCK: Final = "lock"
LOCK_TIMEOUT: Final = 0.5
"""Seconds to wait for a lock: whoever lists runs holds each for a moment."""


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
        with _opened(file) as stream:
            # A stream makes room for all it is asked for; a file may be far smaller.
            return stream.read(min(limit, os.fstat(stream.fileno()).st_size))

    def open(self, file: Path) -> BufferedReader:
        """A regular file, to be read and closed."""
        return _opened(file)


def publish(disk: Disk, file: Path, data: bytes) -> None:
    """Write a file so that it is there whole, as before, or not at all."""
    temporary = beside(file)
    with storage(file, "write"):
        discard(disk, temporary)
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
        raise BadInput(f"{short(folder)} is a link, which could lead anywhere.")


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
        if isinstance(error, StorageTrouble):
            raise
        why = error.strerror or type(error).__name__
        raise StorageTrouble(
            f"cannot {verb} {short(path)}: {why}; check space and permissions of "
            "the disk. What was saved before is intact."
        ) from error


class Lock:
    """The right to write in a folder, held until `release` or the end of the process.

    The lock file also names its owner.

    Args:
        folder: Where the lock file is or will be.
        name: What the folder is called in an error, if it will be renamed.
    """

    def __init__(self, folder: Path, name: Path | None = None) -> None:
        name, file = name or folder, folder / LOCK
        self._lock = FileLock(file, timeout=LOCK_TIMEOUT, thread_local=False)
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            raise BadInput(f"{short(file)} is not a regular file; remove it.")
        with storage(name, "lock"):
            try:
                self._lock.acquire(poll_interval=0.02)
                since = datetime.now(UTC).isoformat(timespec="seconds")
                owner = {"pid": os.getpid(), "host": socket.gethostname()}
                file.write_text(json.dumps({**owner, "since": since}))
            except Timeout:
                raise RunTaken(
                    f"{short(name)} is in use by {_owner(file)}; stop it first."
                ) from None
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let another process have it; may be called again."""
        self._lock.release(force=True)


def is_locked(folder: Path) -> bool:
    """Whether some process, this one too, holds the lock of a folder."""
    with storage(folder, "look at"):
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(folder / LOCK, flags)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False


def _owner(file: Path) -> str:
    """The process that holds a lock, as far as the file can be read."""
    try:
        owner = json.loads(file.read_bytes()[:4096])
    except (OSError, ValueError, RecursionError):
        owner = None
    match owner:
        case {"pid": int(pid), "host": str(host), "since": str(since)}:
            return f"process {pid} on {quoted(host)} since {quoted(since)}"
    return "another process"


def _opened(file: Path) -> BufferedReader:
    """A regular file; a pipe would wait and a link lead elsewhere."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise BadInput(f"{short(file)} is not a regular file; remove it.")
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(os.open(file, flags), "rb")


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
