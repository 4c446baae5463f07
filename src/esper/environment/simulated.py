r"""An analytic growth world: two slots per host, all hosts one tensor program.

    phi    = sum over slots of worth(life) * gain[blueprint]  -  rent * parameters
    reward = phi' - phi - damage

The return is the last phi minus the first, minus the damage of choices that did not
suit their slot. Damage is never seen and changes nothing else. A step is a few table
lookups (`slot_life`); an episode is decided by its instance (`instances`), so the best
return is known exactly (`optimum`). The horizon terminates; nothing is truncated.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, RELEVANT, ActionSpec, Op
from esper.contracts.errors import BadInput, CallOrder, IllegalAction
from esper.contracts.observation import Observation
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.contracts.step import StepResult
from esper.environment.instances import HORIZON, Instances, draw_instances
from esper.environment.scene import Scene, Seeds, Setting, appraise, observe
from esper.environment.slot_life import (
    EMPTY,
    LIVES,
    NATURES,
    NO_ACT,
    SPEC,
    slot_tables,
)


class SimulatedWorld(Stateful):
    """Many analytic hosts that step together; a `VectorWorld`.

    Heads that the op does not use are ignored.

    Args:
        num_envs: How many environments step together.
        rng_seed: Decides all instances, one after the other.
        hidden_share: Share of hidden instances: 0 none, 1 all.
        device: Where the tensors live. Instances are drawn on the CPU, so a world is
            the same on every device.
        check: Whether an illegal action raises `IllegalAction` and changes nothing;
            otherwise it is a WAIT. None: on the CPU only, elsewhere it would stall.
    """

    STATE = ("_generator", "_scene", "_clock")

    def __init__(
        self,
        num_envs: int,
        rng_seed: int = 0,
        *,
        hidden_share: float = 0.0,
        device: str = "cpu",
        check: bool | None = None,
    ) -> None:
        if num_envs < 1:
            raise BadInput(f"num_envs must be at least 1, got {num_envs}.")
        if not 0.0 <= hidden_share <= 1.0:
            raise BadInput(f"hidden_share must lie in [0, 1], got {hidden_share}.")
        self._num_envs = num_envs
        self._hidden_share = hidden_share
        self._device = device
        self._check = torch.device(device).type == "cpu" if check is None else check
        self._generator = Generator().manual_seed(rng_seed)
        self._given: Instances | None = None
        self._tables = slot_tables().to(device)
        self._last = torch.tensor(SPEC.sizes, device=device) - 1
        self._zero = torch.zeros_like(self._last)
        self._slots = torch.arange(SPEC.slots.max_slots, device=device)
        self._restyles = RELEVANT[:, HEAD["style"]].to(device)
        self._scene: Scene | None = None

    @classmethod
    def from_instances(
        cls, instances: Instances, *, device: str = "cpu", check: bool | None = None
    ) -> "SimulatedWorld":
        """A world whose environment i plays instance i, again in every episode."""
        if (instances.clock >= HORIZON).any():
            raise BadInput(
                f"an instance must start before step {HORIZON}, got one that starts at "
                f"{int(instances.clock.max())}."
            )
        world = cls(len(instances), device=device, check=check)
        world._given = instances.to("cpu")
        return world

    @property
    def spec(self) -> ActionSpec:
        """What can be said in this world."""
        return SPEC

    @property
    def num_envs(self) -> int:
        """How many environments step together."""
        return self._num_envs

    @property
    def instances(self) -> Instances:
        """What decides the episodes that are being played."""
        return self._playing().setting.instances

    @property
    def rest(self) -> Instances:
        """What is left of the episodes, as instances that start here and now."""
        scene = self._playing()
        life, blueprint, style = scene.seeds
        return replace(
            scene.setting.instances,
            life=life,
            blueprint=blueprint,
            style=style,
            clock=self._clock.to(self._device),
        )

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        instances = self._draw()
        setting = Setting.of(instances.to(self._device))
        self._scene = appraise(setting, Seeds.first(setting.instances), self._tables)
        self._clock = instances.clock  # on the CPU: ends are known without asking
        first = torch.ones(self._num_envs, dtype=torch.bool, device=self._device)
        return observe(self._scene, self._tables, self._progress(), first)

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere; ended environments start anew in the same step."""
        before = self._playing()
        if actions.shape != (self._num_envs, NUM_HEADS):
            raise BadInput(
                f"actions must have shape {(self._num_envs, NUM_HEADS)}, one row per "
                f"environment, got {tuple(actions.shape)}."
            )
        said = self._read(before, actions)
        if self._check and not said.legal.all():
            raise IllegalAction(explain(before, actions, said.legal))
        seeds, damage = self._act(before, said)
        scene = appraise(before.setting, seeds, self._tables)
        reward = scene.phi - before.phi - damage

        clock = self._clock + 1
        ended = clock == HORIZON
        terminated = ended.to(self._device)
        if ended.any():
            fresh = self._draw()
            clock = torch.where(ended, fresh.clock, clock)
            fresh = fresh.to(self._device)
            instances = before.setting.instances.replaced(terminated, fresh)
            seeds = seeds.replaced(terminated, Seeds.first(fresh))
            scene = appraise(Setting.of(instances), seeds, self._tables)
        self._scene, self._clock = scene, clock
        return StepResult(
            observation=observe(scene, self._tables, self._progress(), terminated),
            reward=reward,
            terminated=terminated,
            truncated=torch.zeros_like(terminated),
        )

    def legal(self, actions: Int64[Tensor, "env head"]) -> Bool[Tensor, " env"]:
        """Whether each environment could carry its action out now."""
        return self._read(self._playing(), actions).legal.squeeze(1)

    def _read(self, scene: Scene, actions: Int64[Tensor, "env head"]) -> "Sentence":
        """What the actions say, and whether it is possible."""
        tables = self._tables
        said = actions.clamp(self._zero, self._last)
        op, slot, blueprint, style = said[:, :4, None].unbind(1)
        code = (said * tables.strides).sum(dim=1, keepdim=True)
        act = tables.act.take(code)
        legal = (said == actions).all(dim=1, keepdim=True)
        legal &= tables.legal.take(
            scene.seeds.life.gather(1, slot) * (NO_ACT + 1) + act
        )
        planting = op == Op.GERMINATE
        pair = slot * len(SPEC.blueprints) + blueprint
        legal &= ~planting | scene.plantable.flatten(1).gather(1, pair)
        return Sentence(op, slot, blueprint, style, code, act, planting, legal)

    def _act(
        self, scene: Scene, said: "Sentence"
    ) -> tuple[Seeds, Float[Tensor, " env"]]:
        """The seeds one step later, and the damage done on the way."""
        tables, seeds = self._tables, scene.seeds
        is_here = (self._slots == said.slot) & said.legal  # [env, slot]
        life = tables.following.take(seeds.life * (NO_ACT + 1) + said.act * is_here)
        planted = is_here & said.planting
        restyled = is_here & self._restyles.take(said.op)
        is_empty = life == EMPTY
        after = Seeds(
            life,
            torch.where(planted, said.blueprint, seeds.blueprint).masked_fill_(
                is_empty, -1
            ),
            torch.where(restyled, said.style, seeds.style).masked_fill_(is_empty, 0),
        )
        nature = scene.setting.nature.gather(1, said.slot)
        damage = tables.damage.take(said.code * len(NATURES) + nature) * said.legal
        return after, damage.squeeze(1)

    def _draw(self) -> Instances:
        """Instances for all environments, whether they are needed or not."""
        if self._given is not None:
            return self._given
        chance = torch.rand(self._num_envs, generator=self._generator)
        hidden = chance < self._hidden_share
        return draw_instances(self._num_envs, self._generator, hidden)

    def _progress(self) -> Float[Tensor, " env"]:
        return (self._clock / HORIZON).to(self._device)

    def _playing(self) -> Scene:
        if self._scene is None:
            raise CallOrder("the world plays nothing yet; call reset() first.")
        return self._scene


class Sentence(NamedTuple):
    """What the actions say, [env, 1] each."""

    op: Tensor
    slot: Tensor
    blueprint: Tensor
    style: Tensor
    code: Tensor
    act: Tensor
    planting: Tensor
    legal: Tensor


def explain(
    scene: Scene,
    actions: Int64[Tensor, "env head"],
    legal: Bool[Tensor, "env 1"],
) -> str:
    """Which environment was told to do the impossible, and why it is."""
    env = int((~legal).nonzero()[0, 0])
    said = actions[env].tolist()
    for head, choice, size in zip(HEADS, said, SPEC.sizes, strict=True):
        if not 0 <= choice < size:
            return (
                f"environment {env}: head {head.name!r} must choose from 0 to "
                f"{size - 1}, got {choice}."
            )
    op, slot = Op(said[HEAD["op"]]), said[HEAD["slot"]]
    for index, head in enumerate(HEADS):
        if op in head.used_by and not SPEC.allowed[index, said[index]]:
            return (
                f"environment {env}: {[*head.choices][said[index]]} of head "
                f"{head.name!r} is not allowed here; allowed are "
                f"{', '.join(SPEC.narrowed[head.name])}."
            )
    life = LIVES[int(scene.seeds.life[env, slot])]
    if op is Op.GERMINATE and life.stage is Stage.DORMANT:
        blueprint = said[HEAD["blueprint"]]
        name = SPEC.blueprints[blueprint].name
        if not scene.setting.instances.fits[env, slot, blueprint]:
            return (
                f"environment {env}: {name} does not fit slot {slot}; choose by the "
                "action masks."
            )
        needs = float(scene.setting.instances.parameters[env, slot, blueprint])
        return (
            f"environment {env}: {name} in slot {slot} needs {needs:g} times the "
            f"host's parameters, budget left is {float(scene.budget_left[env]):g}; "
            "choose by the action masks."
        )
    return (
        f"environment {env}: {op.name} is illegal in slot {slot}, which is "
        f"{life.stage.name} at age {life.age} with alpha "
        f"{'settled' if life.settled else 'moving'}; choose by the action masks."
    )
