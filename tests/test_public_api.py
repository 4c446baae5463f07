"""What the package says it offers is there, and importing it is cheap."""

import subprocess
import sys

import pytest

import esper


@pytest.mark.parametrize("name", esper.__all__)
def test_every_public_name_can_be_had(name):
    assert getattr(esper, name) is not None
    assert name in dir(esper)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match="no attribute 'Tamyio'"):
        _ = esper.Tamyio


def test_importing_the_package_imports_no_torch():
    script = "import sys, esper; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
