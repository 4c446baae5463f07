"""Events in the life of a seed, as data to be stored."""

from dataclasses import dataclass

from esper.contracts.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChanged:
    """A slot went from one stage to the next."""

    env: int
    slot: int
    step: int
    before: Stage
    after: Stage
    reason: str
    """Why, in words a user would understand."""
