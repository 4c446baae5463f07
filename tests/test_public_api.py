"""What the package says it offers is there, and importing it is cheap."""

import subprocess
import sys
from tempfile import TemporaryDirectory

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


def test_public_names_can_be_imported_without_posix():
    """As on Windows, which has neither file locks nor limits of resources."""
    script = (
        "import sys; sys.modules.update(fcntl=None, resource=None)\n"
        "import esper\n"
        "from esper.contracts.errors import BadInput\n"
        "from esper.experiment.run import Run\n"
        "from pathlib import Path\n"
        "for name in esper.__all__: getattr(esper, name)\n"
        "try:\n    Run.create(Path(sys.argv[1]), 'one', '', {})\n"
        "except BadInput as error:\n    print(error)"
    )
    with TemporaryDirectory() as folder:
        run = [sys.executable, "-c", script, folder]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "runs need the file locks of Linux or macOS" in done.stdout, done.stderr
