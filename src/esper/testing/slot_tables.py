r"""Transition and value tables of one simulated slot.

    DORMANT -> TRAINING (age 0..3) -> BLENDING (alpha climbs) -> HOLDING -> FOSSILIZED
       ^           \______________________\____________________\
       +------------- a chain of four cooling steps; a prune enters it late

A *life* is the state of a seed without its blueprint. An *act* is the part of an action
that changes the life. `passed` and `acted` are the rules; the tables hold them for all
reachable lives. Every number is a small multiple of a power of two, so sums are exact
in float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from math import prod
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import SETTLES_TO, TRANSITIONS, Stage, is_legal

SPEC: Final = ActionSpec(
    slots=SlotConfig(max_slots=2, min_age=1),
    blueprints=tuple(
        blueprint
        for blueprint in BLUEPRINTS
        if blueprint.name in ("low_rank_4", "widen_16", "residual_mlp")
    ),
    narrowed={
        "tempo": ("FAST", "STANDARD"),
        "alpha_target": ("HALF", "FULL"),
        "alpha_speed": ("INSTANT", "FAST"),
        "alpha_curve": ("LINEAR", "SIGMOID"),
    },
    measured=True,
)
"""Action space of the simulated world."""

MATURITY: Final = (0.0, 0.375, 0.75, 1.0)
"""Learnt fraction of a seed's gain, by its age in TRAINING."""
LEARNT: Final = 0.25
"""Worth of a mature seed in TRAINING, as a fraction of its gain."""
UNFOSSILIZED: Final = 0.75
"""Worth of a mature seed at the best alpha in HOLDING."""
LONGEST_FADE: Final = 4
"""Cooling steps of an inherited seed; a prune takes the last 1 or 2."""
WRONG_STYLE: Final = 1 / 32
"""Damage of a style that does not suit the slot's depth."""
WRONG_CURVE: Final = 1 / 32
"""Damage of a curve that does not suit the slot's liveness."""
HASTE: Final = 3 / 64
"""Damage of a one-step blend or fade in a slot of low capacity."""


@dataclass(frozen=True, slots=True)
class SlotLife:
    """State of a seed without its blueprint."""

    stage: Stage
    age: int = 0
    """Steps in the stage, clipped; in COOLING the position in the chain."""
    alpha: float = 0.0
    target: float = 0.0
    steps: int = 0
    """Steps until alpha or the slot has settled; in TRAINING, of the next blend."""
    maturity: float = 0.0

    @property
    def settled(self) -> bool:
        """Whether alpha is constant."""
        if self.stage is Stage.COOLING:
            return self.alpha == 0.0
        return self.steps == 0 or self.stage is Stage.TRAINING

    @property
    def measured(self) -> bool:
        """Whether the contribution is observed."""
        return self.alpha > 0.0 and self.stage is not Stage.FOSSILIZED


@dataclass(frozen=True, slots=True)
class Act:
    """Part of an action that changes a slot; 0 for heads that the op does not use."""

    op: Op
    tempo: int = 0
    target: float = 0.0
    speed: int = 0

    @property
    def hasty(self) -> bool:
        """Whether alpha reaches its target in one step."""
        return self.tempo == 1 or self.speed == 1


def passed(life: SlotLife) -> SlotLife:
    """Return the life after one step without an act."""
    match life.stage:
        case Stage.TRAINING:
            return replace(life, age=min(life.age + 1, len(MATURITY) - 1))
        case Stage.BLENDING | Stage.HOLDING:
            older = replace(life, age=SPEC.slots.min_age)
            if life.steps == 0:
                return older
            moved = life.alpha + (life.target - life.alpha) / life.steps
            return replace(older, alpha=moved, steps=life.steps - 1)
        case Stage.COOLING:
            gone = SlotLife(SETTLES_TO[life.stage])
            return cooling(life.steps - 1) if life.steps > 1 else gone
        case _:
            return life


def acted(life: SlotLife, act: Act) -> SlotLife | None:
    """Return the life after an act; None if the act is illegal."""
    if act.op is Op.WAIT:
        return passed(life)
    old_enough = life.age >= SPEC.slots.min_age
    if not is_legal(act.op, life.stage, old_enough=old_enough, settled=life.settled):
        return None
    stage = TRANSITIONS[act.op, life.stage].next
    match act.op:
        case Op.GERMINATE:
            return SlotLife(stage, target=act.target, steps=act.tempo)
        case Op.SET_ALPHA:
            steps = 0 if act.target == life.alpha else act.speed
            return passed(replace(life, target=act.target, steps=steps))
        case Op.PRUNE:
            return cooling(act.speed)
    learnt = life.stage is Stage.TRAINING
    maturity = MATURITY[life.age] if learnt else life.maturity
    return replace(life, stage=stage, age=0, maturity=maturity)


def cooling(steps: int) -> SlotLife:
    """Return a seed that is removed after `steps`; alpha is 0 in the last two."""
    return SlotLife(
        Stage.COOLING,
        age=LONGEST_FADE - steps,
        alpha=max(0.0, (steps - 2) / LONGEST_FADE),
        steps=steps,
        maturity=1.0,
    )


def mature(stage: Stage, alpha: float) -> SlotLife:
    """Return a fully trained seed with constant alpha."""
    age = 0 if stage is Stage.FOSSILIZED else SPEC.slots.min_age
    return SlotLife(stage, age=age, alpha=alpha, target=alpha, maturity=1.0)


def worth(life: SlotLife, *, wants_half: bool) -> float:
    """Return the worth of a seed, as a fraction of its blueprint's gain."""
    effect = life.alpha
    if wants_half:
        effect = 2 * life.alpha if life.alpha < 0.5 else 1.5 - life.alpha
    match life.stage:
        case Stage.TRAINING:
            return LEARNT * MATURITY[life.age]
        case Stage.BLENDING | Stage.HOLDING:
            return life.maturity * (LEARNT + (UNFOSSILIZED - LEARNT) * effect)
        case _:
            return life.maturity * effect


def suiting_style(deep: bool) -> str:
    """Return the style that does no damage."""
    return "SCALE" if deep else "ADD"


def suiting_curve(lively: bool) -> str:
    """Return the curve that does no damage."""
    return "LINEAR" if lively else "SIGMOID"


def damage(
    act: Act,
    style: str | None,
    curve: str | None,
    deep: bool,
    fragile: bool,
    lively: bool,
) -> float:
    """Return the damage of choices that do not suit the slot."""
    return (
        WRONG_STYLE * (style is not None and style != suiting_style(deep))
        + WRONG_CURVE * (curve is not None and curve != suiting_curve(lively))
        + HASTE * (fragile and act.hasty)
    )


CODED: Final = ("op", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve")
"""Heads that an action code enumerates: all but slot and blueprint."""


def coded_actions() -> Iterator[tuple[Act, dict[str, str], bool]]:
    """Yield act, used choices, and whether all are allowed, for every code."""
    for choices in product(*(HEADS[HEAD[name]].choices for name in CODED)):
        op = Op[choices[0]]
        used = {
            name: choice
            for name, choice in zip(CODED, choices, strict=True)
            if op in HEADS[HEAD[name]].used_by
        }
        number = {name: HEADS[HEAD[name]].choices[used[name]] for name in used}
        act = Act(
            op,
            int(number.get("tempo", 0)),
            number.get("alpha_target", 0.0),
            int(number.get("alpha_speed", 0)),
        )
        allowed = all(used[n] in SPEC.narrowed.get(n, used.values()) for n in used)
        yield act, used, allowed


def every_life(acts: tuple[Act, ...]) -> tuple[SlotLife, ...]:
    """Return every reachable life; DORMANT is the first."""
    found = [SlotLife(Stage.DORMANT), cooling(LONGEST_FADE)]
    found += [
        mature(stage, alpha)
        for stage in (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED)
        for alpha in (0.5, 1.0)
    ]
    for life in found:  # the loop appends to it
        for act in acts:
            after = acted(life, act)
            if after is not None and after not in found:
                found.append(after)
    return tuple(found)


ACTS: Final = tuple(
    dict.fromkeys(act for act, _, allowed in coded_actions() if allowed)
)
"""All acts; WAIT is the first."""
NO_ACT: Final = len(ACTS)
"""Index of an act that is always illegal."""
LIVES: Final = every_life(ACTS)
LIFE: Final = {life: index for index, life in enumerate(LIVES)}
"""Index of each life."""
EMPTY: Final = LIFE[SlotLife(Stage.DORMANT)]
NATURES: Final = tuple(product((False, True), repeat=3))
"""Traits of a slot: (deep, fragile, lively)."""


@dataclass(frozen=True, slots=True)
class SlotTables:
    """The rules as tensors; tables with two axes are flattened."""

    stage: Int64[Tensor, " life"]
    age: Int64[Tensor, " life"]
    alpha: Float[Tensor, " life"]
    target: Float[Tensor, " life"]
    settled: Bool[Tensor, " life"]
    measured: Bool[Tensor, " life"]
    """Whether the contribution is observed."""
    worth: Float[Tensor, " life_half"]
    """Fraction of the gain, by life and whether the slot wants half."""
    following: Int64[Tensor, " life_act"]
    """Next life; that of WAIT if the act is illegal. The last act is `NO_ACT`."""
    legal: Bool[Tensor, " life_act"]
    """Whether the life allows the act."""
    act: Int64[Tensor, " code"]
    """Act of a code; `NO_ACT` if a used choice is not allowed."""
    damage: Float[Tensor, " code_nature"]
    """Damage of a code, by the traits of the slot."""
    strides: Int64[Tensor, " head"]
    """`(actions * strides).sum(-1)` is the code of an action."""


@cache
def slot_tables() -> SlotTables:
    """Compute the tables, once."""
    after = [[*(acted(life, act) for act in ACTS), None] for life in LIVES]
    acts, damages = [], []
    for act, used, allowed in coded_actions():
        acts.append(ACTS.index(act) if allowed else NO_ACT)
        damages += [
            damage(act, used.get("style"), used.get("alpha_curve"), *nature)
            for nature in NATURES
        ]
    of_life = ("stage", "age", "alpha", "target", "settled", "measured")
    sizes = [SPEC.sizes[HEAD[name]] for name in CODED]
    strides = {name: prod(sizes[n + 1 :]) for n, name in enumerate(CODED)}
    return SlotTables(
        **{n: torch.tensor([getattr(life, n) for life in LIVES]) for n in of_life},
        worth=torch.tensor(
            [worth(life, wants_half=half) for life in LIVES for half in (False, True)]
        ),
        following=torch.tensor(
            [
                LIFE[passed(life) if then is None else then]
                for life, row in zip(LIVES, after, strict=True)
                for then in row
            ]
        ),
        legal=torch.tensor([then is not None for row in after for then in row]),
        act=torch.tensor(acts),
        damage=torch.tensor(damages),
        strides=torch.tensor([strides.get(head.name, 0) for head in HEADS]),
    )
