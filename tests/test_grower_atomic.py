"""Nothing half-done: changes and loads are made as a whole or not at all."""

import copy
import signal
import sys

import pytest
import torch
from torch import nn

import esper
from esper.contracts.actions import NUM_HEADS
from esper.contracts.errors import (
    EsperError,
    EsperWarning,
    InvalidInputError,
    InvalidStateError,
)
from esper.contracts.stages import Stage
from esper.grower import MAX_BATCHES_WITHOUT_SEEDS, Grower
from esper.growth.analysis.slots import suggest_slots
from esper.growth.blueprints.registry import blueprint, forget
from esper.growth.seed_modules import host_parameters
from esper.tamiyo.registry import CONTROLLERS
from esper.tamiyo.rule_based import Never
from tests.growth.hosts import HOSTS, bits, make_batch, make_host
from tests.test_grown import begin, grown, train


def state(grower):
    """All that a Grower, its host and its optimiser hold."""
    held = grower.state_dict()
    groups = [[id(p) for p in g["params"]] for g in grower.optimizer.param_groups]
    branches = [
        {s: id(b.seed) for s, b in h.branches.items()} for h in grower.model.seeds.hooks
    ]
    names = [*grower.model.seeds]
    return bits([held, groups, branches, names, len(grower.model.surgery.joined)])


def consistent(grower):
    """Whether exactly the parameters of the host are trained, each once."""
    groups = grower.optimizer.param_groups
    trained = sorted(id(p) for group in groups for p in group["params"])
    hooked = {id(b.seed) for h in grower.model.seeds.hooks for b in h.branches.values()}
    stages = grower.model.seeds.states.stage[0].tolist()
    return (
        trained == sorted(id(p) for p in grower.model.host.parameters())
        and hooked == {id(seed) for seed in grower.model.seeds.values()}
        and len(hooked) == sum(stage != Stage.DORMANT for stage in stages)
    )


@pytest.fixture
def answered_interrupts():
    """Ctrl-C raises KeyboardInterrupt, also if the parent process ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(call, moment, files):
    """Lines of some files that a call runs; at one of them Ctrl-C comes."""
    lines = 0

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            lines += 1
            if lines == moment:
                signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
        torch.set_grad_enabled(True)  # torch's own `with torch.no_grad()` may be cut
    return lines


@pytest.mark.parametrize("moments", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("op", ["plant", "prune", "keep"])
def test_an_interrupt_at_any_line_leaves_all_or_nothing(
    op, moments, answered_interrupts
):
    """Ctrl-C in the code that changes the topology, at some of its lines."""
    files = (
        "grower.py",
        "optimiser.py",
        "seed_modules.py",
        "growth/model.py",
        "folding.py",
        "host_layers.py",
    )
    grower = grown()
    grower.step(metric=0.5)
    start = copy.deepcopy(grower.state_dict())

    def change():
        if op == "plant":
            grower.plant("second->last#1", "widen_8", tempo="AT_ONCE")
        elif op == "keep":
            grower.keep("first->second#0")
        else:
            grower.prune("first->second#0")

    outputs = grower.model.example_outputs()
    lines = interrupted(change, 0, files)
    assert lines > 200
    for part in range(moments):
        grower.load_state_dict(start)
        with pytest.raises(KeyboardInterrupt):
            interrupted(change, 1 + part * (lines - 1) // moments, files)
        assert consistent(grower), part
        if op == "keep":  # whole or not at all: with the same output
            host = grower.model.host
            widths = host.first.out_features, host.second.in_features
            assert widths in ((12, 12), (20, 20)), part
            held = [g for g in host.first.parameters() if g in grower.optimizer.state]
            for parameter in held:
                moment = grower.optimizer.state[parameter]["exp_avg"]
                assert moment.shape == parameter.shape, part
            torch.testing.assert_close(grower.model.example_outputs(), outputs)
    train(grower, range(2))


@pytest.mark.parametrize("moments", [12, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["rebuild", "rebuilt", "followed"])
def test_an_interrupt_while_a_state_is_loaded_leaves_all_or_nothing(
    how, moments, answered_interrupts
):
    """Ctrl-C in our code or in torch's own loop over the modules."""
    files = ("seed_modules.py", "serialization.py", "nn/modules/module.py")
    state = copy.deepcopy(grown(rng_seed=4).model.host.state_dict())
    before = copy.deepcopy(grown().model.host.state_dict())
    if how == "rebuild":
        before = make_host("vector").state_dict()

    def begun():
        if how == "rebuild":
            host = make_host("vector")
            return host, lambda: esper.rebuild(host, state), None
        if how == "rebuilt":
            host = esper.rebuild(make_host("vector"), before)
            return host, lambda: host.load_state_dict(state), None
        grower = begin()
        grower.model.host.load_state_dict(before)
        return (
            grower.model.host,
            lambda: grower.model.host.load_state_dict(state),
            grower,
        )

    lines = interrupted(begun()[1], 0, files)
    assert lines > 200
    ends = set()
    for part in range(moments):
        host, call, grower = begun()
        moment = 1 + part * (lines - 1) // moments
        with pytest.raises(KeyboardInterrupt):
            interrupted(call, moment, files)
        found = bits(dict(sorted(host.state_dict().items())))
        wanted = [bits(dict(sorted(one.items()))) for one in (before, state)]
        assert found in wanted, moment
        ends.add(wanted.index(found))
        if grower is not None:
            assert consistent(grower), moment
    assert ends == {0, 1}


@pytest.mark.parametrize("how", ["rebuild", "rebuilt", "followed"])
def test_what_is_raised_while_a_state_is_loaded_changes_nothing(how, monkeypatch):
    state = copy.deepcopy(grown(rng_seed=4).model.host.state_dict())
    grower = grown()
    host = grower.model.host
    if how != "followed":
        host = make_host("vector")
    if how == "rebuilt":
        esper.rebuild(host, grower.model.host.state_dict())
    before = bits(dict(host.state_dict()))
    calls = []
    copy_in = torch.Tensor.copy_

    def fail(self, *given):
        calls.append(self)
        if len(calls) == 9:
            raise MemoryError
        return copy_in(self, *given)

    monkeypatch.setattr(torch.Tensor, "copy_", fail)
    with pytest.raises((MemoryError, InvalidInputError, RuntimeError)):
        esper.rebuild(host, state) if how == "rebuild" else host.load_state_dict(state)
    monkeypatch.undo()
    assert before == bits(dict(host.state_dict()))
    if how == "followed":
        assert consistent(grower)


def test_what_is_raised_while_a_seed_is_planted_changes_nothing():
    """The new seed's first pass is interrupted."""
    tried = []

    class Late(nn.Linear):
        def forward(self, h):
            if len(tried) == 1:
                raise KeyboardInterrupt
            return super().forward(h)

    blueprint("late")(lambda at: Late(at.inlet_width, at.outlet_width))
    try:
        grower = begin(blueprints=["late", "widen_8"])
        grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
        train(grower, range(2))
        before = state(grower)
        host = grower.model.host
        host.second.register_forward_pre_hook(
            lambda *_: tried.append(1) if "slot_3" in host.esper_seeds else None
        )
        with pytest.raises(KeyboardInterrupt):
            grower.plant("second#0", "late", tempo="AT_ONCE")
        assert before == state(grower)
        assert consistent(grower)
    finally:
        forget("late")


SEED, WEIGHT = "host.esper_seeds.slot_0.weights.first", "host.first.weight"
TOPOLOGY = "host.esper_seeds._extra_state"
DELETED = object()


def edited(old, new):
    """Replaces text in a saved topology."""

    def edit(saved):
        text = bytes(saved.tolist()).decode()
        assert old in text
        return torch.tensor([*text.replace(old, new, 1).encode()], dtype=torch.uint8)

    return edit


DAMAGE = {
    "stage 99": ("model", TOPOLOGY, edited('"stage":3', '"stage":99')),
    "no json": ("model", TOPOLOGY, edited("{", "")),
    "size -1": ("model", TOPOLOGY, edited('"size":8', '"size":-1')),
    "alpha 7": ("model", TOPOLOGY, edited('"alpha":1.0', '"alpha":7.0')),
    "no blueprint": ("model", TOPOLOGY, edited('t":"widen_8"', 't":"widen_9"')),
    "nan seed": ("model", SEED, (0, 0), torch.nan),
    "nan host": ("model", WEIGHT, (0, 0), torch.nan),
    "lost seed": ("model", SEED, DELETED),
    "lost host": ("model", WEIGHT, DELETED),
    "shape": ("model", SEED, lambda old: old[:-1]),
    "text": ("model", WEIGHT, "weights"),
    "groups": ("groups", [["first.weight"]]),
    "moments": ("optimizer", "state", 0, "exp_avg", torch.zeros(3)),
    "nan moments": ("optimizer", "state", 0, "exp_avg", ..., torch.nan),
    "optimizer": ("optimizer", "param_groups", lambda old: [*old, {"params": [99]}]),
    "governor": ("governor", {"ring": torch.zeros(2, 3)}),
    "track": ("track", {"score": torch.zeros(3)}),
    "generator": ("generator", torch.zeros(3, dtype=torch.uint8)),
    "random": ("random", {"cpu": torch.zeros(3, dtype=torch.uint8)}),
    "history": ("history", [{"step": "one"}]),
    "flags": ("flags", [True]),
    "missing": ("compute", DELETED),
    "host": ("host", [0, 0]),
    "sizes": ("sizes", "first.weight", [10**6, 10**6]),
}
"""The path of an entry of a saved Grower, and its new value."""


def spoil(saved, how):
    """A saved Grower with one thing wrong with it."""
    made = part = copy.deepcopy(saved)
    *path, last, value = DAMAGE[how]
    for key in path:
        part = part[key]
    if value is DELETED:
        del part[last]
    else:
        part[last] = value(part[last]) if callable(value) else value
    return made


@pytest.fixture(scope="module")
def two_growers():
    """What one has saved, and another."""
    other = grown(rng_seed=4)
    other.step(metric=0.25)
    return copy.deepcopy(grown().state_dict()), other


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_state_is_refused_in_one_line_and_nothing_changes(how, two_growers):
    saved, other = two_growers
    train(other, range(1))
    before = state(other)
    with pytest.raises(InvalidInputError) as refused:
        other.load_state_dict(spoil(saved, how))
    assert "\n" not in str(refused.value)
    assert before == state(other)
    other.load_state_dict(saved)  # an unspoilt one is taken
    assert bits(saved) == bits(other.state_dict())


def test_a_foreign_optimiser_is_refused_at_its_first_step():
    grower = grown()
    host = grower.model.host
    other = torch.optim.SGD(host.parameters(), 0.1)
    train(grower, range(1))
    before = state(grower)
    with pytest.raises(InvalidStateError, match="another optimiser") as refused:
        other.step()
    assert "\n" not in str(refused.value)
    assert before == state(grower)
    torch.optim.SGD([nn.Parameter(torch.zeros(3))], 0.1).step()  # none of its business
    grower.detach()
    torch.optim.SGD(host.parameters(), 0.1).step()


def test_a_loss_that_passes_the_seeds_by_is_refused():
    grower = grown()
    copied, (x, y) = copy.deepcopy(grower.model.host), make_batch("vector", 16)
    closure = lambda: nn.functional.cross_entropy(copied(x), y)  # noqa: E731
    for _ in range(MAX_BATCHES_WITHOUT_SEEDS - 1):
        grower.loss(closure)
    train(grower, range(1))  # a host may leave layers out sometimes
    for _ in range(MAX_BATCHES_WITHOUT_SEEDS - 1):
        grower.loss(closure)
    with pytest.raises(
        InvalidStateError, match="no seed took part in the last 20 batches"
    ):
        grower.loss(closure)


@pytest.mark.filterwarnings("ignore:a batch was refused")
def test_a_step_with_a_closure_is_checked_like_any_other():
    ends = []
    for with_closure in (False, True):
        torch.manual_seed(0)
        grower = begin()
        grower.plant("first->second#0", "widen_8")
        host, optimizer = grower.model.host, grower.optimizer
        for batch in range(8):
            x, y = make_batch("vector", 16, rng_seed=batch)
            x = x * torch.nan if batch == 5 else x

            def closure(x=x, y=y, grower=grower, host=host, optimizer=optimizer):
                loss = grower.loss(lambda: nn.functional.cross_entropy(host(x), y))
                optimizer.zero_grad()
                loss.backward()
                return loss

            if with_closure:
                assert optimizer.step(closure) is not None
            else:
                closure()
                optimizer.step()
        ends.append([state(grower)[0], grower.safety.incidents])
    assert ends[0] == ends[1]
    assert len(grower.safety.incidents) == 1


@pytest.mark.filterwarnings("ignore:a batch was refused")
def test_a_refused_batch_has_no_part_in_the_loss_of_a_decision():
    grower = begin()
    train(grower, range(2))
    host, (x, y) = grower.model.host, make_batch("vector", 16)
    nn.functional.cross_entropy(host(x), y)
    loss = grower.loss(lambda: nn.functional.cross_entropy(host(x * torch.nan), y))
    loss.backward()
    grower.optimizer.step()
    assert 0.0 < grower.step(metric=0.5).loss < 10.0


def test_wrong_arguments_are_refused_in_one_line():
    grower = begin()
    x, y = make_batch("vector", 16)
    loss = nn.functional.cross_entropy(grower.model.host(x), y)
    with pytest.raises(InvalidInputError, match="takes a function"):
        grower.loss(loss)
    for wrong, line in (
        ({"slots": ["second->first"]}, "write 'first->second'"),
        ({"controller": None}, "controller must be a name"),
        ({"budget": "2"}, "budget must be at least 0"),
    ):
        host = make_host("vector")
        options = {"slots": HOSTS["vector"].slots, "example": x, **wrong}
        with pytest.raises(InvalidInputError, match=line) as refused:
            Grower(host, torch.optim.SGD(host.parameters(), 0.1), **options)
        assert "\n" not in str(refused.value)
        assert not any(m._forward_hooks for m in host.modules())
        assert "esper_seeds" not in dict(host.named_modules())


def test_new_biases_join_the_group_without_weight_decay():
    host = make_host("vector")
    vectors = [p for p in host.parameters() if p.ndim < 2]
    matrices = [p for p in host.parameters() if p.ndim > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], 1e-3
    )
    slots = HOSTS["vector"].slots
    grower = Grower(host, optimizer, slots, example=make_batch("vector")[0])
    grower.plant("first->second#0", "widen_8")
    grower.plant("second#0", "scale_shift")
    decayed, kept = (group["params"] for group in optimizer.param_groups)
    assert {p.ndim for p in decayed[len(matrices) :]} == {2}
    assert {p.ndim for p in kept[len(vectors) :]} == {1}
    assert len(decayed) + len(kept) == len([*host.parameters()])


def test_a_controller_leaves_alone_what_was_planted_by_hand():
    class Meddler:
        """Prunes, keeps or moves whatever it may."""

        def decide(self, observation, masks, state, generator):
            row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
            for op in (4, 5, 3):
                if bool(masks.op[0, op]):
                    row[0, 0] = op
                    row[0, 1] = int(masks.slot[0, op].nonzero()[0])
            return row, None

    grower = begin(controller=Meddler(), tick=1)
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    for batch in range(4):
        train(grower, [batch])
        decision = grower.step(metric=0.5)
        assert decision.action == "wait"
    assert grower.model.stage("first->second#0") is Stage.HOLDING
    assert bool(grower.prune("first->second#0"))


@pytest.mark.parametrize("how", ["whole", "in place", "inside", "parallel"])
def test_automatic_slots_say_why_a_host_cannot_be_grown(how):
    host, x = make_host("vector"), make_batch("vector", 4)[0]
    if how == "whole":
        host = torch.compile(host, backend="eager")
    elif how == "in place":
        host.compile(backend="eager")
    elif how == "inside":
        host.second = torch.compile(host.second, backend="eager")
    else:
        host = nn.DataParallel(host)
    line = "DataParallel" if how == "parallel" else "compiled"
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    with pytest.raises(InvalidInputError, match=line):
        Grower(host, optimizer, "auto", example=x)
    with pytest.raises(InvalidInputError, match=line):
        suggest_slots(host, x)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"controller": "periodic"}, "controller was 'early' and this one's is 'perio"),
        ({"controller": "never"}, "controller was 'early' and this one's is 'never'"),
        ({"controller": Never()}, "kind of controller was 'Scheduled' and this one's"),
        ({"mode": "min"}, "mode was 'max' and this one's is 'min'"),
        ({"kind": torch.optim.SGD}, "optimizer was 'AdamW' and this one's is 'SGD'"),
    ],
)
def test_a_state_of_a_grower_with_other_settings_is_refused(options, line):
    def build(kind=torch.optim.AdamW, **options):
        host = make_host("vector")
        options = {"example": make_batch("vector", 4)[0], **options}
        options.setdefault("controller", "early")
        return Grower(host, kind(host.parameters()), ["first->second"], **options)

    saved, other = build().state_dict(), build(**options)
    before = state(other)
    with pytest.raises(
        InvalidInputError, match=f"the saved Grower's {line}"
    ) as refused:
        other.load_state_dict(saved)
    assert "\n" not in str(refused.value)
    assert before == state(other)
    build().load_state_dict(saved)
    build(controller=CONTROLLERS["early"]).load_state_dict(saved)  # made otherwise


# A Grower over a host that has one: a notebook's cell is run again.


def planted():
    """A Grower with seeds in several stages, trained with momentum."""
    grower = begin(rng_seed=3)
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    grower.plant("second->last#1", "widen_x2", tempo="SLOW")
    train(grower, range(3))
    return grower


def again(grower, optimizer=None, **options):
    """The same cell with the same or another optimiser."""
    host = grower.model.host
    options = {"controller": "never", "seeds_per_slot": 2, **options}
    options.setdefault("slots", HOSTS["vector"].slots)
    example = make_batch("vector", 4)[0]
    return Grower(host, optimizer or grower.optimizer, example=example, **options)


@pytest.mark.parametrize("optimizer", ["the same", "another", "over the host alone"])
@pytest.mark.parametrize("forgotten", [False, True])
def test_a_second_grower_takes_the_first_ones_seeds_over(optimizer, forgotten):
    grower = planted()
    host, own = grower.model.host, grower.optimizer
    average = copy.deepcopy(host)
    grower.follow(average)
    wanted, stages = grower.model.example_outputs(), grower.model.seeds.states.stage
    seeds, moments = dict(grower.model.seeds.items()), bits(own.state_dict()["state"])
    trained = {
        "the same": own,
        "another": torch.optim.SGD(host.parameters(), 0.1),
        "over the host alone": torch.optim.SGD(host_parameters(host).values(), 0.1),
    }[optimizer]
    with pytest.warns(EsperWarning, match="This one has taken over its seeds"):
        second = again(grower, trained, seeds_per_slot=3, budget=0.5)
    assert all(map(torch.equal, wanted, second.model.example_outputs()))
    for name in ("first->second#0", "second->last#1"):
        slot = second.model.seeds.index(name)
        assert (
            second.model.seeds[f"slot_{slot}"]
            is seeds[f"slot_{grower.model.seeds.index(name)}"]
        )
        assert second.model.stage(name) is Stage(
            int(stages[0, grower.model.seeds.index(name)])
        )
    assert consistent(second)
    assert second.budget == 0.5
    if optimizer == "the same":
        assert bits(own.state_dict()["state"]) == moments
    for use in (
        lambda: grower.loss(lambda: torch.zeros(())),
        lambda: grower.step(metric=0.5),
        lambda: grower.plant("first->second#1", "widen_8"),
        lambda: grower.load_state_dict(grower.state_dict()),
    ):
        with pytest.raises(
            InvalidStateError, match="a newer Grower has taken this host over"
        ):
            use()
    grower.detach()
    if forgotten:
        del grower
    train(second, range(3))
    second.step(metric=0.5)
    second.prune("first->second#0")
    assert consistent(second)


def test_an_average_follows_the_second_grower_too():
    grower = planted()
    host = grower.model.host
    average = copy.deepcopy(host)
    grower.follow(average)
    with pytest.warns(EsperWarning, match="taken over"):
        second = again(grower)
    second.plant("first->second#1", "widen_8")
    assert [*average.esper_seeds] == [*host.esper_seeds]


@pytest.mark.parametrize(
    "wrong",
    [
        {"controller": "unknown"},
        {"mode": "most"},
        {"slots": ["first->second"]},
        {"slots": ["nowhere"]},
        {"blueprints": ["widen_16"]},
        {"seeds_per_slot": 1},
        {"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])},
        {"budget": -1.0},
    ],
)
@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_second_grower_that_is_refused_leaves_the_first_ones_seeds(wrong, rebuilt):
    grower = planted()
    before = state(grower)
    if rebuilt:
        host = esper.rebuild(make_host("vector"), grower.model.host.state_dict()).eval()
        outputs = bits(host(torch.ones(2, 8)))
        optimizer = torch.optim.SGD(host_parameters(host).values(), 0.1)
        options = {"slots": HOSTS["vector"].slots, "optimizer": optimizer, **wrong}
        with pytest.raises(EsperError):
            Grower(host, example=make_batch("vector", 4)[0], **options)
        assert bits(host(torch.ones(2, 8))) == outputs
        assert len(host.esper_seeds) == 2
        assert len(optimizer.param_groups[0]["params"]) == len(host_parameters(host))
        return
    with pytest.raises(EsperError):
        again(grower, **wrong)
    assert state(grower) == before
    assert consistent(grower)
    train(grower, range(2))
    assert not grower.step(metric=0.5).incidents


def test_a_host_that_cannot_be_grown_keeps_its_seeds_too():
    grower = planted()
    before = state(grower)
    with torch.no_grad():
        grower.model.host.first.bias[0] = torch.nan
    with pytest.raises(InvalidInputError, match="not finite"):
        again(grower, torch.optim.SGD(host_parameters(grower.model.host).values(), 0.1))
    with torch.no_grad():
        grower.model.host.first.bias[0] = 0.0
    assert [*grower.model.host.esper_seeds] == [*grower.model.seeds]
    assert len(state(grower)) == len(before)
    train(grower, range(1))
