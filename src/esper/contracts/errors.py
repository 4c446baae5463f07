"""The errors that Esper raises.

    EsperError
    ├── InvalidInputError (ValueError)     an invalid argument
    │   ├── NoLegalActionError             a head without a legal choice
    │   ├── NotFiniteError                 a value that is NaN or infinite
    │   └── IllegalActionError             a choice that its mask forbids
    ├── InvalidStateError (RuntimeError)   a valid call at the wrong time
    ├── NumericsError (ArithmeticError)    training diverged
    ├── RunLockedError (RuntimeError)      a run's name or folder is in use
    ├── WorkersError (RuntimeError)        workers died or hung
    └── StorageError (OSError)             a write failed; saved files are intact

Every message is one line. It states what was wrong and what to do.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class EsperError(Exception):
    """Base class of the errors that Esper raises."""


class EsperWarning(UserWarning):
    """Category of the warnings that Esper issues."""


class InvalidInputError(EsperError, ValueError):
    """An argument is invalid; nothing was changed."""


class NoLegalActionError(InvalidInputError):
    """A mask row allows no choice."""


class NotFiniteError(InvalidInputError):
    """A value is NaN or infinite."""


class IllegalActionError(InvalidInputError):
    """An action is outside its head or forbidden by its mask."""


class InvalidStateError(EsperError, RuntimeError):
    """A call came too early, too late or twice; nothing was changed."""


class NumericsError(EsperError, ArithmeticError):
    """Updates were refused repeatedly; saved files are intact."""


class RunLockedError(EsperError, RuntimeError):
    """A run of this name exists, or another process uses it."""


class WorkersError(EsperError, RuntimeError):
    """Workers failed repeatedly; stored results are intact."""


class StorageError(EsperError, OSError):
    """A read or write failed; files that were saved before are intact."""


def unknown(what: str, name: str, known: Iterable[str]) -> InvalidInputError:
    """An error about an unknown name; it suggests the nearest known one."""
    near = get_close_matches(name, [*known], n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}?" if near else "there is none."
    return InvalidInputError(f"{what} {name!r}; {hint}")
