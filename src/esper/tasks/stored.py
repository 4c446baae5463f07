"""Data that comes with the package: compressed arrays, checked before they are read.

Source, credit, licence and digest of each file are in `arrays/README.md`.
"""

from hashlib import sha256
from importlib.resources import files
from io import BytesIO

import numpy as np
import torch

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, check_data


def content(name: str) -> bytes:
    """The bytes of `arrays/NAME.npz`."""
    file = files("esper.tasks") / "arrays" / f"{name}.npz"
    if not file.is_file():
        raise BadInput(f"expected the file {file}; it is missing; install esper again")
    return file.read_bytes()


def unpack(name: str, packed: bytes, *, digest: str, classes: int) -> Data:
    """The data in the content of `NAME.npz`, if it is what was put there."""
    found = sha256(packed).hexdigest()
    if found != digest:
        raise BadInput(
            f"expected {name}.npz with SHA-256 {digest[:12]}…; got {found[:12]}… "
            f"({len(packed):,} bytes); install esper again"
        )
    with np.load(BytesIO(packed), allow_pickle=False) as arrays:
        features = torch.from_numpy(arrays["features"].astype(np.float32))
        labels = torch.from_numpy(arrays["labels"].astype(np.int64))
    return check_data(Data(name, features, labels, classes))
