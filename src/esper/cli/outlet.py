"""Standard streams that may be closed, full or unable to spell, without harm.

Whoever reads us may go away (`esper tasks | head`), and training must not end for it.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol, runtime_checkable

STORAGE: Final = 5
"""The exit code of output that did not arrive."""


@runtime_checkable
class Stream(Protocol):
    """What is asked of a standard stream."""

    def write(self, text: str, /) -> int:
        """Take a text."""
        ...

    def flush(self) -> None:
        """Hand over what waits."""
        ...

    def fileno(self) -> int:
        """The number that the system knows it by."""
        ...


class Outlet:
    """Forwards to a text stream until that fails; then it swallows what comes.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.failed: OSError | None = None

    def write(self, text: str) -> int:
        """Write, unless nobody can be reached any more."""
        if self.failed is None:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Hand over what waits."""
        if self.failed is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def exit_code(self, code: int) -> int:
        """What a command's code becomes if its output did not arrive."""
        gone = self.failed is None or self.failed.errno in (errno.EPIPE, errno.EBADF)
        if code or gone:
            return code
        print(f"esper: cannot write output: {self.failed}", file=sys.stderr)
        return STORAGE

    def _fail(self, error: OSError | ValueError) -> None:
        closed = OSError(errno.EBADF, "closed")
        self.failed = error if isinstance(error, OSError) else closed
        try:  # what waits in the buffer cannot be written at exit either
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)


@contextmanager
def lasting() -> Iterator[Outlet]:
    """Put outlets in the place of standard output and error; yields the former."""
    before = sys.stdout, sys.stderr
    outlets = [Outlet(_spelling(stream)) for stream in before]
    sys.stdout, sys.stderr = outlets
    try:
        yield outlets[0]
        for outlet in outlets:
            outlet.flush()
    finally:
        sys.stdout, sys.stderr = before


def _spelling(stream: Stream | None) -> Stream:
    """A stream that writes what it can of any text; None: it was closed before us."""
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    return stream
