"""Environments that raise, hang, lie or harm the process that they run in.

    register()
    run_hostile("step_exits", "doctor", folder)

`register` gives each the id `hostile/NAME-v0`; importing this module does so too, so
`esper doctor tests.hostile_envs:hostile/step_exits-v0` works from a shell. Those in
`IN_PROCESS_OF_ITS_OWN` would harm the process of the tests.
"""

import ctypes
import io
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from esper.cli import main
from esper.runs.run import Run
from tests.cli.calls import environment

CODES = {0, 1, 2, 4, 5, 6, 130, 143}
"""Exit codes of `esper doctor` and `esper ppo`."""
ESCAPE = "\x1b[2J\x1b]0;owned\x07\r\n\u202e"
SECONDS, PATIENT = 0.5, 60.0
"""Deadline of a call that hangs, and of others, on a busy machine too."""
LONG = 600.0


class Tame(gymnasium.Env):
    """A random walk without faults; the others change one thing."""

    observation_space = spaces.Box(-9.0, 9.0, (2,), np.float32)
    action_space = spaces.Discrete(3)
    limit = 30

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.time = float(self.np_random.normal()), 0
        return self.show(), self.info()

    def step(self, action):
        self.place += 0.5 * (int(action) - 1) + 0.5 * float(self.np_random.normal())
        self.time += 1
        over = abs(self.place) > 6
        return self.show(), self.reward(), over, self.time >= self.limit, self.info()

    def show(self):
        place = np.clip(self.place, -9, 9)
        return np.array([place, np.sin(place)], np.float32)

    def reward(self):
        return 1.0 - abs(self.place) / 9

    def info(self):
        return {}


class Strange(BaseException):
    """Neither an Exception nor one of Python's own."""


class Unprintable(Exception):  # noqa: N818
    def __str__(self):
        raise RuntimeError("no text")


def raising(error):
    """A method that raises."""

    def method(self, *args, **options):
        raise error() if isinstance(error, type) else error

    return method


def sleep(self, *args, **options):
    time.sleep(LONG)


def busy(self, *args, **options):
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        pass


def recurse(self, *args, **options):
    return recurse(self, *args, **options)


def raise_local(self, *args, **options):
    class Local(Exception):  # noqa: N818
        """Cannot be pickled."""

        def __init__(self, one, two):
            super().__init__(one)
            self.hold = lambda: two

    raise Local("local", 2)


def swallow(self, *args, **options):
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        try:
            time.sleep(LONG)
        except BaseException:
            continue


def hold_gil(self, *args, **options):
    sum(itertools.repeat(0))


def sleep_in_c(self, *args, **options):
    """The system call begins again after every signal, outside of Python."""
    while ctypes.CDLL(None).usleep(900_000) in (0, -1):
        ctypes.CDLL(None).poll(None, 0, 10**6)


def ignore_alarm(self, *args, **options):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    time.sleep(LONG)


def exit_at_once(self, *args, **options):
    os._exit(0)


def crash(self, *args, **options):
    os.kill(os.getpid(), signal.SIGSEGV)


def step_of(index, value):
    """A step in which one of the five values is another."""

    def step(self, action):
        found = list(Tame.step(self, action))
        found[index] = value(self) if callable(value) else value
        return tuple(found)

    return step


def masked(mask):
    """An info with a mask."""
    return lambda self: {"action_mask": mask(self) if callable(mask) else mask}


def close_output(self, *args, **options):
    sys.stdout.close()
    return Tame.reset(self, *args, **options)


def close_descriptor(self, *args, **options):
    if not getattr(Tame, "closed", False):
        Tame.closed = True
        os.close(1)
    return Tame.reset(self, *args, **options)


def seed_everything(self, action):
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)
    torch.manual_seed(0)
    return Tame.step(self, action)


def start_thread(self, *args, **options):
    threading.Thread(target=time.sleep, args=(LONG,)).start()
    return Tame.reset(self, *args, **options)


def grow(self):
    return np.zeros(2 + self.time, np.float32)


class Huge(spaces.Box):
    """Says that it has a thousand million numbers, without memory for them."""

    def __init__(self):
        super().__init__(-1.0, 1.0, (2,), np.float32)
        self._shape = (10**9,)


class Liar(spaces.Box):
    """A space whose questions raise."""

    def __init__(self):
        super().__init__(-9.0, 9.0, (2,), np.float32)

    def contains(self, x):
        raise SystemExit(0)


def changing(self):
    Tame.made = getattr(Tame, "made", 2) + 1
    self.observation_space = spaces.Box(-9.0, 9.0, (Tame.made,), np.float32)


def aliased(self):
    if not hasattr(self, "buffer"):
        self.buffer = np.zeros(2, np.float32)
    self.buffer += 0.25
    return self.buffer


def exiting_space(self):
    raise SystemExit(0)


HOSTILE = {
    "init_raises": {"__init__": raising(ValueError("bad"))},
    "init_exits": {"__init__": raising(SystemExit(0))},
    "init_interrupts": {"__init__": raising(KeyboardInterrupt)},
    "init_memory": {"__init__": raising(MemoryError)},
    "init_strange": {"__init__": raising(Strange("odd"))},
    "init_sleeps": {"__init__": sleep},
    "reset_raises": {"reset": raising(ValueError("bad"))},
    "reset_exits": {"reset": raising(SystemExit(0))},
    "reset_interrupts": {"reset": raising(KeyboardInterrupt)},
    "reset_recursion": {"reset": recurse},
    "reset_sleeps": {"reset": sleep},
    "reset_busy": {"reset": busy},
    "reset_none": {"reset": lambda self, **options: None},
    "reset_alone": {"reset": lambda self, **options: Tame.reset(self)[0]},
    "step_raises": {"step": raising(RuntimeError("bad\nword"))},
    "step_exits": {"step": raising(SystemExit(0))},
    "step_exits_with_text": {"step": raising(SystemExit(ESCAPE))},
    "step_generator": {"step": raising(GeneratorExit)},
    "step_strange": {"step": raising(Strange(ESCAPE))},
    "step_interrupts": {"step": raising(KeyboardInterrupt)},
    "step_memory": {"step": raising(MemoryError)},
    "step_recursion": {"step": recurse},
    "step_local": {"step": raise_local},
    "step_unprintable": {"step": raising(Unprintable)},
    "step_escapes": {"step": raising(RuntimeError(ESCAPE))},
    "step_long": {"step": raising(RuntimeError("x" * 10**7))},
    "step_sleeps": {"step": sleep},
    "step_busy": {"step": busy},
    "step_swallows": {"step": swallow},
    "step_holds_gil": {"step": hold_gil},
    "step_sleeps_in_c": {"step": sleep_in_c},
    "step_ignores_alarm": {"step": ignore_alarm},
    "step_ends_process": {"step": exit_at_once},
    "step_crashes": {"step": crash},
    "step_four": {"step": lambda self, action: Tame.step(self, action)[:4]},
    "step_none": {"step": lambda self, action: None},
    "close_raises": {"close": raising(RuntimeError(ESCAPE))},
    "close_exits": {"close": raising(SystemExit(0))},
    "close_sleeps": {"close": sleep},
    "render_raises": {"render": raising(RuntimeError("bad"))},
    "nan": {"show": lambda self: np.full(2, np.nan, np.float32)},
    "infinity": {"show": lambda self: np.full(2, np.inf, np.float32)},
    "large": {"show": lambda self: np.full(2, 3e38, np.float32)},
    "wrong_shape": {"show": lambda self: np.zeros(3, np.float32)},
    "wrong_dtype": {"show": lambda self: np.zeros(2, object)},
    "text": {"show": lambda self: ESCAPE},
    "nothing": {"show": lambda self: None},
    "shape_changes": {"show": grow},
    "ragged": {"show": lambda self: [1.0, [2.0, 3.0]]},
    "alias": {"show": aliased},
    "reward_nan": {"reward": lambda self: float("nan")},
    "reward_infinite": {"reward": lambda self: float("-inf")},
    "reward_huge": {"reward": lambda self: 1e300},
    "reward_digits": {"reward": lambda self: 10**400},
    "reward_array": {"reward": lambda self: np.zeros(3)},
    "reward_none": {"reward": lambda self: None},
    "reward_text": {"reward": lambda self: ESCAPE},
    "flag_text": {"step": step_of(2, "yes")},
    "flag_array": {"step": step_of(3, np.zeros(3, bool))},
    "info_none": {"info": lambda self: None},
    "info_list": {"step": step_of(4, [1, 2])},
    "info_escapes": {"info": lambda self: {ESCAPE: ESCAPE}},
    "mask_empty": {"info": masked(np.zeros(3, bool))},
    "mask_wide": {"info": masked(np.ones(7, bool))},
    "mask_text": {"info": masked(ESCAPE)},
    "mask_none": {"info": masked(None)},
    "mask_nan": {"info": masked(np.full(3, np.nan))},
    "mask_late": {"info": lambda self: {"action_mask": [1, 1, 1]} if self.time else {}},
    "mask_method_raises": {"action_masks": raising(RuntimeError(ESCAPE))},
    "mask_method_exits": {"action_masks": raising(SystemExit(0))},
    "mask_method_sleeps": {"action_masks": sleep},
    "space_none": {"observation_space": None},
    "space_text": {"observation_space": spaces.Text(4), "show": lambda self: "abc"},
    "space_exits": {"observation_space": property(exiting_space)},
    "space_lies": {"observation_space": Liar()},
    "space_changes": {"__init__": changing},
    "space_huge": {"observation_space": Huge()},
    "space_large_choice": {"observation_space": spaces.Discrete(10**12)},
    "action_huge": {"action_space": spaces.MultiDiscrete([10**9, 2])},
    "action_text": {"action_space": spaces.Text(4)},
    "escapes_in_keys": {
        "observation_space": spaces.Dict({ESCAPE: Tame.observation_space}),
        "show": lambda self: {ESCAPE: np.full(2, 99.0, np.float32)},
    },
    "negative_limit": {},
    "ends_at_once": {"step": step_of(2, True)},
    "closes_output": {"reset": close_output},
    "closes_descriptor": {"reset": close_descriptor},
    "seeds": {"step": seed_everything},
    "threads": {"reset": start_thread},
}
"""Methods and attributes in which each differs from `Tame`."""
HANGS = {sleep, busy, swallow, hold_gil, sleep_in_c, ignore_alarm}
IN_PROCESS_OF_ITS_OWN = {
    "step_swallows",
    "step_holds_gil",
    "step_sleeps_in_c",
    "step_ignores_alarm",
    "step_ends_process",
    "step_crashes",
    "closes_output",
    "closes_descriptor",
    "threads",
}
PROCESS = """
import sys
import esper.workers.deadline as deadline
from tests.hostile_envs import main
deadline.GRACE = 1.0
sys.exit(main())
"""
LIMITS = {"negative_limit": -5}


class Hostility(NamedTuple):
    """What a command did with an environment."""

    code: int
    out: str
    err: str
    seconds: float
    finished: bool
    """Whether a run of `esper ppo` is complete."""


def register():
    """Give each environment an id; may be called again."""
    for name, parts in HOSTILE.items():
        if f"hostile/{name}-v0" not in gymnasium.registry:
            made = type(name.title().replace("_", ""), (Tame,), dict(parts))
            limit = LIMITS.get(name)
            gymnasium.register(f"hostile/{name}-v0", made, max_episode_steps=limit)


def run_hostile(name, command, folder, *more):
    """Run `esper doctor` or `esper ppo` on one of them, with a short deadline.

    Args:
        name: One of `HOSTILE`.
        command: "doctor" or "ppo".
        folder: Of the run.
        more: Other options.
    """
    words = [command, f"tests.hostile_envs:hostile/{name}-v0", *more]
    hangs = any(part in HANGS for part in HOSTILE[name].values() if callable(part))
    deadline = str(SECONDS if hangs else PATIENT)
    if command == "doctor":
        words += ["--steps", "100", "--timeout", deadline]
    else:
        words += [
            "--total_steps",
            "128",
            "--num_envs",
            "2",
            "--rollout_steps",
            "16",
            "--width",
            "8",
        ]
        words += ["--episodes", "2", "--env_timeout", deadline]
        words += ["--checkpoint.every", "1", "--runs", str(folder), "--name", name]
    began = time.monotonic()
    if name in IN_PROCESS_OF_ITS_OWN:
        words = [sys.executable, "-c", PROCESS, *words]
        done = subprocess.run(
            words, env=environment(), capture_output=True, text=True, check=False
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    else:
        shown, told = io.StringIO(), io.StringIO()
        with redirect_stdout(shown), redirect_stderr(told):
            code = main(words)
        out, err = shown.getvalue(), told.getvalue()
    path = folder / name
    finished = path.is_dir() and Run.read(path).finished is not None
    return Hostility(code, out, err, time.monotonic() - began, finished)


def faults_of(name, command, found):
    """What must not be, of an outcome."""
    faults = []
    if found.code not in CODES:
        faults.append(f"exit code {found.code}")
    if "Traceback" in found.err or "Exception ignored" in found.err:
        faults.append("a traceback")
    if not (found.out + found.err).replace("\n", "").isprintable():
        faults.append("control characters")
    if command == "ppo" and found.code == 0 and not found.finished:
        faults.append("exit code 0, not finished")
    if found.code not in (0, 1) and found.err.count("\n") < 1:
        faults.append("no line")
    return [f"{name}, {command}: {fault}: {found}"[:600] for fault in faults]


register()


if __name__ == "__main__":
    import tempfile
    from pathlib import Path

    for chosen in sys.argv[2:] or HOSTILE:
        with tempfile.TemporaryDirectory() as place:
            result = run_hostile(chosen, sys.argv[1], Path(place))
            print(
                chosen, result.code, f"{result.seconds:.1f} s", result.err.strip()[:190]
            )
            print(*faults_of(chosen, sys.argv[1], result), sep="\n", end="")
            sys.stdout.flush()
