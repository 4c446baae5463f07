r"""English text for character models: Python's own help texts.

Topics are sorted by name and repeated paragraphs are removed, so that no test text
occurs in the training text. The alphabet is the newline and the 95 printable ASCII
characters; any other character becomes `?`. Texts differ slightly between versions of
Python.

`characters` makes a table: predict the character after a window of twelve. Inputs are
the bits of the ASCII codes as -1 or +1, not standardized. The class is one of the 31
most common characters of the training text, or the last class for any other.
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor

from esper.contracts.errors import InvalidInputError
from esper.tasks.data import (
    SHARES,
    Data,
    Splits,
    borders,
    check_data,
    random_source,
)

ALPHABET: Final = "\n" + "".join(map(chr, range(32, 127)))
"""Character of each id."""
PLAIN: Final = str.maketrans(
    {"–": "-", "—": "--", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", "\t": " "}
)
CONTEXT: Final = 12
"""Length of the windows of `characters`."""
BITS: Final = 7
CHARACTER_CLASSES: Final = 32
COUNTS: Final = (40_000, 8_000, 8_000)
"""Windows for training, validation and test."""

Ids = Int64[Tensor, " char"]


class Text(NamedTuple):
    """Three consecutive parts of one text, as ids of the alphabet."""

    train: Ids
    val: Ids
    test: Ids


def text(shares: Sequence[float] = SHARES) -> Text:
    """Return the help texts of the running Python."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise InvalidInputError(
            f"Python's help texts are missing: {error}; install Python's full "
            "standard library."
        ) from error
    ids = encode(_without_repeats("".join(topics[name] for name in sorted(topics))))
    first, second = borders(len(ids), shares)
    return Text(*(part.clone() for part in ids.tensor_split((first, second))))


def windows(
    ids: Ids, *, count: int, length: int, generator: Generator
) -> tuple[Int64[Tensor, "window {length}"], Int64[Tensor, "window {length}"]]:
    """Draw random windows; return them and the next character at each position."""
    places = len(ids) - length
    start = torch.randint(
        places, (count, 1), generator=generator, device=generator.device
    ).to(ids.device)
    place = start + torch.arange(length, device=ids.device)
    return ids[place], ids[place + 1]


def encode(characters: str) -> Ids:
    """Return the id of each character; typographic signs become plain ones."""
    ids = {character: number for number, character in enumerate(ALPHABET)}
    plain = characters.translate(PLAIN)
    return torch.tensor([ids.get(c, ids["?"]) for c in plain], dtype=torch.int64)


def _without_repeats(characters: str) -> str:
    """Remove repeated paragraphs, ignoring differences in spacing."""
    paragraphs: dict[tuple[str, ...], str] = {}
    for paragraph in characters.split("\n\n"):
        paragraphs.setdefault(tuple(paragraph.split()), paragraph)
    return "\n\n".join(paragraphs.values())


def characters(
    rng_seed: int,
    counts: tuple[int, int, int] = COUNTS,
    *,
    source: Text | None = None,
) -> Splits:
    """Draw distinct windows of the three parts."""
    source = source or text()
    classes = common(source.train)
    random = random_source(rng_seed, "characters")
    parts = zip(source, counts, strict=True)
    return Splits(*(_table(ids, count, classes, random) for ids, count in parts))


def common(ids: Ids) -> Int64[Tensor, " alphabet"]:
    """Return the class of each id: most common first, the rest in one class."""
    counts = torch.bincount(ids, minlength=len(ALPHABET))
    rank = counts.argsort(descending=True, stable=True).argsort()
    return rank.clamp(max=CHARACTER_CLASSES - 1)


def codes() -> Float[Tensor, "alphabet bit"]:
    """Return the seven bits of each character as -1 and +1."""
    code = torch.tensor([ord(character) for character in ALPHABET])
    return 2.0 * (code[:, None] >> torch.arange(BITS) & 1) - 1


def _table(
    ids: Ids,
    count: int,
    classes: Int64[Tensor, " alphabet"],
    random: np.random.Generator,
) -> Data:
    """Random windows of one part."""
    places = len(ids) - CONTEXT
    start = torch.from_numpy(random.choice(places, count, replace=False))
    shown = ids[start[:, None] + torch.arange(CONTEXT)]
    features = codes()[shown].flatten(1)
    return check_data(
        Data("text", features, classes[ids[start + CONTEXT]], CHARACTER_CLASSES)
    )
