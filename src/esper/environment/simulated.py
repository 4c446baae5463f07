r"""An analytic growth world: two slots per host, all hosts one tensor program.

    phi    = sum over slots of worth(life) * gain[blueprint]  -  rent * parameters
    reward = phi' - phi - damage

The return is the last phi minus the first, minus the damage of choices that did not
suit their slot. Damage is never observed and changes nothing else; hidden gains and the
tempo of a training seed are not observed either. A step is a few table lookups
(`slot_life`); an episode is decided by its instance (`instances`), so the best return
is known exactly. The horizon terminates; nothing is truncated.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, RELEVANT, Op
from esper.contracts.errors import BadInput, CallOrder
from esper.contracts.slots import SlotStates
from esper.contracts.state import Stateful
from esper.contracts.world import (
    BlueprintOffers,
    HostStates,
    Observation,
    StepResult,
    VectorWorld,
)
from esper.environment.instances import HORIZON, Instances, draw_instances
from esper.environment.settings import check_actions, check_count
from esper.environment.slot_life import (
    EMPTY,
    NATURES,
    NO_ACT,
    SPEC,
    SlotTables,
    slot_tables,
)


@dataclass(frozen=True, slots=True)
class SimulatedState:
    """State of every environment, and its phi."""

    instances: Instances
    life: Int64[Tensor, "env slot"]
    blueprint: Int64[Tensor, "env slot"]
    style: Int64[Tensor, "env slot"]
    contribution: Float[Tensor, "env slot"]
    parameters: Float[Tensor, "env slot"]
    added: Float[Tensor, " env"]
    budget_left: Float[Tensor, " env"]
    plantable: Bool[Tensor, "env slot blueprint"]
    """What fits and can be afforded, whether or not the slot is empty."""
    phi: Float[Tensor, " env"]

    @classmethod
    def of(
        cls, instances: Instances, slots: tuple[Tensor, Tensor, Tensor], worth: Tensor
    ) -> "SimulatedState":
        """Value and cost of slots with this life, blueprint and style."""
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
        """The observation; nothing of the host's own training is simulated."""
        instances, life = self.instances, self.life
        measured = tables.measured.take(life)
        zero = torch.zeros_like(instances.rent)
        return Observation(
            first=first,
            host=HostStates(
                progress=progress,
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

    An illegal action is a WAIT and is flagged; heads that the op does not use are
    ignored.

    Args:
        num_envs: How many environments step together.
        rng_seed: Decides all instances, one after the other.
        hidden_share: Share of hidden instances: 0 none, 1 all.
        device: Where the tensors live. Instances are drawn on the CPU, so a world is
            the same on every device.
    """

    STATE = ("_generator", "_state", "_clock")

    def __init__(
        self,
        num_envs: int,
        rng_seed: int = 0,
        *,
        hidden_share: float = 0.0,
        device: str = "cpu",
    ) -> None:
        check_count("num_envs", num_envs, 1)
        if not 0.0 <= hidden_share <= 1.0:
            raise BadInput(f"hidden_share must lie in [0, 1], got {hidden_share}.")
        self.spec, self.num_envs = SPEC, num_envs
        self._hidden_share = hidden_share
        self._device = device
        self._generator = Generator().manual_seed(rng_seed)
        self._given: Instances | None = None
        self._tables = slot_tables().to(device)
        self._last = torch.tensor(SPEC.sizes, device=device) - 1
        self._zero = torch.zeros_like(self._last)
        self._slots = torch.arange(SPEC.slots.max_slots, device=device)
        self._restyles = RELEVANT[:, HEAD["style"]].to(device)
        self._state: SimulatedState | None = None

    @classmethod
    def from_instances(
        cls, instances: Instances, *, device: str = "cpu"
    ) -> "SimulatedWorld":
        """A world whose environment i plays instance i, again in every episode."""
        if (instances.clock >= HORIZON).any():
            raise BadInput(
                f"an instance must start before step {HORIZON}, got one that starts at "
                f"{int(instances.clock.max())}."
            )
        world = cls(len(instances), device=device)
        world._given = instances.to("cpu")
        return world

    @property
    def instances(self) -> Instances:
        """What decides the episodes that are being played."""
        return self._current().instances

    @property
    def rest(self) -> Instances:
        """What is left of the episodes, as instances that start here and now."""
        state = self._current()
        return replace(
            state.instances,
            life=state.life,
            blueprint=state.blueprint,
            style=state.style,
            clock=self._clock.to(self._device),
        )

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        instances = self._draw()
        self._clock = instances.clock  # on the CPU: ends are known without a read
        instances = instances.to(self._device)
        slots = (instances.life, instances.blueprint, instances.style)
        self._state = SimulatedState.of(instances, slots, self._tables.worth)
        first = torch.ones(self.num_envs, dtype=torch.bool, device=self._device)
        return self._state.observe(self._tables, self._progress(), first)

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere; ended environments start anew in the same step."""
        before = self._current()
        check_actions(actions, self.num_envs)
        slots, damage, legal = self._act(before, actions)
        instances, worth = before.instances, self._tables.worth
        state = SimulatedState.of(instances, slots, worth)
        reward = state.phi - before.phi - damage

        clock = self._clock + 1
        ended = clock == HORIZON
        terminated = ended.to(self._device)
        if ended.any():
            fresh = self._draw()
            clock = torch.where(ended, fresh.clock, clock)
            instances = instances.replaced(terminated, fresh.to(self._device))
            where = terminated.unsqueeze(1)
            life, blueprint, style = slots
            slots = (
                torch.where(where, instances.life, life),
                torch.where(where, instances.blueprint, blueprint),
                torch.where(where, instances.style, style),
            )
            state = SimulatedState.of(instances, slots, worth)
        self._state, self._clock = state, clock
        return StepResult(
            observation=state.observe(self._tables, self._progress(), terminated),
            reward=reward,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
            illegal=~legal,
        )

    def legal(self, actions: Int64[Tensor, "env head"]) -> Bool[Tensor, " env"]:
        """Whether each environment could carry its action out now."""
        return self._act(self._current(), actions)[2]

    def _act(
        self, state: SimulatedState, actions: Int64[Tensor, "env head"]
    ) -> tuple[
        tuple[Tensor, Tensor, Tensor], Float[Tensor, " env"], Bool[Tensor, " env"]
    ]:
        """Slots one step later, the damage done on the way, and what was legal."""
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
        """Instances for all environments, whether they are needed or not."""
        if self._given is not None:
            return self._given
        drawn = torch.rand(self.num_envs, generator=self._generator)
        hidden = drawn < self._hidden_share
        return draw_instances(self.num_envs, self._generator, hidden)

    def _progress(self) -> Float[Tensor, " env"]:
        return (self._clock / HORIZON).to(self._device)

    def _current(self) -> SimulatedState:
        if self._state is None:
            raise CallOrder("the world has no episode yet; call reset() first.")
        return self._state
