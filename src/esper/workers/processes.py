"""Worker processes on this machine.

Workers ignore Ctrl-C, so that only their parent reacts to it. The system kills them
when their parent ends.
"""

import ctypes
import signal
import sys
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from typing import Any, Final

from esper.contracts.errors import EsperError
from esper.workers.jobs import (
    DEADLINE,
    POLL_SECONDS,
    START_SECONDS,
    JobFailed,
    Pool,
    do_job,
    machine_memory,
)

PR_SET_PDEATHSIG: Final = 1
"""The constant of Linux's prctl."""


class Processes(Pool[Future[bytes]]):
    """Processes of one thread each, started on demand.

    Each has an executor of its own, because a dead process breaks its executor.
    `memory` limits the bytes of each, by default to an equal part of the machine's, so
    that a job fails before the machine runs out.
    """

    def __init__(
        self, count: int, deadline: float = DEADLINE, memory: int | None = None
    ) -> None:
        super().__init__(count, deadline)
        self._memory = memory or machine_memory() // count
        self._idle: list[_Process] = []
        self._busy: dict[Future[bytes], _Process] = {}

    def _submit(
        self, function: Callable[..., Any], shared: bytes, job: bytes
    ) -> tuple[Future[bytes], float]:
        while True:
            more = 0.0 if self._idle else START_SECONDS
            process = self._idle.pop() if self._idle else _Process(self._memory)
            try:
                future = process.pool.submit(do_job, function, shared, job)
            except BrokenProcessPool:  # it died while idle
                process.end()
                continue
            self._busy[future] = process
            return future, more

    def _ended(self, handles: Collection[Future[bytes]]) -> Collection[Future[bytes]]:
        ended, _ = wait(handles, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
        return ended

    def _result(self, handle: Future[bytes]) -> bytes:
        process, error = self._busy.pop(handle), handle.exception()
        if isinstance(error, BrokenProcessPool):
            process.end()
            why = "the worker process died, perhaps out of memory"
            raise JobFailed(f"{why}; try fewer workers or hosts.")
        self._idle.append(process)
        if error is None or isinstance(error, EsperError):
            return handle.result()
        raise JobFailed(f"{type(error).__name__}: {error}") from error

    def _abandon(self, handle: Future[bytes]) -> None:
        self._busy.pop(handle).end()

    def close(self) -> None:
        """Kill all processes."""
        for process in (*self._idle, *self._busy.values()):
            process.end()
        self._idle, self._busy = [], {}


class _Process:
    """One worker process with a limit of memory in bytes."""

    def __init__(self, memory: int) -> None:
        others = set(active_children())
        self.pool = ProcessPoolExecutor(
            1,
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(memory,),
        )
        # The process inherits that Ctrl-C is ignored.
        in_main = current_thread() is main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        self.pool.submit(int)  # makes the pool start its process
        if in_main:
            signal.signal(signal.SIGINT, before)
        self.process = (set(active_children()) - others).pop()

    def end(self) -> None:
        """Kill it, also while it is stopped."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.process.kill()
        self.process.join()


def _start_worker(memory: int) -> None:
    end_with_parent()
    if sys.platform == "linux":
        import resource  # missing on Windows

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
