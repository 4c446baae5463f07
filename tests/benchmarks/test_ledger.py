"""A ledger does each job once, keeps what came of it, and survives interruptions."""

import json
from dataclasses import dataclass

import pytest

from benchmarks.ledger import Ledger


@dataclass(frozen=True)
class Sum:
    left: int
    right: int = 0


@dataclass(frozen=True)
class Answer:
    value: int


def add(job: Sum) -> Answer:
    return Answer(job.left + job.right)


def fail(job: Sum) -> Answer:
    raise AssertionError(f"{job} was done already")


def test_results_come_in_the_order_of_the_jobs(tmp_path):
    ledger = Ledger(tmp_path / "new" / "file", add, Answer)
    assert ledger([Sum(3), Sum(1, 1), Sum(2)]) == [Answer(3), Answer(2), Answer(2)]


def test_a_job_is_done_once(tmp_path):
    done = []

    def note(job: Sum) -> Answer:
        done.append(job)
        return add(job)

    ledger = Ledger(tmp_path / "file", note, Answer)
    assert ledger([Sum(1), Sum(1)]) == [Answer(1), Answer(1)]
    ledger([Sum(1), Sum(2)])
    assert done == [Sum(1), Sum(2)]


def test_what_is_in_the_file_is_not_done_again(tmp_path):
    Ledger(tmp_path / "file", add, Answer)([Sum(1), Sum(2)])
    assert Ledger(tmp_path / "file", fail, Answer)([Sum(2)]) == [Answer(2)]


def test_results_before_an_interruption_are_kept(tmp_path):
    def interrupted(job: Sum) -> Answer:
        if job.left == 2:
            raise KeyboardInterrupt
        return add(job)

    with pytest.raises(KeyboardInterrupt):
        Ledger(tmp_path / "file", interrupted, Answer)([Sum(1), Sum(2)])
    assert Ledger(tmp_path / "file", fail, Answer)([Sum(1)]) == [Answer(1)]


def test_a_line_that_was_cut_off_is_done_again_and_spoils_no_other(tmp_path):
    file = tmp_path / "file"
    Ledger(file, add, Answer)([Sum(1), Sum(2)])
    file.write_text(file.read_text()[:-9])
    assert Ledger(file, add, Answer)([Sum(1), Sum(2)]) == [Answer(1), Answer(2)]
    assert Ledger(file, fail, Answer)([Sum(1), Sum(2)]) == [Answer(1), Answer(2)]


def test_another_setting_is_another_job(tmp_path):
    Ledger(tmp_path / "file", add, Answer)([Sum(1)])
    assert Ledger(tmp_path / "file", add, Answer)([Sum(1, 5)]) == [Answer(6)]


def test_every_job_is_told_of_once(tmp_path):
    told = []
    Ledger(tmp_path / "file", add, Answer)([Sum(1)])
    ledger = Ledger(
        tmp_path / "file", add, Answer, tell=lambda *news: told.append(news)
    )
    ledger([Sum(1), Sum(2)])
    ledger([Sum(1), Sum(2)])
    assert told == [(Sum(1), Answer(1), False), (Sum(2), Answer(2), True)]


def test_two_processes_find_what_one_finds(tmp_path):
    jobs = [Sum(number, 10) for number in range(5)]
    two = Ledger(tmp_path / "two", add, Answer, workers=2)(jobs)
    assert two == Ledger(tmp_path / "one", add, Answer)(jobs)
    lines = [json.loads(line) for line in (tmp_path / "two").read_text().splitlines()]
    assert sorted(line["result"]["value"] for line in lines) == [10, 11, 12, 13, 14]
