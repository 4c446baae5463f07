from dataclasses import replace

import pytest
import torch

from esper.contracts.errors import InvalidInputError
from esper.fitting import (
    ShuffledBatches,
    check_free,
    grow,
    summary_lines,
    write,
)
from esper.tamiyo.restricted import Restricted
from esper.tasks.family import drawn_task
from tests.environment.test_growing import LONG, blobs


@pytest.fixture(scope="module")
def grown():
    return grow(LONG, budget=20.0, progress=False)


def test_a_grown_network_is_larger_and_loads_without_us(grown, tmp_path):
    fitted, test = grown
    file = tmp_path / "grown.pt2"
    write(fitted.model, LONG, file)
    rows = blobs(0).test.features
    program = torch.export.load(file).module()
    with torch.no_grad():
        expected = fitted.model(rows)
        torch.testing.assert_close(program(rows), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            program(rows[:1]), expected[:1], rtol=1e-5, atol=1e-6
        )
    size = sum(parameter.numel() for parameter in fitted.model.parameters())
    assert size > LONG.host.parameters
    assert [path.name for path in tmp_path.iterdir()] == ["grown.pt2"]
    right = (expected.argmax(1) == blobs(0).test.labels).float().mean()
    assert test == pytest.approx(float(right))


def test_the_same_number_grows_the_same_network():
    task = replace(LONG, horizon=5)
    one, two = (grow(task, budget=20.0, progress=False) for _ in range(2))
    models = [fitted.model.parameters() for fitted, _ in (one, two)]
    assert all(torch.equal(a, b) for a, b in zip(*models, strict=True))
    assert one[1] == two[1]


def test_the_shipped_controller_is_had_by_name():
    fitted, _ = grow(replace(LONG, horizon=3), "tamiyo", progress=False)
    assert isinstance(fitted.grower.controller, Restricted)
    assert len(fitted.history) == 3


def test_every_row_is_seen_once_before_one_is_seen_again():
    data = blobs(0).train
    batches = len(data) // 16
    turns = ShuffledBatches(data, 16, batches, torch.Generator().manual_seed(0))
    rows = torch.cat([x for x, _ in turns])
    assert len(turns) == batches
    assert len(rows.unique(dim=0)) == 16 * batches
    again = torch.cat([x for x, _ in turns])
    assert not torch.equal(rows, again)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("grown.bin", "must end in .pt2, got 'grown.bin'"),
        ("there.pt2", "there.pt2 exists already"),
        ("nowhere/grown.pt2", "is not a writable folder"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused(tmp_path, name, words):
    (tmp_path / "there.pt2").write_text("precious")
    with pytest.raises(InvalidInputError, match=words):
        check_free(tmp_path / name)
    assert (tmp_path / "there.pt2").read_text() == "precious"


def test_a_network_with_seeds_that_do_not_fold_in_is_written_too(tmp_path):
    class Around(torch.nn.Module):
        """Takes whatever its host takes, as an export with such seeds does."""

        def __init__(self):
            super().__init__()
            self.host = LONG.host.build(torch.Generator().manual_seed(0))

        def forward(self, *args, **kwargs):
            return self.host(*args, **kwargs)

    model, file = Around().eval(), tmp_path / "around.pt2"
    write(model, LONG, file)
    rows = blobs(0).test.features
    program = torch.export.load(file).module()
    with torch.no_grad():
        torch.testing.assert_close(program(rows), model(rows), rtol=1e-5, atol=1e-6)


def test_the_summary_has_at_most_eight_lines(grown):
    history = grown[0].history
    lines = summary_lines(history)
    assert 1 <= len(lines) <= 8
    assert "plant" in lines[0]
    many = [each for each in history if each.action.startswith("plant")] * 12
    short = summary_lines(many)
    assert len(short) == 8
    assert short[-1].endswith(f"{len(many) - 7} x plant.")
    assert summary_lines(()) == ["Nothing was planted."]


def test_targets_are_not_grown_by_name():
    with pytest.raises(InvalidInputError, match=r"is a regression task; .* esper\.fit"):
        grow(drawn_task(0, 0, ("steps-target",)), progress=False)
