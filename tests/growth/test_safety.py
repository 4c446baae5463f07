"""Batch checks, snapshots, roll-backs and removed seeds."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from esper.contracts.errors import InvalidInputError
from esper.growth.safety import (
    LIMITS_EVERY,
    WARM_UP,
    GovernorConfig,
    HealthMonitor,
    Safety,
    Snapshot,
    Verdict,
    all_finite,
)
from tests.growth.hosts import bits, everything, grow, make_batch

REFUSES = pytest.mark.filterwarnings("ignore:a batch was refused")
"""For tests that provoke refusals: all warnings are errors here."""
NAN, INF = math.nan, math.inf
SMALL = GovernorConfig(window=9, patience=3)


class Plain:
    """The same verdicts from all that was ever healthy."""

    def __init__(self, config):
        self.config, self.streak, self.batches = config, 0, 0
        self.healthy = []
        self.limits = self.first = self.first_window = None
        self.best = INF
        self.spikes, self.rare = [], [0.0, 0.0]

    def batch(self, loss, norm, finite):
        verdict = Verdict.HEALTHY
        if not (math.isfinite(loss) and math.isfinite(norm) and finite):
            verdict = Verdict.NON_FINITE
        elif self.is_spike(loss, norm):
            self.spikes.append((self.batches, loss, norm))
            verdict = Verdict.SPIKE
            recent = [
                s for s in self.spikes if s[0] > self.batches - self.config.window
            ]
            if len(recent) >= 3 and self.streak + 1 < self.config.patience:
                usual = [
                    statistics.median_low(column)
                    for column in zip(*recent, strict=True)
                ]
                self.rare = [
                    max(*two) for two in zip(self.rare, usual[1:], strict=True)
                ]
                self.renew()
                if not self.is_spike(loss, norm):
                    verdict = Verdict.HEALTHY
        if verdict == Verdict.HEALTHY:
            self.streak = 0
            self.healthy.append((loss, norm))
        else:
            self.streak += 1
            if self.limits and self.streak >= self.config.patience:
                verdict = Verdict.DIVERGED
        self.batches += 1
        if self.batches % LIMITS_EVERY == 0 and len(self.filled()) >= WARM_UP:
            self.renew()
        return verdict

    def is_spike(self, loss, norm):
        limits = self.limits or [INF, INF]
        return loss > limits[0] or norm > limits[1]

    def renew(self):
        quartiles = [self.quartiles(row) for row in (0, 1)]
        medians = [middle for _, middle, _ in quartiles]
        self.first = self.first or medians
        factors = (self.config.loss_spike, self.config.spike)
        self.limits = [
            middle + (k - 1) * max(abs(middle), high - low, abs(first), rare)
            for (low, middle, high), first, rare, k in zip(
                quartiles, self.first, self.rare, factors, strict=True
            )
        ]
        if len(self.filled()) == self.config.window:
            if self.first_window is None:
                self.first_window = medians[0]
            self.best = min(self.best, medians[0])

    def filled(self):
        return self.healthy[-self.config.window :]

    def quartiles(self, row):
        values = sorted(pair[row] for pair in self.filled())
        return [values[(len(values) - 1) * quarter // 4] for quarter in (1, 2, 3)]

    def unlearnt(self):
        if self.first_window is None or not self.best < self.first_window:
            return False
        limit = self.first_window + 0.5 * abs(self.first_window)
        return self.quartiles(0)[1] > limit + 0.5 * abs(self.first[0])


def verdicts(batches, config=SMALL):
    """Verdicts on (loss, norm, finite), and after each whether all was unlearnt."""
    monitor = HealthMonitor(config)
    found = []
    for loss, norm, finite in batches:
        verdict = monitor.check(loss, norm, finite=finite)
        found.append((verdict, monitor.has_unlearnt(monitor.medians()[0])))
    return found


USUAL = [0.0, 0.013, 0.71, 1.0, 1.9, 3.3, 17.0, 233.0, 4700.0, -2.1, -0.03]
ODD = [NAN, INF, -INF, 3e38, -3e38, 1e-45]
BATCH = st.tuples(
    st.sampled_from(USUAL * 3 + ODD),
    st.sampled_from([abs(value) for value in USUAL] * 3 + ODD),
    st.sampled_from([True] * 9 + [False]),
)


@given(st.lists(BATCH, min_size=1, max_size=45))
def test_verdicts_are_those_of_the_plain_rules(batches):
    plain = Plain(SMALL)
    wanted = [(plain.batch(*batch), plain.unlearnt()) for batch in batches]
    assert verdicts(batches) == wanted


@pytest.mark.parametrize("kind", range(5))
def test_a_healthy_run_is_never_disturbed(kind):
    generator = torch.Generator().manual_seed(kind)
    batches = 600
    time = torch.linspace(0.0, 1.0, batches)
    noise = torch.randn(batches, generator=generator)
    decay = 2.3 * (0.1 + 0.9 * torch.exp(-time * 80.0))
    loss = [
        decay * torch.exp(0.5 * noise),
        2.3 * torch.exp(-time * 300.0) + 1e-3 * torch.exp(noise),
        3.0 - 6.0 * time + 0.5 * noise,  # a density's likelihood crosses zero
        2.3 + 0.0 * noise,
        2.3 * torch.exp(-time * 60.0) * torch.exp(noise),  # to nothing at all
    ][kind]
    other = torch.randn(batches, generator=generator)
    norm = 10.0 ** (-2.0 * time * (kind + 1)) * torch.exp(other)
    monitor = HealthMonitor(GovernorConfig())
    for step in range(batches):
        batch = float(loss[step]), float(norm[step])
        assert monitor.check(*batch, finite=True) is Verdict.HEALTHY
        if step % 100 == 99:
            assert not monitor.has_unlearnt(monitor.medians()[0])


@pytest.mark.parametrize(
    ("loss", "norm", "wanted"),
    [
        (30.0, 900.0, "the loss is 30, usually 1;"),
        (19.0, 1100.0, "the gradient norm is 1100, usually 1;"),
        (30.0, 2000.0, "the gradient norm is 2000, usually 1;"),
    ],
)
def test_a_refusal_names_the_limit_that_was_crossed(loss, norm, wanted):
    monitor = HealthMonitor(GovernorConfig())
    for _ in range(15):
        monitor.check(1.0, 1.0, finite=True)
    verdict = monitor.check(loss, norm, finite=True)  # limits are renewed after it
    assert verdict is Verdict.SPIKE
    assert wanted in monitor.describe(verdict, loss, norm, finite=True)


@pytest.mark.parametrize(
    ("batch", "wanted"),
    [
        ((Verdict.NON_FINITE, NAN, 1.0, True), "the loss is not finite (nan); the"),
        ((Verdict.NON_FINITE, 1.0, INF, True), "the gradient norm is not finite (inf)"),
        ((Verdict.NON_FINITE, 1.0, 1.0, False), "a buffer of the model is not finite"),
        ((Verdict.SPIKE, 50.0, 1.0, True), "the loss is 50, usually 1; the step was"),
        ((Verdict.SPIKE, 1.0, 5e3, True), "the gradient norm is 5000, usually 1"),
        ((Verdict.DIVERGED, 50.0, 1.0, True), "1 bad batches in a row; at the last"),
    ],
)
def test_reasons_are_one_line_and_the_same_after_loading(batch, wanted):
    first, monitor = HealthMonitor(SMALL), HealthMonitor(SMALL)
    for value in [1.0] * 12 + [NAN]:
        first.check(value, 1.0, finite=True)
    monitor.load_state_dict(saved := first.state_dict())
    first.check(7.0, 1.0, finite=True)  # on numbers of its own
    verdict, loss, norm, finite = batch
    reason = monitor.describe(verdict, loss, norm, finite=finite)
    assert wanted in reason
    assert "\n" not in reason
    with pytest.raises(InvalidInputError, match="not of this window"):
        monitor.load_state_dict({**saved, "recent": [[1.0, 1.0]] * 10})
    for field, value in (
        ("spike", 1.0),
        ("loss_spike", NAN),
        ("window", 7),
        ("patience", 0),
    ):
        with pytest.raises(InvalidInputError, match=f"^{field} must be"):
            GovernorConfig(**{field: value})


def test_all_finite_sees_every_number():
    assert all_finite([])
    assert all_finite([torch.ones(3), torch.tensor([1, 2]), torch.zeros(0)])
    for value in (NAN, INF, -INF):
        assert not all_finite([torch.ones(3), torch.tensor([1.0, value])])
    assert not all_finite([torch.tensor([2e30])], 1e30)
    assert all_finite([torch.tensor([3e38] * 4)])  # the sum of squares would overflow


# Snapshots.


class Model(nn.Module):
    """Parameters of two dtypes, a norm's buffers, and buffers that are never saved."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.3))
        self.coarse = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.zeros(2), persistent=False)
        self.register_buffer("wide", torch.ones(1, 3).expand(4, 3), persistent=False)

    def forward(self, x):
        self.seen += 1
        return self.layers(x) * self.coarse.float().sum()


OPTIMIZERS = {
    "adamw": lambda p: optim.AdamW(p, 0.01),
    "foreach": lambda p: optim.Adam(p, 0.01, amsgrad=True, foreach=True),
    "sgd": lambda p: optim.SGD(p, 0.01, momentum=0.9),
    "plain": lambda p: optim.SGD(p, 0.01),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, centered=True),
}


def build(name="adamw"):
    torch.manual_seed(5)
    model = Model()
    return model, OPTIMIZERS[name](model.parameters())


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 5)).square().mean().backward()
        optimizer.step()


def picture(model, optimizer):
    return everything(model, optimizer), bits(torch.get_rng_state())


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_comes_back_to_the_bit_and_the_run_repeats_itself(name, before):
    model, optimizer = build(name)
    train(model, optimizer, before)
    snapshot = Snapshot(model, optimizer)
    kept = picture(model, optimizer)
    identities = [id(t) for t in (*model.parameters(), *model.buffers())]
    train(model, optimizer, 4)
    later = picture(model, optimizer)
    assert later != kept
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(torch.nan)
        model.wide[:1].fill_(7.0)
    snapshot.restore()
    assert picture(model, optimizer) == kept
    assert identities == [id(t) for t in (*model.parameters(), *model.buffers())]
    train(model, optimizer, 4)
    assert picture(model, optimizer) == later
    snapshot.restore()
    assert picture(model, optimizer) == kept


# Both together, over a growing model.


class Run:
    """A growing model with safety checks, without a Grower."""

    def __init__(self, **config):
        self.model = grow("vector")
        self.model.host.drop.p = 0.0
        self.optimizer = torch.optim.Adam(self.model.host.parameters(), 1e-3)
        self.model.train_with(self.optimizer)
        self.safety = Safety(self.model, GovernorConfig(**config))

    def train(self, batches, factor=1.0):
        for batch in batches:
            x, y = make_batch("vector", 16, rng_seed=batch)
            self.safety.before_batch()
            loss = factor * nn.functional.cross_entropy(self.model.host(x), y)
            self.safety.after_batch(loss)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def weights(self):
        return [p.detach().clone() for p in self.model.parameters()]

    def kept(self):
        tensors = self.safety.snapshot.tensors
        return [tensors[name].clone() for name, _ in self.model.named_parameters()]


@REFUSES
def test_a_snapshot_is_taken_at_the_first_good_batch_after_a_change():
    run = Run()
    run.train(range(10))
    before, first = run.weights(), run.kept()
    run.safety.topology_changed()
    run.train(range(1), factor=torch.nan)
    assert all(map(torch.equal, first, run.kept()))
    run.train(range(1))
    assert all(map(torch.equal, run.kept(), before))
    assert not any(map(torch.equal, run.kept(), run.weights()))


@REFUSES
def test_three_bad_batches_roll_back_and_a_second_time_clear_the_moments():
    run = Run()
    run.train(range(16))
    assert run.safety.take_snapshot()
    kept = run.weights()
    run.train(range(2))
    run.train(range(3), factor=1e5)
    words = [incident.split(":")[0] for incident in run.safety.incidents]
    assert words == ["refused", "refused", "rolled back"]
    assert all(map(torch.equal, kept, run.weights()))
    moments = [state["exp_avg"] for state in run.optimizer.state.values()]
    assert any(bool(moment.any()) for moment in moments)
    run.train(range(2))
    assert len(run.safety.incidents) == 3
    run.train(range(3), factor=1e5)
    assert run.safety.rollbacks == 2
    moments = [state["exp_avg"] for state in run.optimizer.state.values()]
    assert not any(bool(moment.any()) for moment in moments)


def test_what_was_learnt_and_lost_is_rolled_back_at_the_decision():
    run = Run(window=8, loss_spike=1000.0)
    run.train([0] * 40)
    run.safety.topology_changed()
    run.train([0])
    kept = run.kept()
    assert not run.safety.check_decision()
    with torch.no_grad():
        run.model.host.last.weight.mul_(30.0)
    run.safety.topology_changed()
    run.train([1, 2] * 4)  # bad, but none of them a spike; no snapshot is taken
    assert run.safety.incidents == []
    assert run.safety.check_decision()
    assert "what was learnt is lost" in run.safety.incidents[-1]
    assert all(map(torch.equal, kept, run.weights()))
    assert not run.safety.check_decision()  # the statistics were rolled back too


def test_batches_as_hard_as_the_first_ones_are_learnt_from():
    """A rare class, when the others are known: its loss is that of the first batch."""
    monitor = HealthMonitor(GovernorConfig())
    for batch in range(400):
        loss, norm = (2.0, 3.0) if batch < 8 else (1e-3, 1e-3)
        if batch % 40 == 39:
            loss, norm = 8.0, 12.0
        assert monitor.check(loss, norm, finite=True) is Verdict.HEALTHY
    assert monitor.check(2e3, 3.0, finite=True) is Verdict.SPIKE


def test_spikes_that_come_back_become_usual_and_an_explosion_does_not():
    monitor = HealthMonitor(GovernorConfig())
    found = [
        monitor.check(1000.0 if batch % 10 == 9 else 1.0, 1.0, finite=True)
        for batch in range(8, 108)
    ]
    assert found.count(Verdict.SPIKE) == 2
    assert found[-1] is Verdict.HEALTHY
    wild = HealthMonitor(GovernorConfig())
    for batch in range(8, 108):
        bad = batch % 10 == 9
        loss = 1000.0 * 100.0 ** (batch // 10) if bad else 1.0
        verdict = wild.check(loss, 1.0, finite=True)
        assert verdict is (Verdict.SPIKE if bad and batch > 9 else Verdict.HEALTHY)


def test_statistics_of_older_versions_are_loaded():
    old = {k: v for k, v in HealthMonitor(SMALL).state_dict().items() if k != "rare"}
    del old["spikes"]
    monitor = HealthMonitor(SMALL)
    monitor.load_state_dict(old)
    assert monitor.rare == [0.0, 0.0]


def test_a_loss_that_is_not_known_is_ignored():
    """A warm-up without `grower.loss`: its batches are recorded without a loss."""
    monitor = HealthMonitor(SMALL)
    for _ in range(20):
        assert monitor.check(None, 1.0, finite=True) is Verdict.HEALTHY
    assert math.isnan(monitor.medians()[0])
    assert not monitor.has_unlearnt(monitor.medians()[0])
    for _ in range(20):
        assert monitor.check(0.7, 1.0, finite=True) is Verdict.HEALTHY
    assert monitor.check(50.0, 1.0, finite=True) is Verdict.SPIKE
    assert monitor.check(None, 1e6, finite=True) is Verdict.SPIKE
    assert "gradient norm" in monitor.describe(Verdict.SPIKE, None, 1e6, finite=True)


@REFUSES
def test_a_loss_that_stays_high_becomes_the_usual_one():
    run = Run()
    run.train(range(16))
    assert run.safety.take_snapshot()
    run.train(range(60), factor=1e5)
    words = [incident.split(":")[0] for incident in run.safety.incidents]
    assert words.count("rolled back") == 3
    assert len(words) == 9
    kept = run.weights()
    run.train(range(1), factor=1e5)
    assert not any(map(torch.equal, kept, run.weights()))
