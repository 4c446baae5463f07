"""Counted multiply-adds hold against those that torch really carries out."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.macs import (
    Meter,
    mlp_macs,
    mlp_parameters,
    promise_macs,
    step_macs,
    width_for,
)
from benchmarks.training import mlp
from esper.contracts.stages import Stage
from esper.grower import Grower
from esper.growth.promise import Statistics, View, gains

ROWS, INPUTS, WIDTH, CLASSES = 64, 10, 12, 7


def _really(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() // 2


def test_a_plain_step_is_three_passes_less_what_the_input_would_need():
    net = mlp(INPUTS, WIDTH, CLASSES, 0)
    features = torch.randn(ROWS, INPUTS)
    really = _really(lambda: net(features).sum().backward())
    counted = ROWS * step_macs(mlp_macs(INPUTS, WIDTH, CLASSES))
    assert counted - really == ROWS * INPUTS * WIDTH


def _growing():
    torch.manual_seed(0)
    net = mlp(INPUTS, WIDTH, CLASSES, 0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    features, labels = torch.randn(ROWS, INPUTS), torch.arange(ROWS) % CLASSES
    grower = Grower(
        net,
        optimizer,
        "auto",
        example=features[:8],
        decisions=20,
        budget=9.0,
        blueprints=["widen_8", "widen_32"],
    )

    def step():
        loss = grower.loss(lambda: F.cross_entropy(net(features), labels))
        optimizer.zero_grad()
        loss.backward()

    return grower, net, features, optimizer, step


@pytest.mark.parametrize("slot", ["0->2#0", "2->4#0"])
def test_a_shadow_pass_is_counted_by_hand(slot):
    grower, *_ = _growing()
    grower.plant(slot, "widen_8")
    meter = Meter(grower.model, ROWS, 8)
    meter.steps(1)
    host = 10 * 12 + 12 * 12 + 12 * 7
    seed, behind = {
        "0->2#0": (8 * (10 + 12), 12 * 7),  # reads the input, the last layer follows
        "2->4#0": (8 * (12 + 7), 0),  # writes the answer itself
    }[slot]
    assert meter.spent == 3 * host + (host + seed) + 2 * seed + behind


def test_every_step_of_a_growing_run_costs_at_most_what_is_counted():
    """And at most a fifth less: the first layer's input needs no gradient."""
    grower, net, features, optimizer, step = _growing()
    meter = Meter(grower.model, ROWS, 8)
    stages = set()
    for _ in range(9):
        before = meter.spent
        meter.steps(ROWS)
        counted = meter.spent - before
        really = _really(step)
        optimizer.step()
        assert 0.8 * counted <= really <= counted
        before = meter.spent
        meter.decision()

        def decide():
            with torch.no_grad():
                net(features)
            grower.step(metric=0.5)

        assert _really(decide) <= meter.spent - before
        stages |= {grower.model.stage(slot) for slot in grower.model.slots}
    assert {Stage.TRAINING, Stage.BLENDING, Stage.FOSSILIZED} <= stages


def test_a_promise_costs_at_least_its_matrix_products():
    known = Statistics(
        features=torch.randn(256, 11, dtype=torch.float64),
        wishes=torch.randn(256, 12, dtype=torch.float64),
        feature_rms=1.0,
        outlet_rms=1.0,
        positions=(),
        view=View(None, None, bias=True),
    )
    really = _really(lambda: gains(known, [8, 32]))
    assert really <= promise_macs(256, 11, 12, 32) <= 3 * really


def test_counts_of_a_network_are_those_of_the_network():
    net = mlp(INPUTS, WIDTH, CLASSES, 0)
    assert mlp_parameters(INPUTS, WIDTH, CLASSES) == sum(
        p.numel() for p in net.parameters()
    )
    really = _really(lambda: net(torch.zeros(1, INPUTS)))
    assert mlp_macs(INPUTS, WIDTH, CLASSES) == really


@given(st.integers(1, 50), st.integers(2, 30), st.integers(0, 20_000))
def test_no_width_is_nearer_than_the_one_found(inputs, classes, parameters):
    def off(width):
        return abs(mlp_parameters(inputs, width, classes) - parameters)

    width = width_for(inputs, classes, parameters)
    assert width >= 1
    assert off(width) <= off(width + 1)
    assert width == 1 or off(width) <= off(width - 1)
