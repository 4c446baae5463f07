"""Jobs that are done here, by processes, or by the machines of a Ray cluster.

A job is a function of two values, what all jobs share and its own, and of nothing else.
So it does not matter who does it, nor how often: a job whose worker died, did not
answer in time or answered nonsense is given to another one, three times at most.
Results come in the order of the jobs. Values travel as numpy arrays.

Workers ignore Ctrl-C, so that only their parent reacts to it, and the system ends them
when their parent is gone.
"""

import ctypes
import os
import signal
import sys
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from multiprocessing import active_children, get_context
from operator import is_not
from threading import current_thread, main_thread
from time import monotonic
from types import FrameType
from typing import Any, Final, Generic, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import EsperError, WorkersError
from esper.contracts.messages import one_line

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

TRIES: Final = 3
"""How often a job is tried."""
AHEAD: Final = 4
"""Jobs per worker that may be done before the result of the first is taken."""
DEADLINE: Final = 600.0
"""Seconds within which a worker must have done a job by default."""
START: Final = 120.0
"""Seconds more for a worker that is only being started."""
PAUSE: Final = 0.5
"""Seconds between two looks at deadlines and at the stop condition."""
SET_DEATH_SIGNAL: Final = 1
"""What Linux calls PR_SET_PDEATHSIG."""


class Workers:
    """Does jobs; this one does them here, one after the other."""

    @property
    def active_jobs(self) -> Sequence[str]:
        """What each other process is doing now."""
        return ()

    def run(
        self,
        function: Callable[[Shared, Job], Result],
        jobs: Sequence[Job],
        shared: Shared,
        *,
        about: Callable[[Job], str] = str,
        check: Callable[[Job, Result], object] = lambda job, result: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Result]:
        """The result of every job, in order.

        Args:
            function: Does a job; of a module, if others are to do it.
            jobs: What its second argument is, one after the other.
            shared: What its first argument is, for all jobs.
            about: Describes a job in error messages.
            check: Raises an `EsperError` if a worker's result cannot be one.
            stop: Asked every now and then; if it says so, there are no more results.
        """
        for job in jobs:
            if stop():
                return
            with one_thread():
                result = function(shared, job)
            yield result

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch with one thread, as workers have it: sums depend on how they are split."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def workers(
    count: int, *, ray: str | None = None, deadline: float = DEADLINE
) -> Workers:
    """So many workers; 0: none, all is done here.

    Args:
        count: How many; on a Ray cluster 0 is one for each of its cores.
        ray: The address of a Ray cluster, or "local" to start one.
        deadline: Seconds that a job may take.
    """
    if ray is not None:
        from esper.workers.ray import RayWorkers

        return RayWorkers(count, ray, deadline)
    return Processes(count, deadline) if count else Workers()


def available_cores() -> int:
    """Cores that this process may use; 0 if there is only one."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return count if count and count > 1 else 0


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


# Workers elsewhere.

Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class _Given:
    """A job that a worker is doing."""

    number: int
    what: str
    until: float
    """When it is late."""


class JobFailed(Exception):  # noqa: N818
    """Why there is no result."""


class Pool(Workers, Generic[Handle]):
    """Gives jobs to workers, and again if they are lost.

    Args:
        count: Jobs at the same time.
        deadline: Seconds that a job may take.
    """

    def __init__(self, count: int, deadline: float) -> None:
        self.count, self.deadline = count, deadline
        self._given: dict[Handle, _Given] = {}

    @property
    def active_jobs(self) -> Sequence[str]:
        """What each worker is doing now."""
        return [each.what for each in self._given.values()]

    @abstractmethod
    def _share(self, shared: object) -> Any:  # noqa: ANN401
        """What workers are given for what all jobs share."""

    @abstractmethod
    def _give(
        self, function: Callable[..., Any], shared: object, job: object
    ) -> tuple[Handle, float]:
        """Give a job to a worker; with seconds that it has besides the deadline."""

    @abstractmethod
    def _ended(self, given: Collection[Handle]) -> Collection[Handle]:
        """The jobs that have ended, after a while at most."""

    @abstractmethod
    def _result(self, handle: Handle) -> object:
        """The result of a job that has ended, or its error; `JobFailed` if none."""

    @abstractmethod
    def _abandon(self, handle: Handle) -> None:
        """End the worker that does a job."""

    def run(
        self,
        function: Callable[[Shared, Job], Result],
        jobs: Sequence[Job],
        shared: Shared,
        *,
        about: Callable[[Job], str] = str,
        check: Callable[[Job, Result], object] = lambda job, result: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Result]:
        """As for all workers."""
        if len(jobs) == 1:  # another process would only add the way there
            yield from super().run(function, jobs, shared, stop=stop)
            return
        common = self._share(packed(shared))
        waiting, lost = deque(range(len(jobs))), Counter[int]()
        given = self._given = {}
        results: dict[int, Result | EsperError] = {}

        def give_again(number: int, why: str) -> None:
            lost[number] += 1
            if lost[number] == TRIES:
                raise WorkersError(
                    one_line(f"{about(jobs[number])}: tried {TRIES} times; {why}")
                )
            waiting.appendleft(number)

        def take(handle: Handle) -> None:
            number = given.pop(handle).number
            try:
                result: Any = unpacked(self._result(handle))
            except JobFailed as error:
                give_again(number, str(error))
                return
            except EsperError as error:  # on any worker; raised in its turn
                results[number] = error
                return
            try:
                check(jobs[number], result)
            except EsperError as error:
                give_again(number, f"a worker's answer was refused: {error}")
                return
            results[number] = result

        def give() -> None:
            while (
                waiting
                and len(given) < self.count
                and waiting[0] < number + AHEAD * self.count
            ):
                next_ = waiting.popleft()
                job = jobs[next_]
                handle, more = self._give(function, common, packed(job))
                until = monotonic() + self.deadline + more
                given[handle] = _Given(next_, about(job), until)

        try:
            for number in range(len(jobs)):
                while not stop():
                    give()  # also with a result: workers do not wait for its use
                    if number in results:
                        break
                    for handle in self._ended([*given]):
                        take(handle)
                    now = monotonic()
                    for handle in [each for each in given if given[each].until < now]:
                        late = given.pop(handle).number
                        self._abandon(handle)
                        why = f"no answer within {self.deadline:g} s; try fewer workers"
                        give_again(late, f"{why}, or a later deadline.")
                else:
                    return
                result = results.pop(number)
                if isinstance(result, EsperError):
                    raise result
                yield result
        finally:
            for handle in given:
                self._abandon(handle)
            given.clear()


class Processes(Pool[Future[Any]]):
    """Worker processes of one thread each, started when they are needed.

    Every one is an executor of its own, so that the death of one is not the others'.

    Args:
        count: How many.
        deadline: Seconds that a job may take.
        memory: Bytes of data that each may have; None: an equal share of what the
            machine has, so that a job ends, and not the machine.
    """

    def __init__(
        self, count: int, deadline: float = DEADLINE, memory: int | None = None
    ) -> None:
        super().__init__(count, deadline)
        self._memory = memory or machine_memory() // count
        self._idle: list[_Process] = []
        self._busy: dict[Future[Any], _Process] = {}

    def _share(self, shared: object) -> object:
        return shared

    def _give(
        self, function: Callable[..., Any], shared: object, job: object
    ) -> tuple[Future[Any], float]:
        while True:
            more = 0.0 if self._idle else START
            process = self._idle.pop() if self._idle else _Process(self._memory)
            try:
                future = process.pool.submit(do_job, function, shared, job)
            except BrokenProcessPool:  # it ended while it had nothing to do
                process.end()
                continue
            self._busy[future] = process
            return future, more

    def _ended(self, given: Collection[Future[Any]]) -> Collection[Future[Any]]:
        ended, _ = wait(given, timeout=PAUSE, return_when=FIRST_COMPLETED)
        return ended

    def _result(self, handle: Future[Any]) -> object:
        process, error = self._busy.pop(handle), handle.exception()
        if isinstance(error, BrokenProcessPool):
            process.end()
            why = "the worker process died, perhaps out of memory"
            raise JobFailed(f"{why}; try fewer workers or hosts.")
        self._idle.append(process)
        if error is None or isinstance(error, EsperError):
            return handle.result()
        raise JobFailed(f"{type(error).__name__}: {error}") from error

    def _abandon(self, handle: Future[Any]) -> None:
        self._busy.pop(handle).end()

    def close(self) -> None:
        """End all processes at once."""
        for process in (*self._idle, *self._busy.values()):
            process.end()
        self._idle, self._busy = [], {}


class _Process:
    """One worker process.

    Args:
        memory: Bytes of data that it may have.
    """

    def __init__(self, memory: int) -> None:
        others = set(active_children())
        self.pool = ProcessPoolExecutor(
            1,
            mp_context=get_context("spawn"),
            initializer=_start_worker,
            initargs=(memory,),
        )
        # It inherits that Ctrl-C is ignored.
        in_main = current_thread() is main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main else None
        self.pool.submit(int)  # a pool starts a process for a job that finds none idle
        if in_main:
            signal.signal(signal.SIGINT, before)
        self.process = (set(active_children()) - others).pop()

    def end(self) -> None:
        """End it at once, whatever it does, even if it is stopped."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.process.kill()
        self.process.join()


def _start_worker(memory: int) -> None:
    end_with_parent()
    if sys.platform == "linux":
        import resource  # Windows has none

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def end_with_parent() -> None:
    """Have the system end this process when the one that started it is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)


def do_job(function: Callable[..., Any], shared: object, job: object) -> object:
    """What a worker does."""
    torch.set_num_threads(1)
    return packed(function(unpacked(shared), unpacked(job)))


# Tensors would travel as open files, one each: they travel as arrays.


@dataclass(frozen=True, slots=True)
class _Array:
    """A tensor on its way."""

    array: NDArray[Any]


@dataclass(frozen=True, slots=True)
class _Dataclass:
    """A dataclass with tensors on its way."""

    kind: type
    parts: dict[str, Any]


def packed(value: Any) -> Any:  # noqa: ANN401
    """A value with arrays for tensors in it: in dataclasses, dicts, lists, tuples."""
    if isinstance(value, Tensor):
        return _Array(value.detach().cpu().numpy())
    if is_dataclass(value) and not isinstance(value, type):
        parts = {each.name: getattr(value, each.name) for each in fields(value)}
        sent = {name: packed(part) for name, part in parts.items()}
        changed = any(sent[name] is not part for name, part in parts.items())
        return _Dataclass(type(value), sent) if changed else value
    return _inside(packed, value)


def unpacked(value: Any) -> Any:  # noqa: ANN401
    """The value again."""
    if isinstance(value, _Array):
        array = value.array  # which cannot be written in Ray's object store
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    if isinstance(value, _Dataclass):
        return value.kind(
            **{name: unpacked(part) for name, part in value.parts.items()}
        )
    return _inside(unpacked, value)


def _inside(change: Callable[[Any], Any], value: Any) -> Any:  # noqa: ANN401
    """The same for the parts of a plain container; itself if nothing changed."""
    if type(value) is dict:
        made = {name: change(part) for name, part in value.items()}
        return made if any(made[name] is not value[name] for name in made) else value
    if type(value) in (list, tuple):
        parts = [change(part) for part in value]
        changed = any(map(is_not, parts, value))
        return type(value)(parts) if changed else value
    return value


# Signals.


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
