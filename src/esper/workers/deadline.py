"""A deadline for calls of code that is not ours, such as environments.

    with Watch():
        timed(env.step, "step() of Mine-v0", 120.0, "--timeout")

While a `Watch` is entered, a signal interrupts a call that takes too long. A process
that waits for this one also sees the call, and can end this process if the call cannot
be interrupted (`Watch.overdue`). Without a `Watch` calls are not timed: a program that
uses Esper as a library gets no signal handler.
"""

import os
import signal
from collections.abc import Callable
from mmap import mmap
from struct import Struct
from threading import current_thread, main_thread
from typing import Any, Final, TypeVar

from esper.contracts.errors import WorkersError
from esper.contracts.messages import one_line

T = TypeVar("T")
TIMEOUT: Final = 120.0
"""Seconds that a call may take by default."""
TICK: Final = 0.25
"""Seconds between two looks at the call."""
GRACE: Final = 5.0
"""Seconds more for a call that was interrupted."""
CALL: Final = Struct("<QdH")
"""Number of the call under way (0: none), its seconds, and length of the text."""
DONE: Final = 512
"""Where it is noted that a command returned."""
_watch: "Watch | None" = None


class TimedOut(BaseException):
    """Raised in a call that takes too long; `except Exception` does not catch it."""


class Watch:
    """Interrupts calls that take too long; memory is shared with forks."""

    def __init__(self) -> None:
        self._shared = mmap(-1, DONE + 1)
        self._pid, self._calls = os.getpid(), 0
        self._limit, self._spent = 0.0, 0.0
        self._seen, self._waited = 0, 0.0
        self._before: Any = None
        self._timer = 0.0, 0.0

    def __enter__(self) -> "Watch":
        global _watch
        if current_thread() is main_thread():  # only there can signals be caught
            self._pid, _watch = os.getpid(), self
            self._before = signal.signal(signal.SIGALRM, self._tick)
            self._timer = signal.setitimer(signal.ITIMER_REAL, TICK, TICK)
        return self

    def __exit__(self, *error: object) -> None:
        global _watch
        if _watch is self:
            _watch = None
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, self._before)
            signal.setitimer(signal.ITIMER_REAL, *self._timer)

    @property
    def is_mine(self) -> bool:
        """Whether this process entered it, and no call is under way."""
        return self._pid == os.getpid() and not self._limit

    def begin(self, line: str, seconds: float) -> None:
        """Time a call from now on; `line` is printed if it cannot be interrupted."""
        text = one_line(line, 160).encode(errors="replace")[: DONE - CALL.size]
        self._calls += 1
        self._shared[CALL.size : CALL.size + len(text)] = text
        CALL.pack_into(self._shared, 0, self._calls, seconds, len(text))
        self._limit, self._spent = seconds, 0.0

    def end(self) -> None:
        """The call returned."""
        self._limit = 0.0
        CALL.pack_into(self._shared, 0, 0, 0.0, 0)

    def _tick(self, number: int, frame: object) -> None:
        """Count ticks, not time: a process that was stopped did not hang."""
        if self._limit and _watch is self:
            self._spent += TICK
            if self._spent > self._limit:
                raise TimedOut

    def overdue(self) -> str | None:
        """A line about a call that could not be interrupted; ask once every `TICK`."""
        call, seconds, length = CALL.unpack_from(self._shared)
        same = call and call == self._seen
        self._seen, self._waited = call, self._waited + TICK if same else 0.0
        if self._waited <= seconds + GRACE:
            return None
        text = self._shared[CALL.size : CALL.size + length]
        return text.decode(errors="replace")

    @property
    def done(self) -> bool:
        """Whether a command returned; an environment may have ended its process."""
        return self._shared[DONE] == 1

    @done.setter
    def done(self, value: bool) -> None:
        self._shared[DONE] = int(value)


def timed(call: Callable[[], T], what: str, seconds: float, option: str) -> T:
    """The result of a call, or `WorkersError` if it takes too long.

    Args:
        call: What may hang.
        what: Its name, for the error.
        seconds: How long it may take.
        option: What allows it more time, for the error.
    """
    watch = _watch
    if watch is None or not watch.is_mine:
        return call()
    line = late(what, seconds, option)
    watch.begin(line, seconds)
    try:
        return call()
    except TimedOut:
        raise WorkersError(line) from None
    finally:
        watch.end()


def late(what: str, seconds: float, option: str) -> str:
    """The error about a call that takes too long."""
    return f"{what} did not return in {seconds:g} s. Fix it, or increase {option}."
