"""The finished run of the tests of training, read here too."""

from tests.training.conftest import finished

__all__ = ["finished"]
