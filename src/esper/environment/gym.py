r"""Growing a network as a Gymnasium environment, for agents of any library.

    gymnasium.make("esper.environment.gym:esper/Grow-v0", task="digits")
    gymnasium.make_vec("esper.environment.gym:esper/Grow-v0", num_envs=16)

An action is a number (`FlatActions`): WAIT, or an op in a slot; planting also names the
blueprint and SET_ALPHA the target, the other heads have defaults. An observation is a
row in [-1, 1] (`flatten`): shares and flags are clamped, a size without bounds becomes

    y = x / (half + |x|)

and what is not known reads 0 and has a flag beside it. The mask is `action_masks()` and
`info["action_mask"]`. An action that is not possible is a WAIT that costs the penalty,
with `info["invalid"]` set. The horizon terminates. The score on the test rows is in the
last info of an episode and nowhere else.

The same seed gives the same episodes; without one, the next episode of the run begins.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from itertools import product
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.errors import BadInput, CallOrder
from esper.contracts.stages import LEGAL, Stage
from esper.contracts.world import EpisodeReport, Observation
from esper.environment.growing import GrowingWorld
from esper.environment.settings import TERMS, WorldSettings
from esper.tasks.catalogue import task as find_task
from esper.tasks.task import Task

try:
    import gymnasium
    from gymnasium.spaces import Box, Discrete
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    raise BadInput(
        "esper/Grow-v0 needs gymnasium, which is not installed; "
        "pip install esper-lite[rl]"
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
"""Choices of heads that an agent does not choose, as far as the world allows them."""
CHOSEN_HEAD: Final = {Op.GERMINATE: "blueprint", Op.SET_ALPHA: "alpha_target"}
"""The head that an agent chooses besides op and slot."""


@dataclass(frozen=True, slots=True)
class FlatActions:
    """Every action that an agent can choose by its number; 0 is WAIT."""

    spec: ActionSpec
    actions: Int64[Tensor, "action head"]
    names: tuple[str, ...]
    """Such as `GERMINATE 2 widen_8`: the op, the slot, and what was chosen."""

    @classmethod
    def of(cls, spec: ActionSpec) -> "FlatActions":
        """Number the actions of an action space."""
        allowed = {
            head.name: [c for c in range(size) if bool(spec.allowed[index, c])]
            for index, (head, size) in enumerate(zip(HEADS, spec.sizes, strict=True))
        }
        choice_names = {head.name: [*head.choices] for head in HEADS}
        choice_names["blueprint"] = [blueprint.name for blueprint in spec.blueprints]
        rows, names = [[0] * len(HEADS)], [Op.WAIT.name]
        for op in map(Op, allowed["op"]):
            if op is Op.WAIT:
                continue
            defaults = {head: _default(head, op, allowed) for head in DEFAULT_CHOICES}
            head = CHOSEN_HEAD.get(op)
            choices = [None] if head is None else allowed[head]
            for slot, choice in product(allowed["slot"], choices):
                action = {"op": op.value, "slot": slot, **defaults}
                words = [op.name, str(slot)]
                if head is not None and choice is not None:
                    action[head] = choice
                    words.append(choice_names[head][choice])
                rows.append([action.get(head.name, 0) for head in HEADS])
                names.append(" ".join(words))
        return cls(spec, torch.tensor(rows), tuple(names))

    def __len__(self) -> int:
        """How many there are."""
        return len(self.names)

    def legal(self, observation: Observation) -> Bool[Tensor, "env action"]:
        """Which of them would be carried out now; WAIT always is."""
        slots, offers = observation.slots, observation.offers
        device = slots.stage.device
        op, slot, kind = (
            self.actions.to(device)[:, HEAD[name]]
            for name in ("op", "slot", "blueprint")
        )
        old = (slots.age[:, slot] >= self.spec.slots.min_age).long()
        settled = slots.alpha_settled[:, slot].long()
        legal = LEGAL.to(device)[op, slots.stage[:, slot], old, settled]
        left = observation.host.budget_left.unsqueeze(1)
        plantable = offers.fits[:, slot, kind] & (
            offers.parameters[:, slot, kind] <= left
        )
        return (op == Op.WAIT) | (legal & (plantable | (op != Op.GERMINATE)))


def _default(head: str, op: Op, allowed: Mapping[str, list[int]]) -> int:
    """The choice of a head that the agent does not choose; 0 where it is not used."""
    used = HEADS[HEAD[head]]
    if op not in used.used_by:
        return 0
    choice = [*used.choices].index(DEFAULT_CHOICES[head])
    return choice if choice in allowed[head] else allowed[head][-1]


HOST: Final[Mapping[str, float | None]] = {
    "progress": None,
    "budget_left": 0.5,
    "budget_unlimited": None,
    "rent": 0.1,
    "added": 0.5,
    "score": None,
    "score_slope": 0.01,
    "loss": 0.5,
    "loss_slope": 0.05,
    "plateau": None,
}
"""Features of a host, and the size that reads 1/2; None for shares and flags."""

SLOT: Final[Mapping[str, float | None]] = {
    **{f"is_{stage.name.lower()}": None for stage in Stage},
    "age": 4.0,
    "alpha": None,
    "alpha_target": None,
    "alpha_settled": None,
    "style": None,
    "parameters": 0.1,
    "depth": None,
    "capacity": None,
    "liveness": None,
    "gradient_share": None,
    "contribution": 0.1,
    "contribution_measured": None,
}
"""Features of a slot."""

OFFER: Final[Mapping[str, float | None]] = {
    "fits": None,
    "affordable": None,
    "planted": None,
    "parameters": 0.1,
    "macs": 0.1,
    "promise": 0.1,
    "promise_known": None,
}
"""Features of a blueprint at a slot."""

HUGE: Final = 1e8
"""Sizes are cut here: squashed it is 1."""


def flatten(observation: Observation) -> Float[Tensor, "env feature"]:
    """The observation of every environment as one row, each number in [-1, 1]."""
    host, slots, offers = observation.host, observation.slots, observation.offers
    unlimited = torch.isinf(host.budget_left)
    kinds = torch.arange(offers.fits.shape[2], device=offers.fits.device)
    measured = slots.contribution_measured
    return torch.cat(
        [
            _columns(
                HOST,
                host,
                budget_left=torch.where(unlimited, 0.0, host.budget_left),
                budget_unlimited=unlimited,
            ),
            _columns(
                SLOT,
                slots,
                contribution=torch.where(measured, slots.contribution, 0.0),
                **{f"is_{s.name.lower()}": slots.stage == s.value for s in Stage},
            ),
            _columns(
                OFFER,
                offers,
                affordable=offers.parameters <= host.budget_left[:, None, None],
                planted=slots.blueprint.unsqueeze(2) == kinds,
                promise=torch.where(offers.promise_known, offers.promise, 0.0),
            ),
        ],
        dim=1,
    )


def feature_names(spec: ActionSpec) -> tuple[str, ...]:
    """The name of each place of a row, such as `slot 2 widen_8 promise`."""
    slots, kinds = range(spec.slots.max_slots), [b.name for b in spec.blueprints]
    return (
        *(f"host {name}" for name in HOST),
        *(f"slot {slot} {name}" for slot in slots for name in SLOT),
        *(f"slot {s} {kind} {name}" for s in slots for kind in kinds for name in OFFER),
    )


def _columns(
    columns: Mapping[str, float | None], record: object, **computed: Tensor
) -> Float[Tensor, "env feature"]:
    """The columns of a record side by side, bounded."""
    values = torch.stack(
        [
            (computed[name] if name in computed else getattr(record, name)).float()
            for name in columns
        ],
        dim=-1,
    )
    curves = [(1.0, 0.0) if half is None else (half, 1.0) for half in columns.values()]
    plain, bend = torch.tensor(curves, device=values.device).unbind(1)
    values = values.nan_to_num(nan=0.0).clamp(-HUGE, HUGE)
    return (values / (plain + bend * values.abs())).clamp(-1.0, 1.0).flatten(1)


class _World(GrowingWorld):
    """A growing world that keeps the last observation of episodes that ended."""

    final: Observation | None = None
    """Every environment just before the ended ones began anew; None at first."""

    def _begin(self, envs: Iterable[int]) -> None:
        if self.ended is not None:
            self.final = self._observe()
        super()._begin(envs)


class _Maker:
    """Makes worlds from the keywords of an environment.

    Args:
        keywords: Fields of `WorldSettings`, `task` (a task or its name) and `device`.
    """

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        known = ["task", *(field.name for field in fields(WorldSettings)), "device"]
        for name in keywords:
            if name not in known:
                near = get_close_matches(str(name), known, n=1, cutoff=0.0)[0]
                raise BadInput(
                    f"expected settings out of {', '.join(known)}; got {name!r}; did "
                    f"you mean {near!r}?"
                )
        given = dict(keywords)
        self.device = given.pop("device", "cpu")
        task = given.pop("task", "digits")
        self.task = find_task(task) if isinstance(task, str) else task
        if not isinstance(self.task, Task):
            raise BadInput(f"task must be a Task or the name of one, got {task!r:.99}.")
        self.settings = WorldSettings(**given)

    def world(
        self, num_envs: int, rng_seed: int, options: Mapping[str, Any] | None = None
    ) -> _World:
        """A world that was not reset yet; options replace rent, budget and rate."""
        if not isinstance(options, Mapping | None):
            raise BadInput(f"options must be a dict of terms, got {options!r:.99}.")
        if unknown := {*(options or {})} - {*TERMS}:
            raise BadInput(
                f"options may have {', '.join(TERMS)}; got {min(map(repr, unknown))}."
            )
        settings = replace(self.settings, **(options or {}))
        return _World(
            self.task, num_envs, rng_seed, settings=settings, device=self.device
        )


class GrowEnv(gymnasium.Env[Row, object]):
    """One host that trains and grows.

    Args:
        render_mode: `ansi` for `render()` to describe the host in a line.
        settings: Fields of `WorldSettings`, `task` and `device`.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012

    def __init__(
        self,
        render_mode: str | None = None,
        **settings: Any,  # noqa: ANN401
    ) -> None:
        if render_mode not in (None, "ansi"):
            raise BadInput(f"render_mode must be None or 'ansi', got {render_mode!r}.")
        self.render_mode = render_mode
        self._make = _Maker(settings)
        self._world = self._make.world(1, 0)
        self.actions = FlatActions.of(self._world.spec)
        """What every action means."""
        self.features = feature_names(self._world.spec)
        """The name of every place of an observation."""
        self.action_space = Discrete(len(self.actions))
        self.observation_space = _box(len(self.features))
        self._now: Observation | None = None
        self._next: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Row, Info]:
        """Begin an episode.

        Args:
            seed: Begin a new run: it decides data, hosts, batches and terms. Without
                one, the run goes on with its next episode.
            options: Begin a new run with other terms (rent, budget, rate).
        """
        if seed is not None or options or self._now is None:
            world = self._make.world(1, _run_number(self, seed), options)
            super().reset(seed=seed)
            self._world, self._now = world, world.reset()
        else:
            super().reset()
            self._now = self._world.reset() if self._next is None else self._next
        self._next = None
        return self._row(), {**self._info(), "invalid": False}

    def step(self, action: object) -> tuple[Row, float, bool, bool, Info]:
        """Carry out an action and train until the next decision."""
        if self._now is None or self._next is not None:
            late = "before reset()" if self._now is None else "after the last one"
            raise CallOrder(f"step() {late}; call reset() first.")
        if not self.action_space.contains(action):
            raise BadInput(
                f"action must be a whole number in 0..{len(self.actions) - 1}, got "
                f"{action!r}."
            )
        number = int(np.asarray(action))
        result = self._world.step(self.actions.actions[number : number + 1])
        self._now, ended = result.observation, self._world.ended
        if ended is not None:
            assert self._world.final is not None
            self._now, self._next = self._world.final, result.observation
        info = {**self._info(), "invalid": bool(self._world.illegal[0])}
        if ended is not None:
            info |= {name: value[0].item() for name, value in _results(ended).items()}
        reward = float(result.reward[0])
        return self._row(), reward, ended is not None, False, info

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are possible now."""
        if self._now is None:
            raise CallOrder("action_masks() before reset(); call reset() first.")
        return _numpy(self.actions.legal(self._now)[0])

    def render(self) -> str | None:
        """Progress, score and slots in a line; None without a render mode."""
        if self.render_mode is None or self._now is None:
            return None
        host, slots = self._now.host, self._now.slots
        seeds = (Stage(stage).name.lower() for stage in slots.stage[0].tolist())
        return (
            f"{float(host.progress[0]):.0%} score {float(host.score[0]):.3f} "
            f"added {float(host.added[0]):.2f} slots {' '.join(seeds)}"
        )

    def _row(self) -> Row:
        assert self._now is not None
        return _numpy(flatten(self._now)[0])

    def _info(self) -> Info:
        return {"action_mask": self.action_masks().astype(np.int8)}


class GrowVectorEnv(VectorEnv[Row, object, NDArray[Any]]):
    """Hosts that train and grow together, much faster than one by one.

    An ended environment begins anew in the same step: its last observation and info are
    in `final_obs` and `final_info`. Environments differ by their number, not by a seed
    of their own; the first is the `GrowEnv` of the seed.

    Args:
        num_envs: How many hosts.
        settings: Fields of `WorldSettings`, `task` and `device`.
    """

    metadata: dict[str, Any] = {  # noqa: RUF012
        "render_modes": [],
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(self, num_envs: int = 1, **settings: Any) -> None:  # noqa: ANN401
        self._make = _Maker(settings)
        self._world = self._make.world(num_envs, 0)
        self.num_envs = num_envs
        self.actions = FlatActions.of(self._world.spec)
        """What every action means."""
        self.features = feature_names(self._world.spec)
        """The name of every place of an observation."""
        self.single_action_space = Discrete(len(self.actions))
        self.single_observation_space = _box(len(self.features))
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._now: Observation | None = None

    def reset(
        self, *, seed: int | None = None, options: Info | None = None
    ) -> tuple[Row, Info]:
        """Begin an episode everywhere; see `GrowEnv.reset`."""
        if seed is not None or options or self._now is None:
            world = self._make.world(self.num_envs, _run_number(self, seed), options)
            super().reset(seed=seed)
            self._now, self._world = world.reset(), world
        else:
            self._now = self._world.reset()
        none = np.zeros(self.num_envs, dtype=np.bool_)
        return _numpy(flatten(self._now)), self._info(self._now, ~none, none)

    def step(
        self, actions: object
    ) -> tuple[Row, NDArray[Any], NDArray[Any], NDArray[Any], Info]:
        """Carry out an action everywhere and train until the next decision."""
        if self._now is None:
            raise CallOrder("step() before reset(); call reset() first.")
        numbers = np.asarray(actions)
        if not (
            numbers.shape == (self.num_envs,)
            and numbers.dtype.kind in "iu"
            and bool(((numbers >= 0) & (numbers < len(self.actions))).all())
        ):
            raise BadInput(
                f"actions must be {self.num_envs} whole numbers in "
                f"0..{len(self.actions) - 1}, got {actions!r:.99}."
            )
        chosen = torch.from_numpy(numbers.astype(np.int64))
        result = self._world.step(self.actions.actions[chosen])
        self._now = result.observation
        over = _numpy(result.terminated)
        invalid = _numpy(self._world.illegal)
        info = self._info(self._now, np.ones_like(over), invalid & ~over)
        if self._world.ended is not None:
            info |= self._final(self._world.ended, over, invalid & over)
        return (
            _numpy(flatten(self._now)),
            _numpy(result.reward).astype(np.float64),
            over,
            _numpy(result.truncated),
            info,
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Which actions are possible now, bool [env, action]."""
        if self._now is None:
            raise CallOrder("action_masks() before reset(); call reset() first.")
        return _numpy(self.actions.legal(self._now))

    def _info(
        self, see: Observation, where: NDArray[np.bool_], invalid: NDArray[np.bool_]
    ) -> Info:
        """The info of some environments; zero for the others."""
        masks = _numpy(self.actions.legal(see)) & where[:, np.newaxis]
        return _flagged(
            {"action_mask": masks.astype(np.int8), "invalid": invalid}, where
        )

    def _final(
        self, ended: EpisodeReport, over: NDArray[np.bool_], invalid: NDArray[np.bool_]
    ) -> Info:
        """The last observation and info of the episodes that ended."""
        assert self._world.final is not None
        rows = np.full(self.num_envs, None, dtype=object)
        last = _numpy(flatten(self._world.final))
        for env in np.flatnonzero(over):
            rows[env] = last[env]
        results = {}
        for name, values in _results(ended).items():
            results[name] = np.zeros(self.num_envs, dtype=values.dtype)
            results[name][over] = values
        info = self._info(self._world.final, over, invalid) | _flagged(results, over)
        return _flagged({"final_obs": rows, "final_info": info}, over)


def _results(ended: EpisodeReport) -> dict[str, NDArray[Any]]:
    """Results of the episodes that ended; `test_score` is on the test rows."""
    found = {f.name: _numpy(getattr(ended, f.name)) for f in fields(EpisodeReport)}
    del found["env"]
    found["test_score"] = found.pop("test")
    return {
        name: values if values.dtype == np.bool_ else values.astype(np.float64)
        for name, values in found.items()
    }


def _flagged(info: Info, where: NDArray[np.bool_]) -> Info:
    """Each entry with a flag of where it holds, as vector infos are written."""
    return info | {f"_{name}": where.copy() for name in info}


def _run_number(env: GrowEnv | GrowVectorEnv, seed: int | None) -> int:
    """The number of a new run: the seed, else a random one."""
    if seed is None:
        return int(env.np_random.integers(2**31))
    if not isinstance(seed, int) or seed < 0:
        raise BadInput(f"seed must be a whole number from 0, got {seed!r:.99}.")
    return int(seed)


def _box(features: int) -> "Box[np.float32]":
    return Box(-1.0, 1.0, (features,), np.float32)


def _numpy(values: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = values.detach().cpu().numpy()
    return array


if ID not in gymnasium.registry:
    gymnasium.register(
        ID,
        entry_point=f"{__name__}:GrowEnv",
        vector_entry_point=f"{__name__}:GrowVectorEnv",
    )
