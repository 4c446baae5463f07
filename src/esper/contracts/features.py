r"""Columns of the three tables that a policy reads, and their scaling.

Fractions and flags are clamped to [0, 1]. An unbounded quantity x becomes

    y = x / (half + |x|),

the logistic function of log(|x| / half) with the sign of x, which resolves more decades
than tanh.
"""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from esper.contracts.blueprints import Form
from esper.contracts.stages import Stage


class Leaf(NamedTuple):
    """Shape and dtype of one tensor of an observation, in one environment."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Column:
    """One feature, read from the field of the same name or computed."""

    name: str
    half: float | None = None
    """Raw value that is scaled to 1/2; None for fractions and flags."""


HOST_COLUMNS: Final = (
    Column("progress"),
    Column("end_known"),
    Column("compute", half=8.0),
    Column("budget_left", half=0.5),
    Column("budget_unlimited"),
    Column("rent", half=0.1),
    Column("small_rent", half=0.01),
    Column("added", half=0.5),
    Column("score"),
    Column("score_slope", half=0.01),
    Column("loss", half=0.5),
    Column("loss_slope", half=0.05),
    Column("plateau"),
)

STAGE_COLUMNS: Final = tuple(f"stage_{stage.name.lower()}" for stage in Stage)

SLOT_COLUMNS: Final = (
    *(Column(name) for name in STAGE_COLUMNS),
    Column("age", half=4.0),
    Column("alpha"),
    Column("alpha_target"),
    Column("alpha_settled"),
    Column("style"),
    Column("parameters", half=0.1),
    Column("depth"),
    Column("capacity"),
    Column("units", half=16.0),
)

OFFER_COLUMNS: Final = (
    Column("fits"),
    Column("affordable"),
    Column("planted"),
    Column("parameters", half=0.1),
    Column("macs", half=0.1),
    Column("rent", half=0.1),
    Column("small_rent", half=0.01),
)

SLOT_MEASUREMENTS: Final = (
    Column("liveness"),
    Column("gradient_share"),
    Column("contribution", half=0.1),
    Column("net_contribution", half=0.4),
    Column("contribution_measured"),
)
"""More columns of slots, in worlds that measure them; the simulated one does."""
OFFER_MEASUREMENTS: Final = (
    Column("promise", half=0.1),
    Column("net_promise", half=0.4),
    Column("promise_known"),
)
"""More columns of offers, in the same worlds."""
UNMEASURED_SLOT: Final = (1.0, 1.0, 0.0, 0.0, 0.0)
"""`SLOT_MEASUREMENTS` of hosts that measure nothing; `OFFER_MEASUREMENTS` are 0."""

BLUEPRINT_COLUMNS: Final = (
    Column("log2_size", half=3.0),
    Column("share", half=1.0),
    Column("merges"),
    # A custom form has no column: all form columns are 0.
    *(Column(f"form_{form.name.lower()}") for form in Form if form is not Form.CUSTOM),
)


@dataclass(frozen=True, slots=True)
class Features:
    """Input of the policy: `[env]` when acting, `[env, time]` in training."""

    host: Float[Tensor, "*batch host"]
    """`HOST_COLUMNS` of every environment."""
    slots: Float[Tensor, "*batch slot column"]
    """`slot_columns` of every slot."""
    offers: Float[Tensor, "*batch slot blueprint offer"]
    """`offer_columns` of every blueprint at every slot."""


def slot_columns(*, measured: bool) -> tuple[Column, ...]:
    """Columns of slots, in a world that measures them or does not."""
    return SLOT_COLUMNS + SLOT_MEASUREMENTS * measured


def offer_columns(*, measured: bool) -> tuple[Column, ...]:
    """Columns of offers, in a world that measures slots or does not."""
    return OFFER_COLUMNS + OFFER_MEASUREMENTS * measured


def feature_leaves(slots: int, blueprints: int, *, measured: bool) -> dict[str, Leaf]:
    """Shapes of the tables of `Features` in one environment."""
    offers = len(offer_columns(measured=measured))
    return {
        "host": Leaf((len(HOST_COLUMNS),)),
        "slots": Leaf((slots, len(slot_columns(measured=measured)))),
        "offers": Leaf((slots, blueprints, offers)),
    }
