"""N hosts of one task that train and grow together.

All weights of all environments are one matrix, a row each, and so are the optimiser's
moments; `MemoryLayout` says what lies where. On the CPU `engine` trains one environment
after the other, each in cache and as if alone; elsewhere, or if asked, `torch_engine`
trains all at once. The result is what N separate trainings give, and an environment's
numbers do not depend on its neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import BadInput, unknown
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.environment import engine, torch_engine
from esper.environment.engine import GELU, LINEAR, RELU
from esper.environment.memory_layout import MemoryLayout
from esper.growth.lifecycle import SeedStates
from esper.tasks.hosts import CONV, Host

ACTIVATIONS: Final[Mapping[Form, int]] = {
    Form.WIDEN: RELU,
    Form.LOW_RANK: LINEAR,
    Form.RESIDUAL_MLP: GELU,
}
"""Forms that can be planted, and the activation between their two maps."""
ENGINES: Final = ("auto", "kernels", "tensors")
"""What can train a cohort."""


def find_blueprints(names: tuple[str, ...]) -> tuple[Blueprint, ...]:
    """Blueprints by name; two-matrix forms only."""
    known = {b.name: b for b in BLUEPRINTS if b.form in ACTIVATIONS and b.size}
    for name in names:
        if name not in known:
            raise unknown("this world cannot plant", name, known)
    return tuple(known[name] for name in names)


def active_alpha(lives: SeedStates) -> Float[Tensor, "env slot"]:
    """Alphas in the hosts' own pass: 0 for a seed in training."""
    return torch.where(lives.stage == Stage.TRAINING, 0.0, lives.alpha)


@dataclass(frozen=True, slots=True)
class PlaceSample:
    """Activations and gradients at a place in the last minibatch."""

    inputs: Float[Tensor, "env row feature"]
    """At its inlet."""
    outputs: Float[Tensor, "env row channel spot"]
    """At its outlet, seeds included, before the activation."""
    gradient: Float[Tensor, "env row channel spot"]
    """Of each host's mean loss with respect to the outputs."""
    dense: bool
    """Whether both its layers are dense."""


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Losses of some minibatches, and samples of the last one."""

    losses: Float[Tensor, " env"]
    """Mean over the minibatches."""
    shadow_losses: Float[Tensor, " env"]
    """Of the shadow passes; 0 where there was none."""
    places: list[PlaceSample] | None = None


class Cohort(Stateful):
    """Hosts with slots of room for the largest blueprint.

    Args:
        envs: How many hosts.
        host: What they are.
        blueprints: What can be planted.
        seeds_per_slot: Slots of each place.
        batch: Rows of a minibatch.
        decay: Weight decay.
        device: Where everything lives.
        dtype: Of the weights.
        engine: `kernels` on the CPU, `tensors` anywhere; `auto` takes kernels where
            they can run.
    """

    STATE = ("values", "mean", "square", "size", "act", "clocks")
    DERIVED = ("_buffer",)

    def __init__(
        self,
        envs: int,
        host: Host,
        blueprints: Sequence[Blueprint],
        *,
        seeds_per_slot: int = 2,
        batch: int = 64,
        decay: float = 1e-2,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        engine: str = "auto",
    ) -> None:
        if engine not in ENGINES:
            raise BadInput(
                f"engine must be one of {', '.join(ENGINES)}; got {engine!r}."
            )
        on_cpu = torch.device(device).type == "cpu"
        if engine == "kernels" and not on_cpu:
            raise BadInput(f"engine 'kernels' runs on the CPU, the device is {device}.")
        self.kernels = engine == "kernels" or (engine == "auto" and on_cpu)
        self.envs, self.host, self.batch = envs, host, batch
        self.decay = decay
        units = max(blueprint.size for blueprint in blueprints)
        self.layout = MemoryLayout(host, units, seeds_per_slot)
        self.places, self.seeds_per_slot = self.layout.places, seeds_per_slot
        shape = (envs, self.layout.parameters)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.mean, self.square = (torch.zeros_like(self.values) for _ in range(2))
        slots = (envs, self.layout.slots)
        self.size = torch.zeros(slots, dtype=torch.int64, device=device)
        self.act = torch.full_like(self.size, RELU)
        self.clocks = torch.zeros(
            (envs, 1 + self.layout.slots), dtype=torch.int64, device=device
        )
        """Optimiser steps of host and seeds."""
        # Activations of one environment. A tensor begins at a cache line, an array
        # need not: a third of the time.
        length = self.layout.activations * batch if self.kernels else 0
        self._buffer = torch.zeros(length, dtype=dtype)

    # Hosts and seeds.

    def set_host(self, env: int, network: nn.Module) -> None:
        """Give an environment a new host, without seeds."""
        vector = nn.utils.parameters_to_vector(network.parameters()).detach()
        for rows in (self.values, self.mean, self.square, self.clocks, self.size):
            rows[env] = 0
        self._write(env, 0, vector)

    def plant(
        self, env: int, slot: int, blueprint: Blueprint, params: Mapping[str, Tensor]
    ) -> None:
        """Put a newborn seed into a slot, its first map as given, its last map zero.

        Args:
            env: Where.
            slot: Which of its slots.
            blueprint: Form and size.
            params: `first`, as the form keeps it, and `first_bias` if it has one.
        """
        self.remove(env, slot)
        own, first = self.layout.firsts[slot], params["first"]
        if self.layout.shapes[slot % self.places].kind != CONV:
            first = first.mT  # a matrix is kept [inputs, units]
        self._write(env, int(own["weight"]), first)
        if "first_bias" in params:
            self._write(env, int(own["bias"]), params["first_bias"])
        self.size[env, slot] = blueprint.size
        self.act[env, slot] = ACTIVATIONS[blueprint.form]

    def remove(self, env: int, slot: int) -> None:
        """Leave nothing of a slot's seed."""
        begin, end = self.layout.extent(slot)
        for rows in (self.values, self.mean, self.square):
            rows[env, begin:end] = 0.0
        self.size[env, slot] = self.clocks[env, 1 + slot] = 0

    def inlet_weights(self, env: int, place: int) -> Float[Tensor, "..."]:
        """Weights of the layer that leads into a place."""
        start = int(self.layout.layers[place]["weight"])
        return self.values[env, start : start + self.layout.shapes[place].weights]

    def _write(self, env: int, start: int, values: Tensor) -> None:
        flat = values.detach().reshape(-1)
        self.values[env, start : start + len(flat)] = flat.to(self.values)

    # Training and measuring.

    def train(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Int64[Tensor, "_ example"],
        picked: Int64[Tensor, "env step row"],
        lives: SeedStates,
        rates: Float[Tensor, "env step"],
        *,
        keep: bool = False,
    ) -> TrainingResult:
        """Train every host on its minibatches.

        Args:
            features: Rows to train on, of each environment or of all.
            labels: Their labels.
            picked: Which rows make each minibatch.
            lives: Stages and alphas of all seeds, constant meanwhile.
            rates: Learning rate of every minibatch.
            keep: Whether to keep samples of the places in the last minibatch.
        """
        self._check_rows(features, labels)
        steps = picked.shape[1] if picked.dim() == 3 else 0
        _check("picked", picked, (self.envs, steps, self.batch), torch.int64)
        _check("rates", rates, (self.envs, steps))
        _check("alpha", lives.alpha, self.size.shape)
        _check("stage", lives.stage, self.size.shape)
        training, kind = lives.stage == Stage.TRAINING, self.values.dtype
        alpha = active_alpha(lives).to(kind)
        shadow = torch.where(training, 1.0, lives.alpha).to(kind)
        state = (self.values, self.mean, self.square, self.clocks)
        if not self.kernels:
            losses, shadow_losses, seen = torch_engine.train(
                *(self.layout, features, labels, picked, rates, *state),
                *(self.size, self.act, alpha, shadow, training, self.decay),
            )
            places = self._places(*seen) if keep else None
            return TrainingResult(losses, shadow_losses, places)
        _check_indices("picked", picked, features.shape[1])
        length = self.layout.host_activations * self.batch if keep else 0
        kept = torch.zeros(self.envs if keep else 0, length, dtype=kind)
        given = (features, labels, picked, rates.double(), *state)
        bits = torch.int32 if kind is torch.float32 else torch.int64
        found = engine.train(
            *(part.numpy() for part in given),
            np.zeros_like(self.values[0].numpy()),
            self._buffer.numpy(),
            self._buffer.view(bits).numpy(),
            self.layout.tables,
            self.size.numpy(),
            self.act.numpy(),
            *(part.numpy() for part in (alpha, shadow, training.to(kind))),
            float(self.decay),
            kept.numpy(),
        )
        places = self._places(*self._unpacked(kept)) if keep else None
        losses, shadow_losses = map(torch.from_numpy, found)
        return TrainingResult(losses, shadow_losses, places)

    def count(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Int64[Tensor, "_ example"],
        alpha: Float[Tensor, "env slot"],
        wanted: Bool[Tensor, " env"] | None = None,
    ) -> Int64[Tensor, " env"]:
        """Rows that every host classifies correctly; 0 where that is not wanted."""
        if wanted is None:
            wanted = torch.ones(self.envs, dtype=torch.bool, device=self.size.device)
        self._check_rows(features, labels)
        _check("alpha", alpha, self.size.shape)
        _check("wanted", wanted, (self.envs,), torch.bool)
        seeds = (self.size, self.act, alpha.to(self.values.dtype))
        if not self.kernels:
            x = torch_engine.shaped(self.layout, features.expand(self.envs, -1, -1))
            with torch.no_grad():
                _, outputs = torch_engine.forward(self.layout, self.values, x, *seeds)
            right = (outputs[-1].argmax(dim=2) == labels).sum(dim=1)
            return torch.where(wanted, right, 0)
        given = (features, labels, wanted, self.values, self._buffer)
        found = engine.count(
            *(part.numpy() for part in given),
            self.layout.tables,
            self.batch,
            *(part.numpy() for part in seeds),
        )
        return torch.from_numpy(found)

    def _check_rows(self, features: Tensor, labels: Tensor) -> None:
        """Refuse rows that a kernel would read out of bounds."""
        sets, examples = labels.shape if labels.dim() == 2 else (0, 0)
        if sets not in (1, self.envs):
            raise BadInput(
                f"labels must be [1 or {self.envs}, example], got {[*labels.shape]}."
            )
        own = self.layout.shapes[0]
        width = own.inputs * own.positions
        _check("features", features, (sets, examples, width), self.values.dtype)
        _check("labels", labels, (sets, examples), torch.int64)
        if self.kernels:
            _check_indices("labels", labels, self.layout.shapes[-1].outputs)

    def _unpacked(self, kept: Float[Tensor, "env room"]) -> tuple[list[Tensor], ...]:
        """Inputs, outputs and their gradients by layer, as a kernel left them."""
        layout = self.layout

        def part(layer: int, what: str, channels: int, edge: int) -> Tensor:
            own, rows = layout.shapes[layer], self.batch
            start = int(layout.layers[layer][what]) * rows
            edge = edge if own.kind == CONV else 0
            sides = (own.high + 2 * edge, own.wide + 2 * edge)
            cut = kept[:, start : start + channels * sides[0] * sides[1] * rows]
            cut = cut.view(-1, channels, *sides, rows).movedim(4, 1)
            return cut[..., 1:-1, 1:-1] if edge else cut

        shapes = [*enumerate(layout.shapes)]
        return (
            [part(n, "x", own.inputs, 1) for n, own in shapes],
            [part(n, "z", own.outputs, 0) for n, own in shapes],
            [part(n, "gz", own.outputs, 1) for n, own in shapes],
        )

    def _places(
        self, inputs: list[Tensor], outputs: list[Tensor], gradients: list[Tensor]
    ) -> list[PlaceSample]:
        def spots(part: Tensor) -> Tensor:
            return part.reshape(*part.shape[:3], -1)

        return [
            PlaceSample(
                inputs[place].flatten(2),
                spots(outputs[place + 1]),
                spots(gradients[place + 1]),
                self.layout.is_dense(place),
            )
            for place in range(self.places)
        ]


def _check(
    name: str, value: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None
) -> None:
    """Refuse another shape or dtype; compiled loops read memory unchecked."""
    if value.shape != shape or (dtype is not None and value.dtype is not dtype):
        raise BadInput(
            f"{name} must be {[*shape]} {dtype or 'float'} in this cohort, got "
            f"{[*value.shape]} {value.dtype}."
        )


def _check_indices(name: str, value: Tensor, count: int) -> None:
    if value.numel():
        low, high = (int(end) for end in torch.aminmax(value))
        if low < 0 or high >= count:
            raise BadInput(
                f"{name} must lie in 0..{count - 1}, got {low}..{high} in this cohort."
            )
