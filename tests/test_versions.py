"""Files of other versions of Esper are refused in one line that names both versions."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from shutil import copytree

import pytest
import torch
from torch import nn

import esper
from esper.contracts.errors import InvalidInputError
from esper.files import FORMAT, manifest_of, pack, read_safetensors, require_readable
from esper.growth.saving.saved_topology import TOPOLOGY
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.database import open_store
from esper.runs.run import VERSIONS, Run
from esper.runs.store import Store
from esper.tamiyo import shipped
from esper.training.recordings import read_recording

OLD = "0.1.0"
X = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def old_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def old_file(file):
    """Rewrite a sealed file as if Esper 0.1.0 had written it."""
    tensors, manifest = read_safetensors(file)
    file.write_bytes(pack(tensors, replace(manifest, made_by={"esper": OLD})))


def host():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def grower():
    model = host()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = esper.Grower(model, optimizer, ["0->2"], example=X, controller="never")
    made.plant("0->2#0", "widen_x1.5", tempo="AT_ONCE")
    return made


def old_topology(state):
    """Give the saved topology in a state the format number of Esper 0.1.0."""
    text = json.loads(bytes(state[TOPOLOGY].tolist()))
    raw = bytearray(json.dumps(text | {"format": 2}).encode())
    return {**state, TOPOLOGY: torch.frombuffer(raw, dtype=torch.uint8)}


def run(path):
    Run.create(path.parent, path.name, "", {}).close()
    old_json(path / VERSIONS, esper=OLD)
    return lambda: Run.read(path)


def store(path):
    Store(path).close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1")
    return lambda: open_store(path)


def checkpoint(path):
    folder = CheckpointFolder(path)
    old_file(folder.publish(1, {"a": torch.ones(2)}, {}))
    return folder.latest


def agent(path):
    learner = esper.PPO("CartPole-v1", num_envs=1)
    learner.save(path)
    learner.close()
    old_file(path)
    return lambda: esper.PPO.load(path)


def recording(path):
    path.write_bytes(pack({}, manifest_of({})))
    old_file(path)
    return lambda: read_recording(path)


def controller(path):
    copytree(shipped.__path__[0], path)
    old_json(path / shipped.MANIFEST, format=2)
    return lambda: shipped.read(path)


def network(path):
    path.write_bytes(pack(old_topology(grower().model.host.state_dict())))
    return lambda: esper.load(path, host())


def state(path):
    made = grower()
    found = made.state_dict() | {"format": 8}
    return lambda: made.load_state_dict(found)


KINDS = [run, store, checkpoint, agent, recording, controller, network, state]


@pytest.mark.parametrize("kind", KINDS)
def test_files_of_version_0_1_0_are_refused_by_version(kind, tmp_path):
    read = kind(tmp_path / "old")
    with pytest.raises(InvalidInputError) as refused:
        read()
    line = f" was written by Esper {OLD} and this is Esper {esper.__version__}. "
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("version", ["0.2.0", "0.2.0.dev0", "0.2.17+cpu", FORMAT])
def test_files_of_the_same_minor_version_are_read(version):
    require_readable("file", version, "Start a new run.")


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.1.9", "file was written by Esper 0.1.9 and this is Esper {}. Train again."),
        ("99.0", "file was written by Esper 99.0 and this is Esper {}. Update Esper."),
        *(
            (bad, "an unknown version of Esper and this is Esper {}. Train again.")
            for bad in (
                *(None, "", "0", "0.2\n", "0.2.0 \x1b[2J", "٠.٢", "0.2" * 999),
                *("9" * 5 + ".1", FORMAT + 1, True, 0.2, [0, 2], {"esper": "0.2"}),
            )
        ),
    ],
)
def test_other_versions_are_refused_whatever_the_file_says(version, line):
    with pytest.raises(InvalidInputError) as refused:
        require_readable("file", version, "Train again.")
    assert str(refused.value).endswith(line.format(esper.__version__))
    assert len(str(refused.value)) < 120


def test_a_manifest_without_a_version_is_refused(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(pack({}, replace(manifest_of({}), made_by={})))
    with pytest.raises(InvalidInputError, match="f was written by an unknown version"):
        read_safetensors(file)
