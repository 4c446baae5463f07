"""Several ranks grow one network: the same seeds, decisions and weights, to the bit."""

import subprocess
import sys
from contextlib import closing

import pytest
import torch

from esper.runs.database import open_store
from esper.runs.run import STORE, Run
from tests import ddp_script
from tests.ddp_script import PER_DECISION


def train(folder, ranks, batches):
    command = [sys.executable, "-W", "ignore", "-m", "tests.ddp_script", str(folder)]
    runs = [
        subprocess.Popen([*command, str(rank), str(ranks), str(batches)])
        for rank in range(ranks)
    ]
    try:
        assert [run.wait(timeout=900) for run in runs] == [0] * ranks
    finally:
        for run in runs:
            run.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


@pytest.mark.filterwarnings("ignore:a batch was refused")
@pytest.mark.parametrize(
    ("ranks", "batches"),
    [
        (2, 24),
        pytest.param(2, 200, marks=pytest.mark.slow),
        pytest.param(4, 200, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_grow_the_network_that_one_process_grows(ranks, batches, tmp_path):
    taken = {"kind": "evaluation"}
    Run.create(tmp_path, "taken", "", taken).close()
    first, *others = train(tmp_path, ranks, batches)
    assert len(first["hashes"]) == batches // PER_DECISION
    assert len({*first["hashes"]}) == len(first["hashes"])  # it learns
    for other in others:
        for key in ("hashes", "actions", "seeds", "incidents", "losses"):
            assert first[key] == other[key], key
    assert first["seeds"]
    assert len([a for a in first["actions"] if a != "wait"]) > 1
    assert first["incidents"][0].startswith("refused: the loss is not finite")
    with torch.random.fork_rng(devices=[]):
        alone = ddp_script.train(0, 1, batches)
    for key in ("actions", "seeds", "incidents"):
        assert first[key] == alone[key], key
    assert first["weights"].keys() == alone["weights"].keys()
    for name, weight in first["weights"].items():
        torch.testing.assert_close(
            weight, alone["weights"][name], rtol=1e-9, atol=1e-9, msg=name
        )
    with closing(open_store(tmp_path / "run0" / STORE)) as db:
        query = "SELECT count(*), count(DISTINCT attempt) FROM live_decisions"
        assert db.execute(query).fetchone() == (batches // PER_DECISION, 1)
    assert [path.name for path in tmp_path.glob("run*")] == ["run0"]
    unwrapped, different, sharded, parallel, logged = first["refused"]
    assert "has another training, of kind 'evaluation'" in logged
    for other in others:
        assert "the logger failed on the first rank" in other["refused"][-1]
    assert "Pass the DistributedDataParallel model itself" in unwrapped
    assert "the ranks hold different weights" in different
    assert "the host is sharded (FSDP)" in sharded
    assert "the host is wrapped in DataParallel" in parallel
