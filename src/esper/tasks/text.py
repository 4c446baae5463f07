r"""English for a character model: the help texts that come with Python.

Topics in the order of their names. A paragraph that has come before is left out:
topics quote each other, and a test text that was trained on tests nothing. The
alphabet is the newline and the 95 printable characters of ASCII, in the order of their
codes; typographic signs become their plain forms, any other character `?`. The three
stretches follow one another. Another version of Python has slightly other texts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from platform import python_version
from typing import Final

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.errors import BadInput
from esper.tasks.data import SHARES, borders

ALPHABET: Final = "\n" + "".join(map(chr, range(32, 127)))
"""The character of each id."""
PLAIN: Final = str.maketrans(
    {"–": "-", "—": "--", "‘": "'", "’": "'", "“": '"', "”": '"', "…": "...", "\t": " "}
)

Ids = Int64[Tensor, " char"]


@dataclass(frozen=True, slots=True)
class Text:
    """Three disjoint stretches of one text, as ids of its alphabet."""

    name: str
    alphabet: str
    train: Int64[Tensor, " learnt"]
    """What a model learns from."""
    decisions: Int64[Tensor, " deciding"]
    """What decides whether and how it grows."""
    test: Int64[Tensor, " tested"]
    """What is looked at once, at the end."""


def text(shares: Sequence[float] = SHARES) -> Text:
    """The help texts of the Python that runs."""
    try:
        topics: dict[str, str] = import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise BadInput(
            f"expected Python's help texts; got {error}; install Python's full "
            f"standard library"
        ) from error
    ids = encode(_without_repeats("".join(topics[name] for name in sorted(topics))))
    first, second = borders(len(ids), shares)
    return Text(
        f"help texts of Python {python_version()}",
        ALPHABET,
        ids[:first].clone(),
        ids[first:second].clone(),
        ids[second:].clone(),
    )


def windows(
    ids: Ids, *, count: int, length: int, generator: Generator
) -> tuple[Int64[Tensor, "window {length}"], Int64[Tensor, "window {length}"]]:
    """Cut windows at random places: characters, and the character after each."""
    places = len(ids) - length
    if count < 1 or length < 1 or places < 1:
        raise BadInput(
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
    known = {character: number for number, character in enumerate(ALPHABET)}
    unknown = known["?"]
    plain = characters.translate(PLAIN)
    ids = [known.get(character, unknown) for character in plain]
    return torch.tensor(ids, dtype=torch.int64)


def decode(ids: Ids) -> str:
    """The characters of ids."""
    return "".join(ALPHABET[number] for number in ids.tolist())


def _without_repeats(characters: str) -> str:
    """Each paragraph once, where it comes first; spacing does not make it another."""
    paragraphs: dict[tuple[str, ...], str] = {}
    for paragraph in characters.split("\n\n"):
        paragraphs.setdefault(tuple(paragraph.split()), paragraph)
    return "\n\n".join(paragraphs.values())
