"""Checks an environment for problems that hurt learning.

`examine` steps an environment with random legal actions and checks every value that it
returns. It also compares episodes from the same seed and actions:

    two new environments differ                  the seed does not reproduce
    ... and a class attribute changed            environments share state
    the same environment differs when repeated   state leaks through reset
    it differs while another one is stepped      environments share state
    it is the same with other actions            actions have no effect
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import gymnasium
import numpy as np
import torch
from gymnasium import Env, Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from numpy.typing import NDArray

from esper.contracts.errors import EsperError, InvalidInputError, WorkersError
from esper.contracts.messages import described, one_line, quoted
from esper.rl.nested import first_of
from esper.rl.spaces import MASK, Part, SpaceSpec, parts_of, require_sizes
from esper.rl.vector import MASK_METHOD
from esper.workers.deadline import TIMEOUT, timed

Array = NDArray[Any]
Maker = Callable[[], Any]
MAX_REWARD: Final = 1e4
MIN_REWARD: Final = 1e-4
"""Range of the largest absolute reward."""
MIN_EPISODES: Final = 5
"""Episodes of the same length that indicate a time limit."""
MIN_TIME_LIMIT: Final = 10
"""Shortest fixed length that is taken for a time limit."""
MAX_CLOCK_NUMBERS: Final = 1_000
"""Largest observation that is searched for a clock."""
COMPARED_STEPS: Final = 50
TRIALS: Final = 4
"""Episodes that test whether actions have an effect."""
MAX_HEADS: Final = 8
"""Largest number of heads that are tested separately."""
MIN_BOTH_FLAGS: Final = 3
"""Episodes that must end with both flags for a fault."""
MAX_OBSERVATION: Final = 1e6
TIMEOUT_OPTION: Final = "--timeout"
ADVICE: Final = {
    "action": "Actions must change the observation, the reward or the end",
    "alias": "Return a copy; otherwise stored observations are overwritten",
    "alone": "Allow several environments at once, or use num_envs=1",
    "autoreset": "Set it to a gymnasium.vector.AutoresetMode",
    "bounds": "Clip it, or declare wider bounds",
    "close": "close() must not raise",
    "constant": "Return what the agent needs to choose an action",
    "dtype": "Convert it, or declare the other dtype",
    "endless": "Set a time limit: gymnasium.make(..., max_episode_steps=1000)",
    "final": "Return it, or reset in the next step",
    "flags": "Return terminated at terminal states, truncated at time limits",
    "huge": "Change its units; float32 loses small differences",
    "info": "Return a dict",
    "leak": "Reset all state in reset()",
    "mask": "Fix the mask",
    "mask missing": "Return it from every reset and step",
    "mixed": "Use autoregressive=True if a number depends on a choice, and "
    "head_relevance if only some choices use it",
    "nan": "Return finite numbers",
    "reset": "Accept the keywords seed and options",
    "reset result": "Return both, as in Gymnasium since 0.26",
    "reset_mask": "Accept options['reset_mask']",
    "reward": "Return one finite number",
    "reward constant": "PPO needs rewards that differ; if they are rare, more steps",
    "scale": "Scale rewards so that a good episode returns between 1 and 1000",
    "seed": "Draw all random numbers from self.np_random",
    "shape": "Return one fixed shape; pad if necessary",
    "shared": "Keep state in self, not in the class, the module or a default argument",
    "space": "Return a member of the space",
    "spaces": "PPO does not support it",
    "step": "Accept every action that the space and the mask allow",
    "step result": "Return observation, reward, terminated, truncated and info",
    "terminated": "Return a bool",
    "text": "Encode it as numbers in a wrapper if the agent needs it",
    "time limit": "For a time limit, return truncated=True and terminated=False, or "
    "add the remaining time to the observation",
    "truncated": "Return a bool",
    "unusable": "Follow Gymnasium's API",
}
"""Advice for each kind of finding."""
NOTES: Final = ("action", "huge", "mixed", "reward constant", "text", "time limit")
"""Kinds that are no faults: the environment may be correct."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem of an environment."""

    step: int
    """Step of the examination, from 0."""
    what: str
    advice: str
    is_fault: bool = True
    """False for a note: the environment may be correct."""

    def __str__(self) -> str:
        level = "" if self.is_fault else "note, "
        return f"{level}step {self.step}: {self.what}. {self.advice}."


@dataclass
class Examination:
    """The findings so far, one of each kind."""

    timeout: float = TIMEOUT
    spec: SpaceSpec | None = None
    """Spaces of the environment; None if PPO does not support them."""
    findings: dict[str, Finding] = field(default_factory=dict)
    step: int = 0

    def add(self, kind: str, what: str, advice: str = "", key: str = "") -> None:
        """Keep the first finding of each kind, or of each key."""
        advice, is_fault = advice or ADVICE[kind], kind not in NOTES
        finding = Finding(self.step, one_line(what), advice, is_fault)
        self.findings.setdefault(key or kind, finding)

    def call(self, kind: str, what: str, call: Callable[[], Any]) -> Any:
        """Call the environment; an error or a timeout becomes a finding."""
        try:
            return timed(call, what, self.timeout, TIMEOUT_OPTION)
        except KeyboardInterrupt:
            raise
        except WorkersError as error:
            hung = f"{what} did not return in {self.timeout:g} s"
            self.add(kind, hung, f"Fix it, or increase {TIMEOUT_OPTION}")
            raise _Broken from error
        except BaseException as error:  # an environment may raise SystemExit
            self.add(kind, f"{what} raised {described(error)}")
            raise _Broken from error


class _Broken(Exception):  # noqa: N818
    """The environment cannot be stepped any further."""


def examine(
    source: str | Maker,
    steps: int = 2_000,
    rng_seed: int = 0,
    head_relevance: Sequence[Sequence[bool]] | None = None,
    timeout: float = TIMEOUT,
) -> list[Finding]:
    """Step an environment with random legal actions and return its problems.

    Args:
        source: An id, or a function that makes an environment or vector environment.
        steps: Number of steps.
        rng_seed: Random seed of resets and actions.
        head_relevance: As in `PPO`.
        timeout: Time limit of one call in seconds; used by `esper doctor` only.
    """
    make = source
    if not callable(make):
        make = partial(gymnasium.make, make, disable_env_checker=True)
    notes, name = Examination(timeout), one_line(str(source), 80)
    try:
        env = timed(make, f"the constructor of {name}", timeout, TIMEOUT_OPTION)
        if not isinstance(env, VectorEnv):
            require_sizes(env.observation_space)
    except (EsperError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise InvalidInputError(f"{name} cannot be made: {described(error)}") from error
    try:
        if isinstance(env, VectorEnv):
            _play_vector(env, steps, rng_seed, notes)
        else:
            _read_spaces(env, head_relevance, notes)
            episodes = _play(env, steps, rng_seed, notes)
            limit = env.spec.max_episode_steps if env.spec is not None else None
            _check_lengths(episodes, steps, limit, notes)
            is_fine = not any(each.is_fault for each in notes.findings.values())
            if notes.spec is not None and is_fine:
                _check_seeding(make, env, notes.spec, rng_seed, notes)
    except _Broken:
        pass
    except (EsperError, KeyboardInterrupt):
        raise
    except BaseException as error:
        what = f"the environment returned an unusable value: {described(error)}"
        notes.add("unusable", what)
    _close(env, notes)
    return sorted(notes.findings.values(), key=lambda finding: finding.step)


def _close(env: Any, notes: Examination) -> None:
    with suppress(_Broken):
        notes.call("close", "close()", env.close)


def _read_spaces(
    env: Env[Any, Any],
    head_relevance: Sequence[Sequence[bool]] | None,
    notes: Examination,
) -> None:
    """Set `notes.spec` if PPO supports the spaces."""
    table = None
    if head_relevance is not None:
        table = tuple(tuple(map(bool, row)) for row in head_relevance)
    try:
        notes.spec = SpaceSpec(env.observation_space, env.action_space, table)
    except EsperError as error:
        notes.add("spaces", str(error).rstrip("."))
    else:
        for name in notes.spec.dropped:
            what = f"{name!r} of the observation is text, which PPO leaves out"
            notes.add("text", what, key=what)
        if {*notes.spec.numeric} == {True, False}:
            what = "the action has numbers and choices, drawn independently by default"
            notes.add("mixed", what)


@dataclass
class _Episode:
    """How an episode ended, and the numbers of its observations."""

    steps: int
    terminated: bool
    truncated: bool
    numbers: list[Array]


def _play(
    env: Env[Any, Any], steps: int, rng_seed: int, notes: Examination
) -> list[_Episode]:
    """Make random legal steps, check all values and return the whole episodes."""
    env.action_space.seed(rng_seed)
    episodes: list[_Episode] = []
    walk = _Walk(env, rng_seed, notes)
    held, kept = walk.observation, deepcopy(walk.observation)
    shown, first_seen = [_numbers(held)], kept
    changed, rewards = False, []
    for step in range(steps):
        notes.step = step
        reward, terminated, truncated = walk.step()
        if not _same(held, kept):
            what = "the observation that was returned before changed with this step"
            notes.add("alias", what)
        held, kept = walk.observation, deepcopy(walk.observation)
        changed = changed or not _same(held, first_seen)
        rewards.append(reward)
        shown.append(_numbers(held))
        if terminated or truncated:
            ends = bool(terminated), bool(truncated)
            episodes.append(_Episode(len(shown) - 1, *ends, shown))
            walk.reset()
            held, kept = walk.observation, deepcopy(walk.observation)
            shown = [_numbers(held)]
    notes.step = steps
    if not changed:
        notes.add("constant", f"the observation never changed in {steps} steps")
    # With a constant reward other than 0, returns still depend on the length.
    durations = {episode.steps for episode in episodes}
    if len({*rewards}) == 1 and (rewards[0] == 0.0 or len(durations) < 2):
        what = f"the reward was always {rewards[0]:g} in {steps} steps"
        notes.add("reward constant", what)
    largest = max(map(abs, rewards), default=0.0)
    if largest > MAX_REWARD or 0.0 < largest < MIN_REWARD:
        notes.add("scale", f"the largest absolute reward is {largest:.3g}")
    return episodes


class _Walk:
    """Steps an environment and checks every value that it returns.

    With masks, actions are drawn with `chance_seed` (default: `rng_seed`), since the
    generator of the space may be shared by all environments of a class.
    """

    def __init__(
        self,
        env: Env[Any, Any],
        rng_seed: int,
        notes: Examination,
        chance_seed: int | None = None,
    ) -> None:
        self._env, self._notes = env, notes
        seed = rng_seed if chance_seed is None else chance_seed
        self._chance = np.random.default_rng(seed)
        self.reset(rng_seed)
        self._masked = MASK in self.info

    def reset(self, seed: int | None = None) -> None:
        """Start an episode."""
        notes, name = self._notes, f"reset(seed={seed})"
        result: Any = notes.call("reset", name, lambda: self._env.reset(seed=seed))
        is_pair = isinstance(result, tuple) and len(result) == 2
        if not is_pair or not isinstance(result[1], dict):
            what = "reset() did not return an observation and an info dict"
            notes.add("reset result", what)
            raise _Broken
        self.observation, self.info = result
        _observation(self._env.observation_space, self.observation, notes)

    def step(self, action: Any = None) -> tuple[float, bool, bool]:
        """Take an action; a random one if it is None or there is a mask.

        Returns:
            The reward, and whether the episode was terminated and truncated.
        """
        mask, notes = self.mask(), self._notes
        if mask is not None:
            action = self._legal_action(*mask)
        elif action is None:
            action = self._env.action_space.sample()
        name = f"step({one_line(str(action), 40)})"
        result = notes.call("step", name, lambda: self._env.step(action))
        if not isinstance(result, tuple) or len(result) != 5:
            notes.add("step result", "step() did not return five values")
            raise _Broken
        self.observation, reward, terminated, truncated, self.info = result
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool_):
                notes.add(name, f"{name} is {quoted(flag)}, a {type(flag).__name__}")
        if not isinstance(self.info, dict):
            notes.add("info", f"info is a {type(self.info).__name__}")
            raise _Broken
        _observation(self._env.observation_space, self.observation, notes)
        return _reward(reward, notes), terminated, truncated

    def mask(self) -> tuple[str, Any] | None:
        """Where a mask is found, and the mask; None without masks."""
        notes, where = self._notes, f"info['{MASK}']"
        if isinstance(self.observation, dict) and MASK in self.observation:
            return f"obs['{MASK}']", self.observation[MASK]
        if MASK in self.info:
            if not self._masked:
                what = f"{where} exists now and was missing at the first reset"
                notes.add("mask missing", what)
            return where, self.info[MASK]
        if self._masked:
            what = f"{where} existed at the first reset and is missing now"
            notes.add("mask missing", what)
        elif self._env.has_wrapper_attr(MASK_METHOD):
            where = f"{MASK_METHOD}()"
            call = self._env.get_wrapper_attr(MASK_METHOD)
            return where, notes.call("mask", where, call)
        return None

    def _legal_action(self, where: str, mask: Any) -> Any:
        """A random action that a mask allows."""
        spec = self._notes.spec
        if mask is None or spec is None:
            return self._env.action_space.sample()
        try:
            rows = spec.head_masks(spec.mask_row(mask)[None], 1)[0].numpy()
        except InvalidInputError as error:
            self._notes.add("mask", f"{where}: {str(error).rstrip('.')}")
            raise _Broken from error
        picked = _picked(spec, rows, self._chance)
        return first_of(self._env.action_space, spec.to_env(torch.tensor([picked])))


def _observation(space: Space[Any], value: Any, notes: Examination) -> None:
    """Check that an observation is in its space."""
    for part in parts_of(space):
        where = part.observation_name
        try:
            inner = part.of(value)
        except (KeyError, IndexError, TypeError) as error:
            notes.add("space", f"{where} is missing")
            raise _Broken from error
        problem = _problem(part, inner)
        if problem:
            kind, what = problem
            notes.add(kind, f"{where} {what}")
            if kind == "shape":
                raise _Broken
        elif isinstance(part.space, spaces.Box) and not part.is_image:
            size = np.abs(np.asarray(inner, np.float64)).max(initial=0.0)
            if size > MAX_OBSERVATION:
                notes.add("huge", f"{where} has the absolute value {size:.3g}")


def _problem(part: Part, value: Any) -> tuple[str, str] | None:
    """Kind and description of a problem with a part of an observation."""
    space = part.space
    if not isinstance(space, spaces.Box):
        if space.contains(value):
            return None
        return "space", f"is {quoted(value)}, outside {one_line(str(space), 80)}"
    array = np.asarray(value)
    if array.shape != space.shape:
        return "shape", f"has the shape {array.shape}, the space has {space.shape}"
    if array.dtype != space.dtype:
        return "dtype", f"has the dtype {array.dtype}, the space has {space.dtype}"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return "nan", "holds NaN or infinity"
    if not space.contains(array):
        low, high = array.min(), array.max()
        what = f"ranges from {low:.4g} to {high:.4g}, outside the bounds of the space"
        return "bounds", what
    return None


def _reward(reward: Any, notes: Examination) -> float:
    """A reward as a number; it may be an array with one element."""
    try:
        number = float(np.asarray(reward, np.float64).reshape(()))
    except (TypeError, ValueError, OverflowError) as error:
        notes.add("reward", f"the reward is {quoted(reward)}")
        raise _Broken from error
    if not math.isfinite(number):
        notes.add("reward", f"the reward is {None if reward is None else number}")
        return 0.0
    return number


def _picked(spec: SpaceSpec, rows: Array, chance: np.random.Generator) -> list[float]:
    """A choice or a number of each head; the first where the op does not use it."""
    has_table, table = rows.ndim == 3, spec.head_relevance
    picked: list[float] = []
    for head, is_number in enumerate(spec.numeric):
        op = int(picked[0]) if head else 0
        row = rows[op, head] if has_table else rows[head]
        if table is not None and not table[op][head]:
            picked.append(int(row.argmax()))
        elif is_number:
            picked.append(chance.uniform(-1.0, 1.0))
        else:
            picked.append(int(chance.choice(np.flatnonzero(row))))
    return picked


def _check_lengths(
    episodes: Sequence[_Episode], steps: int, limited: int | None, notes: Examination
) -> None:
    """Check for episodes without end, with both flags, or of one fixed length."""
    notes.step = steps
    if not episodes:
        if limited is None:
            notes.add("endless", f"no episode ended in {steps} steps")
        return
    ended = {episode.steps for episode in episodes}
    always = all(episode.terminated for episode in episodes)
    limit = max(ended)
    # Gymnasium's TimeLimit may set its flag together with `terminated`.
    both = always and all(episode.truncated for episode in episodes)
    if both and len(episodes) >= MIN_BOTH_FLAGS and ended != {limited}:
        what = f"terminated and truncated were both True at all {len(episodes)} ends"
        notes.add("flags", what)
        return
    is_fixed = always and len(ended) == 1 and limit >= MIN_TIME_LIMIT
    if is_fixed and len(episodes) >= MIN_EPISODES and not _has_clock(episodes):
        notes.add(
            "time limit",
            f"all {len(episodes)} episodes terminated after exactly {limit} steps, and "
            "no number of the observation is a clock",
        )


def _has_clock(episodes: Sequence[_Episode]) -> bool:
    """Whether a number of the observation rises or falls equally in all episodes."""
    tables = np.stack([np.stack(episode.numbers) for episode in episodes])
    same = (tables == tables[:1]).all(axis=0)  # [step, number]
    moves = np.diff(tables[0], axis=0)
    clock = ((moves > 0).all(axis=0) | (moves < 0).all(axis=0)) & same.all(axis=0)
    return bool(clock.any())


def _check_seeding(
    make: Maker,
    played: Env[Any, Any],
    spec: SpaceSpec,
    rng_seed: int,
    notes: Examination,
) -> None:
    """Compare episodes from the same seed: new, repeated, and interleaved."""

    def another() -> Any:
        return notes.call("alone", "the constructor of a second one", make)

    before = _class_state(played)
    first, second = another(), another()
    first.action_space.seed(rng_seed + 1)
    actions = [first.action_space.sample() for _ in range(COMPARED_STEPS)]
    alone = _episode(first, rng_seed, actions, notes)
    if not _same(alone, _episode(second, rng_seed, actions, notes)):
        again = another()
        fresh = _episode(again, rng_seed, actions, notes)
        _close(again, notes)
        if not _same(alone, fresh):
            what = "two new environments differ from the same seed and actions"
            after, advice = _class_state(played), ""
            if names := [name for name in before if before[name] != after[name]]:
                what += f", and the class attribute {', '.join(names)} changed"
                advice = f"{ADVICE['shared']}. {ADVICE['seed']}"
            notes.add("seed", what, advice)
            return
    if not _same(alone, _episode(first, rng_seed, actions, notes)):
        what = "an episode differs from its repetition with the same seed"
        notes.add("leak", what)
        return
    third = another()
    if not _same(alone, _episode(third, rng_seed, actions, notes, second)):
        what = "an episode differs while another environment is stepped"
        notes.add("shared", what)
    else:
        _check_actions(first, spec, rng_seed, notes)
    for env in (first, second, third):
        _close(env, notes)


def _class_state(env: Any) -> dict[str, str]:
    """Plain class attributes of an environment and its wrappers, as text."""
    layers, found = [env], {}
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    for owner in {cls for layer in layers for cls in type(layer).__mro__}:
        if owner.__module__.partition(".")[0] in ("builtins", "gymnasium", "typing"):
            continue
        for name, value in vars(owner).items():
            if isinstance(value, np.random.Generator):
                value = value.bit_generator.state
            if isinstance(value, bool | int | float | str | list | dict | np.ndarray):
                found[f"{owner.__name__}.{name}"] = repr(value)
    return found


def _check_actions(
    env: Env[Any, Any], spec: SpaceSpec, rng_seed: int, notes: Examination
) -> None:
    """Note actions, or heads of actions, that have no effect."""
    heads = range(len(spec.sizes))
    same = f"{TRIALS} episodes were the same for {COMPARED_STEPS} steps with any"
    if not _matters(env, spec, heads, rng_seed, notes):
        notes.add("action", f"{same} action")
        return
    is_tested = 1 < len(heads) <= MAX_HEADS
    if not is_tested or _Walk(env, rng_seed, notes).mask() is not None:
        return
    for head in heads:
        if not _matters(env, spec, [head], rng_seed, notes):
            notes.add("action", f"{same} choice of {spec.head_names[head]!r}")


def _matters(
    env: Env[Any, Any],
    spec: SpaceSpec,
    heads: Sequence[int],
    rng_seed: int,
    notes: Examination,
) -> bool:
    """Whether other choices of some heads change an episode."""
    chance = np.random.default_rng(rng_seed)
    top, numeric = np.array(spec.sizes), np.array(spec.numeric)
    for trial in range(TRIALS):
        one, other = chance.random((2, COMPARED_STEPS, len(top))) * top
        other = np.where(np.isin(np.arange(len(top)), heads), other, one)
        shown = []
        for picks in (one, other):
            rows = torch.from_numpy(np.where(numeric, picks - 1, np.floor(picks)))
            rows = rows.float() if numeric.any() else rows.long()
            actions = [first_of(env.action_space, spec.to_env(r[None])) for r in rows]
            draws = trial if picks is one else TRIALS + trial
            seed = rng_seed + trial
            shown.append(_episode(env, seed, actions, notes, chance_seed=draws))
        if not _same(*shown):
            return True
    return False


def _episode(
    env: Env[Any, Any],
    rng_seed: int,
    actions: Sequence[Any],
    notes: Examination,
    other: Env[Any, Any] | None = None,
    chance_seed: int | None = None,
) -> list[Any]:
    """Everything that one episode returns.

    `actions` are used in environments without masks. `other` is stepped after every
    step. For `chance_seed` see `_Walk`.
    """
    walk = _Walk(env, rng_seed, notes, chance_seed)
    neighbour = None if other is None else _Walk(other, rng_seed + 99, notes)
    rows: list[Any] = [deepcopy(walk.observation)]
    for action in actions:
        paid, *ends = walk.step(action)
        rows.append((deepcopy(walk.observation), paid, *ends))
        if neighbour is not None and any(neighbour.step()[1:]):
            neighbour.reset()
        if any(ends):
            break
    return rows


def _play_vector(
    env: VectorEnv[Any, Any, Any], steps: int, rng_seed: int, notes: Examination
) -> None:
    """Check autoreset mode and final observations of a vector environment."""
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        notes.add("autoreset", "metadata['autoreset_mode'] is missing")
        return
    env.action_space.seed(rng_seed)
    notes.call("reset", "reset()", lambda: env.reset(seed=rng_seed))
    for step in range(steps):
        notes.step = step
        call = partial(env.step, env.action_space.sample())
        _, _, terminated, truncated, info = notes.call("step", "step()", call)
        ended = np.asarray(terminated) | np.asarray(truncated)
        if not ended.any():
            continue
        if AutoresetMode(mode) is AutoresetMode.DISABLED:
            again = partial(env.reset, options={"reset_mask": ended})
            notes.call("reset_mask", "reset()", again)
        elif AutoresetMode(mode) is AutoresetMode.SAME_STEP:
            there = np.asarray(info.get("_final_obs", ended))
            if "final_obs" not in info or (ended & ~there).any():
                what = "an episode ended and info['final_obs'] is missing: the last"
                notes.add("final", f"{what} observation is lost")


def _numbers(observation: Any) -> Array:
    """The numbers of an observation in one row, without large parts (images)."""
    if isinstance(observation, dict):
        observation = [observation[name] for name in sorted(observation)]
    if isinstance(observation, tuple | list):
        rows = [_numbers(part) for part in observation]
        return np.concatenate(rows) if rows else np.zeros(0)
    try:
        numbers = np.asarray(observation, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return np.zeros(0)
    return numbers if numbers.size <= MAX_CLOCK_NUMBERS else np.zeros(0)


def _same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False))
