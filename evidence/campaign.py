"""A protocol is carried out, job by job: `python -m evidence run`.

Whatever is done is in the ledger, so a campaign can be ended at any moment and gone on
with. Jobs run in processes of one thread each, the most important first; one that
fails is noted, and tried again next time. A signal, or the end of the time that was
given, begins no more jobs; trainings save where they are.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from time import monotonic
from typing import Final

from rich.console import Console

from esper.contracts.errors import BadInput, EsperError
from esper.experiment.files import Lock, storage
from esper.experiment.judging import PAUSE
from esper.experiment.messages import nearest, quoted, refusal
from esper.experiment.progress import Progress
from esper.experiment.run import versions_now
from esper.experiment.workers import caught_signals
from evidence.execution import Done, Order, Orders, do
from evidence.jobs import KINDS, Job, all_jobs
from evidence.ledger import LEDGER, Ledger, known_states
from evidence.protocol import PROJECTION, Protocol, read_protocol
from evidence.workers import Workers, stoppable

IN_LEDGER: Final = ("began", "config_sha256")
"""Facts that the ledger has anyway."""
OTHERS: Final = "controllers"
"""What jobs that belong to no task are shown as."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How far a campaign came."""

    done: int
    """Jobs that are done, also those of earlier times."""
    failed: tuple[str, ...]
    """What the jobs that failed say, first the job."""
    left: int
    """Jobs that were asked for and are not done, failed ones aside."""
    signal: int | None
    """The signal that ended it early, if one did."""


def run(
    protocol_path: Path,
    folder: Path,
    *,
    processes: int = 2,
    minutes: float | None = None,
    only: Collection[str] = (),
    tasks: Collection[str] = (),
    dry: bool = False,
    console: Console | None = None,
) -> Ended:
    """Carry out what a protocol asks for and has not been done.

    Args:
        protocol_path: The protocol, in TOML.
        folder: Where ledger and trainings are; made if it is not there.
        processes: Jobs at the same time.
        minutes: After which no more jobs are begun; None: all are.
        only: Kinds of jobs; empty: all kinds.
        tasks: Whose batches are run; empty: those of all tasks.
        dry: Whether to print the jobs and the hours only.
        console: Where progress is shown.
    """
    console = console or Console()
    protocol, toml = read_protocol(protocol_path)
    _require("--only", only, KINDS)
    _require("--tasks", tasks, protocol.tasks)
    jobs = [
        job
        for job in all_jobs(protocol)
        if (not only or job.kind in only)
        and (not tasks or job.task in tasks or not job.task)
    ]
    states, durations = known_states(folder / LEDGER)
    ahead = [job for job in jobs if states.get(job.id) != "done"]
    guess = _guesses(all_jobs(protocol), durations, protocol)
    _print(console, _projection(ahead, guess, processes))
    if dry:
        for job in ahead:
            _print(console, f"{job.id}  {guess[job.kind]:.0f} s")
        return Ended(
            done=len(jobs) - len(ahead), failed=(), left=len(ahead), signal=None
        )
    with storage(folder, "create"):
        folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    try:
        versions = versions_now(toml.decode())
        facts = {name: versions[name] for name in versions if name not in IN_LEDGER}
        with Ledger(folder / LEDGER, toml, facts) as ledger:
            everything = enumerate(all_jobs(protocol))
            ledger.plan((job.id, number, job.kind) for number, job in everything)
            names = [OTHERS, *protocol.tasks]
            with Progress(names, console, unit="job") as progress:
                scheduler = _Scheduler(protocol, ledger, folder, jobs, progress)
                return scheduler.work(processes, minutes)
    finally:
        lock.release()


class _Scheduler:
    """Submits jobs and writes their results to the ledger."""

    def __init__(
        self,
        protocol: Protocol,
        ledger: Ledger,
        folder: Path,
        jobs: Sequence[Job],
        progress: Progress,
    ) -> None:
        self._orders = Orders(protocol, ledger, folder)
        self._ledger, self._jobs, self._progress = ledger, jobs, progress
        states = ledger.states()
        self._done = {job for job, state in states.items() if state == "done"}
        self._ahead = [job for job in jobs if job.id not in self._done]
        self._failed: dict[str, str] = {}
        self._deadline: float | None = None

    def work(self, processes: int, minutes: float | None) -> Ended:
        """Until everything is done, or it is time to end."""
        if minutes is not None:
            self._deadline = monotonic() + 60 * minutes
        with caught_signals() as signals, stoppable(processes) as staff:
            self._hand_out(staff, processes, signals)
        asked = {job.id for job in self._jobs}
        done = len(asked & self._done)
        return Ended(
            done=done,
            failed=tuple(f"{job}: {why}" for job, why in self._failed.items()),
            left=len(asked) - done - len(self._failed),
            signal=signals[0] if signals else None,
        )

    def _hand_out(self, staff: Workers, processes: int, signals: list[int]) -> None:
        running: dict[Future[Done | None], Job] = {}
        while True:
            over = bool(signals) or self._late()
            if over:
                staff.stop()
            while not over and len(running) < processes and (job := self._next()):
                if (order := self._order(job)) is not None:
                    running[staff.submit(do, order)] = job
            if not running:
                return
            ended, _ = wait(running, timeout=PAUSE, return_when=FIRST_COMPLETED)
            for future in ended:
                if not self._write(running.pop(future), future) and not over:
                    signals.append(SIGTERM)  # a signal that the job signals itself

    def _late(self) -> bool:
        return self._deadline is not None and monotonic() >= self._deadline

    def _next(self) -> Job | None:
        """The most important job that waits for nothing."""
        for job in self._ahead:
            if self._done.issuperset(job.needs):
                self._ahead.remove(job)
                return job
        return None

    def _order(self, job: Job) -> Order | None:
        try:
            return self._orders.of(job)
        except BadInput as error:
            self._fail(job, error)
        return None

    def _write(self, job: Job, future: "Future[Done | None]") -> bool:
        """Note what came of a job; False if it was interrupted."""
        try:
            found = future.result()
        except BrokenProcessPool:
            raise
        except Exception as error:
            self._fail(job, error)
            return True
        if found is None:
            return False
        self._ledger.finish(
            job.id,
            found.seconds,
            results=found.results,
            recordings=found.recordings,
            trained=found.trained,
        )
        self._done.add(job.id)
        self._report(job, f"{job.id}, {found.seconds:.1f} s")
        return True

    def _fail(self, job: Job, error: Exception) -> None:
        why = f"{error}" if isinstance(error, EsperError) else f"{error!r}"
        self._failed[job.id] = " ".join(why.split())
        self._ledger.fail(job.id, 0.0, self._failed[job.id])
        self._report(job, f"{job.id} failed: {self._failed[job.id]}")

    def _report(self, job: Job, message: str) -> None:
        group = [other.id for other in self._jobs if other.task == job.task]
        done = len(self._done.intersection(group))
        self._progress.update(job.task or OTHERS, max(done, 1), len(group), message)


def _guesses(
    jobs: Sequence[Job], durations: Mapping[str, float], protocol: Protocol
) -> dict[str, float]:
    """Seconds that a job takes, by its kind: the mean of those done, if any are."""
    known: dict[str, list[float]] = defaultdict(list)
    for job in jobs:
        if job.id in durations:
            known[job.kind].append(durations[job.id])
    means = {kind: sum(values) / len(values) for kind, values in known.items()}
    return {**PROJECTION, **protocol.projection, **means}


def _projection(jobs: Sequence[Job], guess: Mapping[str, float], processes: int) -> str:
    seconds = {kind: 0.0 for kind in KINDS}
    for job in jobs:
        seconds[job.kind] += guess[job.kind]
    hours = sum(seconds.values()) / 3600 / processes
    parts = ", ".join(
        f"{kind} {value / 3600 / processes:.1f}"
        for kind, value in seconds.items()
        if value
    )
    return (
        f"{len(jobs)} jobs are to be done: about {hours:.1f} hours with {processes} "
        f"processes{f' ({parts})' if parts else ''}."
    )


def _require(option: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise refusal(
                f"{option}: there is no {quoted(name)}; did you mean "
                f"{nearest(name, list(known))!r}? There are {', '.join(known)}."
            )


def _print(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
