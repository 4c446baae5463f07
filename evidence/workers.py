"""Workers of a campaign, which can be asked to end jobs that can be resumed."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.synchronize import Event
from typing import Any, Protocol, TypeVar

from esper.experiment.workers import Pool, workers

T = TypeVar("T")
_STOP: Event | None = None


class Workers(Protocol):
    """An executor of jobs."""

    def submit(self, work: Callable[..., T], *given: Any) -> "Future[T]":  # noqa: ANN401
        """Have a function called as soon as a worker is free."""
        ...

    def stop(self) -> None:
        """Ask running jobs to end."""
        ...


@contextmanager
def stoppable(processes: int) -> Iterator[Workers]:
    """So many processes; for one, this process: a job is done when `submit` returns."""
    if processes == 1:
        yield _ThisProcess()
        return
    event = get_context("spawn").Event()
    with workers(processes, _remember, event) as pool:
        yield _Stoppable(pool, event)


def stopping() -> bool:
    """Whether the parent of this process wants jobs that can be resumed to end."""
    return _STOP is not None and _STOP.is_set()


def _remember(event: Event) -> None:
    global _STOP
    _STOP = event


class _Stoppable:
    def __init__(self, pool: Pool, event: Event) -> None:
        self.submit, self.stop = pool.submit, event.set


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
