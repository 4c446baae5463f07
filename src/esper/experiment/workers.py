"""Worker processes, and the signals that ask a process to end.

Workers ignore Ctrl-C, so that only their parent reacts to it, and the system ends them
when their parent is gone. What takes long asks `stopping` now and then.
"""

import ctypes
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.synchronize import Event
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from esper.contracts.errors import WorkersTrouble

SET_DEATH_SIGNAL: Final = 1
"""What Linux calls PR_SET_PDEATHSIG."""

T = TypeVar("T")


@runtime_checkable
class Workers(Protocol):
    """An executor of jobs."""

    def submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":  # noqa: ANN401
        """Have a function called as soon as a worker is free."""
        ...

    def stop(self) -> None:
        """Ask running jobs to end."""
        ...


@contextmanager
def workers(processes: int) -> Iterator[Workers]:
    """Worker processes; ended at once if something goes wrong.

    Args:
        processes: How many.
    """
    others = set(active_children())
    context = get_context("spawn")
    event = context.Event()
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(event,)
    ) as pool:
        try:
            yield _Pool(pool, event)
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


@contextmanager
def one_worker() -> Iterator[Workers]:
    """This process itself: a job is done when `submit` returns."""
    yield _ThisProcess()


def stopping() -> bool:
    """Whether the parent of this process wants jobs that can be resumed to end."""
    return _STOP is not None and _STOP.is_set()


_STOP: Event | None = None


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


class _Pool:
    def __init__(self, pool: ProcessPoolExecutor, event: Event) -> None:
        self._pool, self._event = pool, event

    def submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":  # noqa: ANN401
        with _ignored_interrupts():
            return self._pool.submit(work, *given)

    def stop(self) -> None:
        self._event.set()


class _ThisProcess:
    def submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":  # noqa: ANN401
        future: Future[T] = Future()
        try:
            future.set_result(work(*given))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        """Jobs of this process see its signals themselves."""


def _begin(event: Event) -> None:
    """Have the system end this process when the one that started it is gone."""
    global _STOP
    _STOP = event
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


@contextmanager
def _ignored_interrupts() -> Iterator[None]:
    """Processes that start in here ignore Ctrl-C."""
    if current_thread() is not main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
