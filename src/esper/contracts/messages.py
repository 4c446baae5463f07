"""Error messages of one line that fits on a screen, whatever a value holds."""

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from esper.contracts.errors import InvalidInputError

LONGEST: Final = 200
"""Characters of an error message."""


def printable(text: str) -> str:
    """The text with a question mark for every character that cannot be printed."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def one_line(text: str, length: int = LONGEST) -> str:
    """Text without line breaks or control characters, cut to a length."""
    line = printable(text)
    return line if len(line) <= length else f"{line[: length - 1]}…"


def refusal(text: str) -> InvalidInputError:
    """An error of one line."""
    return InvalidInputError(one_line(text))


def quoted(value: object) -> str:
    """The representation of a value from outside, at most 48 characters."""
    try:
        text = repr(value)
    except Exception:  # thousands of digits or brackets, or code that is not ours
        text = f"a huge {type(value).__name__}"
    return one_line(text, 48)


def described(error: BaseException) -> str:
    """Type and message of an error that is not ours, in one line."""
    try:
        text = " ".join(str(error)[:1_000].split())
    except Exception:
        text = "no message"
    name = type(error).__name__
    return one_line(f"{name}: {text}" if text else name, 120)


def short(path: Path) -> str:
    """The last parts of a path, without control characters, 72 characters at most."""
    text = printable("/".join(path.parts[-3:]).replace("//", "/"))
    return text if len(text) <= 72 else f"…{text[-71:]}"


def unknown(what: str, name: str, known: Collection[str]) -> InvalidInputError:
    """An error about a name that is not one of some.

    Args:
        what: Start of the sentence, such as "there is no task".
        name: The unknown name.
        known: All that there are.
    """
    return refusal(
        f"{what} {quoted(name)}; did you mean {nearest(name, known)!r}? There are "
        f"{', '.join(known)}."
    )


def nearest(name: str, names: Collection[str]) -> str:
    """The known name most like an unknown one, also by the last part of a path."""
    exact = {known.lower(): known for known in names}
    word = name.lower().lstrip("-")
    same_end = [known for known in names if known.rpartition(".")[2] == word]
    found = same_end or get_close_matches(name[:99].lower(), exact, n=1, cutoff=0.0)
    return exact[found[0].lower()]
