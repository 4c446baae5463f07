import pytest
import torch
from torch import nn

from esper.contracts.blueprints import Blueprint, Form
from esper.growth import initialisers
from esper.growth.blueprints.seed import build
from esper.growth.hooks import Flow, SlotHooks
from esper.growth.initialisers import (
    INCOMING_SCALE,
    OUTPUT_SCALE,
    start,
)
from esper.growth.slots import find_sites, survey
from esper.growth.tracing import new_middle
from tests.growth.hosts import Net


def blueprint(form, size=4):
    return Blueprint(f"{form.name.lower()}_{size}", form, size, merges=False)


def dense(activation=nn.GELU):
    return Net(a=nn.Linear(10, 16), act=activation(), b=nn.Linear(16, 7))


def over_time():
    return Net(a=nn.Linear(10, 16), act=nn.GELU(), b=nn.Linear(16, 10))


def over_lines():
    first = nn.Conv1d(4, 8, 5, padding=2)
    second = nn.Conv1d(8, 6, 3, stride=2, padding=1)
    return Net(a=first, norm=nn.BatchNorm1d(8), act=nn.ReLU(), b=second)


def over_images():
    first = nn.Conv2d(3, 8, 3, padding=1)
    second = nn.Conv2d(8, 5, (3, 2), stride=(2, 1), padding=(1, 0))
    return Net(a=first, act=nn.ReLU(), b=second)


def pooled():
    flat = nn.Sequential(nn.ReLU(), nn.AvgPool1d(2), nn.Flatten())
    return Net(a=nn.Conv1d(4, 8, 3, padding=1), act=flat, b=nn.Linear(40, 6))


KINDS = {
    "linear span": (dense, (10,), "a->b", Form.WIDEN),
    "sequence span": (over_time, (5, 10), "a->b", Form.WIDEN),
    "conv1d span": (over_lines, (4, 10), "a->b", Form.WIDEN),
    "conv2d span": (over_images, (3, 6, 5), "a->b", Form.WIDEN),
    "beside linear": (dense, (10,), "b->b", Form.LOW_RANK),
    "across linear": (dense, (10,), "a->b", Form.LOW_RANK),
    "beside conv1d": (over_lines, (4, 10), "b->b", Form.LOW_RANK),
    "beside conv2d": (over_images, (3, 6, 5), "b->b", Form.LOW_RANK),
    "residual vector": (dense, (10,), "act", Form.RESIDUAL_MLP),
    "residual sequence": (over_time, (5, 10), "act", Form.RESIDUAL_MLP),
    "residual signal": (over_lines, (4, 10), "act", Form.RESIDUAL_MLP),
    "residual image": (over_images, (3, 6, 5), "act", Form.RESIDUAL_MLP),
}
STARTED = ("gradmax", "tiny")


class Bed:
    """A host that was trained on one batch, and a place in it."""

    def __init__(self, make, shape, slot, rows=128, trained=True):
        torch.manual_seed(5)
        self.host = make()
        self.inputs = torch.randn(rows, *shape)
        # The target is another host: a gradient that follows the inputs.
        with torch.no_grad():
            self.target = 2.0 * make()(self.inputs)
        sites = find_sites(self.host, [slot])
        self.place = survey(self.host, sites, self.inputs[:4]).places[0]
        self.hooks = SlotHooks(self.place, Flow())
        self.hooks.attach()
        if trained:
            self.loss().backward()
        self.hooks.keeping = False
        self.host.eval()

    def loss(self):
        return nn.functional.mse_loss(self.host(self.inputs), self.target)

    def seed(self, kind, initialiser, rng_seed=0):
        generator = torch.Generator().manual_seed(rng_seed)
        middle = nn.Identity()
        if kind.form is Form.WIDEN:
            units = self.place.inlet.weight.shape[0]
            middle = new_middle(self.place.middle, kind.size, units)
        seed = build(kind, self.place.geometry, generator, middle)
        note = start(seed, self.place, self.hooks.samples, initialiser)
        return seed, note

    def output(self, seed):
        given = self.hooks.samples[-1].inputs
        return seed(given).detach()


def bed(name, **more):
    make, shape, slot, form = KINDS[name]
    return Bed(make, shape, slot, **more), blueprint(form)


def rms(tensor):
    return float(tensor.square().mean().sqrt())


def test_zero_out_makes_new_units_as_large_as_the_old_ones_where_these_are_a_measure():
    grown, kind = bed("conv1d span")
    for factor in (7.0, 0.0, torch.nan):
        with torch.no_grad():
            grown.host.a.weight.mul_(factor)
        seed, _ = grown.seed(kind, "zero_out")
        built = seed.weights["first"].std(correction=0)
        if factor == 7.0:
            torch.testing.assert_close(built, grown.host.a.weight.std(correction=0))
        assert 0.0 < float(built.detach()) < 4.0


@pytest.mark.parametrize("name", KINDS)
def test_a_tiny_seed_is_of_its_size_and_lowers_the_loss_more_than_chance(name):
    grown, kind = bed(name)
    seed, note = grown.seed(kind, "tiny")
    paired = kind.form is not Form.LOW_RANK
    assert note == f"tiny: {kind.size // 2 if paired else kind.size} directions"
    sample = grown.hooks.samples[-1]
    output = grown.output(seed)
    assert rms(output) == pytest.approx(OUTPUT_SCALE * rms(sample.outputs), rel=1e-4)
    drop = -float((output * sample.gradient).sum())
    by_chance = []
    for rng_seed in range(5):
        other, _ = grown.seed(kind, "zero_out", rng_seed)
        with torch.no_grad():
            other.weights["last"].normal_()
        its = grown.output(other)
        its = its * rms(output) / rms(its)
        by_chance.append(abs(float((its * sample.gradient).sum())))
    assert drop > 1.5 * max(by_chance)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU])
def test_pairs_of_units_are_opposite_and_linear_together(activation):
    grown = Bed(lambda: dense(activation), (10,), "a->b")
    seed, _ = grown.seed(blueprint(Form.WIDEN), "tiny")
    first, last = seed.weights["first"].detach(), seed.weights["last"].detach()
    torch.testing.assert_close(first[:, 0::2], -first[:, 1::2], rtol=0.0, atol=0.0)
    torch.testing.assert_close(last[0::2], -last[1::2], rtol=0.0, atol=0.0)
    h, zero = torch.randn(4, 10), torch.zeros(4, 10)
    torch.testing.assert_close(seed(h) + seed(-h), 2 * seed(zero), rtol=0.0, atol=1e-6)
    assert float((seed(h) - seed(zero)).detach().abs().max()) > 1e-3


@pytest.mark.parametrize("size", [1, 5, 40])
def test_units_that_tiny_has_no_direction_for_start_at_zero_out(size):
    grown, _ = bed("linear span")
    kind = blueprint(Form.WIDEN, size)
    seed, note = grown.seed(kind, "tiny")
    plain, _ = grown.seed(kind, "zero_out")
    directions = {1: 1, 5: 2, 40: 7}[size]
    assert note == f"tiny: {directions} directions"
    used = min(size, 2 * directions)
    assert seed.weights["last"][:used].abs().amax(1).min() > 0.0
    assert not seed.weights["last"][used:].any()
    assert torch.equal(
        seed.weights["first"][:, used:], plain.weights["first"][:, used:]
    )


@pytest.mark.parametrize("name", KINDS)
def test_gradmax_gives_incoming_weights_a_larger_gradient_than_chance_does(name):
    grown, kind = bed(name)
    seed, note = grown.seed(blueprint(kind.form, 2), "gradmax")
    assert note == "gradmax: 2 directions"
    sample = grown.hooks.samples[-1]
    chosen = seed.weights["last"].detach().clone()
    units = 0 if chosen.dim() == 2 else 1
    columns = chosen.movedim(units, -1)

    def pull(last):
        seed.zero_grad()
        with torch.no_grad():
            seed.weights["last"].copy_(last)
        (seed.eval()(sample.inputs) * sample.gradient).sum().backward()
        return float(seed.weights["first"].grad.norm())

    best, by_chance = pull(chosen), []
    for rng_seed in range(5):
        chance = torch.Generator().manual_seed(rng_seed)
        other = torch.randn(columns.numel() // 2, 2, generator=chance)
        other, _ = torch.linalg.qr(other)  # of the same lengths and as far apart
        other = other.reshape(columns.shape).movedim(-1, units)
        by_chance.append(pull(other * chosen.norm() / other.norm()))
    assert best > max(by_chance)
    assert best > 1.1 * sum(by_chance) / len(by_chance)


def test_gradmax_scales_its_columns_like_the_hosts():
    grown, kind = bed("conv2d span")
    seed, _ = grown.seed(kind, "gradmax")
    plain, _ = grown.seed(kind, "zero_out")
    torch.testing.assert_close(
        seed.weights["first"],
        INCOMING_SCALE * plain.weights["first"],
        rtol=1e-5,
        atol=0.0,
    )
    assert not seed.weights["first_bias"].any()
    norms = seed.weights["last"].detach().transpose(0, 1).flatten(1).norm(dim=1)
    host = grown.host.b.weight.detach().transpose(0, 1).flatten(1).norm(dim=1).mean()
    torch.testing.assert_close(norms, host.expand(4), rtol=1e-5, atol=0.0)


def without_gradient(value):
    grown, _ = bed("linear span")
    grown.hooks.samples[-1].gradient.fill_(value)
    return grown


@pytest.mark.parametrize("initialiser", STARTED)
def test_a_start_that_is_not_possible_is_zero_out_and_notes_why(initialiser):
    widen, conv = blueprint(Form.WIDEN), blueprint(Form.CONV, 3)
    for grown, kind, why in (
        (bed("linear span", trained=False)[0], widen, "needs a batch that was trained"),
        (Bed(pooled, (4, 10), "a->b"), widen, "cannot look through pooling"),
        (bed("residual signal")[0], conv, "serves seeds of two maps"),
        (without_gradient(0.0), widen, "found no"),
        (without_gradient(torch.nan), widen, "met values that are not finite"),
    ):
        seed, note = grown.seed(kind, initialiser)
        plain, _ = grown.seed(kind, "zero_out")
        assert note.startswith(f"zero_out ({initialiser} {why}")
        for name, value in plain.weights.items():
            assert torch.equal(seed.weights[name], value)


@pytest.mark.parametrize("rounding", [0.0, 1e-9, 1e-6])
def test_an_activation_that_cancels_pairs_leaves_a_seed_at_zero_out(
    rounding, monkeypatch
):
    class Even(nn.Module):
        def forward(self, h):
            return h.square()

    # Another CPU adds the opposite units up in another order.
    exact = initialisers._output_rms
    monkeypatch.setattr(
        initialisers, "_output_rms", lambda *given: max(exact(*given), rounding)
    )
    grown = Bed(lambda: dense(Even), (10,), "a->b")
    seed, note = grown.seed(blueprint(Form.WIDEN), "tiny")
    plain, _ = grown.seed(blueprint(Form.WIDEN), "zero_out")
    assert note == "zero_out (tiny found no direction to go)"
    assert torch.equal(seed.weights["first"], plain.weights["first"])
    assert not seed.weights["last"].any()


@pytest.mark.parametrize("initialiser", ["zero_out", *STARTED])
def test_a_start_leaves_chance_norms_and_gradients_alone(initialiser):
    grown, kind = bed("conv1d span")
    before = torch.get_rng_state()
    seed, _ = grown.seed(kind, initialiser)
    assert torch.equal(before, torch.get_rng_state())
    norm = next(m for m in seed.modules() if isinstance(m, nn.BatchNorm1d))
    assert int(norm.num_batches_tracked) == 0
    assert seed.training
    assert all(p.requires_grad and p.grad is None for p in seed.parameters())


def test_dropout_does_not_make_tiny_random():
    def dropping():
        middle = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        return Net(a=nn.Linear(10, 16), act=middle, b=nn.Linear(16, 7))

    grown = Bed(dropping, (10,), "a->b")
    seeds = []
    for global_seed in (1, 2):
        torch.manual_seed(global_seed)
        seeds.append(grown.seed(blueprint(Form.WIDEN), "tiny")[0])
    assert torch.equal(seeds[0].weights["last"], seeds[1].weights["last"])
