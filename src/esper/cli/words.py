"""How words become values, and what is said of those that cannot."""

import argparse
import re
from difflib import get_close_matches
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Says what was probably meant."""

    def error(self, message: str) -> NoReturn:
        """One line with the nearest right word, exit code 2."""
        named = re.search(r"(?:choice: '|arguments: )(-*[\w-]+)", message)
        near = get_close_matches(named[1], self._words(), 1, 0.5) if named else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = " ".join(message.split())
        if len(message) > 120:
            message = f"{message[:119]}…"
        self.exit(2, f"esper: {message}{hint} (see {self.prog} --help)\n")

    def _words(self) -> list[str]:
        """Everything that could have been meant here and in commands below."""
        words: list[str] = []
        for action in self._actions:
            words += action.option_strings
            if isinstance(action, argparse._SubParsersAction):
                for below in action.choices.values():
                    words += below._words()
            words += map(str, action.choices or ())
        return words


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r:.60}")
    return number


def add_runs(parser: argparse.ArgumentParser) -> None:
    """The option that says where runs are."""
    parser.add_argument(
        "--runs",
        default="runs",
        metavar="FOLDER",
        help="where runs are (default: runs)",
    )


class Whole:
    """Parses a whole number in a range, in plain ASCII digits."""

    def __init__(self, low: int, high: int) -> None:
        self._low, self._high = low, high

    def __call__(self, text: str) -> int:
        """The number."""
        digits = text.removeprefix("-")
        if digits.isascii() and digits.isdigit() and len(digits) < 20:
            number = int(text)
            if self._low <= number <= self._high:
                return number
        raise argparse.ArgumentTypeError(
            f"expected a whole number from {self._low} to {self._high}, "
            f"got {text!r:.60}"
        )


RNG_SEED = Whole(0, 2**32 - 1)
"""What a random stream can start from."""
