"""What in an environment will hurt learning, in plain words.

`examine` plays an environment with random legal actions and looks at everything that it
gives. A finding says what was seen, at which step, and what to do. It is a fault, or a
note where the environment may be meant to be so. Statements about chance compare
episodes from the same seed:

    two fresh environments differ                the seed does not reproduce
    not so after class attributes are set back   environments share state
    the same one differs after it was played     state leaks through reset
    it differs while another one is played       environments share state
    it is the same with other actions            actions do not matter
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from esper.rl.vector import METHOD
from esper.workers.deadline import TIMEOUT, timed

Array = NDArray[Any]
Maker = Callable[[], Any]
LARGE: Final = 1e4
SMALL: Final = 1e-4
"""Largest sizes of rewards that are taken for a matter of taste."""
SAME: Final = 5
"""Episodes of the same length that make a time limit probable."""
SHORT: Final = 10
"""Steps below which a fixed length is no time limit."""
MANY: Final = 1_000
"""Numbers among which no clock is looked for."""
COMPARED: Final = 50
"""Steps of an episode that are compared with its repetition."""
TRIALS: Final = 4
"""Episodes in which an action may matter."""
MAX_HEADS: Final = 8
"""Heads that are tried one by one."""
TOGETHER: Final = 3
"""Episodes that end with both flags before that is a fault."""
HUGE: Final = 1e6
"""Numbers of an observation that are larger are noted."""
OPTION: Final = "--timeout"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that will hurt learning."""

    step: int
    """Of the examination, from 0."""
    what: str
    advice: str
    is_fault: bool = True
    """Whether it must be mended; a note may be meant."""

    def __str__(self) -> str:
        level = "" if self.is_fault else "note, "
        return f"{level}step {self.step}: {self.what}. {self.advice}."


@dataclass
class Examination:
    """The findings so far; each kind is told once, when first seen."""

    findings: dict[str, Finding] = field(default_factory=dict)
    step: int = 0
    timeout: float = TIMEOUT

    def add(self, kind: str, what: str, advice: str, *, is_fault: bool = True) -> None:
        """Keep the first finding of a kind."""
        finding = Finding(self.step, one_line(what), advice, is_fault)
        self.findings.setdefault(kind, finding)

    @property
    def has_faults(self) -> bool:
        """Whether something must be mended."""
        return any(finding.is_fault for finding in self.findings.values())

    def call(self, kind: str, what: str, call: Callable[[], Any], advice: str) -> Any:  # noqa: ANN401
        """Call the environment; what it raises, and a call that hangs, is a finding."""
        try:
            return timed(call, what, self.timeout, OPTION)
        except KeyboardInterrupt:
            raise
        except WorkersError as error:
            hung = f"{what} did not return in {self.timeout:g} s"
            self.add(kind, hung, f"Let it return, or raise {OPTION}")
            raise _Broken from error
        except BaseException as error:  # an environment may raise SystemExit
            self.add(kind, f"{what} raised {described(error)}", advice)
            raise _Broken from error


class _Broken(Exception):  # noqa: N818
    """The environment cannot be played on."""


def examine(
    source: str | Maker,
    steps: int = 2_000,
    rng_seed: int = 0,
    head_relevance: Sequence[Sequence[bool]] | None = None,
    timeout: float = TIMEOUT,
) -> list[Finding]:
    """Play an environment and say what will hurt learning.

    Args:
        source: An id, or a function that makes an environment or vector environment.
        steps: How long to play.
        rng_seed: Of resets and random actions.
        head_relevance: As for `PPO`: which heads a choice of the first one uses.
        timeout: Seconds that a call of the environment may take, in the command.
    """
    table = (
        None
        if head_relevance is None
        else tuple(tuple(map(bool, r)) for r in head_relevance)
    )
    make = source if callable(source) else _maker(source)
    notes, name = Examination(timeout=timeout), one_line(str(source), 80)
    try:
        env = timed(make, f"the constructor of {name}", timeout, OPTION)
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
            spec = _spaces(env, table, notes)
            lengths = _play(env, spec, steps, rng_seed, notes)
            limit = env.spec.max_episode_steps if env.spec is not None else None
            _judge_lengths(lengths, steps, limit, notes)
            if spec is not None and not notes.has_faults:
                _compare(make, env, spec, rng_seed, notes)
    except _Broken:
        pass
    except (EsperError, KeyboardInterrupt):
        raise
    except BaseException as error:
        what = f"what the environment gives cannot be examined: {described(error)}"
        notes.add("unusable", what, "Return what Gymnasium's API says")
    _close(env, notes)
    return sorted(notes.findings.values(), key=lambda finding: finding.step)


def _maker(name: str) -> Maker:
    return lambda: gymnasium.make(name, disable_env_checker=True)


def _close(env: Any, notes: Examination) -> None:  # noqa: ANN401
    with suppress(_Broken):
        notes.call("close", "close()", env.close, "Let close() succeed, also twice")


def _spaces(
    env: Env[Any, Any], table: tuple[tuple[bool, ...], ...] | None, notes: Examination
) -> SpaceSpec | None:
    """The spaces as PPO would know them, if it can learn in them."""
    try:
        spec = SpaceSpec(env.observation_space, env.action_space, table)
        for name in spec.dropped:
            notes.add(
                f"text {name}",
                f"{name!r} of the observation is text, which PPO leaves out",
                "Turn it into numbers in a wrapper if the agent needs it",
                is_fault=False,
            )
        return spec
    except EsperError as error:
        notes.add("spaces", str(error).rstrip("."), "PPO cannot learn here as it is")
        return None


@dataclass
class _Length:
    """How an episode ended, and what it showed at each step."""

    steps: int
    terminated: bool
    truncated: bool
    first_numbers: list[Array]


def _play(
    env: Env[Any, Any],
    spec: SpaceSpec | None,
    steps: int,
    rng_seed: int,
    notes: Examination,
) -> list[_Length]:
    """Random legal actions; every value that comes back is looked at."""
    env.action_space.seed(rng_seed)
    chance = np.random.default_rng(rng_seed)
    lengths: list[_Length] = []
    observation, info = _reset(env, rng_seed, notes)
    shown, first_seen = [_numbers(observation)], deepcopy(observation)
    changed, rewards, masked = False, [], MASK in info
    held, kept = observation, deepcopy(observation)
    for step in range(steps):
        notes.step = step
        action = _action(env, spec, observation, info, masked, chance, notes)
        observation, reward, terminated, truncated, info = _step(env, action, notes)
        if not _same(held, kept):
            notes.add(
                "alias",
                "the observation that was returned before changed with this step",
                "Return a copy; all that is stored is overwritten otherwise",
            )
        held, kept = observation, deepcopy(observation)
        changed = changed or not _same(observation, first_seen)
        rewards.append(_reward(reward, notes))
        shown.append(_numbers(observation))
        if terminated or truncated:
            ends = bool(terminated), bool(truncated)
            lengths.append(_Length(len(shown) - 1, *ends, shown))
            observation, info = _reset(env, None, notes)
            shown, held = [_numbers(observation)], observation
            kept = deepcopy(observation)
    notes.step = steps
    if not changed:
        notes.add(
            "constant",
            f"the observation never changed in {steps} steps",
            "Show what the agent needs in order to decide",
        )
    # A constant reward other than 0 is a matter of how long an episode takes.
    durations = {episode.steps for episode in lengths}
    if len({*rewards}) == 1 and (rewards[0] == 0.0 or len(durations) < 2):
        notes.add(
            "reward constant",
            f"the reward was always {rewards[0]:g} in {steps} steps, so all returns "
            "are the same",
            "Nothing is learnt until rewards differ; if they are rare, play more steps",
            is_fault=False,
        )
    largest = max(map(abs, rewards), default=0.0)
    if largest > LARGE or 0.0 < largest < SMALL:
        notes.add(
            "scale",
            f"the largest reward has the size {largest:.3g}",
            "Scale rewards so that a good episode returns between 1 and 1000",
        )
    return lengths


def _reset(
    env: Env[Any, Any], seed: int | None, notes: Examination
) -> tuple[Any, dict[str, Any]]:
    what = "Accept the keywords seed and options, and begin an episode"
    result: Any = notes.call(
        "reset", f"reset(seed={seed})", lambda: env.reset(seed=seed), what
    )
    fine = isinstance(result, tuple) and len(result) == 2
    if not fine or not isinstance(result[1], dict):
        notes.add(
            "reset",
            "reset() did not return an observation and an info dict",
            "Return both, as Gymnasium has it since 0.26",
        )
        raise _Broken
    _observation(env.observation_space, result[0], notes)
    return result[0], result[1]


def _step(env: Env[Any, Any], action: Any, notes: Examination) -> Any:  # noqa: ANN401
    what = "An action of the space that the mask allows must be possible"
    call = f"step({one_line(str(action), 40)})"
    result = notes.call("step", call, lambda: env.step(action), what)
    if not isinstance(result, tuple) or len(result) != 5:
        notes.add(
            "step",
            "step() did not return five values",
            "Return observation, reward, terminated, truncated and info",
        )
        raise _Broken
    for name, flag in zip(("terminated", "truncated"), result[2:4], strict=True):
        if not isinstance(flag, bool | np.bool_):
            notes.add(
                name,
                f"{name} is {quoted(flag)}, a {type(flag).__name__}",
                "Return a bool",
            )
    if not isinstance(result[4], dict):
        notes.add("info", f"info is a {type(result[4]).__name__}", "Return a dict")
        raise _Broken
    _observation(env.observation_space, result[0], notes)
    return result


def _observation(space: Space[Any], value: Any, notes: Examination) -> None:  # noqa: ANN401
    """Refuse what is not in the observation space, and say why."""
    for part in parts_of(space):
        where = ".".join(map(str, part.path)) or "the observation"
        try:
            inner = part.of(value)
        except (KeyError, IndexError, TypeError) as error:
            notes.add("space", f"{where} is missing", "Return all that the space has")
            raise _Broken from error
        problem = _problem(part, inner)
        if problem:
            kind, what, advice = problem
            notes.add(kind, f"{where} {what}", advice)
            if kind == "shape":
                raise _Broken
        elif isinstance(part.space, spaces.Box) and not part.is_image:
            size = np.abs(np.asarray(inner, np.float64)).max(initial=0.0)
            if size > HUGE:
                notes.add(
                    "huge",
                    f"{where} holds a number of the size {size:.3g}",
                    "Give it in other units; small differences are lost in float32",
                    is_fault=False,
                )


def _problem(part: Part, value: Any) -> tuple[str, str, str] | None:  # noqa: ANN401
    """What is wrong with one part of an observation: kind, words and advice."""
    space = part.space
    if not isinstance(space, spaces.Box):
        if space.contains(value):
            return None
        what = f"is {quoted(value)}, outside {one_line(str(space), 80)}"
        return "space", what, "Return a member of the space"
    array = np.asarray(value)
    if array.shape != space.shape:
        what = f"has the shape {array.shape}, the space has {space.shape}"
        return "shape", what, "Shapes must not change; pad if they must"
    if array.dtype != space.dtype:
        what = f"is of {array.dtype}, the space of {space.dtype}"
        return "dtype", what, "Convert it, or declare the other dtype"
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        return "nan", "holds NaN or infinity", "Find out where it comes from"
    if not space.contains(array):
        low, high = array.min(), array.max()
        what = f"ranges from {low:.4g} to {high:.4g}, outside the bounds of the space"
        return "bounds", what, "Clip it, or declare wider bounds"
    return None


def _reward(reward: Any, notes: Examination) -> float:  # noqa: ANN401
    """A reward as a number; an array of one will do."""
    try:
        number = float(np.asarray(reward, np.float64).reshape(()))
    except (TypeError, ValueError, OverflowError) as error:
        notes.add("reward", f"the reward is {quoted(reward)}", "Return one number")
        raise _Broken from error
    if not math.isfinite(number):
        what = f"the reward is {None if reward is None else number}"
        notes.add("reward", what, "Find out where it comes from")
        return 0.0
    return number


def _action(
    env: Env[Any, Any],
    spec: SpaceSpec | None,
    observation: Any,  # noqa: ANN401
    info: dict[str, Any],
    masked: bool,
    chance: np.random.Generator,
    notes: Examination,
) -> Any:  # noqa: ANN401
    """A random action that the mask allows."""
    mask, where = None, ""
    space = env.action_space
    if isinstance(observation, dict) and MASK in observation:
        mask, where = observation[MASK], f"obs['{MASK}']"
    elif MASK in info:
        mask, where = info[MASK], f"info['{MASK}']"
        if not masked:
            notes.add(
                "mask missing",
                f"info['{MASK}'] is there now and was missing at the first reset",
                "Give it at every reset and step",
            )
    elif masked:
        notes.add(
            "mask missing",
            f"info['{MASK}'] was there at first and is missing now",
            "Give it at every reset and step",
        )
    elif env.has_wrapper_attr(METHOD):
        where = f"{METHOD}()"
        ask = env.get_wrapper_attr(METHOD)
        mask = notes.call("mask", where, lambda: ask(), "Mend the method")
    if mask is None or spec is None:
        return space.sample()
    try:
        rows = spec.head_masks(spec.mask_row(mask)[None], 1)[0].numpy()
    except InvalidInputError as error:
        notes.add("mask", f"{where}: {str(error).rstrip('.')}", "Mend the mask")
        raise _Broken from error
    picked = _picked(spec, rows, chance)
    return first_of(space, spec.to_env(torch.tensor([picked])))


def _picked(spec: SpaceSpec, rows: Array, chance: np.random.Generator) -> list[int]:
    """A legal choice of each head; choice 0 where the op does not use a head."""
    is_table = rows.ndim == 3
    first = rows[0, 0] if is_table else rows[0]
    op = int(chance.choice(np.flatnonzero(first)))
    later = rows[op, 1:] if is_table else rows[1:]
    used = (
        [True] * len(later)
        if spec.head_relevance is None
        else spec.head_relevance[op][1:]
    )
    picks = zip(later, used, strict=True)
    return [op, *(int(chance.choice(np.flatnonzero(r))) if u else 0 for r, u in picks)]


def _judge_lengths(
    lengths: Sequence[_Length], steps: int, limited: int | None, notes: Examination
) -> None:
    """Episodes that never end, end with both flags, or always last as long."""
    notes.step = steps
    if not lengths and limited is not None:
        return
    if not lengths:
        notes.add(
            "endless",
            f"no episode ended in {steps} steps",
            "Set a time limit: gymnasium.make(..., max_episode_steps=1000)",
        )
        return
    ended = {episode.steps for episode in lengths}
    always = all(episode.terminated for episode in lengths)
    limit = max(ended)
    # Gymnasium's TimeLimit sets its flag also where an episode ends by itself.
    both = always and all(episode.truncated for episode in lengths)
    if both and len(lengths) >= TOGETHER and ended != {limited}:
        notes.add(
            "flags",
            f"terminated and truncated were both True at all {len(lengths)} ends",
            "Return terminated where the task is over, truncated where time is up",
        )
        return
    if len(lengths) < SAME or len(ended) > 1 or not always or limit < SHORT:
        return
    if not _tells_time(lengths):
        notes.add(
            "time limit",
            f"all {len(lengths)} episodes terminated after exactly {limit} steps, and "
            "no number of the observation is a clock",
            "If that is a time limit, return truncated=True and terminated=False, or "
            "show the time that is left",
            is_fault=False,
        )


def _tells_time(lengths: Sequence[_Length]) -> bool:
    """Whether some number of the observation is the same clock in all episodes."""
    tables = np.stack([np.stack(episode.first_numbers) for episode in lengths])
    same = (tables == tables[:1]).all(axis=0)  # [step, number]
    moves = np.diff(tables[0], axis=0)
    clock = ((moves > 0).all(axis=0) | (moves < 0).all(axis=0)) & same.all(axis=0)
    return bool(clock.any())


def _compare(
    make: Maker,
    played: Env[Any, Any],
    spec: SpaceSpec,
    rng_seed: int,
    notes: Examination,
) -> None:
    """Episodes from the same seed, alone, again, and beside another one."""

    def another() -> Any:  # noqa: ANN401
        what = "Let several exist at once: PPO learns in many, envs=1 in one"
        return notes.call("alone", "the constructor of a second one", make, what)

    before = _class_data(played)
    first, second = another(), another()
    actions = _actions(first, rng_seed)
    alone = _episode(first, spec, rng_seed, actions, notes)
    if not _same(alone, _episode(second, spec, rng_seed, actions, notes)):
        again = another()
        fresh = _episode(again, spec, rng_seed, actions, notes)
        _close(again, notes)
        if not _same(alone, fresh):
            names = [f"{owner.__name__}.{n}" for owner, n in _changed(before)]
            with _set_back(before):
                again, _ = another(), another()
                rewound = _episode(again, spec, rng_seed, actions, notes)
            if names and _same(alone, rewound):
                notes.add(
                    "shared",
                    "what one environment does changes others, by the class attribute "
                    f"{', '.join(names)}",
                    "Keep state in self, not in the class",
                )
                return
            notes.add(
                "seed",
                "two new environments differ from the same seed and actions",
                "Draw all chance from self.np_random, which reset(seed=...) sets",
            )
            return
    if not _same(alone, _episode(first, spec, rng_seed, actions, notes)):
        notes.add(
            "leak",
            "an episode differs from its repetition with the same seed after others "
            "were played",
            "Set everything anew in reset()",
        )
        return
    beside = another()
    if not _same(alone, _episode(beside, spec, rng_seed, actions, notes, second)):
        notes.add(
            "shared",
            "an episode differs when another environment is played beside it",
            "Keep state in self, not in the class, the module or a default argument",
        )
    else:
        _try_actions(first, spec, rng_seed, notes)
    for env in (first, second, beside):
        _close(env, notes)


def _class_data(env: Any) -> dict[tuple[type, str], Any]:  # noqa: ANN401
    """Copies of the data that the classes of an environment and its wrappers hold."""
    layers, found = [env], {}
    while isinstance(layers[-1], gymnasium.Wrapper):
        layers.append(layers[-1].env)
    for owner in {cls for layer in layers for cls in type(layer).__mro__}:
        if owner.__module__.partition(".")[0] in ("builtins", "gymnasium", "typing"):
            continue
        for name, value in vars(owner).items():
            if not name.startswith("__") and not hasattr(value, "__get__"):
                with suppress(Exception):  # what cannot be copied is left as it is
                    found[owner, name] = deepcopy(value)
    return found


def _changed(before: Mapping[tuple[type, str], Any]) -> list[tuple[type, str]]:
    """Class attributes of plain types that are no longer as they were."""
    found = []
    for (owner, name), then in before.items():
        now = getattr(owner, name, None)
        if isinstance(now, np.random.Generator):
            now, then = now.bit_generator.state, then.bit_generator.state
        is_plain = isinstance(now, bool | int | float | str | list | dict | np.ndarray)
        if is_plain and (type(now) is not type(then) or not _same(now, then)):
            found.append((owner, name))
    return found


@contextmanager
def _set_back(before: Mapping[tuple[type, str], Any]) -> Iterator[None]:
    """Let classes have their former data for a while."""
    now = {(owner, name): getattr(owner, name, None) for owner, name in before}
    try:
        for (owner, name), value in before.items():
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name), value in now.items():
            setattr(owner, name, value)


def _try_actions(
    env: Env[Any, Any], spec: SpaceSpec, rng_seed: int, notes: Examination
) -> None:
    """Note actions, or heads of actions, that change nothing."""
    heads = range(len(spec.sizes))
    if not _matters(env, spec, heads, rng_seed, notes):
        notes.add(
            "action",
            f"{TRIALS} episodes were the same for {COMPARED} steps whatever was done",
            "Let actions change the observation, the reward or the end",
            is_fault=False,
        )
        return
    if not 1 < len(heads) <= MAX_HEADS or _has_masks(env, rng_seed, notes):
        return
    for head in heads:
        if not _matters(env, spec, [head], rng_seed, notes):
            notes.add(
                "action",
                f"{TRIALS} episodes were the same for {COMPARED} steps whatever "
                f"{spec.head_names[head]!r} was",
                "Leave it out, or let it change something",
                is_fault=False,
            )


def _matters(
    env: Env[Any, Any],
    spec: SpaceSpec,
    heads: Sequence[int],
    rng_seed: int,
    notes: Examination,
) -> bool:
    """Whether other choices of some heads change an episode."""
    chance = np.random.default_rng(rng_seed)
    top = np.array([2 if spec.is_continuous else size for size in spec.sizes])
    for trial in range(TRIALS):
        one, other = chance.random((2, COMPARED, len(top))) * top
        other = np.where(np.isin(np.arange(len(top)), heads), other, one)
        shown = []
        for picks in (one, other):
            rows = torch.from_numpy(picks - 1).float()
            if not spec.is_continuous:
                rows = torch.from_numpy(picks).long()
            actions = [first_of(env.action_space, spec.to_env(r[None])) for r in rows]
            masked_by = trial if picks is one else TRIALS + trial
            shown.append(
                _episode(
                    env, spec, rng_seed + trial, actions, notes, chance_seed=masked_by
                )
            )
        if not _same(*shown):
            return True
    return False


def _has_masks(env: Env[Any, Any], rng_seed: int, notes: Examination) -> bool:
    observation, info = _reset(env, rng_seed, notes)
    return MASK in info or env.has_wrapper_attr(METHOD) or _shows_mask(observation)


def _actions(env: Env[Any, Any], rng_seed: int) -> list[Any]:
    env.action_space.seed(rng_seed + 1)
    return [env.action_space.sample() for _ in range(COMPARED)]


def _episode(
    env: Env[Any, Any],
    spec: SpaceSpec | None,
    rng_seed: int,
    actions: Sequence[Any],
    notes: Examination,
    other: Env[Any, Any] | None = None,
    chance_seed: int | None = None,
) -> list[Any]:
    """What an episode shows.

    Args:
        env: Where.
        spec: Of its spaces.
        rng_seed: Of its reset.
        actions: What is done, where there is no mask.
        notes: The findings so far.
        other: An environment that is played between its steps.
        chance_seed: Of what is done where there is a mask; None: `rng_seed`.
    """
    observation, info = _reset(env, rng_seed, notes)
    rows: list[Any] = [deepcopy(observation)]
    masked = MASK in info
    # Not the space's own: environments of a class may have one space.
    chance = np.random.default_rng(rng_seed if chance_seed is None else chance_seed)
    neighbour = None
    if other is not None:
        neighbour = _Neighbour(other, spec, rng_seed + 99, notes)
    for action in actions:
        if masked or env.has_wrapper_attr(METHOD) or _shows_mask(observation):
            action = _action(env, spec, observation, info, masked, chance, notes)
        observation, reward, terminated, truncated, info = _step(env, action, notes)
        paid = _reward(reward, notes)
        rows.append((deepcopy(observation), paid, terminated, truncated))
        if neighbour is not None:
            neighbour.step()
        if terminated or truncated:
            break
    return rows


def _shows_mask(observation: Any) -> bool:  # noqa: ANN401
    return isinstance(observation, dict) and MASK in observation


class _Neighbour:
    """Another environment, played with random legal actions."""

    def __init__(
        self,
        env: Env[Any, Any],
        spec: SpaceSpec | None,
        rng_seed: int,
        notes: Examination,
    ) -> None:
        self._env, self._spec, self._notes = env, spec, notes
        self._chance = np.random.default_rng(rng_seed)
        self._shown = _reset(env, rng_seed, self._notes)

    def step(self) -> None:
        """Act once, and begin anew if that was the end."""
        observation, info = self._shown
        masked = MASK in info
        action = _action(
            self._env, self._spec, observation, info, masked, self._chance, self._notes
        )
        observation, _, terminated, truncated, info = _step(
            self._env, action, self._notes
        )
        self._shown = observation, info
        if terminated or truncated:
            self._shown = _reset(self._env, None, self._notes)


def _play_vector(
    env: VectorEnv[Any, Any, Any], steps: int, rng_seed: int, notes: Examination
) -> None:
    """A vector environment: how it resets, and where final observations are."""
    mode = env.metadata.get("autoreset_mode")
    if mode is None:
        notes.add(
            "autoreset",
            "metadata['autoreset_mode'] is missing",
            "Say how it resets, with a gymnasium.vector.AutoresetMode",
        )
        return
    env.action_space.seed(rng_seed)
    notes.call("reset", "reset()", lambda: env.reset(seed=rng_seed), "Begin episodes")
    for step in range(steps):
        notes.step = step
        call = partial(env.step, env.action_space.sample())
        _, _, terminated, truncated, info = notes.call(
            "step", "step()", call, "An action of the space must be possible"
        )
        ended = np.asarray(terminated) | np.asarray(truncated)
        if not ended.any():
            continue
        if AutoresetMode(mode) is AutoresetMode.DISABLED:
            again = partial(env.reset, options={"reset_mask": ended})
            notes.call("reset", "reset()", again, "Accept options['reset_mask']")
        elif AutoresetMode(mode) is AutoresetMode.SAME_STEP:
            there = np.asarray(info.get("_final_obs", ended))
            if "final_obs" not in info or (ended & ~there).any():
                notes.add(
                    "final",
                    "an episode ended and info['final_obs'] is missing: the last "
                    "observation is lost",
                    "Give it, or reset in the next step",
                )


def _numbers(observation: Any) -> Array:  # noqa: ANN401
    """All numbers of an observation in a row; of none that is large, like an image."""
    if isinstance(observation, dict):
        observation = [observation[name] for name in sorted(observation)]
    if isinstance(observation, tuple | list):
        rows = [_numbers(part) for part in observation]
        return np.concatenate(rows) if rows else np.zeros(0)
    try:
        numbers = np.asarray(observation, np.float64).reshape(-1)
    except (TypeError, ValueError):
        return np.zeros(0)
    return numbers if numbers.size <= MANY else np.zeros(0)


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401
    """Whether two values that environments gave are equal."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(np.array_equal(np.asarray(one), np.asarray(other), equal_nan=False))
