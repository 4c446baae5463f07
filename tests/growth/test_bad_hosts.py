"""Hosts and slots that cannot grow are refused; all others grow.

A refusal names the module and leaves no hook on the host or its optimiser.
"""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from esper.contracts.errors import EsperError, InvalidInputError, InvalidStateError
from esper.grower import Grower
from esper.growth.blueprints.registry import misfit
from tests.growth.hosts import Vectors, make_batch, make_host

X = make_batch("vector", 6)[0]


def attach(host: nn.Module, slots, example=X, optimizer=None, **options) -> Grower:
    optimizer = optimizer or torch.optim.SGD(host.parameters(), 0.01)
    options = {"seeds_per_slot": 1, "controller": "never", **options}
    return Grower(host, optimizer, slots, example=example, **options)


def refused(host: nn.Module, slots, example=X, kind=torch.optim.SGD, **options) -> str:
    """The error message for a host; checks that no hook is left."""
    trained = [*host.parameters()]
    if not trained or any(map(nn.parameter.is_lazy, trained)):
        trained = [nn.Parameter(torch.zeros(1))]
    optimizer = kind(trained, 0.01)
    before = hooks(host)
    with pytest.raises(EsperError) as caught:
        attach(host, slots, example, optimizer, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 200
    assert hooks(host) == before
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    return message


def hooks(host: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in host.modules()
    )


def trains(grower: Grower, x: Tensor = X) -> None:
    """Plant what fits in the first slot and take it through a few steps."""
    model = grower.model
    slot = model.slots[0]
    geometry = model.seeds.place(0).geometry
    kind = next(b.name for b in model.spec.blueprints if not misfit(b, geometry))
    before = model.example_outputs()
    receipt = grower.plant(slot, kind, tempo="SLOW")
    assert receipt.jump == 0.0
    assert all(map(torch.equal, before, model.example_outputs()))
    optimizer = grower.optimizer
    for step in range(6):
        loss = grower.loss(lambda: model.host(x).float().square().mean())
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.seed_parameters().values())
        optimizer.step()
        if step == 3:
            grower.advance(slot)
        if step in (1, 3):
            grower.step(metric=0.5)
    assert grower.history[0].incidents == ()
    assert all(torch.isfinite(t).all() for t in model.example_outputs())


class Host(Vectors):
    """Vectors with a forward of one's own."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def plain(host, x):
    return host.last(torch.tanh(host.second(torch.relu(host.first(x)))))


# Refused hosts: how to build them, their slots, and the error message.


def changed(change, forward=plain) -> nn.Module:
    host = Host(forward)
    change(host)
    return host


def share(host):
    host.again = host.second


def tie(host):
    host.other = nn.Linear(12, 12)
    host.other.weight = host.second.weight


def spoil(host):
    with torch.no_grad():
        host.second.weight[0, 0] = torch.nan


def twice(host, x):
    h = host.second(torch.relu(host.first(x)))
    return host.last(torch.tanh(host.second(torch.tanh(h))))


def noisy(host, x):
    return plain(host, x + torch.randn_like(x))


def cut(host, x):
    return host.last(torch.tanh(host.second(torch.relu(host.first(x)))).detach())


def in_place(host, x):
    h = torch.relu(host.first(x))
    z = torch.tanh(host.second(h))
    h.mul_(2.0)
    return host.last(z + h)


class Deep(nn.Module):
    """Its answer has four axes after a linear layer: are its channels last?"""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 12)

    def forward(self, x):
        return self.inner(x[:, None, None])


class Two(nn.Module):
    """Answers with two tensors, or none."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = nn.Linear(8, 8), kind

    def forward(self, x):
        h = self.inner(x)
        return {"tuple": (h, h), "dict": {"h": h}, "none": None}[self.kind]


class Take(nn.Module):
    def forward(self, given):
        if isinstance(given, tuple):
            return given[0]
        return given["h"] if isinstance(given, dict) else torch.zeros(6, 8)


def two(kind):
    host = nn.Sequential()
    host.two, host.take = Two(kind), Take()
    return host


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))


VECTOR = partial(make_host, "vector")
SECOND = ["second"]
HOSTS_REFUSED = [
    (VECTOR, ["secnd"], "did you mean 'second'"),
    (VECTOR, ["frist->second"], "'frist'; did you mean 'first'"),
    (VECTOR, [], "slots is empty"),
    (VECTOR, ["second", "second"], "'second' is named twice"),
    *((VECTOR, [bad], "must be a module name") for bad in ("", "->b", "a->b->c")),
    (lambda: changed(share), SECOND, "'second' is shared with 'again'"),
    (lambda: changed(tie), SECOND, "second.weight is tied to other.weight"),
    (lambda: changed(spoil), SECOND, "'second.weight' is not finite"),
    (lambda: Host(twice), SECOND, "'second' is called 2 times"),
    (lambda: Host(plain), ["norm"], "'norm' is never called"),
    (lambda: two("tuple"), ["two"], "'two' returns tuple"),
    (lambda: two("none"), ["two"], "'two' returns NoneType"),
    (lambda: Host(noisy), SECOND, "two calls of the host in eval mode differ"),
    (lambda: Host(cut), SECOND, "no gradient reaches 'second'"),
    (lambda: nn.DataParallel(VECTOR()), ["module.second"], "pass model.module"),
    (
        lambda: torch.compile(VECTOR(), backend="eager"),
        SECOND,
        "pass the module before torch.compile",
    ),
    (lazy, ["0"], "call it once first"),
    (lambda: VECTOR().to("meta"), SECOND, "the host is on the meta device"),
    (lambda: VECTOR().to("meta"), "auto", "the host is on the meta device"),
    (lambda: nn.Sequential(nn.ReLU()), ["0"], "nothing to grow"),
    (
        lambda: Host(in_place),
        ["second->last"],
        "input of 'second' is changed in place before 'last' returns",
    ),
    (
        lambda: nn.Sequential(Deep(), nn.Flatten(), nn.Linear(12, 5)),
        ["0"],
        "'0' is [6, 1, 1, 12]",
    ),
    (VECTOR, ["*.mlp"], "no slot matches '*.mlp'"),
]


@pytest.mark.parametrize(
    ("make", "slots", "line"), HOSTS_REFUSED, ids=[line for *_, line in HOSTS_REFUSED]
)
def test_hosts_and_slots_that_cannot_be_grown_are_refused(make, slots, line):
    assert line in refused(make(), slots)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"kind": torch.optim.LBFGS}, "Use a first-order optimiser"),
        ({"controller": "premise"}, "did you mean"),
        ({"mode": "best"}, "mode must be"),
        ({"blueprints": ["widen_9"]}, "did you mean"),
        ({"decisions": 0}, "decisions must be a whole number of at least 1, got 0"),
        ({"stop": "sometime"}, "stop must be 'end' or 'anytime', got 'sometime'"),
        ({"tick": 1.5}, "tick must be a whole number of at least 1, got 1.5"),
        ({"rent": -1.0}, "rent must lie in"),
        ({"rent": float("nan")}, "rent must lie in"),
        ({"budget": -0.5}, "budget must be at least 0, got -0.5"),
        ({"budget": float("nan")}, "budget must be at least 0, got nan"),
        ({"seeds_per_slot": 0}, "seeds_per_slot must be a whole number of at least 1"),
        ({"min_age": -1}, "min_age must be a whole number of at least 0, got -1"),
        ({"decisions": "3"}, "decisions must be a whole number"),
        ({"min_age": "a"}, "min_age must be a whole number"),
        ({"rng_seed": "x"}, "rng_seed must be a whole number"),
        ({"rent": "a"}, "rent must lie in"),
        ({"governor": 3}, "governor must be a GovernorConfig or None, got 3"),
        ({"blueprints": "widen_8"}, "blueprints must be a list of names"),
        (
            {"example": torch.zeros(4, 7)},
            "the host cannot be called with the example: Runtime",
        ),
        ({"example": X[:1]}, "Expected more than 1 value per channel"),  # batch norm
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options, line):
    assert line in refused(make_host("vector"), ["second"], **options)


def test_analysis_in_inference_mode_is_refused():
    with torch.inference_mode():
        assert "inference mode" in refused(make_host("vector"), ["second"])


@pytest.mark.parametrize("slots", [None, 3, [3], "first->second"])
def test_slots_that_are_no_list_of_names_are_refused(slots):
    assert "slots must be a list of names or 'auto'" in refused(
        make_host("vector"), slots
    )


def test_two_growers_over_overlapping_hosts_are_refused_until_the_first_is_detached():
    inner = make_host("vector")
    outer = nn.Sequential(inner)
    first = attach(inner, ["second", "last"])
    with pytest.raises(InvalidInputError, match="has slots of another Grower"):
        attach(outer, ["0.first", "0.second"])
    assert len(inner.first._forward_hooks) == 0
    first.detach()
    trains(attach(outer, ["0.first", "0.second"]))


# Supported hosts.


def test_frozen_hosts_grow():
    host = make_host("vector")
    host.first.requires_grad_(False)
    host.norm.requires_grad_(False)
    frozen = [p.clone() for p in host.first.parameters()]
    grower = attach(host, ["first->second"])
    trains(grower)
    assert all(map(torch.equal, frozen, host.first.parameters()))
    host = make_host("vector").requires_grad_(False)
    everything = {name: p.clone() for name, p in host.named_parameters()}
    trains(attach(host, ["first->second"]))
    after = dict(host.named_parameters())
    assert all(torch.equal(everything[name], after[name]) for name in everything)


def stack(*modules):
    return nn.Sequential(*modules)


class Mixed(nn.Module):
    """Layers of two precisions."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 5)

    def forward(self, x):
        return self.high(self.low(x.bfloat16()).float())


class Masked(Vectors):
    """A mask of minus infinity is a valid constant."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0] * 4 + [-torch.inf]))

    def forward(self, x):
        return torch.softmax(super().forward(x) + self.mask, dim=1)


CHANNELS_LAST = make_batch("image", 6)[0].to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("make", "slot", "x"),
    [
        (lambda: stack(nn.Linear(8, 12), nn.ReLU(True), nn.Linear(12, 5)), "0->2", X),
        (lambda: stack(nn.Linear(8, 12), nn.ReLU(True), nn.Linear(12, 5)), "0", X),
        (lambda: stack(stack(nn.Linear(8, 8), nn.ReLU()), nn.Linear(8, 5)), "0", X),
        (
            lambda: stack(stack(nn.Linear(8, 8), nn.ReLU()), stack(nn.Linear(8, 5))),
            "0.0->1.0",
            X,
        ),
        (lambda: changed(tie), "first", X),  # tied elsewhere is not in the way
        (lambda: Host(twice), "first", X),
        (lambda: two("tuple"), "two.inner", X),
        *(
            (lambda kind=kind: Host(plain).to(kind), "first->second", X.to(kind))
            for kind in (torch.float64, torch.bfloat16, torch.float16)
        ),
        (Mixed, "high", X),
        (Masked, "first->second", X),
        (lambda: make_host("image"), "second", CHANNELS_LAST),
        (
            lambda: make_host("image").to(memory_format=torch.channels_last),
            "first->second",
            CHANNELS_LAST,
        ),
    ],
)
def test_hosts_of_many_kinds_and_precisions_grow(make, slot, x):
    grower = attach(make(), [slot], x)
    trains(grower, x)
    wanted = {p.dtype for p in grower.model.seeds.place(0).outlet.parameters()}
    assert {p.dtype for p in grower.model.seed_parameters().values()} == wanted


@pytest.mark.filterwarnings("ignore::FutureWarning")  # the old weight_norm
@pytest.mark.parametrize(
    "wrap",
    [nn.utils.parametrizations.spectral_norm, "custom", nn.utils.weight_norm],
)
def test_parametrised_layers_take_residual_seeds_only(wrap):
    host = Host(plain)
    if wrap == "custom":
        nn.utils.parametrize.register_parametrization(host.second, "weight", Halved())
    else:
        wrap(host.second)
    grower = attach(host, ["second", "second->second", "first->second"])
    assert not grower.model.seeds.place(1).geometry.beside
    why = grower.model.seeds.place(2).geometry.why_no_span
    assert "not a plain linear" in why or "computes its weight" in why
    trains(grower)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_layer_that_is_sometimes_left_out_is_fine():
    class Dropped(Vectors):
        calls = 0

        def forward(self, x):
            h = torch.relu(self.first(x))
            self.calls += self.training
            if not self.training or self.calls % 3:
                h = h + self.second(h)
            return self.last(h)

    host = Dropped()
    grower = attach(host, ["second"], min_age=0)
    grower.plant("second#0", "residual_mlp")
    for _ in range(7):
        loss = grower.loss(lambda: host(X).square().mean())
        grower.optimizer.zero_grad()
        loss.backward()
        grower.optimizer.step()
    assert grower.step(metric=0.5).incidents == ()


def test_a_host_that_was_moved_or_replaced_is_noticed():
    host = make_host("vector")
    grower = attach(host, ["second"])
    host.double()
    with pytest.raises(
        InvalidStateError, match=r"float32 on cpu and is torch\.float64"
    ):
        grower.loss(lambda: host(X.double()).sum())
    host.float()
    host.load_state_dict(make_host("vector", 3).state_dict())  # in place is fine
    with pytest.raises(InvalidInputError, match="without assign=True"):
        host.load_state_dict(make_host("vector", 4).state_dict(), assign=True)
    trains(grower)
    host.first.weight = nn.Parameter(host.first.weight.detach().clone())
    with pytest.raises(InvalidStateError, match="other objects than when"):
        grower.step(metric=0.5)


def test_a_copy_of_a_grown_host_stands_alone():
    host = make_host("vector")
    grower = attach(host, ["first->second"])
    trains(grower)
    twin = copy.deepcopy(host).eval()
    before = grower.model.example_outputs()[0]
    with torch.no_grad():
        assert torch.equal(twin(X), before)
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(grower.model.example_outputs()[0], before)
