"""Several ranks grow one network: the same seeds, decisions and weights, to the bit."""

import json
import subprocess
import sys

import pytest

from tests.ddp_script import BATCHES, PER_DECISION


def train(folder, ranks):
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "tests.ddp_script", str(folder)]
    runs = [
        subprocess.Popen([*command, str(rank), str(ranks)]) for rank in range(ranks)
    ]
    try:
        assert [run.wait(timeout=300) for run in runs] == [0] * ranks
    finally:
        for run in runs:
            run.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_grow_the_same_network(ranks, tmp_path):
    first, *others = train(tmp_path / "ranks", ranks)
    assert len(first["hashes"]) == BATCHES // PER_DECISION
    assert len({*first["hashes"]}) == len(first["hashes"])  # it learns
    for other in others:
        for key in ("hashes", "actions", "seeds", "incidents", "weights", "losses"):
            assert first[key] == other[key], key
    assert first["seeds"]
    assert len([a for a in first["actions"] if a != "wait"]) > 1
    assert first["incidents"][0].startswith("refused: the loss is not finite")
    (alone,) = train(tmp_path / "alone", 1)
    assert first["actions"] == alone["actions"]
    assert first["seeds"] == alone["seeds"]
    assert first["incidents"] == alone["incidents"]
    assert first["weights"] == pytest.approx(alone["weights"], rel=0.02, abs=0.02)
    unwrapped, different = first["refused"]
    assert "give the Grower the DistributedDataParallel model itself" in unwrapped
    assert "the ranks hold different weights" in different
