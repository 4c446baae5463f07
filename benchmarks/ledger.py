"""Results of many independent jobs in a file, so that a long study can be interrupted.

One line of JSON per job: what it was and what came of it. A job that is in the file is
not done again; a line that was cut off is as if it were not there.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Job = TypeVar("Job", bound=DataclassInstance)
    Result = TypeVar("Result", bound=DataclassInstance)
else:
    Job, Result = TypeVar("Job"), TypeVar("Result")


class Ledger(Generic[Job, Result]):
    """Does jobs that were not done before.

    Args:
        file: Where results are kept; it is made if it is not there.
        work: Does one job. With several workers it must be a function of a module.
        kind: The class of its results.
        workers: Processes; with 1, jobs are done in this one.
        tell: Called once with every job, its result, and whether it was done now.
    """

    def __init__(
        self,
        file: Path,
        work: Callable[[Job], Result],
        kind: type[Result],
        *,
        workers: int = 1,
        tell: Callable[[Job, Result, bool], None] = lambda job, result, fresh: None,
    ) -> None:
        self._file, self._work, self._kind = file, work, kind
        self._workers, self._tell = workers, tell
        self._known = dict(self._read())
        self._told: set[str] = set()

    def __call__(self, jobs: Sequence[Job]) -> list[Result]:
        """The results of jobs, in their order."""
        missing: dict[str, Job] = {}
        for job in jobs:
            key = _key(asdict(job))
            if key not in self._known:
                missing.setdefault(key, job)
            elif key not in self._told:
                self._told.add(key)
                self._tell(job, self._known[key], False)
        for key, result in self._do(missing):
            self._known[key] = result
            self._write(missing[key], result)
            self._told.add(key)
            self._tell(missing[key], result, True)
        return [self._known[_key(asdict(job))] for job in jobs]

    def _do(self, jobs: dict[str, Job]) -> Iterator[tuple[str, Result]]:
        if self._workers == 1 or len(jobs) < 2:
            for key, job in jobs.items():
                yield key, self._work(job)
            return
        with ProcessPoolExecutor(
            min(self._workers, len(jobs)), mp_context=get_context("spawn")
        ) as pool:
            futures = {pool.submit(self._work, job): key for key, job in jobs.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()

    def _read(self) -> Iterator[tuple[str, Result]]:
        if not self._file.is_file():
            return
        for line in self._file.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield _key(entry["job"]), self._kind(**entry["result"])

    def _write(self, job: Job, result: Result) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"job": asdict(job), "result": asdict(result)})
        cut_off = self._file.is_file() and not self._file.read_bytes().endswith(b"\n")
        with self._file.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_off else "") + line + "\n")


def _key(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)
