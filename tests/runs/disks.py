"""Disks that fail: one dies at a call, one reports an error, one loses power.

None of them syncs for real; what a sync is worth is modelled by `PowerCut`.
"""

import random
from copy import deepcopy
from pathlib import Path

from esper.files import Disk

CHANGES = ("mkdir", "create", "sync_file", "sync_folder", "rename", "unlink", "rmdir")
READS = ("read", "open")


class Died(BaseException):
    """The process was killed; nothing of it may run after this."""


class CountingDisk(Disk):
    """Calls `meet` before every call; a fault there takes its place."""

    def __init__(self):
        self.calls = 0

    def meet(self, index, name, args):
        pass

    def sync_file(self, file):
        assert file.is_file()

    def sync_folder(self, folder):
        assert folder.is_dir()


def _counted(name):
    def call(self, *args):
        index, self.calls = self.calls, self.calls + 1
        self.meet(index, name, args)
        base = CountingDisk if name.startswith("sync") else Disk
        return getattr(base, name)(self, *args)

    return call


class DyingDisk(CountingDisk):
    """Dies at one call that changes something.

    `when` is "before", "after", or "torn": a file is created with half its content.
    """

    def __init__(self, at, when):
        super().__init__()
        self.at, self.when, self.changes = at, when, 0

    def meet(self, index, name, args):
        if name not in CHANGES:
            return
        here, self.changes = self.changes, self.changes + 1
        if here != self.at:
            return
        if self.when == "torn" and name == "create":
            args[0].write_bytes(args[1][: len(args[1]) // 2])
        if self.when == "after":
            base = CountingDisk if name.startswith("sync") else Disk
            getattr(base, name)(self, *args)
        raise Died


class RefusingDisk(CountingDisk):
    """Reports an error of the system at one call."""

    def __init__(self, at, code):
        super().__init__()
        self.at, self.code, self.met = at, code, None

    def meet(self, index, name, args):
        if index == self.at:
            self.met = name
            raise OSError(self.code, "the system says no", str(args[0]))


class RecordingDisk(CountingDisk):
    """Remembers every change, for `PowerCut`."""

    def __init__(self):
        super().__init__()
        self.log = []

    def meet(self, index, name, args):
        if name in CHANGES:
            self.log.append((name, args))


for _name in (*CHANGES, *READS):
    for _kind in (DyingDisk, RefusingDisk, RecordingDisk):
        setattr(_kind, _name, _counted(_name))


class ForgetfulDisk(RecordingDisk):
    """The bad twin: files are not synced."""

    def sync_file(self, file):
        pass


class HastyDisk(RecordingDisk):
    """The bad twin: folders are not synced."""

    def sync_folder(self, folder):
        pass


class PowerCut:
    """What may be on a disk when the power goes, as POSIX allows it.

    Content that was not synced may be missing in part or whole. Changes of names that
    were not synced survive up to some point in their folder, for each folder apart.
    """

    def __init__(self, root: Path):
        self.root, self.top = root, self._scan(root)

    def after(self, log):
        """The disk as it was at first, with changes made."""
        cut = deepcopy(self)
        for name, args in log:
            getattr(cut, f"_{name}")(*args)
        return cut

    def restore(self, target: Path, loss):
        """Write what is left into a folder: `loss` is "none", "all" or a number."""
        self._write(self.top, target, loss, random.Random(loss))

    def _scan(self, path):
        if path.is_file():
            data = path.read_bytes()
            return {"now": data, "durable": data}
        inner = {part.name: self._scan(part) for part in path.iterdir()}
        return {"names": dict(inner), "durable": inner, "pending": []}

    def _node(self, path):
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node["names"][part]
        return node

    def _change(self, folder, change):
        node = self._node(folder)
        change(node["names"])
        node["pending"].append(change)

    def _mkdir(self, folder):
        new = {"names": {}, "durable": {}, "pending": []}
        self._change(folder.parent, lambda names: names.update({folder.name: new}))

    def _create(self, file, data):
        new = {"now": data, "durable": b""}
        self._change(file.parent, lambda names: names.update({file.name: new}))

    def _sync_file(self, file):
        node = self._node(file)
        node["durable"] = node["now"]

    def _sync_folder(self, folder):
        node = self._node(folder)
        node["durable"], node["pending"] = dict(node["names"]), []

    def _rename(self, old, new):
        assert old.parent == new.parent
        self._change(
            old.parent, lambda names: names.update({new.name: names.pop(old.name)})
        )

    def _unlink(self, file):
        self._change(file.parent, lambda names: names.pop(file.name))

    _rmdir = _unlink

    def _write(self, node, path, loss, chance):
        if "now" in node:
            now, durable = node["now"], node["durable"]
            torn = now[: len(now) // 2] if now != durable else now
            left = {"none": now, "all": durable}
            path.write_bytes(left.get(loss, chance.choice([now, torn, durable])))
            return
        path.mkdir()
        count = len(node["pending"])
        kept = {"none": count, "all": 0}.get(loss, chance.randint(0, count))
        names = dict(node["durable"])
        for change in node["pending"][:kept]:
            change(names)
        for name, inner in names.items():
            self._write(inner, path / name, loss, chance)
