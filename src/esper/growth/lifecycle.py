"""The lifecycle of seeds as pure functions over `[env, slot]` tensors.

`act` applies one action per environment by the table of transitions. `after` advances
time: a seed trains and blends for the ticks of its tempo, up to HOLDING; alphas follow
their curves; a faded seed leaves its slot. A tick is a number of batches.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from math import pi
from typing import Final, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, Op
from esper.contracts.stages import LEGAL, NEXT_STAGE, SETTLES_TO, Stage

Record = TypeVar("Record")
LEAVING: Final = torch.tensor([*SETTLES_TO])
"""Stages that end in an empty slot once alpha has settled."""
SIGMOID_RANGE: Final = 6.0
"""The sigmoid curve runs from minus to plus this."""


def _sigmoid(time: Tensor) -> Tensor:
    low, high = (torch.sigmoid(time.new_tensor(x * SIGMOID_RANGE)) for x in (-1, 1))
    return (torch.sigmoid(SIGMOID_RANGE * (2 * time - 1)) - low) / (high - low)


CURVES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "LINEAR": lambda time: time,
    "COSINE": lambda time: (1 - torch.cos(pi * time)) / 2,
    "SIGMOID": _sigmoid,
}
"""Fraction of the distance by fraction of the time, in the order of `alpha_curve`."""


def alpha_at(
    start: Float[Tensor, "*seed"],
    end: Float[Tensor, "*seed"],
    moved: Int64[Tensor, "*moment"],
    length: Int64[Tensor, "*seed"],
    curve: Int64[Tensor, "*seed"],
) -> Float[Tensor, "*moment"]:
    """Alpha after `moved` of `length` batches; monotone, and exact at both ends."""
    time = (moved / length.clamp(min=1)).clamp(max=1.0).to(start.dtype)
    curves = torch.stack([function(time) for function in CURVES.values()])
    done = curves.gather(0, curve.expand(time.shape).unsqueeze(0)).squeeze(0)
    return torch.where(moved >= length, end, start + (end - start) * done)


CHOICE_VALUES: Final = {
    head.name: torch.tensor([*head.choices.values()]) for head in HEADS if head.choices
}
"""Values of each head's choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedStates:
    """State of all slots, without the weights of seeds."""

    stage: Int64[Tensor, "env slot"]
    age: Int64[Tensor, "env slot"]
    """Decisions spent in the stage."""
    blueprint: Int64[Tensor, "env slot"]
    """Index into the run's blueprints; -1 when empty."""
    style: Int64[Tensor, "env slot"]
    tempo: Int64[Tensor, "env slot"]
    """Ticks of training, and of blending."""
    alpha: Float[Tensor, "env slot"]
    alpha_from: Float[Tensor, "env slot"]
    """Alpha at the start of its current move."""
    alpha_target: Float[Tensor, "env slot"]
    moved: Int64[Tensor, "env slot"]
    """Batches since training or the current move of alpha began."""
    length: Int64[Tensor, "env slot"]
    """Batches that it takes in all."""
    curve: Int64[Tensor, "env slot"]

    @property
    def settled(self) -> Bool[Tensor, "env slot"]:
        """Whether alpha is constant."""
        return (self.moved >= self.length) | (self.stage == Stage.TRAINING)

    @classmethod
    def empty(
        cls, envs: int, slots: int, device: torch.device | str = "cpu"
    ) -> "SeedStates":
        """States of free slots."""
        whole = torch.zeros(envs, slots, dtype=torch.int64, device=device)
        real = torch.zeros(envs, slots, device=device)
        names = [field.name for field in fields(cls)]
        zeros = {name: real if name.startswith("alpha") else whole for name in names}
        return cls(**zeros | {"blueprint": whole - 1})


def possible(
    states: SeedStates, op: Int64[Tensor, " env"], min_age: int
) -> Bool[Tensor, "env slot"]:
    """Slots in which each environment's op is possible, by stage, age and alpha."""
    device = states.stage.device
    old, settled = (states.age >= min_age).long(), states.settled.long()
    return LEGAL.to(device)[op.unsqueeze(1), states.stage, old, settled]


def act(
    states: SeedStates,
    actions: Int64[Tensor, "env head"],
    min_age: int,
    tick: int = 1,
) -> tuple[SeedStates, Bool[Tensor, " env"]]:
    """Apply one action per environment.

    Tempos and speeds count ticks of `tick` batches. Returns the new states and where
    the action was possible; elsewhere nothing changes. WAIT is always possible.
    """
    device = states.stage.device
    op, slot = actions[:, HEAD["op"]], actions[:, HEAD["slot"]]
    slots = torch.arange(states.stage.shape[1], device=device)
    here = (slots == slot.unsqueeze(1)) & (op != Op.WAIT).unsqueeze(1)
    here &= possible(states, op, min_age)

    def chosen(head: str) -> Tensor:
        return CHOICE_VALUES[head].to(device)[actions[:, HEAD[head]]].unsqueeze(1)

    verb = op.unsqueeze(1)
    stage = torch.where(here, NEXT_STAGE.to(device)[verb, states.stage], states.stage)
    plants = here & (verb == Op.GERMINATE)
    blends = here & (verb == Op.ADVANCE) & (states.stage == Stage.TRAINING)
    sets = here & (verb == Op.SET_ALPHA)
    prunes = here & (verb == Op.PRUNE)
    moves = blends | sets | prunes

    target = torch.where(plants | sets, chosen("alpha_target"), states.alpha_target)
    target = torch.where(prunes, 0.0, target)
    still = states.alpha == target  # a move of zero length takes no time
    speed = torch.where(still, 0, chosen("alpha_speed"))
    tempo = torch.where(plants, chosen("tempo"), states.tempo)
    length = torch.where(plants | blends, tempo * tick, states.length)
    curve = torch.where(sets | prunes, chosen("alpha_curve"), states.curve)
    acted = SeedStates(
        stage=stage,
        age=torch.where(stage != states.stage, 0, states.age),
        blueprint=torch.where(
            plants, actions[:, HEAD["blueprint"]].unsqueeze(1), states.blueprint
        ),
        style=torch.where(plants | sets, chosen("style"), states.style),
        tempo=tempo,
        alpha=states.alpha,
        alpha_from=torch.where(moves, states.alpha, states.alpha_from),
        alpha_target=target,
        moved=torch.where(plants | moves, 0, states.moved),
        length=torch.where(sets | prunes, speed * tick, length),
        curve=torch.where(plants | blends, 0, curve),
    )
    return acted, here.any(dim=1) | (op == Op.WAIT)


def after(
    states: SeedStates, batches: Int64[Tensor, " env"], *, decision: bool = True
) -> SeedStates:
    """States after a number of batches; `decision` adds one to the ages."""
    stage, moved, alpha = _tended(states, batches.unsqueeze(1))
    age = torch.where(stage == states.stage, states.age, 0)
    older = replace(
        states,
        stage=stage,
        age=age + ((stage != Stage.DORMANT) if decision else 0),
        moved=moved,
        alpha=alpha,
    )
    envs, slots = stage.shape
    none = SeedStates.empty(envs, slots, stage.device)
    return select(stage == Stage.DORMANT, none, older)


def schedule(
    states: SeedStates, batches: int
) -> tuple[Float[Tensor, "env batch slot"], Bool[Tensor, "env batch slot"]]:
    """Alpha of every seed in each of the coming batches, and whether it trains."""
    count = torch.arange(batches, device=states.stage.device).view(1, -1, 1)
    stage, _, _ = _tended(states, count)
    _, _, alpha = _tended(states, count + 1)
    return alpha, stage == Stage.TRAINING


def _tended(
    states: SeedStates, batches: Int64[Tensor, "... 1"]
) -> tuple[Tensor, Tensor, Tensor]:
    """Stage, moved and alpha after batches without an action.

    Batches are `[env, 1]`, or `[env, moment, 1]` for several moments at once.
    """
    names = ("stage", "moved", "length", "alpha_from", "alpha_target", "curve")
    parts = (getattr(states, name) for name in names)
    stage, moved, length, start, end, curve = (
        part.unsqueeze(1) if batches.dim() == 3 else part for part in parts
    )
    moved = moved + batches
    # Training and blending take equally long, one after the other.
    grown = (stage == Stage.TRAINING) & (moved >= length)
    stage = torch.where(grown, Stage.BLENDING, stage)
    moved = torch.where(grown, moved - length, moved).minimum(length)
    settled = moved >= length
    alpha = alpha_at(start, end, moved, length, curve)
    alpha = torch.where(stage == Stage.TRAINING, 0.0, alpha)
    stage = torch.where((stage == Stage.BLENDING) & settled, Stage.HOLDING, stage)
    leaves = torch.isin(stage, LEAVING.to(stage.device)) & settled
    return torch.where(leaves, Stage.DORMANT, stage), moved, alpha


def freed(states: SeedStates, slots: Collection[int]) -> SeedStates:
    """The states of one environment with some slots free."""
    gone = torch.zeros_like(states.stage, dtype=torch.bool)
    gone[0, [*slots]] = True
    return select(gone, SeedStates.empty(*gone.shape), states)


def select(where: Bool[Tensor, "env ..."], new: Record, old: Record) -> Record:
    """Apply `torch.where` to every field of two records."""
    names = [field.name for field in fields(old)]  # type: ignore[arg-type]
    chosen = {n: torch.where(where, getattr(new, n), getattr(old, n)) for n in names}
    return type(old)(**chosen)
