"""One seed, one thread, no Hypothesis deadline: torch is slow to wake, then fast."""

import os
import signal
import tempfile

import jaxtyping
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# Inductor keeps code without noting for which instructions it was compiled.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/esper_inductor_{os.getuid()}_"
    f"{torch.backends.cpu.get_cpu_capability()}",
)
settings.register_profile("esper", deadline=None, derandomize=True)
settings.load_profile("esper")


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def unchecked():
    """Without the test run's own check of annotations, which would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def default_signals():
    """Signals as in a terminal, here and in child processes.

    A shell lets its background jobs ignore SIGINT, and children inherit that.
    """
    handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    before = {kind: signal.signal(kind, new) for kind, new in handlers.items()}
    yield
    for kind, old in before.items():
        signal.signal(kind, old)
