"""Make `letter.npz` from the original text file of Letter Recognition.

python scripts/make_letter.py letter-recognition.data src/esper/tasks/arrays/letter.npz
"""

import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

SOURCE_DIGEST = "2b89f3602cf768d3c8355267d2f13f2417809e101fc2b5ceee10db19a60de6e2"


def main(source: Path, target: Path) -> None:
    """Turn lines such as `T,2,8,3,...` into two arrays; print their file's digest."""
    content = source.read_bytes()
    digest = sha256(content).hexdigest()
    if digest != SOURCE_DIGEST:
        sys.exit(f"expected {source} with SHA-256 {SOURCE_DIGEST}; got {digest}")
    lines = [line.split(",") for line in content.decode("ascii").split()]
    features = np.array([line[1:] for line in lines], dtype=np.uint8)
    labels = np.array([ord(line[0]) - ord("A") for line in lines], dtype=np.uint8)
    np.savez_compressed(target, features=features, labels=labels)
    print(f"{target.stat().st_size:,} bytes")
    print(f"SHA-256 {sha256(target.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
