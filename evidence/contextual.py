"""A linear bandit learns which of a few schedules suits which host.

Every host is grown by every arm: worlds are made anew from one number, and until the
look all arms only wait, so the context is the same and returns are paired. What is
predicted is by how much an arm's return is above the mean of all arms on that host,

    weights = argmin  |X w - y|^2 / n + ridge * |w|^2,

with columns of X scaled to unit variance and the constant free.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.world import Controller, VectorWorld
from esper.experiment.statistics import Floats
from esper.tamiyo.schedule import Schedule
from evidence.bandit import CONTEXT, LOOK, LinearBandit, OneChoice
from evidence.search import MakeWorlds, Sweeps

RIDGE: Final = 0.01
"""Weight of the penalty, for columns of unit variance."""
_CONSTANT: Final = 1e-6  # a column that varies less holds nothing but rounding
ARMS: Final = (
    Schedule(count=0),
    Schedule(blueprint="widen_8", count=1),
    Schedule(blueprint="widen_8", count=4, every=0.0),
    Schedule(blueprint="widen_16", count=2, every=0.0),
    Schedule(blueprint="widen_32", count=1),
    Schedule(blueprint="widen_32", count=2, every=0.0),
    Schedule(count=8, every=0.0),
    Schedule(count=8, start=0.1, every=0.1),
)
"""From nothing over one small seed to all that the budget allows, at once or slowly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A bandit that has learnt; what makes a controller of it."""

    arms: tuple[Schedule, ...]
    weights: tuple[tuple[float, ...], ...]
    """What each number of `CONTEXT` adds to what is predicted of each arm."""
    look: int
    """Decisions that are waited for."""
    hosts: int
    """Hosts that were grown, each by every arm."""
    env_steps: int
    """Decisions that this took, over all environments."""

    def __call__(self, spec: ActionSpec) -> Controller:
        """The bandit in this action space."""
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return LinearBandit(spec, self.arms, weights, self.look)


def fit_bandit(
    make_worlds: MakeWorlds,
    env_steps: int,
    rng_seed: int,
    *,
    arms: Sequence[Schedule] = ARMS,
    look: int = LOOK,
) -> Fitted:
    """Grow as many hosts by every arm as the steps allow, and learn from them.

    Args:
        make_worlds: Makes the worlds that are learnt from.
        env_steps: Decisions that may be spent, over all environments.
        rng_seed: Decides which hosts.
        arms: The schedules to choose from.
        look: Decisions that are waited for before the choice.
    """
    sweeps = Sweeps(make_worlds, env_steps, rng_seed, "bandit")
    contexts, returns = list[Floats](), list[Floats]()
    while grown := _grow(sweeps, len(contexts), arms, look):
        contexts.append(grown[0])
        returns.append(grown[1])
    if not contexts:
        raise BadInput(
            f"env_steps must be enough for {len(arms)} arms to grow the same hosts; "
            f"one took {sweeps.longest}, got {env_steps}."
        )
    context, paid = np.concatenate(contexts), np.concatenate(returns)
    if not np.isfinite(context).all():
        raise BadInput(f"look must be before the end of every episode, got {look}.")
    above = paid - paid.mean(axis=1, keepdims=True)
    return Fitted(
        arms=tuple(arms),
        weights=tuple(tuple(row) for row in ridge(context, above).T.tolist()),
        look=look,
        hosts=len(context),
        env_steps=sweeps.spent,
    )


def ridge(
    context: Float[np.ndarray, "host context"],
    paid: Float[np.ndarray, "host arm"],
    penalty: float = RIDGE,
) -> Float[np.ndarray, "context arm"]:
    """Weights for the contexts as they are, of which the last column is all ones."""
    columns, mean = context[:, :-1], context[:, :-1].mean(axis=0)
    spread = columns.std(axis=0)
    scaled = (columns - mean) / np.where(spread > _CONSTANT, spread, np.inf)
    gram = scaled.T @ scaled / len(scaled) + penalty * np.eye(scaled.shape[1])
    weights = np.linalg.solve(gram, scaled.T @ (paid - paid.mean(axis=0)) / len(scaled))
    weights /= np.where(spread > _CONSTANT, spread, np.inf)[:, None]
    return np.vstack([weights, paid.mean(axis=0) - mean @ weights])


def as_json(fitted: Fitted) -> str:
    """What was learnt, as text."""
    return json.dumps(asdict(fitted))


def from_json(text: str) -> Fitted:
    """What a text of `as_json` stands for."""
    table: dict[str, Any] = json.loads(text)
    arms = tuple(Schedule(**arm) for arm in table["arms"])
    weights = tuple(tuple(row) for row in table["weights"])
    return Fitted(**table | {"arms": arms, "weights": weights})


def _grow(
    sweeps: Sweeps, group: int, arms: Sequence[Schedule], look: int
) -> tuple[Floats, Floats] | None:
    """Contexts [host, context] and returns [host, arm] of a group; None: too dear."""
    returns, kept = list[Floats](), list[_Turn]()
    for shift in range(len(arms)):
        if not sweeps.affords(len(arms) - shift):
            return None
        worlds = sweeps.worlds(group)
        kept = [_Turn(world, arms, look, shift) for world in worlds]
        sweep = sweeps.play(worlds, [turn.controller for turn in kept])
        returns.append(np.concatenate(sweep.returns))
    number = np.concatenate([np.arange(turn.envs) for turn in kept])
    # An arm was played by host `number` when the shift was what it lacks to the arm.
    when = (np.arange(len(arms))[:, None] - number) % len(arms)  # [arm, host]
    paid = np.take_along_axis(np.stack(returns), when, axis=0).T
    return np.concatenate([turn.context for turn in kept]), paid


class _Turn:
    """Who plays which arm in a world, and what is seen at the look."""

    def __init__(
        self, world: VectorWorld, arms: Sequence[Schedule], look: int, shift: int
    ) -> None:
        self.envs, self._look, self._calls = world.num_envs, look, 0
        self._turn = (torch.arange(self.envs) + shift) % len(arms)
        self.context: Floats = np.full((self.envs, len(CONTEXT)), np.nan)
        self.controller = OneChoice(world.spec, arms, self._choose, look)

    def _choose(self, seen: Float[Tensor, "env context"]) -> Int64[Tensor, " env"]:
        if self._calls == self._look:
            self.context = seen.double().cpu().numpy()
        self._calls += 1
        return self._turn.to(seen.device)
