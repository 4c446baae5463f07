r"""Network growth as a Gymnasium environment.

    gymnasium.make("esper.environment.gym:esper/Grow-v0", task="digits")
    gymnasium.make_vec("esper.environment.gym:esper/Grow-v0", num_envs=16)

An action is an integer (`FlatActions`): WAIT, or an op in a slot, with the blueprint of
GERMINATE and the target of SET_ALPHA; other heads have defaults. An observation is a
row in [-1, 1] (`flatten`): the features of `contracts.features`; unknown values are 0
with a flag. The mask is `action_masks()` and `info["action_mask"]`. An illegal action
becomes WAIT, costs the penalty and sets `info["invalid"]`. The test score is in the
last info of an episode only.

The same seed gives the same episodes; without a seed, the run continues.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.checks import require_int
from esper.contracts.devices import map_tensors
from esper.contracts.errors import InvalidInputError, InvalidStateError, unknown
from esper.contracts.feature_tables import feature_tables
from esper.contracts.features import HOST_COLUMNS, OFFER_COLUMNS, SLOT_COLUMNS
from esper.contracts.stages import LEGAL
from esper.contracts.world import EpisodeReport, Observation
from esper.environment.growing import GrowingWorld
from esper.environment.settings import TERMS, WorldSettings
from esper.tasks.task import Task

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    raise InvalidInputError(
        "esper/Grow-v0 needs gymnasium, which is not installed; pip install '.[rl]'"
    ) from error

ID = "esper/Grow-v0"
Row = NDArray[np.float32]
Info = dict[str, Any]

DEFAULT_CHOICES: Final = {
    "style": "ADD",
    "tempo": "STANDARD",
    "alpha_target": "FULL",
    "alpha_speed": "FAST",
    "alpha_curve": "COSINE",
}
"""Defaults of heads that an agent does not choose, if the world allows them."""
CHOSEN_HEAD: Final = {Op.GERMINATE: "blueprint", Op.SET_ALPHA: "alpha_target"}
"""Head that an agent chooses in addition to op and slot."""


@dataclass(frozen=True, slots=True)
class FlatActions:
    """All actions by number; 0 is WAIT."""

    spec: ActionSpec
    actions: Int64[Tensor, "action head"]
    names: tuple[str, ...]
    """Names such as `GERMINATE 2 widen_8`: op, slot, choice."""

    @classmethod
    def of(cls, spec: ActionSpec) -> "FlatActions":
        """Number the actions of an action space."""
        choices = {head.name: [*head.choices] for head in HEADS}
        choices["blueprint"] = [blueprint.name for blueprint in spec.blueprints]
        allowed = {
            head.name: torch.nonzero(row).flatten().tolist()
            for head, row in zip(HEADS, spec.allowed, strict=True)
        }
        rows, names = [[0] * len(HEADS)], [Op.WAIT.name]
        for op in (Op(choice) for choice in allowed["op"] if choice != Op.WAIT):
            action = {"op": op.value}
            for head, default in DEFAULT_CHOICES.items():
                if op in HEADS[HEAD[head]].used_by:
                    usual = choices[head].index(default)
                    known = allowed[head]
                    action[head] = usual if usual in known else known[-1]
            chosen = CHOSEN_HEAD.get(op)
            for slot, choice in product(
                allowed["slot"], allowed[chosen] if chosen else [0]
            ):
                action |= {"slot": slot} | ({chosen: choice} if chosen else {})
                what = f" {choices[chosen][choice]}" if chosen else ""
                rows.append([action.get(head.name, 0) for head in HEADS])
                names.append(f"{op.name} {slot}{what}")
        return cls(spec, torch.tensor(rows), tuple(names))

    def __len__(self) -> int:
        """Return the number of actions."""
        return len(self.names)

    def legal(self, observation: Observation) -> Bool[Tensor, "env action"]:
        """Return which actions are legal now; WAIT always is."""
        slots, offers = observation.slots, observation.offers
        op, slot, kind = (
            self.actions[:, HEAD[name]] for name in ("op", "slot", "blueprint")
        )
        old = (slots.age[:, slot] >= self.spec.slots.min_age).long()
        settled = slots.alpha_settled[:, slot].long()
        legal = LEGAL[op, slots.stage[:, slot], old, settled]
        left = observation.host.budget_left.unsqueeze(1)
        plantable = offers.fits[:, slot, kind] & (
            offers.parameters[:, slot, kind] <= left
        )
        return (op == Op.WAIT) | (legal & (plantable | (op != Op.GERMINATE)))


HUGE: Final = 1e8
"""Larger sizes are clamped to this."""


def flatten(observation: Observation) -> Float[Tensor, "env feature"]:
    """Return the observation of every environment as one row in [-1, 1]."""

    def finite(x: Tensor) -> Tensor:
        return x.nan_to_num().clamp(-HUGE, HUGE) if x.is_floating_point() else x

    tables = feature_tables(map_tensors(finite, observation), measured=False)
    parts = (tables.host, tables.slots, tables.offers)
    return torch.cat([table.flatten(1) for table in parts], dim=1)


def feature_names(spec: ActionSpec) -> tuple[str, ...]:
    """Return the name of each feature, such as `slot 2 widen_8 promise`."""
    slots, kinds = range(spec.slots.max_slots), [b.name for b in spec.blueprints]
    offered = [f"{kind} {c.name}" for kind in kinds for c in OFFER_COLUMNS]
    return (
        *(f"host {c.name}" for c in HOST_COLUMNS),
        *(f"slot {slot} {c.name}" for slot in slots for c in SLOT_COLUMNS),
        *(f"slot {slot} {name}" for slot in slots for name in offered),
    )


class _World(GrowingWorld):
    """A growing world that keeps the last observation of ended episodes."""

    final: Observation | None = None
    """Observation before the last reset of environments."""

    def _reset_envs(self, envs: Iterable[int]) -> None:
        self.final = self._observe()
        super()._reset_envs(envs)


class GrowVectorEnv(VectorEnv[Row, object, NDArray[Any]]):
    """Hosts that train and grow together, much faster than one by one.

    An ended environment resets in the same step; its last observation and info are in
    `final_obs` and `final_info`. The first environment equals `GrowEnv` with the seed.

    Args:
        num_envs: Number of hosts.
        settings: Fields of `WorldSettings`, and `task` (a task or its name).
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:  # noqa: ANN401
        known = ["task", *(field.name for field in fields(WorldSettings))]
        for name in settings:
            if name not in known:
                what = f"expected settings out of {', '.join(known)}; got"
                raise unknown(what, name, known)
        self.num_envs = num_envs
        task = settings.pop("task", "digits")
        if isinstance(task, str):
            from esper.tasks.catalogue import task as find_task  # loads all data sets

            task = find_task(task)
        if not isinstance(task, Task):
            raise InvalidInputError(
                f"task must be a Task or the name of one, got {task!r:.99}."
            )
        self._task = task
        self._settings = WorldSettings(**settings)
        self.world = self._new_world(0)
        self.actions = FlatActions.of(self.world.spec)
        """Meaning of every action."""
        self.features = feature_names(self.world.spec)
        """Name of every feature."""
        self.single_action_space = Discrete(len(self.actions))
        self.single_observation_space = Box(
            -1.0, 1.0, (len(self.features),), np.float32
        )
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.observation: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Row, Info]:
        """Start an episode everywhere; without arguments, the next one of the run.

        Args:
            seed: Start a new run with this seed.
            options: Start a new run with other terms (rent, budget, rate).
        """
        if seed is not None or options or self.observation is None:
            if seed is not None:
                require_int("seed", seed, 0)
            run = int(self.np_random.integers(2**31)) if seed is None else int(seed)
            world = self._new_world(run, options)
            self.observation, self.world = world.reset(), world
            super().reset(seed=None if seed is None else int(seed))
        else:
            self.observation = self.world.reset()
        none = np.zeros(self.num_envs, dtype=np.bool_)
        info = self._info(self.observation, ~none, invalid=none)
        return _numpy(flatten(self.observation)), info

    def step(
        self, actions: object
    ) -> tuple[Row, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        """Act everywhere and train until the next decision."""
        if self.observation is None:
            raise InvalidStateError("step() before reset(); call reset() first.")
        numbers = np.asarray(actions)
        if not (
            numbers.shape == (self.num_envs,)
            and numbers.dtype.kind in "iu"
            and bool(((numbers >= 0) & (numbers < len(self.actions))).all())
        ):
            raise InvalidInputError(
                f"actions must be {self.num_envs} integers in "
                f"0..{len(self.actions) - 1}, got {actions!r:.99}."
            )
        chosen = torch.from_numpy(numbers.astype(np.int64))
        result = self.world.step(self.actions.actions[chosen])
        self.observation = result.observation
        assert result.illegal is not None
        over, invalid = _numpy(result.terminated), _numpy(result.illegal)
        info = self._info(self.observation, ~np.zeros_like(over), invalid & ~over)
        if result.report is not None:
            assert self.world.final is not None
            rows = np.full(self.num_envs, None, dtype=object)
            last = _numpy(flatten(self.world.final))
            for env in np.flatnonzero(over):
                rows[env] = last[env]
            final = self._info(self.world.final, over, invalid & over)
            final |= _flagged(_results(result.report, over), over)
            info |= _flagged({"final_obs": rows, "final_info": final}, over)
        return (
            _numpy(flatten(self.observation)),
            _numpy(result.reward).astype(np.float64),
            over,
            _numpy(result.truncated),
            info,
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which actions are legal now, bool [env, action]."""
        if self.observation is None:
            raise InvalidStateError(
                "action_masks() before reset(); call reset() first."
            )
        return _numpy(self.actions.legal(self.observation))

    def _new_world(self, run: int, options: Mapping[str, Any] | None = None) -> _World:
        """Create a world; options replace rent, budget and rate."""
        if not isinstance(options, Mapping | None):
            raise InvalidInputError(
                f"options must be a dict of terms, got {options!r:.99}."
            )
        if others := {*(options or {})} - {*TERMS}:
            raise InvalidInputError(
                f"options may have {', '.join(TERMS)}; got {min(map(repr, others))}."
            )
        settings = replace(self._settings, **(options or {}))
        return _World(self._task, self.num_envs, run, settings=settings)

    def _info(
        self, see: Observation, where: NDArray[np.bool_], invalid: NDArray[np.bool_]
    ) -> Info:
        """Info of some environments; zero for the others."""
        masks = _numpy(self.actions.legal(see)) & where[:, np.newaxis]
        return _flagged(
            {"action_mask": masks.astype(np.int8), "invalid": invalid}, where
        )


class GrowEnv(gymnasium.Env[Row, object]):
    """One host that trains and grows.

    Args:
        settings: Fields of `WorldSettings`, and `task` (a task or its name).
    """

    def __init__(self, **settings: Any) -> None:  # noqa: ANN401
        self._vector = GrowVectorEnv(1, **settings)
        self.actions = self._vector.actions
        """Meaning of every action."""
        self.features = self._vector.features
        """Name of every feature."""
        self.action_space = self._vector.single_action_space
        self.observation_space = self._vector.single_observation_space
        self._now: Observation | None = None
        self._next: tuple[Row, Info] | None = None
        """First observation of the next episode, once this one has ended."""

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Row, Info]:
        """Start an episode; see `GrowVectorEnv.reset`."""
        first = self._next
        if first is None or seed is not None or options:
            rows, info = self._vector.reset(seed=seed, options=options)
            first = rows[0], _of_first(info)
        super().reset(seed=None if seed is None else int(seed))
        self._now, self._next = self._vector.observation, None
        return first

    def step(self, action: object) -> tuple[Row, float, bool, bool, Info]:
        """Act and train until the next decision."""
        if self._next is not None:
            raise InvalidStateError(
                "step() after the end of the episode; call reset() first."
            )
        rows, rewards, over, _, info = self._vector.step([action])
        seen = rows[0], _of_first(info)
        self._now = self._vector.observation
        if over[0]:
            self._next = seen
            self._now = self._vector.world.final
            seen = info["final_obs"][0], _of_first(info["final_info"])
        return seen[0], float(rewards[0]), bool(over[0]), False, seen[1]

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which actions are legal now."""
        if self._now is None:
            raise InvalidStateError(
                "action_masks() before reset(); call reset() first."
            )
        return _numpy(self.actions.legal(self._now)[0])


def _results(ended: EpisodeReport, over: NDArray[np.bool_]) -> Info:
    """Results of ended episodes."""
    results = {}
    for name in ("score", "test", "added", "macs", "panicked"):
        values = _numpy(getattr(ended, name))
        column = np.zeros(len(over), dtype=bool if values.dtype == bool else float)
        column[over] = values
        results["test_score" if name == "test" else name] = column
    return results


def _of_first(info: Info) -> Info:
    """Info of the first environment."""
    return {
        name: values[0] if values.ndim > 1 else values[0].item()
        for name, values in info.items()
        if not name.startswith(("_", "final"))
    }


def _flagged(info: Info, where: NDArray[np.bool_]) -> Info:
    """Entries and their presence flags, as vector infos require."""
    return info | {f"_{name}": where.copy() for name in info}


def _numpy(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.numpy()
    return array


if ID not in gymnasium.registry:
    gymnasium.register(
        ID,
        entry_point=f"{__name__}:GrowEnv",
        vector_entry_point=f"{__name__}:GrowVectorEnv",
    )
