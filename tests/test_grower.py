"""The Grower in a training loop: every controller, every way of writing the loop."""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from esper.contracts.actions import HEAD, NUM_HEADS, Op
from esper.contracts.errors import (
    EsperWarning,
    IllegalActionError,
    InvalidInputError,
    NumericsError,
)
from esper.contracts.stages import Stage
from esper.grower import Grower
from esper.growth.blueprints.registry import blueprint, find, forget
from esper.growth.measurements import Track, host_states
from esper.growth.seed_modules import host_parameters
from esper.tamiyo.registry import CONTROLLERS
from tests.growth.hosts import HOSTS, everything, make_batch, make_host, shake

REFUSES = pytest.mark.filterwarnings("ignore:a batch was refused")
"""For tests that provoke refusals: all warnings are errors here."""
RUN = 32
"""Decisions of a whole run."""


def begin(kind="vector", host=None, optimizer=torch.optim.AdamW, **options):
    host = make_host(kind) if host is None else host
    options = {"controller": "never", "seeds_per_slot": 2, **options}
    options.setdefault("slots", HOSTS[kind].slots)
    return Grower(
        host,
        optimizer(host.parameters(), 3e-3),
        example=make_batch(kind, 4)[0],
        **options,
    )


def loss_of(grower, batch=0, kind="vector"):
    x, y = make_batch(kind, 16, rng_seed=batch)
    return lambda: nn.functional.cross_entropy(grower.model.host(x), y)


def train(grower, batches, kind="vector"):
    """Train as the README does; the losses."""
    losses = []
    for batch in batches:
        loss = grower.loss(loss_of(grower, batch, kind))
        grower.optimizer.zero_grad()
        loss.backward()
        grower.optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("kind", "controller"),
    [*(("vector", name) for name in CONTROLLERS), ("signal", "random")],
)
def test_a_whole_run_with_every_controller(kind, controller):
    budget = 1.5
    grower = begin(
        kind,
        controller=controller,
        decisions=RUN,
        budget=budget,
        slots=HOSTS[kind].slots[:2],
        blueprints=["scale_shift", "low_rank_4", "widen_8", "residual_mlp"],
    )
    model, host = grower.model, grower.model.host
    x, y = make_batch(kind, 32, rng_seed=77)

    def accuracy():
        host.eval()
        with torch.no_grad():
            right = (host(x).argmax(dim=1) == y).float().mean()
        host.train()
        return float(right)

    for decision in range(RUN):
        train(grower, (decision,), kind)
        made = grower.step(metric=accuracy if decision % 4 == 0 else accuracy())
        assert made.step == decision
        assert made.action
        assert bool(made.why_not) == (made.action == "wait")
        assert model.parameters_added <= budget * model.first_cost.parameters
        groups = grower.optimizer.param_groups
        trained = [id(p) for group in groups for p in group["params"]]
        assert sorted(trained) == sorted(id(p) for p in model.parameters())
    assert len(grower.history) == RUN
    changes = [e for decision in grower.history for e in decision.events]
    assert (controller == "never") == (not changes)
    page = str(grower)
    assert page.replace("\n", "").isprintable()
    assert len(page.splitlines()) < 60
    assert f"{RUN} decisions" in page
    stages = {slot: Stage.DORMANT for slot in range(len(model.slots))}
    for event in changes:  # the history holds every change of stage
        assert stages[event.slot] is event.before
        stages[event.slot] = event.after
    assert stages == {s: model.stage(n) for s, n in enumerate(model.slots)}


class Gated(nn.Module):
    """No pair of layers in which units fit, as in Mamba or Mixtral."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x):
        return self.last(torch.softmax(self.first(x), dim=1))


@pytest.mark.parametrize("controller", ["early", "timetable-by-rent", "tamiyo"])
def test_a_controller_that_can_plant_nothing_here_is_warned_of(controller):
    with pytest.warns(EsperWarning, match="nothing will grow: the controller plants"):
        grower = begin(host=Gated(), slots="auto", controller=controller)
    train(grower, range(2))
    why = grower.step(metric=0.5).why_not
    assert "which fits no slot (first->first: softmax between the layers" in why
    assert why in str(grower).split("why nothing was planted")[1]
    assert "note: nothing will grow" in str(grower)
    assert "chose to wait" not in str(grower)


def test_a_controller_that_plants_what_fits_is_not():
    grower = begin(host=Gated(), slots="auto", controller="plateau", decisions=4)
    for _ in range(3):
        train(grower, range(2))
        grower.step(metric=0.5)
    assert len(grower.model.seeds)


def test_a_seed_that_the_budget_has_no_room_for_is_the_reason_to_wait():
    grower = begin(controller="early", budget=0.3, slots=["first->second"])
    train(grower, range(2))
    assert "no blueprint fits the budget left" in grower.step(metric=0.5).why_not


def test_a_metric_that_leaves_its_range_changes_the_scale_of_all_before_it():
    grower = begin(mode="min")
    for metric in (1.4, 0.2, -0.5):
        train(grower, range(2))
        grower.step(metric=metric)
    scores = grower._scorer.scores([1.4, 0.2, -0.5])
    assert grower._track.best.tolist() == pytest.approx([scores[-1]])
    assert float(grower._track.score_slope) > 0
    assert int(grower._track.decisions) == 3


def test_places_that_write_to_one_module_are_counted_apart():
    slots = ["first->second", "second->last", "second->second", "second"]
    grower = begin(controller="early", slots=slots, budget=20.0)
    for decision in range(4):
        train(grower, [decision])
        grower.step(metric=0.5)
    grower.finish()
    # Twice as wide, and again, at both places that can be widened.
    host = grower.model.host
    assert (host.first.out_features, host.second.out_features) == (48, 48)


# Ways of writing the loop.


def test_a_training_seed_leaves_the_users_loop_unchanged():
    ends = []
    for plant in (False, True):
        torch.manual_seed(3)
        grower = begin()
        if plant:
            grower.plant("first->second#0", "widen_8")
            grower.plant("second#0", "residual_mlp")
        train(grower, range(12))
        grower.step(metric=0.5)
        train(grower, range(12, 20))
        ends.append(everything(grower.model.host, grower.optimizer, seeds=False))
    assert ends[0] == ends[1]
    modules = grower.model.seeds.modules()
    norm = next(m for m in modules if isinstance(m, nn.BatchNorm1d))
    assert int(norm.num_batches_tracked) == 20  # it follows the data


def test_what_the_closure_leaves_behind_is_of_the_hosts_own_pass():
    grower, seen = begin(), []
    grower.plant("first->second#0", "widen_8", tempo="SLOW")
    shake(grower.model)
    x, y = make_batch("vector", 16)

    def closure():
        seen.append(grower.model.host(x))
        return nn.functional.cross_entropy(seen[-1], y)

    torch.manual_seed(1)
    loss = grower.loss(closure)
    torch.manual_seed(1)
    own = grower.model.host(x)
    assert len(seen) == 2
    assert torch.equal(seen[1], own)
    assert torch.equal(loss, nn.functional.cross_entropy(own, y))
    assert not torch.equal(seen[0], own)


@pytest.mark.parametrize(("parts", "scale"), [(2, 1.0), (1, 1024.0), (2, 1024.0)])
def test_accumulated_and_scaled_losses_train_as_whole_ones_do(parts, scale):
    ends = []
    for halves, factor in ((1, 1.0), (parts, scale)):
        torch.manual_seed(0)
        host = make_host("vector")
        host.drop.p = 0.0
        grower = begin(host=host, optimizer=torch.optim.SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=factor)
        grower.plant("second->last#0", "widen_8")
        for batch in range(4):
            grower.optimizer.zero_grad()
            for _ in range(halves):
                loss = grower.loss(loss_of(grower, batch)) / halves
                scaler.scale(loss).backward()
            scaler.step(grower.optimizer)
            scaler.update()
        ends.append([p.detach().clone() for p in grower.model.parameters()])
    exact = parts == 1  # powers of two
    for one, other in zip(*ends, strict=True):
        torch.testing.assert_close(
            one, other, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6
        )


@REFUSES
def test_a_bad_half_refuses_the_whole_step_and_both_halves_of_the_buffers():
    grower = begin()
    train(grower, range(4))
    before = everything(grower.model, grower.optimizer)
    grower.optimizer.zero_grad()
    x, y = make_batch("vector", 16)
    host = grower.model.host
    for half in (x * torch.nan, x):
        loss = grower.loss(lambda half=half: nn.functional.cross_entropy(host(half), y))
        (loss / 2).backward()
    grower.optimizer.step()
    assert before == everything(grower.model, grower.optimizer)
    assert len(grower.safety.incidents) == 1
    assert "is not finite" in grower.safety.incidents[0]


def broken_batches(grower, count):
    """Batches whose loss is not a number."""
    for batch in range(count):
        loss = grower.loss(lambda batch=batch: loss_of(grower, batch)() * torch.nan)
        grower.optimizer.zero_grad()
        loss.backward()
        grower.optimizer.step()


def test_the_first_refusal_is_warned_of_and_all_are_counted():
    grower = begin()
    train(grower, range(10))
    with pytest.warns(EsperWarning, match="a batch was refused: the loss is") as seen:
        broken_batches(grower, 2)
    assert len(seen) == 1
    assert "\n" not in str(seen[0].message)
    for _ in range(2):
        train(grower, range(3))
        broken_batches(grower, 1)
    grower.step(metric=0.5)
    assert "what was refused (4 batches in all" in grower.summary()


@REFUSES
def test_a_run_in_which_no_batch_is_let_through_is_refused_at_its_decision():
    """As with a column of the data that is NaN: nothing learns, nothing grows."""
    grower = begin(controller="early")
    broken_batches(grower, 9)
    grower.step(metric=0.5)  # a few may be chance
    grown = len(grower.model.seeds)
    broken_batches(grower, 3)
    with pytest.raises(NumericsError, match="the last 12 batches were all") as error:
        grower.step(metric=0.5)
    assert "\n" not in str(error.value)
    assert len(grower.model.seeds) == grown
    assert len(grower.history) == 1
    train(grower, range(1))
    grower.step(metric=0.5)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_are_no_refusals(fused):
    """It begins with a scale that is too large and halves it, batch by batch."""
    grower = begin(optimizer=partial(torch.optim.AdamW, fused=fused))
    grower.model.host.first.weight.register_hook(lambda grad: grad.half().float())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32)
    for batch in range(20):
        loss = grower.loss(loss_of(grower, batch))
        grower.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(grower.optimizer)
        scaler.update()
        if batch == 10:
            assert scaler.get_scale() == 2.0**21  # all steps were skipped
            grower.step(metric=0.5)


def test_a_broken_batch_whose_step_is_left_out_does_not_spoil_the_next():
    grower = begin()
    train(grower, range(10))
    host = grower.model.host
    grower.loss(lambda: loss_of(grower, 1)() * torch.nan)  # and the user goes on
    before = host.first.weight.clone()
    train(grower, [2])
    assert not torch.equal(before, host.first.weight)
    assert grower.step(metric=0.5).incidents == ()


class Counting:
    """Waits, and remembers in plain data how often."""

    def decide(self, observation, masks, state, generator):
        count = {"decisions": [0]} if state is None else state
        count = {"decisions": [count["decisions"][0] + 1]}
        return torch.zeros(1, NUM_HEADS, dtype=torch.int64), count


def test_a_controller_may_remember_plain_data():
    grower = begin(controller=Counting())
    train(grower, range(2))
    grower.step(metric=0.5)
    other = begin(controller=Counting())
    other.load_state_dict(grower.state_dict())
    train(other, range(2))
    other.step(metric=0.5)
    assert other.state_dict()["controller"] == {"decisions": [2]}


def test_an_optimiser_that_accelerate_has_wrapped_is_known():
    accelerate = pytest.importorskip("accelerate")
    host = make_host("vector")
    own = torch.optim.AdamW(host.parameters(), 3e-3)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(host, own)
    x, y = make_batch("vector", 16)
    grower = Grower(model, optimizer, ["first->second"], example=x, controller="never")
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    for _ in range(3):
        loss = grower.loss(lambda: nn.functional.cross_entropy(model(x), y))
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    assert all(p in own.state for p in grower.model.seed_parameters().values())


def test_clipping_leaves_training_seeds_out():
    grower = begin()
    grower.plant("first->second#0", "widen_8")
    clipped = {id(p) for p in grower.parameters()}
    assert clipped == {id(p) for p in host_parameters(grower.model.host).values()}
    grower.loss(loss_of(grower)).backward()
    nn.utils.clip_grad_norm_(grower.parameters(), 0.1)
    grower.optimizer.step()
    grower.step(metric=0.5)
    grower.advance("first->second#0")
    assert len({id(p) for p in grower.parameters()} - clipped) > 0


def test_without_grower_loss_training_passes_and_the_summary_notes_it():
    grower = begin(controller="early", decisions=10, tick=1)
    for batch in range(10):
        grower.optimizer.zero_grad()
        loss_of(grower, batch)().backward()
        grower.optimizer.step()
        decision = grower.step(metric=0.5)
        assert math.isnan(decision.loss)
        trained = [
            int(age)
            for age, stage in zip(
                grower.model.seeds.states.age[0],
                grower.model.seeds.states.stage[0],
                strict=True,
            )
            if stage == Stage.TRAINING
        ]
        assert max(trained, default=0) <= 1
    assert grower.model.host.first.out_features > 12
    assert "grower.loss was not used" not in grower.summary()  # none had to train
    for tick in (1, 1000):  # by its tempo, or at the decision
        grower = begin(tick=tick)
        grower.plant("second#0", "residual_mlp", tempo="FAST")
        for _ in range(2):
            loss_of(grower)().backward()
            grower.optimizer.step()
            grower.step(metric=0.5)
        assert grower.model.stage("second#0") is not Stage.TRAINING
        assert "note: grower.loss was not used" in grower.summary()


def test_seeds_tend_themselves_by_batches_up_to_holding():
    grower, model = (made := begin(tick=3)), made.model
    slots = ("first->second#0", "second->last#0", "second#0")
    for slot, tempo in zip(slots, ("AT_ONCE", "FAST", "STANDARD"), strict=True):
        kind = "residual_mlp" if slot == "second#0" else "widen_x1.25"
        assert grower.plant(slot, kind, tempo=tempo).jump == 0.0
    lives, alphas = [], []
    for batch in range(13):
        lives.append([model.stage(slot).name for slot in slots])
        branches = [model.seeds.hooks_of(model.seeds.index(s)).branches for s in slots]
        alphas.append(
            [
                b[model.seeds.index(s)].alpha
                for b, s in zip(branches, slots, strict=True)
            ]
        )
        train(grower, [batch])
        if batch == 4:  # decisions have no part in it
            decision = grower.step(metric=0.5)
            assert bool(decision)
            reasons = {event.reason for event in decision.events}
            assert "trained for its tempo" in reasons
    holds, fast, standard = zip(*lives, strict=True)
    assert set(holds) == {"HOLDING"}
    assert fast == ("TRAINING",) * 3 + ("BLENDING",) * 3 + ("HOLDING",) * 7
    assert standard == ("TRAINING",) * 6 + ("BLENDING",) * 6 + ("HOLDING",)
    assert [round(a[1], 3) for a in alphas[:7]] == [0, 0, 0, 0.333, 0.667, 1, 1]
    assert [round(6 * a[2]) for a in alphas] == [0] * 6 + [1, 2, 3, 4, 5, 6, 6]
    assert model.stage(slots[2]) is Stage.HOLDING
    grower.step(metric=0.5)
    jump = grower.prune(slots[0]).jump
    assert jump > 0
    train(grower, range(13, 16))
    assert model.stage(slots[0]) is Stage.DORMANT
    grower.model.surgery.names()  # the optimiser knows every parameter


@pytest.mark.parametrize("controller", CONTROLLERS)
def test_with_an_unknown_end_nothing_depends_on_one(controller):
    """The same run, whatever number of decisions is given; it plants at first."""
    ends = []
    for decisions in (None, 5, 500):
        torch.manual_seed(0)
        grower = begin(controller=controller, stop="anytime", decisions=decisions)
        for batch in range(6):
            train(grower, [batch])
            grower.step(metric=0.5)
        ends.append([made.action for made in grower.history])
    assert ends[0] == ends[1] == ends[2]
    seen = []
    for horizon in (None, 8):
        track = Track.fresh(1)
        progress = []
        for _ in range(100):
            track = track.after(torch.zeros(1), torch.ones(1))
            names = ("compute", "budget_left", "rent", "added")
            terms = {name: torch.zeros(1) for name in names}
            host = host_states(track, horizon=horizon, **terms)
            progress.append(float(host.progress))
        seen.append(progress)
    assert seen[0] == [0.0] * 100
    assert seen[1][8:] == [1.0] * 92


def test_a_relative_width_adds_at_least_one_unit():
    assert [find(f"widen_x{x}").units(1) for x in (1.25, 1.5, 2, 4)] == [1, 1, 1, 3]


def test_summary_receipts_and_export_count_the_same():
    grower = begin()
    grower.plant("first->second#0", "widen_x2", tempo="AT_ONCE")
    grower.plant("second->last#0", "widen_x2", tempo="AT_ONCE")
    train(grower, range(2))
    decision = grower.step(metric=0.5)
    plain = sum(p.numel() for p in grower.export().parameters())
    assert plain == decision.parameters == grower.model.count().parameters
    assert f"-> {plain:,} (" in grower.summary()
    assert "an export has" not in grower.summary()
    grower.plant("second->last#1", "widen_x2", tempo="SLOW")
    assert grower.model.count().parameters > plain
    assert sum(p.numel() for p in grower.export().parameters()) == plain
    assert f"an export has {plain:,} parameters" in grower.summary()
    line = f"metric 0.5, loss {decision.loss:.4g}, {plain:,} parameters; wait"
    assert line in str(decision)


def test_a_metric_that_is_none_is_refused_and_nothing_happens():
    grower = begin(controller="early")
    train(grower, range(2))
    before, track = everything(grower.model, grower.optimizer), grower._track
    for metric in (math.inf, math.nan, "good"):
        with pytest.raises(InvalidInputError, match="metric must") as refused:
            grower.step(metric=lambda metric=metric: metric)
        assert "\n" not in str(refused.value)
    low = begin(mode="min")
    for metric in (math.inf, math.nan):
        with pytest.raises(InvalidInputError, match="the metric must be finite"):
            low.step(metric=metric)
    assert before == everything(grower.model, grower.optimizer)
    assert grower._track is track
    assert grower.history == low.history == []
    assert bool(grower.step(metric=0.5))


def test_a_closure_that_raises_or_returns_many_numbers_changes_nothing():
    grower = begin()
    grower.plant("first->second#0", "widen_8")
    host = grower.model.host
    train(grower, range(3))
    with torch.no_grad():  # an evaluation leaves no trace
        grower.loss(lambda: loss_of(grower)() * torch.nan)
    train(grower, range(3))
    assert grower.safety.incidents == []
    before = everything(grower.model, grower.optimizer)

    def broken():
        raise KeyError("label")

    with pytest.raises(KeyError):
        grower.loss(broken)
    assert before == everything(grower.model, grower.optimizer)

    calls = []

    def broken_in_the_shadow():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("label")
        return loss_of(grower)()

    state = grower.model.seeds.flow
    with pytest.raises(KeyError):
        grower.loss(broken_in_the_shadow)
    assert not state.shadow
    assert all(p.requires_grad for p in host.parameters())
    x = make_batch("vector")[0]
    with pytest.raises(InvalidInputError, match="must return one number"):
        grower.loss(lambda: host(x))
    assert all(math.isfinite(loss) for loss in train(grower, range(3)))


# Controllers of others.


class FixedAction:
    """A controller that always takes the same action."""

    def __init__(self, **choices):
        self.row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
        for head, choice in choices.items():
            self.row[0, HEAD[head]] = choice

    def decide(self, observation, masks, state, generator):
        return self.row, None


@pytest.mark.parametrize(
    "choices",
    [
        {"op": Op.ADVANCE, "slot": 0},
        {"op": Op.GERMINATE, "slot": 99},
        {"op": Op.GERMINATE, "slot": 3, "blueprint": 5},  # widens between layers only
        {"op": 17},
        {"op": Op.GERMINATE, "slot": 0, "blueprint": 5},  # above the budget
    ],
)
@pytest.mark.filterwarnings("ignore:budget=10 is a number of parameters")
def test_what_masks_forbid_is_refused_and_changes_nothing(choices):
    grower = begin(controller=FixedAction(**choices), budget=10)
    train(grower, range(2))
    track = grower._track
    with pytest.raises(IllegalActionError, match="chose what its masks forbid"):
        grower.step(metric=0.5)
    assert not grower.model.seeds
    assert grower.history == []
    assert grower._track is track


# Seeds whose code fails.


@pytest.fixture
def unreliable():
    """A blueprint that turns bad after some calls."""
    trouble = {"calls": 0, "from": 10**9, "how": "raise"}

    class Unreliable(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.map = nn.Linear(width, width)
            nn.init.zeros_(self.map.weight)
            nn.init.zeros_(self.map.bias)

        def forward(self, h):
            trouble["calls"] += 1
            if trouble["calls"] <= trouble["from"]:
                return self.map(h)
            if trouble["how"] == "raise":
                raise RuntimeError("out of ideas\nafter a while")
            if trouble["how"] == "shape":
                return self.map(h)[:, :1]
            if trouble["how"] == "none":
                return None
            return self.map(h) * torch.nan

    blueprint("unreliable")(lambda geometry: Unreliable(geometry.outlet_width))
    yield trouble
    forget("unreliable")


@REFUSES
@pytest.mark.parametrize("how", ["raise", "shape", "none", "nan"])
@pytest.mark.parametrize("stage", ["TRAINING", "BLENDING"])
def test_a_seed_that_turns_bad_is_removed_and_the_host_goes_on(unreliable, how, stage):
    torch.manual_seed(0)
    grower = begin(blueprints=["unreliable", "residual_mlp"], tick=100)
    grower.plant("second#0", "unreliable", tempo="FAST")
    grower.plant("second#1", "residual_mlp", tempo="FAST")
    train(grower, range(10))
    grower.step(metric=0.5)
    if stage == "BLENDING":
        grower.advance("second#0")
        grower.advance("second#1")
    for batch in range(10, 30, 5):
        train(grower, range(batch, batch + 5))
        grower.step(metric=0.5)
    assert grower.model.stage("second#0") is Stage[stage]
    unreliable.update({"from": unreliable["calls"] + 2, "how": how})
    losses = train(grower, range(30, 42))
    decision = grower.step(metric=0.5)
    assert grower.model.stage("second#0") is Stage.DORMANT
    assert grower.model.stage("second#1") is Stage[stage]
    (event,) = [e for e in decision.events if e.after is Stage.DORMANT]
    assert event.slot == grower.model.seeds.index("second#0")
    lines = [line for line in decision.incidents if line.startswith("removed second#0")]
    assert len(lines) == 1
    assert "\n" not in lines[0]
    assert all(math.isfinite(loss) for loss in losses[-3:])
    owned = {id(p) for p in grower.model.parameters()}
    groups = grower.optimizer.param_groups
    assert {id(p) for group in groups for p in group["params"]} == owned


@pytest.mark.parametrize("how", ["raise", "nan"])
def test_a_training_seed_that_turns_bad_leaves_the_host_unchanged(unreliable, how):
    ends = []
    for plant in (False, True):
        torch.manual_seed(0)
        grower = begin(blueprints=["unreliable"])
        if plant:
            grower.plant("second#0", "unreliable")
            unreliable.update({"from": unreliable["calls"] + 7, "how": how})
        train(grower, range(20))
        ends.append(everything(grower.model.host, grower.optimizer, seeds=False))
    assert not grower.model.seeds
    assert ends[0] == ends[1]


def test_a_broken_training_seed_does_not_spoil_its_own_trial():
    grower = begin(mode="min")
    grower.plant("second#0", "residual_mlp")
    train(grower, range(3))
    x, y = make_batch("vector", 32)

    def validation():
        with torch.no_grad():
            return float(nn.functional.cross_entropy(grower.model.host(x), y))

    with torch.no_grad():
        for parameter in grower.model.seeds.parameters():
            parameter.fill_(1e30)
    decision = grower.step(metric=validation)
    assert math.isfinite(decision.metric)


# The safety checks, from outside.


@REFUSES
def test_rolling_back_works_after_manual_ops_and_keeps_the_learning_rate():
    grower = begin()
    train(grower, range(12))
    grower.step(metric=0.5)
    train(grower, range(3))
    kept = copy.deepcopy(grower.safety.snapshot.tensors)
    grower.plant("first->second#0", "widen_8")
    grower.optimizer.param_groups[0]["lr"] = 1e-4
    with torch.no_grad():
        grower.model.host.first.weight.fill_(torch.nan)
    train(grower, range(1))
    assert "rolled back" in grower.safety.incidents[0]
    assert grower.optimizer.param_groups[0]["lr"] == 1e-4  # the user's schedule
    for name, tensor in host_parameters(grower.model.host).items():
        assert torch.equal(kept[f"host.{name}"], tensor)
    assert grower.model.stage("first->second#0") is Stage.TRAINING
    assert all(math.isfinite(loss) for loss in train(grower, range(5)))


@REFUSES
def test_a_damaged_state_is_never_rolled_back_to():
    """Large but finite weights at a decision are found by the batches after it."""
    grower = begin()
    train(grower, range(24))
    grower.step(metric=0.5)
    usual = max(train(grower, range(24, 30)))
    with torch.no_grad():
        grower.model.host.last.weight.mul_(1e6)
    grower.step(metric=0.5)
    losses = train(grower, range(30, 40))
    assert losses[0] > 100 * usual
    assert max(losses[4:]) < 2 * usual
    assert "bad batches in a row" in grower.safety.incidents[-1]


def test_a_broken_model_with_a_broken_metric_is_healed_at_the_decision():
    grower = begin(mode="min")
    train(grower, range(12))
    grower.step(metric=1.0)
    with torch.no_grad():
        grower.model.host.first.weight.fill_(torch.nan)
    decision = grower.step(metric=math.nan)
    assert decision.metric == 1.0
    assert "rolled back" in decision.incidents[0]
    assert bool(torch.isfinite(grower.model.example_outputs()[0]).all())


def test_a_budget_of_a_few_parameters_is_warned_of_and_others_are_not():
    with pytest.warns(EsperWarning, match=r"^budget=4 is a number .* Use 4\.0 for 4"):
        begin(budget=4)
    for budget in (0, 400, 4.0, 0.001):
        begin(budget=budget)


def test_the_summary_says_that_no_decision_was_taken():
    grower = begin()
    assert "note: grower.step was not called yet" in grower.summary()
    grower.step(metric=0.5)
    assert "grower.step was not called" not in grower.summary()
