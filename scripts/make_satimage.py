"""Make `satimage.npz` from the text file of Statlog (Landsat Satellite).

python scripts/make_satimage.py satimage.dat src/esper/tasks/arrays/satimage.npz
"""

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

SOURCE_DIGEST = "8e7d5263e37bb14dbe49e1a7da24e38fbd0a91b3e9817d59af36852455202110"
SOILS = (1, 2, 3, 4, 5, 7)


def main(source: Path, target: Path) -> None:
    """Turn lines such as `92, 115, ..., 3` into two arrays; print the digest."""
    content = source.read_bytes()
    digest = sha256(content).hexdigest()
    if digest != SOURCE_DIGEST:
        sys.exit(f"expected {source} with SHA-256 {SOURCE_DIGEST}; got {digest}")
    lines = [line.split(",") for line in content.decode("ascii").splitlines()]
    features = np.array([line[:-1] for line in lines], dtype=np.uint8)
    labels = np.array([SOILS.index(int(line[-1])) for line in lines], dtype=np.uint8)
    np.savez_compressed(target, features=features, labels=labels)
    print(f"{target.stat().st_size:,} bytes")
    print(f"SHA-256 {sha256(target.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
