"""Work that is handed in comes back, also as an error."""

import pytest

from esper.contracts.errors import BadInput
from evidence.workers import stoppable, stopping


def half(number):
    if number % 2:
        raise BadInput(f"{number} is odd")
    return number // 2


def test_this_process_can_work_too():
    with stoppable(1) as staff:
        done, failed = staff.submit(half, 4), staff.submit(half, 3)
        staff.stop()
    assert done.result(timeout=0) == 2
    with pytest.raises(BadInput, match="3 is odd"):
        failed.result(timeout=0)
    assert not stopping()


def test_an_interruption_is_no_result():
    def interrupted():
        raise KeyboardInterrupt

    with stoppable(1) as staff, pytest.raises(KeyboardInterrupt):
        staff.submit(interrupted)
