"""The exact optimum: against brute force, in play, and what it says of the world."""

import dataclasses
from itertools import product

import pytest
import torch
from torch.testing import assert_close

from esper.contracts.actions import HEAD, HEAD_NAMES, RELEVANT, Op
from esper.contracts.devices import map_tensors
from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage
from esper.testing.simulated import (
    HORIZON,
    draw_instances,
)
from esper.testing.slot_tables import LIFE, LIVES, SPEC, SlotLife
from research.optimum import (
    FOLLOWING,
    LOOKS,
    GivenWorld,
    best_memoryless_plans,
    best_memoryless_returns,
    exchanged,
    optimal_plans,
    optimal_returns,
)
from tests.references.simulated import (
    EVERY_ACTION,
    FOSSILIZED,
    PlainHost,
    legal_in,
    plain_instances,
)

ACTIONS = torch.tensor(EVERY_ACTION)


def drawn(num, rng_seed=0, *, hidden=False):
    generator = torch.Generator().manual_seed(rng_seed)
    return draw_instances(num, generator, torch.full((num,), hidden))


@pytest.fixture(scope="module")
def visible():
    return drawn(128, 20)


@pytest.fixture(scope="module")
def plans(visible):
    return optimal_plans(visible)


@pytest.fixture(scope="module")
def hidden():
    return drawn(48, 21, hidden=True)


def picked(instances, index):
    return map_tensors(lambda x: x[index], instances)


def played(instances, actions):
    """Returns of a plan."""
    world = GivenWorld(instances)
    world.reset()
    return sum(world.step(actions[:, t]).reward.double() for t in range(HORIZON))


def anywhere(num, rng_seed, steps):
    """Instances that start in any life of any seed, so many steps before the end."""
    generator = torch.Generator().manual_seed(rng_seed)
    instances = drawn(num, rng_seed)
    life = torch.randint(len(LIVES), (num, 2), generator=generator)
    empty = life == LIFE[SlotLife(Stage.DORMANT)]
    kind = torch.randint(3, (num, 2), generator=generator)
    return dataclasses.replace(
        instances,
        life=life,
        blueprint=torch.where(empty, -1, kind),
        clock=torch.full((num,), HORIZON - steps),
    )


def best_of_all_sequences(instances, steps):
    """Best return by trying every action of every environment at every step."""
    owner = torch.arange(len(instances))
    total = torch.zeros(len(instances), dtype=torch.float64)
    rest = instances
    for step in range(steps):
        count = len(rest)
        each = torch.arange(count).repeat_interleave(len(ACTIONS))
        action = ACTIONS.repeat(count, 1)
        world = GivenWorld(picked(rest, each))
        world.reset()
        legal = legal_in(world, action)
        each, action = each[legal], action[legal]
        world = GivenWorld(picked(rest, each))
        world.reset()
        total = total[each] + world.step(action).reward
        owner = owner[each]
        rest = world.rest if step < steps - 1 else None
    best = torch.full((len(instances),), -torch.inf, dtype=torch.float64)
    return best.scatter_reduce(0, owner, total, "amax")


@pytest.mark.parametrize(("num", "steps"), [(80, 2), (40, 3)])
def test_the_optimum_is_the_best_of_all_action_sequences(num, steps):
    instances = anywhere(num, rng_seed=steps, steps=steps)
    expected = best_of_all_sequences(instances, steps)
    assert (expected > 0).float().mean() > 0.2
    assert_close(optimal_returns(instances), expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_playing_the_optimal_plan_attains_the_optimum_to_the_bit(is_hidden):
    instances = drawn(64, 30, hidden=is_hidden)
    world, plans = GivenWorld(instances), optimal_plans(instances)
    observation = world.reset()
    total = torch.zeros(64, dtype=torch.float64)
    for _ in range(2 * HORIZON):
        now = (observation.host.progress * HORIZON).round().to(torch.int64)
        result = world.step(plans.actions[torch.arange(64), now])
        total += result.reward
        observation = result.observation
    assert_close(total, 2 * optimal_returns(instances), rtol=0, atol=0)


def test_the_optimum_does_not_depend_on_the_other_instances(visible, plans):
    some = torch.arange(0, len(visible), 37)
    alone = optimal_plans(picked(visible, some))
    assert torch.equal(alone.returns, plans.returns[some])
    assert torch.equal(alone.actions, plans.actions[some])


def test_every_op_is_part_of_some_optimum_and_some_optimum_only_waits(visible, plans):
    ops = plans.actions[:, :, HEAD["op"]]
    for op in Op:
        assert (ops == op).any(dim=1).float().mean() > 0.05, op.name
    idle = (ops == Op.WAIT).all(dim=1)
    assert 0.05 < idle.float().mean() < 0.4
    assert (plans.returns[idle] == 0).all()


def other_choice(world, actions, head):
    """The same actions with another legal choice of one head where there is one."""
    changed, found = actions.clone(), torch.zeros(len(actions), dtype=torch.bool)
    for choice in range(SPEC.sizes[head]):
        tried = actions.clone()
        tried[:, head] = choice
        good = legal_in(world, tried) & (actions[:, head] != choice) & ~found
        changed[good], found = tried[good], found | good
    return changed, found & RELEVANT[actions[:, 0], head]


@pytest.mark.parametrize("head", HEAD_NAMES)
def test_every_head_matters(head, visible, plans):
    """One other choice of one head costs return, whatever is done afterwards."""
    losers = torch.zeros(len(visible), dtype=torch.bool)
    for t in range(HORIZON - 1):
        world = GivenWorld(visible)
        world.reset()
        earned = torch.zeros(len(visible), dtype=torch.float64)
        for before in range(t):
            earned += world.step(plans.actions[:, before]).reward
        changed, found = other_choice(world, plans.actions[:, t], HEAD[head])
        found &= ~losers
        if not found.any():
            continue
        earned += world.step(changed).reward
        reachable = earned[found] + optimal_returns(picked(world.rest, found))
        losers[found] = plans.returns[found] - reachable > 0.01
    assert losers.float().mean() > 0.1


def test_memory_is_worth_much_in_hidden_instances(hidden):
    best = (optimal_returns(hidden) + optimal_returns(exchanged(hidden))) / 2
    memoryless = best_memoryless_returns(hidden)
    waits = torch.zeros(len(hidden), HORIZON, 8, dtype=torch.int64)
    never = (played(hidden, waits) + played(exchanged(hidden), waits)) / 2
    assert ((best - memoryless) / (best - never)).min() > 0.3
    assert memoryless.mean() > never.mean()


def observations_equal(ours, theirs):
    """Whether two observations show the same, for each environment."""
    equal = torch.ones(ours.episode_start.shape, dtype=torch.bool)
    for record, other in ((ours.host, theirs.host), (ours.slots, theirs.slots)):
        for field in dataclasses.fields(record):
            one, two = getattr(record, field.name), getattr(other, field.name)
            equal &= (one == two).view(len(equal), -1).all(dim=1)
    return equal


def test_memoryless_plans_do_the_same_where_they_see_the_same(hidden):
    other = exchanged(hidden)
    ours, theirs = best_memoryless_plans(hidden), best_memoryless_plans(other)
    worlds = [GivenWorld(given) for given in (hidden, other)]
    seen = [world.reset() for world in worlds]
    total, alike = torch.zeros(len(hidden), dtype=torch.float64), 0
    for t in range(HORIZON):
        equal = observations_equal(*seen)
        alike += int(equal.sum())
        same = (ours.actions[:, t] == theirs.actions[:, t]).all(dim=1)
        assert same[equal].all()
        results = [
            world.step(plan.actions[:, t])
            for world, plan in zip(worlds, (ours, theirs), strict=True)
        ]
        total += (results[0].reward.double() + results[1].reward.double()) / 2
        seen = [result.observation for result in results]
    assert alike > 2 * len(hidden)
    assert_close(total, ours.returns, rtol=0, atol=0)
    assert_close(theirs.returns, ours.returns, rtol=0, atol=0)


def best_without_memory(pair, actions_of, steps):
    """Best average return of both hosts by trying every pair of actions it may take."""
    if steps == 0:
        return 0.0
    views = [(host.seen(), [slot.seen() for slot in host.slots]) for host in pair]
    options = [actions_of(host) for host in pair]
    best = -torch.inf
    for both in product(*options):
        if views[0] == views[1] and both[0] != both[1]:
            continue
        then = [host.copy() for host in pair]
        earned = sum(host.step(act) for host, act in zip(then, both, strict=True)) / 2
        best = max(best, earned + best_without_memory(then, actions_of, steps - 1))
    return best


def unspoilt(host):
    """Legal actions of the usable slot whose style and curve do no damage."""
    slots = [index for index, slot in enumerate(host.slots) if slot.stage != FOSSILIZED]
    chosen = []
    for action in host.legal_actions():
        op, where, _, style, _, _, _, curve = action
        traits = host.slots[where].traits
        suits = (style == (traits["depth"] > 0.5)) or op not in (1, 3)
        suits &= (curve == (0 if traits["liveness"] > 0.5 else 2)) or op not in (3, 4)
        if suits and (op == 0 or where in slots):
            chosen.append(action)
    return chosen


@pytest.mark.parametrize(
    ("start", "steps"),
    [
        (SlotLife(Stage.DORMANT), 3),
        (SlotLife(Stage.TRAINING, age=2, target=1.0, steps=1), 4),
        (SlotLife(Stage.BLENDING, target=0.5, steps=1, maturity=1.0), 3),
        (SlotLife(Stage.BLENDING, target=1.0, steps=2, maturity=0.75), 4),
        (SlotLife(Stage.HOLDING, age=1, alpha=0.5, target=0.5, maturity=1.0), 2),
    ],
)
def test_the_best_memoryless_return_is_the_best_of_all_memoryless_plays(start, steps):
    """From starts at which a trial is under way: it shows, and then one may prune."""
    instances = drawn(4, 40, hidden=True)
    fossil = torch.tensor([life.stage is Stage.FOSSILIZED for life in LIVES])
    kept = fossil[instances.life]
    empty = ~kept & (start.stage is Stage.DORMANT)
    instances = dataclasses.replace(
        instances,
        life=torch.where(kept, instances.life, LIFE[start]),
        blueprint=torch.where(empty, -1, instances.blueprint),
        style=torch.where(empty, 0, instances.style),
        clock=torch.full((4,), HORIZON - steps),
    )
    rows = [
        plain_instances(given, LIVES) for given in (instances, exchanged(instances))
    ]
    expected = [
        best_without_memory([PlainHost(one), PlainHost(other)], unspoilt, steps)
        for one, other in zip(*rows, strict=True)
    ]
    actual = best_memoryless_returns(instances)
    assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0)


def test_states_that_look_the_same_allow_the_same_moves():
    for look in set(LOOKS.tolist()):
        legal = FOLLOWING[look == LOOKS] >= 0
        assert (legal == legal[0]).all()


def test_memoryless_plans_are_refused_for_visible_instances(visible):
    with pytest.raises(InvalidInputError, match="instance 0 is visible"):
        best_memoryless_plans(visible)
