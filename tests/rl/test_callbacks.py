"""Callbacks of `learn`: they see what is learnt and change nothing of it."""

import sys

import gymnasium
import numpy as np
import pytest
import torch

from esper import PPO
from esper.contracts.errors import InvalidInputError
from esper.rl.callbacks import (
    CheckpointCallback,
    EvalCallback,
    OptunaPruning,
    VideoCallback,
)
from esper.training.loop import Callback
from tests.rl.environments import Late

SMALL = {"num_envs": 4, "rollout_steps": 16, "width": 8, "seed": 0}


def learnt(**options):
    agent = PPO("CartPole-v1", memory="conv-mingru", **SMALL)
    return agent.learn(4 * 16 * 6, **options)


def weights(agent):
    return torch.cat([p.detach().flatten() for p in agent.policy.parameters()])


def test_evaluating_and_saving_change_nothing_that_is_learnt(tmp_path):
    best, every = tmp_path / "best.safetensors", tmp_path / "at-{steps}.safetensors"
    evaluate = EvalCallback(every=2, episodes=3, keep_best=best)
    agent = learnt(callback=[evaluate, CheckpointCallback(every, every=4)])
    assert torch.equal(weights(agent), weights(learnt()))
    assert [steps for steps, _ in evaluate.history] == [128, 256, 384]
    means = [found.mean for _, found in evaluate.history]
    assert evaluate.best == max(means)
    kept = PPO.load(best, env="CartPole-v1")
    assert kept.evaluate(3).mean == max(means)
    assert kept.env_steps == evaluate.history[means.index(max(means))][0]
    middle = PPO.load(str(every).format(steps=256), env="CartPole-v1")
    assert middle.env_steps == 256
    assert middle.progress == pytest.approx(3 / 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "at-256.safetensors",
        "best.safetensors",
    ]


def test_an_evaluation_can_end_the_training():
    assert learnt(callback=EvalCallback(every=1, episodes=2, stop_at=1.0)).rounds == 1
    frozen = EvalCallback(every=1, episodes=2, patience=2, stop_at=1e9)
    frozen.best = 1e9
    assert learnt(callback=frozen).rounds == 2


def test_an_evaluation_does_not_reset_the_environments_of_the_training():
    vector = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    agent = PPO(vector, rollout_steps=16, width=8)
    with pytest.raises(InvalidInputError, match="EvalCallback would reset the vector"):
        agent.learn(64, callback=EvalCallback(every=1))
    agent.learn(64, callback=EvalCallback(every=1, episodes=2, env="CartPole-v1"))
    with pytest.raises(InvalidInputError, match="every must be a positive integer"):
        EvalCallback(every=0)
    with pytest.raises(InvalidInputError, match="patience must be a positive integer"):
        EvalCallback(patience=0)


def test_a_folder_in_place_of_a_file_is_refused_before_the_training(tmp_path):
    with pytest.raises(InvalidInputError, match="is a folder"):
        EvalCallback(keep_best=tmp_path)
    with pytest.raises(InvalidInputError, match="is a folder"):
        CheckpointCallback("checkpoints/")


def test_all_callbacks_are_closed_after_an_error_in_one_of_them():
    closed = []

    class Fails(Callback):
        """Cannot be closed."""

        def on_close(self):
            closed.append(self)
            raise OSError("full")

    both = [Fails(), Fails()]
    with pytest.raises(OSError, match="full"):
        PPO("CartPole-v1", **SMALL).learn(64, callback=both)
    assert closed == both


def test_optuna_prunes_trials():
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=1e9)
    )
    study.optimize(
        lambda trial: learnt(callback=OptunaPruning(trial)).evaluate(2).mean, n_trials=1
    )
    assert study.trials[0].state == optuna.trial.TrialState.PRUNED
    both = optuna.create_study(direction="maximize")
    found = EvalCallback(every=3, episodes=2)

    def objective(trial):
        learnt(callback=[found, OptunaPruning(trial)])
        return found.best

    both.optimize(objective, n_trials=1)
    reported = both.trials[0].intermediate_values
    assert reported == {steps: result.mean for steps, result in found.history}


class Film(Late):
    """Shows its time as brightness."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    horizon = 6

    def __init__(self, render_mode="rgb_array"):
        self.render_mode = render_mode

    def render(self):
        return np.full((32, 48, 3), 40 * self.time, np.uint8)


def frames(file):
    reader = pytest.importorskip("imageio").get_reader(file, format="ffmpeg")
    with reader:
        return [frame.mean() for frame in reader]


@pytest.mark.filterwarnings("ignore")  # of moviepy and imageio
def test_videos_show_one_episode_and_change_nothing_that_is_learnt(tmp_path):
    pytest.importorskip("moviepy")
    agents = []
    for callback in (None, VideoCallback(tmp_path / "films", every=2)):
        agent = PPO(Film, memory="gru", **SMALL)
        agents.append(agent.learn(4 * 16 * 5, callback=callback))
    assert torch.equal(*map(weights, agents))
    films = tmp_path / "films"
    names = ["steps-128.mp4", "steps-256.mp4", "steps-320.mp4"]
    assert sorted(p.name for p in films.iterdir()) == names
    shown = frames(films / names[0])
    assert np.abs(np.array(shown) - 40 * np.arange(7)).max() < 8


@pytest.mark.parametrize(
    ("env", "given", "words"),
    [
        (lambda: Film(None), None, "ValueError: its render_mode is None. Give an id"),
        (Film(), None, "the environment of the agent cannot be copied"),
        (
            gymnasium.make_vec("CartPole-v1", 2, vectorization_mode="sync"),
            None,
            "recorded: TypeError: 'SyncVectorEnv' object is not callable. Give an id",
        ),
        (Film, lambda: 1 / 0, "no video can be recorded: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_recorded_is_refused_at_the_start(env, given, words, tmp_path):
    pytest.importorskip("moviepy")
    agent = PPO(env, rollout_steps=4, width=8)
    with pytest.raises(InvalidInputError, match=words):
        agent.learn(8, callback=VideoCallback(tmp_path, env=given))
    assert agent.rounds == 0


def test_videos_name_the_package_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(InvalidInputError, match=r"need moviepy\. Run pip install"):
        VideoCallback(tmp_path)
