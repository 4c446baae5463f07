"""Standard streams that may be closed, full or unable to encode a text, without harm.

The reader of a pipe may go away (`esper tasks | head`): a training must not end for it.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class SafeStream:
    """Forwards to a text stream until that fails; then discards what comes.

    Args:
        stream: Where to; None: it was closed before the process began.
    """

    def __init__(self, stream: TextIO | None) -> None:
        if stream is None:
            stream = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
        self._stream = stream
        self.failed: OSError | None = None

    def write(self, text: str) -> int:
        """Write, unless the stream has failed."""
        if self.failed is None:
            try:
                return self._stream.write(text)
            except (OSError, ValueError) as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush, unless the stream has failed."""
        if self.failed is None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._fail(error)

    def _fail(self, error: OSError | ValueError) -> None:
        closed = OSError(errno.EBADF, "closed")  # a closed file raises ValueError
        self.failed = error if isinstance(error, OSError) else closed
        try:  # what waits in the buffer cannot be written at exit either
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)


@contextmanager
def safe_streams() -> Iterator[SafeStream]:
    """Replace standard output and error by safe ones; yields the former."""
    before = sys.stdout, sys.stderr
    streams = [SafeStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield streams[0]
        for stream in streams:
            stream.flush()
    finally:
        sys.stdout, sys.stderr = before
