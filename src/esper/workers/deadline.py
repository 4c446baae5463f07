"""A time limit for calls of foreign code, such as environments.

    with Watch():
        timed(env.step, "step() of Mine-v0", 120.0, "--timeout")

Inside of a `Watch`, a signal interrupts a call that takes too long. The parent process
sees the call too, and can kill this process if the call cannot be interrupted
(`Watch.overdue`). Without a `Watch` calls are not timed, so a program that uses Esper
as a library gets no signal handler.
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
"""Default limit of a call in seconds."""
TICK: Final = 0.25
"""Seconds between two checks."""
GRACE: Final = 5.0
"""Additional seconds for a call that was interrupted."""
CALL: Final = Struct("<QdH")
"""Number of the current call (0: none), its limit, and the length of its text."""
DONE: Final = 512
"""Offset of the flag that a command returned."""
_watch: "Watch | None" = None


class TimedOut(BaseException):
    """Raised in a call that takes too long; `except Exception` does not catch it."""


class Watch:
    """Interrupts calls that take too long; its memory is shared with forks."""

    def __init__(self) -> None:
        self._shared = mmap(-1, DONE + 1)
        self._pid, self._calls = os.getpid(), 0
        self._limit, self._spent = 0.0, 0.0
        self._seen, self._waited = 0, 0.0
        self._before: Any = None
        self._timer = 0.0, 0.0

    def __enter__(self) -> "Watch":
        global _watch
        if current_thread() is main_thread():  # others cannot catch signals
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
        """Whether this process entered it and no call is active."""
        return self._pid == os.getpid() and not self._limit

    def begin(self, line: str, seconds: float) -> None:
        """Start the time of a call; `line` is printed if it cannot be interrupted."""
        text = one_line(line, 160).encode(errors="replace")[: DONE - CALL.size]
        self._calls += 1
        self._shared[CALL.size : CALL.size + len(text)] = text
        CALL.pack_into(self._shared, 0, self._calls, seconds, len(text))
        self._limit, self._spent = seconds, 0.0

    def end(self) -> None:
        """Stop the time of the call."""
        self._limit = 0.0
        CALL.pack_into(self._shared, 0, 0, 0.0, 0)

    def _tick(self, number: int, frame: object) -> None:
        """Count ticks instead of time, so that a suspended process is not late."""
        if self._limit and _watch is self:
            self._spent += TICK
            if self._spent > self._limit:
                raise TimedOut

    def overdue(self) -> str | None:
        """The line of a call that could not be interrupted; call once every `TICK`."""
        call, seconds, length = CALL.unpack_from(self._shared)
        same = call and call == self._seen
        self._seen, self._waited = call, self._waited + TICK if same else 0.0
        if self._waited <= seconds + GRACE:
            return None
        text = self._shared[CALL.size : CALL.size + length]
        return text.decode(errors="replace")

    @property
    def done(self) -> bool:
        """Whether a command returned; an environment may exit the process."""
        return self._shared[DONE] == 1

    @done.setter
    def done(self, value: bool) -> None:
        self._shared[DONE] = int(value)


def timed(call: Callable[[], T], what: str, seconds: float, option: str) -> T:
    """The result of a call; raises `WorkersError` if it takes too long.

    `what` and `option`, which sets the limit, are named in the error.
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
    """The error message for a call that takes too long."""
    return f"{what} did not return in {seconds:g} s. Fix it, or increase {option}."
