"""Curves over rounds."""

from math import nan

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from esper.experiment.statistics import Interval
from esper.report.curves import Judgements, learning_curve, smoothed
from esper.report.ink import house_style

VALUES = st.lists(st.one_of(st.just(nan), st.floats(-10, 10)), max_size=120)


@given(VALUES)
def test_a_line_is_the_mean_of_the_rounds_around(values):
    reach = len(values) // 20
    expected = []
    for at in range(len(values)):
        near = [
            value
            for value in values[max(0, at - reach) : at + reach + 1]
            if value == value
        ]
        expected.append(sum(near) / len(near) if near else nan)
    assert_allclose(smoothed(np.array(values)), expected, rtol=1e-9, atol=1e-9)


def test_one_round_and_one_host_without_an_interval_can_be_drawn():
    alone = Interval(0.3, nan, nan)
    columns = {"round": np.array([1.0]), "return": np.array([nan])}
    judged = Judgements(watched=[(1, alone)], final=alone)
    with house_style():
        drawing = learning_curve("some", "letter", columns, judged)
    assert "unknown" in drawing.alt
    assert "Tamiyo, judged" in drawing.inline
