"""Sinks: what TensorBoard is told."""

import sys
from math import nan

import pytest

from esper.contracts.errors import BadInput
from esper.experiment.sinks import Sink, TensorBoardSink, scalars
from tests.experiment.stores import record


def test_the_figures_of_a_round_are_told_by_name():
    named = dict(scalars(record(2)))
    assert named["round/mean_return"] == pytest.approx(0.2)
    assert named["update/value_loss"] == 0.4
    assert named["entropy/op"] == 0.5
    assert named["kl/blueprint"] == 0.02


def test_what_is_not_known_is_left_out():
    named = dict(scalars(record(2, kl=nan, stopped_at=None)))
    assert "update/kl" not in named
    assert "update/stopped_at" not in named


def test_without_tensorboard_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(BadInput, match=r"esper-lite\[tensorboard\]"):
        TensorBoardSink(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSink(tmp_path)
    assert isinstance(sink, Sink)
    for number in (1, 2, 3):
        sink.add_round(record(number))
    sink.close()
    TensorBoardSink(tmp_path, resume_step=8).close()
    found = EventAccumulator(str(tmp_path)).Reload().Scalars("round/mean_return")
    assert [(point.step, round(point.value, 3)) for point in found] == [
        (4, 0.1),
        (8, 0.2),
    ]
