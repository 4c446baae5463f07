"""One seed, one thread, no Hypothesis deadline: torch is slow to wake, then fast."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("esper", deadline=None, derandomize=True)
settings.load_profile("esper")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
