r"""A character model as a table: which character comes after these twelve?

A row is a window of the text of `esper.tasks.text`. Each of its characters is given as
the seven bits of its ASCII code, lowest first, as -1 or +1: 84 numbers. The class is
the character that follows: one of the 31 most common of the stretch that trains, most
common first, or the last class, any other. The bits are a fixed code and are not
standardised. Windows of one stretch may overlap; those of two stretches do not.
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, Splits, check_data, random_source
from esper.tasks.text import ALPHABET, Text, text

CONTEXT: Final = 12
"""Characters that a row shows."""
BITS: Final = 7
CLASSES: Final = 32
COUNTS: Final = (40_000, 8_000, 8_000)
"""Windows that train, that decide and that test."""


def characters(
    rng_seed: int,
    counts: tuple[int, int, int] = COUNTS,
    *,
    source: Text | None = None,
) -> Splits:
    """Draw windows of three disjoint stretches; each window comes once."""
    source = source or text()
    classes = common(source.train)
    random = random_source(rng_seed, "characters")
    stretches = (source.train, source.decisions, source.test)
    parts = [
        _table(stretch, count, classes, random)
        for stretch, count in zip(stretches, counts, strict=True)
    ]
    return Splits(*parts)


def common(ids: Int64[Tensor, " char"]) -> Int64[Tensor, " alphabet"]:
    """The class of each id of the alphabet: commonest first, the rest together."""
    often = torch.bincount(ids, minlength=len(ALPHABET)).argsort(
        descending=True, stable=True
    )
    classes = torch.full_like(often, CLASSES - 1)
    classes[often[: CLASSES - 1]] = torch.arange(CLASSES - 1, device=ids.device)
    return classes


def codes() -> Float[Tensor, "alphabet bit"]:
    """The seven bits of each character of the alphabet, as -1 and +1."""
    code = torch.tensor([ord(character) for character in ALPHABET])
    return 2.0 * (code[:, None] >> torch.arange(BITS) & 1) - 1


def _table(
    ids: Int64[Tensor, " char"],
    count: int,
    classes: Int64[Tensor, " alphabet"],
    random: np.random.Generator,
) -> Data:
    """Windows at random places of one stretch."""
    places = len(ids) - CONTEXT
    if not 1 <= count <= places:
        raise BadInput(
            f"expected a count of windows in 1..{max(places, 0)}, as the stretch has "
            f"{len(ids)} characters; got {count}"
        )
    start = torch.from_numpy(random.choice(places, count, replace=False))
    shown = ids[start[:, None] + torch.arange(CONTEXT)]
    features = codes()[shown].flatten(1)
    return check_data(Data("text", features, classes[ids[start + CONTEXT]], CLASSES))
