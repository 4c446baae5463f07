"""Letter Recognition: 20,000 distorted capital letters in 26 classes.

Sixteen numbers from 0 to 15 describe each image: its box, its moments, its edges. The
rows are in the order of the original (Slate 1991; Frey & Slate 1991). Source, credit
and licence (CC BY 4.0) are in `arrays/README.md`.
"""

from esper.tasks.data import Data
from esper.tasks.datasets import stored


def letter() -> Data:
    """The letters A to Z as classes 0 to 25; features as they were counted, 0 to 15."""
    return stored("letter")
