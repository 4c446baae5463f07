"""`esper ppo`: runs that are recorded, interrupted and resumed."""

import os
import shutil
import signal
import sys
from dataclasses import replace

import gymnasium
import pytest

from esper import PPO
from esper.cli import main
from esper.cli.train import report_interruption
from esper.contracts.errors import InvalidInputError, NumericsError, WorkersError
from esper.rl.training import (
    AGENT,
    PPORunConfig,
    begin_ppo,
    ppo_settings_of,
    resume_ppo,
)
from esper.runs.run import Run
from esper.runs.settings import as_toml, construct, table_of
from esper.runs.train_config import CheckpointConfig
from esper.training.loop import Callback, OnRoundEnd
from tests.rl.environments import Probe
from tests.training.killed_runs import rows_of, small_ppo, state_of

FRAGILE = "esper-test/Fragile-v0"


class Fragile(Probe):
    """Its process dies at the third episode while there is a certain file."""

    horizon = 10
    file = ""
    episodes = 0

    def reset(self, *, seed=None, options=None):
        self.episodes += 1
        if self.episodes == 3 and os.path.exists(self.file):
            os._exit(1)
        return super().reset(seed=seed)


@pytest.fixture
def fragile(tmp_path):
    Fragile.file = str(tmp_path / "fragile")
    gymnasium.register(FRAGILE, Fragile)
    yield tmp_path / "fragile"
    del gymnasium.registry[FRAGILE]


@pytest.mark.parametrize(
    "given",
    [
        {"memory": "conv-mingru"},
        {"num_envs": 4},
        {"memory": "lstm", "num_envs": 256},
        {"memory": "gru", "minibatches": 2, "exploration_coef": 0.0},
    ],
)
def test_defaults_that_depend_on_settings_are_those_of_python(given):
    """On the command line, in a file and in Python."""
    config, expected = construct(PPORunConfig, given), PPORunConfig(**given)
    assert config == expected
    assert construct(PPORunConfig, table_of(as_toml(config), PPORunConfig)) == config


def test_a_run_of_before_a_setting_has_what_was_then(tmp_path):
    config = replace(small_ppo(tmp_path, "old", 1), memory="mingru")
    run = begin_ppo(config).path
    text = (run / "config.toml").read_text()
    line = f"exploration_coef = {config.exploration_coef}\n"
    (run / "config.toml").write_text(text.replace(line, ""))
    assert ppo_settings_of(Run.read(run)).exploration_coef == 0.0


def test_a_run_that_a_signal_ends_goes_on_to_the_same_bits(tmp_path):
    def interrupt(record):
        if record.round == 2:  # the next is the last; it has no checkpoint
            os.kill(os.getpid(), signal.SIGTERM)

    whole, halved = (small_ppo(tmp_path, name, 5) for name in ("whole", "halved"))
    assert begin_ppo(whole).signal is None
    result = begin_ppo(halved, [OnRoundEnd(interrupt)])
    assert (result.signal, result.rounds) == (signal.SIGTERM, 3)
    assert Run.read(result.path).checkpoints().steps() == [0, 2]
    assert resume_ppo(result.path).rounds == 5
    assert state_of(result.path) == state_of(tmp_path / "whole")
    assert rows_of(result.path) == rows_of(tmp_path / "whole")


def test_a_death_at_the_end_neither_loses_nor_doubles_the_verdict(
    tmp_path, monkeypatch
):
    """Killed when all is stored, before the run is marked as complete."""
    whole = rows_of(begin_ppo(small_ppo(tmp_path, "whole", 2)).path)
    stored = []

    def die(run, facts):
        stored.append(rows_of(run.path))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            begin_ppo(small_ppo(tmp_path, "run", 2))
    resume_ppo(tmp_path / "run")
    assert [*stored, rows_of(tmp_path / "run")] == [whole, whole]


class OnMessage(Callback):
    """Keeps what is said."""

    def __init__(self, told):
        self.told = told

    def on_message(self, text, **more):
        self.told.append(text)


class Spoilt(Probe):
    """Its rewards are NaN."""

    def reward(self, action):
        return float("nan")


def test_a_run_names_the_environment_that_gives_no_finite_numbers(tmp_path):
    gymnasium.register("esper-test/Spoilt-v0", Spoilt)
    config = replace(small_ppo(tmp_path, "run", 2), env="esper-test/Spoilt-v0")
    words = "Spoilt-v0 gave the reward nan in environment 0 .* correct its environment"
    with pytest.raises(NumericsError, match=words):
        begin_ppo(config)
    del gymnasium.registry["esper-test/Spoilt-v0"]


class Forever(Probe):
    """Its episodes do not end."""

    def step(self, action):
        return self.show(), 1.0, False, False, {}


def test_an_agent_that_cannot_be_judged_is_kept_and_the_run_is_complete(
    tmp_path, monkeypatch
):
    gymnasium.register("esper-test/Forever-v0", Forever)
    monkeypatch.setitem(PPO.evaluate.__kwdefaults__, "max_steps", 20)
    config = replace(small_ppo(tmp_path, "run", 2), env="esper-test/Forever-v0")
    told = []
    path = begin_ppo(config, [OnMessage(told)]).path
    del gymnasium.registry["esper-test/Forever-v0"]
    assert any("not evaluated: some episode did not end within 20" in t for t in told)
    assert Run.read(path).finished["rounds"] == 2
    assert PPO.load(path / AGENT).rounds == 2


def test_an_interruption_says_what_will_be_played_again(tmp_path, capsys):
    config = replace(
        small_ppo(tmp_path / "my runs", "run", 5), checkpoint=CheckpointConfig(every=9)
    )

    def interrupt(record):
        if record.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    (tmp_path / "my runs").mkdir()
    result = begin_ppo(config, [OnRoundEnd(interrupt)])
    assert report_interruption(result, "ppo") == 128 + signal.SIGTERM
    words = "rounds after 0 will be repeated. Resume with: esper ppo"
    assert f"{words} --resume '" in capsys.readouterr().out


def test_groups_of_settings_keep_what_is_not_given():
    given = {
        "env": "CartPole-v1",
        "entropy_coef": 0.02,
        "checkpoint.last": 3,
    }
    made, usual = construct(PPORunConfig, given), PPORunConfig(env="CartPole-v1")
    assert made == replace(usual, entropy_coef=0.02)


def test_what_a_death_left_of_old_checkpoints_is_removed(tmp_path):
    """Killed after its last save, before an older one was removed."""
    aside, kept = tmp_path / "aside", tmp_path / "run" / "checkpoints"

    def copy(record):
        if record.round == 4:
            shutil.copytree(kept, aside)

    path = begin_ppo(small_ppo(tmp_path, "run", 10), [OnRoundEnd(copy)]).path
    steps = Run.read(path).checkpoints().steps()
    shutil.copytree(aside, kept, dirs_exist_ok=True)
    assert Run.read(path).checkpoints().steps() != steps
    (path / "finished.json").unlink()
    assert resume_ppo(path).rounds == 10
    assert Run.read(path).checkpoints().steps() == steps


def test_a_process_that_dies_ends_a_run_that_can_be_resumed(fragile, tmp_path):
    settings = small_ppo(tmp_path, "run", 3)
    fields = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    settings = type(settings)(**fields | {"env": FRAGILE, "vectorization": "async"})
    fragile.touch()
    words = r"environment \d of .*Fragile-v0 died in step\(\) at step \d+.*--resume"
    with pytest.raises(WorkersError, match=words) as caught:
        begin_ppo(settings)
    assert "\n" not in str(caught.value)
    fragile.unlink()
    assert resume_ppo(tmp_path / "run").rounds == 3
    assert Run.read(tmp_path / "run").finished["rounds"] == 3


def test_the_command_learns_reports_and_refuses(capsys, tmp_path):
    runs = ["--runs", str(tmp_path)]
    given = [
        "--total_steps",
        "64",
        "--num_envs",
        "2",
        "--rollout_steps",
        "16",
        "--name",
        "one",
    ]
    assert main(["ppo", "CartPole-v1", *given, *runs, "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "return of 2 episodes" in shown
    assert (tmp_path / "one" / "report.html").is_file()
    assert PPO.load(tmp_path / "one" / AGENT).env_steps == 64
    assert main(["ppo", "--resume", "one", *runs]) == 0
    assert "already complete" in capsys.readouterr().out
    for bad, words in (
        (["ppo", *runs], "expected the id of an environment"),
        (["ppo", "Nonsense-v0", *runs], "Nonsense-v0 cannot be made"),
        (["ppo", "CartPole-v1", "--memory", "gruu", *runs], "gruu"),
        (
            ["ppo", "--resume", "one", "--num_envs", "3", *runs],
            "--num_envs cannot be combined",
        ),
        (["train", "--resume", "one", *runs], "was not started by esper train"),
    ):
        assert main(bad) == 2
        found = capsys.readouterr()
        assert words in found.err
        assert found.err.count("\n") == 1
    assert [run.name for run in Run.list(tmp_path)] == ["one"]


PLANTED = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv
gymnasium.register("planted/Pole-v0", CartPoleEnv, max_episode_steps=50)
"""


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """The id of an environment in a module that is not imported yet."""
    (tmp_path / "planted_module.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    yield "planted_module:planted/Pole-v0"
    forget_planted()


def forget_planted():
    sys.modules.pop("planted_module", None)
    gymnasium.registry.pop("planted/Pole-v0", None)


def test_a_module_that_a_run_names_is_not_imported_without_consent(
    planted, tmp_path, capsys
):
    def interrupt(record):
        if record.round == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    config = replace(small_ppo(tmp_path, "run", 4), env=planted)
    path = begin_ppo(config, [OnRoundEnd(interrupt)]).path
    report_interruption(
        begin_ppo(replace(config, name="other"), [OnRoundEnd(interrupt)]), "ppo"
    )
    assert f"--env {planted}" in capsys.readouterr().out
    forget_planted()
    resume = ["ppo", "--resume", str(path)]
    for more, words in (
        ([], f"--trust or --env {planted}"),
        (["--env", "CartPole-v1"], "'CartPole-v1'"),
        (["--env", "planted_module:planted/Pole-v1"], "planted/Pole-v1"),
    ):
        assert main([*resume, *more]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
    with pytest.raises(InvalidInputError, match="planted_module"):
        resume_ppo(path)
    assert "planted_module" not in sys.modules
    assert main([*resume, "--env", planted]) == 0
    assert "planted_module" in sys.modules
    assert resume_ppo(tmp_path / "other", trust=True).rounds == 4


def test_the_help_explains_trust(capsys):
    assert main(["ppo", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--trust" in shown
    assert "import the module that the run names in its environment id" in shown
