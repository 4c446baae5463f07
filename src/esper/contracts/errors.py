"""The errors a caller may want to catch.

    EsperError
    ├── BadInput (ValueError)             a value that cannot be meant
    │   ├── NoLegalAction                 a head with nothing to choose
    │   └── IllegalAction                 a choice its mask forbids
    └── CallOrder (RuntimeError)          the right call at the wrong moment

Every message is one line: what was expected, what came, what to do.
"""


class EsperError(Exception):
    """Base of every error that Esper raises on purpose."""


class BadInput(EsperError, ValueError):  # noqa: N818
    """An argument that cannot be meant; nothing was changed."""


class NoLegalAction(BadInput):
    """A mask row in which no choice is legal."""


class IllegalAction(BadInput):
    """An action outside its head or forbidden by its mask."""


class CallOrder(EsperError, RuntimeError):  # noqa: N818
    """A call that comes too early, too late or twice; nothing was changed."""
