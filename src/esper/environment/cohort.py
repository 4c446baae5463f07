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
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import BadInput, unknown
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.environment import engine, torch_engine
from esper.environment.engine import GELU, LINEAR, RELU
from esper.environment.memory_layout import MemoryLayout
from esper.environment.torch_engine import PlantedSeeds
from esper.growth.lifecycle import SeedStates
from esper.tasks.hosts import CONV, Host

ACTIVATIONS: Final[Mapping[Form, int]] = {
    Form.WIDEN: RELU,
    Form.LOW_RANK: LINEAR,
    Form.RESIDUAL_MLP: GELU,
}
"""Forms that can be planted, and the activation between their two maps."""
ENGINES: Final = ("auto", "kernels", "tensors", "compile")
"""What can train a cohort."""


def find_blueprints(names: tuple[str, ...]) -> tuple[Blueprint, ...]:
    """Blueprints by name; two-matrix forms only."""
    known = {b.name: b for b in BLUEPRINTS if b.form in ACTIVATIONS}
    for name in names:
        if name not in known:
            raise unknown("this world cannot plant", name, known)
    return tuple(known[name] for name in names)


@dataclass(frozen=True, slots=True)
class Alphas:
    """Alphas of all seeds, constant until the next decision."""

    host: Float[Tensor, "env slot"]
    """In the host's own pass; 0 for a seed in training."""
    shadow: Float[Tensor, "env slot"]
    """In the shadow pass; 1 for a seed in training."""
    training: Float[Tensor, "env slot"]
    """1 where a seed trains in the shadow pass."""

    @classmethod
    def of(cls, lives: SeedStates) -> "Alphas":
        """The alphas of seeds in these stages."""
        training = lives.stage == Stage.TRAINING
        return cls(
            host=torch.where(training, 0.0, lives.alpha),
            shadow=torch.where(training, 1.0, lives.alpha),
            training=training.to(lives.alpha.dtype),
        )


@dataclass(frozen=True, slots=True)
class PlaceSample:
    """Activations and gradients at a place in the last minibatch."""

    inputs: Float[Tensor, "env row feature"]
    """At its inlet."""
    outputs: Float[Tensor, "env row channel *spot"]
    """At its outlet, seeds included, before the activation."""
    gradient: Float[Tensor, "env row channel *spot"]
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
        newborn: Learning rate of a newborn against the host's, and steps until equal.
        device: Where everything lives.
        dtype: Of the weights.
        engine: `kernels` on the CPU, `tensors` anywhere, `compile` for tensors through
            `torch.compile`; `auto` takes kernels where they can run.
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
        newborn: tuple[float, int] = (3.0, 200),
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
        self.compiles = engine == "compile"
        self.envs, self.host, self.batch = envs, host, batch
        self.decay, self.newborn = decay, newborn
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
        self._buffer: NDArray[np.floating] | None = None

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
        seed, first = self.layout.seeds[slot], params["first"]
        if self.layout.shapes[slot % self.places].kind != CONV:
            first = first.mT  # a matrix is kept [inputs, units]
        self._write(env, int(seed["first"]), first)
        if "first_bias" in params:
            self._write(env, int(seed["first_bias"]), params["first_bias"])
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
        alphas: Alphas,
        rates: Float[Tensor, "env step"],
        *,
        keep: bool = False,
    ) -> TrainingResult:
        """Train every host on its minibatches.

        Args:
            features: Rows to train on, of each environment or of all.
            labels: Their labels.
            picked: Which rows make each minibatch.
            alphas: Of all seeds.
            rates: Learning rate of every minibatch.
            keep: Whether to keep samples of the places in the last minibatch.
        """
        self._check_rows(features, labels)
        steps = picked.shape[1] if picked.dim() == 3 else 0
        _check("picked", picked, (self.envs, steps, self.batch), torch.int64)
        _check("rates", rates, (self.envs, steps))
        for name in ("host", "shadow", "training"):
            self._check_alphas(name, getattr(alphas, name))
        if not self.kernels:
            return self._train_tensors(features, labels, picked, alphas, rates, keep)
        _check_indices("picked", picked, features.shape[1])
        kind = self.values.dtype
        buffer, bits = self._buffers()
        length = self.layout.host_activations * self.batch if keep else 0
        kept = np.zeros((self.envs if keep else 0, length), buffer.dtype)
        losses, shadow_losses = engine.train(
            features.numpy(),
            labels.numpy(),
            picked.numpy(),
            rates.double().numpy(),
            self.values.numpy(),
            self.mean.numpy(),
            self.square.numpy(),
            self.clocks.numpy(),
            np.zeros(self.layout.parameters, buffer.dtype),
            buffer,
            bits,
            self.layout.tables,
            self.size.numpy(),
            self.act.numpy(),
            alphas.host.to(kind).numpy(),
            alphas.shadow.to(kind).numpy(),
            alphas.training.to(kind).numpy(),
            float(self.decay),
            float(self.newborn[0]),
            float(self.newborn[1]),
            kept,
        )
        return TrainingResult(
            torch.from_numpy(losses),
            torch.from_numpy(shadow_losses),
            self._places(torch.from_numpy(kept)) if keep else None,
        )

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
        self._check_alphas("alpha", alpha)
        _check("wanted", wanted, (self.envs,), torch.bool)
        alpha = alpha.to(self.values.dtype)
        if not self.kernels:
            x = self._shaped(features.expand(self.envs, -1, -1))
            seeds = PlantedSeeds(self.size, self.act)
            with torch.no_grad():
                passed = torch_engine.forward(self.layout, self.values, x, seeds, alpha)
            right = (passed.logits.argmax(dim=2) == labels).sum(dim=1)
            return torch.where(wanted, right, 0)
        right = engine.count(
            features.numpy(),
            labels.numpy(),
            wanted.numpy(),
            self.values.numpy(),
            self._buffers()[0],
            self.layout.tables,
            self.batch,
            self.size.numpy(),
            self.act.numpy(),
            alpha.numpy(),
        )
        return torch.from_numpy(right)

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

    def _check_alphas(self, name: str, alpha: Tensor) -> None:
        _check(f"alpha {name!r}", alpha, (self.envs, self.layout.slots))

    def _buffers(self) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
        """Memory for the activations of one environment, and the same as integers."""
        if self._buffer is None:
            # A tensor begins at a cache line, an array need not: a third of the time.
            length = self.layout.activations * self.batch
            self._buffer = torch.zeros(length, dtype=self.values.dtype).numpy()
        whole = np.int32 if self._buffer.itemsize == 4 else np.int64
        return self._buffer, self._buffer.view(whole)

    def _places(self, kept: Float[Tensor, "env room"]) -> list[PlaceSample]:
        """Samples of every place from the host activations that a kernel left."""
        rows, layout = self.batch, self.layout

        def part(layer: int, what: str, channels: int, *, padded: bool) -> Tensor:
            own, start = layout.shapes[layer], int(layout.layers[layer][what]) * rows
            edge = 2 if padded and own.kind == CONV else 0
            high, wide = own.high + edge, own.wide + edge
            cut = kept[:, start : start + channels * high * wide * rows]
            cut = cut.view(-1, channels, high, wide, rows).movedim(4, 1)
            return cut[..., 1:-1, 1:-1] if edge else cut

        found = []
        for place in range(layout.places):
            before, own = layout.shapes[place : place + 2]
            inputs = part(place, "x", before.inputs, padded=True)
            outputs = part(place + 1, "z", own.outputs, padded=False)
            gradient = part(place + 1, "gz", own.outputs, padded=True)
            dense = layout.is_dense(place)
            found.append(PlaceSample(inputs.flatten(2), outputs, gradient, dense))
        return found

    def _train_tensors(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Int64[Tensor, "_ example"],
        picked: Int64[Tensor, "env step row"],
        alphas: Alphas,
        rates: Float[Tensor, "env step"],
        keep: bool,
    ) -> TrainingResult:
        """The same in torch operations."""
        kind, device = self.values.dtype, self.values.device
        alpha, shadow, training = (
            part.to(kind) for part in (alphas.host, alphas.shadow, alphas.training)
        )
        seeds = PlantedSeeds(self.size, self.act)
        active = (alpha > 0) | (training > 0)
        move = torch_engine.moves(self.layout, seeds, active)
        owner = torch_engine.owners(self.layout).to(device)
        any_trains = device.type == "meta" or bool((training > 0).any())
        trains = F.pad(training, (1, 0))[:, owner] > 0 if any_trains else None
        ticks = F.pad(active & (self.size > 0), (1, 0), value=True)
        envs = torch.arange(self.envs, device=device).unsqueeze(1) % len(features)
        total = shadow_total = torch.zeros(self.envs, device=device, dtype=kind)
        factor, until = self.newborn
        steps = picked.shape[1]
        for number in range(steps):
            rows = picked[:, number]
            last = number == steps - 1
            compiles = self.compiles and not (keep and last)
            found, loss, shadow_loss, passed, at_outputs = torch_engine.gradients(
                self.layout,
                self.values,
                self._shaped(features[envs, rows]),
                labels[envs, rows],
                seeds,
                alpha,
                shadow,
                trains,
                torch_engine.compiled_losses() if compiles else torch_engine.losses,
            )
            total, shadow_total = total + loss, shadow_total + shadow_loss
            young = (1 - self.clocks.double() / until).clamp(min=0.0)
            boost = 1 + (factor - 1) * young
            boost[:, 0] = 1.0
            self.clocks += ticks
            torch_engine.adamw(
                owner,
                self.values,
                found,
                self.mean,
                self.square,
                move,
                rates[:, number, None] * boost,
                self.clocks,
                self.decay,
            )
        places = None
        if keep:
            places = [
                PlaceSample(
                    passed.inputs[p].detach().flatten(2),
                    passed.outputs[p + 1].detach(),
                    at_outputs[p + 1],
                    self.layout.is_dense(p),
                )
                for p in range(self.places)
            ]
        return TrainingResult(total / steps, shadow_total / steps, places)

    def _shaped(self, rows: Float[Tensor, "env row input"]) -> Tensor:
        """Rows as the first layer reads them."""
        own = self.layout.shapes[0]
        if own.kind != CONV:
            return rows
        return rows.reshape(*rows.shape[:2], own.inputs, own.high, own.wide)


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
