"""An evaluation is stored as it goes, and refused before anything is written."""

import io
import tomllib
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from esper.contracts.errors import InvalidInputError, RunLockedError
from esper.evaluation.evaluate import EvaluateConfig, evaluate, run_evaluation
from esper.evaluation.evaluation import evaluate_controller, evaluate_static
from esper.evaluation.summary import summary_of
from esper.report.page import write_report
from esper.runs.controllers import load_controller
from esper.runs.database import open_store, rows
from esper.runs.records import is_learned
from esper.runs.run import STORE, Run
from esper.runs.settings import as_toml, construct, table_of
from esper.runs.train_config import Budget, EvalConfig, TrainConfig, World
from esper.tamiyo.shipped import shipped
from esper.tasks import catalogue
from esper.tasks.catalogue import register_task
from esper.tasks.hosts import MlpHost
from esper.training.train import begin_run
from esper.workers.jobs import workers
from tests.evaluation.test_evaluation import lost, tiny


@pytest.fixture
def _few_tasks():
    """A catalogue of one task that can be evaluated and one that cannot."""
    before = dict(catalogue._BUILDERS)
    catalogue._BUILDERS.clear()
    register_task("tiny")(tiny)
    register_task("lost")(lost)
    yield
    catalogue._BUILDERS.clear()
    catalogue._BUILDERS.update(before)


def config(folder, **changes):
    some = {
        "tasks": ("tiny",),
        "controllers": ("never", "early", "static"),
        "hosts": 2,
        "name": "it",
        "runs": str(folder / "runs"),
    }
    return EvaluateConfig(**some | changes)


def stored(path):
    with closing(open_store(path / STORE)) as db:
        return list(rows(db, "live_evaluations"))


def quiet():
    return Console(file=io.StringIO())


def timeless(found):
    return sorted(
        (row["controller"], row["host"], row["return"], row["test"], row["area"])
        for row in found
    )


pytestmark = pytest.mark.usefixtures("_few_tasks")


def test_the_store_holds_what_was_evaluated(tmp_path):
    path, skipped = evaluate(config(tmp_path), quiet())
    found = stored(path)
    assert skipped == {}
    arms = ("never", "early", "static")
    assert [row["controller"] for row in found] == [arm for arm in arms for _ in (0, 1)]
    assert {(row["stage"], row["task"], row["round"]) for row in found} == {
        ("test", "tiny", 0)
    }
    early = evaluate_controller("early", tiny(), 2, 0)
    for host, row in enumerate(found[2:4]):
        assert row["host"] == host
        assert row["return"] == early.returns[host]
        assert row["training_macs"] == early.training_macs[host]
        assert (row["score"], row["area"]) == (early.score[host], early.area[host])
        assert row["seconds"] > 0
    run = Run.read(path)
    assert run.finished == {"arms": 3, "hosts": 2}
    assert run.versions["kind"] == "evaluation"


def test_processes_find_what_one_process_finds(tmp_path):
    """The task is not in the catalogue of the other processes; it is sent to them."""
    alone, _ = evaluate(config(tmp_path), quiet())
    with workers(2) as pool:
        together, _ = evaluate(config(tmp_path, name="two"), quiet(), pool)
    assert timeless(stored(alone)) == timeless(stored(together))


def test_tables_and_conclusions_are_those_of_the_store(tmp_path, capsys):
    path = run_evaluation(config(tmp_path, hosts=3))
    out = capsys.readouterr().out
    assert "tiny: arm 3/3, static: return" in out
    assert "tiny: 3 unseen hosts" in out
    for line in summary_of(path).conclusions:
        assert line in out
    assert out.splitlines()[-1] == f"Stored in {path}"


def test_choices_among_sizes_are_stored_and_shown_like_other_arms(tmp_path, capsys):
    names = (*TWO, "never", "best-size", "envelope", "halving")
    world = World(clock="compute", stop="anytime", horizon=22)
    path = run_evaluation(config(tmp_path, controllers=names, hosts=3, world=world))
    assert "tiny: arm 6/6" in capsys.readouterr().out
    by_arm = {name: [] for name in names}
    for row in stored(path):
        by_arm[row["controller"]].append(row)
    returns = {n: np.mean([row["return"] for row in by_arm[n]]) for n in names}
    assert returns["best-size"] == max(returns[name] for name in TWO)
    assert returns["envelope"] >= returns["best-size"] - 1e-6
    assert np.isnan(by_arm["halving"][0]["area"])
    (table,) = summary_of(path).tasks
    assert {arm.name for arm in table.arms} == {*names}
    assert not any(arm.learned for arm in table.arms)
    assert "halving" in write_report(path).read_text(encoding="utf-8")


def test_schedules_that_need_an_end_are_told_where_there_is_none(tmp_path, capsys):
    names = ("never", "early", "periodic", "large-then-cut")
    world = World(clock="compute", stop="anytime", horizon=4)
    path = run_evaluation(config(tmp_path, controllers=names, hosts=1, world=world))
    text = "its times are fractions of the horizon, which is unknown"
    said = " ".join(capsys.readouterr().out.split())
    assert {name for name in names if f"{name}: {text}" in said} == {*names[2:]}
    with closing(open_store(path / STORE)) as db:
        notes = [note["text"] for note in rows(db, "live_notes")]
    assert [note.split(":")[0] for note in notes] == [*names[2:]]


def test_the_configuration_is_written_whole(tmp_path):
    made = config(tmp_path, world=World(rent=(0.0, 0.02)), name=None)
    table = tomllib.loads(as_toml(made))
    assert table["controllers"] == ["never", "early", "static"]
    assert table["name"] == "none"
    given = table_of(as_toml(made), EvaluateConfig)
    assert construct(EvaluateConfig, given) == made


TWO = ("static-x1", "static-x2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"controllers": ("erly",)}, "controller 'erly'; did you mean 'early'"),
        ({"controllers": ()}, "controllers is empty"),
        ({"controllers": ("never", "static")}, "'static' needs the size of a trained"),
        ({"controllers": ("never", "envelope")}, "Add at least two of static-x1"),
        ({"controllers": (*TWO, "halving")}, "Set world.clock to compute"),
        (
            {"world": World(slots=100_000_000)},
            r"slots must be less than",
        ),
        ({"controllers": ("runs/nobody",)}, "there is no run .runs/nobody"),
        ({"tasks": ("tinny",)}, "no task 'tinny'; did you mean 'tiny'"),
        ({"tasks": ("lost",)}, "pip install something"),
        ({"hosts": 0}, "hosts must be greater than or equal to 1"),
        ({"rng_seed": -1}, "rng_seed must be"),
        ({"name": "../x"}, "cannot be called"),
        ({"world": World(blueprints=("attention",))}, "cannot plant 'attention'"),
        ({"runs": "not/there/at/all"}, "create it first"),
    ],
)
def test_nothing_is_written_if_an_argument_is_bad(tmp_path, changes, message):
    before = sorted(Path().iterdir())
    with pytest.raises(InvalidInputError, match=message) as caught:
        evaluate(config(tmp_path, **changes), quiet())
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.iterdir()]
    assert sorted(Path().iterdir()) == before


def test_nothing_left_to_judge_is_an_error_with_the_reasons(tmp_path):
    del catalogue._BUILDERS["tiny"]
    with pytest.raises(
        InvalidInputError, match="lost: expected a package; pip install"
    ):
        evaluate(config(tmp_path, tasks=()), quiet())
    assert not [*tmp_path.iterdir()]


def test_a_name_is_used_once_and_arms_named_twice_are_evaluated_once(tmp_path):
    made = config(tmp_path, tasks=("tiny", "tiny"), controllers=("never", "never"))
    path, _ = evaluate(made, quiet())
    assert len(stored(path)) == 2
    before = (path / STORE).read_bytes()
    with pytest.raises(RunLockedError):
        evaluate(config(tmp_path, controllers=("never",)), quiet())
    assert (path / STORE).read_bytes() == before


def test_static_is_measured_by_early_of_its_own_task(tmp_path):
    wide = replace(tiny(), name="wide", host=MlpHost((4, 12, 3)))
    register_task("wide")(lambda: wide)
    path, _ = evaluate(config(tmp_path, tasks=("tiny", "wide")), quiet())
    found = stored(path)
    assert len(found) == 2 * 3 * 2
    for task in (tiny(), wide):
        reference = evaluate_controller("early", task, 2, 0)
        expected = evaluate_static("static", task, 2, 0, reference)
        rows_ = [
            r for r in found if (r["task"], r["controller"]) == (task.name, "static")
        ]
        assert [row["added"] for row in rows_] == expected.added.tolist()
        assert [row["test"] for row in rows_] == expected.test.tolist()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one round in the simulated world."""
    settings = TrainConfig(
        tasks=("simulated",),
        num_envs=2,
        name="fern",
        runs=str(tmp_path_factory.mktemp("trained") / "runs"),
        budget=Budget(rounds=1),
    )
    return begin_run(settings).path


def test_a_run_that_learnt_is_an_arm_by_its_name_and_the_reference(tmp_path, trained):
    arms = ("never", str(trained), "early", "static")
    path, _ = evaluate(config(tmp_path, controllers=arms), quiet())
    found = {row["controller"]: row["added"] for row in stored(path)}
    assert found.keys() == {"never", "fern", "early", "static"}
    expected = evaluate_controller(load_controller(trained), tiny(), 2, 0).added.mean()
    mean = np.mean([r["added"] for r in stored(path) if r["controller"] == "fern"])
    assert mean == expected
    assert found["static"] <= mean
    said = " ".join(summary_of(path).conclusions)
    assert "'static': matched to the final size or compute of 'fern'" in said


def test_a_checkpoint_is_an_arm_too_and_none_is_named_twice(tmp_path, trained):
    one = max((trained / "checkpoints").iterdir())
    path, _ = evaluate(config(tmp_path, controllers=(str(one),)), quiet())
    assert {row["controller"] for row in stored(path)} == {f"fern@{one.stem}"}
    twice = (str(trained), f"{trained}/")
    with pytest.raises(InvalidInputError, match="'fern' twice"):
        evaluate(config(tmp_path, controllers=twice, name="two"), quiet())


def test_a_run_is_found_by_its_name_beside_the_evaluation(trained):
    made = config(trained.parents[1], controllers=("fern",), name="other")
    path, _ = evaluate(made, quiet())
    assert {row["controller"] for row in stored(path)} == {"fern"}


def test_a_folder_that_is_called_like_a_control_is_not_meant(tmp_path, monkeypatch):
    (tmp_path / "early").mkdir()
    monkeypatch.chdir(tmp_path)
    path, _ = evaluate(config(tmp_path, controllers=("early",)), quiet())
    assert {row["controller"] for row in stored(path)} == {"early"}


class Interrupting(io.StringIO):
    """A file in front of which Ctrl-C is pressed once a line is written."""

    def write(self, text):
        raise KeyboardInterrupt


def test_rows_are_stored_before_an_arm_is_shown_and_an_interruption_keeps_them(
    tmp_path,
):
    with pytest.raises(KeyboardInterrupt):
        evaluate(config(tmp_path), Console(file=Interrupting()))
    run = Run.read(tmp_path / "runs" / "it")
    assert run.finished is None
    assert [row["controller"] for row in stored(run.path)] == ["never"] * 2
    assert [task.task for task in summary_of(run.path).tasks] == ["tiny"]
    assert [one.state for one in Run.list(tmp_path / "runs")] == ["stopped"]


def test_the_shipped_controller_is_evaluated_by_name_and_only_if_it_is_named(tmp_path):
    arms = ("never", "tamiyo", "static")
    path, _ = evaluate(config(tmp_path, controllers=arms), quiet())
    rows = [row for row in stored(path) if row["controller"] == "tamiyo"]
    expected = evaluate_controller(shipped(), tiny(), 2, 0)
    found = [row["return"] for row in sorted(rows, key=lambda row: row["host"])]
    np.testing.assert_array_equal(found, expected.returns)
    assert is_learned("tamiyo")
    assert "tamiyo" not in (*EvalConfig().controllers, *EvaluateConfig().controllers)
