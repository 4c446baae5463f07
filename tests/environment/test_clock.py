"""Moments of decisions, stops, and learning rates."""

import pytest
import torch
from torch.testing import assert_close

from esper.contracts.errors import InvalidInputError
from esper.environment.clock import STOPS, Clock


def test_decisions_are_dense_at_first_and_even_on_a_log_scale():
    times = Clock("compute", 31, 4.0).times()
    assert times[:2].tolist() == [0.0, 4.0]
    assert_close(times[2:] / times[1:-1], torch.full((30,), 2 ** (1 / 3)).double())
    assert float(times[-1]) == pytest.approx(4096)
    assert Clock("batches", 3, 16.0).times().tolist() == [0, 16, 32, 48]


def test_stops_lie_a_factor_of_two_apart_and_weigh_the_same():
    clock = Clock("compute", 31, 4.0, stop="anytime")
    times, weights = clock.times(), clock.weights()
    stops = times[weights > 0]
    assert len(stops) == STOPS
    assert_close(stops[1:] / stops[:-1], torch.full((STOPS - 1,), 2.0).double())
    assert_close(weights[weights > 0], torch.full((STOPS,), 1 / STOPS).double())
    assert stops[-1] == times[-1]


@pytest.mark.parametrize("horizon", [1, 2, 5, 12])
def test_short_episodes_have_fewer_stops(horizon):
    weights = Clock("compute", horizon, 4.0, stop="anytime").weights()
    assert float(weights.sum()) == pytest.approx(1)
    assert weights[0] == 0
    assert weights[-1] > 0


def test_a_known_end_is_the_only_stop_and_the_rate_falls_towards_it():
    clock = Clock("compute", 10, 4.0)
    assert clock.weights().nonzero().tolist() == [[10]]
    end = float(clock.times()[-1])
    moments = torch.tensor([[0.0, 0.1, 0.5, 1.0]]).double() * end
    assert_close(
        clock.rate(moments)[0, [0, 1, 3]], torch.tensor([0.02, 1.0, 0.02]).double()
    )
    assert 0.02 < float(clock.rate(moments)[0, 2]) < 1.0


def test_with_an_unknown_end_the_rate_falls_with_compute_wherever_the_end_is():
    moments = torch.tensor([[0.0, 16.0, 16.0 * 1023]]).double()
    for horizon in (1, 10, 40):
        rates = Clock("compute", horizon, 4.0, stop="anytime").rate(moments)
        assert_close(rates, torch.tensor([[1.0, 2**-0.3, 2**-3.0]]).double())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("hourglass", 3, 4.0), "clock must be one of compute, batches"),
        (("compute", 3, 0.5), r"first must lie in \[1, .* got 0.5"),
        (("compute", 3, float("nan")), "first must lie in"),
        (("compute", 3, 4.0, 1.0), "ratio must be more than 1"),
        (("compute", 3, 4.0, 2.0, "soon"), "stop must be one of end, anytime"),
    ],
)
def test_moments_at_which_nothing_can_happen_are_refused(given, words):
    with pytest.raises(InvalidInputError, match=words):
        Clock(*given)
