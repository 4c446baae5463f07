"""One run and its report, which tests only read."""

import pytest

from esper.report import write_report
from tests.report.runs import make_run


@pytest.fixture(scope="session")
def reported(tmp_path_factory):
    """The folder of a run with a report."""
    path = make_run(tmp_path_factory.mktemp("runs"))
    write_report(path)
    return path
