"""Landsat Satellite: 6,435 squares of a satellite image in six kinds of soil.

A row is a square of 3 by 3 pixels in four spectral bands, pixel after pixel; its class
is the soil of the pixel in the middle (Srinivasan 1993). Squares overlap, so rows dealt
out at random test on land that was nearly seen: compare networks with one another, not
with figures for another scene. Source, credit and licence (CC BY 4.0) are in
`arrays/README.md`.
"""

from typing import Final

from esper.tasks.data import Data
from esper.tasks.stored import content, unpack

DIGEST: Final = "1036cd73f74f8b595bbe41c2a342534f82508fc0cb3b68dc6832e3cefdc0c002"
"""SHA-256 of `arrays/satimage.npz`."""
SOILS: Final = (
    "red soil",
    "cotton crop",
    "grey soil",
    "damp grey soil",
    "vegetation stubble",
    "very damp grey soil",
)
"""What each class is."""


def satimage() -> Data:
    """The squares with their brightness as it was measured."""
    return read(content("satimage"))


def read(packed: bytes) -> Data:
    """The data in the content of `satimage.npz`, if it is what was put there."""
    return unpack("satimage", packed, digest=DIGEST, classes=len(SOILS))
