"""Worker processes, and the signals that ask a process to end.

Workers ignore Ctrl-C, so that only their parent reacts to it, and the system ends them
when their parent is gone.
"""

import ctypes
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from threading import current_thread, main_thread
from types import FrameType
from typing import Final

from esper.contracts.errors import WorkersTrouble

SET_DEATH_SIGNAL: Final = 1
"""What Linux calls PR_SET_PDEATHSIG."""


@contextmanager
def workers(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes of one thread each, which are ended at once at the end."""
    others = set(active_children())
    with ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_begin
    ) as pool:
        try:
            _start(pool, processes)
            yield pool
        except BrokenProcessPool:
            raise WorkersTrouble(
                "a process that works for this one ended by itself, perhaps for want "
                "of memory; try fewer processes or hosts."
            ) from None
        finally:
            # Leaving the pool waits for its processes, which may be busy for long.
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(active_children()) - others:
                process.terminate()


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start all processes now, so that they inherit that Ctrl-C is ignored."""
    in_main = current_thread() is main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
    for _ in range(processes):
        pool.submit(int)  # a pool starts a process for each job that finds none idle
    if in_main:
        signal.signal(signal.SIGINT, before)


def _begin() -> None:
    """Have the system end this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """The signals that asked for an end so far; the second one is not waited for.

    Ctrl-C is then handled as it was before, and else raises KeyboardInterrupt.
    """
    caught: list[int] = []
    if current_thread() is not main_thread():  # only there can signals be caught
        yield caught
        return

    def catch(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            after = before[signal.SIGINT]
            if callable(after):
                after(number, frame)
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
