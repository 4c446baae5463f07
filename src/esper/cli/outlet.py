"""A standard output that may be closed, full or unable to spell, without harm.

Whoever reads us may go away (`esper tasks | head`), and training must not end for it.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class Outlet:
    """Forwards to a text stream until that fails; then it swallows what comes.

    Args:
        stream: Where to.
    """

    def __init__(self, stream: TextIO) -> None:
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
        return 5

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
    """Put such an outlet in the place of standard output."""
    before = sys.stdout
    if before is None:  # closed before we began
        before = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (before, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    outlet = Outlet(before)
    sys.stdout = outlet
    try:
        yield outlet
        outlet.flush()
    finally:
        sys.stdout = before
