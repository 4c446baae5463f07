"""A run's folder: one name, one configuration, one process at a time.

    runs/<name>/config.toml      the resolved configuration
                versions.json    versions of software and machine
                events.sqlite    the event store
                checkpoints/
                recordings/      of its start, until that is in a checkpoint
                start.json       cost of the start, if it was fitted to recordings
                lock             the process that writes
                finished.json    present once the run is complete

A folder is created whole or not at all, and a name is never used twice. The lock is
released when its process ends in any way.
"""

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import socket
import stat
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from esper import __version__
from esper.contracts.errors import (
    EsperError,
    InvalidInputError,
    InvalidStateError,
    RunLockedError,
)
from esper.contracts.messages import one_line, quoted, short
from esper.files import (
    Disk,
    discard,
    discard_leftovers,
    open_regular,
    publish,
    read_json,
    read_text,
    require_readable,
    storage,
    temporary_name,
)
from esper.runs.checkpoint import CheckpointFolder

fcntl: Any = None
with suppress(ImportError):  # missing on Windows
    fcntl = import_module("fcntl")
CONFIG, VERSIONS, FINISHED = "config.toml", "versions.json", "finished.json"
RESERVED_NAMES: Final = frozenset({"latest", "best", "con", "prn", "aux", "nul"})
TRAINING: Final = "training"
"""The kind of run that trains a controller."""
CHECKPOINTS: Final = "checkpoints"
STORE: Final = "events.sqlite"
OWN_RECORDINGS: Final = "recordings"
"""Folder of the recordings that a run starts from."""
START: Final = "start.json"
OCCUPIED_ERRORS: Final = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
LOCK: Final = "lock"
LOCK_TIMEOUT: Final = 0.5
"""Seconds to wait for a lock; listing runs holds each lock for a moment."""
ADJECTIVES: Final = ("amber", "bold", "calm", "deep", "fair", "green", "keen", "mild")
TREES: Final = ("alder", "birch", "cedar", "fern", "hazel", "larch", "maple", "reed")


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One line of a list of runs."""

    name: str
    state: str
    """running, finished, stopped or damaged."""
    step: int | None
    """Step of the newest checkpoint, or of the end."""
    score: float | None
    """Score of the newest checkpoint that has one."""
    size: int
    """Bytes on disk."""
    trouble: str = ""
    """Why a run is damaged."""


class Run:
    """A run; `create` and `open` lock it for writing, `read` does not."""

    def __init__(self, path: Path, disk: Disk, lock: "Lock | None") -> None:
        self.path, self.name = path, path.name
        self._disk, self._lock = disk, lock

    @classmethod
    def create(
        cls,
        root: Path,
        name: str | None,
        config_toml: str,
        facts: Mapping[str, Any],
        *,
        disk: Disk | None = None,
    ) -> "Run":
        """Create a run and lock it; refuses a name that exists.

        Args:
            root: Folder of runs; created if its parent exists.
            name: Name of the run; None: a generated name.
            config_toml: The resolved configuration.
            facts: Additional entries of `versions.json`, such as the random seed.
            disk: File operations.
        """
        disk = disk or Disk()
        name = invented_name() if name is None else validate_name(name)
        path = root / name
        temporary = temporary_name(path)
        files = {
            CONFIG: config_toml.encode(),
            VERSIONS: _json_bytes(
                {**versions_now(config_toml), "run": secrets.token_hex(8), **facts}
            ),
        }
        with storage(path, "create"):
            if not root.exists():
                if not root.parent.is_dir():
                    raise InvalidInputError(
                        f"{short(root.parent)} does not exist; create it first."
                    )
                with suppress(FileExistsError):  # another process created it
                    disk.mkdir(root)
                disk.sync_folder(root.parent)
            if not root.is_dir():
                raise InvalidInputError(
                    f"{short(root)} is not a folder; runs need one."
                )
            discard_leftovers(disk, root)
            disk.mkdir(temporary)
            lock = Lock(temporary, path)
            try:
                disk.mkdir(temporary / CHECKPOINTS)
                for file, data in files.items():
                    disk.create(temporary / file, data)
                    disk.sync_file(temporary / file)
                disk.sync_folder(temporary)
                try:  # only an empty folder may be replaced
                    disk.rename(temporary, path)
                except OSError as error:
                    if error.errno not in OCCUPIED_ERRORS:
                        raise
                    raise RunLockedError(
                        f"{short(path)} exists; choose another name, or resume it."
                    ) from error
                disk.sync_folder(root)
            except (OSError, RunLockedError):
                lock.close()
                with suppress(OSError):
                    discard(disk, temporary)
                raise
        return cls(path, disk, lock)

    @classmethod
    def create_or_open(
        cls, path: Path, config_toml: str, facts: Mapping[str, Any]
    ) -> "Run":
        """Create the run of a folder, or open it if it is of the same kind."""
        if not (path / CONFIG).exists():
            with storage(path, "create"):
                path.parent.mkdir(parents=True, exist_ok=True)
            return cls.create(path.parent, path.name, config_toml, facts)
        if (kind := cls.read(path).kind) != facts["kind"]:
            raise RunLockedError(
                f"{short(path)} has another training, of kind {quoted(kind)}. Give "
                "another folder."
            )
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Open a run and lock it."""
        run = cls.read(path)
        run._lock = Lock(path)
        return run

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Open a run for reading, also while another process writes."""
        if not path.is_dir():
            raise InvalidInputError(
                f"{short(path)} is no run; expected a folder. See esper runs."
            )
        if not (path / CONFIG).is_file():
            raise InvalidInputError(f"{short(path)} is no run: it has no {CONFIG}.")
        run = cls(path, Disk(), None)
        require_readable(short(path), run.versions.get("esper"), "Start a new run.")
        return run

    @staticmethod
    def list(root: Path) -> Sequence[RunSummary]:
        """Every run of a folder, by name; with the errors of damaged ones."""
        if not os.path.isdir(root):  # False without permission
            return []
        with storage(root, "list"):
            paths = sorted(path for path in root.iterdir() if path.name[0] != ".")
        return [_summary(path) for path in paths if os.path.isdir(path)]

    @property
    def config_toml(self) -> str:
        """The configuration."""
        return read_text(self.path / CONFIG, disk=self._disk)

    @property
    def versions(self) -> dict[str, Any]:
        """Versions, machine and other facts from its creation."""
        return self.facts(VERSIONS)

    @property
    def kind(self) -> str:
        """Kind of the run: training, evaluation or ppo."""
        return str(self.versions.get("kind", TRAINING))

    @property
    def id(self) -> str:
        """Id that its store must name."""
        return str(self.versions.get("run"))

    @property
    def finished(self) -> dict[str, Any] | None:
        """The facts of `finish`, or None."""
        if not (self.path / FINISHED).exists():
            return None
        return self.facts(FINISHED)

    def facts(self, name: str) -> dict[str, Any]:
        """The facts in a file of the run."""
        return read_json(self.path / name, self._disk)

    @property
    def seconds(self) -> float:
        """Time from its creation to its end, including interruptions."""
        began = datetime.fromisoformat(str(self.versions["began"]))
        return (self.path / FINISHED).stat().st_mtime - began.timestamp()

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Mark this run as complete."""
        self.write(FINISHED, facts)

    def go_on(self) -> None:
        """Mark this run as incomplete again."""
        if (self.path / FINISHED).exists():
            self._disk.unlink(self.path / FINISHED)

    def write(self, name: str, facts: Mapping[str, Any]) -> None:
        """Write a file of facts, whole or not at all."""
        if self._lock is None:
            raise InvalidStateError(
                f"{short(self.path)} is open for reading only; use Run.open."
            )
        publish(self._disk, self.path / name, _json_bytes(facts))

    def checkpoints(self, *, keep: int = 3) -> CheckpointFolder:
        """Its checkpoints, of which the newest `keep` and the best are kept."""
        return CheckpointFolder(self.path / CHECKPOINTS, self._disk, keep=keep)

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def find_run(text: str, root: Path) -> Path:
    """The folder of a run, from its name in `root` or its path."""
    if not text.isprintable() or not text:
        raise InvalidInputError(
            f"expected the name or folder of a run, got {quoted(text)}."
        )
    # os.path returns False without permission; Path would raise.
    there = [path for path in (root / text, Path(text)) if os.path.isdir(path)]
    for path in there:
        if os.path.isfile(path / CONFIG):
            return path if path.name not in ("", "..") else path.resolve()
    if there:
        raise InvalidInputError(f"{short(there[0])} is no run: it has no {CONFIG}.")
    names = [each.name for each in Run.list(root)]
    near = get_close_matches(text, names, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ". See esper runs."
    raise InvalidInputError(f"there is no run {quoted(text)} in {short(root)}{hint}")


def invented_name(now: datetime | None = None) -> str:
    """A name of date, time and two words, which sorts by time."""
    now = now or datetime.now(UTC)
    words = f"{secrets.choice(ADJECTIVES)}-{secrets.choice(TREES)}"
    return f"{now:%Y%m%d-%H%M%S}-{words}"


def versions_now(config_toml: str) -> dict[str, Any]:
    """Everything that must be equal for a resumed run to be exact to the bit."""
    import torch

    from esper.kernels import versions

    return {
        "esper": __version__,
        **versions(),
        "system": platform.system(),
        "denormals": bool(torch.tensor(1e-40) * 1 != 0),
        "threads": torch.get_num_threads(),
        "config_sha256": hashlib.sha256(config_toml.encode()).hexdigest(),
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def checkout_commit(folder: Path | None = None) -> str | None:
    """The Git commit of the checkout of this package; None if it is installed."""
    git = (folder or Path(__file__).parents[3]) / ".git"
    command = ["git", f"--git-dir={git}", "rev-parse", "--verify", "HEAD"]
    with suppress(OSError, subprocess.SubprocessError):
        found = subprocess.run(command, capture_output=True, check=True, timeout=10)
        return found.stdout.decode().strip()
    return None


def changes_since(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Differences of versions that prevent an exact resume."""
    return [
        f"{name} was {quoted(str(before.get(name)))} and is {quoted(str(value))}"
        for name, value in now.items()
        if name != "began" and before.get(name) != value
    ]


def _json_bytes(facts: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(dict(facts), allow_nan=False, indent=1)}\n".encode()


def _summary(path: Path) -> RunSummary:
    state, trouble = "stopped", ""
    try:
        run = Run.read(path)
        _ = run.config_toml
        if is_locked(path):
            state = "running"
        elif run.finished is not None:
            state = "finished"
        manifests = run.checkpoints().manifests()
        if len(manifests) != len(run.checkpoints().steps()):
            trouble = "a checkpoint is damaged"
    except (OSError, ValueError) as error:  # list the other runs anyway
        state, trouble, manifests = "damaged", one_line(str(error)), []
    scores = [entry.score for entry in manifests if entry.score is not None]
    steps = [entry.step for entry in manifests]
    if state == "finished":
        facts = run.finished or {}
        mean, rounds = facts.get("mean"), facts.get("rounds")  # of an agent
        scores += [mean] if isinstance(mean, float) else []
        steps += [rounds] if isinstance(rounds, int) and not steps else []
    return RunSummary(
        name=short(Path(path.name)),
        state=state,
        step=steps[-1] if steps else None,
        score=scores[-1] if scores else None,
        size=_size(path),
        trouble=trouble,
    )


def _size(path: Path) -> int:
    total = 0
    for folder, _, files in os.walk(path):
        for file in files:
            with suppress(OSError):  # removed since
                total += os.lstat(Path(folder) / file).st_size
    return total


def validate_name(name: str) -> str:
    """The name, if it is one safe path component on every system."""
    if (
        not re.fullmatch("[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name)
        or name.endswith(".")
        or name.split(".")[0].lower() in RESERVED_NAMES
    ):
        raise InvalidInputError(
            f"a run cannot be called {quoted(name)}; use 1 to 64 of a-z, 0-9, '_', "
            "'-', '.', beginning with a letter or digit."
        )
    return name


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
                holder = _owner(file)
                advice = "stop it first."
                if holder.startswith(f"process {os.getpid()} on"):
                    advice = "this one. Use grower.close(), or another folder."
                raise RunLockedError(
                    f"{short(name)} is in use by {holder}; {advice}"
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
