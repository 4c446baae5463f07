"""Workers: results in order and to the bit, whoever does a job and whatever becomes of
whoever did."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import pytest
import torch

from esper.contracts.errors import InvalidInputError, WorkersError
from esper.workers.jobs import Processes, Workers, packed, unpacked, workers


@dataclass(frozen=True)
class Pair:
    left: torch.Tensor
    right: object


PAIRS = [Pair(torch.ones(1), number) for number in range(4)]


def halved(shared, job):
    """A function as workers do it."""
    return Pair(shared.left * job.left, [job.right, {"id": os.getpid()}])


def misbehave(folder, job):
    """Does something bad the first time that it gets a job whose name says so."""
    number, deed, times = job
    marks = [Path(folder, f"{number}-{time}") for time in range(times)]
    for mark in marks:
        if not mark.exists():
            mark.touch()
            return DEEDS[deed]()
    return number


DEEDS = {
    "die": lambda: os._exit(1),
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: 1 / 0,
    "nonsense": lambda: "nonsense",
}


def require_number(job, result):
    if result != job[0]:
        raise InvalidInputError("a result is the number of its job.")


def signal_of(shared, job):
    return signal.getsignal(signal.SIGINT)


def refuse(shared, job):
    raise InvalidInputError(f"job {job} is refused.")


def rest(shared, job):
    sleep(job)


def hoard(shared, job):
    return torch.zeros(job, dtype=torch.uint8).numel()


def gone(pid):
    """Whether a process has ended, within some seconds."""
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            return True
        sleep(0.1)
    return False


@pytest.fixture(scope="module")
def two():
    """Two processes."""
    with workers(2) as pool:
        yield pool


def test_a_value_comes_back_as_it_went():
    value = Pair(torch.arange(3.0), (None, {"x": [Pair(torch.tensor(True), "text")]}))
    again = unpacked(packed(value))
    assert torch.equal(again.left, value.left)
    inner = again.right[1]["x"][0]
    assert (bool(inner.left), inner.left.ndim, inner.right) == (True, 0, "text")


def test_results_come_in_order_and_are_the_same_by_whomever(two):
    jobs = [Pair(torch.full((3,), float(n)), n) for n in range(9)]
    shared = Pair(torch.tensor(0.5), None)
    here, elsewhere = ([*each.run(halved, jobs, shared)] for each in (Workers(), two))
    for one, other in zip(here, elsewhere, strict=True):
        assert torch.equal(one.left, other.left)
        assert one.right[0] == other.right[0]
    ids = {result.right[1]["id"] for result in elsewhere}
    assert os.getpid() not in ids
    assert len(ids) == 2


def test_a_worker_is_busy_while_a_result_is_used():
    jobs = [(n, "die", 0) for n in range(3)]
    with workers(1) as pool:  # of two, one may be faster than the other starts
        results = pool.run(misbehave, jobs, "", about=lambda job: f"job {job[0]}")
        assert next(results) == 0
        assert pool.active_jobs == ["job 1"]
        assert [*results] == [1, 2]
        assert pool.active_jobs == []


def test_a_lost_job_is_done_again_by_another(two, tmp_path):
    jobs = [(0, "die", 2), (1, "raise", 2), (2, "killed", 1), (3, "nonsense", 2)]
    jobs += [(n, "die", 0) for n in range(4, 9)]
    found = two.run(misbehave, jobs, str(tmp_path), check=require_number)
    assert [*found] == [*range(9)]
    assert len([*tmp_path.iterdir()]) == 2 + 2 + 1 + 2


def test_a_worker_that_is_stopped_is_replaced_after_the_deadline(tmp_path):
    with workers(1, deadline=2) as pool:
        jobs = [(n, "stopped", 1 if n == 1 else 0) for n in range(3)]
        assert [*pool.run(misbehave, jobs, str(tmp_path))] == [0, 1, 2]
    assert len([*tmp_path.iterdir()]) == 1


def test_a_worker_that_died_while_it_was_idle_is_replaced(two):
    ids = [result.right[1]["id"] for result in two.run(halved, PAIRS, PAIRS[0])]
    os.kill(ids[0], signal.SIGKILL)
    assert gone(ids[0])
    after = [result.right[1]["id"] for result in two.run(halved, PAIRS, PAIRS[0])]
    assert len(after) == len(PAIRS)
    assert ids[0] not in after


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits data")
def test_a_worker_has_no_more_memory_than_its_share():
    with Processes(2, memory=2 << 30) as pool:
        assert [*pool.run(hoard, [1, 2], None)] == [1, 2]
        with pytest.raises(WorkersError, match=r"^8589934592: tried 3 .*allocate"):
            [*pool.run(hoard, [1, 8 << 30], None)]


def test_a_job_that_is_lost_three_times_is_trouble_in_one_line(two, tmp_path):
    jobs = [(n, "die", 3 if n == 1 else 0) for n in range(3)]
    words = "^job 1: tried 3 times; the worker process died, .*fewer workers"
    with pytest.raises(WorkersError, match=words):
        [*two.run(misbehave, jobs, str(tmp_path), about=lambda job: f"job {job[0]}")]


def test_a_refusal_is_no_fault_of_the_worker(two):
    with pytest.raises(InvalidInputError, match="job 1 is refused"):
        [*two.run(refuse, [1, 2], None)]


@pytest.mark.usefixtures("default_signals")
def test_workers_ignore_ctrl_c(two):
    assert {*two.run(signal_of, range(4), None)} == {signal.SIG_IGN}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nobody_waits_for_workers_when_it_is_over():
    with workers(2) as pool:
        jobs = [Pair(torch.ones(1), n) for n in range(4)]
        found = pool.run(halved, jobs, jobs[0])
        ids = {result.right[1]["id"] for result in found}
        stopped = iter([False] * 3 + [True] * 99).__next__
        # Else this test would end with its time limit.
        assert [*pool.run(rest, [10_000, 10_000], None, stop=stopped)] == []
        assert all(map(gone, ids))
