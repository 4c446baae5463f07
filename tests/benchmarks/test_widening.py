"""The study pairs its arms, tunes on what it does not count, and can be continued.

Counted multiply-adds hold against those that torch really carries out.
"""

from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import timing
from benchmarks.training import (
    Meter,
    Outcome,
    Run,
    mlp,
    mlp_macs,
    mlp_parameters,
    promise_macs,
    width_for,
)
from benchmarks.widening import (
    EARLY,
    NEVER,
    NEVER_MACS,
    PLAIN,
    QUICK,
    SHAPED,
    STATIC,
    STATIC_MACS,
    Study,
    carry_out,
    in_processes,
    run,
    shown,
)
from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.experiment.statistics import Interval
from esper.grower import Grower
from esper.growth.promise import Statistics, View, gains

ROWS, INPUTS, WIDTH, CLASSES = 64, 10, 12, 7
TINY = replace(QUICK, rates=(1e-2, 3e-2), epochs=12, batch=32)
GROWING = Run(
    task="mnist1d",
    arm=EARLY,
    rng_seed=0,
    rows=200,
    width=12,
    batch=32,
    steps=36,
    rate=3e-2,
    budget=3.2,
    epochs=12,
    judged=True,
)


def _pretend(what: Run) -> Outcome:
    """An outcome without training: the host likes rate 0.01, and early decay 0."""
    score = 0.5 + 0.1 * (what.rate == 1e-2)
    score += (0.1 if what.arm == EARLY else -0.1) * (what.decay == 0.0)
    score -= 0.01 * (what.decay in (1e-3, 0.1))
    return Outcome(
        decisions=score,
        test=0.25 if what.judged else None,
        parameters=3210,
        exported=4294,
        training_macs=10**8 + what.rng_seed * 10**7,
        seconds=1.0,
        cpu_seconds=1.0,
    )


@pytest.fixture(scope="module")
def grown():
    """One growing run."""
    return carry_out(GROWING)


@pytest.fixture
def pretended():
    runs = []

    def work(more):
        runs.extend(more)
        return [_pretend(what) for what in more]

    study = Study(TINY, work)
    study.run()
    return study, runs


def test_the_test_rows_are_left_alone_in_tuning(pretended):
    _, runs = pretended
    judged = [what for what in runs if what.judged]
    assert {what.rng_seed for what in judged} == {0, 1}
    assert {what.rng_seed for what in runs if not what.judged} == {100}
    assert len(judged) == len(TINY.counted) * (1 + len(PLAIN))


def test_every_arm_is_tuned_equally_long(pretended):
    _, runs = pretended
    # The chosen setting of the growing arm is asked for again, and known.
    tried = {str(asdict(what)): what.arm for what in runs if not what.judged}
    counts = [list(tried.values()).count(arm) for arm in (EARLY, *PLAIN)]
    assert counts == [5] * 6


def test_what_was_best_on_the_decision_rows_is_what_is_counted(pretended):
    found, runs = pretended
    assert found.settings["mnist1d", EARLY] == {"rate": 1e-2, "decay": 0.0}
    assert found.settings["mnist1d", NEVER] == {"rate": 1e-2}
    for what in runs:
        if what.judged:
            assert what.rate == 1e-2
            assert what.decay == (0.0 if what.arm == EARLY else 1e-2)


def test_equal_means_equal(pretended):
    _, runs = pretended
    epoch = 120 // 32
    for what in (what for what in runs if what.judged):
        spent = 10**8 + what.rng_seed * 10**7
        step = 3 * mlp_macs(40, what.width, 10) * what.batch
        if what.arm in (NEVER_MACS, STATIC_MACS, SHAPED):
            assert abs(what.steps * step - spent) <= step / 2
        else:
            assert what.steps == 12 * epoch
        widths = {STATIC: 36, STATIC_MACS: 36, SHAPED: 44}
        assert what.width == widths.get(what.arm, 12)
        assert (what.budget is None) == (what.arm != EARLY)


def test_a_growing_run_grows_within_its_budget_and_pays_for_it(grown):
    never = carry_out(replace(GROWING, budget=None))
    assert never.parameters == never.exported == 778
    assert 2 * 778 < grown.parameters <= 4.2 * 778
    assert grown.training_macs > 1.5 * never.training_macs
    assert grown.test is not None
    assert never.training_macs == 36 * 32 * 3 * mlp_macs(40, 12, 10)


def test_a_budget_of_nothing_trains_the_host_itself():
    """Same split, same first weights, same batches: the arms are paired to the bit."""
    nothing = carry_out(replace(GROWING, budget=0.0))
    never = carry_out(replace(GROWING, budget=None))
    assert (nothing.decisions, nothing.test) == (never.decisions, never.test)
    assert nothing.parameters == never.parameters


def test_a_run_depends_on_nothing_but_what_it_says(grown):
    torch.manual_seed(6)
    again = carry_out(GROWING)
    timeless = {"seconds": 0.0, "cpu_seconds": 0.0}
    assert replace(grown, **timeless) == replace(again, **timeless)


def test_the_benchmark_has_a_row_for_every_arm(capsys, monkeypatch):
    monkeypatch.setattr(timing, "QUICK", True)
    arms, gaps = run()
    assert [row[0] for row in arms.rows] == [EARLY, *PLAIN]
    assert len(gaps.rows) == len(PLAIN)
    assert f"mnist1d, {SHAPED}" in capsys.readouterr().err


def test_a_run_is_carried_out_once_and_another_setting_is_another_run():
    done = []

    def mapped(function, runs):
        done.extend(runs)
        return map(_pretend, runs)

    other = replace(GROWING, rate=1e-2)
    work = in_processes(mapped)
    assert work([other, GROWING, other])[0] == _pretend(other)
    work([GROWING, other])
    assert done == [other, GROWING]


@pytest.mark.parametrize(
    "wrong",
    [{"tuning": (0, 100)}, {"counted": ()}, {"tasks": ("words",)}, {"rates": ()}],
)
def test_a_protocol_that_shows_nothing_is_refused(wrong):
    with pytest.raises(BadInput):
        replace(TINY, **wrong)


@pytest.mark.parametrize(
    ("gap", "adjusted", "verdict"),
    [
        ((2.0, 1.0, 3.0), 0.01, "better"),
        ((-2.0, -3.0, -1.0), 0.01, "worse"),
        ((2.0, 1.0, 3.0), 0.06, "no"),
        ((2.0, -1.0, 3.0), 0.01, "no"),
    ],
)
def test_a_difference_is_shown_by_ranks_and_interval(gap, adjusted, verdict):
    assert shown(Interval(*gap), adjusted) == verdict


def _really(work):
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops() // 2


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
    grower.plant("0->2#0", "widen_8")
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
    assert {Stage.TRAINING, Stage.FOSSILIZED} <= stages


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
