"""Custom blueprints: registration, tests before planting, gates and errors."""

import pytest
import torch
from torch import nn

from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import InvalidInputError
from esper.growth.blueprints import registry
from esper.growth.blueprints.geometry import Layout
from esper.growth.blueprints.registry import (
    Gated,
    blueprint,
    blueprints,
    build,
    find,
    forget,
    make_module,
    misfit,
)
from tests.growth.blueprints.places import residual

VECTOR = residual(Layout.VECTOR, 6)
IMAGE = residual(Layout.IMAGE, 4, 5, 5)


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTERED", {})


def built(factory, geometry=VECTOR, rng_seed=0):
    blueprint("mine")(factory)
    return make_module("mine", geometry, torch.Generator().manual_seed(rng_seed))


def module(forward, *, parameters=True):
    """A module with one scalar weight and this forward of (module, h)."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            if parameters:
                self.weight = nn.Parameter(torch.ones(()))

        def forward(self, h):
            return forward(self, h)

    return Own()


def test_a_registered_blueprint_is_found_beside_the_built_in_ones_where_it_fits():
    @blueprint("mine", fits=lambda place: "" if place.inlet_width < 7 else "too wide")
    def factory(geometry):
        return nn.Linear(geometry.inlet_width, geometry.outlet_width)

    assert find("mine") == Blueprint("mine", Form.CUSTOM, 0, merges=False)
    assert list(blueprints()) == [*(b.name for b in BLUEPRINTS), "mine"]
    assert find("conv") is next(b for b in BLUEPRINTS if b.name == "conv")
    seed = build(find("mine"), VECTOR, torch.Generator(), nn.Identity())
    assert not seed(torch.randn(2, 6)).count_nonzero()
    assert misfit(find("mine"), VECTOR) == ""
    assert misfit(find("mine"), residual(Layout.VECTOR, 7)) == "too wide"


@pytest.mark.parametrize(
    ("geometry", "make"),
    [
        (VECTOR, lambda: nn.Linear(6, 6)),
        (residual(Layout.SEQUENCE, 5, 6), lambda: nn.Linear(6, 6)),
        (residual(Layout.SIGNAL, 4, 9), lambda: nn.Conv1d(4, 4, 3, padding=1)),
        (IMAGE, lambda: nn.Conv2d(4, 4, 3, padding=1)),
    ],
)
def test_a_module_that_is_not_zero_is_gated_per_channel(geometry, make):
    seed = built(lambda _: make(), geometry)
    assert isinstance(seed, Gated)
    h = torch.randn(2, *geometry.inlet_shape)
    assert not seed(h).count_nonzero()
    with torch.no_grad():
        seed.gate[1] = 2.0
    outputs, inner = seed(h), seed.module(h)
    axis = 1 if geometry.inlet_layout.channels_first else -1
    for channel in range(geometry.outlet_width):
        expected = inner.select(axis, channel) * (2.0 if channel == 1 else 0.0)
        assert torch.equal(outputs.select(axis, channel), expected)


def test_a_module_that_is_zero_at_birth_is_taken_as_it_is():
    def factory(geometry):
        last = nn.Linear(8, 6)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.5), last)

    assert isinstance(built(factory), nn.Sequential)


def test_chance_in_a_factory_comes_from_the_generator_alone():
    def factory(geometry):
        return nn.Linear(6, 6)

    before = torch.get_rng_state()
    one, again, other = built(factory), built(factory), built(factory, rng_seed=1)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.module.weight, again.module.weight)
    assert not torch.equal(one.module.weight, other.module.weight)


def test_trying_a_module_leaves_no_trace_in_it():
    def count(self, h):
        self.calls += 1
        return h * self.weight

    made = module(count)
    made.register_buffer("calls", torch.zeros(()))
    made.train()
    seed = built(lambda _: made)
    assert int(seed.module.calls) == 0
    assert made.training


def noisy(self, h):
    return self.weight * h * torch.rand(())


def failing():
    raise KeyError("width")


REFUSED = [
    (failing, "'mine' failed: KeyError: 'width'"),
    (lambda: "a string", "must return an nn.Module, it returned a str"),
    (lambda: nn.Identity(), "without trainable parameters"),
    (lambda: nn.Linear(6, 6).requires_grad_(False), "without trainable parameters"),
    (lambda: nn.LazyLinear(6), "lazy module"),
    (lambda: nn.Linear(6, 5), r"must return shape \(1, 6\) .* it returned \(1, 5\)"),
    (lambda: module(lambda m, h: m.weight * h[:1]), r"it returned \(1, 6\)"),
    (lambda: nn.Linear(7, 6), r"failed on an input of shape \(1, 6\): RuntimeError"),
    (lambda: module(lambda m, h: (h,)), "must return a tensor, it returned a tuple"),
    (lambda: module(lambda m, h: (m.weight * h).double()), "it returned torch.float64"),
    (lambda: module(lambda m, h: m.weight * h / 0.0), "values that are not fin"),
    (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
        "ValueError|in its bat",
    ),
    (lambda: module(lambda m, h: m.weight * (h - h.mean(0))), "samples in its batch"),
    (lambda: module(noisy), "random numbers in eval mode"),
    (lambda: module(lambda m, h: m.weight * h * 0.0), "all its gradients"),
    (lambda: module(lambda m, h: torch.zeros_like(h)), "all its gradients"),
    (
        lambda: module(lambda m, h: h * 0.0 * (m.weight - 1).sqrt()),
        "gradients that are not finite",
    ),
]


@pytest.mark.parametrize(
    ("make", "reason"), REFUSED, ids=[reason for _, reason in REFUSED]
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_cannot_be_planted_is_refused_in_one_line(make, reason):
    before = torch.get_rng_state()
    with pytest.raises(InvalidInputError, match=reason) as caught:
        built(lambda _: make())
    assert "'mine'" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(before, torch.get_rng_state())


def test_names_that_are_unknown_taken_or_impossible_are_refused():
    blueprint("mine")(lambda _: nn.Linear(6, 6))
    gone = Blueprint("gone", Form.CUSTOM, 0, merges=False)
    for call, reason in (
        (lambda: find("widen_9"), "no blueprint 'widen_9'; did you mean 'widen_"),
        (lambda: blueprint("mine")(lambda _: nn.Linear(6, 7)), "another factory"),
        (lambda: blueprint("conv"), "is built in"),
        (lambda: blueprint(""), "letters, digits"),
        (lambda: blueprint("a b"), "letters, digits"),
        (
            lambda: build(gone, VECTOR, torch.Generator(), nn.Identity()),
            "'gone' is not registered in this process",
        ),
        (lambda: forget("gone"), "no registered blueprint 'gone'"),
    ):
        with pytest.raises(InvalidInputError, match=reason):
            call()
    assert make_module("mine", VECTOR, torch.Generator()).module.out_features == 6
    forget("mine")
    blueprint("mine")(lambda _: nn.Bilinear(6, 6, 6))


def test_the_same_definition_may_be_run_twice_unless_it_closes_over_values():
    code = "def factory(geometry):\n    return nn.Linear(6, 6)\n"
    for _ in range(2):
        names = {"nn": nn}
        exec(compile(code, "cell", "exec"), names)
        blueprint("mine")(names["factory"])

    def closing(hidden):
        def factory(geometry):
            return nn.Linear(6, hidden)

        return factory

    blueprint("closed")(closing(5))
    with pytest.raises(InvalidInputError, match="another factory"):
        blueprint("closed")(closing(6))
