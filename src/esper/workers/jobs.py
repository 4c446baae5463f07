"""Jobs, and workers that run them here or elsewhere.

A job is a pure function of two values: one that all jobs share and one of its own. So
any worker may run it, and more than once. A job whose worker died, was late or returned
an invalid result is given to another worker, up to three times. Results come in the
order of the jobs.

Worker processes ignore Ctrl-C, so that only their parent reacts to it. The system kills
them when their parent ends.
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
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from multiprocessing.reduction import ForkingPickler
from threading import current_thread, main_thread
from time import monotonic
from types import FrameType
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from esper.contracts.errors import EsperError, WorkersError
from esper.contracts.messages import one_line

Shared = TypeVar("Shared")
Job = TypeVar("Job")
Result = TypeVar("Result")

TRIES: Final = 3
"""How often a job is tried."""
JOBS_AHEAD: Final = 4
"""Jobs per worker that may run before the result of the first is used."""
DEADLINE: Final = 600.0
"""Default limit of a job's time in seconds."""
START_SECONDS: Final = 120.0
"""Additional seconds for a worker that is still starting."""
POLL_SECONDS: Final = 0.5
"""Seconds between two checks of deadlines and of the stop condition."""
PR_SET_PDEATHSIG: Final = 1
"""The constant of Linux's prctl."""


class Workers:
    """Runs jobs; this class runs them in this process, one after the other."""

    @property
    def active_jobs(self) -> Sequence[str]:
        """Descriptions of the jobs that run in other processes."""
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
            function: Runs a job; must be defined at the top of a module.
            jobs: Its second argument, one for each call.
            shared: Its first argument, the same for all jobs.
            about: Describes a job in error messages.
            check: Raises an `EsperError` if a worker's result is invalid.
            stop: Called often; there are no more results once it returns True.
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
    """Run torch on one thread, as workers do; the number of threads changes sums."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def workers(
    count: int, *, ray: str | None = None, deadline: float = DEADLINE
) -> Workers:
    """Workers of the kind that the arguments ask for.

    With count 0, jobs run here, or on all cores of the Ray cluster at the address `ray`
    ("local" starts one). A job may take `deadline` seconds.
    """
    if ray is not None:
        from esper.workers.ray import RayWorkers

        return RayWorkers(count, ray, deadline)
    if not count:
        return Workers()
    return Processes(count, deadline)


def available_cores() -> int:
    """Number of cores that this process may use; 0 if there is only one."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return count if count and count > 1 else 0


def machine_memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class JobFailed(Exception):  # noqa: N818
    """A worker has no result; the job should be tried again."""


Handle = TypeVar("Handle")


@dataclass(frozen=True, slots=True)
class _ActiveJob:
    number: int
    about: str
    deadline: float


class Pool(Workers, Generic[Handle]):
    """Gives `count` jobs at a time to workers, and again if they fail."""

    def __init__(self, count: int, deadline: float) -> None:
        self.count, self.deadline = count, deadline
        self._active: dict[Handle, _ActiveJob] = {}

    @property
    def active_jobs(self) -> Sequence[str]:
        """Descriptions of the jobs that run now."""
        return [job.about for job in self._active.values()]

    def _share(self, shared: bytes) -> Any:  # noqa: ANN401
        """Prepare the shared value for `_submit`."""
        return shared

    @abstractmethod
    def _submit(
        self, function: Callable[..., Any], shared: object, job: bytes
    ) -> tuple[Handle, float]:
        """Start a job; return its handle and seconds to add to its deadline."""

    @abstractmethod
    def _ended(self, handles: Collection[Handle]) -> Collection[Handle]:
        """The jobs that have ended; waits at most `POLL_SECONDS` for one."""

    @abstractmethod
    def _result(self, handle: Handle) -> bytes:
        """The result of a job that has ended; raises its error, or `JobFailed`."""

    @abstractmethod
    def _abandon(self, handle: Handle) -> None:
        """End the worker that runs a job."""

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
        """See `Workers.run`."""
        if len(jobs) == 1:  # transport would only add time
            yield from super().run(function, jobs, shared, stop=stop)
            return
        common = self._share(packed(shared))
        waiting, failures = deque(range(len(jobs))), Counter[int]()
        active = self._active = {}
        results: dict[int, Result | EsperError] = {}

        def retry(number: int, why: str) -> None:
            failures[number] += 1
            if failures[number] == TRIES:
                raise WorkersError(
                    one_line(f"{about(jobs[number])}: tried {TRIES} times; {why}")
                )
            waiting.appendleft(number)

        def receive(handle: Handle) -> None:
            number = active.pop(handle).number
            try:
                result: Any = unpacked(self._result(handle))
            except JobFailed as error:
                retry(number, str(error))
                return
            except EsperError as error:  # the same on any worker; raised in order
                results[number] = error
                return
            try:
                check(jobs[number], result)
            except EsperError as error:
                retry(number, f"a worker's answer was refused: {error}")
                return
            results[number] = result

        def submit() -> None:
            while (
                waiting
                and len(active) < self.count
                and waiting[0] < number + JOBS_AHEAD * self.count
            ):
                next_ = waiting.popleft()
                job = jobs[next_]
                handle, more = self._submit(function, common, packed(job))
                deadline = monotonic() + self.deadline + more
                active[handle] = _ActiveJob(next_, about(job), deadline)

        try:
            for number in range(len(jobs)):
                while not stop():
                    submit()  # also with a result, so that workers do not idle
                    if number in results:
                        break
                    for handle in self._ended([*active]):
                        receive(handle)
                    now = monotonic()
                    for handle in [
                        each for each in active if active[each].deadline < now
                    ]:
                        late = active.pop(handle).number
                        self._abandon(handle)
                        why = f"no answer within {self.deadline:g} s; try fewer workers"
                        retry(late, f"{why}, or a later deadline.")
                else:
                    return
                result = results.pop(number)
                if isinstance(result, EsperError):
                    raise result
                yield result
        finally:
            for handle in active:
                self._abandon(handle)
            active.clear()


def do_job(function: Callable[..., Any], shared: Any, job: bytes) -> bytes:  # noqa: ANN401
    """Run a job in a worker."""
    torch.set_num_threads(1)
    return packed(function(unpacked(shared), unpacked(job)))


class _JobPickler(ForkingPickler):
    """Sends tensors as arrays.

    torch would send each tensor as an open file, and files run out.
    """

    def reducer_override(self, value: object) -> Any:  # noqa: ANN401
        """How a tensor is made again; other values as usual."""
        if isinstance(value, Tensor):
            return torch.from_numpy, (value.detach().cpu().numpy(),)
        return NotImplemented


def packed(value: object) -> bytes:
    """The value as bytes for another process; see `unpacked`."""
    return bytes(_JobPickler.dumps(value))


def unpacked(data: bytes) -> Any:  # noqa: ANN401
    """The inverse of `packed`; only for data of processes that were started here."""
    return _JobPickler.loads(data)


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
        self, function: Callable[..., Any], shared: object, job: bytes
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


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect signals that ask for an end; the second one ends the process at once.

    It calls the earlier handler of Ctrl-C and raises KeyboardInterrupt.
    """
    caught: list[int] = []
    if current_thread() is not main_thread():  # others cannot catch signals
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
