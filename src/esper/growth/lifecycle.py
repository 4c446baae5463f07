"""The life of every seed of every host: two pure functions over `[env, slot]` records.

`act` carries out one action per host by the table of transitions; `tick` lets one
decision pass: seeds age, alphas travel, and a seed that has cooled down leaves its
slot. A single model is the same code with one environment.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, Op
from esper.contracts.stages import LEGAL, NEXT_STAGE, SETTLES_TO, Stage
from esper.growth.alpha import travel

LEAVING: Final = torch.tensor([*SETTLES_TO])
"""Stages that end in an empty slot once alpha has settled."""


def _meanings(head: str) -> Tensor:
    return torch.tensor([*HEADS[HEAD[head]].choices.values()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Lives:
    """All that the future of seeds depends on, besides their weights."""

    stage: Int64[Tensor, "env slot"]
    age: Int64[Tensor, "env slot"]
    """Decisions spent in the stage."""
    blueprint: Int64[Tensor, "env slot"]
    """Index into the run's blueprints; -1 when empty."""
    style: Int64[Tensor, "env slot"]
    tempo: Int64[Tensor, "env slot"]
    """Decisions that the blend will take."""
    alpha: Float[Tensor, "env slot"]
    alpha_from: Float[Tensor, "env slot"]
    """Where the present move began."""
    alpha_target: Float[Tensor, "env slot"]
    moved: Int64[Tensor, "env slot"]
    """Decisions of the present move that have passed."""
    length: Int64[Tensor, "env slot"]
    """Decisions the present move takes."""
    curve: Int64[Tensor, "env slot"]

    @property
    def settled(self) -> Bool[Tensor, "env slot"]:
        """Whether alpha stands still."""
        return self.moved >= self.length

    @classmethod
    def empty(
        cls, envs: int, slots: int, device: torch.device | str = "cpu"
    ) -> "Lives":
        """Every slot free."""
        whole = torch.zeros(envs, slots, dtype=torch.int64, device=device)
        real = torch.zeros(envs, slots, device=device)
        return cls(
            stage=whole,
            age=whole,
            blueprint=whole - 1,
            style=whole,
            tempo=whole,
            alpha=real,
            alpha_from=real,
            alpha_target=real,
            moved=whole,
            length=whole,
            curve=whole,
        )


def possible(
    lives: Lives, op: Int64[Tensor, " env"], min_age: int
) -> Bool[Tensor, "env slot"]:
    """Where each environment's op is possible, as far as the slot's life goes."""
    device = lives.stage.device
    old, settled = (lives.age >= min_age).long(), lives.settled.long()
    return LEGAL.to(device)[op.unsqueeze(1), lives.stage, old, settled]


def act(
    lives: Lives, actions: Int64[Tensor, "env head"], min_age: int
) -> tuple[Lives, Bool[Tensor, " env"]]:
    """Carry out one sentence per environment.

    Returns:
        The lives, and where the sentence was carried out; elsewhere it was not
        possible and nothing changed. WAIT is always possible.
    """
    device = lives.stage.device
    op, slot = actions[:, HEAD["op"]], actions[:, HEAD["slot"]]
    slots = torch.arange(lives.stage.shape[1], device=device)
    here = (slots == slot.unsqueeze(1)) & (op != Op.WAIT).unsqueeze(1)
    here &= possible(lives, op, min_age)

    def said(head: str) -> Tensor:
        meanings = _meanings(head).to(device)
        return meanings[actions[:, HEAD[head]]].unsqueeze(1)

    def put(where: Tensor, new: Tensor | int | float, old: Tensor) -> Tensor:
        return torch.where(
            where, torch.as_tensor(new, dtype=old.dtype, device=device), old
        )

    verb = op.unsqueeze(1)
    stage = torch.where(here, NEXT_STAGE.to(device)[verb, lives.stage], lives.stage)
    plants = here & (verb == Op.GERMINATE)
    blends = here & (verb == Op.ADVANCE) & (lives.stage == Stage.TRAINING)
    sets = here & (verb == Op.SET_ALPHA)
    prunes = here & (verb == Op.PRUNE)
    moves = blends | sets | prunes

    target = put(
        plants | sets, said("alpha_target").to(lives.alpha), lives.alpha_target
    )
    target = put(prunes, 0.0, target)
    speed = said("alpha_speed").to(torch.int64)
    still = lives.alpha == target  # nothing to fade, nothing to wait for
    length = torch.where(blends, lives.tempo, lives.length)
    length = torch.where(sets | prunes, torch.where(still, 0, speed), length)
    curve = torch.where(sets | prunes, said("alpha_curve").to(torch.int64), lives.curve)
    acted = Lives(
        stage=stage,
        age=put(stage != lives.stage, 0, lives.age),
        blueprint=torch.where(
            plants, actions[:, HEAD["blueprint"]].unsqueeze(1), lives.blueprint
        ),
        style=torch.where(plants | sets, said("style").to(torch.int64), lives.style),
        tempo=torch.where(plants, said("tempo").to(torch.int64), lives.tempo),
        alpha=lives.alpha,
        alpha_from=torch.where(moves, lives.alpha, lives.alpha_from),
        alpha_target=target,
        moved=put(moves, 0, lives.moved),
        length=length,
        curve=put(blends, 0, curve),
    )
    return acted, here.any(dim=1) | (op == Op.WAIT)


def tick(lives: Lives) -> Lives:
    """Let one decision pass."""
    moving = (lives.moved < lives.length).to(torch.int64)
    moved = lives.moved + moving
    alpha = travel(
        lives.alpha_from, lives.alpha_target, moved, lives.length, lives.curve
    )
    alpha = torch.where(lives.stage == Stage.TRAINING, 0.0, alpha)
    older = replace(
        lives,
        age=lives.age + (lives.stage != Stage.DORMANT),
        moved=moved,
        alpha=alpha,
    )
    gone = torch.isin(lives.stage, LEAVING.to(lives.stage.device)) & older.settled
    envs, slots = lives.stage.shape
    none = Lives.empty(envs, slots, lives.stage.device)
    return select(gone, none, older)


def select(where: Bool[Tensor, "env slot"], new: Lives, old: Lives) -> Lives:
    """The new lives where the mask is set, the old ones elsewhere."""
    return Lives(
        **{
            field.name: torch.where(
                where, getattr(new, field.name), getattr(old, field.name)
            )
            for field in fields(Lives)
        }
    )
