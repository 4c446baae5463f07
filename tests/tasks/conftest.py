import jaxtyping
import pytest

from esper.tasks import catalogue


@pytest.fixture
def unchecked():
    """Without the test run's own check of annotations, which would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def own_names():
    """What a test registers is forgotten afterwards."""
    before = dict(catalogue._BUILDERS)
    yield
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)
