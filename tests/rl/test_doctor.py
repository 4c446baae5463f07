"""`examine` finds the faults of broken environments and none in good ones."""

import re

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from esper.cli import main
from esper.contracts.errors import InvalidInputError
from esper.rl.doctor import examine
from tests.hostile_envs import Tame
from tests.rl.environments import Chance, Factored, Native, Remembered, Tabled, vector


class Walk(Tame):
    """A good environment: a random walk that ends at its bounds or after 60 steps."""

    limit = 60


def broken(**methods):
    """A `Walk` with other methods or attributes."""
    return type("Broken", (Walk,), methods)


def masked(function):
    """A `Walk` whose info has a mask."""
    return broken(info=lambda self: {"action_mask": function(self)})


class OldReset(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed)[0]


class OldStep(Walk):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated or truncated, info


class Raises(Walk):
    def step(self, action):
        if self.time == 3:
            raise RuntimeError("bad\nvalue")
        return super().step(action)


class ForbidsWrongly(Walk):
    """The mask allows what then raises."""

    def info(self):
        return {"action_mask": np.array([True, True, True])}

    def step(self, action):
        assert action != 2, "no such action"
        return super().step(action)


class OnlyOne(Walk):
    """A second one cannot be made before the first one is closed."""

    lives = False

    def __init__(self):
        if OnlyOne.lives:
            raise RuntimeError("in use")
        OnlyOne.lives = True

    def close(self):
        OnlyOne.lives = False


class Swallowed(Walk):
    """Returns a time limit as a termination."""

    def step(self, action):
        observation, reward, _, truncated, info = super().step(action)
        return observation, reward, truncated, False, info


class Both(Walk):
    """Sets both flags at every end."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        ended = terminated or truncated
        return observation, reward, ended, ended, info


class Idle(Walk):
    """Actions have no effect."""

    def step(self, action):
        return super().step(1)


class IdleHead(Walk):
    """The second of two heads has no effect."""

    action_space = spaces.MultiDiscrete([3, 4])

    def step(self, action):
        return super().step(action[0])


class Alias(Walk):
    buffer = None

    def show(self):
        if self.buffer is None:
            self.buffer = super().show()
        self.buffer[:] = super().show()
        return self.buffer


class Unseeded(Walk):
    def show(self):
        return super().show() * np.float32(np.random.default_rng().random())


class Leaks(Walk):
    """Every episode of an environment starts further to the right."""

    begun = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.begun += 1
        self.place += 1e-3 * self.begun
        return self.show(), {}


class Shares(Walk):
    """The steps of one environment move all of them."""

    wind = [0.0]  # noqa: RUF012

    def reset(self, *, seed=None, options=None):
        self.wind[0] = 0.0
        return super().reset(seed=seed)

    def step(self, action):
        self.wind[0] += 0.01
        self.place += self.wind[0]
        return super().step(action)


class Counts(Walk):
    """Counts steps in the class, also across resets."""

    steps = 0

    def step(self, action):
        Counts.steps += 1
        self.place += 1e-3 * Counts.steps
        return super().step(action)


class OneStream(Walk):
    """All environments draw from one generator of the class."""

    chance = np.random.default_rng(0)
    made = 0

    def __init__(self):
        OneStream.made += 1

    def show(self):
        return super().show() * np.float32(self.chance.random())


class UnseededCounter(Unseeded):
    """Also has a counter in the class, which has no effect."""

    made = 0

    def reset(self, *, seed=None, options=None):
        UnseededCounter.made += 1
        return super().reset(seed=seed)


class LateShape(Walk):
    def show(self):
        return super().show() if self.time < 5 else np.zeros(3, np.float32)


class Loses(Native):
    """Resets in the same step without `final_obs`."""

    def step(self, actions):
        *rest, info = super().step(actions)
        info.pop("final_obs", None)
        return (*rest, info)


def without_mode():
    env = vector(Walk, 2, AutoresetMode.NEXT_STEP)
    del env.metadata["autoreset_mode"]
    return env


class Endless(Walk):
    def step(self, action):
        observation, reward, *_, info = super().step(action)
        return observation, reward, False, False, info


BROKEN = {
    "reset without info": (OldReset, "reset.. did not return an observation and"),
    "step of four": (OldStep, "step.. did not return five values"),
    "raises": (Raises, r"step 3: step\(\d\) raised RuntimeError: bad value"),
    "out of bounds": (
        broken(show=lambda self: np.full(2, 10, np.float32)),
        "step 0: the observation ranges from 10 to 10, outside the bounds",
    ),
    "dtype": (
        broken(show=lambda self: np.zeros(2)),
        "has the dtype float64, the space",
    ),
    "shape": (LateShape, r"step 4: the observation has the shape \(3,\)"),
    "nan": (
        broken(show=lambda self: np.full(2, np.nan, np.float32)),
        "holds NaN or infinity",
    ),
    "nan reward": (broken(reward=lambda self: float("nan")), "the reward is nan"),
    "text reward": (broken(reward=lambda self: "much"), "the reward is 'much'"),
    "huge reward": (
        broken(reward=lambda self: 1e7),
        "the largest absolute reward is 1e.07",
    ),
    "tiny reward": (
        broken(reward=lambda self: 1e-7),
        "the largest absolute reward is 1e-07",
    ),
    "endless": (Endless, "no episode ended in 600 steps"),
    "constant": (
        broken(show=lambda self: np.zeros(2, np.float32)),
        "the observation never changed",
    ),
    "alias": (Alias, "step 0: the observation that was returned before changed"),
    "seed": (Unseeded, "two new environments differ from the same seed"),
    "leak": (Leaks, "differs from its repetition.*in reset"),
    "counts in the class": (Counts, "and the class attribute Counts.st"),
    "a generator in the class": (
        OneStream,
        "the class attribute OneStream.chance",
    ),
    "seed and a count": (UnseededCounter, "two new environments differ from the same"),
    "both flags": (Both, "terminated and truncated were both True at all"),
    "additive mask": (
        masked(lambda self: np.array([0.0, -np.inf, 0.0])),
        "the mask of environment 0 holds -inf",
    ),
    "shared": (Shares, "differs while another environment is stepped"),
    "empty mask": (masked(lambda self: np.zeros(3, bool)), "allows nothing for head"),
    "wide mask": (masked(lambda self: np.ones(4, bool)), r"3 entries.*got \[4\]"),
    "late mask": (
        broken(
            info=lambda self: {} if self.time > 7 else {"action_mask": np.ones(3, bool)}
        ),
        "step 8: info.'action_mask'. existed at the first reset and is missing now",
    ),
    "mask only after reset": (
        broken(
            info=lambda self: {"action_mask": np.ones(3, bool)} if self.time else {}
        ),
        "step 1: info.'action_mask'. exists now and was missing at the first reset",
    ),
    "mask method raises": (
        broken(action_masks=lambda self: self.no_such_thing),
        r"action_masks\(\) raised AttributeError",
    ),
    "only one": (
        OnlyOne,
        "the constructor of a second one raised RuntimeError: in use",
    ),
    "mask allows what raises": (ForbidsWrongly, r"step\(2\) raised AssertionError"),
    "text space": (
        broken(observation_space=spaces.Text(3), show=lambda self: "abc"),
        "is a Text, which is not supported",
    ),
    "flag": (
        type("Flag", (Walk,), {"step": lambda s, a: (*Walk.step(s, a)[:3], 0, {})}),
        "truncated is 0, a int",
    ),
    "lost observation": (lambda: Loses(Walk, 2), "the last observation is lost"),
    "no autoreset mode": (without_mode, "autoreset_mode'. is missing"),
}
GOOD = {
    "walk": Walk,
    "masks in the info": lambda: Chance("info"),
    "masks by a method": lambda: Chance("method"),
    "masks in the observation": lambda: Chance("observation"),
    "masks as a table": lambda: Tabled("none"),
    "dict of heads": Factored,
    "a short clock": Remembered,
    "vector": lambda: Native(Walk, 2),
    **{
        name: lambda name=name: gymnasium.make(name, disable_env_checker=True)
        for name in (
            "CartPole-v1",
            "Acrobot-v1",
            "MountainCar-v0",
            "Pendulum-v1",
            "MountainCarContinuous-v0",
            "FrozenLake-v1",
            "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3",
            "Blackjack-v1",
        )
    },
}


NOTED = {
    "swallowed limit": (Swallowed, "terminated after exactly 60 steps.*truncated=True"),
    "constant reward": (
        broken(reward=lambda self: 0.0),
        "the reward was always 0 in 600 steps",
    ),
    "idle": (Idle, "episodes were the same for 50 steps with any action"),
    "idle with masks": (
        type("Masked", (Idle,), {"info": lambda s: {"action_mask": np.ones(3, bool)}}),
        "episodes were the same for 50 steps with any action",
    ),
    "idle head": (IdleHead, r"the same for 50 steps with any choice of 'action\.1'"),
    "huge numbers": (
        broken(
            observation_space=spaces.Box(-np.inf, np.inf, (2,), np.float32),
            show=lambda self: np.array([self.place, 3e8 + self.time], np.float32),
        ),
        r"the observation has the absolute value 3e\+08",
    ),
}
WITH_NOTES = ("masks", "MountainCar-v0", "FrozenLake", "Acrobot", "Taxi")
"""Good environments with notes: rewards are rare, or actions have no effect."""


def test_many_environments_are_examined():
    assert len(BROKEN) >= 20
    assert len(GOOD) >= 10


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_environment_is_diagnosed(name):
    make, words = BROKEN[name]
    findings = examine(make, steps=600)
    assert any(finding.is_fault for finding in findings)
    text = " | ".join(map(str, findings))
    assert re.search(words, text), text
    assert "\n" not in text
    assert len(findings) <= 2


@pytest.mark.parametrize("name", GOOD)
def test_a_good_environment_has_no_faults(name):
    findings = examine(GOOD[name], steps=600)
    assert not any(finding.is_fault for finding in findings)
    assert not findings or name.startswith(WITH_NOTES)


@pytest.mark.parametrize("name", NOTED)
def test_a_possible_problem_is_a_note(name):
    make, words = NOTED[name]
    (finding,) = examine(make, steps=600)
    assert not finding.is_fault
    assert re.search(f"^note, step .*{words}", str(finding))


def test_the_command_prints_findings_and_sets_its_exit_code(capsys):
    assert main(["doctor", "CartPole-v1", "--steps", "300"]) == 0
    assert "no faults found in 300 steps" in capsys.readouterr().out
    gymnasium.register("esper-test/Alias-v0", Alias)
    assert main(["doctor", "esper-test/Alias-v0", "--steps", "50"]) == 1
    assert capsys.readouterr().out.startswith("step 0: the observation that was")
    gymnasium.register("esper-test/Swallowed-v0", Swallowed)
    assert main(["doctor", "esper-test/Swallowed-v0", "--steps", "600"]) == 0
    shown = capsys.readouterr().out
    assert re.search("^note, step 600: .*\n.*no faults found in 600 steps", shown)
    assert main(["doctor", "Nonsense-v0"]) == 2
    with pytest.raises(InvalidInputError, match="Nonsense-v0 cannot be made"):
        examine("Nonsense-v0")
