"""Rows of one table that came together, column by column, until they are written.

Columns are kept as they came, tensors on their device or as arrays, and read when they
are written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.errors import BadInput

LONGEST: Final = 10_000
"""Characters of a text that are kept."""

Column = Tensor | NDArray[Any] | Sequence[Any] | str | float | int | None
"""One value for each row, or one for all."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some rows of a table."""

    table: str
    count: int
    columns: Mapping[str, Column]

    @classmethod
    def of(cls, table: str, count: int, columns: Mapping[str, Column]) -> "Batch":
        """Rows from columns; refuses those that have not a value for each row."""
        kept = {name: _kept(name, value, count) for name, value in columns.items()}
        return cls(table, count, kept)

    def rows(
        self, names: Iterable[str], attempt: int, seq: int
    ) -> Iterable[tuple[Any, ...]]:
        """Rows in the order of the table's columns; what was not given is missing.

        Args:
            names: The columns of the table.
            attempt: Who writes.
            seq: Number of the first row.
        """
        count = self.count
        given = {name: _values(own, count) for name, own in self.columns.items()}
        marks = _nans(given, count)
        given["attempt"] = [attempt] * count
        given["seq"] = range(seq, seq + count)
        given["nans"] = marks
        missing = [None] * count
        return zip(*(given.get(name, missing) for name in names), strict=True)


def whole(name: str, value: object) -> int:
    """A number that can be counted to; refuses others."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise BadInput(f"{name} must be a whole number from 0, got {value!r}.")
    return value


def _kept(name: str, value: Column, count: int) -> Column:
    """A column as it is queued; refuses one that has not a value for each row."""
    if isinstance(value, Tensor):
        if tuple(value.shape) != (count,):
            raise BadInput(
                f"{name} must have shape ({count},), got {tuple(value.shape)}."
            )
        # Worlds go on writing into theirs.
        value = value.detach()
        return value.numpy().copy() if value.device.type == "cpu" else value.clone()
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, Sequence):
        if len(value) != count:
            raise BadInput(f"{name} must have {count} values, got {len(value)}.")
        if isinstance(value, range):
            return value
        return [_clean(each) if isinstance(each, str) else each for each in value]
    return value


def _clean(text: str) -> str:
    # SQLite takes no lone surrogates, and nobody reads a novel in a column.
    if len(text) <= LONGEST and text.isascii():
        return text
    return text[:LONGEST].encode("utf-8", "replace").decode("utf-8")


def _values(column: Column, count: int) -> Sequence[Any]:
    """One value for each row."""
    if isinstance(column, Tensor | np.ndarray):
        values: list[Any] = column.tolist()
        return values
    if isinstance(column, Sequence) and not isinstance(column, str):
        return column
    return [column] * count


def _nans(columns: Mapping[str, Sequence[Any]], count: int) -> list[str | None]:
    """Names of the columns that are NaN, for each row; None if there are none."""
    marks: list[str | None] = [None] * count
    for name, values in columns.items():
        if not any(map(ne, values, values)):  # only NaN differs from itself
            continue
        for row, value in enumerate(values):
            if value != value:
                mark = marks[row]
                marks[row] = name if mark is None else f"{mark} {name}"
    return marks
