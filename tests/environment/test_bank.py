import pytest
import torch

from esper.contracts.blueprints import BLUEPRINTS
from esper.environment.bank import Bank

ENVS, SLOTS, UNITS, INPUTS, OUTPUTS, ROWS = 3, 2, 16, 5, 4, 8
KNOWN = {b.name: b for b in BLUEPRINTS}
NAMES = ("widen_8", "low_rank_4", "residual_mlp")


def planted(names, dtype=torch.float64):
    """One seed in each slot of every environment, by name, with maps that speak."""
    bank = Bank(ENVS, SLOTS, UNITS, INPUTS, OUTPUTS, dtype=dtype)
    for env, row in enumerate(names):
        for slot, name in enumerate(row):
            blueprint = KNOWN[name]
            linear = name.startswith("low_rank")
            bias = torch.randn(blueprint.size, dtype=dtype) * (not linear)
            first = torch.randn(INPUTS, blueprint.size, dtype=dtype)
            bank.plant(env, slot, blueprint, first, bias)
            last = torch.randn(blueprint.size * OUTPUTS, dtype=dtype)
            bank.moments["last"].value[env, 0, slot, : last.numel()] = last
            if name == "residual_mlp":
                bank.moments["last_bias"].value[env, 0, slot] = torch.randn(OUTPUTS)
    return bank


MIXED = [
    ("widen_8", "low_rank_4"),
    ("residual_mlp", "widen_8"),
    ("low_rank_4", "residual_mlp"),
]
ALPHA = torch.tensor([[1.0, 0.5], [0.25, 1.0], [0.5, 1.0]])
EVERYONE = torch.ones(ENVS, SLOTS, dtype=torch.bool)


def spoken(bank, h, alpha, live, names):
    """Seed by seed, in plain PyTorch."""
    acts = {
        "widen_8": torch.relu,
        "low_rank_4": lambda hidden: hidden,
        "residual_mlp": torch.nn.functional.gelu,
    }
    said = torch.zeros(ENVS, ROWS, OUTPUTS, dtype=h.dtype)
    for env, row in enumerate(names):
        for slot, name in enumerate(row):
            if not live[env, slot]:
                continue
            size = KNOWN[name].size
            first, bias, last, own = (
                bank.moments[part].value[env, :, slot]
                for part in ("first", "first_bias", "last", "last_bias")
            )
            hidden = acts[name](h[env] @ first[:, :size] + bias[:, :size])
            seed = hidden @ last.view(-1, OUTPUTS)[:size] + own
            said[env] += alpha[env, slot] * seed
    return said


@pytest.mark.parametrize("names", [MIXED, [(n, n) for n in NAMES], [(NAMES[0],) * 2]])
def test_a_bank_says_what_its_seeds_say_one_by_one(names):
    bank = planted(names)
    h = torch.randn(ENVS, ROWS, INPUTS, dtype=torch.float64)
    live = torch.zeros_like(EVERYONE)
    live[: len(names)] = True
    live[0, 1] = False
    said = bank.say(h, bank.felt(ALPHA, live))
    expected = spoken(bank, h, ALPHA, live, names)
    torch.testing.assert_close(said, expected, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_the_seeds_one_by_one():
    bank = planted(MIXED)
    h = torch.randn(ENVS, ROWS, INPUTS, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(ENVS, ROWS, OUTPUTS, dtype=torch.float64)
    said = bank.say(h, bank.felt(ALPHA, EVERYONE))
    found = torch.autograd.grad((said * weight).sum(), [h, *bank.leaves.values()])
    for moments in bank.moments.values():
        moments.value.requires_grad_()
    plain = spoken(bank, h, ALPHA, EVERYONE, MIXED)
    bases = [moments.value for moments in bank.moments.values()]
    expected = torch.autograd.grad((plain * weight).sum(), [h, *bases])
    kinds = {name: number for number, name in enumerate(bank.moments, start=1)}
    torch.testing.assert_close(found[0], expected[0], rtol=1e-10, atol=1e-12)
    for name in ("first", "last"):
        got = found[kinds[name]].view_as(bank.moments[name].value)
        wanted = expected[kinds[name]]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)
    # A low-rank seed has no bias, and only a residual one adds its own.
    own = torch.tensor([[n == "residual_mlp" for n in row] for row in MIXED])
    biased = torch.tensor([[n != "low_rank_4" for n in row] for row in MIXED])
    for name, has in (("first_bias", biased), ("last_bias", own)):
        got = found[kinds[name]].view_as(bank.moments[name].value)
        wanted = expected[kinds[name]] * has[:, None, :, None]
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_seed_that_is_not_felt_changes_no_bit(bad):
    bank = planted(MIXED, torch.float32)
    h = torch.randn(ENVS, ROWS, INPUTS, requires_grad=True)
    live = EVERYONE.clone()
    live[1, 0] = False
    felt = bank.felt(ALPHA, live)

    def look():
        said = bank.say(h, felt)
        leaves = [bank.leaves[name] for name in ("last", "last_bias")]
        return said, *torch.autograd.grad(said.square().sum(), [h, *leaves])

    before = look()
    for moments in bank.moments.values():
        moments.value[1, :, 0] = bad
    for old, new in zip(before, look(), strict=True):
        assert torch.equal(old, new)


def test_planting_and_clearing_leaves_no_trace():
    bank, other = planted(MIXED), planted(MIXED)
    for name, moments in bank.moments.items():
        moments.value.copy_(other.moments[name].value)
        moments.mean.fill_(1.0)
        moments.square.fill_(1.0)
    bank.clear(1, 0)
    for name, moments in bank.moments.items():
        expected = other.moments[name].value.clone()
        expected[1, :, 0] = 0.0
        assert torch.equal(moments.value, expected)
        for memory in (moments.mean, moments.square):
            assert not memory[1, :, 0].any()
            assert memory.sum() == memory.numel() - memory[1, :, 0].numel()
    for flags in (bank.used, bank.linear, bank.gelu):
        assert not flags[1, 0].any()
    assert bank.any_gelu
    bank.clear(2, 1)
    assert not bank.any_gelu


def test_a_seed_that_follows_a_larger_one_is_as_if_it_were_the_first():
    first, bias = torch.randn(INPUTS, 4), torch.zeros(4)
    fresh, used = (
        Bank(ENVS, SLOTS, UNITS, INPUTS, OUTPUTS),
        planted(MIXED, torch.float32),
    )
    for env in range(ENVS):
        used.clear(env, 0)
        used.clear(env, 1)
    used.plant(0, 1, KNOWN["residual_mlp"], torch.ones(INPUTS, 16), torch.ones(16))
    for bank in (fresh, used):
        bank.plant(0, 1, KNOWN["low_rank_4"], first, bias)
    for name, moments in fresh.moments.items():
        assert torch.equal(moments.value, used.moments[name].value)
    for flags in ("used", "linear", "gelu"):
        assert torch.equal(getattr(fresh, flags), getattr(used, flags))


def test_a_newborn_says_nothing():
    bank = Bank(ENVS, SLOTS, UNITS, INPUTS, OUTPUTS)
    for slot, name in enumerate(NAMES[:SLOTS]):
        size = KNOWN[name].size
        bank.plant(0, slot, KNOWN[name], torch.randn(INPUTS, size), torch.zeros(size))
    said = bank.say(torch.randn(ENVS, ROWS, INPUTS), bank.felt(ALPHA, EVERYONE))
    assert not said.any()
