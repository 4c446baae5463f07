"""On what terms hosts grow, what became of them, and what is refused at the door."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, isfinite
from numbers import Integral, Real
from sys import float_info
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import NUM_HEADS
from esper.contracts.errors import BadInput

BOUNDS: Final[Mapping[str, tuple[float, str]]] = {
    "rent": (-inf, ""),
    "budget": (0.0, " from 0"),
    "rate": (float_info.min, " above 0"),
}
"""The least that a term can be, and how to say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What may differ from environment to environment: ranges to draw from."""

    rent: tuple[float, float] = (0.01, 0.01)
    """Score charged per added multiple of the host's parameters."""
    budget: tuple[float, float] = (4.0, 4.0)
    """Parameters that may be added, as a multiple of the host's."""
    rate: tuple[float, float] = (1.0, 1.0)
    """Learning rate against the task's own."""

    def __post_init__(self) -> None:
        """Refuse ranges that cannot be drawn from."""
        for name in BOUNDS:
            as_range(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What became of the episodes that ended in a step."""

    env: Int64[Tensor, " ended"]
    score: Float[Tensor, " ended"]
    """On all decision rows that are looked at."""
    test: Float[Tensor, " ended"]
    """On the test rows; no decision and no reward ever sees it."""
    added: Float[Tensor, " ended"]
    """Parameters added, as a multiple of the host's."""
    macs: Float[Tensor, " ended"]
    """Multiply-adds per row, as a multiple of the host's."""
    panicked: Bool[Tensor, " ended"]


def as_range(name: str, term: Any) -> tuple[float, float]:  # noqa: ANN401
    """A number or two as the range of a term; refuses what cannot be drawn from."""
    ends = tuple(term) if isinstance(term, tuple | list) else (term, term)
    least, words = BOUNDS[name]
    if len(ends) == 2 and all(map(_is_number, ends)):
        low, high = map(float, ends)
        if isfinite(low) and isfinite(high) and least <= low <= high:
            return low, high
    raise BadInput(
        f"{name} must be a finite number{words} or a range (low, high); got {term!r}."
    )


def check_choices(
    num_envs: Any,  # noqa: ANN401
    rng_seed: Any,  # noqa: ANN401
    measure_every: Any,  # noqa: ANN401
    penalty: Any,  # noqa: ANN401
    device: Any,  # noqa: ANN401
    blueprints: Any,  # noqa: ANN401
) -> None:
    """Refuse what no world can be made of."""
    check_count("num_envs", num_envs, 1)
    check_count("rng_seed", rng_seed, 0)
    check_count("measure_every", measure_every, 1)
    if not (_is_number(penalty) and isfinite(penalty) and penalty >= 0):
        raise BadInput(f"penalty must be a finite number from 0, got {penalty!r:.99}.")
    if isinstance(blueprints, str) or (blueprints is not None and not [*blueprints]):
        raise BadInput(
            f"blueprints must be at least one name in a tuple, got {blueprints!r:.99}."
        )
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        found = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
        raise BadInput(
            f"device must be one of {', '.join(['cpu', *found])}; got {device!r:.99}."
        ) from error


def check_count(name: str, count: Any, least: int) -> None:  # noqa: ANN401
    """Refuse what is no whole number, or too small a one."""
    whole = isinstance(count, Integral) and not isinstance(count, bool)
    if not whole or count < least:
        raise BadInput(
            f"{name} must be a whole number of at least {least}, got {count!r:.99}."
        )


def check_actions(actions: Any, envs: int) -> None:  # noqa: ANN401
    """Refuse what is no sentence for every environment, whatever its words mean."""
    if not isinstance(actions, Tensor):
        raise BadInput(f"actions must be a tensor, got {type(actions).__name__}.")
    if actions.dtype != torch.int64 or actions.shape != (envs, NUM_HEADS):
        raise BadInput(
            f"actions must be int64 of shape {(envs, NUM_HEADS)}, got {actions.dtype} "
            f"of shape {tuple(actions.shape)}."
        )


def _is_number(end: object) -> bool:
    return isinstance(end, Real) and not isinstance(end, bool)
