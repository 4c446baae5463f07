"""A lock that gives one process the right to write in a folder."""

import json
import os
import socket
import stat
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from esper.contracts.errors import EsperError, InvalidInputError, RunLockedError
from esper.contracts.messages import quoted, short
from esper.files import open_regular, read_json, storage

fcntl: Any = None
with suppress(ImportError):  # missing on Windows
    fcntl = import_module("fcntl")
LOCK: Final = "lock"
LOCK_TIMEOUT: Final = 0.5
"""Seconds to wait for a lock; listing runs holds each lock for a moment."""


class Lock:
    """The right to write in a folder, until `close` or the end of the process.

    The lock file also names its owner. `name` replaces the folder's name in errors.
    """

    def __init__(self, folder: Path, name: Path | None = None) -> None:
        name, file = name or folder, folder / LOCK
        if fcntl is None:
            raise InvalidInputError(
                "runs need the file locks of Linux or macOS; use one of them."
            )
        self._lock = FileLock(file, timeout=LOCK_TIMEOUT, thread_local=False)
        if os.path.lexists(file) and not stat.S_ISREG(file.lstat().st_mode):
            raise InvalidInputError(f"{short(file)} is not a regular file; remove it.")
        with storage(name, "lock"):
            try:
                self._lock.acquire(poll_interval=0.02)
                since = datetime.now(UTC).isoformat(timespec="seconds")
                owner = {"pid": os.getpid(), "host": socket.gethostname()}
                file.write_text(json.dumps({**owner, "since": since}))
            except Timeout:
                raise RunLockedError(
                    f"{short(name)} is in use by {_owner(file)}; stop it first."
                ) from None
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the lock; may be called again."""
        self._lock.release(force=True)


def is_locked(folder: Path) -> bool:
    """Whether any process, including this one, holds the lock of a folder."""
    if fcntl is None:  # no run can be made here
        return False
    with storage(folder, "look at"):
        try:
            with open_regular(folder / LOCK) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
    return False


def _owner(file: Path) -> str:
    """The process that holds a lock, if the file can be read."""
    owner = None
    with suppress(OSError, EsperError):
        owner = read_json(file)
    match owner:
        case {"pid": int(pid), "host": str(host), "since": str(since)}:
            return f"process {pid} on {quoted(host)} since {quoted(since)}"
    return "another process"
