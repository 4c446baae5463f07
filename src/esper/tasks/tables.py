"""Tables that come with the package, checked before they are read.

A table is `arrays/NAME.npz`: the features of every row and its class, compressed. Where
each comes from, credit, licence and what was changed are in `arrays/README.md`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from types import MappingProxyType
from typing import Final

import numpy as np
import torch

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, check_data


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What is known of a table without reading it."""

    description: str
    inputs: int
    classes: int
    digest: str
    """SHA-256 of the file."""
    one_unit: bool = True
    """Whether the columns can be compared: pixels can, lengths and colours cannot."""


TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {
        "letter": Table(
            description="capital letters as sixteen measurements",
            inputs=16,
            classes=26,
            digest="bafe0d5167c1999972d592e65a64cbff0867bf644614959da9338da9ae69a364",
        ),
        "satimage": Table(
            description="soils in a satellite image",
            inputs=36,
            classes=6,
            digest="1036cd73f74f8b595bbe41c2a342534f82508fc0cb3b68dc6832e3cefdc0c002",
        ),
        "penbased": Table(
            description="digits as the way of the pen",
            inputs=16,
            classes=10,
            digest="bd9f2b87965057fdc7f73913e0a799c3921a3c614400334f9e93afc3b1f01a56",
        ),
        "optdigits": Table(
            description="handwritten digits of 8 by 8 pixels, other writers",
            inputs=64,
            classes=10,
            digest="12b771293648b52a53862560ff71841cec581d9b45d6d81da1626af2e6368734",
        ),
        "texture": Table(
            description="surfaces in photographs",
            inputs=40,
            classes=11,
            digest="0ba38ffe454ba62c46e2bb0d0db1f4ec3097cd6234f20eba9c763da14739d2ef",
        ),
        "vowel": Table(
            description="spoken English vowels",
            inputs=10,
            classes=11,
            digest="399c73cfe184196df17dc14b980c29035e6d28f131fb6da68e4a896feba1a0d2",
        ),
        "segment": Table(
            description="what a patch of a photograph shows",
            inputs=19,
            classes=7,
            digest="607a29cf6894d6198211506464b3272299a3cf03048b237064e648f923467fec",
            one_unit=False,
        ),
        "phoneme": Table(
            description="nasal or oral sounds",
            inputs=5,
            classes=2,
            digest="c8c354024f961bba1abe4a4562651a91693a5f1127e27bb3a43189a4bc2d0b66",
        ),
        "spambase": Table(
            description="letters that nobody asked for",
            inputs=57,
            classes=2,
            digest="9fd87b13c464d629fa77124381ebca8ce9f327293316a52e5173f549729b1dee",
            one_unit=False,
        ),
    }
)
"""Every table by name."""


def stored(name: str) -> Data:
    """The rows of a table, as they were measured."""
    return read(name, content(name))


def content(name: str) -> bytes:
    """The bytes of `arrays/NAME.npz`."""
    file = files("esper.tasks") / "arrays" / f"{name}.npz"
    if not file.is_file():
        raise BadInput(f"expected the file {file}; it is missing; install esper again")
    return file.read_bytes()


def read(name: str, packed: bytes) -> Data:
    """The rows in the content of `NAME.npz`, if it is what was put there."""
    table, found = TABLES[name], sha256(packed).hexdigest()
    if found != table.digest:
        raise BadInput(
            f"expected {name}.npz with SHA-256 {table.digest[:12]}…; got {found[:12]}… "
            f"({len(packed):,} bytes); install esper again"
        )
    with np.load(BytesIO(packed), allow_pickle=False) as arrays:
        features = torch.from_numpy(arrays["features"].astype(np.float32))
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    return check_data(Data(name, features, labels, table.classes))
