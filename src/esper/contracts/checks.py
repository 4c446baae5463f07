"""Checks of single numbers and names that a user passes."""

from collections.abc import Collection
from math import inf
from numbers import Integral, Real

from esper.contracts.errors import InvalidInputError


def require_int(name: str, value: object, least: int = 1) -> None:
    """Raise an error unless a value is a whole number of at least `least`."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or value < least:  # type: ignore[operator]
        raise InvalidInputError(
            f"{name} must be a whole number of at least {least}, got {value!r:.99}."
        )


def require_number(
    name: str, value: object, low: float = 0.0, high: float = inf
) -> None:
    """Raise an error unless a value is a number from `low` to `high`."""
    real = isinstance(value, Real) and not isinstance(value, bool)
    if not real or not low <= value <= high:  # type: ignore[operator]
        limits = f"lie in [{low:g}, {high:g}]" if high < inf else f"be at least {low:g}"
        raise InvalidInputError(f"{name} must {limits}, got {value!r:.99}.")


def require_one_of(name: str, value: object, known: Collection[object]) -> None:
    """Raise an error unless a value is one of those that are known."""
    if value not in known:
        raise InvalidInputError(
            f"{name} must be one of {', '.join(map(str, known))}, got {value!r:.99}."
        )
