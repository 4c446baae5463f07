"""What the hooks of a place do to the tensors that pass it."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import esper
from esper.contracts.errors import InvalidStateError
from esper.grower import Grower
from esper.growth.hooks import shadow_gradients
from tests.growth.hosts import Vectors, grow, make_batch, move_to, shake

SLOT = "second#0"


@pytest.mark.parametrize("style", ["ADD", "SCALE"])
@pytest.mark.parametrize(("target", "alpha"), [("HALF", 0.5), ("FULL", 1.0)])
def test_a_seed_is_added_or_scales_by_its_alpha(style, target, alpha):
    model = grow("vector")
    move_to(model, SLOT, "residual_mlp", "HOLDING", style=style, alpha_target=target)
    shake(model)
    seed, host = model.seeds[f"slot_{model.seeds.index(SLOT)}"], model.host.eval()
    x = make_batch("vector", 4)[0]
    seen = []
    handle = host.second.register_forward_hook(lambda m, a, out: seen.append(out))
    host(x)
    handle.remove()
    with model.seeds.flow.using(left_out=[model.seeds.index(SLOT)]):
        bare = host.second(torch.relu(host.norm(host.first(x))))
    delta = seed(bare)
    wanted = bare + alpha * delta if style == "ADD" else bare * (1 + alpha * delta)
    assert not torch.allclose(bare, seen[0])
    torch.testing.assert_close(seen[0], wanted, rtol=1e-6, atol=1e-6)


def test_shadow_gradients_are_those_of_the_seed_in_place():
    model = grow("vector")
    model.plant("second->last#0", "widen_8")
    shake(model)
    model.host.drop.p = 0.0
    x, y = make_batch("vector", 16)

    def closure():
        return nn.functional.cross_entropy(model.host(x), y)

    learning = model.training_parameters()
    loss, found = shadow_gradients(
        closure, model.seeds.flow, model, learning, [*model.modules()]
    )
    with model.seeds.flow.using(tried=model.seeds.index("second->last#0")):
        straight = closure()
        wanted = torch.autograd.grad(straight, learning)
    torch.testing.assert_close(loss, straight.detach(), rtol=0, atol=0)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad for p in model.parameters())


def test_gradient_checkpointing_recomputes_seeds_and_all():
    class Recomputed(Vectors):
        stored = True

        def forward(self, x):
            if self.stored:
                return super().forward(x)
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    model = grow("vector", Recomputed())
    model.host.drop.p = 0.0
    model.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    model.plant("second->last#0", "widen_8", tempo="SLOW")
    shake(model)
    x, y = make_batch("vector", 16)

    def closure():
        return nn.functional.cross_entropy(model.host(x), y)

    found = []
    for model.host.stored in (True, False):
        learning = model.training_parameters()
        shadow = shadow_gradients(
            closure, model.seeds.flow, model, learning, [*model.modules()]
        )[1]
        trained = [p for p in model.parameters() if not any(p is q for q in learning)]
        found.append([*shadow, *torch.autograd.grad(closure(), trained)])
    assert not model.seeds.flow.failed
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_slot_across_two_checkpointed_segments_is_refused(reentrant):
    host = nn.Sequential(
        *(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)),
        nn.ReLU(),
    )
    x = torch.randn(4, 8)
    grower = Grower(host, torch.optim.SGD(host.parameters(), 0.1), ["0->2"], example=x)
    grower.plant("0->2#0", "widen_8", tempo="AT_ONCE")
    answer = checkpoint_sequential(host, 3, x.requires_grad_(), use_reentrant=reentrant)
    with pytest.raises(
        InvalidStateError, match=r"'2' was computed again without '0'\. Put both"
    ):
        answer.sum().backward()


class Halves(nn.Module):
    """A host whose parts can be called by themselves."""

    def __init__(self):
        super().__init__()
        self.inner, self.code = nn.Linear(6, 8), nn.Linear(8, 4)
        self.back, self.outer = nn.Linear(4, 8), nn.Linear(8, 6)

    def encode(self, x):
        return self.code(self.inner(x).relu())

    def decode(self, code):
        return self.outer(self.back(code).relu())

    def forward(self, x):
        return self.decode(self.encode(x))


@pytest.fixture
def halves():
    host, x = Halves(), torch.randn(5, 6)
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    slots = ["code->back"]
    grower = Grower(host, optimizer, slots, example=x, controller="never")
    grower.plant("code->back#0", "widen_8", tempo="AT_ONCE")
    shake(grower.model)
    return grower, host.eval(), x


@pytest.mark.parametrize("exported", [False, True])
def test_parts_that_are_called_one_by_one_give_the_hosts_answer_or_none(
    halves, exported
):
    grower, host, x = halves
    host = grower.export(merge=False) if exported else host
    whole = host(x)
    code = host.encode(x)
    assert torch.equal(host.decode(code), whole)
    with pytest.raises(
        InvalidStateError, match="'back' was called without 'code', whose"
    ):
        host.decode(code)
    host.encode(x + 1)
    host.encode(x)  # twice by itself is no fault
    with pytest.raises(
        InvalidStateError, match="'code' was called twice before 'back'"
    ) as one:
        host.decode(code)
    assert "\n" not in str(one.value)
    host.encode(x[:2])
    with pytest.raises(
        InvalidStateError, match=r"given \[2, 8\] and 'back' gave \[5, 8\]"
    ):
        host.decode(code)
    assert not grower.model.seeds.flow.failed
    host.encode(x)
    assert torch.equal(host(x), whole)  # what was left is of no account


def test_a_loss_of_parts_begins_anew_and_leaves_the_codes_of_others_alone(halves):
    grower, host, x = halves
    host.encode(x)
    loss = grower.loss(lambda: host.decode(host.encode(x)).square().mean())
    assert torch.equal(loss, host(x).square().mean())
    with pytest.raises(InvalidStateError, match="was called twice before"):
        grower.loss(
            lambda: host.decode(host.encode(x) + host.encode(x + 1)).square().mean()
        )


def test_a_seed_that_fails_is_raised_unless_a_grower_removes_it(halves):
    grower, host, x = halves
    copied, exported = copy.deepcopy(host), grower.export(merge=False)
    loaded = esper.rebuild(Halves(), host.state_dict())

    def fail(*_):
        raise ZeroDivisionError

    seeds = [one.esper_seeds["slot_0"] for one in (host, copied, exported, loaded)]
    for seed in seeds:
        seed.register_forward_pre_hook(fail)
    for alone in (copied, exported, loaded):
        with pytest.raises(ZeroDivisionError):
            alone(x)
    host(x)
    assert [*grower.model.seeds.flow.failed] == [0]
    grower.loss(lambda: host(x).square().mean())
    assert not grower.model.seeds
    assert "its forward failed" in grower.safety.incidents[0]


def test_a_pass_that_broke_off_does_not_spoil_the_next(halves):
    _, host, x = halves
    whole = host(x)
    handle = host.back.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        host(x)
    handle.remove()
    assert torch.equal(host(x), whole)
    assert torch.equal(copy.deepcopy(host)(x), whole)
