"""The command line refuses in one line and costs nothing before it is asked."""

import json
import subprocess
import sys

import pytest

from esper.cli import main
from esper.contracts.errors import BadInput, RunTaken, StorageTrouble
from esper.tasks import catalogue
from tests.experiment.test_judging import lost, tiny


@pytest.fixture
def _few_tasks():
    """Tasks of a moment: one that can be judged and one whose data are missing."""
    before = dict(catalogue._BUILDERS)
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(tiny=tiny, lost=lost)
    yield
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    return stop.value.code, capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "the following arguments are required: command"),
        (("tran",), "did you mean 'train'"),
        (("evalute",), "did you mean 'evaluate'"),
        (("evaluate", "--controler", "never"), "did you mean '--controller'"),
        (("evaluate", "--hosts", "0"), "from 1 to 65536, got '0'"),
        (("bench", "gea"), "did you mean 'gae'"),
        (("train", "--ablatios"), "did you mean '--ablations'"),
        (("train", "--env", "4"), "did you mean '--envs'"),
        (("train", "--envs", "0"), "from 1 to 65536, got '0'"),
        (("train", "--envs", "-1"), "got '-1'"),
        (("train", "--envs", "4.0"), "got '4.0'"),
        (("train", "--envs", "1e9"), "got '1e9'"),
        (("train", "--envs", "٤"), "got '٤'"),
        (("train", "--envs", ""), "got ''"),
        (("train", "--envs", "nan"), "got 'nan'"),
        (("train", "--rng-seed", "-1"), "whole number from 0"),
        (("train", "--rng-seed", str(2**64)), "whole number from 0"),
    ],
)
def test_bad_input_gets_one_line_and_exit_code_two(capsys, arguments, complaint):
    code, said = run(capsys, *arguments)
    assert code == 2
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert complaint in said.err


def test_an_error_of_ours_is_one_line_without_a_traceback(capsys):
    assert main(["train", "--envs", "2"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("esper: envs must be at least")
    assert said.err.count("\n") == 1


def test_help_imports_nothing_heavy():
    script = (
        "import sys, esper.cli\n"
        "try: esper.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'numba', 'rich', 'scipy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "esper train" in done.stdout


def test_a_short_training_ends_with_its_tables(capsys):
    assert main(["train", "--rounds", "1", "--envs", "8"]) == 0
    said = capsys.readouterr().out
    for word in ("round 1/1", "Visible", "Hidden", "Tamiyo", "optimum", "never"):
        assert word in said


def test_tasks_are_listed(capsys):
    assert main(["tasks"]) == 0
    printed = capsys.readouterr().out
    assert "letter" in printed
    assert "20,000" in printed


def test_an_unknown_task_is_refused_in_one_line(capsys):
    assert main(["train", "--task", "leter"]) == 2
    error = capsys.readouterr().err
    assert "letter" in error
    assert error.count("\n") == 1


EVALUATE = ("evaluate", "--hosts", "2", "--processes", "1")


@pytest.mark.usefixtures("_few_tasks")
def test_an_evaluation_ends_with_a_table_and_says_what_was_left_out(capsys):
    assert main([*EVALUATE, "--controller", "never", "--controller", "early"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("tiny: 2 hosts (mlp 4-6-3)" in line for line in lines)
    (never,) = (line for line in lines if "never" in line and "1.00 x" in line)
    assert never.count("1.00 x") == 2
    assert "51 (1.00 x)" in never
    assert "42 (1.00 x)" in never
    assert any("tiny: controller 2/2, early: return" in line for line in lines)
    assert lines[-1].startswith("lost: skipped: expected a package;")
    assert lines[-1].endswith("something[extra]")


@pytest.mark.usefixtures("_few_tasks")
def test_an_evaluation_as_data_is_one_document_with_every_controller(capsys):
    assert main([*EVALUATE, "--json"]) == 0
    said = capsys.readouterr()
    data = json.loads(said.out)
    assert (data["hosts"], data["rng_seed"]) == (2, 0)
    assert data["tasks"].keys() == {"tiny"}
    assert data["tasks"]["tiny"]["controllers"].keys() >= {"never", "early", "promise"}
    assert data["skipped"].keys() == {"lost"}
    assert "controller 1/" in said.err


@pytest.mark.usefixtures("_few_tasks")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--task", "tinny"), "did you mean 'tiny'"),
        (("--task", "tiny", "--task", "lost"), "pip install something[extra]"),
        (("--controller", "nevr"), "did you mean 'never'"),
    ],
)
def test_who_cannot_be_evaluated_is_refused_in_one_line(capsys, arguments, complaint):
    assert main([*EVALUATE, *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert complaint in said.err


@pytest.mark.usefixtures("_few_tasks")
def test_a_short_training_on_a_task_ends_with_a_table_of_everybody(capsys):
    assert main(["train", "--task", "tiny", "--rounds", "1", "--envs", "2"]) == 0
    said = capsys.readouterr().out
    assert "Tamiyo on tiny: round 1/1" in said
    for word in ("tiny: 16 hosts", "never", "promise", "panics", "1.00 x"):
        assert word in said
    assert said.count("Tamiyo ") > 1


def test_blueprints_are_listed(capsys):
    assert main(["blueprints"]) == 0
    shown = capsys.readouterr().out
    assert "widen_16" in shown
    assert "depthwise" in shown


@pytest.mark.parametrize("budget", ["x", "0", "-1", "nan", "inf"])
def test_a_budget_that_is_no_amount_is_refused(budget, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["grow", "--task", "letter", "--budget", budget])
    assert stop.value.code == 2
    assert "expected a number above 0" in capsys.readouterr().err


def test_growing_on_a_mistyped_task_names_the_right_one(capsys):
    assert main(["grow", "--task", "lettre"]) == 2
    assert "did you mean 'letter'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadInput("wrong"), 2),
        (RunTaken("taken"), 3),
        (StorageTrouble("full"), 5),
    ],
)
def test_every_kind_of_trouble_has_its_exit_code(error, code, monkeypatch, capsys):
    def refuse(options):
        raise error

    monkeypatch.setattr("esper.cli._tasks", refuse)
    assert main(["tasks"]) == code
    assert capsys.readouterr().err == f"esper: {error}\n"
