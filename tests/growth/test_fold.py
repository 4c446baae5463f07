"""Keeping a seed folds it into the host's own layers while the network trains."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import (
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    AdamW,
    Muon,
    RMSprop,
    Rprop,
)

import esper
from esper.contracts.actions import Op
from esper.contracts.errors import EsperWarning, InvalidInputError, InvalidStateError
from esper.contracts.stages import Stage
from esper.grower import Grower
from esper.growth.actions import encode_action
from esper.growth.blueprints.registry import find
from esper.growth.model import GrowingModel
from esper.growth.optimiser import CORRECTED
from esper.growth.safety import GovernorConfig
from esper.growth.saving.export import export
from esper.growth.seed_modules import SeedModules, host_parameters
from tests.growth.hosts import bits, everything, grow
from tests.growth.test_cross import DOWN, HOSTS, SLOTS, UP, batch, between, host_of
from tests.growth.test_export import squeezed

SGDS = {
    "plain": lambda p: SGD(p, 0.05),
    "momentum": lambda p: SGD(p, 0.05, momentum=0.9, nesterov=True),
    "rmsprop": lambda p: RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, 0.05),
}
"""Optimisers that treat every number alone, whatever its age."""


def growing(kind, make, dtype=torch.float64):
    """A model in training with two seeds that feed each other."""
    host = host_of(kind).to(dtype)
    x, y = batch(kind)
    model = GrowingModel(host, SLOTS, x.to(dtype))
    optimizer = make(host.parameters())
    model.train_with(optimizer)

    def train(steps):
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = cross_entropy(model(x.to(dtype)), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    train(3)
    for slot in (UP, DOWN):
        model.plant(slot, "widen_8", tempo="AT_ONCE")
        train(4)
    return model, optimizer, train


@pytest.mark.parametrize("kept", [[0], [1], [0, 1]])
@pytest.mark.parametrize("kind", HOSTS)
def test_function_and_gradients_stay_and_ten_steps_are_the_same(kind, kept):
    """Also if a neighbour lives on: its blocks become weights of its own."""
    losses, found = [], []
    for keeps in (False, True):
        model, optimizer, train = growing(kind, SGDS["momentum"])
        x, y = batch(kind)
        optimizer.zero_grad()
        loss = cross_entropy(model(x.double()), y)
        loss.backward()
        held = model.host.a.weight
        own = held.shape
        if keeps:
            parameters = [*model.host.parameters()]
            model.keep_seeds(kept)
            assert model.why_branches == {}
            assert all(any(p is q for q in parameters) for p in model.host.parameters())
            assert (held.shape != own) is (0 in kept)
        found.append((model(x.double()).detach(), held.grad[: own[0], : own[1]]))
        losses.append(train(10))
        if keeps:
            assert model.count().parameters == sum(
                p.numel() for p in model.host.parameters()
            )
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SGDS)
def test_moments_are_folded_with_the_weights(name):
    losses = []
    for keeps in (False, True):
        model, _, train = growing("linear", SGDS[name])
        if keeps:
            model.keep_seeds([0, 1])
        losses.append(train(10))
    # Dividing by small moments enlarges differences of rounding.
    torch.testing.assert_close(*losses, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_moments_of_a_younger_block_are_equal_after_bias_correction(kind):
    model, optimizer, _ = growing("linear", lambda p: kind(p, 1e-2, amsgrad=True))
    seed = model.seeds["slot_0"]
    inlet = model.seeds.place(0).inlet
    group = optimizer.param_groups[0]

    def corrected(parameter):
        held = optimizer.state[parameter]
        step = float(held["step"])
        return [
            held[key] / (1 - group["betas"][beta] ** step)
            for key, beta in CORRECTED.items()
        ]

    weights, old = seed.weights["first"], corrected(inlet.weight)
    new = [moment.T for moment in corrected(weights)]
    steps = [float(optimizer.state[p]["step"]) for p in (inlet.weight, weights)]
    assert steps == [11, 8]
    model.keep_seeds([0])
    assert float(optimizer.state[inlet.weight]["step"]) == 11
    for one, two, now in zip(old, new, corrected(inlet.weight), strict=True):
        torch.testing.assert_close(torch.cat([one, two]), now, rtol=1e-12, atol=0)


def test_a_seed_without_moments_gets_second_moments_of_its_layer():
    """With zeros, Adam's first steps would be several times too large."""
    model, optimizer, train = growing("linear", lambda p: Adam(p, 1e-2))
    train(100)
    model.plant("a->b#1", "widen_8", tempo="AT_ONCE")
    inlet = model.seeds.place(0).inlet
    before = optimizer.state[inlet.weight]["exp_avg_sq"].clone()
    rows = len(inlet.weight)
    model.keep_seeds([2])
    after = optimizer.state[inlet.weight]
    torch.testing.assert_close(after["exp_avg_sq"][:rows], before, rtol=1e-12, atol=0)
    assert (after["exp_avg_sq"][rows:] - before.mean()).abs().max() < 1e-9
    assert not after["exp_avg"][rows:].any()


@pytest.mark.parametrize(
    "make", [lambda p: Adafactor(p, 1e-2), lambda p: Muon(p, 1e-2)]
)
def test_optimisers_that_look_at_whole_matrices_go_on(make):
    torch.manual_seed(0)
    host = nn.Sequential(
        nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 4, bias=False)
    )
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    model = GrowingModel(host, ["0->2"], x)
    optimizer = make(host.parameters())
    model.train_with(optimizer)
    losses = []
    for step in range(60):
        if step == 10:
            model.plant("0->2#0", "widen_8", tempo="AT_ONCE")
        if step == 20:
            model.keep("0->2#0")
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert host[0].out_features == 14
    assert losses[-1] < losses[20]


def test_alpha_goes_into_the_outgoing_weights_with_its_gradients():
    ends = []
    for keeps in (False, True):
        model, _, _ = growing("linear", SGDS["plain"])
        model.set_alpha(UP, "HALF")
        model.tick(8)
        x, y = batch("linear")
        model.host.zero_grad()
        cross_entropy(model(x.double()), y).backward()
        outlet = model.seeds.place(0).outlet
        seed = model.seeds["slot_0"].weights["last"]
        grad = torch.cat([outlet.weight.grad, seed.grad.T / 0.5], dim=1)
        if keeps:
            receipt = model.keep(UP)
            assert receipt.jump < 1e-12
            assert str(receipt).startswith("kept widen_8 at a->b, which changed")
            torch.testing.assert_close(outlet.weight.grad, grad, rtol=1e-12, atol=1e-14)
        ends.append(model(x.double()).detach())
    torch.testing.assert_close(*ends, rtol=0, atol=1e-12)


@pytest.mark.parametrize("make", [Adadelta, Rprop])
def test_sizes_of_steps_go_with_alpha(make):
    losses = []
    for keeps in (False, True):
        options = {"eps": 1e-30} if make is Adadelta else {"step_sizes": (0.0, 50.0)}
        model, optimizer, train = growing("linear", lambda p, o=options: make(p, **o))
        for state in optimizer.state.values() if make is Adadelta else ():
            state["acc_delta"].fill_(1e-4)
        for slot in (UP, DOWN):
            model.set_alpha(slot, "HALF")
        model.tick(8)
        train(3)
        if keeps:
            model.keep_seeds([0, 1])
        losses.append(train(10))
    torch.testing.assert_close(*losses, rtol=0, atol=1e-9)


def test_a_slot_is_free_again_and_costs_stay_relative_to_the_first_host():
    model, _, train = growing("linear", SGDS["plain"])
    host = model.first_cost.parameters
    added, macs = model.parameters_added, model.macs
    model.keep(UP)
    assert model.stage(UP) is Stage.DORMANT
    assert [(e.before, e.after) for e in model.events[-2:]] == [
        (Stage.HOLDING, Stage.FOSSILIZED),
        (Stage.FOSSILIZED, Stage.DORMANT),
    ]
    assert (model.first_cost.parameters, model.parameters_added) == (host, added)
    assert model.macs == macs
    price = model.price(0, find("widen_8"))
    model.plant(UP, "widen_8", tempo="AT_ONCE")
    assert model.parameters_added == added + price.parameters
    train(2)


@pytest.mark.parametrize("style", ["frozen", "scale", "attention", "weight_norm"])
def test_what_does_not_fold_stays_a_branch_and_says_why(style):
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
    x = torch.randn(5, 8)
    model = GrowingModel(host, ["0->2", "2"], x)
    if style == "frozen":
        host[0].weight.requires_grad_(False)
    slot, kind = ("2#0", "squeeze_excite") if style == "attention" else ("0->2#0", "")
    how = {"style": "SCALE"} if style == "scale" else {}
    model.plant(slot, kind or "widen_8", tempo="AT_ONCE", **how)
    if style == "weight_norm":
        weight_norm(host[0])
    before = everything(host)
    model.keep(slot)
    assert model.stage(slot) is Stage.FOSSILIZED
    reason = model.why_branches[model.seeds.index(slot)]
    whys = {"scale": "scales", "attention": "not linear", "weight_norm": "not a plain"}
    assert whys.get(style, style) in reason
    assert everything(host) == before


def test_a_residual_branch_that_reads_the_units_keeps_a_seed_from_folding():
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 8))
    x = torch.randn(5, 8)
    model = GrowingModel(host, ["0->2", "1"], x)
    model.plant("1#0", "residual_mlp", tempo="AT_ONCE")
    model.plant("0->2#0", "widen_8", tempo="AT_ONCE")
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    before = bits(model.example_outputs())
    model.keep("0->2#0")
    assert "1#0" in model.why_branches[0]
    assert bits(model.example_outputs()) == before
    assert host[0].out_features == 6
    model.tick()
    model.prune("1#0")
    model.tick()
    model.plant("0->2#1", "widen_8", tempo="AT_ONCE")
    model.keep("0->2#1")  # both fold now
    assert host[0].out_features == 22
    assert not model.why_branches


# Saving and copies.


def several(parameters, rate):
    """Muon for the matrices and AdamW for the vectors."""
    held = [*parameters]
    matrices, others = (
        [p for p in held if (p.ndim == 2) is flat] for flat in (True, False)
    )
    return [Muon(matrices, rate), AdamW(others, rate)]


def grower_of(seed=0, optimizer=AdamW, **options):
    torch.manual_seed(seed)
    host = nn.Sequential(
        nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU()
    )
    host.append(nn.Linear(6, 5))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    options = {"controller": "never", "tick": 1, **options}
    return Grower(host, optimizer(host.parameters(), 1e-2), example=x[:4], **options)


def train(grower, steps, start=0):
    host = grower.model.host
    for step in range(start, start + steps):
        chance = torch.Generator().manual_seed(step)
        x = torch.randn(16, 8, generator=chance)
        grower.optimizer.zero_grad()
        cross_entropy(host(x), x[:, :5].argmax(dim=1)).backward()
        grower.optimizer.step()


def folded(**options):
    """A Grower with a folded seed and a living one that feed each other."""
    grower = grower_of(**options)
    train(grower, 3)
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    grower.plant("3->5#0", "widen_8", tempo="AT_ONCE")
    train(grower, 3, 3)
    grower.keep("0->3#0")
    train(grower, 3, 6)
    grower.step(metric=0.5)
    return grower


@pytest.mark.parametrize("optimizer", [AdamW, several, Adafactor])
@pytest.mark.parametrize("seeds", ["living", "none"])
def test_a_state_loads_into_the_small_host_and_training_goes_on_to_the_bit(
    seeds, optimizer
):
    grower = folded(optimizer=optimizer)
    if seeds == "none":
        grower.keep("3->5#0")
        train(grower, 2, 9)
    data = io.BytesIO()
    torch.save(grower.state_dict(), data)
    data.seek(0)
    other = grower_of(seed=5, optimizer=optimizer)
    other.load_state_dict(torch.load(data, weights_only=True))
    assert bits(other.state_dict()) == bits(grower.state_dict())
    assert other.model.base == grower.model.base
    for one in (grower, other):
        train(one, 5, 20)
        one.step(metric=0.6)
    assert bits(other.state_dict()) == bits(grower.state_dict())
    assert other.summary() == grower.summary()


def test_a_state_from_before_makes_the_host_small_again():
    grower = grower_of()
    train(grower, 3)
    early = copy.deepcopy(grower.state_dict())
    weights = copy.deepcopy(grower.model.host.state_dict())
    late = copy.deepcopy(folded().state_dict())
    for wanted in (late, early, late):
        grower.load_state_dict(wanted)
        assert bits(grower.state_dict()) == bits(wanted)
    grower.model.host.load_state_dict(weights)  # not through the Grower
    assert grower.model.host[0].out_features == 6
    assert grower.model.parameters_added == 0
    train(grower, 3)


def test_a_grown_network_is_rebuilt_saved_copied_and_pickled(tmp_path):
    grower = folded()
    host, x = grower.model.host.eval(), torch.randn(7, 8)
    expected = host(x)
    other = grower_of(seed=3)
    other.detach()
    plain_host = other.model.host
    rebuilt = esper.rebuild(copy.deepcopy(plain_host), host.state_dict()).eval()
    assert torch.equal(rebuilt(x), expected)
    esper.save(host, tmp_path / "net.safetensors")
    loaded = esper.load(tmp_path / "net.safetensors", copy.deepcopy(plain_host)).eval()
    assert torch.equal(loaded(x), expected)
    assert torch.equal(copy.deepcopy(host)(x), expected)
    data = io.BytesIO()
    torch.save(host, data)
    data.seek(0)
    assert torch.equal(torch.load(data, weights_only=False)(x), expected)
    torch.testing.assert_close(grower.export()(x), expected, rtol=1e-5, atol=1e-6)


def test_an_average_folds_its_own_weights():
    grower = grower_of()
    average = torch.optim.swa_utils.AveragedModel(grower.model.host, use_buffers=True)
    grower.follow(average)
    train(grower, 3)
    average.update_parameters(grower.model.host)
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    train(grower, 3, 3)
    average.update_parameters(grower.model.host)
    x = torch.randn(7, 8)
    before = average.eval()(x)
    grower.keep("0->3#0")
    torch.testing.assert_close(average(x), before, rtol=1e-5, atol=1e-6)
    train(grower, 3, 6)
    average.update_parameters(grower.model.host)
    assert average.module[0].out_features == 14


@pytest.mark.parametrize("what", ["plant", "keep", "load"])
def test_an_average_that_cannot_follow_leaves_everything_as_it_was(what, monkeypatch):
    grower = grower_of()
    host = grower.model.host
    small = copy.deepcopy(host.state_dict())
    average = torch.optim.swa_utils.AveragedModel(host, use_buffers=True)
    grower.follow(average)
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    train(grower, 3)
    average.update_parameters(host)
    mirror = SeedModules.mirror

    def fail(*args):
        mirror(*args)
        raise MemoryError

    def held():
        named = average.named_parameters()
        return everything(host, grower.optimizer), {n: p.clone() for n, p in named}

    before = held()
    monkeypatch.setattr(SeedModules, "mirror", fail)
    change = {
        "plant": lambda: grower.plant("3->5#0", "widen_8", tempo="AT_ONCE"),
        "keep": lambda: grower.keep("0->3#0"),
        "load": lambda: host.load_state_dict(small),
    }[what]
    with pytest.raises(MemoryError):
        change()
    assert bits(held()) == bits(before)
    monkeypatch.undo()
    grower.keep("0->3#0")
    train(grower, 3)
    average.update_parameters(host)


@pytest.mark.parametrize("make", [between, squeezed])
def test_steps_with_weights_are_saved_copied_averaged_and_folded(make, tmp_path):
    def start(rng_seed):
        torch.manual_seed(rng_seed)
        host, options = make(), {"controller": "never", "tick": 1}
        optimizer = AdamW(host.parameters(), 1e-2)
        return Grower(host, optimizer, example=x[:4], slots=slots, **options)

    def run(grower, steps, first=0):
        for step in range(first, first + steps):
            torch.manual_seed(step)
            loss = grower.model.host(torch.randn_like(x)).square().sum()
            grower.optimizer.zero_grad()
            loss.backward()
            grower.optimizer.step()
            average.update_parameters(grower.model.host)

    x = torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(0))
    slots = ["a->b", "b->c"] if make is between else ["conv1->conv2"]
    grower, plain = start(0), start(5)
    host = grower.model.host
    average = torch.optim.swa_utils.AveragedModel(host, use_buffers=True)
    grower.follow(average)
    for kept in (False, True):
        for slot in slots:
            for part in (host, average):
                part.eval()
            expected = [host(x), average(x)]
            if kept:
                grower.keep(f"{slot}#0")
            else:
                grower.plant(f"{slot}#0", "widen_x1.5", tempo="AT_ONCE")
            for one, part in zip(expected, (host, average), strict=True):
                torch.testing.assert_close(part(x), one, rtol=1e-5, atol=1e-6)
            run(grower, 3)
        assert grower.model.why_branches == {}
        expected = host.eval()(x)
        esper.save(host, tmp_path / "net")
        copies = [copy.deepcopy(host), esper.load(tmp_path / "net", make())]
        data = io.BytesIO()
        torch.save(host, data)
        data.seek(0)
        copies.append(torch.load(data, weights_only=False))
        assert all(torch.equal(one.eval()(x), expected) for one in copies)
        assert (grower.export()(x) - expected).abs().max() < 1e-5
        plain.load_state_dict(copy.deepcopy(grower.state_dict()))
        for one in (grower, plain):
            one.model.host.train()
            run(one, 3, 20)
        assert bits(plain.state_dict()) == bits(grower.state_dict())


def test_each_weight_and_its_moments_stay_with_one_of_several_optimisers():
    grower = folded(optimizer=several)
    muon, adamw = grower.optimizer.members
    for optimizer in (muon, adamw):
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all((p.ndim == 2) is (optimizer is muon) for p in held)
        assert {*optimizer.state} == {*held}
        for parameter in held:
            moments = [t for t in optimizer.state[parameter].values() if t.dim()]
            assert {t.shape for t in moments} == {parameter.shape}
    groups = grower.optimizer.param_groups
    assert {p for g in groups for p in g["params"]} == {*grower.model.parameters()}


def test_a_bad_step_is_refused_for_all_optimisers_and_a_round_is_one_batch():
    grower = grower_of(optimizer=several, tick=4)
    muon, adamw = grower.optimizer.members
    batches, checked = [], []
    monitor, host = grower.safety.monitor, grower.model.host
    for order in ((muon, adamw), (adamw, muon), (adamw,)):
        host(torch.randn(16, 8)).square().sum().backward()
        for optimizer in order:
            optimizer.step()
        batches.append(grower._batches)
        checked.append(monitor.batches)
    assert batches == checked == [1, 2, 3]
    before = everything(host, grower.optimizer)
    host(torch.randn(16, 8)).square().sum().backward()
    host[1].weight.grad.fill_(torch.nan)  # a vector, which Muon does not train
    with pytest.warns(EsperWarning, match="a batch was refused"):
        muon.step()
    adamw.step()
    after = everything(host, grower.optimizer)
    assert before[0] == after[0]
    assert before[2] == after[2]


def test_a_lost_graph_of_an_earlier_batch_does_not_matter():
    """Loops keep the loss of the last batch alive while a decision is made."""
    grower = grower_of()
    x = torch.randn(16, 8)
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    loss = grower.model.host(x).sum()
    loss.backward()
    grower.optimizer.step()
    grower.keep("0->3#0")
    again = grower.model.host(x).sum()
    again.backward()
    assert grower.model.host[0].weight.grad.shape == (14, 8)
    assert loss.requires_grad  # still alive


@pytest.mark.parametrize("optimizer", [AdamW, several])
def test_a_roll_back_after_a_fold_restores_sizes_and_moments(optimizer):
    grower = folded(governor=GovernorConfig(), optimizer=optimizer)
    grower.keep("3->5#0")
    want = everything(grower.model.host, grower.optimizer)
    train(grower, 1)
    with torch.no_grad():
        grower.model.host[0].weight.fill_(torch.nan)
    assert grower.safety.check_decision()
    assert everything(grower.model.host, grower.optimizer) == want
    assert grower.model.host[0].weight.shape == (14, 8)
    train(grower, 3)


# Who keeps, and the end.


@pytest.mark.parametrize(
    ("controller", "keeps"),
    [("early", True), ("by-rent", True), ("large-then-cut", None), ("tamiyo", False)],
)
def test_rules_that_never_prune_keep_what_holds(controller, keeps):
    grower = grower_of(controller=controller, decisions=12, budget=300.0)
    for decision in range(12):
        train(grower, 2, 2 * decision)
        grower.step(metric=0.1 + 0.01 * decision)
        living = len(grower.model.seeds)
        if keeps is None and decision < 5:
            assert living == min(decision + 1, 4)  # two per place, until the cut
        elif keeps:
            assert living <= 1
    if keeps is None:
        assert len(grower.model.seeds) == 0
    if keeps is not False:
        assert grower.model.host[0].out_features > 6
    grower.detach()
    if keeps is not True:
        assert "esper_seeds" not in dict(grower.model.host.named_modules())
        assert not any(m._forward_hooks for m in grower.model.host.modules())
    groups = [p for group in grower.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in groups} == {id(p) for p in grower.model.host.parameters()}


def test_every_place_is_widened_though_slots_are_free_again():
    for controller in ("early", "plateau", "by-rent"):
        blueprints = ["widen_x2", "widen_x1.5"]
        grower = grower_of(
            controller=controller, decisions=8, budget=40.0, blueprints=blueprints
        )
        for decision in range(8):
            train(grower, 1, decision)
            grower.step(metric=0.5)
        grower.detach()
        assert "esper_seeds" not in dict(grower.model.host.named_modules())
        sizes = [grower.model.host[at].out_features for at in (0, 3)]
        assert min(sizes) > 6, (controller, sizes)


def test_the_end_keeps_the_output_and_what_cannot_fold():
    grower = grower_of(slots=["0->3", "3"], tick=100)
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    grower.plant("3#0", "squeeze_excite", tempo="AT_ONCE")
    grower.plant("0->3#1", "widen_8")  # in training: it has no part in the output
    train(grower, 3)
    host, x = grower.model.host.eval(), torch.randn(7, 8)
    expected, exported = host(x), grower.export()(x)
    grower.detach()
    torch.testing.assert_close(host(x), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(exported, expected, rtol=1e-5, atol=1e-6)
    assert host[0].out_features == 14
    assert [*host.esper_seeds] == ["slot_1"]
    grower.optimizer.zero_grad()
    host(x).sum().backward()
    grower.optimizer.step()  # still trained by the user's optimiser


# Hosts, loading and the end, where a fold is not possible or not expected.


def test_a_host_with_a_state_that_is_no_tensor_grows():
    class Versioned(nn.Linear):
        def get_extra_state(self):
            return {"version": 1}

        def set_extra_state(self, state):
            assert state == {"version": 1}

    host = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), Versioned(5, 5))
    early = copy.deepcopy(host.state_dict())
    optimizer = SGD(host.parameters(), 0.1)
    grower = Grower(host, optimizer, example=torch.randn(4, 8), controller="never")
    grower.plant("0->2#0", "widen_8", tempo="AT_ONCE")
    grower.keep("0->2#0")
    host.load_state_dict(early)
    assert host[0].out_features == 6


class FixedWidth(nn.Module):
    """A host whose code holds the width of a layer."""

    def __init__(self, norm=None):
        super().__init__()
        self.a, self.b = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(64, 5)
        self.norm = norm

    def forward(self, x):
        h = self.a(x)
        if self.norm is not None:
            return self.b(self.norm(h).relu().flatten(1))
        return self.b(h.relu().view(-1, 64))


def kept_at_fixed_width(norm=None):
    torch.manual_seed(0)
    host, x = FixedWidth(norm), torch.randn(6, 1, 4, 4)
    grower = Grower(host, SGD(host.parameters(), 0.1), example=x, controller="never")
    grower.plant("a->b#0", "widen_8", tempo="AT_ONCE")
    host(x).square().sum().backward()
    grower.optimizer.step()
    expected = host(x)
    grower.keep("a->b#0")
    assert torch.equal(host(x), expected)
    assert host.a.out_channels == 4
    return grower.model.why_branches[0]


def test_a_seed_stays_a_branch_where_the_code_of_the_host_needs_the_old_width():
    assert "mat1 and mat2 shapes cannot be multiplied" in kept_at_fixed_width()


def test_a_group_norm_without_weight_is_not_widened():
    """A state would not tell how many groups it has."""
    assert "has no weight" in kept_at_fixed_width(nn.GroupNorm(2, 4, affine=False))


@pytest.mark.parametrize("prefix", ["5.bias", "5"])
def test_a_part_of_a_state_changes_nothing_else(prefix):
    grower = folded()
    grower.finish()
    host = grower.model.host
    before = copy.deepcopy(host.state_dict())
    part = {n: v + 1 for n, v in before.items() if n.startswith(prefix)}
    host.load_state_dict(part, strict=False)
    assert bits(host.state_dict()) == bits({**before, **part})


def test_a_bias_that_a_merge_adds_is_a_part_of_a_state_of_the_same_sizes():
    host = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5, bias=False))
    plain, x = copy.deepcopy(host), torch.randn(4, 8)
    model = GrowingModel(host, ["1"], x)
    model.plant("1#0", "scale_shift", tempo="AT_ONCE")
    state = export(model).state_dict()
    assert esper.rebuild(plain, state)[1].bias is not None


@pytest.mark.parametrize("first", ["host", "optimizer"])
def test_host_and_optimiser_go_back_together_in_any_order(first):
    def make(parameters, rate):
        return SGD(parameters, rate, momentum=0.9, fused=True)

    grower = grower_of(optimizer=make)
    train(grower, 3)
    parts = {"host": grower.model.host, "optimizer": grower.optimizer}
    best = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    train(grower, 3, 3)
    grower.keep("0->3#0")
    parts["host"].load_state_dict(best["host"])
    train(grower, 2)  # some moments are lost
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    train(grower, 2)
    grower.keep("0->3#0")
    for name in sorted(parts, key=lambda name: name != first):
        parts[name].load_state_dict(best[name])
    now = {name: part.state_dict() for name, part in parts.items()}
    assert bits(now) == bits(best)


def test_an_average_follows_a_state_of_other_sizes():
    grower = grower_of()
    host = grower.model.host
    average, late = (torch.optim.swa_utils.AveragedModel(host) for _ in range(2))
    grower.follow(average)
    small = copy.deepcopy(host.state_dict())
    grower.plant("0->3#0", "widen_8", tempo="AT_ONCE")
    train(grower, 3)
    grower.keep("0->3#0")
    with pytest.raises(InvalidInputError, match="has grown since the copy"):
        grower.follow(late)
    for state in (small, copy.deepcopy(host.state_dict()), small):
        host.load_state_dict(state)
        average.update_parameters(host)
        assert average.module[0].weight.shape == host[0].weight.shape
    x = torch.randn(7, 8)
    assert torch.equal(average.eval()(x), host.eval()(x))


class Keeps:
    """A controller that keeps the first seed at its second decision."""

    def decide(self, observation, masks, state, generator):
        op = Op.FOSSILIZE if state == 1 else Op.WAIT
        return encode_action(op, slot=0), (state or 0) + 1


def test_a_roll_back_after_a_controller_kept_a_linear_seed():
    grower = grower_of(slots=["3->3"], controller=lambda spec: Keeps())
    grower.plant("3->3#0", "low_rank_4", tempo="AT_ONCE")
    grower._by_hand.clear()
    for start in (0, 10):
        train(grower, 10, start)
        grower.step(metric=0.5)
    assert len(grower.model.seeds) == 0
    want = everything(grower.model.host, grower.optimizer)
    with torch.no_grad():
        grower.model.host[0].weight.fill_(torch.nan)
    assert grower.safety.check_decision()
    assert everything(grower.model.host, grower.optimizer) == want


def test_one_rank_keeps_the_sizes_that_its_wrapper_knows(tmp_path):
    address = f"file://{tmp_path / 'address'}"
    torch.distributed.init_process_group("gloo", address, rank=0, world_size=1)
    try:
        host = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5))
        plain = copy.deepcopy(host)
        model = nn.parallel.DistributedDataParallel(host)
        x, optimizer = torch.randn(16, 8), SGD(host.parameters(), 0.1)
        grower = Grower(model, optimizer, example=x, controller="never")
        grower.plant("0->2#0", "widen_8", tempo="AT_ONCE")
        grower.keep("0->2#0")
        grower.finish()
        model(x).sum().backward()
        assert "DistributedDataParallel" in grower.model.why_branches[0]
        assert host[0].out_features == 6
        grower.detach()
        with pytest.raises(InvalidStateError, match="Wrap the host again"):
            model(x)
        assert torch.equal(model.eval()(x), host(x))
        other = nn.parallel.DistributedDataParallel(plain)
        optimizer = SGD(plain.parameters(), 0.1)
        grower = Grower(other, optimizer, example=x, controller="never")
        with pytest.raises(InvalidInputError, match="keeps the sizes of layers"):
            plain.load_state_dict(host.state_dict())
        other(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_a_second_grower_counts_from_the_first_host():
    grower = folded()
    with pytest.warns(EsperWarning, match="had a Grower already"):
        other = Grower(grower.model.host, grower.optimizer, example=torch.randn(4, 8))
    assert other.model.count() == grower.model.count()
    assert other.model.parameters_added == grower.model.parameters_added > 0


def test_a_detached_grower_exports_and_plants_no_more():
    grower = folded()
    grower.detach()
    host, x = grower.model.host.eval(), torch.randn(7, 8)
    assert torch.equal(grower.export()(x), host(x))
    for call in (
        lambda: grower.step(metric=0.5),
        lambda: grower.plant("0->3#0", "widen_8"),
    ):
        with pytest.raises(InvalidStateError, match=r"detach\(\) was called"):
            call()


def test_loading_a_state_keeps_hooks_on_the_gradients_of_the_host():
    """DistributedDataParallel averages gradients in such hooks."""
    model = grow("vector")
    model.plant("second#0", "residual_mlp")

    def accumulators():
        parameters = host_parameters(model.host).values()
        return [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters]

    before = accumulators()
    model.load_state_dict(model.state_dict())
    assert all(a is b for a, b in zip(before, accumulators(), strict=True))


def test_a_state_loads_whatever_new_memory_contains():
    def fresh():
        torch.manual_seed(0)
        one = nn.Conv2d(4, 4, 3, padding=1, groups=4)
        host = nn.Sequential(nn.Conv2d(2, 4, 1), one, nn.Conv2d(4, 3, 1))
        return GrowingModel(host, ["0->2"], torch.randn(2, 2, 5, 5))

    grown, small = fresh(), fresh()
    grown.plant("0->2#0", "widen_8", tempo="AT_ONCE")
    grown.finish()
    grown.plant("0->2#0", "widen_8", tempo="AT_ONCE")
    torch.use_deterministic_algorithms(True)  # new memory contains NaN
    try:
        small.load_state_dict(grown.state_dict())
    finally:
        torch.use_deterministic_algorithms(False)
    x = torch.randn(2, 2, 5, 5)
    assert torch.equal(small(x), grown(x))


def test_numbers_that_happen_to_equal_the_width_stay():
    deep = nn.Conv1d(8, 8, 17, padding=8, groups=8)
    host = nn.Sequential(nn.Conv1d(3, 8, 1), deep, nn.Conv1d(8, 4, 1)).double()
    model = GrowingModel(host, "auto", torch.randn(2, 3, 20).double())
    model.plant("0->2#0", "widen_8", tempo="AT_ONCE")
    model.finish()
    assert len(model.seeds) == 0
    assert (deep.groups, deep.padding, deep.kernel_size) == (16, (8,), (17,))
