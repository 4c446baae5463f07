r"""An analytic growth world with two slots per host and a known optimum.

    phi    = sum over slots of worth(life) * gain[blueprint]  -  rent * parameters
    reward = phi' - phi - damage

Damage comes from choices that do not suit their slot; it is not observed. A step is a
few table lookups (`slot_tables`). Episodes terminate at the horizon.

*Visible* instances show gains as promises. A quarter of the hosts punish all growth,
and a slot may start with a seed, good or harmful.

*Hidden* instances show no promise. One slot is fossilized. In the other a seed of the
first large blueprint fades away; until then its contribution shows which of the two
large blueprints is good. Only a policy with memory can use this. The small blueprint is
safe and poor. Values are multiples of powers of two, so sums are exact.
"""

from dataclasses import dataclass, fields, replace
from typing import Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, RELEVANT, Op
from esper.contracts.checks import require_int, require_number
from esper.contracts.errors import InvalidStateError
from esper.contracts.slots import SlotStates
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.contracts.world import (
    BlueprintOffers,
    HostStates,
    Observation,
    StepResult,
    VectorWorld,
)
from esper.environment.settings import check_actions
from esper.testing.slot_tables import (
    EMPTY,
    LIFE,
    NATURES,
    NO_ACT,
    SPEC,
    SlotTables,
    cooling,
    mature,
    slot_tables,
)

HORIZON: Final = 12
"""Steps of every episode."""
BARREN_SHARE: Final = 0.25
"""Fraction of visible instances without a positive gain."""
INHERITED_SHARE: Final = 0.4
"""Fraction of visible slots that start with a seed."""
SIZES: Final = ((6, 10), (12, 20), (24, 40))
"""Range of the parameters of each blueprint, in 64ths of the host's."""
SAFE, GOOD, BAD = 0.125, 0.5625, -0.25
"""Gains in hidden instances: small blueprint, good and bad large one."""
WRONG_ALPHA_SHARE: Final = 0.75
"""Fraction of inherited seeds whose alpha does not suit their slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instances:
    """Parameters of the episodes of many environments."""

    hidden: Bool[Tensor, " env"]
    """Whether only a contribution shows the gains."""
    gain: Float[Tensor, "env slot blueprint"]
    """Score of a mature, fossilized seed at the best alpha."""
    fits: Bool[Tensor, "env slot blueprint"]
    parameters: Float[Tensor, "env slot blueprint"]
    """Parameters as a multiple of the host's."""
    budget: Float[Tensor, " env"]
    """Maximum parameters of all seeds together."""
    rent: Float[Tensor, " env"]
    """Score charged per parameter."""
    depth: Float[Tensor, "env slot"]
    """Above one half, SCALE suits; below, ADD."""
    capacity: Float[Tensor, "env slot"]
    """Below one half, a one-step blend or fade does damage."""
    liveness: Float[Tensor, "env slot"]
    """Above one half, LINEAR suits; below, SIGMOID."""
    gradient_share: Float[Tensor, "env slot"]
    """Above one half, full alpha is best; below, half."""
    life: Int64[Tensor, "env slot"]
    """Initial life of each slot."""
    blueprint: Int64[Tensor, "env slot"]
    """Initial blueprint of each slot; -1 if empty."""
    style: Int64[Tensor, "env slot"]
    """Initial style of each slot."""
    clock: Int64[Tensor, " env"]
    """Steps before the start; 0 in every drawn instance."""

    def __len__(self) -> int:
        """Return the number of instances."""
        return self.hidden.shape[0]

    @property
    def promise_known(self) -> Bool[Tensor, "env slot blueprint"]:
        """Whether gains are observed."""
        return ~self.hidden.view(-1, 1, 1).expand_as(self.gain)

    @property
    def promise(self) -> Float[Tensor, "env slot blueprint"]:
        """Observed gains; 0 elsewhere."""
        return torch.where(self.promise_known, self.gain, 0.0)

    @property
    def nature(self) -> Int64[Tensor, "env slot"]:
        """Index into `NATURES`."""
        deep, fragile = self.depth > 0.5, self.capacity < 0.5
        return 4 * deep + 2 * fragile + 1 * (self.liveness > 0.5)

    @property
    def wants_half(self) -> Int64[Tensor, "env slot"]:
        """1 where an alpha of one half is best."""
        return (self.gradient_share < 0.5).to(torch.int64)

    def replaced(self, where: Bool[Tensor, " env"], others: "Instances") -> "Instances":
        """Return these instances, or the others where the mask is set."""
        picked = {}
        for name in (field.name for field in fields(self)):
            mine, other = getattr(self, name), getattr(others, name)
            mask = where.view(-1, *[1] * (mine.dim() - 1))
            picked[name] = torch.where(mask, other, mine)
        return Instances(**picked)


def draw_instances(
    num: int, generator: Generator, hidden: Bool[Tensor, " env"]
) -> Instances:
    """Draw instances on the CPU, hidden where the mask is set."""
    visible = draw_visible(num, generator)
    if not hidden.any():
        return visible
    return visible.replaced(hidden, hide(visible, generator))


def draw_visible(num: int, generator: Generator) -> Instances:
    """Draw instances that show everything the optimum uses."""
    slots = SPEC.slots.max_slots
    pairs = (num, slots, len(SPEC.blueprints))

    def coin(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=generator) < share

    def grid(low: int, high: int, unit: int, *shape: int) -> Tensor:
        return torch.randint(low, high + 1, shape, generator=generator) / unit

    low = 0.1 + 0.3 * torch.rand(4, num, slots, generator=generator)
    traits = low + 0.5 * coin(0.5, 4, num, slots)  # far from one half
    barren = coin(BARREN_SHARE, num, 1, 1)
    gain = torch.where(barren, grid(-112, 0, 256, *pairs), grid(-80, 160, 256, *pairs))
    parameters = torch.stack([grid(*s, 64, num, slots) for s in SIZES], dim=2)

    starts = torch.tensor(
        [
            [LIFE[mature(stage, alpha)] for alpha in (0.5, 1.0)]
            for stage in (Stage.BLENDING, Stage.HOLDING)
        ]
    )
    inherits = coin(INHERITED_SHARE, num, slots)
    is_full = (traits[3] > 0.5) ^ coin(WRONG_ALPHA_SHARE, num, slots)
    start = starts[coin(0.5, num, slots).long(), is_full.long()]
    planted = torch.where(coin(0.5, num, slots), gain.argmax(2), gain.argmin(2))
    style = torch.randint(2, (num, slots), generator=generator)
    added = (parameters.gather(2, planted.unsqueeze(2)).squeeze(2) * inherits).sum(1)

    return Instances(
        hidden=torch.zeros(num, dtype=torch.bool),
        gain=gain,
        fits=coin(0.75, *pairs),
        parameters=parameters,
        budget=grid(24, 80, 64, num).maximum(added),
        rent=grid(4, 20, 64, num),
        depth=traits[0],
        capacity=traits[1],
        liveness=traits[2],
        gradient_share=traits[3],
        life=torch.where(inherits, start, EMPTY),
        blueprint=torch.where(inherits, planted, -1),
        style=torch.where(inherits, style, 0),
        clock=torch.zeros(num, dtype=torch.int64),
    )


def hide(instances: Instances, generator: Generator) -> Instances:
    """Return hidden instances with the traits, sizes and rents of these."""
    num = len(instances)
    draws = torch.randint(2, (num, 5), generator=generator)
    usable, one_is_good, late, style, full = draws.unbind(1)
    here = usable.unsqueeze(1) == torch.arange(SPEC.slots.max_slots)  # [env, slot]

    gain = torch.full_like(instances.gain, SAFE)
    gain[:, :, 1] = torch.where(one_is_good == 1, GOOD, BAD).unsqueeze(1)
    gain[:, :, 2] = torch.where(one_is_good == 1, BAD, GOOD).unsqueeze(1)
    gain = torch.where(here.unsqueeze(2), gain, SAFE)

    fading = torch.tensor([LIFE[cooling(4)], LIFE[cooling(3)]])[late]
    kept = torch.tensor([LIFE[mature(Stage.FOSSILIZED, alpha)] for alpha in (0.5, 1.0)])
    return replace(
        instances,
        hidden=torch.ones(num, dtype=torch.bool),
        gain=gain,
        fits=torch.ones_like(instances.fits),
        parameters=instances.parameters[:, :, [0, 1, 1]],  # equal costs
        budget=torch.full_like(instances.budget, 2.0),
        life=torch.where(here, fading.unsqueeze(1), kept[full].unsqueeze(1)),
        blueprint=here.long(),
        style=style.unsqueeze(1).expand(num, SPEC.slots.max_slots),
    )


@dataclass(frozen=True, slots=True)
class SimulatedState:
    """State and phi of every environment."""

    instances: Instances
    life: Int64[Tensor, "env slot"]
    blueprint: Int64[Tensor, "env slot"]
    style: Int64[Tensor, "env slot"]
    contribution: Float[Tensor, "env slot"]
    parameters: Float[Tensor, "env slot"]
    added: Float[Tensor, " env"]
    budget_left: Float[Tensor, " env"]
    plantable: Bool[Tensor, "env slot blueprint"]
    """What fits and is affordable, even if the slot is not empty."""
    phi: Float[Tensor, " env"]

    @classmethod
    def of(
        cls, instances: Instances, slots: tuple[Tensor, Tensor, Tensor], worth: Tensor
    ) -> "SimulatedState":
        """Compute value and cost of slots with this life, blueprint and style."""
        life, blueprint, _ = slots
        planted, kind = blueprint >= 0, blueprint.clamp(min=0).unsqueeze(2)
        gain = instances.gain.gather(2, kind).squeeze(2)
        share = worth.take(2 * life + instances.wants_half)
        contribution = torch.where(planted, share * gain, 0.0)
        parameters = instances.parameters.gather(2, kind).squeeze(2)
        parameters = torch.where(planted, parameters, 0.0)
        added = parameters.sum(dim=1)
        left = instances.budget - added
        return cls(
            instances,
            *slots,
            contribution=contribution,
            parameters=parameters,
            added=added,
            budget_left=left,
            plantable=instances.fits & (instances.parameters <= left[:, None, None]),
            phi=contribution.sum(dim=1) - instances.rent * added,
        )

    def observe(
        self,
        tables: SlotTables,
        progress: Float[Tensor, " env"],
        first: Bool[Tensor, " env"],
    ) -> Observation:
        """Return the observation; host training itself is not simulated."""
        instances, life = self.instances, self.life
        measured = tables.measured.take(life)
        zero = torch.zeros_like(instances.rent)
        return Observation(
            episode_start=first,
            host=HostStates(
                progress=progress,
                end_known=torch.ones_like(first),
                compute=torch.log2(1 + HORIZON * progress),
                budget_left=self.budget_left,
                rent=instances.rent,
                added=self.added,
                score=zero + 0.5,
                score_slope=zero,
                loss=zero + 1.0,
                loss_slope=zero,
                plateau=zero,
            ),
            slots=SlotStates(
                stage=tables.stage.take(life),
                age=tables.age.take(life),
                alpha=tables.alpha.take(life),
                alpha_target=tables.target.take(life),
                alpha_settled=tables.settled.take(life),
                blueprint=self.blueprint,
                style=self.style,
                parameters=self.parameters,
                depth=instances.depth,
                capacity=instances.capacity,
                units=torch.zeros_like(instances.capacity),
                liveness=instances.liveness,
                gradient_share=instances.gradient_share,
                contribution=torch.where(measured, self.contribution, 0.0),
                contribution_measured=measured,
            ),
            offers=BlueprintOffers(
                fits=instances.fits,
                parameters=instances.parameters,
                macs=instances.parameters,
                promise=instances.promise,
                promise_known=instances.promise_known,
            ),
        )


class SimulatedWorld(Stateful, VectorWorld):
    """Many analytic hosts that step together.

    An illegal action becomes WAIT and is flagged. Heads that the op does not use are
    ignored.

    Args:
        num_envs: Number of environments.
        rng_seed: Seed of the instances.
        hidden_share: Fraction of hidden instances.
    """

    STATE = ("_generator", "_state", "_clock")

    def __init__(
        self,
        num_envs: int,
        rng_seed: int = 0,
        *,
        hidden_share: float = 0.0,
    ) -> None:
        require_int("num_envs", num_envs)
        require_number("hidden_share", hidden_share, 0.0, 1.0)
        self.spec, self.num_envs = SPEC, num_envs
        self._hidden_share = hidden_share
        self._generator = Generator().manual_seed(rng_seed)
        self._tables = slot_tables()
        self._last = torch.tensor(SPEC.sizes) - 1
        self._zero = torch.zeros_like(self._last)
        self._slots = torch.arange(SPEC.slots.max_slots)
        self._restyles = RELEVANT[:, HEAD["style"]]
        self._state: SimulatedState | None = None

    @property
    def instances(self) -> Instances:
        """Instances of the current episodes."""
        return self._current().instances

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        instances = self._draw()
        self._clock = instances.clock
        slots = (instances.life, instances.blueprint, instances.style)
        self._state = SimulatedState.of(instances, slots, self._tables.worth)
        first = torch.ones(self.num_envs, dtype=torch.bool)
        return self._state.observe(self._tables, self._progress(), first)

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult[Observation]:
        """Act everywhere; ended environments reset in the same step."""
        before = self._current()
        check_actions(actions, self.num_envs)
        slots, damage, legal = self._act(before, actions)
        instances, worth = before.instances, self._tables.worth
        state = SimulatedState.of(instances, slots, worth)
        reward = state.phi - before.phi - damage

        clock = self._clock + 1
        terminated = clock == HORIZON
        if terminated.any():
            fresh = self._draw()
            clock = torch.where(terminated, fresh.clock, clock)
            instances = instances.replaced(terminated, fresh)
            at = terminated.unsqueeze(1)
            life, blueprint, style = (
                torch.where(at, getattr(instances, name), now)
                for name, now in zip(("life", "blueprint", "style"), slots, strict=True)
            )
            slots = (life, blueprint, style)
            state = SimulatedState.of(instances, slots, worth)
        self._state, self._clock = state, clock
        return StepResult(
            observation=state.observe(self._tables, self._progress(), terminated),
            reward=reward,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            illegal=~legal,
        )

    def _act(
        self, state: SimulatedState, actions: Int64[Tensor, "env head"]
    ) -> tuple[
        tuple[Tensor, Tensor, Tensor], Float[Tensor, " env"], Bool[Tensor, " env"]
    ]:
        """Slots after the step, damage, and whether the action was legal."""
        tables, known = self._tables, actions.clamp(self._zero, self._last)
        op, slot, planted, chosen_style = known[:, :4, None].unbind(1)
        code = (known * tables.strides).sum(dim=1, keepdim=True)
        act = tables.act.take(code)
        legal = (known == actions).all(dim=1, keepdim=True)
        legal &= tables.legal.take(state.life.gather(1, slot) * (NO_ACT + 1) + act)
        planting = op == Op.GERMINATE
        pair = slot * len(SPEC.blueprints) + planted
        legal &= ~planting | state.plantable.flatten(1).gather(1, pair)
        is_here = (self._slots == slot) & legal  # [env, slot]
        life = tables.following.take(state.life * (NO_ACT + 1) + act * is_here)
        blueprint = torch.where(is_here & planting, planted, state.blueprint)
        restyled = is_here & self._restyles.take(op)
        style = torch.where(restyled, chosen_style, state.style)
        empty = life == EMPTY
        nature = state.instances.nature.gather(1, slot)
        damage = tables.damage.take(code * len(NATURES) + nature) * legal
        slots = (life, blueprint.masked_fill(empty, -1), style.masked_fill(empty, 0))
        return slots, damage.squeeze(1), legal.squeeze(1)

    def _draw(self) -> Instances:
        """Instances for all environments."""
        drawn = torch.rand(self.num_envs, generator=self._generator)
        hidden = drawn < self._hidden_share
        return draw_instances(self.num_envs, self._generator, hidden)

    def _progress(self) -> Float[Tensor, " env"]:
        return self._clock / HORIZON

    def _current(self) -> SimulatedState:
        if self._state is None:
            raise InvalidStateError("the world has no episode yet; call reset() first.")
        return self._state
