"""One run and its report, which all tests read and none changes."""

import pytest

from esper.report import write_report
from tests.report.runs import make_run


@pytest.fixture(scope="session")
def reported(tmp_path_factory):
    """The folder of a run whose report is written."""
    path = make_run(tmp_path_factory.mktemp("runs"))
    write_report(path)
    return path
