"""A network that cannot be written is a storage error and leaves no file."""

import pytest
import torch

from esper.cli.output import report_failure
from esper.contracts.errors import StorageError
from esper.fitting import write
from tests.cli.calls import assert_one_line
from tests.evaluation.test_evaluation import tiny


def test_a_missing_folder_is_reported(capsys, tmp_path):
    task = tiny()
    model = task.host.build(torch.Generator().manual_seed(0))
    with pytest.raises(StorageError) as caught:
        write(model, task, tmp_path / "gone" / "grown.pt2")
    assert report_failure(caught.value) == 5
    result = capsys.readouterr().err
    assert_one_line(result)
    assert "cannot write " in result
    assert "gone/grown.pt2: " in result
    write(model, task, tmp_path / f"{'x' * 200}.pt2")
    assert [path.name for path in tmp_path.iterdir()] == [f"{'x' * 200}.pt2"]
