"""Runs that were damaged, forged or swapped: one line, nothing lost, nothing hung."""

import os
import random
import shutil
import signal
import sqlite3
from contextlib import closing

import pytest
import torch

from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.report import write_report
from esper.runs.controllers import load_controller
from esper.runs.database import open_store
from esper.runs.run import Run
from esper.runs.store import Store, export
from esper.training.loop import Callback
from esper.training.train import begin_run, resume_run
from tests.cli.calls import call, refused
from tests.runs.stores import fill
from tests.training.test_train import read, simulated
from tests.training.training_script import Log

ROUNDS = 4


class Stop(Callback):
    """Ends a run by a signal in its third round."""

    def on_rollout(self, trainer, rollout):
        if trainer.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run that was interrupted after three of four rounds."""
    root = tmp_path_factory.mktemp("runs")
    result = begin_run(simulated(root), [Stop()])
    assert result.signal == signal.SIGTERM
    return result.path


@pytest.fixture
def run(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "runs" / "run")


def resumed(path):
    """Go on with a run to its end; returns its warnings."""
    log = Log()
    assert resume_run(path, [log]).rounds == ROUNDS
    return log.warnings


# Stores.


def views(path, statement):
    with closing(sqlite3.connect(path)) as db:
        db.executescript(statement)


ENDLESS = "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c)"


def endless_view(path):
    columns = "1 AS attempt, n AS seq, n AS round, n AS env_steps, 0.1 AS mean_return"
    views(
        path,
        f"DROP VIEW live_rounds; CREATE VIEW live_rounds AS {ENDLESS} "
        f"SELECT {columns}, 1.0 AS seconds, 0 AS refused FROM c",
    )


def trigger(path):
    views(path, "CREATE TRIGGER t AFTER INSERT ON rounds BEGIN DELETE FROM steps; END")


def wrong_type(path):
    """A text where the schema swears that there are numbers only."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        (text,) = db.execute(
            "SELECT sql FROM sqlite_schema WHERE name = 'rounds'"
        ).fetchone()
        change = "UPDATE sqlite_schema SET sql = ? WHERE name = 'rounds'"
        db.execute(change, (text.replace("STRICT, ", ""),))
        db.execute("PRAGMA schema_version = 1000")
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("UPDATE rounds SET env_steps = 'many'")
        db.execute("PRAGMA writable_schema = ON")
        db.execute(change, (text,))
        db.execute("PRAGMA schema_version = 1001")


def torn(path):
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(random.Random(0).randbytes(8192))


def another_runs(path):
    path.unlink()
    with Store(path, "somebody else") as store:
        store.begin_attempt()


def link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGES = [endless_view, trigger, wrong_type, torn, another_runs, link, pipe]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_store_is_refused_by_readers_and_replaced_by_resume(run, damage):
    store = run / "events.sqlite"
    with closing(sqlite3.connect(store)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    damage(store)
    with pytest.raises(InvalidInputError) as error:
        write_report(run)
    assert str(error.value).isprintable()
    if damage is not another_runs:  # a file alone does not tell whose it is
        with pytest.raises(InvalidInputError):
            export(store, run / "out", "csv")
    first, second = resumed(run)
    assert first.endswith("events.sqlite.damaged-1; a new store was started.")
    assert second.startswith("3 of the rounds 1 to 3 are not in this store")
    assert [row["round"] for row in read(run, "live_rounds")] == [4]
    notes = [row["kind"] for row in read(run, "live_notes")]
    assert notes == ["gap", "store", "store"]
    assert os.path.lexists(run / "events.sqlite.damaged-1")


def test_a_log_that_was_deleted_is_told(run):
    with closing(sqlite3.connect(run / "events.sqlite")) as db:
        db.execute("DELETE FROM rounds WHERE round = 2")
        db.commit()
    (line,) = resumed(run)
    assert line.startswith("1 of the rounds 1 to 3 are not in this store")


def test_slots_that_no_plot_can_show_are_refused(run):
    with closing(sqlite3.connect(run / "events.sqlite")) as db:
        db.execute("UPDATE events SET slot = 10000000")
        db.commit()
    with pytest.raises(
        InvalidInputError, match="slot is 10,000,000, expected 0 to 1,000"
    ):
        write_report(run)


def test_whatever_is_asked_of_a_store_has_a_deadline(tmp_path):
    fill(tmp_path / "events.sqlite")
    with (
        closing(open_store(tmp_path / "events.sqlite", seconds=0.1)) as db,
        pytest.raises(sqlite3.OperationalError, match="interrupted"),
    ):
        db.execute(f"{ENDLESS} SELECT count(*) FROM c").fetchall()


# Checkpoints.


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("place", [40, -1], ids=["header", "weights"])
def test_a_checkpoint_that_is_not_the_best_is_never_taken_in_silence(run, place):
    best = load_controller(run).round
    flip(run / "checkpoints" / f"{best:06d}.safetensors", place)
    with pytest.warns(EsperWarning, match="Round [0-9]+ is used instead") as caught:
        assert load_controller(run).round != best
    assert len(caught) == 1
    line = str(caught[0].message)
    assert f"{best:06d}.safetensors is damaged" in line
    assert len(line) <= 200


def test_the_command_line_prints_such_a_warning(run, tmp_path, capsys):
    flip(run / "checkpoints" / "000003.safetensors", -1)
    with Run.open(run) as opened:
        opened.finish({"rounds": 3})
    out = ["--format", "controller", "--out", str(tmp_path / "out")]
    result = call(capsys, "export", str(run), *out)
    assert result.code == 0
    assert result.err.startswith("esper: warning: run/checkpoints/000003.safetensors")
    assert result.err.count("\n") == 1


def test_pruning_removes_only_what_was_written_here(run):
    kept = run / "checkpoints"
    (kept / "000000.safetensors").unlink(missing_ok=True)
    (kept / "000000.safetensors").write_bytes(b"somebody's own")
    (kept / "7").mkdir()
    folder = Run.read(run).checkpoints(keep=1)
    folder.publish(4, folder.load(3).tensors, {})
    assert folder.steps() == [0, 4]
    assert (kept / "7").is_dir()


@pytest.mark.parametrize("name", ["checkpoints", "plots"])
def test_folders_that_lead_out_of_a_run_are_not_followed(run, name):
    outside = run.parent / "outside"
    if (run / name).is_dir():
        (run / name).rename(outside)
    else:
        outside.mkdir()
    before = sorted(os.listdir(outside))
    (run / name).symlink_to(outside)
    use = resume_run if name == "checkpoints" else write_report
    with pytest.raises(InvalidInputError, match=f"{name} is a link. Use the folder"):
        use(run)
    assert sorted(os.listdir(outside)) == before


# Lists and sizes.


@pytest.mark.timeout(60)
def test_one_bad_folder_does_not_disable_the_list(run, capsys):
    root = run.parent
    for name in ("pipe", "loop", "\x1b[2Jred"):
        shutil.copytree(run, root / name)
    for name, file in (("pipe", "lock"), ("loop", "config.toml")):
        (root / name / file).unlink()
    os.mkfifo(root / "pipe" / "lock")
    (root / "loop" / "config.toml").symlink_to("config.toml")
    result = call(capsys, "runs", "--runs", str(root))
    assert result.code == 0
    assert "\x1b" not in result.out
    assert {"run", "pipe", "loop", "?[2Jred"} <= {*result.out.split()}
    refused(capsys, "train", "--resume", str(root / "pipe"))


def test_a_training_that_does_not_fit_into_memory_is_refused(
    tmp_path, capsys, monkeypatch
):
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 18}
    monkeypatch.setattr("os.sysconf", lambda name: sizes[name])
    monkeypatch.chdir(tmp_path)
    for given in (["--num_envs", "65536"], ["--learner.policy.width", "4096"]):
        line = refused(capsys, "train", "--preset", "simulated", *given)
        assert "GB of memory, this machine has 1 GB. Lower num_envs or" in line
    assert os.listdir(tmp_path) == []


def test_sizes_of_a_policy_are_evaluated_before_it_is_made(run):
    config = run / "config.toml"
    text = config.read_text()
    assert "width = 8" in text
    config.write_text(text.replace("width = 8", "width = 4096"))
    for use in (load_controller, resume_run):
        with pytest.raises(
            InvalidInputError, match=r"none of 3 .*, expected float32\[4096"
        ):
            use(run)


# Numbers.


class Poison(Callback):
    """Puts NaN or infinity somewhere, once, in the second round."""

    def __init__(self, where, value):
        self._where, self._value, self.done = where, value, False

    def on_rollout(self, trainer, rollout):
        if trainer.round == 1 and not self.done:
            self.done = True
            tensor = self._where(trainer)
            with torch.no_grad():
                tensor[(0,) * tensor.ndim] = self._value


def moment(name):
    def find(loop):
        agent = loop.algorithm.agent
        return agent.optimizer.state[agent.parameters[3]][name]

    return find


PLACES = {
    "weight": lambda t: t.algorithm.agent.parameters[3],
    "last bias": lambda t: t.algorithm.policy.op_out.bias,
    "moment": moment("exp_avg"),
    "square": moment("exp_avg_sq"),
    "value mean": lambda t: t.algorithm.policy.value_mean,
    "value scale": lambda t: t.algorithm.policy.value_scale,
    "return mean": lambda t: t.algorithm.agent.moments.mean,
    "stored reward": lambda t: t.algorithm.agent.buffer.rewards,
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        *((place, float("nan")) for place in PLACES),
        ("weight", float("inf")),
        ("last bias", 3e38),
    ],
)
def test_a_broken_number_takes_the_run_back_and_it_goes_on(tmp_path, place, value):
    poison, log = Poison(PLACES[place], value), Log()
    result = begin_run(simulated(tmp_path), [poison, log])
    assert poison.done
    assert (result.rounds, result.signal) == (ROUNDS, None)
    assert [row["round"] for row in read(result.path, "live_rounds")] == [1, 2, 3, 4]
    newest = Run.read(result.path).checkpoints().latest()
    assert newest.manifest.step == ROUNDS
    refused = sum(row["refused"] for row in read(result.path, "live_rounds"))
    told = [line for line in log.warnings if "restarting from round" in line]
    assert told or refused, log.warnings
    assert int(newest.tensors["rollbacks"]) == len(told)
