"""What a controller is shown, and how metrics become scores."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.contracts.errors import InvalidInputError
from esper.growth.measurements import (
    SLOPE_DECAY,
    MetricScorer,
    Track,
    host_states,
    observe,
)
from tests.growth.hosts import grow, make_batch, move_to

LOSSES = st.floats(0.01, 10) | st.just(math.nan)


@given(st.lists(st.tuples(st.floats(0, 1), LOSSES), min_size=1, max_size=12))
def test_a_track_is_what_a_loop_over_decisions_gives(seen):
    track = Track.fresh(1)
    for score, loss in seen:
        track = track.after(torch.tensor([score]), torch.tensor([loss]))
    known, slope, rise, best, best_at = 1.0, 0.0, 0.0, -1.0, 0
    first = math.nan
    for step, (score, loss) in enumerate(seen):
        now = loss if math.isfinite(loss) else known
        fall = 0.0 if math.isnan(first) else (now - known) / abs(known)
        if math.isnan(first) and math.isfinite(loss):
            first = loss
        slope = SLOPE_DECAY * slope + (1 - SLOPE_DECAY) * fall
        gain = 0.0 if step == 0 else score - seen[step - 1][0]
        rise = SLOPE_DECAY * rise + (1 - SLOPE_DECAY) * gain
        score32 = float(torch.tensor(score))
        if score32 > best:
            best, best_at = score32, step
        known = now
    close = {"rel": 1e-4, "abs": 1e-5}
    assert float(track.loss) == pytest.approx(known, **close)
    assert float(track.first_loss) == pytest.approx(first, nan_ok=True, **close)
    assert float(track.loss_slope) == pytest.approx(slope, rel=1e-3, abs=1e-3)
    assert float(track.score_slope) == pytest.approx(rise, **close)
    assert (float(track.best), int(track.best_at)) == (best, best_at)
    one = torch.ones(1)
    terms = {"compute": 7 * one, "budget_left": one, "rent": one, "added": one}
    host = host_states(track, horizon=20, **terms)
    assert float(host.compute) == pytest.approx(math.log2(1 + 7 * float(one)))
    assert bool(host.end_known)
    assert float(host.progress) == pytest.approx((len(seen) - 1) / 20)
    assert float(host.plateau) == pytest.approx((len(seen) - 1 - best_at) / 20)
    relative = 1.0 if math.isnan(first) else known / first
    assert float(host.loss) == pytest.approx(relative, **close)


def test_an_observation_shows_budget_slots_and_offers():
    model = grow("vector")
    move_to(model, "first->second#0", "widen_8", "HOLDING", alpha_target="MOST")
    track = Track.fresh(1).after(torch.tensor([0.4]), torch.tensor([1.5]))
    seen = observe(model, track, horizon=10, compute=3.0, budget=2.0, rent=0.1)
    share = model.parameters_added / model.first_cost.parameters
    assert float(seen.host.budget_left) == pytest.approx(2.0 - share)
    assert float(seen.host.added) == pytest.approx(share)
    assert float(seen.slots.parameters[0, 0]) == pytest.approx(share)
    assert float(seen.slots.alpha[0, 0]) == pytest.approx(0.7)
    assert not bool(seen.slots.contribution_measured.any())
    assert not bool(seen.offers.promise_known.any())
    names = [blueprint.name for blueprint in model.spec.blueprints]
    widen = names.index("widen_8")
    # The first free slot of every place that takes it, and no other.
    fits = [False, True, False, False, True, False, False, False]
    assert seen.offers.fits[0, :, widen].tolist() == fits
    assert seen.slots.depth[0].tolist() == [0.25, 1.0, 0.5, 0.75] * 2
    assert seen.slots.units[0].tolist() == [20.0, 12.0, 12.0, 12.0] * 2
    assert seen.slots.capacity[0].tolist() == pytest.approx([1.0, 0.6, 0.6, 0.6] * 2)
    assert float(seen.offers.parameters[0, 0, widen]) == pytest.approx(share)
    assert float(seen.slots.depth[0, 0]) < float(seen.slots.depth[0, 1])
    assert bool(seen.episode_start)


def test_scores_of_losses_begin_at_a_half_and_rise_as_the_loss_falls():
    scorer = MetricScorer(grow("vector"), "min")
    assert scorer.score(4.0) == 0.5
    assert scorer.score(1.0, [4.0]) == pytest.approx(0.8)
    assert scorer.score(0.0, [4.0, 1.0]) == 1.0
    assert MetricScorer(grow("vector"), "max").score(0.3) == 0.3
    with pytest.raises(InvalidInputError, match="must be a number, got None"):
        scorer.measure(lambda: None)


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(
    "metrics",
    [[-3.0, -1.0, -0.2, 0.4, 0.9], [0.1, -0.3, 0.5], [5.0, 70.0, 91.0], [1.4, -2.0],
     [0.0, 0.5], [0.0, 0.0], [-1e30, 1e30]],
)  # fmt: skip
def test_any_finite_metric_becomes_a_score_that_keeps_its_order(mode, metrics):
    scorer = MetricScorer(grow("vector"), mode)
    scores = scorer.scores(metrics)
    assert scorer.score(metrics[-1], metrics[:-1]) == scores[-1]
    assert all(0.0 <= score <= 1.0 for score in scores)
    order = sorted(range(len(metrics)), key=lambda at: metrics[at])
    ranked = [scores[at] for at in (order if mode == "max" else order[::-1])]
    assert ranked == sorted(ranked)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(InvalidInputError, match="the metric must be finite"):
            scorer.score(wrong, metrics)


def test_measuring_leaves_no_trace():
    model = grow("vector")
    x = make_batch("vector", 8)[0]

    def metric():
        model.host.train()
        return float(model.host(x).sigmoid().mean().detach())

    before = {name: t.clone() for name, t in model.host.state_dict().items()}
    streams = torch.get_rng_state()
    MetricScorer(model, "max").measure(metric)
    assert all(torch.equal(before[n], t) for n, t in model.host.state_dict().items())
    assert torch.equal(streams, torch.get_rng_state())
