"""What is said when something went wrong, and with which exit code.

2 bad input   3 a run is in use   4 numbers gave up   5 storage gave up
6 workers gave up   70 a bug of ours   130 interrupted   143 terminated
"""

import sys
import tempfile
import traceback


def explain(error: Exception) -> int:
    """One line for people; the traceback of our own bugs goes to a file."""
    from esper.contracts.errors import (
        EsperError,
        NumericsTrouble,
        RunTaken,
        StorageTrouble,
        WorkersTrouble,
    )

    if isinstance(error, EsperError):
        print(f"esper: {one_line(str(error))}", file=sys.stderr)
        codes = {RunTaken: 3, NumericsTrouble: 4, StorageTrouble: 5, WorkersTrouble: 6}
        return next(
            (code for kind, code in codes.items() if isinstance(error, kind)), 2
        )
    if isinstance(error, OSError) and error.strerror:
        named = f"{error.filename!r:.99}" if error.filename else "a file"
        print(
            f"esper: cannot use {named}: {one_line(error.strerror, 60)}.",
            file=sys.stderr,
        )
        return 5
    name = type(error).__name__
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="esper-", suffix=".txt", delete=False, encoding="utf-8"
        ) as file:
            traceback.print_exception(error, file=file)
        where = f"details in {file.name}"
    except OSError:
        where = one_line(str(error), 100)
    print(f"esper: a bug in Esper: {name}; {where}", file=sys.stderr)
    return 70


def one_line(text: str, length: int = 190) -> str:
    """Text without line breaks or control characters, cut to a length."""
    plain = "".join(c if c.isprintable() else " " for c in text)
    return plain if len(plain) <= length else f"{plain[: length - 1]}…"
