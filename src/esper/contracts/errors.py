"""The errors a caller may want to catch.

    EsperError
    ├── BadInput (ValueError)             a value that cannot be meant
    │   ├── NoLegalAction                 a head with nothing to choose
    │   ├── NotFinite                     a number that is NaN or infinite
    │   └── IllegalAction                 a choice its mask forbids
    ├── CallOrder (RuntimeError)          the right call at the wrong moment
    ├── NumericsTrouble (ArithmeticError) training cannot go on in numbers
    ├── RunTaken (RuntimeError)           a run's name or folder is in use
    ├── WorkersTrouble (RuntimeError)     workers died or hung
    └── StorageTrouble (OSError)          the disk refused; what was saved is intact

Every message is one line: what was expected, what came, what to do. `EsperWarning` is
the category of warnings.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class EsperError(Exception):
    """Base of every error that Esper raises on purpose."""


class EsperWarning(UserWarning):
    """Something was done, but not as one would expect."""


class BadInput(EsperError, ValueError):  # noqa: N818
    """An argument that cannot be meant; nothing was changed."""


class NoLegalAction(BadInput):
    """A mask row in which no choice is legal."""


class NotFinite(BadInput):
    """A number that is NaN or infinite where none may be."""


class IllegalAction(BadInput):
    """An action outside its head or forbidden by its mask."""


class CallOrder(EsperError, RuntimeError):  # noqa: N818
    """A call that comes too early, too late or twice; nothing was changed."""


class NumericsTrouble(EsperError, ArithmeticError):  # noqa: N818
    """Updates were refused again and again; what was saved before is still there."""


class RunTaken(EsperError, RuntimeError):  # noqa: N818
    """A run of this name exists, or another process is at work in it."""


class WorkersTrouble(EsperError, RuntimeError):  # noqa: N818
    """Workers failed again and again; what was stored is there."""


class StorageTrouble(EsperError, OSError):  # noqa: N818
    """The disk refused or lied; what was saved before is still there."""


def unknown(what: str, name: str, known: Iterable[str]) -> BadInput:
    """A refusal of a name, with the nearest one that is known."""
    near = get_close_matches(name, [*known], n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}?" if near else "there is none."
    return BadInput(f"{what} {name!r}; {hint}")
