import pytest

from esper.tasks import catalogue


@pytest.fixture
def own_names():
    """What a test registers is forgotten afterwards."""
    before = dict(catalogue._BUILDERS)
    yield
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)
