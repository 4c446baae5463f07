"""Worker processes ignore Ctrl-C, and their death is told of in one line."""

import os
import signal
from time import sleep

import pytest

from esper.contracts.errors import WorkersTrouble
from esper.experiment.workers import workers


@pytest.mark.usefixtures("default_signals")
def test_every_process_ignores_ctrl_c_and_none_is_waited_for():
    with workers(2) as pool:
        jobs = [pool.submit(signal.getsignal, signal.SIGINT) for _ in range(4)]
        assert {job.result() for job in jobs} == {signal.SIG_IGN}
        pool.submit(sleep, 10_000)  # else this test would end with its time limit
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_process_that_ends_by_itself_is_trouble():
    with pytest.raises(WorkersTrouble, match="try fewer processes"), workers(1) as pool:
        pool.submit(os._exit, 1).result()
