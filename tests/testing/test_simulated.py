"""The simulated world against its plain twin, its masks, and its promises."""

import dataclasses
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from esper.contracts.actions import HEAD, Op
from esper.contracts.devices import map_tensors
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.contracts.stages import Stage
from esper.contracts.state import save
from esper.tamiyo.policy.action_masks import compute_masks
from esper.testing.simulated import (
    HORIZON,
    SimulatedWorld,
    draw_instances,
)
from esper.testing.slot_tables import LIFE, LIVES, SPEC, mature
from research.optimum import GivenWorld, exchanged
from tests.references.simulated import (
    EVERY_ACTION,
    PlainHost,
    legal_in,
    plain_instances,
)

ACTIONS = torch.tensor(EVERY_ACTION)
WAIT = ACTIONS[0]


def drawn(num, rng_seed=0, *, hidden=False):
    generator = torch.Generator().manual_seed(rng_seed)
    return draw_instances(num, generator, torch.full((num,), hidden))


# Whether an action is possible depends on its first three heads.
KINDS, KIND = ACTIONS[:, :3].unique(dim=0, return_inverse=True)


def some_legal(world, generator):
    """A random legal action for every environment; every op is as likely."""
    padded = torch.nn.functional.pad(KINDS, (0, ACTIONS.shape[1] - KINDS.shape[1]))
    every = [legal_in(world, action.expand(world.num_envs, -1)) for action in padded]
    legal = torch.stack(every, dim=1)[:, KIND].double()  # [env, action]
    of_op = torch.nn.functional.one_hot(ACTIONS[:, 0], len(Op)).double()
    weight = legal / (legal @ of_op)[:, ACTIONS[:, 0]].clamp(min=1.0)
    return ACTIONS[torch.multinomial(weight, 1, generator=generator)[:, 0]]


def some_plain_legal(host, chance):
    """The same for one plain host."""
    legal = host.legal_actions()
    op = chance.choice(sorted({action[0] for action in legal}))
    return chance.choice([action for action in legal if action[0] == op])


def assert_same_bits(ours, theirs, where=slice(None)):
    other = save(theirs)
    for name, mine in save(ours).items():
        assert torch.equal(mine[where], other[name][where]), name
        assert torch.equal(mine.signbit(), other[name].signbit()), name


@settings(max_examples=15)
@given(st.integers(0, 2**31), st.booleans())
def test_random_legal_play_agrees_with_the_plain_twin(rng_seed, hidden):
    instances = drawn(8, rng_seed, hidden=hidden)
    world = GivenWorld(instances)
    hosts = [PlainHost(row) for row in plain_instances(instances, LIVES)]
    chance, observation = Random(rng_seed), world.reset()
    first, total = torch.tensor([host.phi() for host in hosts]), torch.zeros(8)
    for step in range(HORIZON):
        seen = [(save(observation.host), [host.seen() for host in hosts])]
        slots = save(observation.slots)
        for slot in range(2):
            views = [host.slots[slot].seen() for host in hosts]
            seen.append(({name: slots[name][:, slot] for name in slots}, views))
        for record, views in seen:
            for name in views[0]:
                expected = torch.tensor([view[name] for view in views])
                assert torch.equal(record[name], expected), name
        actions = [some_plain_legal(host, chance) for host in hosts]
        expected = [h.step(a) for h, a in zip(hosts, actions, strict=True)]
        result = world.step(torch.tensor(actions))
        assert_close(result.reward, torch.tensor(expected), rtol=0, atol=0)
        assert result.terminated.all() == (step == HORIZON - 1)
        observation, total = result.observation, total + result.reward
    gained = torch.tensor([host.phi() for host in hosts]) - first
    damages = torch.tensor([host.damages for host in hosts])
    assert_close(total, gained - damages, rtol=0, atol=0)


def every_pair():
    """One instance per pair of lives and blueprints, with budgets of every size."""
    states = torch.tensor(
        [
            (index, kind)
            for index, life in enumerate(LIVES)
            for kind in (range(3) if life.stage is not Stage.DORMANT else (-1,))
        ]
    )
    pair = torch.cartesian_prod(*[torch.arange(len(states))] * 2)
    life, blueprint = states[pair].unbind(2)
    instances = drawn(len(pair), 5)
    held = instances.parameters.gather(2, blueprint.clamp(min=0).unsqueeze(2))
    added = (held.squeeze(2) * (blueprint >= 0)).sum(1)
    budget = added + torch.randint(0, 64, (len(pair),)) / 64
    return dataclasses.replace(instances, life=life, blueprint=blueprint, budget=budget)


def test_masks_allow_exactly_what_the_world_carries_out_in_every_state():
    world = GivenWorld(every_pair())
    masks = compute_masks(world.reset(), SPEC)
    seen = set()
    for action in ACTIONS:
        op, slot, blueprint = action[:3].tolist()
        masked = masks.op[:, op] & (masks.slot[:, op, slot] | (op == Op.WAIT))
        if op == Op.GERMINATE:
            masked = masked & masks.blueprint[:, slot, blueprint]
        legal = legal_in(world, action.expand(world.num_envs, -1))
        assert torch.equal(legal, masked), action
        seen |= {(op, value) for value in legal.unique().tolist()}
    assert len(seen) == 2 * len(Op) - 1, (
        "each op but WAIT was legal here, illegal there"
    )


def test_one_rng_seed_gives_the_same_episodes_and_another_gives_others():
    worlds = [SimulatedWorld(32, s, hidden_share=0.5) for s in (7, 7, 8)]
    one, same, other = [world.reset() for world in worlds]
    assert_same_bits(one, same)
    assert not torch.equal(one.slots.depth, other.slots.depth)
    for step in range(2 * HORIZON + 3):
        actions = some_legal(worlds[0], torch.Generator().manual_seed(step))
        one, same = worlds[0].step(actions), worlds[1].step(actions)
        assert_same_bits(one.observation, same.observation)
        assert torch.equal(one.reward, same.reward)


def test_an_ended_episode_is_followed_by_a_fresh_first_observation():
    world = SimulatedWorld(16, 1)
    start = world.reset()
    assert start.episode_start.all()
    for step in range(1, 2 * HORIZON + 1):
        before = world.instances
        result = world.step(WAIT.expand(16, -1))
        ended = step % HORIZON == 0
        assert result.terminated.tolist() == [ended] * 16
        assert result.observation.episode_start.tolist() == [ended] * 16
        assert not result.truncated.any()
        assert result.final is None
        assert torch.equal(world.instances.gain, before.gain) != ended
        expected = step % HORIZON / HORIZON
        assert_close(result.observation.host.progress, torch.full((16,), expected))


def test_environments_that_end_at_different_times_do_not_touch_each_other():
    instances = dataclasses.replace(drawn(HORIZON, 4), clock=torch.arange(HORIZON))
    world = GivenWorld(instances)
    alone = [
        GivenWorld(map_tensors(lambda x, env=env: x[[env]], instances))
        for env in range(HORIZON)
    ]
    world.reset()
    for other in alone:
        other.reset()
    generator = torch.Generator().manual_seed(0)
    for step in range(HORIZON + 3):
        actions = some_legal(world, generator)
        result = world.step(actions)
        lengths = HORIZON - instances.clock
        assert torch.equal(result.terminated, (step + 1) % lengths == 0)
        for env, other in enumerate(alone):
            single = other.step(actions[env : env + 1])
            assert single.reward[0] == result.reward[env]
            many = save(result.observation)
            for name, one in save(single.observation).items():
                assert torch.equal(one[0], many[name][env]), name


def test_the_rest_of_an_episode_is_an_instance_that_goes_on_the_same_way():
    world = GivenWorld(drawn(64, 6))
    world.reset()
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        observation = world.step(some_legal(world, generator)).observation
    rest = GivenWorld(world.rest)
    assert_same_bits(
        dataclasses.replace(observation, episode_start=rest.reset().episode_start),
        rest.reset(),
    )
    for _ in range(5, HORIZON):
        actions = some_legal(world, generator)
        ours, theirs = world.step(actions), rest.step(actions)
        assert torch.equal(ours.reward, theirs.reward)
    assert theirs.terminated.all()


def test_damage_is_charged_and_never_seen():
    instances = dataclasses.replace(
        drawn(32, 9),
        life=torch.full((32, 2), LIFE[mature(Stage.HOLDING, 1.0)]),
        blueprint=torch.zeros(32, 2, dtype=torch.int64),
    )
    results = []
    for curve in (0, 2):
        world = GivenWorld(instances)
        world.reset()
        prune = torch.tensor([Op.PRUNE, 1, 0, 0, 0, 0, 1, curve]).expand(32, -1)
        results.append(world.step(prune))
    linear, sigmoid = results
    assert_same_bits(linear.observation, sigmoid.observation)
    lively = instances.liveness[:, 1] > 0.5
    better = torch.where(
        lively, linear.reward - sigmoid.reward, sigmoid.reward - linear.reward
    )
    assert_close(better, torch.full((32,), 1 / 32), rtol=0, atol=0)


def test_promises_are_the_gains_where_visible_and_unknown_where_hidden():
    world = SimulatedWorld(256, hidden_share=0.5)
    offers, instances = world.reset().offers, world.instances
    hidden = instances.hidden
    assert 64 < hidden.sum() < 192
    assert torch.equal(offers.promise[~hidden], instances.gain[~hidden])
    assert offers.promise_known[~hidden].all()
    assert not offers.promise_known[hidden].any()
    assert (offers.promise[hidden] == 0).all()


def test_twins_differ_only_in_a_contribution_that_fades_before_anything_can_be_done():
    instances = drawn(256, 11, hidden=True)
    one = GivenWorld(instances)
    other = GivenWorld(exchanged(instances))
    ours, theirs = one.reset(), other.reset()
    shown = ours.slots.contribution_measured
    assert (shown.sum(1) == 1).all()
    assert (ours.slots.contribution[shown] * theirs.slots.contribution[shown] < 0).all()
    generator = torch.Generator().manual_seed(0)
    for _ in range(HORIZON - 1):
        told_apart = ours.slots.contribution_measured
        blank, blank_too = (
            dataclasses.replace(
                seen,
                slots=dataclasses.replace(
                    seen.slots,
                    contribution=seen.slots.contribution.masked_fill(told_apart, 0.0),
                ),
            )
            for seen in (ours, theirs)
        )
        assert_same_bits(blank, blank_too)
        fading = ours.slots.stage == Stage.COOLING
        masks = compute_masks(ours, SPEC)
        assert (masks.op.sum(1)[fading.any(1)] == 1).all(), "only WAIT while it fades"
        actions = some_legal(one, generator)
        ours, theirs = one.step(actions).observation, other.step(actions).observation


def test_an_illegal_action_is_flagged_and_waits():
    instances = drawn(128, 12)
    world, waiting = (GivenWorld(instances) for _ in range(2))
    world.reset(), waiting.reset()
    generator = torch.Generator().manual_seed(0)
    for _ in range(HORIZON):
        wild = torch.randint(-1, 6, (128, 8), generator=generator)
        legal = legal_in(world, wild)
        tame = torch.where(legal.unsqueeze(1), wild, WAIT)
        ours, theirs = world.step(wild), waiting.step(tame)
        assert_same_bits(ours.observation, theirs.observation)
        assert torch.equal(ours.reward, theirs.reward)
        assert torch.equal(ours.illegal, ~legal)
        assert not theirs.illegal.any()


def test_heads_that_the_op_does_not_use_are_ignored():
    worlds = [SimulatedWorld(64, 1) for _ in range(2)]
    for world in worlds:
        world.reset()
    noisy = torch.tensor([Op.WAIT, 1, 2, 1, 2, 1, 2, 1])
    ours, theirs = (
        world.step(action.expand(64, -1))
        for world, action in zip(worlds, (noisy, WAIT), strict=True)
    )
    assert_same_bits(ours.observation, theirs.observation)
    assert torch.equal(ours.reward, theirs.reward)


def test_what_does_not_fit_or_cannot_be_afforded_is_illegal():
    empty = torch.zeros(2, 2, dtype=torch.int64)
    instances = dataclasses.replace(
        drawn(2, 0),
        life=empty,
        blueprint=empty - 1,
        style=empty,
        fits=torch.tensor([True, False, True]).expand(2, 2, 3),
        parameters=torch.tensor([0.125, 0.25, 0.5]).expand(2, 2, 3),
        budget=torch.full((2,), 0.25),
    )
    world = GivenWorld(instances)
    world.reset()
    plant = torch.tensor([Op.GERMINATE, 1, 0, 0, 1, 0, 0, 0])
    for head, choice in (
        ("op", 6), ("slot", -1), ("tempo", 0), ("tempo", 3), ("blueprint", 1),
        ("blueprint", 2), ("op", Op.ADVANCE),
    ):  # fmt: skip
        wrong = plant.clone()
        wrong[HEAD[head]] = choice
        assert legal_in(world, torch.stack([plant, wrong])).tolist() == [True, False]


def test_calls_and_arguments_that_cannot_be_meant_are_refused():
    with pytest.raises(InvalidStateError, match=r"call reset\(\) first"):
        SimulatedWorld(1).step(WAIT.expand(1, -1))
    with pytest.raises(InvalidInputError, match=r"num_envs .* at least 1, got 0"):
        SimulatedWorld(0)
    with pytest.raises(
        InvalidInputError, match=r"hidden_share must lie in \[0, 1\], got 1.5"
    ):
        SimulatedWorld(1, hidden_share=1.5)
    late = dataclasses.replace(drawn(1), clock=torch.tensor([HORIZON]))
    with pytest.raises(
        InvalidInputError, match=r"must start before step 12, got .* at 12"
    ):
        GivenWorld(late)
    world = SimulatedWorld(2)
    world.reset()
    with pytest.raises(InvalidInputError, match=r"shape \(2, 8\) .* got .* \(3, 8\)"):
        world.step(WAIT.expand(3, -1))
