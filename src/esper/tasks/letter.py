"""Letter Recognition: 20,000 distorted capital letters in 26 classes.

Sixteen numbers from 0 to 15 describe each image: its box, its moments, its edges. The
rows are in the order of the original (Slate 1991; Frey & Slate 1991). Source, credit
and licence (CC BY 4.0) are in `arrays/README.md`.
"""

from typing import Final

from esper.tasks.data import Data
from esper.tasks.stored import content, unpack

DIGEST: Final = "bafe0d5167c1999972d592e65a64cbff0867bf644614959da9338da9ae69a364"
"""SHA-256 of `arrays/letter.npz`."""
CLASSES: Final = 26


def letter() -> Data:
    """The letters A to Z as classes 0 to 25; features as they were counted, 0 to 15."""
    return read(content("letter"))


def read(packed: bytes) -> Data:
    """The data in the content of `letter.npz`, if it is what was put there."""
    return unpack("letter", packed, digest=DIGEST, classes=CLASSES)
