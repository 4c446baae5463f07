import copy
import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from esper.contracts.errors import BadInput
from esper.growth.governor import (
    RENEWAL,
    WARM_UP,
    Figures,
    Governor,
    GovernorConfig,
    Record,
    Verdict,
    all_finite,
    describe,
    judge_batch,
    judge_decision,
)

NAN, INF = math.nan, math.inf
SMALL = GovernorConfig(window=9, patience=3)


class Plain:
    """The same judgement on one run, in lists and double precision."""

    def __init__(self, config):
        self.config, self.streak, self.batches = config, 0, 0
        self.ring = [None] * config.window
        self.limits = self.first = self.first_window = None
        self.best = INF

    def batch(self, loss, norm, finite):
        verdict = Verdict.HEALTHY
        if not (math.isfinite(loss) and math.isfinite(norm) and finite):
            verdict = Verdict.NON_FINITE
        elif self.limits and (loss > self.limits[0] or norm > self.limits[1]):
            verdict = Verdict.SPIKE
        if verdict == Verdict.HEALTHY:
            self.streak = 0
            self.ring[self.batches % self.config.window] = (loss, norm)
        else:
            self.streak += 1
            if self.limits and self.streak >= self.config.patience:
                verdict = Verdict.DIVERGED
        self.batches += 1
        if self.batches % RENEWAL == 0 and len(self.filled()) >= WARM_UP:
            self.renew()
        return verdict

    def renew(self):
        quartiles = [self.quartiles(figure) for figure in (0, 1)]
        medians = [middle for _, middle, _ in quartiles]
        self.first = self.first or medians
        self.limits = [
            middle + (k - 1) * max(abs(middle), high - low) + 0.05 * abs(first)
            for (low, middle, high), first, k in zip(
                quartiles,
                self.first,
                (self.config.loss_spike, self.config.spike),
                strict=True,
            )
        ]
        if len(self.filled()) == self.config.window:
            if self.first_window is None:
                self.first_window = medians[0]
            self.best = min(self.best, medians[0])

    def filled(self):
        return [pair for pair in self.ring if pair is not None]

    def quartiles(self, figure):
        values = sorted(pair[figure] for pair in self.filled())
        return [values[(len(values) - 1) * quarter // 4] for quarter in (1, 2, 3)]

    def decision(self):
        if self.first_window is None or not self.best < self.first_window:
            return Verdict.HEALTHY
        limit = self.first_window + (self.config.guessing - 1) * abs(self.first_window)
        limit += 0.05 * abs(self.first[0])
        lost = self.quartiles(0)[1] > limit
        return Verdict.WORSE_THAN_GUESSING if lost else Verdict.HEALTHY


def governed(batches, config=SMALL):
    """Verdicts [time][env] on batches [time][env] of (loss, norm, finite)."""
    governor = Governor(len(batches[0]), config)
    verdicts, decisions = [], []
    for row in batches:
        losses, norms, finite = zip(*row, strict=True)
        verdicts.append(
            governor.batch(
                torch.tensor(losses), torch.tensor(norms), torch.tensor(finite)
            ).tolist()
        )
        decisions.append(governor.decision().tolist())
    return verdicts, decisions


def one(losses, norms=None, config=SMALL):
    """Verdicts on the batches of one run."""
    norms = norms or [1.0] * len(losses)
    rows = [[(loss, norm, True)] for loss, norm in zip(losses, norms, strict=True)]
    return [verdict for (verdict,) in governed(rows, config)[0]]


USUAL = [0.0, 0.013, 0.71, 1.0, 1.9, 3.3, 17.0, 233.0, 4700.0, -2.1, -0.03]
ODD = [NAN, INF, -INF, 3e38, -3e38, 1e-45]
BATCH = st.tuples(
    st.sampled_from(USUAL * 3 + ODD),
    st.sampled_from([abs(value) for value in USUAL] * 3 + ODD),
    st.sampled_from([True] * 9 + [False]),
)


@given(st.data())
def test_many_runs_are_judged_like_each_alone_by_the_plain_rules(data):
    envs = data.draw(st.integers(1, 3))
    row = st.lists(BATCH, min_size=envs, max_size=envs)
    batches = data.draw(st.lists(row, min_size=1, max_size=45))
    verdicts, decisions = governed(batches)
    plain = [Plain(SMALL) for _ in range(envs)]
    for row, verdict, decision in zip(batches, verdicts, decisions, strict=True):
        wanted = [p.batch(*batch) for p, batch in zip(plain, row, strict=True)]
        assert verdict == wanted
        assert decision == [p.decision() for p in plain]


@given(st.lists(BATCH, max_size=12), st.lists(BATCH, min_size=1, max_size=6))
def test_no_number_anywhere_poisons_the_record(before, bad):
    governor = Governor(1, SMALL)
    for loss, norm, finite in [(1.0, 1.0, True)] * 16 + before + bad:
        governor.batch(
            torch.tensor([loss]), torch.tensor([norm]), torch.tensor([finite])
        )
    record = governor.record
    assert bool(torch.isfinite(record.ring).all())
    assert bool(torch.isfinite(record.limits).all())
    assert bool(torch.isfinite(record.first).all())
    assert float(record.first[0, 0]) == 1.0


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("seen", [0, 3, 20])
def test_what_is_not_finite_is_found_at_once(value, seen):
    rows = [[(1.0, 1.0, True)] * 4] * seen
    fine = (1.0, 1.0, True)
    rows.append([(value, 1.0, True), (1.0, value, True), (1.0, 1.0, False), fine])
    verdicts, _ = governed(rows)
    bad = Verdict.NON_FINITE
    assert verdicts[-1] == [bad, bad, bad, Verdict.HEALTHY]


def test_spikes_of_loss_and_gradient_are_found_only_after_the_warm_up():
    assert one([1.0] * 8 + [30.0])[-1] == Verdict.SPIKE
    assert one([1.0] * 7 + [30.0])[-1] == Verdict.HEALTHY
    assert one([1.0] * 9, [1.0] * 8 + [1100.0])[-1] == Verdict.SPIKE
    assert one([1.0] * 9, [1.0] * 8 + [900.0])[-1] == Verdict.HEALTHY
    assert one([1.0] * 8 + [19.0])[-1] == Verdict.HEALTHY
    assert one([1.0] * 8 + [3e38])[-1] == Verdict.SPIKE


def test_patience_many_bad_batches_in_a_row_are_divergence():
    losses = [1.0] * 10 + [50.0, 50.0, 1.0, 50.0, NAN, 50.0, 50.0, 1.0]
    bad, spike = Verdict.NON_FINITE, Verdict.SPIKE
    wanted = [spike, spike, 0, spike, bad, Verdict.DIVERGED, Verdict.DIVERGED, 0]
    assert one(losses)[10:] == wanted
    assert one([NAN] * 6) == [bad] * 6


def test_a_loss_near_zero_or_below_it_may_jitter():
    assert set(one([1.0] * 10 + [1e-9] * 20 + [0.04])) == {Verdict.HEALTHY}
    assert set(one([0.0] * 20)) == {Verdict.HEALTHY}
    assert set(one([-1.0] * 10 + [-0.5, 3.0])) == {Verdict.HEALTHY}
    assert one([-1.0] * 10 + [25.0])[-1] == Verdict.SPIKE


def test_learning_that_was_lost_is_worse_than_guessing():
    rows = [[(value, 1.0, True)] for value in [1.0] * 16 + [0.5] * 16 + [2.5] * 9]
    _, decisions = governed(rows)
    assert decisions[31] == [Verdict.HEALTHY]
    assert decisions[-1] == [Verdict.WORSE_THAN_GUESSING]
    never_below = [[(value, 1.0, True)] for value in [1.0] * 16 + [2.0] * 18]
    assert governed(never_below)[1][-1] == [Verdict.HEALTHY]
    a_little = [[(v, 1.0, True)] for v in [1.0] * 16 + [0.5] * 16 + [1.4] * 9]
    assert governed(a_little)[1][-1] == [Verdict.HEALTHY]


def test_bad_batches_do_not_move_the_medians():
    config = GovernorConfig(window=9, patience=1000)
    assert one([1.0] * 10 + [30.0] * 50, config=config)[10:] == [Verdict.SPIKE] * 50


def test_a_healthy_run_is_never_disturbed():
    generator = torch.Generator().manual_seed(2)
    envs, batches = 48, 5000
    time = torch.linspace(0.0, 1.0, batches)[:, None]
    kind = torch.arange(envs) % 6
    noise = torch.randn(batches, envs, generator=generator)
    quick = torch.rand(envs, generator=generator) * 400 + 5
    decays = 2.3 * (0.1 + 0.9 * torch.exp(-time * quick))  # tenfold, fast or slow
    losses = [
        decays * torch.exp(0.5 * noise),
        decays * (1.0 + 0.1 * noise),
        2.3 * torch.exp(-time * quick) + 1e-3 * torch.exp(noise),
        3.0 - 6.0 * time + 0.5 * noise,  # a density's likelihood crosses zero
        2.3 + 0.0 * noise,
        2.3 * torch.exp(-time * 60.0) * torch.exp(noise),  # to nothing at all
    ]
    loss = torch.stack(losses).gather(0, kind.expand(1, batches, envs))[0]
    other = torch.randn(batches, envs, generator=generator)
    norm = 10.0 ** (-2.0 * time * (kind + 1)) * torch.exp(other)
    governor = Governor(envs)
    fine = torch.ones(envs, dtype=torch.bool)
    worst = torch.zeros(envs, dtype=torch.int64)
    for step in range(batches):
        worst = torch.maximum(worst, governor.batch(loss[step], norm[step], fine))
        if step % 100 == 99:
            worst = torch.maximum(worst, governor.decision())
    assert worst.tolist() == [Verdict.HEALTHY] * envs


def test_judging_changes_no_record_and_needs_no_number_on_the_host():
    record = Record.fresh(4, 32, "meta")
    fine = torch.ones(4, dtype=torch.bool, device="meta")
    figures = torch.ones(4, device="meta")
    config = GovernorConfig()
    verdict = judge_batch(figures, figures, fine, record, config)
    for _ in range(RENEWAL):
        record = record.after(figures, figures, verdict, config)
    assert judge_decision(record, config).shape == (4,)
    assert record.where(fine, Record.fresh(4, 32, "meta")).ring.device.type == "meta"

    real = Record.fresh(1, 9)
    before = copy.deepcopy(real)
    loss = torch.tensor([1.0])
    verdict = judge_batch(loss, loss, torch.tensor([True]), real, SMALL)
    for _ in range(RENEWAL):
        real.after(loss, loss, verdict, SMALL)
    for field in fields(Record):
        assert str(getattr(real, field.name)) == str(getattr(before, field.name))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_losses_of_any_precision_are_judged(dtype):
    governor = Governor(1, SMALL)
    fine = torch.tensor([True])
    for value in [1.0] * 10:
        figure = torch.tensor([value], dtype=dtype)
        assert governor.batch(figure, figure, fine).tolist() == [Verdict.HEALTHY]
    large = torch.tensor([6e4], dtype=dtype)
    assert governor.batch(large, figure, fine).tolist() == [Verdict.SPIKE]
    huge = torch.tensor([1e300]).to(dtype)
    assert governor.batch(huge, figure, fine).tolist() == [Verdict.NON_FINITE]


def test_a_reset_run_begins_anew_and_the_others_go_on():
    def feed(governor, value):
        figures = torch.tensor([value, value])
        return governor.batch(figures, torch.ones(2), torch.tensor([True, True]))

    governor = Governor(2, SMALL)
    for _ in range(12):
        feed(governor, 1.0)
    feed(governor, 50.0)
    feed(governor, 50.0)
    governor.forgive(torch.tensor([True, False]))
    assert feed(governor, 50.0).tolist() == [Verdict.SPIKE, Verdict.DIVERGED]
    governor.reset(torch.tensor([False, True]))
    assert feed(governor, 50.0).tolist() == [Verdict.SPIKE, Verdict.HEALTHY]
    filled = (governor.record.ring[0] < INF).sum(dim=-1)
    assert filled.tolist() == [9, 1]


def test_a_saved_governor_goes_on_as_if_it_had_not_stopped():
    losses = [1.0, 0.7, 0.6, 0.9, 0.4] * 4 + [50.0]
    fine = torch.tensor([True])

    def feed(governor, values):
        ones = torch.ones(1)
        return [int(governor.batch(torch.tensor([v]), ones, fine)) for v in values]

    governor, resumed = Governor(1, SMALL), Governor(1, SMALL)
    feed(governor, losses)
    saved = governor.state_dict()
    wanted = feed(governor, [50.0, 0.5, 60.0, 60.0, 60.0])
    resumed.load_state_dict(saved)
    assert feed(resumed, [50.0, 0.5, 60.0, 60.0, 60.0]) == wanted
    assert wanted == [Verdict.SPIKE, 0, Verdict.SPIKE, Verdict.SPIKE, Verdict.DIVERGED]
    for name, value in governor.state_dict().items():
        assert str(value) == str(resumed.state_dict()[name])
    with pytest.raises(BadInput, match="same envs and window"):
        Governor(2, SMALL).load_state_dict(saved)
    with pytest.raises(BadInput, match="got NoneType"):
        Governor(1, SMALL).load_state_dict({})


def test_one_bad_number_in_any_tensor_is_seen():
    good = [torch.full((3,), 3e38), torch.zeros(0), torch.tensor(7), torch.ones(2, 2)]
    assert bool(all_finite(good))
    assert bool(all_finite([*good, torch.full((2,), 1e300, dtype=torch.float64)]))
    assert bool(all_finite([]))
    for value in (NAN, INF, -INF):
        for dtype in (torch.float16, torch.float32, torch.complex64):
            bad = torch.tensor([0.0, value, 1.0], dtype=dtype)
            assert not bool(all_finite([*good, bad]))


def test_every_verdict_has_a_sentence():
    def told(verdict, loss=1.0, norm=2.0, finite=True):
        figures = Figures(
            loss=loss,
            grad_norm=norm,
            buffers_finite=finite,
            usual_loss=0.5,
            usual_norm=1.5,
            first_loss=2.25,
            streak=3,
        )
        return describe(verdict, figures)

    assert told(Verdict.HEALTHY) == "training is healthy (loss 1)"
    assert (
        told(Verdict.NON_FINITE, loss=NAN)
        == "the loss is not finite (nan); the step was refused"
    )
    assert "gradient norm is not finite (inf)" in told(Verdict.NON_FINITE, norm=INF)
    assert "a buffer of the model" in told(Verdict.NON_FINITE, finite=False)
    assert "the loss is 40, usually 0.5" in told(Verdict.SPIKE, loss=40.0)
    assert "gradient norm is 9000, usually 1.5" in told(Verdict.SPIKE, norm=9e3)
    assert (
        told(Verdict.DIVERGED, loss=40.0)
        == "3 bad batches in a row; at the last, the loss is 40, usually 0.5"
    )
    assert "not finite (nan)" in told(Verdict.DIVERGED, loss=NAN)
    assert "0.5 now, worse than the 2.25" in told(Verdict.WORSE_THAN_GUESSING)


def test_the_figures_of_an_event_are_those_of_its_run():
    governor = Governor(2, SMALL)
    for _ in range(16):
        governor.batch(
            torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]), torch.ones(2).bool()
        )
    governor.batch(torch.tensor([1.0, NAN]), torch.ones(2), torch.ones(2).bool())
    figures = governor.figures(NAN, 1.0, env=1)
    assert (figures.usual_loss, figures.usual_norm) == (2.0, 4.0)
    assert (figures.first_loss, figures.streak) == (2.0, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"spike": 1.0},
        {"loss_spike": NAN},
        {"guessing": INF},
        {"window": 7},
        {"patience": 0},
        {"slack": -0.1},
    ],
)
def test_limits_a_healthy_run_would_cross_are_refused(options):
    with pytest.raises(BadInput, match=next(iter(options))):
        GovernorConfig(**options)
    with pytest.raises(BadInput, match="envs"):
        Governor(0)
