r"""English for a character model: the help texts that come with Python.

Topics in the order of their names. A paragraph that has come before is left out:
topics quote each other, and a test text that was trained on tests nothing. The
alphabet is the newline and the 95 printable characters of ASCII, in the order of their
codes; typographic signs become their plain forms, any other character `?`. The three
stretches follow one another. Another version of Python has slightly other texts.

`characters` is the same as a table: which character comes after these twelve? Each is
given as the seven bits of its ASCII code, lowest first, as -1 or +1: 84 numbers, which
are not standardised. The class is one of the 31 most common characters of the stretch
that trains, most common first, or the last class, any other. Windows of one stretch may
overlap; those of two stretches do not.
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
"""The character of each id."""
PLAIN: Final = str.maketrans(
    {"–": "-", "—": "--", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", "\t": " "}
)
CONTEXT: Final = 12
"""Characters that a row of `characters` shows."""
BITS: Final = 7
CHARACTER_CLASSES: Final = 32
COUNTS: Final = (40_000, 8_000, 8_000)
"""Windows that train, that decide and that test."""

Ids = Int64[Tensor, " char"]


class Text(NamedTuple):
    """Three disjoint stretches of one text, as ids of the alphabet."""

    train: Ids
    """What a model learns from."""
    val: Ids
    """What decides whether and how it grows."""
    test: Ids
    """What is looked at once, at the end."""


def text(shares: Sequence[float] = SHARES) -> Text:
    """The help texts of the Python that runs."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise InvalidInputError(
            f"expected Python's help texts; got {error}; install Python's full "
            f"standard library"
        ) from error
    ids = encode(_without_repeats("".join(topics[name] for name in sorted(topics))))
    first, second = borders(len(ids), shares)
    return Text(*(part.clone() for part in ids.tensor_split((first, second))))


def windows(
    ids: Ids, *, count: int, length: int, generator: Generator
) -> tuple[Int64[Tensor, "window {length}"], Int64[Tensor, "window {length}"]]:
    """Cut windows at random places: characters, and the character after each."""
    places = len(ids) - length
    if count < 1 or length < 1 or places < 1:
        raise InvalidInputError(
            f"expected count and length to be at least 1 and length below the "
            f"{len(ids)} characters; got count {count} and length {length}"
        )
    start = torch.randint(
        places, (count, 1), generator=generator, device=generator.device
    ).to(ids.device)
    place = start + torch.arange(length, device=ids.device)
    return ids[place], ids[place + 1]


def encode(characters: str) -> Ids:
    """The id of each character, after typographic signs were made plain."""
    ids = {character: number for number, character in enumerate(ALPHABET)}
    plain = characters.translate(PLAIN)
    return torch.tensor([ids.get(c, ids["?"]) for c in plain], dtype=torch.int64)


def decode(ids: Ids) -> str:
    """The characters of ids."""
    return "".join(ALPHABET[number] for number in ids.tolist())


def _without_repeats(characters: str) -> str:
    """Each paragraph once, where it comes first; spacing does not make it another."""
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
    """Draw windows of three disjoint stretches; each window comes once."""
    source = source or text()
    classes = common(source.train)
    random = random_source(rng_seed, "characters")
    parts = zip(source, counts, strict=True)
    return Splits(*(_table(ids, count, classes, random) for ids, count in parts))


def common(ids: Ids) -> Int64[Tensor, " alphabet"]:
    """The class of each id of the alphabet: commonest first, the rest together."""
    counts = torch.bincount(ids, minlength=len(ALPHABET))
    rank = counts.argsort(descending=True, stable=True).argsort()
    return rank.clamp(max=CHARACTER_CLASSES - 1)


def codes() -> Float[Tensor, "alphabet bit"]:
    """The seven bits of each character of the alphabet, as -1 and +1."""
    code = torch.tensor([ord(character) for character in ALPHABET])
    return 2.0 * (code[:, None] >> torch.arange(BITS) & 1) - 1


def _table(
    ids: Ids,
    count: int,
    classes: Int64[Tensor, " alphabet"],
    random: np.random.Generator,
) -> Data:
    """Windows at random places of one stretch."""
    places = len(ids) - CONTEXT
    if not 1 <= count <= places:
        raise InvalidInputError(
            f"expected a count of windows in 1..{max(places, 0)}, as the stretch has "
            f"{len(ids)} characters; got {count}"
        )
    start = torch.from_numpy(random.choice(places, count, replace=False))
    shown = ids[start[:, None] + torch.arange(CONTEXT)]
    features = codes()[shown].flatten(1)
    return check_data(
        Data("text", features, classes[ids[start + CONTEXT]], CHARACTER_CLASSES)
    )
