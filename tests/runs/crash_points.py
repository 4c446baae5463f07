"""Every change that saves make to a disk, as a moment to die or to lose power at.

The states are those of a run, in order. The first is there; the others are saved, one
after the other, keeping one. After each crash a folder is left that must hold one of
them, whole, and none older than one whose save had returned.
"""

import shutil

from esper.contracts.errors import InvalidInputError, StorageError
from esper.files import discard, manifest_of, pack
from esper.runs.checkpoint import CheckpointFolder
from tests.runs.disks import CountingDisk, Died, DyingDisk, PowerCut, RecordingDisk
from tests.training.killed_runs import digest

LOSSES = ("none", "all", *range(5))
"""What of the changes that were not synced is lost with the power."""
WORDS = {
    "create": "writes",
    "sync_file": "syncs of a file",
    "sync_folder": "syncs of a folder",
    "rename": "renames",
    "unlink": "removals",
    "mkdir": "new folders",
    "rmdir": "removals of a folder",
}


class Saves:
    """A folder with the first of some states, to which the others are to be added.

    Args:
        folder: Where to work.
        states: By step, in order.
        kind: What saves.
        disk: What the changes are recorded with.
    """

    def __init__(self, folder, states, kind=CheckpointFolder, disk=RecordingDisk):
        self._kind, self._disk = kind, disk
        self._first, *self._later = sorted(states)
        self._states = states
        self._digests = {digest(state): step for step, state in states.items()}
        self._base, self._place = folder / "base", folder / "crashed"
        discard(CountingDisk(), self._base)
        self._base.mkdir()
        self._open(self._base, CountingDisk()).publish(
            self._first, states[self._first], {}
        )

    def crashes(self):
        """What is left after every crash, by kind of crash; None: nothing whole."""
        log, _ = self._log()
        writes = [at for at, (name, _) in enumerate(log) if name == "create"]
        return {
            "death before each change": self._deaths("before", range(len(log))),
            "death in mid-write": self._deaths("torn", writes),
            "death after each change": self._deaths("after", range(len(log))),
            "loss of power": self._power_losses(),
        }

    def changes(self):
        """What the saves do to the disk, in words."""
        names = [name for name, _ in self._log()[0]]
        return {word: names.count(name) for name, word in WORDS.items()}

    def _open(self, path, disk):
        return self._kind(path / "checkpoints", disk, keep=1)

    def _log(self):
        """Every change, and how many there were when each save returned."""
        disk, returned = self._disk(), [(0, self._first)]
        shutil.copytree(self._base, self._place)
        try:
            made = self._open(self._place, disk)
            for step in self._later:
                made.publish(step, self._states[step], {})
                returned.append((len(disk.log), step))
        finally:
            shutil.rmtree(self._place)
        return disk.log, returned

    def _deaths(self, when, moments):
        found = []
        for at in moments:
            shutil.copytree(self._base, self._place)
            made, safe = self._open(self._place, DyingDisk(at, when)), self._first
            try:
                for step in self._later:
                    made.publish(step, self._states[step], {})
                    safe = step
            except Died:
                pass
            found.append(self._left(self._place, safe))
            shutil.rmtree(self._place)
        return found

    def _power_losses(self):
        log, returned = self._log()
        before, found = PowerCut(self._base), []
        moved = [(name, tuple(map(self._in_base, args))) for name, args in log]
        for length in range(len(log) + 1):
            cut = before.after(moved[:length])
            safe = max(step for at, step in returned if at <= length)
            for loss in LOSSES:
                cut.restore(self._place, loss)
                found.append(self._left(self._place, safe))
                shutil.rmtree(self._place)
        return found

    def _in_base(self, argument):
        if isinstance(argument, bytes):
            return argument
        return self._base / argument.relative_to(self._place)

    def _left(self, path, safe):
        """The step of the newest state, if it is whole and not too old."""
        kept = CheckpointFolder(path / "checkpoints", CountingDisk())
        try:
            found = kept.latest()
        except (InvalidInputError, StorageError):
            return None
        step = None if found is None else self._digests.get(digest(found.tensors))
        return step if step is not None and step >= safe else None


class InPlace(CheckpointFolder):
    """The bad twin: there is one checkpoint, and it is written over."""

    def publish(self, step, tensors, facts, *, score=None):
        file = self.path / "000001.safetensors"
        data = pack(tensors, manifest_of({}, 1, score))
        if not self.path.is_dir():
            self._disk.mkdir(self.path)
        discard(self._disk, file)
        self._disk.create(file, data)
        self._disk.sync_file(file)
        self._disk.sync_folder(self.path)
