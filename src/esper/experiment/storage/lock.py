"""One process at a time in a folder, kept by the system.

The lock is `flock` on a file that also says who holds it. The system frees it as soon
as its process is gone, however it went; a file that lies there means nothing.
"""

import fcntl
import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from esper.contracts.errors import RunTaken
from esper.experiment.storage.disk import said, short, storage

LOCK: Final = "lock"
PATIENCE: Final = 0.5
"""Seconds to wait for a lock: whoever lists runs holds each for a moment."""


class Lock:
    """The right to write in a folder, held until `release`.

    Args:
        folder: Where the lock file is or will be.
        name: What the folder is called in an error, if it will be renamed.
    """

    def __init__(self, folder: Path, name: Path | None = None) -> None:
        name = name or folder
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with storage(name, "lock"):
            self._file: int | None = os.open(folder / LOCK, flags, 0o644)
            try:
                _wait(self._file, name)
                _sign(self._file)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Let another process have it; may be called again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def is_locked(folder: Path) -> bool:
    """Whether some process, this one too, holds the lock of a folder."""
    with storage(folder, "look at"):
        try:
            file = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        try:
            return not _flock(file, fcntl.LOCK_SH)
        finally:
            os.close(file)


def _wait(file: int, name: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while not _flock(file, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            raise RunTaken(f"{short(name)} is in use by {_owner(file)}; stop it first.")
        time.sleep(0.02)


def _flock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sign(file: int) -> None:
    """Say who holds it; in place, since a new file would be another lock."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(owner).encode(), 0)


def _owner(file: int) -> str:
    """Who holds it, as far as the file can be read."""
    try:
        owner = json.loads(os.pread(file, 4096, 0))
    except (ValueError, RecursionError):
        owner = None
    match owner:
        case {"pid": int(pid), "host": str(host), "since": str(since)}:
            return f"process {pid} on {said(host)} since {said(since)}"
    return "another process"
