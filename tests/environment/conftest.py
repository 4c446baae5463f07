import jaxtyping
import pytest


@pytest.fixture
def unchecked():
    """Without the test run's own check of annotations, which would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
