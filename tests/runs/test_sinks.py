"""Loggers write what their own libraries read."""

import json
import sys
from importlib.util import find_spec
from time import sleep

import pytest

from esper.contracts.errors import EsperError
from esper.runs.sinks import RunInfo, Sinks

NAMES = ("round/mean_return", "update/kl")
ROWS = {4: (0.5, 0.25), 8: (1.5, 0.125)}


def logged(name, folder):
    """Log the rows with a library's own logger."""
    info = RunInfo(name="mine", folder=folder, settings={"rollout_steps": 4})
    sinks = Sinks([f"{name}:{folder}"], info)
    for step, values in ROWS.items():
        sinks.log(dict(zip(NAMES, values, strict=True)), step)
    sinks.close()


def wandb_records(data):
    """Messages of an offline run: a log of LevelDB with a header of seven bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, message = 7, b""
    while at + 7 <= len(data):
        if (left := 32_768 - at % 32_768) < 7:  # the end of a block is empty
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        message += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole message, or its last part
            yield Record.FromString(message)
            message = b""


def read_wandb(folder):
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, settings, records = {}, {}, []
    for _ in range(600):  # a process of its own writes
        records = [*wandb_records(file.read_bytes())]
        if any(record.HasField("exit") for record in records):
            break
        sleep(0.1)
    for record in records:
        for item in (*record.run.config.update, *record.config.update):
            settings[item.key] = json.loads(item.value_json)
        items = record.history.item
        row = {".".join(i.nested_key) or i.key: i.value_json for i in items}
        if row:
            values = (json.loads(row[name]) for name in NAMES)
            rows[json.loads(row["_step"])] = tuple(values)
    return rows, settings["rollout_steps"]


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("esper")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "mine"
    assert run.info.status == "FINISHED"
    histories = [client.get_metric_history(run.info.run_id, name) for name in NAMES]
    rows = {row[0].step: tuple(m.value for m in row) for row in zip(*histories)}  # noqa: B905
    return rows, int(run.data.params["rollout_steps"])


def read_trackio(folder):
    import trackio

    assert (folder / "esper.db").exists()
    (run,) = trackio.Api().runs("esper")
    from trackio.sqlite_storage import SQLiteStorage

    found = SQLiteStorage.get_logs("esper", "mine", run_id=run.id)
    rows = {row["step"]: tuple(row[name] for name in NAMES) for row in found}
    return rows, run.config["rollout_steps"]


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    ("name", "package", "read"),
    [
        ("wandb", "wandb", read_wandb),
        ("mlflow", "sqlalchemy", read_mlflow),
        ("trackio", "trackio", read_trackio),
    ],
)
def test_a_tracker_reads_what_was_logged(name, package, read, tmp_path, monkeypatch):
    # Trackio reads its folder when it is imported.
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    for module in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)
    for variable in ("WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_DIR"):
        monkeypatch.delenv(variable, raising=False)
    logged(name, tmp_path)
    rows, setting = read(tmp_path)
    assert rows == ROWS
    assert setting == 4


def test_all_loggers_get_the_same_rows_and_own_objects_stay_open(tmp_path):
    class Mine:
        def __init__(self):
            self.rows = []

        def log(self, values, step):
            self.rows.append((step, values))

        def close(self):
            raise AssertionError

    mine = Mine()
    info = RunInfo(name="mine", folder=tmp_path, settings={})
    sinks = Sinks([mine, "csv"], info)
    sinks.log({"a": 1.0}, 4)
    sinks.close()
    assert mine.rows == [(4, {"a": 1.0})]
    assert (tmp_path / "progress.csv").read_text().split() == ["step,a", "4,1.0"]


def test_rows_of_another_training_are_not_continued(tmp_path):
    info = RunInfo(name="mine", folder=tmp_path, settings={})
    sinks = Sinks(["csv"], info)
    sinks.log({"a": 1.0}, 4)
    sinks.close()
    with pytest.raises(EsperError, match="rows of another training, after step 0"):
        Sinks(["csv"], info)
