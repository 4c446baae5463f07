"""Help of every command, and errors about wrong arguments."""

from dataclasses import replace

import pytest
import torch

import esper
from esper.cli import COMMANDS
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.train_config import resolve
from esper.training.worlds import check_worlds
from tests.cli.calls import call, make_run, refused, run_python

REFUSED = [
    ((), "the following arguments are required: command"),
    (("tran",), "did you mean 'train'"),
    (("evalute",), "did you mean 'evaluate'"),
    (("--hlp",), "did you mean '--help'"),
    (("--verbose=3", "train"), "there is no option '--verbose'"),
    (("--version=3", "train"), "ignored explicit argument '3'"),
    (("evaluate", "--controler", "never"), "did you mean '--controller'"),
    (("evaluate", "--hosts", "0"), "--hosts must be greater than or equal to 1"),
    (("evaluate", "--hosts", "9" * 99), "--hosts must be less than or equal to 65536"),
    (("evaluate", "--workers", "1025"), "expected a whole number from 0 to 1024"),
    (("evaluate", "--rng-seed", "-1"), "--rng_seed must be greater than or equal"),
    (("evaluate", "--rent", "nan"), "--world.rent must be a finite number"),
    (
        ("evaluate", "--world.slots", "100000000"),
        "slots must be less than or equal to 256",
    ),
    (("evaluate", "--task", "lettr"), "did you mean 'letter'"),
    (("evaluate", "--task", " , "), "--tasks: there is no task ''"),
    (("evaluate", "--controller", ""), "--controllers: expected 1 to 1000 printable"),
    (("evaluate", "--controller", "erly"), "did you mean 'early'"),
    (("evaluate", "--controller", "x" * 300), "there is no run or controller 'xxx"),
    (("evaluate", "--task=teacher", "--controller=no/run"), "is no run"),
    (("evaluate", "--name", ".."), "a run cannot be called '..'"),
    (
        ("blueprints", "--json"),
        "there is no option '--json'; did you mean '--help'? (see esper blue",
    ),
    (("record",), "the following arguments are required: FOLDER"),
    (("record", "here", "--stop", "enf"), "did you mean 'end'?"),
    (
        ("record", "here", "--scripts", "1"),
        "--scripts must be greater than or equal to 2",
    ),
    (("tasks", "letter"), "unrecognized arguments: letter (see esper tasks"),
    (("completion", "fish"), "choose from 'bash', 'zsh'"),
    (("report",), "the following arguments are required: RUN"),
    (("report", "a", "b"), "unrecognized arguments: b"),
    (("report", "nothing"), "there is no run 'nothing' in runs"),
    (("report", ""), "expected a path"),
    (("report", "x" * 5_000), "names of at most 255 bytes"),
    (("report", "a\0b"), "expected a path of printable names"),
    (("export", "nothing"), "there is no run 'nothing' in runs"),
    (("export", "nothing", "--format", "xml"), "choose from 'parquet', 'csv'"),
    (("runs", "--runs", "x" * 300), "names of at most 255 bytes"),
    (("config", "more"), "unrecognized arguments: more"),
    (("config", "--resume", "x"), "there is no option '--resume'"),
    (("ppo", "A-v0", "--n-steps", "3"), "'--n-steps'; did you mean '--rollout_steps'"),
    (("grow",), "the following arguments are required: --task"),
    (("grow", "--task", "lettre"), "did you mean 'letter'?"),
    (("grow", "--task", "x" * 300), "expected one of digits"),
    (("grow", "--task", "letter", "--controller", "erly"), "Other controllers:"),
    (("grow", "--task", "letter", "--controller", "latest"), "esper train first"),
    (("grow", "--task", "letter", "--out", "grown.onnx"), "must end in .pt2"),
    (("grow", "--task", "letter", "--out", "no/grown.pt2"), "no is not a writable"),
    (("grow", "--task", "letter", "--out", "a\0b.pt2"), "expected a path"),
    *(
        (("grow", "--task", "letter", "--budget", budget), "number above 0")
        for budget in ("x", "0", "-1", "nan", "inf", "")
    ),
]


def test_wrong_arguments_are_refused_in_one_line(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in REFUSED:
        assert message in refused(capsys, *arguments)
    assert not [*tmp_path.iterdir()]


def test_a_file_that_is_there_is_not_grown_over(capsys, tmp_path):
    there = tmp_path / "there.pt2"
    there.write_text("mine")
    arguments = ("grow", "--task", "letter", "--out", str(there))
    assert "there.pt2 exists already" in refused(capsys, *arguments)
    assert there.read_text() == "mine"


def test_every_command_has_help_with_examples_and_is_named(capsys):
    whole = call(capsys, "--help")
    assert whole.code == 0
    assert call(capsys, "--version").out == f"esper {esper.__version__}\n"
    for name, command in COMMANDS.items():
        result = call(capsys, name, "--help")
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith(f"usage: esper {name} ")
        assert max(map(len, result.out.splitlines())) <= 80
        assert "examples:\n  e" in result.out
        assert f"esper {name}" in result.out.partition("examples:")[2]
        listed = " ".join(whole.out.partition(f"\n    {name}")[2].split())
        assert listed.startswith(command.help)


@pytest.mark.parametrize("arguments", [["runs", "--help"], ["tran"]])
def test_what_needs_nothing_imports_nothing_heavy(arguments):
    script = (
        "import sys, esper.cli\n"
        f"esper.cli.main({arguments})\n"
        "heavy = {'torch', 'numpy', 'numba', 'rich', 'scipy', 'pydantic'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = run_python(script)
    assert done.code == 0, done.err
    assert done.out or done.err.startswith("esper: ")


def test_runs_are_listed_without_torch(tmp_path):
    folder = make_run(tmp_path, "mine")
    tensors = {"weights": torch.zeros(3)}
    CheckpointFolder(folder / "checkpoints").publish(7, tensors, {}, score=0.25)
    script = (
        "import sys, esper.cli\n"
        f"assert esper.cli.main(['runs', '--runs', {str(tmp_path)!r}]) == 0\n"
        "assert not {'torch', 'numba', 'scipy'} & set(sys.modules)\n"
    )
    listed = run_python(script)
    assert listed.code == 0, listed.err
    assert "mine" in listed.out
    assert "0.2500" in listed.out


def test_tasks_and_blueprints_are_listed(capsys):
    for command, words in (
        ("tasks", ("letter", "20,000")),
        ("blueprints", ("widen_16", "depthwise")),
    ):
        result = call(capsys, command)
        assert result.code == 0
        assert all(word in result.out for word in words)


def test_the_blueprints_of_the_example_can_be_planted():
    (line,) = [
        each
        for each in COMMANDS["blueprints"].examples.splitlines()
        if "esper train" in each
    ]
    option, names = line.split()[-2:]
    worlds = check_worlds(resolve({option.removeprefix("--"): names}))
    planted = [blueprint.name for blueprint in worlds[0].spec.blueprints]
    assert planted == names.split(",")


def test_hosts_are_recorded_once(capsys, tmp_path):
    small = ("--tasks", "1", "--scripts", "2", "--workers", "0")
    for _ in range(2):
        result = call(capsys, "record", str(tmp_path / "here"), *small)
        assert result.code == 0
        assert "1 tasks are in" in result.out
        names = sorted(file.name for file in (tmp_path / "here").iterdir())
        assert names == ["000000.safetensors", "lock", "recording.toml"]
    other = call(capsys, "record", str(tmp_path / "here"), "--tasks", "2")
    assert other.code == 2
    assert "recordings with other settings" in other.err


def test_an_interruption_has_its_own_code(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "tasks", replace(COMMANDS["tasks"], run=interrupt))
    result = call(capsys, "tasks")
    assert (result.code, result.err) == (130, "esper: interrupted\n")
