"""What a growing world shows of its hosts is what the same networks show alone."""

import copy
from dataclasses import replace
from math import cos, pi

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from esper.contracts.actions import HEAD, NUM_HEADS, Op
from esper.contracts.stages import Stage
from esper.environment.growing import CONTRIBUTION_ROWS, GrowingWorld
from esper.environment.settings import WorldSettings
from esper.growth.blueprints.geometry import Geometry, Layout
from esper.growth.hooks import Sample
from esper.growth.promise import promises
from esper.tasks.data import Data, split
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task
from tests.references.cohort import PlainHost

WIDTHS = (5, 7, 6, 3)
PLACES, PER_PLACE, ENVS = 2, 2, 3
EVERY, HORIZON = 2, 6
NAMES = ("low_rank_4", "widen_8", "residual_mlp")
LOW_RANK, WIDEN, RESIDUAL = range(3)
NEAR = {"rtol": 1e-3, "atol": 1e-5}
"""A world counts in float32, its twins in float64."""


def clouds(rng_seed):
    """Noisy points around a few centres; more decision rows than are ever tried."""
    chance = torch.Generator().manual_seed(rng_seed)
    labels = torch.arange(800) % WIDTHS[-1]
    centres = torch.randn(WIDTHS[-1], WIDTHS[0], generator=chance)
    noise = 1.5 * torch.randn(800, WIDTHS[0], generator=chance)
    data = Data("clouds", centres[labels] + noise, labels, WIDTHS[-1])
    return split(data, rng_seed, (0.25, 0.5, 0.25))


TASK = Task(
    name="clouds",
    description="noisy points around a few centres",
    data=clouds,
    host=MlpHost(WIDTHS),
    batch=64,
    decision_every=EVERY,
    horizon=HORIZON,
    learning_rate=2e-2,
    weight_decay=0.2,
)
TERMS = {"rent": (0.01, 0.1), "budget": (20.0, 30.0), "rate": (0.5, 2.0)}
STILL = {"budget": 20.0, "rate": 1e-9}
"""Terms on which nobody learns anything."""


def make(envs=ENVS, rng_seed=0, *, task=TASK, terms=TERMS):
    return GrowingWorld(
        task,
        envs,
        rng_seed,
        settings=WorldSettings(
            blueprints=NAMES,
            seeds_per_slot=PER_PLACE,
            measure_every=1,
            penalty=0.0,
            **terms,
        ),
    )


def say(world, sentences=None):
    """One sentence (op, slot, blueprint) in some environments, WAIT in the others."""
    actions = torch.zeros(world.num_envs, NUM_HEADS, dtype=torch.int64)
    for env, (op, *rest) in (sentences or {}).items():
        actions[env, 0] = int(op)
        actions[env, 1 : 1 + len(rest)] = torch.tensor(rest, dtype=torch.int64)
    actions[:, HEAD["tempo"]] = 3 * (actions[:, 0] == Op.GERMINATE)  # SLOW
    result = world.step(actions)
    assert not result.illegal.any()
    return result


def network(world, env):
    """The host of an environment as a network of its own."""
    built = TASK.host.build(torch.Generator()).double()
    held = world.cohort.values[env, : world.cohort.layout.host_parameters]
    vector_to_parameters(held.double(), built.parameters())
    return built


def seed_parts(world, env, slot):
    """Views of a seed's weights by name: first [unit, in], last [unit, out]."""
    layout, units = world.cohort.layout, int(world.cohort.size[env, slot])
    inputs, outputs = WIDTHS[slot % PLACES], WIDTHS[slot % PLACES + 2]
    shapes = {
        "first": (units, inputs),
        "first_bias": (units,),
        "last": (units, outputs),
        "last_bias": (outputs,),
    }
    found, parts = {}, (layout.firsts[slot], layout.lasts[slot])
    begins = [int(part[what]) for part in parts for what in ("weight", "bias")]
    for begin, (name, shape) in zip(begins, shapes.items(), strict=True):
        length = torch.Size(shape).numel()
        found[name] = world.cohort.values[env, begin : begin + length].view(shape)
    return found


def twin(world, env, slots):
    """A host with the weights, stages and alphas of its seeds."""
    host = PlainHost(network(world, env), rate=1.0, decay=0.0)
    for slot, (blueprint, stage, alpha) in slots.items():
        parts = {k: v.double() for k, v in seed_parts(world, env, slot).items()}
        parts["first"] = parts["first"].T
        host.plant(slot, world.spec.blueprints[blueprint], parts)
        with torch.no_grad():
            last = host.seeds[str(slot)].last
            last.weight.copy_(parts["last"].T)
            if last.bias is not None:
                last.bias.copy_(parts["last_bias"])
        host.live(slot, stage, alpha)
    return host


def pace(step):
    """A rise from a fiftieth over the first tenth, a fall along a cosine after it."""
    share = step / (EVERY * HORIZON)
    if share < 0.1:
        return 0.02 + 0.98 * share / 0.1
    return 0.02 + 0.98 * (1 + cos(pi * (share - 0.1) / 0.9)) / 2


def passed(host, x, y):
    """Loss, and what every place was given, said and was asked for."""
    given, said, h = [], [], x
    for layer, between in zip(host.layers, host.between, strict=True):
        given.append(h)
        said.append(layer(h))
        h = between(said[-1])
    loss = F.cross_entropy(said[-1], y)
    back = torch.autograd.grad(loss, said[1:])
    places = zip(given[:-1], said[1:], back, strict=True)
    return loss.detach(), [tuple(part.detach() for part in p) for p in places]


def silence(world, env, channels):
    """Let some channels of the second layer answer nothing, for good."""
    layer, values = world.cohort.layout.layers[1], world.cohort.values[env]
    weight, bias = int(layer["weight"]), int(layer["bias"])
    values[weight : weight + channels * WIDTHS[1]] = 0.0
    values[bias : bias + channels] = -1.0


@pytest.fixture(scope="module")
def watched():
    """Decisions of a world that waits: what it shows, and twins just before and after.

    Channels between the second and the third layer are dead, as many as the number of
    the environment.
    """
    world = make()
    world.reset()
    for env in range(ENVS):
        silence(world, env, channels=env)
    decay = TASK.weight_decay
    hosts = [
        PlainHost(network(world, env), rate=1.0, decay=decay) for env in range(ENVS)
    ]
    rows, factors = clouds(0).train, world._episodes.rate.tolist()
    seen = []
    for decision in range(4):
        picked, _ = world._episodes.minibatches(torch.full((ENVS,), decision))
        shown = say(world).observation
        places, losses, weights = [], [], []
        for env, host in enumerate(hosts):
            total = 0.0
            for number in range(EVERY):
                step = EVERY * decision + number
                chosen = picked[env, number]
                x, y = rows.features[chosen].double(), rows.labels[chosen]
                loss, last = passed(host, x, y)
                total += float(loss) / EVERY
                rate = TASK.learning_rate * factors[env] * pace(step)
                host.optimizer.param_groups[0]["lr"] = rate
                host.train_step(x, y)
            places.append(last)
            losses.append(total)
            weights.append(parameters_to_vector(host.layers.parameters()).detach())
        held = world.cohort.values[:, : world.cohort.layout.host_parameters].double()
        seen.append((shown, places, losses, held, torch.stack(weights)))
    return seen


def test_hosts_train_by_the_rows_rates_and_decay_of_their_task(watched):
    for *_, held, expected in watched:
        torch.testing.assert_close(held, expected, rtol=1e-3, atol=1e-4)


def rms(values):
    return float(values.square().mean().sqrt())


def test_a_gradient_share_is_that_of_the_loss_that_hangs_on_the_place(watched):
    for shown, places, *_ in watched:
        flows = torch.tensor([[rms(z) * rms(g) for _, z, g in own] for own in places])
        expected = flows / flows.sum(dim=1, keepdim=True)
        assert ((expected[:, 0] - expected[:, 1]).abs() > 0.01).all()
        torch.testing.assert_close(
            shown.slots.gradient_share, expected.repeat(1, PER_PLACE), **NEAR
        )


def test_liveness_is_the_share_of_channels_that_respond(watched):
    for shown, places, *_ in watched:
        expected = torch.zeros(ENVS, PLACES)
        for env, own in enumerate(places):
            for place, (_, answer, _) in enumerate(own):
                spread = answer.std(dim=0)
                expected[env, place] = (spread > 0.01 * spread.max()).float().mean()
        assert expected[:, 0].tolist() == pytest.approx([1, 5 / 6, 4 / 6])
        torch.testing.assert_close(
            shown.slots.liveness, expected.repeat(1, PER_PLACE), **NEAR
        )


def span(place):
    """Two linear layers, one after the other."""
    return Geometry(
        inlet_layout=Layout.VECTOR,
        outlet_layout=Layout.VECTOR,
        inlet_shape=(WIDTHS[place],),
        outlet_shape=(WIDTHS[place + 2],),
        residual=False,
        spans=True,
        hidden_shape=(WIDTHS[place + 1],),
    )


def test_every_slot_promises_what_its_own_place_promises(watched):
    kinds = make().spec.blueprints
    for shown, places, losses, *_ in watched:
        expected = torch.tensor(
            [
                [
                    promises([Sample(h, z, len(h), g)], span(place), kinds, losses[env])
                    for place, (h, z, g) in enumerate(places[env])
                ]
                for env in range(ENVS)
            ]
        )
        assert (expected[:, 0] - expected[:, 1]).abs().max() > 0.02
        assert shown.offers.promise_known.all()
        torch.testing.assert_close(
            shown.offers.promise, expected.repeat(1, PER_PLACE, 1), rtol=1e-3, atol=1e-4
        )


def test_slots_know_how_deep_and_how_wide_their_place_is():
    slots = make(2).reset().slots
    assert slots.depth.tolist() == [[0.5, 1.0, 0.5, 1.0]] * 2
    assert slots.capacity.tolist() == [[1.0, 0.5, 1.0, 0.5]] * 2


def loud(world, env, slot, size):
    """Let a seed say something."""
    parts = seed_parts(world, env, slot)
    chance = torch.Generator().manual_seed(10 * env + slot)
    parts["last"].copy_(size * torch.randn(parts["last"].shape, generator=chance))


def test_a_contribution_is_score_lost_without_a_seed_or_won_with_one_in_training():
    world = make()
    world.reset()
    for _ in range(2):
        say(world)
    plant = Op.GERMINATE
    say(world, {0: (plant, 0, WIDEN), 1: (plant, 3, RESIDUAL), 2: (plant, 2, LOW_RANK)})
    say(world, {0: (plant, 3, LOW_RANK), 1: (Op.ADVANCE, 3), 2: (Op.ADVANCE, 2)})
    planted = {
        0: {0: (WIDEN, 2.0), 3: (LOW_RANK, 2.0)},
        1: {3: (RESIDUAL, 2.0)},
        2: {2: (LOW_RANK, 3.0)},
    }
    for env, slots in planted.items():
        for slot, (_, size) in slots.items():
            loud(world, env, slot, size)
    shown = say(world).observation.slots
    stages, alphas = shown.stage.tolist(), shown.alpha.tolist()
    assert [stages[0][0], stages[0][3], stages[1][3], stages[2][2]] == [
        Stage.TRAINING,
        Stage.TRAINING,
        Stage.BLENDING,
        Stage.BLENDING,
    ]
    rows = clouds(0).decisions
    assert len(rows) > CONTRIBUTION_ROWS
    x, y = rows.features[:CONTRIBUTION_ROWS].double(), rows.labels[:CONTRIBUTION_ROWS]

    def felt(env, slot):
        return 0.0 if stages[env][slot] == Stage.TRAINING else alphas[env][slot]

    def score(env, turned):
        slots = {
            slot: (kind, Stage.HOLDING, turned.get(slot, felt(env, slot)))
            for slot, (kind, _) in planted[env].items()
        }
        host = twin(world, env, slots)
        return (host(x).argmax(dim=1) == y).double().mean().item()

    measured = torch.zeros(ENVS, PLACES * PER_PLACE, dtype=torch.bool)
    for env, slots in planted.items():
        for slot in slots:
            measured[env, slot] = True
            if stages[env][slot] == Stage.TRAINING:
                expected = score(env, {slot: 1.0}) - score(env, {})
            else:
                expected = score(env, {}) - score(env, {slot: 0.0})
            assert abs(expected) > 0.02
            assert float(shown.contribution[env, slot]) == pytest.approx(
                expected, abs=1e-6
            )
    assert torch.equal(shown.contribution_measured, measured)
    assert not shown.contribution[~measured].any()


def test_a_new_episode_knows_nothing_of_what_was_seen_before():
    world = make()
    world.reset()
    for env in range(ENVS):
        silence(world, env, channels=2)
    say(world, {env: (Op.GERMINATE, 1, WIDEN) for env in range(ENVS)})
    shown = say(world).observation
    assert shown.offers.promise_known.all()
    assert shown.slots.contribution_measured[:, 1].all()
    assert (shown.slots.gradient_share < 1).all()
    assert (shown.slots.liveness[:, 0] < 1).all()

    world.cohort.values[1, 0] = torch.nan
    shown = say(world).observation
    assert shown.first.tolist() == [False, True, False]
    assert_nothing_known(shown, 1)
    for env in (0, 2):
        assert shown.offers.promise_known[env].all()
        assert shown.slots.contribution_measured[env, 1]

    shown = world.reset()
    for decision in range(HORIZON):
        assert bool(shown.offers.promise_known.all()) is (decision > 0)
        if decision == 0:
            assert_nothing_known(shown, slice(None))
        shown = say(world).observation
    assert shown.first.all()
    assert_nothing_known(shown, slice(None))


def assert_nothing_known(shown, envs):
    assert not shown.offers.promise_known[envs].any()
    assert not shown.slots.contribution_measured[envs].any()
    assert (shown.slots.gradient_share[envs] == 1).all()
    assert (shown.slots.liveness[envs] == 1).all()


def test_a_seed_whose_own_loss_is_not_finite_ends_its_episode():
    """All weights and all that the host itself says stay finite."""
    world = make()
    world.reset()
    slot = PLACES - 1
    say(world, {env: (Op.GERMINATE, slot, RESIDUAL) for env in range(ENVS)})
    bias = seed_parts(world, 1, slot)["last_bias"]
    bias.copy_(torch.tensor([1.8e38, -1.8e38, 0.0]))
    cohort, (x, y) = copy.deepcopy(world.cohort), world._episodes.rows[0]
    picked, rates = world._episodes.minibatches(torch.ones(ENVS, dtype=torch.int64))
    trained = cohort.train(x, y, picked, world._lives, rates)
    assert trained.shadow_losses.isfinite().tolist() == [True, False, True]
    assert trained.losses.isfinite().all()
    assert cohort.values.sum(dim=1).isfinite().all()
    result = say(world)
    assert result.terminated.tolist() == [False, True, False]
    assert result.report.panicked.tolist() == [True]


@pytest.mark.parametrize("place", range(PLACES))
def test_new_hidden_units_are_as_large_as_the_hosts_own(place):
    world = make(terms=STILL)
    world.reset()
    layer = world.cohort.layout.layers[place]
    begin, count = int(layer["weight"]), WIDTHS[place] * WIDTHS[place + 1]
    for env in range(ENVS):
        world.cohort.values[env, begin : begin + count] *= 3.0 + env
    own = [network(world, env)[2 * place].weight for env in range(ENVS)]
    deviations = torch.stack([w.detach().std(correction=0) for w in own])
    slot = place + PLACES
    say(world, {env: (Op.GERMINATE, slot, WIDEN) for env in range(ENVS)})
    firsts = [seed_parts(world, env, slot)["first"] for env in range(ENVS)]
    found = torch.stack([first.double().std(correction=0) for first in firsts])
    torch.testing.assert_close(found, deviations, rtol=1e-4, atol=0.0)


def test_what_ended_reports_the_parameters_and_the_multiply_adds_of_its_network():
    world = make()
    world.reset()
    plant = Op.GERMINATE
    say(world, {0: (plant, 0, WIDEN), 1: (plant, 1, RESIDUAL)})
    say(world, {0: (plant, 1, LOW_RANK)})
    for _ in range(HORIZON - 2):
        report = say(world).report
    weights = 5 * 7 + 7 * 6 + 6 * 3
    widened, low_rank, residual = 5 * 8 + 8 * 6, 7 * 4 + 4 * 3, 7 * 16 + 16 * 3
    added = torch.tensor([widened + 8.0 + low_rank, residual + 16.0 + 3.0, 0.0])
    macs = weights + torch.tensor([widened + low_rank, residual, 0.0])
    assert report.env.tolist() == [0, 1, 2]
    torch.testing.assert_close(report.added, added / (weights + 16.0))
    torch.testing.assert_close(report.macs, macs / weights)


def minibatches(world):
    """Rows and rates of a whole episode, `[env, step, row]` and `[env, step]`."""
    parts = [
        world._episodes.minibatches(torch.full((world.num_envs,), decision))
        for decision in range(HORIZON)
    ]
    return [torch.cat(part, dim=1) for part in zip(*parts, strict=True)]


def test_learning_rates_rise_for_a_tenth_of_an_episode_and_fall_after_it():
    world = make()
    world.reset()
    _, rates = minibatches(world)
    paces = torch.tensor([pace(step) for step in range(EVERY * HORIZON)])
    own = world._episodes.rate
    assert len(set(own.tolist())) == ENVS
    expected = TASK.learning_rate * own[:, None] * paces
    assert expected[:, 2].gt(10 * expected[:, 0]).all()
    assert expected[:, 2].gt(5 * expected[:, -1]).all()
    torch.testing.assert_close(rates, expected, rtol=1e-5, atol=0.0)


def test_every_pass_takes_all_rows_once_in_an_order_of_its_own():
    world = make()
    world.reset()
    picked, _ = minibatches(world)
    count = len(clouds(0).train)
    orders = []
    for env in range(ENVS):
        drawn = picked[env].flatten()
        passes = [*drawn[: len(drawn) // count * count].split(count)]
        assert len(passes) > 2
        for order in passes:
            assert torch.equal(order.sort().values, torch.arange(count))
        orders += passes
    assert len({tuple(order.tolist()) for order in orders}) == len(orders)


def drawn(world, env):
    """All that chance gave the running episode of an environment."""
    episodes = world._episodes
    rows = [part[env].clone() for pair in episodes.rows for part in pair]
    terms = [
        part[env].clone() for part in (episodes.rent, episodes.budget, episodes.rate)
    ]
    picked, rates = minibatches(world)
    host = parameters_to_vector(network(world, env).parameters()).detach()
    return [*rows, *terms, picked[env], rates[env], host]


def episodes(world, sentences, breaks):
    """What two episodes of every environment were given, `[env][episode]`.

    Args:
        world: Of its first reset.
        sentences: What is said at each decision.
        breaks: Whether one host breaks in its first episode.
    """
    first, found = world.reset().first, [[] for _ in range(ENVS)]
    for decision in range(HORIZON + 1):
        for env in range(ENVS):
            if bool(first[env]):
                found[env].append(drawn(world, env))
        if breaks and decision == 2:
            world.cohort.values[1, 0] = torch.nan
        said = sentences[decision] if decision < len(sentences) else {}
        first = say(world, said).observation.first
    return found


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "cut short"])
def test_what_chance_gives_an_episode_does_not_depend_on_what_is_said(breaks):
    task, plant = replace(TASK, varied=True), Op.GERMINATE
    quiet, busy, other = (make(rng_seed=n, task=task) for n in (3, 3, 4))
    spoken = [
        {0: (plant, 0, WIDEN), 1: (plant, 1, RESIDUAL)},
        {0: (plant, 3, RESIDUAL), 2: (plant, 2, WIDEN)},
        {0: (Op.ADVANCE, 0), 2: (Op.PRUNE, 2)},
    ]
    plain, grown = episodes(quiet, [], False), episodes(busy, spoken, breaks)
    apart = episodes(other, [], False)
    for env in range(ENVS):
        assert len(plain[env]) == len(grown[env]) == 2
        for one, same, foreign in zip(plain[env], grown[env], apart[env], strict=True):
            assert all(map(torch.equal, one, same))
            assert not any(map(torch.equal, one[:3], foreign[:3]))
        first, second = plain[env]
        assert not any(map(torch.equal, first[:3], second[:3]))
        assert not any(map(torch.equal, first[6:], second[6:]))
