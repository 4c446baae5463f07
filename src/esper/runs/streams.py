"""Independent random streams from one number.

torch's CPU generator keeps only the low 32 bits of a seed, and neighbouring seeds are
easily used twice. So each seed is mixed from the run's number and a key.
"""

from typing import Final
from zlib import crc32

import numpy as np
from torch import Generator

STAGE_KEYS: Final = {"training": "training", "validation": "watched", "test": "judged"}
"""Name of each stage in the keys of streams. Other texts would draw other hosts, and
published results could not be reproduced."""


def stream_seed(rng_seed: int, key: str) -> int:
    """The seed of the stream with this key."""
    mixed = np.random.SeedSequence([rng_seed, crc32(key.encode())])
    return int(mixed.generate_state(1, np.uint32)[0])


def stream(rng_seed: int, key: str) -> Generator:
    """A generator for the stream with this key."""
    return Generator().manual_seed(stream_seed(rng_seed, key))
