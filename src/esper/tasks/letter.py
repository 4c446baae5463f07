"""Letter Recognition: 20,000 distorted capital letters in 26 classes.

Sixteen numbers from 0 to 15 describe each image: its box, its moments, its edges. The
rows are in the order of the original (Slate 1991; Frey & Slate 1991). Source, credit
and licence (CC BY 4.0) are in `arrays/README.md`.
"""

from hashlib import sha256
from importlib.resources import files
from io import BytesIO
from typing import Final

import numpy as np
import torch

from esper.contracts.errors import BadInput
from esper.tasks.data import Data

DIGEST: Final = "bafe0d5167c1999972d592e65a64cbff0867bf644614959da9338da9ae69a364"
"""SHA-256 of `arrays/letter.npz`."""
CLASSES: Final = 26


def letter() -> Data:
    """The letters A to Z as classes 0 to 25; features as they were counted, 0 to 15."""
    file = files("esper.tasks") / "arrays" / "letter.npz"
    if not file.is_file():
        raise BadInput(f"expected the file {file}; it is missing; install esper again")
    return read(file.read_bytes())


def read(content: bytes) -> Data:
    """The data in the content of `letter.npz`, if it is what was put there."""
    digest = sha256(content).hexdigest()
    if digest != DIGEST:
        raise BadInput(
            f"expected letter.npz with SHA-256 {DIGEST[:12]}…; got {digest[:12]}… "
            f"({len(content):,} bytes); install esper again"
        )
    with np.load(BytesIO(content), allow_pickle=False) as arrays:
        features = torch.from_numpy(arrays["features"].astype(np.float32))
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    return Data("letter", features, labels, CLASSES)
