"""N hosts of one task as one tensor program.

Host parameters are stacked along a leading env axis, seeds stand in one bank per place,
and a minibatch of all hosts is a handful of batched products. Hosts with seeds in
TRAINING share one shadow pass: it starts at the first outlet where such a seed speaks,
with everything before it taken from the hosts' own pass, and gives gradients to those
seeds alone. The result is what N separate trainings give, and an environment's numbers
do not depend on what its neighbours do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from esper.contracts.blueprints import Blueprint
from esper.contracts.stages import Stage
from esper.environment.adamw import Moments, Pace, step
from esper.environment.bank import Bank, Felt
from esper.growth.lifecycle import Lives


@dataclass(slots=True)
class Pass:
    """What one pass left behind."""

    losses: Float[Tensor, " env"]
    inputs: list[Float[Tensor, "env row _width"]]
    """What each layer read."""
    outputs: list[Float[Tensor, "env row _width"]]
    """What each layer and the seeds at it said, before the activation."""
    gradients: list[Float[Tensor, "env row _width"]] | None = None
    """Of the losses with respect to each place's outlet, if asked for."""


class Cohort:
    """Hosts in -> hidden -> ... -> classes with ReLU, one bank per pair of layers.

    Args:
        envs: How many hosts.
        widths: Of the hosts: inputs, hidden layers, classes.
        blueprints: What can be planted; two-matrix forms only.
        seeds_per_slot: Slots of each place.
        decay: Weight decay.
        newborn: Learning rate of a newborn against the host's, and steps until equal.
        device: Where everything lives.
        dtype: Of the weights.
    """

    def __init__(
        self,
        envs: int,
        widths: Sequence[int],
        blueprints: Sequence[Blueprint],
        *,
        seeds_per_slot: int = 2,
        decay: float = 1e-2,
        newborn: tuple[float, int] = (3.0, 200),
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.envs, self.widths, self.decay = envs, tuple(widths), decay
        self.seeds_per_slot, self.newborn = seeds_per_slot, newborn
        self.moments: list[Moments] = []
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        for inputs, outputs in pairwise(widths):
            for shape, leaves in (
                ((envs, inputs, outputs), self.weights),
                ((envs, 1, outputs), self.biases),
            ):
                value = torch.zeros(shape, device=device, dtype=dtype)
                moments = Moments(value.view(envs, 1, 1, -1))
                self.moments.append(moments)
                leaves.append(moments.value.view(shape).requires_grad_())
        units = max(blueprint.size for blueprint in blueprints)
        self.places = len(widths) - 2
        self.banks = [
            Bank(
                envs,
                seeds_per_slot,
                units,
                widths[p],
                widths[p + 2],
                device=device,
                dtype=dtype,
            )
            for p in range(self.places)
        ]
        self.host_clock = torch.zeros(envs, 1, dtype=torch.int64, device=device)
        slots = (self.places, envs, seeds_per_slot)
        self.seed_clock = torch.zeros(slots, dtype=torch.int64, device=device)

    # What is there.

    def plant_host(self, env: int, layers: Sequence[nn.Linear]) -> None:
        """Give an environment a new host, without seeds."""
        with torch.no_grad():
            for index, layer in enumerate(layers):
                self.weights[index][env] = layer.weight.T
                self.biases[index][env, 0] = layer.bias
        for moments in self.moments:
            moments.forget(env)
        self.host_clock[env] = 0
        for slot in range(self.places * self.seeds_per_slot):
            self.uproot(env, slot)

    def plant(
        self,
        env: int,
        slot: int,
        blueprint: Blueprint,
        first: Float[Tensor, "inputs size"],
        bias: Float[Tensor, " size"],
    ) -> None:
        """Put a newborn seed into a slot."""
        place, seed = slot % self.places, slot // self.places
        self.banks[place].plant(env, seed, blueprint, first, bias)
        self.seed_clock[place, env, seed] = 0

    def uproot(self, env: int, slot: int) -> None:
        """Leave nothing of a slot's seed."""
        self.banks[slot % self.places].clear(env, slot // self.places)

    # What a pass feels.

    def by_place(self, values: Tensor) -> list[Tensor]:
        """Slots `[env, slot]` as one `[env, seed]` per place."""
        split = values.view(self.envs, self.seeds_per_slot, self.places)
        return [split[:, :, place] for place in range(self.places)]

    def feel(self, lives: Lives, *, shadow: bool) -> list[Felt | None]:
        """What each place's seeds are felt as; None where nobody is."""
        training = lives.stage == Stage.TRAINING
        felt = (lives.alpha > 0) & ~training
        alpha = lives.alpha
        if shadow:
            alpha = torch.where(training, 1.0, alpha)
            felt = felt | training
        return [
            bank.felt(a, f) if bool(f.any()) else None
            for bank, a, f in zip(
                self.banks, self.by_place(alpha), self.by_place(felt), strict=True
            )
        ]

    # Passes.

    def forward(
        self, x: Float[Tensor, "env row inputs"], felt: Sequence[Felt | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What every layer reads and says."""
        inputs, outputs = [x], []
        for layer, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            z = torch.baddbmm(bias, inputs[layer], weight)
            place = felt[layer - 1] if layer else None
            if place is not None:
                z = z + self.banks[layer - 1].say(inputs[layer - 1], place)
            outputs.append(z)
            inputs.append(torch.relu(z))
        return inputs[:-1], outputs

    def shadow(
        self,
        passed: Pass,
        felt: Sequence[Felt | None],
        training: Sequence[Felt | None],
    ) -> Float[Tensor, "env row classes"]:
        """The hosts' answers with their TRAINING seeds at alpha 1, hosts frozen.

        The outlet where it starts is computed anew: adding newborns to what was said
        there would round differently from a start further in front, and where it
        starts is for the neighbours to decide.
        """
        start = next(p for p, place in enumerate(training) if place is not None)
        inputs = [h.detach() for h in passed.inputs[: start + 2]]
        for layer in range(start + 1, len(self.weights)):
            z = torch.baddbmm(
                self.biases[layer].detach(), inputs[layer], self.weights[layer].detach()
            )
            place = felt[layer - 1]
            if place is not None:
                z = z + self.banks[layer - 1].say(inputs[layer - 1], place)
            inputs.append(torch.relu(z))
        return z

    def answer(
        self, x: Float[Tensor, "*env row inputs"], felt: Sequence[Felt | None]
    ) -> Float[Tensor, "env row classes"]:
        """The hosts' answers, for looking only."""
        with torch.no_grad():
            rows = x if x.dim() == 3 else x.expand(self.envs, -1, -1)
            return self.forward(rows, felt)[1][-1]

    # Training.

    def train_step(
        self,
        x: Float[Tensor, "env row inputs"],
        y: Int64[Tensor, "env row"],
        plan: "Plan",
        rate: Float[Tensor, " env"],
        *,
        keep: bool = False,
    ) -> Pass:
        """One minibatch of every host; `keep` asks for the gradients at the places."""
        inputs, outputs = self.forward(x, plan.felt)
        losses = _losses(outputs[-1], y)
        passed = Pass(losses.detach(), inputs, outputs)
        host = [*self.weights, *self.biases]
        banks = [b for b, f in zip(self.banks, plan.felt, strict=True) if f is not None]
        seeds = [leaf for bank in banks for leaf in bank.parameters()]
        kept = outputs[1:] if keep else []
        found = torch.autograd.grad(
            losses.sum(), [*host, *seeds, *kept], allow_unused=True
        )
        if keep:
            passed.gradients = [*found[len(found) - len(kept) :]]
            found = found[: len(found) - len(kept)]
        by_leaf: dict[int, Tensor | None] = dict(
            zip(map(id, [*host, *seeds]), found, strict=True)
        )
        beside: dict[int, Tensor | None] = {}
        if plan.trains:
            answer = self.shadow(passed, plan.shadow, plan.training)
            newborns = [
                leaf
                for bank, place in zip(self.banks, plan.training, strict=True)
                if place is not None
                for leaf in bank.parameters()
            ]
            ghosts = torch.autograd.grad(
                _losses(answer, y).sum(), newborns, allow_unused=True
            )
            beside = dict(zip(map(id, newborns), ghosts, strict=True))
        self._move(by_leaf, beside, plan, rate)
        return passed

    def _move(
        self,
        gradients: dict[int, Tensor | None],
        beside: dict[int, Tensor | None],
        plan: "Plan",
        rate: Float[Tensor, " env"],
    ) -> None:
        self.host_clock += 1
        always = torch.ones_like(self.host_clock, dtype=torch.bool)
        pace = Pace.of(rate.unsqueeze(1), self.host_clock, always, ~always)
        leaves = [
            leaf
            for pair in zip(self.weights, self.biases, strict=True)
            for leaf in pair
        ]
        for moments, leaf in zip(self.moments, leaves, strict=True):
            gradient = gradients[id(leaf)]
            assert gradient is not None
            step(moments, gradient, gradient, pace, self.decay)
        factor, length = self.newborn
        for place, bank in enumerate(self.banks):
            active, shadow = plan.active[place], plan.unfelt[place]
            if plan.felt[place] is None and plan.training[place] is None:
                continue
            clock = self.seed_clock[place]
            left = (1 - clock / length).clamp(min=0.0)
            clock += active
            paces = rate.unsqueeze(1) * (1 + (factor - 1) * left)
            pace = Pace.of(paces, clock, active, shadow)
            for name, leaf in bank.leaves.items():
                own, ghost = gradients.get(id(leaf)), beside.get(id(leaf))
                first = own if own is not None else ghost
                second = ghost if ghost is not None else own
                if first is not None and second is not None:
                    step(bank.moments[name], first, second, pace, self.decay)


@dataclass(frozen=True, slots=True)
class Plan:
    """What all minibatches until the next decision feel."""

    felt: list[Felt | None]
    """The hosts' own pass."""
    shadow: list[Felt | None]
    """The shadow pass."""
    training: list[Felt | None]
    """Only what trains in the shadow pass."""
    active: list[Bool[Tensor, "env seed"]]
    """Seeds that move."""
    unfelt: list[Bool[Tensor, "env seed"]]
    """Seeds that train in the shadow pass."""
    trains: bool

    @classmethod
    def of(cls, cohort: Cohort, lives: Lives) -> "Plan":
        """The plan until lives change."""
        training = lives.stage == Stage.TRAINING
        only = [
            bank.felt(torch.ones_like(t, dtype=torch.float32), t)
            if bool(t.any())
            else None
            for bank, t in zip(cohort.banks, cohort.by_place(training), strict=True)
        ]
        return cls(
            felt=cohort.feel(lives, shadow=False),
            shadow=cohort.feel(lives, shadow=True),
            training=only,
            active=cohort.by_place(training | (lives.alpha > 0)),
            unfelt=cohort.by_place(training),
            trains=any(place is not None for place in only),
        )


def _losses(
    answer: Float[Tensor, "env row classes"], y: Int64[Tensor, "env row"]
) -> Float[Tensor, " env"]:
    """Mean cross-entropy of every host."""
    each = cross_entropy(answer.flatten(0, 1), y.flatten(), reduction="none")
    return each.view(y.shape).mean(dim=1)
