"""One line and an exit code for every error.

2 bad input   3 a run is in use   4 numbers gave up   5 storage gave up
6 workers gave up   70 a bug of ours   130 interrupted   143 terminated
"""

import errno
import sys
import tempfile
import traceback
from typing import Final

from esper.contracts.errors import (
    EsperError,
    NumericsTrouble,
    RunTaken,
    StorageTrouble,
    WorkersTrouble,
)
from esper.experiment.messages import one_line, quoted

STORAGE: Final = 5
CODES: Final = {
    RunTaken: 3,
    NumericsTrouble: 4,
    StorageTrouble: STORAGE,
    WorkersTrouble: 6,
    EsperError: 2,
}


def report_failure(error: Exception) -> int:
    """Print one line and return the exit code; a bug's traceback goes to a file."""
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


def explain_output(failed: OSError | None, code: int) -> int:
    """The exit code of a command whose output failed; a closed pipe is no failure."""
    if code or failed is None or failed.errno in (errno.EPIPE, errno.EBADF):
        return code
    return _print(f"cannot write output: {failed}", STORAGE)


def _print(text: str, code: int) -> int:
    print(f"esper: {one_line(text, 190)}", file=sys.stderr)
    return code
