"""Independent random streams from one number.

torch's CPU generator keeps only the low 32 bits of a seed and neighbouring seeds are
easily used twice, so every stream gets a seed mixed from the run's number and the
stream's purpose.
"""

from zlib import crc32

import numpy as np
from torch import Generator


def stream_seed(rng_seed: int, purpose: str) -> int:
    """The seed of one stream: the same for the same words, else unrelated."""
    mixed = np.random.SeedSequence([rng_seed, crc32(purpose.encode())])
    return int(mixed.generate_state(1, np.uint32)[0])


def stream(rng_seed: int, purpose: str) -> Generator:
    """A random stream of its own."""
    return Generator().manual_seed(stream_seed(rng_seed, purpose))
