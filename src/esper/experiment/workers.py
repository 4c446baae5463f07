"""Worker processes, and the signals that ask a process to end.

Workers ignore Ctrl-C, so that only their parent reacts to it, and the system ends them
when their parent is gone.
"""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final, TypeVar

from esper.contracts.errors import WorkersTrouble

SET_DEATH_SIGNAL: Final = 1
"""What Linux calls PR_SET_PDEATHSIG."""

T = TypeVar("T")


class Pool:
    """Submits jobs to worker processes, which ignore Ctrl-C."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    def submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":  # noqa: ANN401
        """Have a function called as soon as a worker is free."""
        if current_thread() is not main_thread():
            return self._pool.submit(work, *given)
        # Processes inherit what is ignored when they start.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return self._pool.submit(work, *given)
        finally:
            signal.signal(signal.SIGINT, before)


@contextmanager
def workers(
    processes: int,
    begin: Callable[..., object] | None = None,
    *given: Any,  # noqa: ANN401
) -> Iterator[Pool]:
    """Worker processes; ended at once if something goes wrong.

    Args:
        processes: How many.
        begin: Called first in each of them.
        given: What it is called with.
    """
    others = set(active_children())
    with ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),
        initializer=_begin,
        initargs=(begin, *given),
    ) as pool:
        try:
            yield Pool(pool)
        except BrokenProcessPool:
            raise WorkersTrouble(
                "a process that works for this one ended by itself, perhaps for want "
                "of memory; try fewer processes or hosts."
            ) from None
        except BaseException:
            # Leaving the pool waits for its processes, which may be busy for long.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()
            raise


def _begin(begin: Callable[..., object] | None, *given: Any) -> None:  # noqa: ANN401
    """Have the system end this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if begin is not None:
        begin(*given)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The signals that asked for an end so far; the second one is not waited for."""
    caught: list[int] = []
    if current_thread() is not main_thread():  # only there can signals be caught
        yield caught
        return

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            raise KeyboardInterrupt

    kinds = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {kind: signal.getsignal(kind) for kind in kinds}
    wanted = [kind for kind in kinds if before[kind] is not signal.SIG_IGN]  # nohup
    for kind in wanted:
        signal.signal(kind, catch)
    try:
        yield caught
    finally:
        for kind in wanted:
            signal.signal(kind, before[kind])
