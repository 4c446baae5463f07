"""What several files of this folder need."""

import jaxtyping
import pytest


@pytest.fixture
def _as_users_call():
    """Without the test run's own look at annotations, which would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
