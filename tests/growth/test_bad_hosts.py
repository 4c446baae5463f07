"""Hosts and slots that cannot be grown are refused in one line, and those that can are.

Every refusal names the module or the nearest name and leaves the host and its optimiser
without a hook.
"""

import copy

import pytest
import torch
from torch import Tensor, nn

from esper.contracts.errors import BadInput, CallOrder, EsperError
from esper.grower import Grower
from esper.growth.blueprints.seed import misfit
from tests.growth.hosts import Vectors, make_batch, make_host

X = make_batch("vector", 6)[0]


def attach(host: nn.Module, slots, example=X, optimizer=None, **options) -> Grower:
    optimizer = optimizer or torch.optim.SGD(host.parameters(), 0.01)
    options = {"seeds_per_slot": 1, "controller": "never", **options}
    return Grower(host, optimizer, slots, example=example, **options)


def refused(host: nn.Module, slots, example=X, optimizer=None, **options) -> str:
    """The one line in which a host is refused; nothing stays on it."""
    optimizer = optimizer or torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.01)
    if isinstance(host, nn.Module) and len(optimizer.param_groups[0]["params"]) == 1:
        trained = [*host.parameters()]
        if trained and not any(map(nn.parameter.is_lazy, trained)):
            optimizer = torch.optim.SGD(trained, 0.01)
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
    geometry = model.place(0).geometry
    kind = next(b.name for b in model.spec.blueprints if not misfit(b, geometry))
    before = model.answer()
    receipt = grower.plant(slot, kind, tempo="FAST")
    assert receipt.jump == 0.0
    assert all(map(torch.equal, before, model.answer()))
    optimizer = grower._optimizer
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
    assert all(torch.isfinite(t).all() for t in model.answer())


class Host(Vectors):
    """Vectors with a forward of one's own."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.body = forward

    def forward(self, x):
        return self.body(self, x)


def plain(host, x):
    return host.last(torch.tanh(host.second(torch.relu(host.first(x)))))


def test_names_that_are_none_are_refused_with_the_nearest():
    host = make_host("vector")
    assert "did you mean 'second'" in refused(host, ["secnd"])
    assert "'frist'; did you mean 'first'" in refused(host, ["frist->second"])
    assert "slots is empty" in refused(host, [])
    assert "'second' is named twice" in refused(host, ["second", "second"])
    assert "must be a module name" in refused(host, ["a->b->c"])
    assert "a list of names or 'auto'" in refused(host, "first->second")
    assert "did you mean" in refused(host, ["second"], controller="premise")
    assert "mode must be" in refused(host, ["second"], mode="best")
    assert "did you mean 'zero_out'" in refused(host, ["second"], initialiser="zero")
    assert "did you mean" in refused(host, ["second"], blueprints=["widen_9"])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"decisions": 0}, "decisions must be at least 1, got 0"),
        ({"rent": -1.0}, "rent must be a number of at least 0, got -1"),
        ({"rent": float("nan")}, "rent must be a number"),
        ({"budget": -0.5}, "budget must not be negative, got -0.5"),
        ({"budget": float("nan")}, "budget must not be negative, got nan"),
        ({"seeds_per_slot": 0}, "seeds_per_slot must be at least 1, got 0"),
        ({"min_age": -1}, "min_age must not be negative, got -1"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(options, line):
    assert line in refused(make_host("vector"), ["second"], **options)


def test_shared_modules_and_tied_weights_are_refused_by_path():
    host = make_host("vector")
    host.again = host.second
    assert "'second' is shared with 'again'" in refused(host, ["second"])
    host = make_host("vector")
    host.second = nn.Linear(12, 12)
    host.other = nn.Linear(12, 12)
    host.other.weight = host.second.weight
    assert "second.weight is tied to other.weight" in refused(host, ["second"])
    trains(attach(host, ["first"]))  # elsewhere nothing is in the way


def test_modules_called_twice_or_never_are_refused_by_name():
    def twice(host, x):
        h = host.second(torch.relu(host.first(x)))
        return host.last(torch.tanh(host.second(torch.tanh(h))))

    assert "'second' is called 2 times" in refused(Host(twice), ["second"])
    assert "'norm' is never called" in refused(Host(plain), ["norm"])
    trains(attach(Host(twice), ["first"]))


def test_answers_that_are_no_tensor_are_refused_by_name():
    class Two(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.inner, self.kind = nn.Linear(8, 8), kind

        def forward(self, x):
            h = self.inner(x)
            return {"tuple": (h, h), "dict": {"h": h}, "none": None}[self.kind]

    for kind, name in (("tuple", "tuple"), ("dict", "dict"), ("none", "NoneType")):
        host = nn.Sequential()
        host.two = Two(kind)
        host.take = Take()
        assert f"'two' answers with {name}" in refused(host, ["two"])
        if kind != "none":
            trains(attach(host, ["two.inner"]))


class Take(nn.Module):
    def forward(self, given):
        if isinstance(given, tuple):
            return given[0]
        return given["h"] if isinstance(given, dict) else torch.zeros(6, 8)


def test_a_whole_host_may_answer_with_a_tuple_or_a_dictionary():
    grower = attach(Host(lambda host, x: {"y": plain(host, x), "n": 3}), ["first"])
    assert len(grower.model.answer()) == 1
    grower = attach(Host(lambda host, x: (plain(host, x), [x])), ["first"])
    assert len(grower.model.answer()) == 2


def test_a_forward_that_is_random_in_eval_is_refused():
    def noisy(host, x):
        return plain(host, x + torch.randn_like(x))

    assert "two calls of the host in eval mode disagree" in refused(
        Host(noisy), ["second"]
    )


def test_places_that_nothing_flows_back_to_are_refused():
    def cut(host, x):
        return host.last(torch.tanh(host.second(torch.relu(host.first(x)))).detach())

    assert "no gradient reaches 'second'" in refused(Host(cut), ["second"])


def test_wrapped_compiled_and_lazy_hosts_are_refused_with_the_cure():
    host = make_host("vector")
    assert "pass model.module" in refused(nn.DataParallel(host), ["module.second"])
    compiled = torch.compile(host, backend="eager")
    assert "pass the module before torch.compile" in refused(compiled, ["second"])
    lazy = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    assert "run it once on an example" in refused(lazy, ["0"])
    assert "nothing to grow" in refused(nn.Sequential(nn.ReLU()), ["0"])
    with torch.inference_mode():
        assert "inference mode" in refused(make_host("vector"), ["second"])


def test_an_example_that_does_not_fit_is_refused_with_torchs_reason():
    host = make_host("vector")
    message = refused(host, ["second"], example=torch.zeros(4, 7))
    assert message.startswith("the host cannot be called with the example: Runtime")
    one_row = refused(host, ["second"], example=X[:1])  # batch norm needs two
    assert "Expected more than 1 value per channel" in one_row


def test_a_tensor_changed_in_place_on_the_way_is_refused():
    def in_place(host, x):
        h = torch.relu(host.first(x))
        z = torch.tanh(host.second(h))
        h.mul_(2.0)
        return host.last(z + h)

    grower = attach(Host(in_place), ["second"])
    assert grower.model.place(0).geometry.residual
    message = refused(Host(in_place), ["second->last"])
    assert "'second' reads is changed in place before 'last' returns" in message


def test_ranks_that_no_seed_serves_are_refused_with_the_shape():
    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, x):
            return self.last(self.first(x[:, None, None])).mean(dim=(1, 2))

    assert "'first' is [6, 1, 1, 8]" in refused(Deep(), ["first"])


def test_optimisers_that_do_not_hold_the_host_are_refused():
    host = make_host("vector")
    some = torch.optim.SGD(host.first.parameters(), 0.01)
    assert "'norm.weight' is trainable but not in" in refused(
        host, ["second"], optimizer=some
    )
    other = torch.optim.SGD(make_host("vector").parameters(), 0.01)
    refused(host, ["second"], optimizer=other)
    memory = torch.optim.LBFGS(host.parameters())
    assert "use a first-order optimiser" in refused(host, ["second"], optimizer=memory)


def test_a_host_that_is_not_finite_is_refused_by_name():
    host = make_host("vector")
    with torch.no_grad():
        host.second.weight[0, 0] = torch.nan
    assert "'second.weight' is not finite" in refused(host, ["second"])


def test_two_growers_over_one_host_are_refused_until_the_first_is_detached():
    host = make_host("vector")
    first = attach(host, ["second", "last"])
    with pytest.raises(BadInput, match="'second' has slots of another Grower"):
        attach(host, ["first", "second"])
    assert len(host.first._forward_hooks) == 0
    first.detach()
    trains(attach(host, ["first", "second"]))


# Supported, and therefore tried.


def test_frozen_hosts_grow():
    host = make_host("vector")
    host.first.requires_grad_(False)
    host.norm.requires_grad_(False)
    frozen = [p.clone() for p in host.first.parameters()]
    grower = attach(host, ["first->second"])
    trains(grower)
    assert all(map(torch.equal, frozen, host.first.parameters()))
    for parameter in host.parameters():
        parameter.requires_grad_(False)
    grower.detach()
    everything = {name: p.clone() for name, p in host.named_parameters()}
    trains(attach(host, ["first->second"]))
    assert all(torch.equal(everything[n], p) for n, p in host.named_parameters())


def test_in_place_activations_after_a_slot_are_fine():
    host = nn.Sequential(
        nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 5), nn.Hardtanh(-1, 1)
    )
    trains(attach(host, ["0->2"]))
    host = nn.Sequential(nn.Linear(8, 12), nn.ReLU(inplace=True), nn.Linear(12, 5))
    trains(attach(host, ["0"]))


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.spectral_norm, "custom"])
def test_parametrised_layers_take_residual_seeds_only(wrap):
    host = Host(plain)
    if wrap == "custom":
        nn.utils.parametrize.register_parametrization(host.second, "weight", Halved())
    else:
        wrap(host.second)
    grower = attach(host, ["second", "second->second", "first->second"])
    assert not grower.model.place(1).geometry.beside
    assert "no plain linear" in grower.model.place(2).geometry.why_no_span
    trains(grower)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_hosts_of_other_precision_grow(dtype):
    host = Host(plain).to(dtype)
    optimizer = torch.optim.SGD(host.parameters(), 0.01)
    grower = attach(host, ["first->second"], X.to(dtype), optimizer)
    trains(grower, X.to(dtype))
    assert {p.dtype for p in grower.model.seed_parameters().values()} == {dtype}


def test_seeds_take_the_precision_of_their_own_place():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 5)

        def forward(self, x):
            return self.high(self.low(x.bfloat16()).float())

    grower = attach(Mixed(), ["high"])
    trains(grower)
    assert {p.dtype for p in grower.model.seed_parameters().values()} == {torch.float32}


def test_channels_last_hosts_grow():
    host = make_host("image").to(memory_format=torch.channels_last)
    x = make_batch("image", 6)[0].to(memory_format=torch.channels_last)
    trains(attach(host, ["first->second"], x), x)
    trains(attach(make_host("image"), ["second"], x), x)


def test_sequential_hosts_and_containers_grow():
    host = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 5))
    )
    trains(attach(host, ["0"]))
    host = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.Sequential(nn.Linear(8, 5))
    )
    trains(attach(host, ["0.0->1.0"]))


def test_a_mask_of_minus_infinity_is_no_trouble():
    class Masked(Vectors):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([0.0] * 4 + [-torch.inf]))

        def forward(self, x):
            return torch.softmax(super().forward(x) + self.mask, dim=1)

    trains(attach(Masked(), ["first->second"]))


def test_hooks_of_the_users_own_go_on_working():
    host = make_host("vector")
    seen = []
    host.second.register_forward_hook(lambda module, args, out: seen.append(out))
    host.first.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    grower = attach(host, ["first->second"])
    seen.clear()
    trains(grower)
    assert len(seen) > 6


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
        grower._optimizer.zero_grad()
        loss.backward()
        grower._optimizer.step()
    assert grower.step(metric=0.5).incidents == ()


def test_a_host_that_was_moved_or_replaced_is_noticed():
    host = make_host("vector")
    grower = attach(host, ["second"])
    host.double()
    with pytest.raises(CallOrder, match=r"float32 on cpu and is torch\.float64"):
        grower.loss(lambda: host(X.double()).sum())
    host.float()
    host.load_state_dict(make_host("vector", 3).state_dict())  # in place is fine
    trains(grower)
    host.load_state_dict(make_host("vector", 4).state_dict(), assign=True)
    with pytest.raises(CallOrder, match="other objects than when"):
        grower.step(metric=0.5)


def test_a_copy_of_a_grown_host_stands_alone():
    host = make_host("vector")
    grower = attach(host, ["first->second"])
    trains(grower)
    twin = copy.deepcopy(host).eval()
    before = grower.model.answer()[0]
    with torch.no_grad():
        assert torch.equal(twin(X), before)
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(grower.model.answer()[0], before)
