"""`esper.PPO` through its public door."""

import inspect
import json
import math
import subprocess
import sys
import tracemalloc
from contextlib import closing
from copy import deepcopy
from dataclasses import fields, replace
from itertools import product

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from esper import PPO
from esper.contracts.errors import (
    EsperWarning,
    InvalidInputError,
    InvalidStateError,
    NoLegalActionError,
    NotFiniteError,
    RunLockedError,
)
from esper.contracts.state import save
from esper.files import pack, read_safetensors
from esper.rl.doctor import examine
from esper.rl.nested import space_data, space_of
from esper.rl.settings import PPOSettings
from esper.runs.database import open_store
from esper.runs.run import Run
from tests.rl.environments import (
    SIZES,
    STARTS,
    Chance,
    Native,
    Seen,
    Tabled,
    legal,
    vector,
)

MODES = tuple(AutoresetMode)
ONCE = {"epochs": 1, "minibatches": 1}
SMALL = {"width": 8, "rollout_steps": 12}
USED = ((True, False, True), (True, True, False), (True, True, True))
"""Heads of `Chance` that each choice of the first one uses."""


class chance:  # noqa: N801
    """Makes `Chance` with one source of masks; can be sent to a process."""

    def __init__(self, masks="info"):
        self.masks = masks

    def __call__(self):
        return Chance(self.masks)


def weights(agent):
    return {name: x.clone() for name, x in save(agent).items()}


def learnt(agent, steps):
    """Records of learning with choices that depend strongly on what is seen."""
    with torch.no_grad():
        agent.policy.head_out.weight.mul_(100)
    records = []
    agent.learn(steps, callback=records.append)
    return records


def assert_same_agents(one, other):
    mine, its = weights(one), weights(other)
    assert mine.keys() == its.keys()
    mine, its = ({n: t.numpy().tobytes() for n, t in x.items()} for x in (mine, its))
    assert [name for name in mine if mine[name] != its[name]] == []


@pytest.mark.parametrize("memory", ["mingru", "gru", "lstm", "none"])
@pytest.mark.parametrize("masks", ["info", "method", "observation", "none"])
def test_the_first_minibatch_sees_the_policy_that_acted(memory, masks):
    """KL and ratios are zero before the first step, in every autoreset mode."""
    for mode in MODES:
        agent = PPO(vector(chance(masks), 3, mode), memory=memory, **ONCE, **SMALL)
        records = learnt(agent, 3 * 36)
        assert len(records) == 3
        for record in records:
            assert abs(record.update.kl) < 1e-6
            assert record.update.clip_fraction == 0
            assert record.update.steps_taken == 1
        openness = [head.openness for head in record.update.heads.values()]
        assert (min(openness) == 1) == (masks == "none")


@pytest.mark.parametrize("options", [{"separate_value": True}, {"layers": 2}])
def test_the_same_with_other_networks_and_with_a_causal_table(options):
    table = [[True, True, False], [True, False, True], [True, False, False]]
    env = chance()
    agent = PPO(env, memory="gru", head_relevance=table, **ONCE, **SMALL, **options)
    for record in learnt(agent, 3 * 96):
        assert abs(record.update.kl) < 1e-6
        shares = [head.openness for head in record.update.heads.values()]
        assert 0 < shares[1] < 0.6  # only one op in three uses it
        assert 0 < shares[2] < 0.7


@pytest.mark.parametrize("autoregressive", [False, True])
@pytest.mark.parametrize("env", [lambda: Tabled("none"), chance("method")])
def test_masks_that_depend_on_the_first_choice_and_heads_that_see_earlier_ones(
    env, autoregressive
):
    agent = PPO(env, memory="gru", autoregressive=autoregressive, **ONCE, **SMALL)
    for record in learnt(agent, 3 * 192):
        assert abs(record.update.kl) < 1e-6
        assert record.update.clip_fraction == 0
        assert all(0 < head.openness < 1 for head in record.update.heads.values())
    assert agent.evaluate(3, deterministic=False).lengths.min() >= 1


def test_an_autoregressive_head_sees_what_was_chosen_before_it():
    for chained in (False, True):
        agent = PPO(chance("none"), autoregressive=chained, num_envs=2, **SMALL)
        with torch.no_grad():
            agent.policy.head_out.weight.mul_(100)
        seen = {"vector": torch.ones(1, 2, 4)}
        actions = torch.tensor([[[0, 0, 0], [1, 1, 0]]])
        first, state = torch.zeros(1, 2, dtype=torch.bool), torch.zeros(1, 1, 1)
        logits, _ = agent.policy.evaluate_actions(seen, actions, first, state)
        changed = (logits[0, 0] - logits[0, 1]).abs().amax(dim=1) > 1e-3
        assert changed.tolist() == [False, chained, chained]


def test_a_table_that_leaves_nothing_names_the_choice():
    spec = PPO(chance("none"), num_envs=1, **SMALL).spec
    table = np.ones((1, 3, 10), bool)
    table[0, 1, 5:] = False
    with pytest.raises(
        NoLegalActionError, match=r"'action.2' with choice 1 of 'action.0'"
    ):
        spec.head_masks(table, 1)
    table[0, 1, 1] = False  # then the first head cannot choose it
    assert spec.head_masks(table, 1).shape == (1, 3, 3, 5)


def rollout(agent):
    """What a rollout stored, by environment, without padding."""
    agent.collect()
    buffer = agent.agent.buffer
    counts = buffer.step_counts.tolist()
    names = ("rewards", "values", "dones", "truncated", "final_values")
    rows = [
        [getattr(buffer, n)[env, :c] for n in names] for env, c in enumerate(counts)
    ]
    buffer.compute_advantages_and_returns()
    first = buffer.get_batched_sequences().episode_start
    return [
        (*row, first[env, :c])
        for env, (row, c) in enumerate(zip(rows, counts, strict=True))
    ]


@pytest.mark.parametrize("memory", ["mingru", "none"])
def test_t19_t20_all_autoreset_modes_store_the_same_transitions(memory):
    """Chance ignores actions, so only observations and memory decide the values."""
    found = []
    for mode in MODES:
        env = vector(chance(), 3, mode)
        agent = PPO(
            env, memory=memory, normalize=False, width=8, rollout_steps=40, seed=4
        )
        with torch.no_grad():
            agent.policy.value_out.weight.normal_(generator=torch.manual_seed(0))
        found.append(rollout(agent))
    for rows in zip(*found, strict=True):
        length = min(len(row[0]) for row in rows)
        assert length > 25
        for name, parts in zip("rvdtFf", zip(*rows, strict=True), strict=True):
            cut = [part[:length] for part in parts]
            if name == "F":  # V of the final observation counts where truncated
                cut = [
                    torch.where(row[3][:length], x, 0)
                    for row, x in zip(rows, cut, strict=True)
                ]
                assert (cut[0] != 0).any()
            for other in cut[1:]:
                torch.testing.assert_close(cut[0], other, rtol=0, atol=1e-6)


def test_rollouts_of_episodes_of_one_step_are_learnt_in_every_mode():
    class Short(Seen):
        def step(self, action):
            return *super().step(action)[:2], True, False, {}

    for mode in MODES:
        agent = PPO(vector(Short, 2, mode), width=8, rollout_steps=4)
        (record,) = learnt(agent, 8)
        assert agent.env_steps == (4 if mode is AutoresetMode.NEXT_STEP else 8)
        assert record.update.steps_taken > 0
    with pytest.raises(InvalidInputError, match="rollout_steps must be at least 2"):
        PPO(vector(Short, 2, AutoresetMode.NEXT_STEP), rollout_steps=1)


@pytest.mark.parametrize("mode", MODES)
def test_t20_a_truncated_episode_is_valued_with_the_memory_of_its_last_step(mode):
    """V of the final observation is what replaying the whole episode gives."""
    episodes = []

    class Recorded(Chance):
        def reset(self, *, seed=None, options=None):
            episodes.append([])
            return super().reset(seed=seed)

        def _show(self):
            observation, info = super()._show()
            episodes[-1].append(observation.copy())
            return observation, info

    env = vector(lambda: Recorded("none"), 1, mode)
    agent = PPO(
        env, memory="mingru", normalize=False, width=8, rollout_steps=60, seed=1
    )
    with torch.no_grad():
        agent.policy.value_out.weight.normal_(generator=torch.manual_seed(0))
    ((_, _, dones, truncated, final_values, _),) = rollout(agent)
    ends = dones.nonzero().squeeze(1).tolist()
    checked = 0
    for end, episode in zip(ends, episodes, strict=False):
        if not truncated[end]:
            continue
        seen = {"vector": torch.from_numpy(np.stack(episode))[None]}
        first = torch.arange(len(episode))[None] == 0
        state = agent.policy.initial_state(1)
        _, values = agent.policy.evaluate_actions(seen, None, first, state)
        assert final_values[end].item() == pytest.approx(values[0, -1].item(), abs=1e-5)
        checked += 1
    assert checked > 2


@pytest.mark.parametrize("masks", ["info", "observation"])
def test_sync_async_and_native_vectors_are_the_same_to_the_bit(masks):
    ours = {"memory": "mingru", "seed": 3, "width": 8, "rollout_steps": 10}
    agents = [
        PPO(chance(masks), num_envs=2, **ours),
        PPO(chance(masks), num_envs=2, vectorization="async", **ours),
        PPO(Native(chance(masks), 2), **ours),
    ]
    for agent in agents:
        agent.learn(60)
    agents[1].close()
    assert_same_agents(agents[0], agents[1])
    assert_same_agents(agents[0], agents[2])


@pytest.mark.parametrize("masks", ["method", "none"])
def test_processes_are_asked_for_masks_only_if_they_have_some(masks):
    ours = {"num_envs": 2, "seed": 3, "width": 8, "rollout_steps": 10}
    here, there = (
        PPO(chance(masks), vectorization=kind, **ours) for kind in ("sync", "async")
    )
    assert_same_agents(here.learn(40), there.learn(40))
    there.close()


def test_the_seed_decides_everything_and_another_gives_another_agent():
    one, two, three = (
        PPO(chance(), num_envs=2, seed=seed, **SMALL).learn(48) for seed in (0, 0, 1)
    )
    assert_same_agents(one, two)
    assert not torch.equal(one.policy.head_out.weight, three.policy.head_out.weight)


@pytest.mark.parametrize("memory", ["lstm", "none"])
def test_a_saved_agent_is_the_same_and_learns_on_the_same(memory, tmp_path):
    file = tmp_path / "deep" / "agent.safetensors"
    agent = PPO(
        chance(),
        memory=memory,
        num_envs=2,
        minibatches=2,
        target_kl=math.inf,
        head_entropy={"action.1": 0.1},
        **SMALL,
    ).learn(48)
    agent.save(file)
    twins = [PPO.load(file, env=chance()) for _ in range(2)]
    for twin in twins:
        assert_same_agents(agent, twin)
        assert twin.settings == agent.settings
        twin.learn(48)
    assert_same_agents(*twins)
    assert twins[0].env_steps == 96

    without = PPO.load(file)
    state = other = None
    for seed in range(4):
        seen = np.random.default_rng(seed).standard_normal(4).astype(np.float32)
        mask = legal(seen)
        action, state = agent.predict(seen, state, action_masks=mask)
        again, other = without.predict(seen, other, action_masks=mask)
        assert action.shape == (3,)
        assert mask[action + np.array(STARTS)].all()
        assert (action == again).all()
    with pytest.raises(InvalidStateError, match="no environment to learn in"):
        without.learn(1)


@pytest.mark.learns  # without shape checks, which tracing cannot pass
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
@pytest.mark.parametrize(
    ("memory", "options"),
    [
        ("mingru", {"head_relevance": USED}),
        ("mingru", {"autoregressive": True}),
        ("lstm", {}),
        ("conv-mingru", {}),
    ],
)
def test_an_exported_agent_chooses_and_remembers_the_same(memory, options, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    agent = PPO(chance(), memory=memory, num_envs=2, **options, **SMALL)
    learnt(agent, 48)
    agent.export(tmp_path / "agent.onnx")
    session = runtime.InferenceSession(tmp_path / "agent.onnx")
    chance_of = np.random.default_rng(0)
    memories, state = None, np.zeros((3, *agent.policy.state_shape), np.float32)
    for time in range(4):
        seen = chance_of.standard_normal((3, 4)).astype(np.float32)
        mask = np.stack([legal(row) for row in seen])
        action, memories = agent.predict(seen, memories, action_masks=mask)
        given = {"vector": seen, "state": state, "mask": mask}
        given["episode_start"] = np.full(3, time == 0)
        chosen, _, _, state = session.run(None, given)
        assert (chosen == action).all()
        np.testing.assert_allclose(state, memories, atol=1e-5)
    with pytest.raises(InvalidInputError, match=r"must end in \.onnx"):
        agent.export(tmp_path / "agent")


def test_an_agent_is_loaded_under_a_default_device(tmp_path):
    PPO(Seen, num_envs=2, **SMALL).save(tmp_path / "agent")
    with torch.device("cpu"):  # as torch.set_default_device("cpu") does
        learnt(PPO.load(tmp_path / "agent", env=Seen), 24)


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(InvalidInputError, match="nope does not exist"):
        PPO.load(tmp_path / "nope")


def test_a_damaged_file_is_refused_in_one_line(tmp_path):
    file = tmp_path / "agent.safetensors"
    PPO(chance(), num_envs=2, **SMALL).save(file)
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(InvalidInputError, match="is damaged") as caught:
        PPO.load(file)
    assert "\n" not in str(caught.value)


def test_a_file_is_refused_by_its_header_before_the_rest_is_read(tmp_path):
    file = tmp_path / "agent.safetensors"
    with file.open("wb") as stream:  # 1 TB, of which the disk has a few bytes
        stream.write((2**20).to_bytes(8, "little") + b"{}")
        stream.truncate(2**40)
    with pytest.raises(InvalidInputError) as caught:
        PPO.load(file)
    assert "\n" not in str(caught.value)


def test_without_gymnasium_one_line_says_what_to_install():
    code = "import sys; sys.modules['gymnasium'] = None; from esper import PPO"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stderr.splitlines()[-1].endswith("pip install '.[rl]'.")


def test_memory_is_carried_by_predict_and_dropped_where_an_episode_starts():
    agent = PPO(chance("none"), memory="mingru", num_envs=2, normalize=False, **SMALL)
    batch = np.ones((2, 4), np.float32)
    _, one = agent.predict(batch)
    _, two = agent.predict(batch, one)
    _, again = agent.predict(batch, one, episode_start=[True, False])
    assert np.abs(two - one).max() > 1e-3
    assert (again[0] == one[0]).all()
    assert (again[1] == two[1]).all()
    alone, state = agent.predict(batch[0])
    np.testing.assert_allclose(state[0], one[0], atol=1e-6)
    assert alone.shape == (3,)


def test_evaluation_plays_whole_episodes_with_masks_and_changes_nothing():
    agent = PPO(chance("method"), memory="gru", num_envs=3, **SMALL).learn(36)
    before = weights(agent)
    drawn = [agent.evaluate(7, deterministic=False, seed=s).returns for s in (1, 1, 2)]
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] != drawn[2]).any()
    found = agent.evaluate(7)
    assert len(found.returns) == len(found.lengths) == 7
    assert found.lengths.min() >= 1
    assert found.mean == pytest.approx(found.returns.mean())
    assert all(torch.equal(x, before[n]) for n, x in weights(agent).items())


def test_spaces_of_another_order_are_refused(tmp_path):
    two, four = spaces.Discrete(2), spaces.Discrete(4)
    PPO(lambda: Odd(BOX, spaces.Dict(a=two, b=four)), num_envs=2, **SMALL).save(
        tmp_path / "agent"
    )
    with pytest.raises(InvalidInputError, match="action_space is Dict"):
        PPO.load(tmp_path / "agent", env=lambda: Odd(BOX, spaces.Dict(b=four, a=two)))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(3, start=1),
        spaces.MultiDiscrete([3, 4], dtype=np.int32),
        spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (2,), np.int64),
        spaces.Box(0, np.iinfo(np.uint64).max, (2,), np.uint64),
        spaces.Box(*np.array([[0.1, -np.inf], [0.3, 2.0]], np.float32)),
        spaces.Box(0, 1, (3,), bool),
        spaces.Box(np.array([0, 1], bool), np.array([1, 1], bool), dtype=bool),
    ],
)
def test_a_space_comes_back_from_plain_data(space):
    again = space_of(json.loads(json.dumps(space_data(space), sort_keys=True)))
    assert again == space
    assert again.dtype == space.dtype


def test_the_constructor_has_every_setting_with_its_default():
    arguments = inspect.signature(PPO).parameters
    usual = PPOSettings()
    # None: they depend on other settings, such as memory, and on what is given.
    sizes = ("num_envs", "rollout_steps", "minibatches", "exploration_coef")
    assert all(arguments[name].default is None for name in sizes)
    for item in fields(usual):
        if item.name not in sizes:
            default = arguments[item.name].default
            assert default == getattr(usual, item.name), item.name
        assert f"\n        {item.name}: " in PPO.__doc__


def test_without_a_seed_one_is_drawn_and_kept():
    agents = [PPO(chance(), seed=None, num_envs=2, **SMALL) for _ in range(2)]
    drawn, other = (agent.settings.seed for agent in agents)
    assert drawn != other
    again = PPO(chance(), seed=drawn, num_envs=2, **SMALL)
    assert_same_agents(agents[0].learn(24), again.learn(24))


def test_numbers_of_numpy_are_settings_too(tmp_path):
    given = {
        "num_envs": np.int64(2),
        "rollout_steps": np.int32(8),
        "gamma": np.float32(0.9),
    }
    given |= {"seed": np.int64(3), "normalize": np.True_, "width": np.int64(8)}
    given |= {"learning_rate": np.float32(1e-3), "epochs": np.int64(1)}
    PPO(chance(), **given).learn(16).save(tmp_path / "agent")
    loaded = PPO.load(tmp_path / "agent").settings
    assert (loaded.seed, loaded.num_envs, loaded.normalize) == (3, 2, True)
    assert loaded.learning_rate == np.float32(1e-3)


@pytest.mark.parametrize(
    ("make", "observation", "words"),
    [
        ("CartPole-v1", np.zeros(5), r"the shape \(4,\), or \(n, 4\) .*got \(5,\)"),
        ("CartPole-v1", np.zeros((2, 2, 4)), r"or \(n, 4\) for n .*got \(2, 2, 4\)"),
        ("CartPole-v1", np.zeros((0, 4)), r"got \(0, 4\)"),
        ("CartPole-v1", "x", r"got \(\)"),
        ("CartPole-v1", (np.zeros(4), {}), "not an array. Give the first result of"),
        ("FrozenLake-v1", (0, {"prob": 1}), "not an array. Give the first result of"),
        ("FrozenLake-v1", np.zeros((2, 1), int), r"the shape \(\), or \(n,\) for n"),
        (chance("observation"), {"action_mask": np.ones(10)}, "has no seen"),
    ],
)
def test_an_observation_of_another_shape_is_refused(make, observation, words):
    agent = PPO(make, num_envs=2, **SMALL)
    with pytest.raises(InvalidInputError, match=words):
        agent.predict(observation)


@pytest.mark.parametrize(
    ("space", "observation", "words"),
    [
        (spaces.Discrete(3), 1.5, r"environment 0 is \[1\.5\], outside Discrete"),
        (spaces.Discrete(3), math.nan, "outside Discrete"),
        (spaces.MultiBinary(2), np.array([7, 1]), "outside MultiBinary"),
        (spaces.Box(0, 255, (4, 4, 1), np.uint8), np.full((4, 4, 1), 0.5), "holds 0.5"),
        (spaces.Box(0, 255, (4, 4, 1), np.uint8), np.full((4, 4, 1), -1), "holds -1"),
    ],
)
def test_an_observation_outside_its_space_is_not_rounded(space, observation, words):
    agent = PPO(lambda: Odd(space, TWO), num_envs=2, **SMALL)
    with pytest.raises(InvalidInputError, match=words):
        agent.predict(observation)


def test_arguments_of_other_kinds_are_refused_in_one_line():
    agent = PPO(chance("none"), memory="gru", num_envs=2, **SMALL)
    seen = np.zeros((3, 4), np.float32)
    _, state = agent.predict(seen)
    for call, words in (
        (lambda: agent.predict(seen, state, [True, False]), "one bool or 3, got 2"),
        (lambda: agent.predict(seen, state * np.nan), "state holds NaN"),
        (lambda: agent.learn("10"), "total_steps must be at least 1, got '10'"),
        (lambda: agent.evaluate(2.5), r"episodes must be a whole number .*got 2\.5"),
    ):
        with pytest.raises(InvalidInputError, match=words):
            call()
    first = np.ones((3, 1), bool)
    np.testing.assert_array_equal(agent.predict(seen, state, first)[1], state)


class Paying(Seen):
    """Pays anything."""

    def __init__(self, paid):
        self.paid = paid

    def step(self, action):
        seen, _, *rest = super().step(action)
        return seen, self.paid, *rest


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_array_of_one_number_is_a_reward(kind):
    for paid in (np.array([2.0]), [[2.0]]):
        paying = iter([2.0, paid, paid]) if kind == "sync" else iter([paid] * 3)
        agent = PPO(
            lambda each=paying: Paying(next(each)),
            vectorization=kind,
            num_envs=2,
            **SMALL,
        )
        records = learnt(agent, 24)
        agent.close()
        assert records[-1].recent_return == 2.0


@pytest.mark.parametrize(
    ("paid", "words"),
    [
        (math.nan, "gave the reward nan in environment 1 at step 0"),
        (1e39, r"gave the reward 1e\+39 in environment 1 at step 0"),
        (None, "gave the reward nan in environment 1 at step 0"),
        (np.ones(2), r"at step 0 of environment 1: .*the reward has the shape \(2,\)"),
    ],
)
def test_what_is_no_reward_is_refused_with_its_place(paid, words):
    amounts = iter([1.0, paid])
    with pytest.raises(InvalidInputError, match=words):
        PPO(lambda: Paying(next(amounts)), num_envs=2, **SMALL).learn(24)
    amounts = iter([1.0, paid])
    agent = PPO(Seen, num_envs=2, **SMALL)
    with pytest.raises(InvalidInputError, match=words):
        agent.evaluate(2, env=lambda: Paying(next(amounts)))


def test_learning_goes_on_after_an_interruption_in_a_rollout():
    class Interrupted(Chance):
        left = 30

        def step(self, action):
            Interrupted.left -= 1
            if not Interrupted.left:
                raise KeyboardInterrupt
            return super().step(action)

    agent = PPO(Interrupted, num_envs=2, **SMALL)
    with pytest.raises(KeyboardInterrupt):
        agent.learn(1e3)
    # The environments stand elsewhere now: an illegal action would raise.
    assert agent.learn(480).rounds >= 20


def test_a_step_that_was_interrupted_in_processes_is_waited_for():
    agent = PPO(chance("none"), vectorization="async", num_envs=2, **SMALL).learn(24)
    vector = agent.world.env

    def interrupted():
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vector, "_answers", interrupted)
        with pytest.raises(KeyboardInterrupt):
            vector.step(vector.action_space.sample())
    agent.forget_episodes()
    assert agent.learn(24).rounds == 2
    agent.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_agent_whose_environments_are_closed_does_not_learn(kind):
    agent = PPO(Seen, vectorization=kind, num_envs=2, **SMALL)
    learnt(agent, 16)
    agent.close()
    with pytest.raises(InvalidStateError, match="environments are closed"):
        agent.learn(16)


def test_an_integer_that_does_not_fit_is_refused_instead_of_wrapped():
    class Large(Seen):
        observation_space = spaces.Box(-100, 100, (1,), np.int8)

        def reset(self, *, seed=None, options=None):
            return np.array([300]), {}

    with pytest.raises(InvalidInputError, match="300 does not fit into int8"):
        PPO(Large, num_envs=2, **SMALL).learn(16)


def test_infinity_in_an_observation_is_told_before_it_is_learnt():
    class Far(Seen):
        horizon = 20

        def show(self):
            return np.array([0.0, np.inf if self.time == 15 else 1.0], np.float32)

    agent = PPO(Far, num_envs=2, **SMALL)
    with pytest.raises(
        NotFiniteError, match="environment 0 of Far at step 15 holds NaN or"
    ):
        agent.learn(480)
    assert np.isfinite(agent.observations.moments.mean).all()


@pytest.mark.parametrize("memory", ["none", "gru"])
def test_nan_is_told_where_an_agent_plays_too(memory):
    class Failing(Seen):
        blind = False

        def show(self):
            return np.full(2, np.nan if Failing.blind else 1.0, np.float32)

    agent = PPO(Failing, memory=memory, num_envs=2, **SMALL).learn(24)
    Failing.blind = True
    with pytest.raises(
        NotFiniteError, match="environment 0 of Failing at step 0 holds NaN"
    ):
        agent.evaluate(2)
    broken = np.array([[0.0, 1.0], [0.0, np.inf]], np.float32)
    with pytest.raises(NotFiniteError, match="environment 1 holds NaN or infinity"):
        agent.predict(broken)
    with pytest.raises(NotFiniteError, match="environment 0 holds NaN or infinity"):
        agent.predict(broken[1])


@pytest.mark.parametrize("source", ["info", "method"])
def test_an_agent_that_learnt_with_masks_needs_them(source, tmp_path):
    agent = PPO(chance(source), num_envs=2, **SMALL).learn(24)
    agent.save(tmp_path / "agent.safetensors")
    seen, mask = np.zeros((2, 4), np.float32), np.ones(sum(SIZES), bool)
    for each in (agent, PPO.load(tmp_path / "agent.safetensors")):
        with pytest.raises(
            InvalidInputError, match=r"learnt with masks; give predict\(action"
        ):
            each.predict(seen)
        assert each.predict(seen[0], action_masks=mask)[0].shape == (3,)


def test_an_agent_that_learnt_with_masks_does_not_play_without(tmp_path):
    agent = PPO(chance("info"), num_envs=2, **SMALL).learn(24)
    words = "learnt with masks, and these environments have none"
    with pytest.raises(InvalidInputError, match=words):
        agent.evaluate(2, env=chance("none"))
    agent.save(tmp_path / "agent")
    with pytest.raises(InvalidInputError, match=words):
        PPO.load(tmp_path / "agent", env=chance("none")).learn(24)
    PPO.load(tmp_path / "agent", env=chance("none"), masks=None).learn(24)


def test_agents_without_masks_or_with_masks_in_what_they_see_need_none(tmp_path):
    for source in ("none", "observation"):
        agent = PPO(chance(source), num_envs=2, **SMALL).learn(24)
        agent.predict(agent.world.env.reset(seed=0)[0])
    older = tmp_path / "older.safetensors"
    agent = PPO(chance("info"), num_envs=2, **SMALL).learn(24)
    agent.save(older)
    tensors, manifest = read_safetensors(older)
    facts = {name: fact for name, fact in manifest.facts.items() if name != "masked"}
    older.write_bytes(pack(tensors, replace(manifest, facts=facts)))
    PPO.load(older).predict(np.zeros((2, 4), np.float32))


class Frames(gymnasium.Env):
    """Images in one buffer that is written over, as numbers from 0 to `largest`."""

    action_space = spaces.Discrete(2)

    def __init__(self, largest, kind):
        self.largest, self.frame = largest, np.zeros((1, 6, 6), kind)
        self.observation_space = spaces.Box(0, largest, (1, 6, 6), kind)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.step(0)[0], {}

    def step(self, action):
        self.frame[:] = self.np_random.integers(2) * self.largest
        return self.frame, 0.0, False, bool(self.np_random.random() < 0.1), {}


@pytest.mark.parametrize(("largest", "kind"), [(255, np.uint8), (5_000, np.float32)])
def test_images_are_those_of_their_step_and_no_larger_than_one(largest, kind):
    def buffered(copy):
        make = [lambda: Frames(largest, kind)] * 2
        same = AutoresetMode.SAME_STEP
        return gymnasium.vector.SyncVectorEnv(make, copy=copy, autoreset_mode=same)

    one, other = (PPO(buffered(copy), **SMALL).learn(48) for copy in (False, True))
    assert_same_agents(one, other)
    frame = np.full((2, 1, 6, 6), largest, kind)
    images = one.spec.images(frame, 2)["image0"]
    assert float(images.max()) * one.policy.image_scale == pytest.approx(1)


@pytest.mark.parametrize(
    ("bound", "shown", "kind", "divisor"),
    [
        (255, 255, np.uint8, 255),
        (255, 100, np.uint8, 255),
        (10, 10, np.uint8, 10),
        (255, 10, np.uint8, 10),  # MiniGrid's
        (255, 0, np.uint8, 255),  # nothing is known
        (10**18, 7, np.int64, 7),
        (1.0, 1.0, np.float32, 1),
        (np.inf, 255.0, np.float32, 255),
    ],
)
def test_small_codes_in_images_are_not_taken_for_black(
    bound, shown, kind, divisor, tmp_path
):
    def make():
        env = Frames(shown, kind)
        env.observation_space = spaces.Box(
            -bound if bound == np.inf else 0, bound, (1, 6, 6), kind
        )
        return env

    agent = PPO(make, num_envs=2, **ONCE, **SMALL)
    for record in learnt(agent, 72):
        assert abs(record.update.kl) < 1e-6
    assert agent.policy.image_scale.item() == pytest.approx(1 / divisor)
    agent.save(tmp_path / "agent")
    frame = np.full((1, 6, 6), shown, kind)
    twin = PPO.load(tmp_path / "agent")
    assert torch.equal(twin.policy.image_scale, agent.policy.image_scale)
    assert twin.predict(frame)[0] == agent.predict(frame)[0]
    plain = PPO(make, num_envs=2, normalize=False, **SMALL).learn(24)
    expected = 1 if bound == np.inf else 1 / bound
    assert plain.policy.image_scale.item() == pytest.approx(expected)


def test_an_image_that_becomes_brighter_is_scaled_after_the_update():
    class Brighter(Frames):
        def step(self, action):
            found = super().step(action)
            self.largest = 250 if agent.rounds == 2 else 10
            return found

    def make():
        env = Brighter(10, np.uint8)
        env.observation_space = spaces.Box(0, 255, (1, 6, 6), np.uint8)
        return env

    agent, divisors = PPO(make, num_envs=2, **ONCE, **SMALL), []

    def note(record):
        assert abs(record.update.kl) < 1e-6
        divisors.append(round(1 / agent.policy.image_scale.item()))

    agent.learn(120, callback=note)
    assert divisors == [10, 10, 255, 255, 255]


def test_nan_in_an_image_is_refused():
    class Blind(Frames):
        def step(self, action):
            found = super().step(action)
            self.frame[:] = np.nan
            return found

    with pytest.raises(NotFiniteError, match=r"environment 0 of .* holds NaN or"):
        PPO(lambda: Blind(1.0, np.float32), num_envs=2, **SMALL).learn(24)


def test_callbacks_stop_learning_and_a_run_folder_has_rows_and_the_agent(tmp_path):
    agent, run = PPO(chance(), num_envs=2, **SMALL), tmp_path / "run"
    agent.learn(10_000, callback=lambda record: record.env_steps < 48, logger=run)
    assert agent.env_steps == 48
    lines = (run / "progress.csv").read_text().splitlines()
    assert lines[0].startswith("step,round/seconds,round/episodes,")
    assert [line.split(",")[0] for line in lines[1:]] == ["24", "48"]
    assert_same_agents(agent, PPO.load(run / "agent.safetensors"))
    agent.learn(
        10_000, callback=lambda record: np.float64(record.env_steps) < 96, logger=run
    )
    assert agent.env_steps == 96
    with closing(open_store(run / "events.sqlite")) as db:
        rounds = db.execute("SELECT round, env_steps FROM live_rounds").fetchall()
        episodes = db.execute(
            "SELECT count(*), count(DISTINCT env || ' ' || episode) FROM live_episodes"
        ).fetchone()
    assert rounds == [(1, 24), (2, 48), (3, 72), (4, 96)]
    assert episodes[0] == episodes[1] > 0
    lines = (run / "progress.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ["24", "48", "72", "96"]
    assert Run.list(tmp_path)[0].state == "finished"
    with pytest.raises(RunLockedError, match="has another training"):
        PPO("CartPole-v1", num_envs=2, **SMALL).learn(24, logger=run)
    assert (run / "progress.csv").read_text().splitlines() == lines

    def fail(record):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        agent.learn(24, callback=fail, logger=run)
    assert Run.list(tmp_path)[0].state == "stopped"


def test_a_further_call_of_learn_does_not_raise_the_learning_rate_again(tmp_path):
    agent, seen = PPO(chance(), num_envs=2, end_factor=0.25, **SMALL), []

    def learn(agent, rounds, **options):
        def note(record):
            (group,) = agent.agent.optimizer.param_groups
            seen.append((round(group["lr"] / 5e-3, 4), record.env_steps))

        agent.learn(24 * rounds, callback=options.pop("callback", note), **options)
        found = seen.copy()
        seen.clear()
        return found

    assert learn(agent, 4) == [(1, 24), (0.75, 48), (0.5, 72), (0.25, 96)]
    assert learn(agent, 2) == [(0.25, 120), (0.25, 144)]
    agent.save(tmp_path / "agent")
    loaded = PPO.load(tmp_path / "agent", env=chance())
    assert learn(loaded, 1) == [(0.25, 168)]
    again = learn(agent, 4, reset_num_timesteps=True)
    assert again == [(1, 24), (0.75, 48), (0.5, 72), (0.25, 96)]
    agent.learn(96, reset_num_timesteps=True, callback=lambda r: r.env_steps < 48)
    assert learn(agent, 3) == [(0.75, 72), (0.5, 96), (0.25, 120)]


def warm_up(progress):
    return min(1.0, 0.5 + progress)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", (1, 1, 1)),
        ("linear", (1, 0.55, 0.1)),
        ("cosine", (1, 0.55, 0.1)),
        (warm_up, (0.5, 1, 1)),
        (lambda progress: 0.0, (0, 0, 0)),
    ],
)
def test_schedules_move_learning_rate_entropy_and_clip_range(schedule, expected):
    for name in ("schedule", "clip_schedule"):
        given = {"schedule": "constant"} | {name: schedule}
        agent = PPO(chance(), num_envs=2, **given, **SMALL, **ONCE)
        agent.learn(72)
        learner, settings = agent.agent, agent.settings
        rates = [settings.factors(done)[name != "schedule"] for done in (0, 0.5, 1)]
        assert rates == pytest.approx(expected)
        (group,) = learner.optimizer.param_groups
        last = {"schedule": 1.0, "clip_schedule": 1.0, name: expected[-1]}
        assert group["lr"] == pytest.approx(5e-3 * last["schedule"])
        entropy = (-learner._weights[-6:-3]).tolist()
        assert entropy == pytest.approx([0.01 * last["schedule"]] * 3)
        clip = learner._annealed.clip_range
        assert clip == pytest.approx(0.2 * last["clip_schedule"], abs=1e-7)
    assert PPOSettings(schedule="cosine").factors(0.25)[0] == pytest.approx(
        0.8682, 1e-3
    )


def test_a_clip_range_of_zero_stops_the_policy_where_its_ratio_moved_away():
    """The clip range in the loss is that of the schedule."""
    fractions = []
    for clip in (lambda progress: 0.0, lambda progress: 1e6):
        agent = PPO(chance(), num_envs=2, clip_schedule=clip, **SMALL)
        agent.learn(24, callback=lambda r: fractions.append(r.update.clip_fraction))
    assert fractions[0] > 0.5
    assert fractions[1] == 0


def test_a_schedule_is_saved_by_name_and_a_function_is_given_again(tmp_path):
    options = {"num_envs": 2, **SMALL, **ONCE}
    agent = PPO(chance(), schedule=warm_up, clip_schedule="cosine", **options)
    agent.learn(96, callback=lambda record: record.round < 2)
    agent.save(tmp_path / "agent")
    with pytest.raises(InvalidInputError, match="was the function warm_up, and a file"):
        PPO.load(tmp_path / "agent", env=chance())
    PPO.load(tmp_path / "agent").save(tmp_path / "again")
    again = PPO.load(tmp_path / "again", env=chance(), schedule=warm_up)
    assert again.settings == agent.settings
    assert again.progress == agent.progress == pytest.approx(1 / 3)
    rates = []
    again.learn(72, callback=lambda record: rates.append(record.learning_rate / 5e-3))
    assert rates == pytest.approx([0.5 + 1 / 3, 1, 1])


def test_without_memory_minibatches_are_drawn_from_all_steps():
    """One minibatch of all steps learns the same either way."""
    options = {"num_envs": 2, "target_kl": math.inf, **SMALL}
    few = PPO(chance(), minibatches=8, **options)
    assert few.agent.config.minibatches == 8
    records = []
    few.learn(24, callback=records.append)
    assert records[0].update.steps_taken == 4 * 8
    assert PPO(chance(), memory="gru", **options).agent.config.minibatches == 2

    steps, rows = (PPO(chance(), **ONCE, **options) for _ in range(2))
    rows.agent._single_steps = False
    for agent in (steps, rows):
        agent.learn(24)
    torch.testing.assert_close(
        dict(steps.policy.named_parameters()),
        dict(rows.policy.named_parameters()),
        rtol=0,
        atol=1e-6,
    )


def test_a_loaded_agent_takes_changes_and_keeps_what_its_weights_fix(tmp_path):
    file = tmp_path / "agent"
    agent = PPO(chance(), num_envs=4, memory="gru", minibatches=3, **SMALL).learn(48)
    agent.save(file)
    changes = {"num_envs": 2, "rollout_steps": 6, "learning_rate": 1e-3, "seed": 7}
    one, two = (PPO.load(file, env=chance(), **changes) for _ in range(2))
    assert one.settings == replace(agent.settings, **changes)
    assert one.agent.config.minibatches == 2
    assert_same_agents(one.learn(24), two.learn(24))
    assert PPO.load(file, env=chance(), num_envs=8).agent.config.minibatches == 3
    other = PPO.load(file, env=chance(), **changes | {"seed": 8}).learn(24)
    assert not torch.equal(one.policy.head_out.weight, other.policy.head_out.weight)
    for fixed in ("memory", "width", "layers", "normalize", "head_relevance"):
        with pytest.raises(InvalidInputError, match=f"{fixed} belongs to the saved"):
            PPO.load(file, **{fixed: 1})
    with pytest.raises(InvalidInputError, match="no setting 'learning_rat'; did you"):
        PPO.load(file, learning_rat=1e-3)
    with pytest.raises(InvalidInputError, match="clip_range must be positive"):
        PPO.load(file, clip_range=-1.0)


def test_a_schedule_that_returns_no_number_is_refused():
    for wrong in (type, str, lambda progress: -1.0, lambda progress: math.nan):
        agent = PPO(chance(), schedule=wrong, num_envs=2, **SMALL)
        with pytest.raises(InvalidInputError, match="schedule must return a finite"):
            agent.learn(24)


def test_records_have_the_mean_of_the_last_hundred_episodes():
    class Counted(Seen):
        horizon, paid = 20, 0

        def reward(self, action):
            if self.time < 19:
                return 0.0
            Counted.paid += 1
            return float(Counted.paid)

    records = []
    agent = PPO(Counted, num_envs=2, **SMALL).learn(72, callback=records.append)
    found = [(r.episodes, r.recent_return, r.recent_length) for r in records]
    assert np.isnan(found[0][1:]).all()
    assert found[1:] == [(2, 1.5, 20.0), (0, 1.5, 20.0)]
    agent.learn(24 * 100, callback=records.append)
    last = np.arange(Counted.paid - 100, Counted.paid) + 1
    assert records[-1].recent_return == last.mean()


class Odd(gymnasium.Env):
    """Any spaces; everything ends after three steps; actions must be in the space."""

    def __init__(self, seen, chosen):
        self.observation_space, self.action_space = seen, chosen
        self.observation_space.seed(0)

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.time += 1
        return self.observation_space.sample(), 1.0, self.time == 3, False, {}


BOX, TWO = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
OBSERVATIONS = {
    "vector": BOX,
    "matrix": spaces.Box(-1, 1, (2, 3), np.float64),
    "image": spaces.Box(0, 255, (9, 7, 3), np.uint8),
    "channels first": spaces.Box(0.0, 1.0, (2, 8, 8), np.float32),
    "discrete": spaces.Discrete(5, start=-2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(4),
    "dict": spaces.Dict(
        a=spaces.Box(0, 255, (8, 8, 1), np.uint8),
        b=spaces.Tuple([spaces.Discrete(3), BOX]),
    ),
}
ACTIONS = {
    "discrete": spaces.Discrete(3, start=4),
    "one choice": spaces.Discrete(1),
    "multi-discrete": spaces.MultiDiscrete([2, 3, 5], dtype=np.int32),
    "multi-binary": spaces.MultiBinary(3),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Discrete(4)]),
    "dict": spaces.Dict(
        # In no order of letters: heads are in this one.
        x=spaces.Discrete(2),
        b=spaces.Discrete(4),
        y=spaces.Dict(z=spaces.MultiDiscrete([3, 2])),
    ),
    "box": spaces.Box(
        np.array([-1.0, 0.0], np.float32), np.array([1.0, 9.0], np.float32)
    ),
    "unbounded": spaces.Box(-np.inf, np.inf, (2, 1), np.float32),
    "mixed": spaces.Dict(
        turn=spaces.Box(-1, 9, (2,), np.float32),
        tool=spaces.Discrete(3, start=10**9),
        flags=spaces.Tuple([spaces.MultiBinary(2), spaces.Box(-1, 1, (1,))]),
    ),
}
PAIRS = [(o, "discrete") for o in OBSERVATIONS] + [("vector", a) for a in ACTIONS]


@pytest.mark.parametrize(("seen", "chosen"), PAIRS)
def test_every_space_is_learnt_in_saved_and_predicted(seen, chosen, tmp_path):
    def make():
        return Odd(OBSERVATIONS[seen], ACTIONS[chosen])

    agent = PPO(make, num_envs=2, memory="mingru", **ONCE, **SMALL)
    records = learnt(agent, 48)
    assert all(abs(r.update.kl) < 1e-6 for r in records)
    assert records[-1].recent_return == 3.0
    agent.save(tmp_path / "agent")
    twin = PPO.load(tmp_path / "agent", env=make)
    env = make()
    observation, _ = env.reset()
    state = other = None
    for _ in range(3):
        action, state = agent.predict(observation, state)
        again, other = twin.predict(observation, other)
        assert env.action_space.contains(action)
        assert repr(action) == repr(again)
        assert twin.spec.head_names == agent.spec.head_names
        observation, *_ = env.step(action)
    assert agent.evaluate(3).returns.tolist() == [3.0] * 3


class Mission(spaces.Space):
    """Text in a space of its own, like MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)

    def sample(self, mask=None, probability=None):
        return "get the key"

    def contains(self, x):
        return isinstance(x, str)

    def __eq__(self, other):
        return isinstance(other, Mission)

    __hash__ = spaces.Space.__hash__


@pytest.mark.parametrize("kind", ["sync", "async", "vector"])
@pytest.mark.parametrize("text", [lambda: spaces.Text(9), Mission])
def test_text_in_a_dict_is_left_out_with_one_warning(text, kind, tmp_path):
    def make(text=text):
        inner = spaces.Dict(text=text(), n=spaces.Discrete(3))
        return Odd(spaces.Dict(mission=text(), numbers=BOX, inner=inner), TWO)

    env, options = make, {"vectorization": kind, "num_envs": 2}
    if kind == "vector":
        env, options = vector(make, 2, AutoresetMode.NEXT_STEP), {}
    with pytest.warns(EsperWarning, match="is text and is left out") as warned:
        agent = PPO(env, **options, **SMALL).learn(48)
    texts = [str(warning.message).partition(" ")[0] for warning in warned]
    assert sorted(texts) == ["'inner.text'", "'mission'"]
    agent.save(tmp_path / "agent")
    with pytest.warns(EsperWarning):
        loaded = PPO.load(tmp_path / "agent", env=make)
    observation, _ = make().reset()
    assert loaded.predict(observation)[0] == agent.predict(observation)[0]
    del observation["mission"], observation["inner"]["text"]
    assert loaded.predict(observation)[0] == agent.predict(observation)[0]
    assert loaded.evaluate(2).mean == 3.0
    agent.close()
    findings = examine(make, steps=50)
    assert "'mission' of the observation is text, which PPO" in str(
        [*map(str, findings)]
    )
    assert not any(finding.is_fault for finding in findings if "text" in finding.what)


def bad_mask(mask):
    class Bad(Chance):
        def _show(self):
            observation, _ = super()._show()
            return observation, {"action_mask": mask}

    return Bad


@pytest.mark.parametrize(
    ("env", "options", "match"),
    [
        ("Nonsense-v0", {}, "Nonsense-v0 cannot be made"),
        (7, {}, "must be an id, a function .* got int"),
        (
            chance(),
            {"memory": "gruu"},
            "memory: there is no 'gruu'; did you mean 'gru'",
        ),
        (
            chance(),
            {"vectorization": "threads"},
            "there is no 'threads'; did you mean 'async'",
        ),
        (chance(), {"num_envs": 0}, "num_envs must be greater than or equal to 1"),
        (chance(), {"gamma": 1.5}, "gamma must be less than or equal to 1"),
        (chance(), {"gamma": None}, "gamma must be a valid number; got None"),
        (chance(), {"seed": 1.5}, r"seed must be a valid integer.* got 1\.5"),
        (chance(), {"seed": -1}, "seed must be greater than or equal to 0"),
        (chance(), {"normalize": "maybe"}, "normalize must be a valid boolean"),
        (chance(), {"width": None}, r"width must be a valid integer"),
        (chance(), {"learning_rate": min}, "be a number, got .* Use schedule=..., su"),
        (chance(), {"clip_range": "linear"}, "got 'linear'. Use clip_schedule=..., "),
        (chance(), {"n_steps": 5}, "no argument 'n_steps'; did you mean 'rollout_ste"),
        (chance(), {"verbose": 1}, r"no argument 'verbose'. Use learn\(progress=True"),
        (chance(), {"policy": "A"}, "no argument 'policy'. Use memory, width or enc"),
        ("MlpPolicy", {}, "no argument 'policy'. Use memory, width or encoder; the"),
        (chance(), {"learning_rate": 2}, r"learning_rate must be in \(0, 1\], got 2"),
        (
            chance(),
            {"schedule": "linaer"},
            "no schedule 'linaer'; did you mean 'linear",
        ),
        (chance(), {"clip_schedule": 3}, "clip_schedule: there is no schedule '3'"),
        (chance(), {"schedule": "function f"}, "was the function f, and a file"),
        (chance(), {"clip_range": 0.0}, "clip_range must be positive, got 0"),
        (chance(), {"head_entropy": {"a": ""}}, "head_entropy must be a valid number"),
        (chance(), {"masks": "somewhere"}, "masks must be auto"),
        (
            chance(),
            {"head_relevance": [[True]]},
            r"head_relevance must be .* here \[3, 3\]",
        ),
        (
            chance(),
            {"head_relevance": [[1, 2, 1]] * 3},
            "head_relevance holds 2; give 1 or True",
        ),
        (
            chance(),
            {"head_relevance": [True]},
            r"head_relevance must be \[op, head\], got \[1\]",
        ),
        (lambda: Native(Seen, 2), {}, "makes a VectorEnv; pass what it makes"),
        (lambda: Odd(spaces.Text(4), BOX), {}, "is a Text, which is not supported"),
        (
            lambda: Odd(BOX, spaces.Dict({"a.b": TWO, "a": spaces.Dict(b=TWO)})),
            {},
            "two heads of the action are called 'a.b'. Rename one.",
        ),
        (lambda: Odd(spaces.Dict(a=spaces.Text(4)), BOX), {}, "holds no numbers"),
        (lambda: Odd(BOX, spaces.Text(4)), {}, "is a Text, which is not supported"),
        (lambda: Odd(spaces.Discrete(10**6), BOX), {}, "1,000,000 values, more than"),
        (
            lambda: Odd(BOX, spaces.Dict(a=BOX, b=TWO)),
            {"head_relevance": [[True] * 4] * 2},
            "and the first head discrete",
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused_in_one_line(env, options, match):
    with pytest.raises(InvalidInputError, match=match) as caught:
        PPO(env, **options)
    assert "\n" not in str(caught.value)


def test_arguments_of_other_libraries_are_translated():
    with pytest.raises(InvalidInputError, match="no argument 'policy'"):
        PPO("MlpPolicy", "CartPole-v1")
    agent = PPO(Seen, num_envs=1, **SMALL)
    with pytest.raises(InvalidInputError, match="did you mean 'total_steps'"):
        agent.learn(total_timesteps=12)


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (
            np.ones(9, bool),
            InvalidInputError,
            r"Bad at step 0: .* 10 entries.* got \[9\]",
        ),
        (
            np.zeros(10, bool),
            NoLegalActionError,
            "environment 0 allows nothing for head",
        ),
        ([True, False], InvalidInputError, r"must have 10 entries"),
    ],
)
def test_masks_of_the_wrong_width_or_empty_are_refused(mask, error, match):
    agent = PPO(bad_mask(mask), num_envs=2, **SMALL)
    with pytest.raises(error, match=match):
        agent.learn(24)


class Flawed(gymnasium.Env):
    """All is legal, but one entry of the mask at step 2 is another number."""

    action_space = spaces.MultiDiscrete(SIZES)
    SHAPES = {  # noqa: RUF012
        "table": lambda mask: np.stack([mask] * SIZES[0]),
        "heads": lambda mask: tuple(np.split(mask, STARTS[1:])),
        "list": list,
    }

    def __init__(self, source, entry):
        self.source, self.entry, self.time = source, entry, 0
        self.observation_space = BOX
        if source == "observation":
            mask = spaces.Box(-np.inf, np.inf, (sum(SIZES),), np.float64)
            self.observation_space = spaces.Dict(action_mask=mask, seen=BOX)
        if source == "method":
            self.action_masks = self.mask

    def mask(self):
        mask = np.ones(sum(SIZES))
        mask[1] = self.entry if self.time == 2 else 0
        return self.SHAPES.get(self.source, np.array)(mask)

    def show(self):
        seen = np.zeros(3, np.float32)
        if self.source == "observation":
            return {"action_mask": self.mask(), "seen": seen}, {}
        return seen, {} if self.source == "method" else {"action_mask": self.mask()}

    def reset(self, *, seed=None, options=None):
        self.time = 0
        return self.show()

    def step(self, action):
        self.time += 1
        observation, info = self.show()
        return observation, 0.0, False, self.time == 6, info


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        *product(["info", "method", "observation", "table", "heads"], [-np.inf]),
        *product(["list"], [np.nan, -1, 2, 0.5]),
    ],
)
def test_a_mask_that_is_not_0_or_1_is_refused_with_its_place(source, entry):
    entries = iter([0, entry])
    agent = PPO(lambda: Flawed(source, next(entries)), num_envs=2, **SMALL)
    words = f"at step 2: the mask of environment 1 holds {entry:g}; give 1 or True"
    with pytest.raises(InvalidInputError, match=words):
        agent.learn(24)
    findings = examine(lambda: Flawed(source, entry), steps=20)
    assert f"environment 0 holds {entry:g}" in " ".join(map(str, findings))


def test_a_mask_is_refused_where_an_agent_plays_too():
    agent = PPO(chance(), num_envs=2, **SMALL).learn(24)
    seen, mask = np.zeros((2, 4), np.float32), np.zeros((2, 10))
    mask[1, 3] = -np.inf
    heads = tuple(np.split(mask, STARTS[1:], axis=1))
    for each in (mask, heads, list(mask)):
        with pytest.raises(InvalidInputError, match="mask of environment 1 holds -inf"):
            agent.predict(seen, action_masks=each)
    for each in (mask[1], [*mask[1]], ["yes"] * 10, [None] * 10):
        with pytest.raises(InvalidInputError, match="mask of environment 0 holds"):
            agent.predict(seen[0], action_masks=each)
    for kind in (bool, np.int64, np.uint8, np.float32, object):
        ones = np.ones(10, kind)
        assert agent.predict(seen[0], action_masks=ones)[0].shape == (3,)


@pytest.mark.parametrize("mode", [None, *MODES])
@pytest.mark.parametrize(
    "mask",
    [
        {"a": [0, 1], "b": [1, 0, 0, 0, 1]},
        {"a": np.array([0, 1]), "b": (np.array([1, 0]), np.array([0, 0, 1]))},
        (np.array([0, 1]), np.array([1, 0, 0, 0, 1])),
        [0, 1, 1, 0, 0, 0, 1],
    ],
)
def test_masks_of_nested_lists_arrays_and_tuples_are_obeyed(mask, mode):
    class Strict(Odd):
        def reset(self, *, seed=None, options=None):
            return super().reset()[0], {"action_mask": mask}

        def step(self, action):
            assert (action["a"], *action["b"]) == (1, 0, 2)
            return *super().step(action)[:4], {"action_mask": mask}

    def make():
        heads = spaces.Dict(a=TWO, b=spaces.MultiDiscrete([2, 3]))
        return Strict(BOX, heads)

    if mode is None:
        PPO(make, num_envs=2, **SMALL).learn(24)
    else:
        PPO(vector(make, 2, mode), **SMALL).learn(24)


def test_a_tuple_of_one_mask_per_environment_is_not_taken_for_heads():
    """It is what `call("action_masks")` of Gymnasium's vectors returns."""
    agent = PPO(Seen, num_envs=2, **SMALL)
    masks = np.array([[True, False], [True, False]])  # as large when transposed
    actions, _ = agent.predict(np.zeros((2, 2), np.float32), action_masks=(*masks,))
    assert actions.tolist() == [0, 0]
    agent = PPO(chance("none"), num_envs=2, **SMALL)
    heads = tuple(np.arange(size) == size - 1 for size in SIZES)
    actions, _ = agent.predict(np.zeros((2, 4)), action_masks=(heads, heads))
    assert actions.tolist() == [[2, 1, 4]] * 2


def test_a_method_without_a_mask_is_refused():
    class Silent(Chance):
        def action_masks(self):
            return None

    words = "at step 0: the mask of environment 0 is None"
    with pytest.raises(InvalidInputError, match=words):
        PPO(lambda: Silent("none"), num_envs=2, **SMALL).learn(24)


def test_masks_of_nested_heads_are_found_by_their_path():
    two = spaces.Discrete(2)
    space = spaces.Dict(a=spaces.Dict(x=two), b=spaces.Dict(x=two))
    agent = PPO(lambda: Odd(BOX, space), num_envs=2, **SMALL)
    mask = {"a": {"x": np.array([0, 1])}, "b": {"x": np.array([1, 0])}}
    action, _ = agent.predict(np.zeros(3, np.float32), action_masks=mask)
    assert (int(action["a"]["x"]), int(action["b"]["x"])) == (1, 0)
    with pytest.raises(InvalidInputError, match=r"must name a\.x, b\.x, got x"):
        agent.predict(np.zeros(3, np.float32), action_masks={"x": np.array([0, 1])})


class Forgets(Chance):
    """Gives its mask not at reset, or not always."""

    def __init__(self, when):
        super().__init__("info")
        self.when, self.time = when, 0

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        return observation, {} if self.when == "reset" else info

    def step(self, action):
        self.masks = "none"
        *rest, _ = super().step(action)
        self.masks, self.time = "info", self.time + 1
        late = self.when == "later" and self.time > 5
        return *rest, {} if late else {"action_mask": legal(self.seen)}


@pytest.mark.parametrize(
    ("whens", "match"),
    [
        (["reset"] * 3, "at step 1, but none at reset. Return one from every"),
        (
            ["", "", "later"],
            "gave no info.* in environment 2 at step",
        ),
    ],
)
def test_a_mask_that_is_missing_is_never_taken_for_a_free_choice(whens, match):
    names = iter(whens)
    with pytest.raises(InvalidInputError, match=match):
        PPO(lambda: Forgets(next(names)), num_envs=3, **SMALL).learn(240)


def test_what_a_method_for_masks_raises_is_told():
    class Wrong(Chance):
        def action_masks(self):
            return self.no_such_thing

    with pytest.raises(
        InvalidInputError, match=r"raised in action_masks.*: AttributeError"
    ):
        PPO(lambda: Wrong("none"), num_envs=2, **SMALL).learn(24)


def test_wrapped_vectors_are_asked_for_masks_too():
    inner = vector(chance("method"), 2, AutoresetMode.SAME_STEP)
    wrapped = gymnasium.wrappers.vector.RecordEpisodeStatistics(inner)
    plain = vector(chance("method"), 2, AutoresetMode.SAME_STEP)
    assert_same_agents(*(PPO(env, **SMALL).learn(96) for env in (wrapped, plain)))


def test_what_environments_raise_or_give_becomes_one_line():
    class Raising(Seen):
        def reward(self, action):
            raise RuntimeError("a\nb")

    class Unknown(Seen):
        def reward(self, action):
            return math.nan

    class Blind(Seen):
        def show(self):
            return np.full(2, np.nan, np.float32)

    for make, match in (
        (Raising, r"in step\(\) at step 0 of environment 0: RuntimeError: a b"),
        (Unknown, "Unknown gave the reward nan in environment 0 at step 0"),
        (Blind, "the observation of environment 0 of Blind at step 0 holds NaN"),
    ):
        with pytest.raises(InvalidInputError, match=match) as caught:
            PPO(make, num_envs=2, **SMALL).learn(24)
        assert "\n" not in str(caught.value)


def test_masks_head_by_head_are_the_same_as_after_each_other():
    heads = [np.arange(size) % 2 == index % 2 for index, size in enumerate(SIZES)]
    flat = np.concatenate(heads)
    padded = np.zeros((3, 5), bool)
    for index, head in enumerate(heads):
        padded[index, : len(head)] = head
    spec = PPO(chance("none"), num_envs=1, **SMALL).spec
    expected = torch.from_numpy(padded)
    for mask in (flat, flat.astype(np.int8), padded, heads, tuple(heads), [*flat]):
        rows = spec.head_masks(spec.mask_row(mask)[None], 1)
        assert torch.equal(rows[0], expected)
    by_head = tuple(np.stack([head, head]) for head in heads)
    assert torch.equal(spec.head_masks(by_head, 2)[1], expected)


@pytest.mark.parametrize(("scale", "shift"), [*product([1e-3, 1.0, 1e4], [0.0, 50.0])])
def test_observation_statistics_are_those_of_all_rows_seen(scale, shift):
    class Scaled(Chance):
        def _show(self):
            observation, info = super()._show()
            self.kept.append(scale * observation + shift)
            return self.kept[-1].astype(np.float32), info

        kept: list = []  # noqa: RUF012

    Scaled.kept = []
    agent = PPO(lambda: Scaled("none"), num_envs=1, **SMALL).learn(120)
    # Every observation that a policy reads is counted once.
    rows, moments = np.array(Scaled.kept), agent.observations.moments
    ends = len(rows) - 121  # final observations are not counted
    assert moments.count == 121
    assert ends > 0
    np.testing.assert_allclose(moments.mean, rows.mean(0), atol=0.4 * scale)
    deviation = np.sqrt(moments.square / 121)
    np.testing.assert_allclose(deviation, rows.std(0), rtol=0.2)
    normal = moments.normalize(rows.astype(np.float32))
    assert np.abs(normal).max() < 6
    assert 0.7 < normal.std() < 1.3


def forged(agent, file, **changes):
    """A saved agent with other facts, sealed again."""
    agent.save(file)
    tensors, manifest = read_safetensors(file)
    facts = deepcopy(manifest.facts)
    for dotted, value in changes.items():
        *path, last = dotted.split("__")
        inner = facts
        for name in path:
            inner = inner[name]
        inner[last] = value
    file.write_bytes(pack(tensors, replace(manifest, facts=facts)))
    return file


HUGE_BOX = {"kind": "Box", "low": "0", "high": "1", "shape": [10**9], "dtype": "uint8"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"settings__width": 10**9}, "less than or equal to 65536"),
        ({"settings__width": 60_000}, "'width' is 60000, which no tensor"),
        ({"settings__width": 33}, "does not fit"),
        ({"settings__layers": 10**5}, "less than or equal to 64"),
        ({"settings__layers": 1.0}, "valid integer"),
        ({"settings__memory": "os.system"}, "memory: Input should be"),
        ({"settings__girth": 1}, "girth"),
        ({"settings__num_envs": "16"}, "num_envs"),
        ({"settings": []}, "TypeError"),
        ({"action_space__n": 10**10}, "a space has"),
        ({"action_space__n": 1 << 19}, "does not fit"),
        ({"action_space__n": -1}, "a space has the size"),
        ({"action_space__dtype": "O"}, "dtype 'O'"),
        ({"action_space__kind": "Graph"}, "no space 'Graph'"),
        ({"observation_space": HUGE_BOX}, "a space has"),
        ({"observation_space": {**HUGE_BOX, "shape": [1 << 19]}}, "which no tensor"),
        ({"observation_space__low": [["x"]]}, "ValueError"),
        ({"observation_space__shape": [4, -1]}, "a space has the size"),
        ({"observation_space": {"kind": "Tuple", "spaces": []}}, "is empty"),
        ({"head_relevance": [[True] * 3]}, "head_relevance must be"),
        ({"head_relevance": 5}, "TypeError"),
    ],
)
def test_a_file_does_not_decide_how_much_memory_is_taken(tmp_path, changes, words):
    agent = PPO("CartPole-v1", num_envs=2, memory="mingru", **SMALL)
    file = forged(agent, tmp_path / "agent.safetensors", **changes)
    tracemalloc.start()
    with pytest.raises(InvalidInputError, match=words) as refused:
        PPO.load(file)
    assert tracemalloc.get_traced_memory()[1] < 16 << 20
    tracemalloc.stop()
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) <= 200


def test_an_agent_of_before_a_setting_has_what_was_then(tmp_path):
    agent = PPO("CartPole-v1", num_envs=2, memory="mingru", **SMALL)
    file = tmp_path / "agent.safetensors"
    agent.save(file)
    tensors, manifest = read_safetensors(file)
    facts = deepcopy(manifest.facts)
    assert facts["settings"].pop("exploration_coef") > 0
    file.write_bytes(pack(tensors, replace(manifest, facts=facts)))
    assert PPO.load(file).settings.exploration_coef == 0.0


def test_a_rollout_takes_no_memory_without_environments(tmp_path):
    agent = PPO("CartPole-v1", num_envs=2, memory="mingru", **SMALL)
    sizes = {"settings__num_envs": 65_536, "settings__rollout_steps": 65_536}
    file = forged(agent, tmp_path / "agent.safetensors", **sizes)
    assert PPO.load(file).agent.buffer.nbytes < 1 << 20
