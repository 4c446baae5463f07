"""Output of commands: streams that never raise, and one line for every error.

Exit codes:

2 invalid input   3 run in use   4 non-finite numbers   5 storage error
6 worker error   70 bug in Esper   130 interrupted   143 terminated

A training run continues when the reader of its pipe exits (`esper train | head`).
"""

import errno
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TextIO

from esper.contracts.errors import (
    EsperError,
    EsperWarning,
    NumericsError,
    RunLockedError,
    StorageError,
    WorkersError,
)
from esper.contracts.messages import one_line, printable, quoted
from esper.workers.deadline import TICK, Watch

CRASHES: Final = (
    *(signal.SIGABRT, signal.SIGSEGV, signal.SIGKILL),
    *(signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
)
"""Signals of a process that crashed or was killed."""
STORAGE: Final = 5
WORKERS: Final = 6
CODES: Final = {
    RunLockedError: 3,
    NumericsError: 4,
    StorageError: STORAGE,
    WorkersError: WORKERS,
    EsperError: 2,
}


def report_failure(error: BaseException) -> int:
    """Print an error in one line; returns the exit code.

    The traceback of a bug is written to a file.
    """
    for kind, code in CODES.items():
        if isinstance(error, kind):
            return _print(str(error), code)
    if isinstance(error, OSError) and error.strerror:
        path = quoted(error.filename) if error.filename else "a file"
        return _print(f"cannot use {path}: {error.strerror}.", STORAGE)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="esper-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exception(error, file=file)
        where = f"details in {file.name}"
    except OSError:
        where = str(error)
    return _print(f"a bug in Esper: {type(error).__name__}; {where}", 70)


def finish_output(stdout: "SafeStream", code: int) -> int:
    """Flush the output; returns the exit code. A closed pipe is no error."""
    stdout.flush()
    failed = stdout.failed
    if code or failed is None or failed.errno in (errno.EPIPE, errno.EBADF):
        return code
    return _print(f"cannot write output: {failed}", STORAGE)


def _print(text: str, code: int) -> int:
    print(f"esper: {one_line(text, 190)}", file=sys.stderr)
    return code


def print_line(text: str) -> None:
    """Print one line, with a question mark for every unprintable character."""
    print(printable(text))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int
) -> None:
    """Print a table of plain text; the first `left` columns are left-aligned."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table()
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(table)


@contextmanager
def printed_warnings() -> Iterator[None]:
    """Print each warning of Esper once, in one line; others as Python does."""
    with warnings.catch_warnings():
        python_shows, shown = warnings.showwarning, set[str]()

        def show(
            message: Warning | str,
            category: type[Warning],
            *where: Any,  # noqa: ANN401
            **more: Any,  # noqa: ANN401
        ) -> None:
            if issubclass(category, EsperWarning):
                if str(message) not in shown:
                    shown.add(str(message))
                    _print(f"warning: {message}", 0)
            else:
                python_shows(message, category, *where, **more)

        warnings.showwarning = show
        warnings.simplefilter("always", EsperWarning)
        yield


@contextmanager
def sudden_interrupts() -> Iterator[None]:
    """Let Ctrl-C end this process at once, with one line of output.

    KeyboardInterrupt could be raised inside a callback and leave a traceback. Files
    are written atomically, so no cleanup is needed. Training handles the first Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(number: int, frame: object) -> None:
        shown = b"\x1b[?25h" if os.isatty(2) else b""  # a progress bar hides the cursor
        os.write(2, shown + b"esper: interrupted\n")
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def outlived(command: Callable[[], int], watch: Watch | None = None) -> int:
    """Run a command in a child process and report it if that process crashes.

    Ray ends the process if its node is gone, and an environment may crash it. Signals
    are forwarded, except those of the terminal, which the child also receives. If
    `watch` finds an environment call that hangs, the child is killed.
    """
    if sys.platform != "linux":
        return command()
    from esper.workers.jobs import end_with_parent

    kinds = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    child = os.fork()
    if not child:
        end_with_parent()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = command()
        sys.stderr.flush()
        if watch is not None:
            watch.done = True
        os._exit(code)
    ended, status, hung = 0, 0, None
    while not ended:
        came = signal.sigtimedwait(kinds, TICK)
        if came is None or came.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if came is None and watch is not None and not hung and not ended:
                hung = watch.overdue()
                if hung:
                    os.kill(child, signal.SIGKILL)
        elif came.si_code <= 0:  # sent by a process
            os.kill(child, came.si_signo)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    code = os.waitstatus_to_exitcode(status)
    if hung:
        return _print(hung, WORKERS)
    crashed = -code in CRASHES
    # After Ctrl-C the code is 130.
    lost = watch is not None and not watch.done and code >= 0 and code != 130
    if lost or (watch is not None and crashed):
        text = "the environment or the system ended this process, perhaps out of memory"
        return _print(f"{text}. All checkpoints are intact. Resume the run.", WORKERS)
    if crashed or (watch is None and code == 1):
        text = "Ray or the system ended this process, perhaps out of memory. Check "
        return _print(f"{text}that the Ray node runs here, then resume.", WORKERS)
    return code if code >= 0 else 128 - code


class SafeStream:
    """Forwards to a text stream until that fails, then discards all output.

    The stream is None if it was closed before the process started.
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
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush, unless the stream has failed."""
        self._try(self._stream.flush)

    def _try(self, call: Callable[[], object]) -> None:
        if self.failed is None:
            try:
                call()
            except (OSError, ValueError) as error:
                self._fail(error)

    def _fail(self, error: OSError | ValueError) -> None:
        closed = OSError(errno.EBADF, "closed")  # a closed file raises ValueError
        self.failed = error if isinstance(error, OSError) else closed
        try:  # else Python fails to flush the buffer at exit
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)
        except (OSError, ValueError):
            pass

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stream, name)


@contextmanager
def safe_streams() -> Iterator[SafeStream]:
    """Replace standard output and error by safe streams; yields the first."""
    before = sys.stdout, sys.stderr
    streams = [SafeStream(stream) for stream in before]
    sys.stdout, sys.stderr = streams
    try:
        yield streams[0]
        for stream in streams:
            stream.flush()
    finally:
        sys.stdout, sys.stderr = before
