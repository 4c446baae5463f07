"""What planting, training, pruning and keeping do to a host: only what they should."""

from functools import cache

import pytest
import torch
from torch import nn

from esper.contracts.actions import Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import IllegalActionError, InvalidInputError
from esper.contracts.stages import Stage
from esper.growth.hooks import attach_gradients, shadow_gradients
from esper.growth.model import GrowingModel
from tests.growth.hosts import (
    HOSTS,
    every_planting,
    everything,
    grow,
    make_batch,
    make_host,
    move_to,
    shake,
)

SMALLEST = {blueprint.form: blueprint.name for blueprint in reversed(BLUEPRINTS)}
PLANTINGS = [p for p in every_planting() if p[2] in SMALLEST.values()]


@pytest.mark.parametrize(("kind", "slot", "blueprint"), PLANTINGS)
def test_a_planted_seed_its_training_and_its_pruning_change_no_bit_of_the_host(
    kind, slot, blueprint
):
    pruned, model = train(kind, (slot, blueprint), steps=8, prune_at=5)
    assert train_alone(kind, 8) == pruned
    assert len(model.shadow_losses) == 5
    assert not model.seeds
    host = [*model.host.parameters()]
    assert [*model.optimizer.state] == host
    assert len(model.optimizer.param_groups[0]["params"]) == len(host)


@pytest.mark.parametrize(
    ("kind", "slot", "blueprint", "style"),
    [
        (*planting, style)
        for planting in PLANTINGS
        for style in ("ADD", "SCALE")
        if style == "ADD" or planting[0] == "vector"
    ],
)
def test_a_blended_seed_changes_the_output_and_a_pruned_one_does_not(
    kind, slot, blueprint, style
):
    model = grow(kind)
    bare = model.example_outputs()[0]
    move_to(model, slot, blueprint, "HOLDING", style=style)
    assert torch.allclose(
        bare, model.example_outputs()[0], rtol=0, atol=1e-6
    )  # still zero
    shake(model)
    assert not torch.equal(bare, model.example_outputs()[0])
    model.prune(slot)
    model.tick()
    assert model.stage(slot) is Stage.DORMANT
    assert torch.equal(bare, model.example_outputs()[0])


@cache
def train_alone(kind, steps):
    return train(kind, steps=steps)[0]


def train(kind, planting=None, *, steps, prune_at=None):
    """Train a host by Adam, with or without a seed in training beside it."""
    host = make_host(kind)
    optimizer = torch.optim.Adam(host.parameters(), 3e-3)
    model = grow(kind, host)
    model.train_with(optimizer)
    model.shadow_losses = []
    model.optimizer = optimizer
    if planting:
        slot, name = planting
        how = {"blueprint": name, "tempo": "SLOW"}
        streams = torch.get_rng_state()
        model.act(model.encode(Op.GERMINATE, slot, **how))
        assert torch.equal(streams, torch.get_rng_state())
    x, y = make_batch(kind, rows=32)
    torch.manual_seed(1)
    for step in range(steps):
        if step == prune_at:
            model.tick()
            model.act(model.encode(Op.PRUNE, planting[0]))
            model.tick()

        def closure():
            return nn.functional.cross_entropy(host(x), y)

        loss = closure()
        learning = model.training_parameters()
        if learning:
            shadow, found = shadow_gradients(
                closure, model.seeds.flow, model, learning, [*model.modules()]
            )
            model.shadow_losses.append(float(shadow))
            loss = attach_gradients(loss, learning, found)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return everything(host, optimizer, seeds=False), model


def test_the_modules_of_training_seeds_are_known_after_every_change():
    model = grow("vector")

    def check():
        training = [*model.training_seeds().values()]
        seeds = {module for seed in training for module in seed.modules()}
        own, others = model.parts()
        held = [m for m in model.modules() if m._parameters or m._buffers]
        assert {*own} == {*held} & seeds
        assert [*others] == [m for m in held if m not in seeds]
        parameters = [p for seed in training for p in seed.parameters()]
        assert [*map(id, model.training_parameters())] == [*map(id, parameters)]
        return len(training)

    assert check() == 0
    model.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    assert check() == 0
    model.plant("second->last#0", "widen_8", tempo="SLOW")
    assert check() == 1
    saved = model.state_dict()
    model.plant("second#0", "residual_mlp", tempo="SLOW")
    undo = model.seeds.restore_point()
    assert check() == 2
    model.remove(
        model.seeds.index("first->second#0")
    )  # and the blocks of others with it
    assert check() == 2
    model.tick()
    model.advance("second->last#0")
    assert check() == 1
    undo()
    assert check() == 2
    model.load_state_dict(saved)
    assert check() == 1


def test_what_is_not_possible_is_refused_and_changes_nothing():
    model = grow("vector")
    with pytest.raises(IllegalActionError, match="ADVANCE is not possible in slot"):
        model.advance("second#0")
    with pytest.raises(InvalidInputError, match="did you mean 'second#0'"):
        model.advance("secnd#0")
    with pytest.raises(InvalidInputError, match="did you mean 'widen_8'"):
        model.plant("first->second#0", "widen_9")
    with pytest.raises(InvalidInputError, match="does not fit slot 'second#0'"):
        model.plant("second#0", "widen_8")
    with pytest.raises(InvalidInputError, match="did you mean 'STANDARD'"):
        model.plant("first->second#0", "widen_8", tempo="standrd")
    assert not model.seeds
    assert not bool(model.seeds.states.stage.any())


def test_slots_of_one_place_lie_apart():
    model = grow("vector", seeds_per_slot=3)
    places = HOSTS["vector"].slots
    assert model.slots[: len(places)] == tuple(f"{name}#0" for name in places)
    assert model.seeds.place(1) is model.seeds.place(1 + len(places))


def test_parameters_and_macs_are_what_was_declared():
    model = grow("image")
    declared = model.cost(0, model.spec.blueprints[5])
    model.plant(model.slots[0], model.spec.blueprints[5].name)
    assert declared.parameters == model.parameters_added
    assert model.macs == model.first_cost.macs  # not felt yet


@pytest.mark.parametrize("kind", HOSTS)
def test_a_saved_model_answers_as_before(kind):
    model = grow(kind)
    stages = ("TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "COOLING")
    fitting = [p for p in PLANTINGS if p[0] == kind and p[2] != "attention"]
    free = iter(dict.fromkeys(slot for _, slot, _ in fitting))
    for stage, slot in zip(stages, free, strict=False):
        blueprint = next(b for _, s, b in fitting if s == slot)
        move_to(model, slot, blueprint, stage)
    shake(model)
    used = {slot: model.stage(slot) for slot in model.slots}
    other = grow(kind, make_host(kind, rng_seed=9))
    other.load_state_dict(model.state_dict())
    assert torch.equal(model.example_outputs()[0], other.example_outputs()[0])
    assert {slot: other.stage(slot) for slot in used} == used
    assert torch.equal(
        model.seeds.generator.get_state(), other.seeds.generator.get_state()
    )


def test_a_model_with_other_slots_is_not_loaded():
    model = grow("vector")
    model.plant("first->second#1", "widen_8")
    saved = model.state_dict()
    other = grow("vector", seeds_per_slot=1)
    with pytest.raises(InvalidInputError, match="other slots: first->second#1"):
        other.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(other.host.state_dict())


def test_detaching_leaves_a_plain_host_that_keeps_what_grew():
    model = grow("vector")
    move_to(model, "first->second#0", "widen_8", "HOLDING")
    shake(model)
    grown = model.example_outputs()[0]
    model.plant("first->second#1", "widen_8")  # in training: not a part of the output
    model.detach()
    torch.testing.assert_close(grown, model.example_outputs()[0])
    assert model.host.first.out_features == 20
    assert not any(
        module._forward_hooks or module._forward_pre_hooks
        for module in model.host.modules()
    )


def test_new_units_are_as_large_as_the_old_ones_where_these_are_a_measure():
    model = grow("signal", seeds_per_slot=3)
    for slot, factor in enumerate((7.0, 0.0, torch.nan)):
        with torch.no_grad():
            model.host.first.weight.mul_(factor)
        model.plant(f"first->second#{slot}", "widen_8")
        seed = model.seeds[f"slot_{model.seeds.index(f'first->second#{slot}')}"]
        built = seed.weights["first"].detach().std(correction=0)
        if factor == 7.0:
            old = model.host.first.weight.detach().std(correction=0)
            torch.testing.assert_close(built, old)
        assert 0.0 < float(built) < 4.0


def test_merge_only_plants_nothing_that_stays_a_branch():
    host = make_host("sequence")  # with a LayerNorm
    slots = ["up->down", "down->down"]
    example = make_batch("sequence", 4)[0]
    model = GrowingModel(host, slots, example, merge_only=True)
    names = [b.name for b in model.spec.blueprints]
    for place, offered in enumerate(
        ([n for n in names if n.startswith("widen")], ["low_rank_4"])
    ):
        prices = [model.price(place, kind) for kind in model.spec.blueprints]
        known = [n for n, p in zip(names, prices, strict=True) if p is not None]
        assert known == offered
    assert model.spec.narrowed["style"] == ("ADD",)
    for wrong in (("residual_mlp", "ADD"), ("widen_8", "SCALE")):
        with pytest.raises(
            InvalidInputError, match="would not merge, and merge_only is set"
        ):
            model.plant("up->down#0", wrong[0], style=wrong[1])
    model.plant("up->down#0", "widen_8", tempo="AT_ONCE")
    with pytest.raises(InvalidInputError, match="it scales its outlet"):
        model.set_alpha("up->down#0", "HALF", style="SCALE")
    model.detach()
    with pytest.raises(InvalidInputError, match="slot 'act': no seed there merges"):
        GrowingModel(host, ["act"], example, merge_only=True)


def test_merge_only_skips_places_with_a_layer_norm_between():
    def block(norm):
        return nn.Sequential(nn.Linear(8, 12), norm, nn.ReLU(), nn.Linear(12, 8))

    host = nn.Sequential(block(nn.LayerNorm(12)), nn.Softmax(-1), block(nn.Identity()))
    x = make_batch("vector", 4)[0]
    every = GrowingModel(host, "auto", x, seeds_per_slot=1)
    assert every.slots == ("0.0->0.3#0", "2.0->2.3#0")
    every.detach()
    model = GrowingModel(host, "auto", x, seeds_per_slot=1, merge_only=True)
    assert model.slots == ("2.0->2.3#0",)


def test_merge_only_skips_places_whose_width_the_host_computes_with():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm = nn.Linear(8, 12), nn.BatchNorm1d(12)
            self.b, self.c = nn.Linear(12, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = torch.relu(self.norm(self.a(x)))
            return self.c(torch.relu(self.b(h / h.shape[-1] ** 0.5)))

    host, x = Scaled(), torch.randn(4, 8)
    before = everything(host), {n: str(m) for n, m in host.named_modules()}
    own = [*host.parameters()]
    model = GrowingModel(host, "auto", x, seeds_per_slot=1, merge_only=True)
    assert model.slots == ("b->c#0",)
    model.detach()
    with pytest.raises(
        InvalidInputError, match="no seed there merges, it would answer differ"
    ):
        GrowingModel(host, ["a->b"], x, merge_only=True)
    assert before == (everything(host), {n: str(m) for n, m in host.named_modules()})
    assert all(p is q for p, q in zip(own, host.parameters(), strict=True))


@pytest.mark.parametrize("kind", HOSTS)
def test_new_units_of_an_mlp_begin_as_where_controllers_are_trained(kind):
    host = make_host(kind)
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.mul_(3.0)
    model = grow(kind, host)
    slot = model.slots[0]
    model.plant(slot, "widen_32")
    seed, place = model.seeds["slot_0"], model.seeds.place(0)
    first = seed.weights["first"].detach()
    wanted = float(place.inlet.weight.detach().std(correction=0))
    if kind == "vector":
        wanted = (2 / place.inlet.in_features) ** 0.5
        assert not seed.weights["first_bias"].any()
    assert float(first.std(correction=0)) == pytest.approx(wanted, rel=1e-4)
