"""The errors a caller may want to catch.

    EsperError
    ├── InvalidInputError (ValueError)     a value that cannot be meant
    │   ├── NoLegalActionError             a head with nothing to choose
    │   ├── NotFiniteError                 a number that is NaN or infinite
    │   └── IllegalActionError             a choice its mask forbids
    ├── InvalidStateError (RuntimeError)   the right call at the wrong moment
    ├── NumericsError (ArithmeticError)    training cannot go on in numbers
    ├── RunLockedError (RuntimeError)      a run's name or folder is in use
    ├── WorkersError (RuntimeError)        workers died or hung
    └── StorageError (OSError)             the disk refused; what was saved is intact

Every message is one line: what was expected, what came, what to do. `EsperWarning` is
the category of warnings.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class EsperError(Exception):
    """Base of every error that Esper raises on purpose."""


class EsperWarning(UserWarning):
    """Something was done, but not as one would expect."""


class InvalidInputError(EsperError, ValueError):
    """An argument that cannot be meant; nothing was changed."""


class NoLegalActionError(InvalidInputError):
    """A mask row in which no choice is legal."""


class NotFiniteError(InvalidInputError):
    """A number that is NaN or infinite where none may be."""


class IllegalActionError(InvalidInputError):
    """An action outside its head or forbidden by its mask."""


class InvalidStateError(EsperError, RuntimeError):
    """A call that comes too early, too late or twice; nothing was changed."""


class NumericsError(EsperError, ArithmeticError):
    """Updates were refused again and again; what was saved before is still there."""


class RunLockedError(EsperError, RuntimeError):
    """A run of this name exists, or another process is at work in it."""


class WorkersError(EsperError, RuntimeError):
    """Workers failed again and again; what was stored is there."""


class StorageError(EsperError, OSError):
    """The disk refused or lied; what was saved before is still there."""


def unknown(what: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """A refusal of a name, with the nearest one that is known."""
    near = get_close_matches(name, [*known], n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}?" if near else "there is none."
    return InvalidInputError(f"{what} {name!r}; {hint}")
