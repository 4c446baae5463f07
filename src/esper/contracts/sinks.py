"""Where records go: the core returns records and never writes; sinks write them."""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Sink(Protocol):
    """Receives the records that the core returns. The core itself never writes."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record named values of one step."""
        ...

    def close(self) -> None:
        """Finish writing and release resources."""
        ...
