"""Controllers that do not learn speak only legal sentences."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Generator

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.controller import Controller
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.tamiyo.controls import Early, Never, Periodic, Random, Replay
from esper.tamiyo.heuristic import Plateau, PromiseGreedy
from esper.tamiyo.policy.action_masks import compute_masks
from tests.device_reads import count_device_reads
from tests.rollouts import SPEC, random_observation, require_legal
from tests.strategies import action_specs, observations
from tests.worlds import blank_observation

NARROW = ActionSpec(
    slots=SlotConfig(max_slots=2),
    blueprints=BLUEPRINTS[:4],
    narrowed={"tempo": ("SLOW",), "alpha_curve": ("COSINE", "SIGMOID")},
)


def seen(spec=SPEC, envs=32, rng_seed=0, density=0.7):
    observation = random_observation(
        envs, spec, Generator().manual_seed(rng_seed), density=density
    )
    return observation, compute_masks(observation, spec)


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("spec", [SPEC, NARROW], ids=["whole", "narrowed"])
@pytest.mark.parametrize(
    "make",
    [
        lambda spec: Never(),
        lambda spec: Random(),
        Early,
        Periodic,
        Plateau,
        lambda spec: PromiseGreedy(),
    ],
    ids=["never", "random", "early", "periodic", "plateau", "promise"],
)
def test_every_sentence_is_legal(make, spec, density):
    controller = make(spec)
    assert isinstance(controller, Controller)
    generator, state = Generator().manual_seed(0), None
    for rng_seed in range(4):
        observation, masks = seen(spec, rng_seed=rng_seed, density=density)
        actions, state = controller.decide(observation, masks, state, generator)
        require_legal(observation, spec, actions)


def test_never_waits():
    observation, masks = seen()
    actions, state = Never().decide(observation, masks, None, Generator())
    assert (actions == 0).all()
    assert state is None


def test_random_draws_each_head_evenly_from_what_is_legal_given_the_heads_before():
    """Empty slots, one of which nothing fits: WAIT and GERMINATE, two slots."""
    draws = 4000
    observation = blank_observation(draws, SPEC)
    fits = torch.ones(draws, 3, 7, dtype=torch.bool)
    fits[:, 1] = False
    fits[:, 2, 4:] = False
    offers = replace(observation.offers, fits=fits)
    observation = replace(observation, offers=offers)
    masks = compute_masks(observation, SPEC)
    actions, _ = Random().decide(observation, masks, None, Generator().manual_seed(0))
    plants = actions[actions[:, HEAD["op"]] == Op.GERMINATE]
    in_last = plants[plants[:, HEAD["slot"]] == 2]
    for drawn, choices in (
        (actions[:, HEAD["op"]], [0, 1]),
        (plants[:, HEAD["slot"]], [0, 2]),
        (in_last[:, HEAD["blueprint"]], [0, 1, 2, 3]),
        (plants[:, HEAD["tempo"]], [0, 1, 2]),
    ):
        counts = torch.bincount(drawn)
        assert counts.nonzero().flatten().tolist() == choices
        assert chisquare(counts[choices].numpy()).pvalue > 1e-4


def test_the_same_generator_gives_the_same_sentences():
    observation, masks = seen()
    draws = [
        Random().decide(observation, masks, None, Generator().manual_seed(seed))[0]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def timed(progress, *, first=False, spec=SPEC, stage=Stage.DORMANT, envs=1):
    """Hosts at some point of their horizon, all slots at one stage."""
    blank = blank_observation(envs, spec)
    host = replace(
        blank.host, progress=torch.as_tensor(progress, dtype=torch.float32).expand(envs)
    )
    slots = replace(blank.slots, stage=torch.full_like(blank.slots.stage, stage))
    begins = torch.as_tensor(first).expand(envs)
    return replace(blank, host=host, slots=slots, first=begins)


def ops_over(controller, episode, state=None):
    """The ops of each decision, [decision][env], and what is remembered."""
    said = []
    for observation in episode:
        masks = compute_masks(observation, SPEC)
        actions, state = controller.decide(observation, masks, state, Generator())
        require_legal(observation, SPEC, actions)
        said.append(actions[:, HEAD["op"]].tolist())
    return said, state


def test_early_plants_at_every_decision_until_its_time_is_over():
    episode = [timed(progress) for progress in (0.0, 0.25, 0.49, 0.5, 1.0)]
    said, state = ops_over(Early(SPEC, until=0.5), episode)
    assert said == [[1], [1], [1], [0], [0]]
    assert state is None


def test_seeds_are_more_urgent_than_plantings_and_move_on_after_the_time_of_planting():
    blank = timed([0.0, 0.9, 0.0, 0.9], envs=4)
    stage = torch.tensor([[0, 1, 0], [0, 2, 0], [0, 3, 0], [0, 1, 0]])
    age = torch.tensor([2, 2, 2, 1])[:, None].expand(4, 3)
    observation = replace(blank, slots=replace(blank.slots, stage=stage, age=age))
    said, _ = ops_over(Early(SPEC), [observation])
    assert said == [[Op.ADVANCE, Op.ADVANCE, Op.FOSSILIZE, Op.WAIT]]


@pytest.mark.parametrize("make", [Early, Periodic])
def test_a_schedule_can_be_told_what_to_plant_and_how_long_seeds_train(make):
    controller = make(SPEC, 0.5, blueprint="depthwise", patience=4)
    masks = compute_masks(observation := timed(0.499995), SPEC)
    actions, _ = controller.decide(observation, masks, None, Generator())
    assert SPEC.blueprints[actions[0, HEAD["blueprint"]]].name == "depthwise"
    young = timed(0.9, stage=Stage.TRAINING)
    for age, op in ((3, Op.WAIT), (4, Op.ADVANCE)):
        slots = replace(young.slots, age=torch.full_like(young.slots.age, age))
        assert ops_over(controller, [replace(young, slots=slots)])[0] == [[op]]
    with pytest.raises(BadInput, match="did you mean 'depthwise'"):
        make(SPEC, blueprint="depthwide")


def test_periodic_plants_once_per_period():
    """Fifty decisions, a period of five: from the fifth on, at every fifth."""
    episode = [timed(step / 50, first=step == 0) for step in range(50)]
    said, state = ops_over(Periodic(SPEC, every=0.1), episode)
    planted = [step for step, (op,) in enumerate(said) if op == Op.GERMINATE]
    assert planted == [5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert state.tolist() == [9]


def test_periodic_makes_up_for_what_it_could_not_plant():
    full, empty = Stage.FOSSILIZED, Stage.DORMANT
    stages = [(0.2, full), (0.3, empty), (0.3, empty), (0.3, empty), (0.3, empty)]
    episode = [timed(progress, stage=stage) for progress, stage in stages]
    said, _ = ops_over(Periodic(SPEC, every=0.1), episode)
    assert said == [[0], [1], [1], [1], [0]]


def test_periodic_counts_each_environment_and_each_episode_by_itself():
    progress = torch.tensor([0.1, 0.0])
    episode = [
        timed(progress, envs=2),
        timed(0.1, envs=2),
        timed(0.1, first=torch.tensor([True, False]), envs=2),
    ]
    said, state = ops_over(Periodic(SPEC, every=0.1), episode)
    assert said == [[1, 0], [0, 1], [1, 0]]
    assert state.tolist() == [1, 1]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_time_that_is_no_share_of_the_horizon_is_refused(share):
    with pytest.raises(BadInput, match=r"until must be a share in \[0, 1\], got"):
        Early(SPEC, share)
    with pytest.raises(BadInput, match=r"every must be a share in \(0, 1\], got"):
        Periodic(SPEC, share)


def test_a_period_of_no_length_is_refused():
    with pytest.raises(BadInput, match=r"every must be .* got 0"):
        Periodic(SPEC, 0.0)


PLANT, KEEP = [1, 2, 3, 1, 2, 0, 0, 0], [5, 1, 0, 0, 0, 0, 0, 0]


def replayed(controller, episode, state=None):
    said = []
    for observation in episode:
        masks = compute_masks(observation, SPEC)
        actions, state = controller.decide(observation, masks, state, Generator())
        require_legal(observation, SPEC, actions)
        said.append(actions.tolist())
    return said


def test_replay_repeats_a_recording_then_waits_and_restarts_with_the_episode():
    controller = Replay(torch.tensor([PLANT, KEEP]))
    holding = timed(0.5, stage=Stage.HOLDING)
    again = timed(0.0, first=True)
    said = replayed(controller, [timed(0.0), holding, timed(0.0), again, holding])
    wait = [0] * 8
    assert said == [[PLANT], [KEEP], [wait], [PLANT], [KEEP]]


def test_replay_gives_each_environment_its_own_recording():
    other = [1, 0, 6, 0, 0, 0, 0, 0]
    recording = torch.tensor([[PLANT, other], [other, PLANT]])
    said = replayed(Replay(recording), [timed(0.0, envs=2)] * 2)
    assert said == [[PLANT, other], [other, PLANT]]
    with pytest.raises(BadInput, match="recording is of 2 environments, got 3"):
        replayed(Replay(recording), [timed(0.0, envs=3)])


@pytest.mark.parametrize(
    "sentence",
    [
        KEEP,
        [1, 3, 0, 0, 0, 0, 0, 0],
        [1, -1, 0, 0, 0, 0, 0, 0],
        [1, 0, 7, 0, 0, 0, 0, 0],
        [1, 0, 0, 2, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, -1, 0, 0],
        [6, 0, 0, 0, 0, 0, 0, 0],
        [-1, 0, 0, 0, 0, 0, 0, 0],
    ],
)
def test_a_sentence_that_is_not_legal_becomes_wait(sentence):
    assert replayed(Replay(torch.tensor([sentence])), [timed(0.0)]) == [[[0] * 8]]


def test_what_an_op_does_not_use_is_dropped_from_a_recording():
    recording = torch.tensor([[1, 2, 3, 1, 2, 0, 99, -5]])
    assert replayed(Replay(recording), [timed(0.0)]) == [[PLANT]]


def test_replaying_what_was_said_to_the_same_hosts_says_the_same():
    episode = [seen(rng_seed=rng_seed) for rng_seed in range(6)]
    said, generator = [], Generator().manual_seed(0)
    for observation, masks in episode:
        said.append(Random().decide(observation, masks, None, generator)[0])
    controller, state = Replay(torch.stack(said)), None
    for (observation, masks), recorded in zip(episode, said, strict=True):
        actions, state = controller.decide(observation, masks, state, generator)
        assert torch.equal(actions, recorded)


@settings(max_examples=30)
@given(st.data())
def test_any_recording_is_replayed_legally(data):
    spec = data.draw(action_specs())
    observation = data.draw(observations(spec))
    masks = compute_masks(observation, spec)
    rng_seed = data.draw(st.integers(0, 99))
    shape = (data.draw(st.integers(0, 9)), len(masks.op), 8)
    recording = torch.randint(-1, 6, shape, generator=Generator().manual_seed(rng_seed))
    controller, state = Replay(recording), None
    for _ in range(10):
        actions, state = controller.decide(observation, masks, state, Generator())
        require_legal(observation, spec, actions)


@pytest.mark.parametrize(
    "recording",
    [torch.zeros(3, 8), torch.zeros(3, 7).long(), torch.zeros(8).long()],
)
def test_a_recording_of_another_shape_or_type_is_refused(recording):
    with pytest.raises(BadInput, match=r"actions must be int64 \[time, 8\] or"):
        Replay(recording)


@pytest.mark.parametrize("controller", [Periodic(SPEC), Replay(torch.tensor([PLANT]))])
def test_nothing_is_read_from_the_device(controller):
    observation, masks = seen()
    state = torch.zeros(32, dtype=torch.int64)

    def decide():
        controller.decide(observation, masks, state, Generator())

    assert count_device_reads(decide) == 0
