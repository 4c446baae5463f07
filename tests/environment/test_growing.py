from dataclasses import replace
from functools import cache
from math import inf, nan

import pytest
import torch

from esper.contracts.actions import HEAD, NUM_HEADS, Op
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.contracts.stages import Stage
from esper.contracts.state import load, save
from esper.environment.growing import GrowingWorld
from esper.environment.settings import (
    LOOKED_ROWS,
    OPS,
    SCORED_ROWS,
    WorldSettings,
    check_actions,
)
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.rule_based import Never, Random
from esper.tasks.data import Data, split
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task
from tests.census import changed, fixed
from tests.references.torch_engine import TorchCohort, layer

HORIZON, CLASSES = 4, 3
EXACT = {"rtol": 0.0, "atol": 1e-5}


def blobs(rng_seed):
    """Points around a few centres."""
    chance = torch.Generator().manual_seed(rng_seed)
    labels = torch.arange(150) % CLASSES
    centres = torch.randn(CLASSES, 5, generator=chance)
    noise = torch.randn(150, 5, generator=chance)
    return split(Data("blobs", centres[labels] + noise, labels, CLASSES), rng_seed)


TINY = Task(
    name="blobs",
    description="points around a few centres",
    data=blobs,
    host=MlpHost((5, 6, 6, CLASSES)),
    batch=16,
    decision_every=2,
    horizon=HORIZON,
    learning_rate=2e-2,
)
VARIED = replace(TINY, varied=True)
TERMS = {"rent": (0.01, 0.1), "budget": (2.0, 20.0), "rate": (0.5, 2.0)}
LONG = replace(TINY, horizon=14)


def make(envs=3, rng_seed=0, task=TINY, **more):
    settings = WorldSettings(**{**TERMS, **more})
    return GrowingWorld(task, envs, rng_seed, settings=settings)


def action(op, slot=0, blueprint=0, **heads):
    row = torch.zeros(NUM_HEADS, dtype=torch.int64)
    row[:3] = torch.tensor([int(op), slot, blueprint])
    for name, choice in heads.items():
        row[HEAD[name]] = choice
    return row


def say(world, *rows):
    """One step with these actions, and WAIT in all other environments."""
    waits = [action(Op.WAIT)] * (world.num_envs - len(rows))
    return world.step(torch.stack([*rows, *waits]))


def play(world, steps, rng_seed=0, controller=None):
    """Observations, actions and results of some random steps."""
    chance, controller = torch.Generator().manual_seed(rng_seed), controller or Random()
    observation = world.reset()
    for _ in range(steps):
        masks = compute_masks(observation, world.spec)
        actions, _ = controller.decide(observation, masks, None, chance)
        result = world.step(actions)
        yield observation, actions, result
        observation = result.observation


def assert_same(one, other, envs=slice(None)):
    there = save(other)
    for name, value in save(one).items():
        assert torch.equal(value[envs], there[name][envs]), name


def weights(world, env):
    cohort = world.cohort
    return [part[env].clone() for part in (cohort.values, cohort.mean, cohort.square)]


def same_weights(one, other, env):
    pairs = zip(weights(one, env), weights(other, env), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("task", [TINY, VARIED, LONG], ids=["shared", "varied", "long"])
def test_whatever_masks_allow_is_carried_out_and_observations_are_bounded(task):
    world, chosen = make(12, task=task), set()
    for observation, actions, result in play(world, 3 * task.horizon):
        assert not result.illegal.any()
        chosen |= {Op(op) for op in actions[:, 0].tolist()}
        assert observation.slots.stage.max() <= Stage.COOLING
        for name, value in save(compute_features(observation, world.spec)).items():
            assert value.isfinite().all(), name
            assert value.float().abs().max() <= 1.0, name
        assert result.reward.isfinite().all()
    assert chosen == {Op[name] for name in OPS} or task is not LONG


def worth(observation):
    return observation.host.score - observation.host.rent * observation.host.added


def test_rewards_of_an_episode_add_up_to_what_the_network_gained():
    world = make(penalty=0.25)
    for time, (observation, _, result) in enumerate(play(world, 3 * HORIZON)):
        last = time % HORIZON == HORIZON - 1
        assert observation.episode_start.tolist() == [time % HORIZON == 0] * 3
        assert result.terminated.tolist() == [last] * 3
        assert not result.truncated.any()
        assert not result.illegal.any()
        if time % HORIZON == 0:
            start, total = worth(observation), torch.zeros(3)
            rent = observation.host.rent
        total = total + result.reward
        assert (result.report is not None) is last
        gained = worth(result.observation) - worth(observation)
        if last:
            end = result.report.score - rent * result.report.added
            gained = end - start
        reward = total if last else result.reward
        torch.testing.assert_close(reward, gained, **EXACT)


def test_what_was_shown_stays_as_it_was_shown():
    world, shown = make(), []
    for observation, _, _ in play(world, 2 * HORIZON):
        shown.append((observation, save(observation)))
    for observation, then in shown:
        for name, value in save(observation).items():
            assert torch.equal(value, then[name]), name


ILLEGAL = {
    "advance a seed that tends itself": action(Op.ADVANCE, 0),
    "prune an empty slot": action(Op.PRUNE, 2),
    "fossilize an empty slot": action(Op.FOSSILIZE, 0),
    "set alpha of an empty slot": action(Op.SET_ALPHA, 3),
    "plant upon another": action(Op.GERMINATE, 0, 1),
    "plant what is too dear": action(Op.GERMINATE, 1, 3),
    "plant in a style that is not offered": action(Op.GERMINATE, 1, 0, style=1),
    "name a slot that is not there": action(Op.PRUNE, 9),
    "name an op that is not there": action(-1),
}


@pytest.mark.parametrize("kind", ILLEGAL)
def test_an_illegal_action_is_flagged_charged_once_and_is_a_wait(kind):
    asked, waited = (make(2, budget=1.5, penalty=0.25) for _ in range(2))
    for world in (asked, waited):
        world.reset()
        planted = action(Op.GERMINATE, 0, 2, tempo=1)
        assert not say(world, *[planted] * 2).illegal.any()
        assert world._lives.stage[0, 0] == Stage.TRAINING
    result, plain = say(asked, action(Op.WAIT), ILLEGAL[kind]), say(waited)
    assert result.illegal.tolist() == [False, True]
    assert not plain.illegal.any()
    charged = plain.reward - torch.tensor([0.0, 0.25])
    torch.testing.assert_close(result.reward, charged, **EXACT)
    assert_same(result.observation, plain.observation)
    assert all(same_weights(asked, waited, env) for env in range(2))
    assert torch.equal(say(asked).reward, say(waited).reward)


def test_test_rows_are_reported_and_never_shown():
    def other_tests(rng_seed):
        parts = blobs(rng_seed)
        wrong = (parts.test.labels + 1) % CLASSES
        return parts._replace(test=replace(parts.test, labels=wrong))

    usual, other = make(), make(task=replace(TINY, data=other_tests))
    for (seen, _, result), (same, _, again) in zip(
        play(usual, HORIZON), play(other, HORIZON), strict=True
    ):
        assert_same(seen, same)
        assert torch.equal(result.reward, again.reward)
    one, two = result.report, again.report
    assert torch.equal(one.score, two.score)
    assert not torch.equal(one.test, two.test)
    assert one.env.tolist() == [0, 1, 2]
    assert ((one.test >= 0) & (one.test <= 1)).all()
    assert (one.macs >= 1).all()


@pytest.mark.parametrize("task", [TINY, VARIED], ids=["shared", "varied"])
def test_worlds_of_one_number_agree_to_the_bit(task):
    one, two, other = (make(rng_seed=n, task=task) for n in (5, 5, 6))
    runs = (play(world, HORIZON + 2) for world in (one, two, other))
    differs = False
    for first, second, third in zip(*runs, strict=True):
        assert_same(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert torch.equal(first[2].reward, second[2].reward)
        differs |= not torch.equal(first[2].reward, third[2].reward)
    assert all(same_weights(one, two, env) for env in range(3))
    assert differs


@pytest.mark.parametrize("task", [TINY, VARIED], ids=["shared", "varied"])
def test_environments_share_data_unless_the_task_varies(task):
    drawn = cache(blobs)
    world = make(task=replace(task, data=drawn))
    world.reset()
    (x, y), shared = world._episodes.rows[0], task is TINY
    assert len(x) == len(y) == (1 if shared else 3)
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert shared or not torch.equal(x[one], x[other])
    place, kept = x.data_ptr(), x[-1].clone()
    for _ in range(HORIZON):
        say(world)
    assert world._episodes.rows[0][0].data_ptr() == place, "replaced in place"
    assert torch.equal(x[-1], kept) is shared
    for mine, plain in zip(drawn(0), blobs(0), strict=True):
        assert torch.equal(mine.features, plain.features), "rows of the task itself"


def test_a_number_that_gives_fewer_rows_than_the_first_is_refused():
    counts = iter((0, 1))

    def fewer(rng_seed):
        parts, cut = blobs(rng_seed), next(counts)
        x, y = parts.test.features[cut:], parts.test.labels[cut:]
        return parts._replace(test=replace(parts.test, features=x, labels=y))

    with pytest.raises(
        InvalidInputError, match=r"\(30, 5\)\] for every seed; .* \(29, 5\)\]"
    ):
        make(task=replace(VARIED, data=fewer)).reset()


def test_compiled_loops_grow_hosts_as_autograd_does(monkeypatch):
    settings = WorldSettings(**TERMS)
    compiled = GrowingWorld(TINY, 3, settings=settings)
    monkeypatch.setattr("esper.environment.growing.Cohort", TorchCohort)
    autograd = GrowingWorld(TINY, 3, settings=settings)
    runs = play(compiled, HORIZON), play(autograd, HORIZON)
    for (_, actions, mine), (_, same, other) in zip(*runs, strict=True):
        assert torch.equal(actions, same)
        torch.testing.assert_close(mine.reward, other.reward, rtol=0, atol=0.05)


def test_a_broken_host_ends_its_own_episode_and_touches_no_neighbour():
    sound, broken = (make(penalty=0.0) for _ in range(2))
    runs = [play(world, 2 * HORIZON, controller=Never()) for world in (sound, broken)]
    others = torch.tensor([0, 2])
    for time in range(2 * HORIZON):
        if time == 1:
            broken.cohort.values[1, 0] = torch.nan
        (_, _, plain), (seen, _, result) = (next(run) for run in runs)
        if time == 1:
            assert result.terminated.tolist() == [False, True, False]
            assert result.report.env.tolist() == [1]
            assert result.report.panicked.tolist() == [True]
            torch.testing.assert_close(result.reward[1], -1 - worth(seen)[1], **EXACT)
            assert result.observation.episode_start.tolist() == [False, True, False]
            compute_features(result.observation, broken.spec)
        for env in others.tolist():
            assert same_weights(sound, broken, env)
        assert_same(plain.observation, result.observation, others)
        assert torch.equal(plain.reward[others], result.reward[others])
        assert result.reward.isfinite().all()
    assert all(w.isfinite().all() for w in weights(broken, 1))


def test_actions_of_one_environment_do_not_reach_another():
    quiet, busy = (make(3, task=LONG) for _ in range(2))
    seen = {quiet: quiet.reset(), busy: busy.reset()}
    chance = torch.Generator().manual_seed(3)
    for _ in range(LONG.horizon):
        masks = compute_masks(seen[busy], busy.spec)
        actions, _ = Random().decide(seen[busy], masks, None, chance)
        silent = actions.clone()
        silent[1:] = 0
        plain, result = quiet.step(silent), busy.step(actions)
        assert_same(plain.observation, result.observation, 0)
        assert torch.equal(plain.reward[0], result.reward[0])
        assert same_weights(quiet, busy, 0)
        seen = {quiet: plain.observation, busy: result.observation}


def test_a_seed_costs_what_was_offered_and_is_as_large_as_said():
    world = make()
    offers = world.reset().offers
    chosen = action(Op.GERMINATE, 0, 2, alpha_target=2)
    shown = say(world, chosen).observation
    assert shown.slots.stage[0].tolist() == [int(Stage.HOLDING), 0, 0, 0]
    assert shown.slots.alpha[0, 0] == 1.0
    price = float(offers.parameters[0, 0, 2])
    assert shown.host.added.tolist() == pytest.approx([price, 0.0, 0.0])
    assert world.cohort.units[0].tolist() == [6, 0, 0, 0]
    # As much again means more where there is more, and less would be left out.
    again = shown.offers.parameters[0, 0, 2]
    assert float(again) == pytest.approx(2 * price)


def test_seeds_tend_themselves_by_their_tempo():
    world = make(1, task=replace(LONG, decision_every=4), tick=4)
    world.reset()
    seen = [say(world, action(Op.GERMINATE, 0, 2, tempo=2, alpha_target=2))]
    seen += [say(world) for _ in range(4)]
    slots = [result.observation.slots for result in seen]
    stages = [Stage(int(one.stage[0, 0])).name for one in slots]
    assert stages == ["TRAINING", "BLENDING", "BLENDING", "HOLDING", "HOLDING"]
    assert [float(one.alpha[0, 0]) for one in slots] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert compute_masks(seen[-1].observation, world.spec).slot[0, Op.PRUNE, 0]


def compute_world(envs=2, **more):
    given = {"clock": "compute", "stop": "anytime", "rent": 0.02, "budget": 20.0}
    return make(envs, task=LONG, **given | {"first": 8.0, "horizon": 14} | more)


def test_a_larger_network_takes_fewer_batches_until_the_same_compute():
    world = compute_world()
    world.reset()
    say(world, action(Op.GERMINATE, 0, 3, alpha_target=2))
    for _ in range(12):
        say(world)
    drawn, compute = world._episodes.drawn, world._compute
    macs = world.cohort.macs() / LONG.host.macs
    assert macs[0] > 2
    assert drawn[1] > 2 * drawn[0]
    end = float(world.clock.times()[13])
    assert (compute - end).abs().max() < 3 * float(macs[0])


def test_evaluations_between_stops_are_short_and_charged_exactly():
    large = replace(LONG, data=lambda n: many(n))
    given = {"clock": "compute", "stop": "anytime", "first": 8.0, "horizon": 22}
    world = make(2, task=large, **given)
    world.reset()
    stops, paid = world.clock.weights() > 0, torch.zeros(2, dtype=torch.float64)
    for decision in range(1, 23):
        result = say(world)
        looked, steps = world.looked_rows, world.trained_steps
        rows = SCORED_ROWS if bool(stops[decision]) else LOOKED_ROWS
        assert looked.tolist() == [rows] * 2
        paid += steps + looked.double() / (3 * large.batch)
        torch.testing.assert_close(world.last_compute, paid)
        shown = (result.report or result.observation.host).score
        if not result.terminated.any():
            torch.testing.assert_close(shown, world._score(looked), rtol=0, atol=0)
    assert result.terminated.all()


def many(rng_seed):
    """More validation rows than a host is scored on."""
    parts = blobs(rng_seed)
    held = parts.val
    rows = torch.arange(SCORED_ROWS + 40) % len(held)
    held = replace(held, features=held.features[rows], labels=held.labels[rows])
    return parts._replace(val=held)


def test_an_interval_without_a_batch_leaves_the_loss_as_it_was():
    world = compute_world(first=4.0)
    world.reset()
    say(world)
    grows = action(Op.GERMINATE, 0, 3, alpha_target=2)
    before = say(world).observation.host
    after = say(world, grows).observation.host
    assert world.trained_steps[0] == 0 < world.trained_steps[1]
    assert after.loss[0] == before.loss[0] != 0
    assert after.loss[1] != before.loss[1]


def test_new_units_are_as_large_as_he_s_rule_says_whatever_the_host_s():
    world = make(1)
    world.reset()
    world.cohort.values.mul_(7.0)
    say(world, action(Op.GERMINATE, 0, 3))
    say(world, action(Op.GERMINATE, 1, 3))
    first, second = (layer(world.cohort, 0, place)[0] for place in (0, 1))
    for weight, inputs in ((first, 5), (second, 24)):
        new = weight[6:]
        assert new.shape == (18, inputs, 1)
        assert new.abs().max() <= (6 / inputs) ** 0.5 * 1.2  # and two steps
        assert float(new.std()) == pytest.approx((2 / inputs) ** 0.5, rel=0.3)


def test_hosts_with_common_random_numbers_see_prefixes_of_one_sequence():
    world = compute_world(group_size=2)
    world.reset()
    first = [world._episodes._rows_between(env, 0, 64).tolist() for env in range(2)]
    say(world, action(Op.GERMINATE, 0, 3, alpha_target=2))
    again = [world._episodes._rows_between(env, 0, 64).tolist() for env in range(2)]
    assert first[0] == first[1] == again[0] == again[1]
    rows = world._episodes.rows[0][1].shape[1]
    whole = world._episodes._rows_between(0, 0, 3 * rows)
    for epoch in whole.reshape(3, rows):
        assert sorted(epoch.tolist()) == [*range(rows)]


def test_the_return_is_the_mean_over_the_stops():
    world = compute_world(rent=0.05)
    start, weights = worth(world.reset()), world.clock.weights()
    total, found = torch.zeros(2), torch.zeros(2)
    for time in range(14):
        chosen = action(Op.GERMINATE, 0, 2, alpha_target=2)
        result = say(world, chosen) if time == 2 else say(world)
        total += result.reward
        shown = worth(result.observation)
        if result.report is not None:
            shown = result.report.score - 0.05 * result.report.added
        found += weights[time + 1].float() * shown
    torch.testing.assert_close(total, found - start, **EXACT)
    assert (weights > 0).sum() > 1
    report = result.report
    end = report.test - 0.05 * report.added
    assert not torch.allclose(report.objective, end)


def test_nothing_that_is_seen_depends_on_an_unknown_end():
    near, far = (compute_world(horizon=n) for n in (6, 14))
    runs = [play(world, 5) for world in (near, far)]
    for (one, _, _), (two, _, _) in zip(*runs, strict=True):
        assert_same(one, two)
    assert not one.host.end_known.any()
    known = [compute_world(horizon=n, stop="end") for n in (6, 14)]
    runs = [play(world, 5) for world in known]
    ends = [[*run][-1][0].host.progress for run in runs]
    assert (ends[0] > ends[1]).all()


def test_a_budget_is_for_all_seeds_together_and_can_be_spent_whole():
    named = {"blueprints": ("widen_8", "widen_16")}
    cost = float(make(1, **named).reset().offers.parameters[0, 1, 0])
    for budget, is_enough in ((1.9 * cost, False), (2 * cost, True)):
        world = make(1, budget=budget, **named)
        world.reset()
        shown = say(world, action(Op.GERMINATE, 1, 0)).observation
        mask = compute_masks(shown, world.spec).blueprint[0, 3, 0]
        assert bool(mask) is is_enough
        again = say(world, action(Op.GERMINATE, 3, 0))
        assert again.illegal.item() is not is_enough


def test_a_score_is_the_share_of_decision_rows_that_the_host_gets_right():
    world, chance = make(2), torch.Generator().manual_seed(0)
    world.reset()
    rows, networks = blobs(0).val, [TINY.host.build(chance) for _ in range(2)]
    for env, network in enumerate(networks):
        world.cohort.set_host(env, network)
    shown = world._score(torch.full((2,), len(rows)))
    with torch.no_grad():
        right = [(n(rows.features).argmax(1) == rows.labels).float() for n in networks]
    torch.testing.assert_close(shown, torch.stack(right).mean(1), rtol=0, atol=1e-6)


SETTINGS = [
    ({"rent": (nan, nan)}, r"rent must be a finite number or a range"),
    ({"rent": 1e39}, r"up to 1e\+30; got 1e\+39"),
    ({"rent": (0.0, inf)}, r"got \(0\.0, inf\)"),
    ({"budget": (1, 2, 3)}, r"got \(1, 2, 3\)"),
    ({"rate": "fast"}, "rate must be .* got 'fast'"),
    ({"rent": (0.2, 0.1)}, r"got \(0\.2, 0\.1\)"),
    ({"budget": (-0.5, 1.0)}, r"budget must be a finite number from 0 or"),
    ({"rate": (0.0, 1.0)}, r"rate must be a finite number above 0 or"),
    ({"tick": 1.5}, r"tick must be .* got 1\.5"),
    ({"clock": "sundial"}, "clock must be one of compute, batches, got 'sundial'"),
    ({"stop": "never"}, "stop must be one of end, anytime, got 'never'"),
    (
        {"clock": "compute", "first": 0.5},
        "first must lie in",
    ),
    ({"clock": "compute", "ratio": 1.0}, "ratio must be more than 1"),
    ({"group_size": 0}, "group_size must be a whole number of at least 1"),
    ({"seeds_per_slot": 0}, "seeds_per_slot must be a whole number"),
    ({"horizon": True}, "horizon must be a whole number .* got True"),
    ({"penalty": nan}, "penalty must be a finite number from 0, got nan"),
    ({"penalty": -0.1}, r"got -0\.1"),
    ({"penalty": "dear"}, "got 'dear'"),
    ({"blueprints": ()}, r"tuple of at least one name, got \(\)"),
    ({"blueprints": "widen_8"}, "got 'widen_8'"),
    ({"blueprints": ("widen_8",) * 2}, "blueprints has a name twice"),
    ({"blueprints": ("widen_9",)}, "did you mean 'widen_8'"),
    ({"blueprints": ("attention",)}, "cannot plant 'attention'"),
    ({"slots": 5}, "world.slots is 5, but .* 2 places"),
]
WORLDS = [
    ({"num_envs": 0}, "num_envs must be a whole number of at least 1, got 0"),
    ({"num_envs": True}, "got True"),
    ({"rng_seed": -1}, "rng_seed must be a whole number of at least 0, got -1"),
]
ACTIONS = [
    (torch.zeros(3, NUM_HEADS).long(), r"shape \(2, 8\) .* got .* shape \(3, 8\)"),
    (torch.zeros(2, 3).long(), r"shape \(2, 3\)"),
    (torch.zeros(2, NUM_HEADS), "int64 .* got torch.float32"),
    ([[0] * NUM_HEADS] * 2, "must be .* got list"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        *((lambda given=given: make(**given), words) for given, words in SETTINGS),
        *(
            (lambda g=given: GrowingWorld(TINY, **{"num_envs": 2, **g}), words)
            for given, words in WORLDS
        ),
        *(
            (lambda given=given: check_actions(given, 2), words)
            for given, words in ACTIONS
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(call, words):
    with pytest.raises(InvalidInputError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_terms_may_be_free_and_rent_may_be_paid_back():
    settings = WorldSettings(rent=(-0.1, 0.0), budget=0.0)
    ranges = [settings.range_of(name) for name in ("rent", "budget")]
    assert ranges == [(-0.1, 0.0), (0.0, 0.0)]


def test_a_wait_may_name_anything_in_the_heads_it_does_not_use():
    world = make(2)
    actions = [action(Op.WAIT, slot=-1), action(Op.WAIT, blueprint=99)]
    with pytest.raises(InvalidStateError, match="reset"):
        say(world, *actions)
    world.reset()
    assert not say(world, *actions).illegal.any()
    assert say(world, action(99), action(-1)).illegal.all()


def test_a_panic_never_pays():
    world = make(1, rent=1.0, budget=20.0, task=LONG)
    world.reset()
    assert float(say(world, action(Op.GERMINATE, blueprint=3)).reward) < -1.0
    world.cohort.values[0] = torch.nan
    result = say(world)
    assert bool(result.terminated[0])
    assert float(result.reward[0]) == 0.0


def test_a_host_that_breaks_in_the_last_minibatch_panics():
    world = make(2)
    world.reset()
    train = world.cohort.train

    def breaking(*given, **more):
        trained = train(*given, **more)
        world.cohort.values[0, 0] = torch.inf
        return trained

    world.cohort.train = breaking
    result = say(world)
    assert result.terminated.tolist() == [True, False]
    assert result.report.panicked.tolist() == [True]


def test_environments_of_a_group_share_random_numbers():
    world = make(4, 5, VARIED, group_size=2, rent=(0.01, 0.1))
    world.reset()
    for _ in range(HORIZON + 2):  # into the next episode
        host = say(world).observation.host
        assert torch.equal(host.score[0], host.score[1])
        assert torch.equal(host.rent[0], host.rent[1])
        assert host.rent[0] != host.rent[2]
        assert torch.equal(world.cohort.values[0], world.cohort.values[1])
    assert not torch.equal(world.cohort.values[1], world.cohort.values[2])


def test_rents_are_drawn_evenly_on_a_log_scale():
    host = make(200, rent=(1e-3, 1e-1), budget=(1.0, 3.0)).reset().host
    assert 0.38 < (host.rent < 1e-2).float().mean() < 0.62
    assert host.rent.min() >= 1e-3
    assert host.rent.max() <= 1e-1
    assert 0.38 < (host.budget_left < 2).float().mean() < 0.62


# Saved and loaded.


def play_on(world, observation, chance, steps):
    """Go on from an observation; all tensors that were seen."""
    seen = []
    for _ in range(steps):
        masks = compute_masks(observation, world.spec)
        actions, _ = Random().decide(observation, masks, None, chance)
        result = world.step(actions)
        observation = result.observation
        seen += [actions, result.reward, result.terminated]
        seen += save(observation).values()
        if result.report is not None:
            seen.append(result.report.test)
    return observation, seen


@pytest.mark.parametrize("task", [TINY, VARIED], ids=["shared", "varied"])
@pytest.mark.parametrize("at", [1, 5])
def test_a_world_goes_on_to_the_bit_from_what_was_saved(task, at):
    world, chance = make(4, 3, task), torch.Generator().manual_seed(1)
    observation, _ = play_on(world, world.reset(), chance, at)
    saved, drawn = save(world), chance.get_state()
    _, expected = play_on(world, observation, chance, 9)
    for other in (make(4, 3, task), world):  # a new one, and one with a past
        load(other, saved)
        chance.set_state(drawn)
        _, found = play_on(other, observation, chance, 9)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))


def test_whatever_changes_in_a_world_is_saved_or_derived():
    world, chance = make(4, 3, VARIED), torch.Generator().manual_seed(1)
    observation, _ = play_on(world, world.reset(), chance, 1)  # caches are filled
    before = fixed(world)
    play_on(world, observation, chance, 17)
    assert changed(world, before) == []


def test_relative_rewards_are_shares_of_the_errors_of_the_host_that_never_grows():
    plain = make(4, task=VARIED, group_size=2)
    shares = make(4, task=VARIED, group_size=2, relative=True)
    never = make(2, task=VARIED)
    for world in (plain, shares, never):
        world.reset()
    plants = action(Op.GERMINATE, 0, 2, alpha_target=2)
    for _ in range(2):  # episodes have their own random numbers
        expected, found = [], []
        for step in range(HORIZON):
            rows = [plants] * 4 if step == 0 else []
            waiting = say(never)
            waited = waiting.reward.repeat_interleave(2)
            expected.append(say(plain, *rows).reward - waited)
            found.append(say(shares, *rows).reward)
        unit = (1 - waiting.report.score).clamp(min=0.02).repeat_interleave(2)
        torch.testing.assert_close(
            torch.stack(found), torch.stack(expected) / unit, rtol=1e-4, atol=1e-5
        )


def test_no_reward_is_divided_by_fewer_errors_than_the_least():
    world = make(2, task=VARIED, relative=True)
    world.reset()
    world.unit.fill_(1e-44)  # as memory may be damaged
    assert say(world, action(Op.GERMINATE, 0, 2)).reward.abs().max() < 100


def test_slots_of_a_place_are_filled_in_order():
    world = make(1)
    assert world.reset().offers.fits[0, :, 0].tolist() == [True, True, False, False]
    third = action(Op.GERMINATE, 2, 2, alpha_target=2)
    assert say(world, third).illegal.all()
    planted = say(world, action(Op.GERMINATE, 0, 2, alpha_target=2)).observation
    assert planted.offers.fits[0, :, 0].tolist() == [False, True, True, False]
    assert not say(world, third).illegal.any()
