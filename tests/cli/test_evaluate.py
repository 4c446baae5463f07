"""`esper evaluate`, and the list, export and report of its run."""

import json

import pytest

from esper.runs.train_config import DEFAULT, preset
from esper.tasks import catalogue
from esper.tasks.catalogue import register_task
from tests.cli.calls import call, contents, refused
from tests.evaluation.test_evaluation import lost, tiny

EVALUATE = ("evaluate", "--hosts", "2", "--workers", "0")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory, and two tasks, of which one has no data."""
    monkeypatch.chdir(tmp_path)
    assert preset(DEFAULT).tasks  # created before the tasks are replaced
    before = dict(catalogue._BUILDERS)
    catalogue._BUILDERS.clear()
    register_task("tiny")(tiny)
    register_task("lost")(lost)
    yield tmp_path
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)


def test_an_evaluation_is_run_listed_exported_and_reported(capsys, here):
    arguments = ("--controller=never,early", "--controller=static", "--name=first")
    result = call(capsys, *EVALUATE, *arguments)
    assert (result.code, result.err) == (0, "")
    assert "tiny: 2 unseen hosts" in result.out
    assert "lost: skipped: expected a package;" in result.out
    assert "Stored in runs/first\n" in result.out
    assert result.out.endswith("The report is in runs/first/report.html.\n")
    assert "finished" in call(capsys, "runs").out

    result = call(capsys, "export", "first", "--format", "csv", "--out", "tables")
    assert (result.code, result.err) == (0, "")
    assert result.out.endswith("tables are in tables.\n")
    table = (here / "tables" / "evaluations.csv").read_text()
    assert table.count("\n") == 1 + 3 * 2

    result = call(capsys, "report", "runs/first", "--out", "page.html")
    assert (result.code, result.out) == (0, "The report is in page.html.\n")
    assert "tiny" in (here / "page.html").read_text()

    (here / "file").write_text("mine")
    before = contents(here)
    for again, code, message in (
        ((*EVALUATE, *arguments), 3, "runs/first exists"),
        (("report", "first", "--out", "no/page.html"), 2, "no is not a folder"),
        (("report", "first", "--out", "file/page.html"), 2, "file is not a folder"),
        (("report", "first", "--out", "."), 2, "expected a file, got folder '.'"),
        (("report", "first", "--out", "runs"), 2, "got folder 'runs'"),
        (("export", "first", "--format", "csv", "--out", "file"), 5, "export to file"),
        (("export", "first", "--format", "csv", "--out", "tables"), 2, "another fold"),
    ):
        assert message in refused(capsys, *again, code=code)
        assert contents(here) == before


def test_an_evaluation_as_data_is_one_document(capsys, here):
    result = call(capsys, *EVALUATE, "--controller", "never,early", "--json")
    assert result.code == 0
    data = json.loads(result.out)
    assert data["skipped"].keys() == {"lost"}
    assert "tiny" in json.dumps(data["tasks"])
    assert "arm 1/" in result.err
