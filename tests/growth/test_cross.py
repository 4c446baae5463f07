"""New units of neighbouring places feed each other, and nobody is disturbed by it."""

import copy
from itertools import product

import pytest
import torch
from torch import nn

from esper.contracts.stages import Stage
from esper.grower import Grower
from esper.growth.model import GrowingModel
from esper.growth.saving.export import Branches, export
from esper.growth.seed_modules import host_parameters
from tests.growth.hosts import Net, OwnScale, Scale, bits, everything

SLOTS = ("a->b", "b->c")
UP, DOWN = "a->b#0", "b->c#0"
ORDERS = [(UP, DOWN), (DOWN, UP)]


def tail(width):
    return {"pool": nn.AdaptiveAvgPool1d(1), "flat": nn.Flatten()} | {
        "head": nn.Linear(width, 4)
    }


def linear():
    return Net(
        a=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        act=nn.ReLU(),
        b=nn.Linear(8, 8),
        more=nn.Tanh(),
        c=nn.Linear(8, 4),
    )


def conv1d():
    return Net(
        a=nn.Conv1d(3, 6, 3, padding=1, bias=False),
        norm=nn.BatchNorm1d(6),
        act=nn.ReLU(),
        b=nn.Conv1d(6, 5, 3, stride=2, padding=1),
        more=nn.ReLU(),
        c=nn.Conv1d(5, 4, 3, dilation=2),
        **tail(4),
    )


def conv2d():
    return Net(
        a=nn.Conv2d(2, 6, 3, padding=1),
        act=nn.ReLU(),
        b=nn.Conv2d(6, 5, 3, padding=1),
        norm=nn.BatchNorm2d(5),
        more=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        c=nn.Conv2d(5, 4, 3),
        flat=nn.Flatten(),
        head=nn.Linear(4, 4),
    )


def flatten():
    return Net(
        a=nn.Conv2d(2, 4, 3),
        act=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        flat=nn.Flatten(),
        b=nn.Linear(16, 8),
        more=nn.ReLU(),
        c=nn.Linear(8, 4),
    )


def between():
    return Net(
        a=nn.Conv2d(2, 6, 1, bias=False),
        norm=nn.BatchNorm2d(6),
        act=nn.PReLU(6),
        depth=nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=6),
        scale=Scale(6, 1, 1),
        b=nn.Conv2d(6, 5, 3, padding="same"),
        shared=nn.PReLU(),
        own=OwnScale(5),
        c=nn.Conv2d(5, 4, 3),
        flat=nn.Flatten(),
        head=nn.Linear(4, 4),
    )


HOSTS = {
    "between": (between, (2, 6, 6)),
    "linear": (linear, (6,)),
    "conv1d": (conv1d, (3, 10)),
    "conv2d": (conv2d, (2, 6, 6)),
    "flatten": (flatten, (2, 6, 6)),
}


def batch(kind, rows=16, rng_seed=0):
    generator = torch.Generator().manual_seed(rng_seed)
    x = torch.randn(rows, *HOSTS[kind][1], generator=generator)
    return x, x.flatten(1)[:, :4].argmax(dim=1)


def host_of(kind):
    torch.manual_seed(4)
    return HOSTS[kind][0]()


def grow(kind, dtype=torch.float32, **options):
    host = host_of(kind).to(dtype)
    return GrowingModel(host, SLOTS, batch(kind, 5)[0].to(dtype), **options)


def shake(seed, rng_seed=0):
    generator = torch.Generator().manual_seed(rng_seed)
    with torch.no_grad():
        for parameter in seed.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * noise.to(parameter))


def seed_of(model, slot):
    return model.seeds[f"slot_{model.seeds.index(slot)}"]


def hold(model, slot, name="widen_8", target="MOST"):
    model.plant(slot, name, tempo="AT_ONCE", alpha_target=target)
    assert model.stage(slot) is Stage.HOLDING


def answers(model, kind, seeds=()):
    """Outputs in both modes, and gradients of the host and of some seeds."""
    x, y = batch(kind)
    found = []
    for training in (False, True):
        trial = copy.deepcopy(model).train(training)
        output = trial.host(x)
        nn.functional.cross_entropy(output, y).backward()
        weights = [*host_parameters(trial.host).values()]
        weights += [p for slot in seeds for p in seed_of(trial, slot).parameters()]
        found += [output, *(p.grad for p in weights)]
    return [torch.zeros(()) if t is None else t + 0.0 for t in found]


@pytest.mark.parametrize("tempo", ["AT_ONCE", "SLOW"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", HOSTS)
def test_planting_changes_no_bit_whoever_is_born_last(kind, order, tempo):
    model = grow(kind)
    old, new = order
    hold(model, old, "widen_x1.5", "FULL")
    shake(seed_of(model, old))
    before = answers(model, kind, [old])
    model.plant(new, "widen_x2", tempo=tempo)
    assert bits(before) == bits(answers(model, kind, [old]))
    (key, block), *rest = seed_of(model, new).cross.items()
    assert not rest
    assert not seed_of(model, old).cross
    assert key == ("from_0" if new == DOWN else "into_1")
    assert bool(block.any()) is (new == DOWN)
    if new == DOWN:  # as its own first layer
        first = seed_of(model, new).weights["first"].detach()
        assert float(block.detach().std() / first.std()) == pytest.approx(1, abs=0.35)
        host = model.host.b.weight.detach()
        more = block[0].numel() if host.dim() > 2 else block.shape[0]
        share = host[0].numel() / (host[0].numel() + more)
        he = (2 / host[0].numel()) ** 0.5
        alone = he if model.seeds.place(0).in_mlp else host.std(correction=0)
        spread = float(first.std(correction=0) / alone)
        assert spread == pytest.approx(share**0.5, rel=1e-4)


def test_a_seed_born_between_two_others_reads_one_and_leaves_the_other_alone():
    torch.manual_seed(4)
    layers = [nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)]
    slots = ("0->1", "1->2", "2->3")
    x = batch("linear")[0]
    model = GrowingModel(nn.Sequential(*layers), slots, x).eval()
    for slot in ("0->1#0", "2->3#0"):
        hold(model, slot)
        shake(seed_of(model, slot))
    before = model(x)
    model.plant("1->2#0", "widen_8", tempo="AT_ONCE")
    assert torch.equal(before, model(x))
    cross = seed_of(model, "1->2#0").cross
    assert {key: bool(block.any()) for key, block in cross.items()} == {
        "from_0": True,
        "into_2": False,
    }


def grower_of(kind, first, second):
    """A Grower whose seeds are planted at these tempos; the older one is not zero."""
    host = host_of(kind)
    optimizer = torch.optim.AdamW(host.parameters(), 3e-3)
    grower = Grower(
        host,
        optimizer,
        SLOTS,
        example=batch(kind, 5)[0],
        controller="never",
        tick=10_000,
    )
    for slot, tempo in (first, second):
        if tempo:
            grower.plant(slot, "widen_x1.5", tempo=tempo)
            shake(seed_of(grower.model, slot))
    return grower


def train(grower, kind, steps, start=0):
    torch.manual_seed(start)
    for step in range(start, start + steps):
        x, y = batch(kind, rng_seed=step)
        loss = grower.loss(
            lambda x=x, y=y: nn.functional.cross_entropy(grower.model.host(x), y)
        )
        grower.optimizer.zero_grad()
        loss.backward()
        grower.optimizer.step()


@pytest.mark.parametrize("old", ["AT_ONCE", "SLOW"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", HOSTS)
def test_steps_beside_training_seeds_are_the_same_to_the_bit(kind, order, old):
    ends, blocks = [], []
    for young in ("", "SLOW"):
        first = (order[0], old if old == "AT_ONCE" or young else "")
        grower = grower_of(kind, first, (order[1], young))
        if young:
            (block,) = seed_of(grower.model, order[1]).cross.values()
            blocks.append(block.detach().clone())
        train(grower, kind, 12)
        if young:
            blocks.append(block.detach().clone())
        kept = [everything(grower.model.host, grower.optimizer, seeds=False)]
        if old == "AT_ONCE":
            kept.append(everything(seed_of(grower.model, order[0]), grower.optimizer))
        ends.append(kept)
    assert ends[0] == ends[1]
    assert not torch.equal(*blocks)  # it learns in the shadow


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_a_pruned_training_seed_leaves_no_trace(kind, order):
    ends = []
    for young in ("", "SLOW"):
        grower = grower_of(kind, (order[0], "AT_ONCE"), (order[1], young))
        train(grower, kind, 6)
        grower.step(metric=0.5)
        if young:
            grower.prune(order[1])
        train(grower, kind, 6, start=6)
        names = [n for n, _ in grower.model.named_parameters()]
        ends.append([names, everything(grower.model, grower.optimizer)])
    assert ends[0] == ends[1]


def test_a_block_goes_with_either_seed():
    for order in ORDERS:
        for gone in order:
            grower = grower_of("linear", *((slot, "AT_ONCE") for slot in order))
            train(grower, "linear", 2)
            grower.step(metric=0.5)
            model = grower.model
            assert len([n for n, _ in model.named_parameters() if "cross" in n]) == 1
            receipt = grower.prune(gone)
            assert receipt.jump > 0
            model.tick(10_000)
            grower.model.tick(10_000)
            assert model.stage(gone) is Stage.DORMANT
            assert not [n for n, _ in model.named_parameters() if "cross" in n]
            grower.model.surgery.names()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", HOSTS)
def test_an_export_has_the_blocks_and_as_many_parameters(kind, order):
    model = grow(kind, torch.float64).eval()
    for number, slot in enumerate((*order, "a->b#1", "b->c#1")):
        hold(model, slot, ("widen_x1.5", "widen_8")[number % 2])
        shake(seed_of(model, slot), number)
    x = batch(kind)[0].double()
    with torch.no_grad():
        wanted = model.host(x)
        plain = export(model)
        torch.testing.assert_close(plain(x), wanted, rtol=1e-6, atol=1e-9)
        assert type(plain) is type(model.host)
        assert "esper_seeds" not in plain._modules  # all of them merge
        branches = export(model, merge=False)
        assert isinstance(branches.esper_seeds, Branches)
        torch.testing.assert_close(branches(x), wanted, rtol=1e-6, atol=1e-9)
        for seed in model.seeds.values():  # and they matter
            for block in seed.cross.values():
                block.zero_()
        assert float((model.host(x) - wanted).abs().max()) > 1e-3
    counts = [sum(p.numel() for p in m.parameters()) for m in (plain, branches)]
    assert counts == [model.count(active=True).parameters] * 2
    assert model.count().parameters == counts[0]


def test_seeds_that_feed_each_other_fold_together():
    model = grow("linear", torch.float64).eval()
    hold(model, UP)
    model.plant(DOWN, "widen_8", tempo="AT_ONCE", style="SCALE")
    for seed in model.seeds.values():
        shake(seed)
    x = batch("linear")[0].double()
    plain = export(model)
    assert "feed each other" in plain.esper_seeds.reasons[0]
    assert len(plain.esper_seeds.reasons) == 2
    torch.testing.assert_close(plain(x), model.host(x), rtol=1e-6, atol=1e-9)


def test_what_trains_is_left_out_of_an_export_with_its_blocks():
    for order, trains in product(ORDERS, (0, 1)):  # the block is either one's
        model = grow("linear", torch.float64).eval()
        for number, slot in enumerate(order):
            tempo = "SLOW" if number == trains else "AT_ONCE"
            model.plant(slot, "widen_8", tempo=tempo)
        for seed in model.seeds.values():
            shake(seed)
        x = batch("linear")[0].double()
        for merge in (True, False):
            plain = export(model, merge=merge)
            torch.testing.assert_close(plain(x), model.host(x), rtol=1e-6, atol=1e-9)
            count = sum(p.numel() for p in plain.parameters())
            assert count == model.count(active=True).parameters
        assert count < model.count().parameters


def test_a_saved_model_has_the_blocks_of_the_same_seeds():
    model = grow("conv1d")
    for slot in (DOWN, UP, "b->c#1", "a->b#1"):
        hold(model, slot, "widen_x1.5")
        shake(seed_of(model, slot))
    other = grow("conv1d")
    other.load_state_dict(model.state_dict())
    assert [*dict(other.named_parameters())] == [*dict(model.named_parameters())]
    assert torch.equal(model.example_outputs()[0], other.example_outputs()[0])


def test_a_price_is_what_planting_costs():
    for kind in HOSTS:
        model = grow(kind)
        for slot in (UP, DOWN, "a->b#1", "b->c#1"):
            name = "widen_x1.25" if slot == UP else "widen_x2"
            blueprint = next(b for b in model.spec.blueprints if b.name == name)
            index, before = model.seeds.index(slot), model.count()
            price, width = model.price(index, blueprint), model.seeds.width(index)
            hold(model, slot, name)
            after = model.count()
            assert after.parameters - before.parameters == price.parameters
            assert after.macs - before.macs == price.macs
            assert model.seeds.width(index) == width + blueprint.units(width)


def test_amounts_follow_the_present_width_and_stay_what_they_were():
    model = grow("linear")
    for number, (name, units) in enumerate(
        (("widen_x1.5", 4), ("widen_x2", 12), ("widen_x1.25", 6), ("widen_8", 8))
    ):
        hold(model, f"a->b#{number}", name)
        assert seed_of(model, f"a->b#{number}").blueprint.size == units
    assert model.seeds.width(0) == 8 + 4 + 12 + 6 + 8
    model.remove(0)
    assert model.seeds.width(0) == 8 + 12 + 6 + 8
    other = grow("linear")
    other.load_state_dict(model.state_dict())
    assert other.seeds.width(0) == model.seeds.width(0)
