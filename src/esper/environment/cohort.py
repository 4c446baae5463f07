"""N hosts of one task that train and grow together.

All weights of all environments are one matrix, a row each, and so is what the optimiser
remembers of them; `Chart` says what lies where. On the CPU `engine` trains one
environment after the other, each in cache and as if alone; elsewhere, or if asked,
`tensors` trains all at once. The result is what N separate trainings give, and an
environment's numbers do not depend on what its neighbours do.
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

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.contracts.state import Stateful
from esper.environment import engine, tensors
from esper.environment.chart import CONV, DENSE, Chart
from esper.environment.products import GELU, LINEAR, RELU
from esper.environment.tensors import Seeds
from esper.growth.lifecycle import Lives
from esper.tasks.hosts import Host

ACTS: Final[Mapping[Form, int]] = {
    Form.WIDEN: RELU,
    Form.LOW_RANK: LINEAR,
    Form.RESIDUAL_MLP: GELU,
}
"""What can be planted, and what it does between its two maps."""
ENGINES: Final = ("auto", "kernels", "tensors", "compile")
"""What can train a cohort."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What all minibatches until the next decision feel."""

    felt: Float[Tensor, "env slot"]
    """Alpha of every seed as its host feels it; 0 for a seed in training."""
    shadow: Float[Tensor, "env slot"]
    """Alpha in the shadow pass: 1 for a seed in training."""
    training: Float[Tensor, "env slot"]
    """1 where a seed trains in the shadow pass."""

    @classmethod
    def of(cls, lives: Lives) -> "Plan":
        """The plan until lives change."""
        training = lives.stage == Stage.TRAINING
        return cls(
            felt=torch.where(training, 0.0, lives.alpha),
            shadow=torch.where(training, 1.0, lives.alpha),
            training=training.to(lives.alpha.dtype),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """What the last minibatch showed of a place."""

    given: Float[Tensor, "env row feature"]
    """What its inlet was given."""
    answer: Float[Tensor, "env row channel *spot"]
    """What its outlet said, seeds included."""
    gradient: Float[Tensor, "env row channel *spot"]
    """Of each host's mean loss with respect to the answer."""
    plain: bool
    """Whether both its layers are dense."""


@dataclass(frozen=True, slots=True)
class Trained:
    """What some minibatches left behind."""

    losses: Float[Tensor, " env"]
    """Mean over the minibatches."""
    beside: Float[Tensor, " env"]
    """Of the shadow passes; 0 where there was none."""
    places: list[Place] | None = None


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
    DERIVED = ("_room",)

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
        self.chart = Chart.of(host, units, seeds_per_slot)
        self.places, self.seeds_per_slot = self.chart.places, seeds_per_slot
        shape = (envs, self.chart.parameters)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.mean, self.square = (torch.zeros_like(self.values) for _ in range(2))
        slots = (envs, self.chart.slots)
        self.size = torch.zeros(slots, dtype=torch.int64, device=device)
        self.act = torch.full_like(self.size, RELU)
        self.clocks = torch.zeros(
            (envs, 1 + self.chart.slots), dtype=torch.int64, device=device
        )
        """Steps that host and seeds have taken."""
        self._room: NDArray[np.floating] | None = None

    # What is there.

    def plant_host(self, env: int, network: nn.Module) -> None:
        """Give an environment a new host, without seeds."""
        vector = nn.utils.parameters_to_vector(network.parameters()).detach()
        for rows in (self.values, self.mean, self.square, self.clocks, self.size):
            rows[env] = 0
        self.values[env, : self.chart.host] = vector.to(self.values)

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
        self.uproot(env, slot)
        seed, first = self.chart.seeds[slot], params["first"]
        if self.chart.maps[slot % self.places].kind != CONV:
            first = first.mT  # a matrix is kept [inputs, units]
        self._write(env, int(seed["first"]), first)
        if "first_bias" in params:
            self._write(env, int(seed["first_bias"]), params["first_bias"])
        self.size[env, slot] = blueprint.size
        self.act[env, slot] = ACTS[blueprint.form]

    def uproot(self, env: int, slot: int) -> None:
        """Leave nothing of a slot's seed."""
        begin, end = self.chart.extent(slot)
        for rows in (self.values, self.mean, self.square):
            rows[env, begin:end] = 0.0
        self.size[env, slot] = self.clocks[env, 1 + slot] = 0

    def first_layer(self, env: int, place: int) -> Float[Tensor, "..."]:
        """Weights of the layer that leads into a place."""
        own, layer = self.chart.maps[place], self.chart.layers[place]
        start = int(layer["weight"])
        return self.values[env, start : start + own.weights]

    def _write(self, env: int, start: int, values: Tensor) -> None:
        flat = values.detach().reshape(-1)
        self.values[env, start : start + len(flat)] = flat.to(self.values)

    # Training and looking.

    def train(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Int64[Tensor, "_ example"],
        picked: Int64[Tensor, "env step row"],
        plan: Plan,
        rates: Float[Tensor, "env step"],
        *,
        keep: bool = False,
    ) -> Trained:
        """Train every host on its minibatches; `keep` asks what places showed.

        Args:
            features: Rows to train on, of each environment or of all.
            labels: Their labels.
            picked: Which rows make each minibatch.
            plan: What is felt.
            rates: Learning rate of every minibatch.
            keep: Whether to look at the places in the last minibatch.
        """
        if picked.shape[2] != self.batch:
            raise BadInput(
                f"this cohort was made for minibatches of {self.batch} rows, got "
                f"{picked.shape[2]}."
            )
        if not self.kernels:
            return self._train_tensors(features, labels, picked, plan, rates, keep=keep)
        chart, kind = self.chart, self.values.dtype
        room, bits = self._scratch()
        front = chart.front * self.batch if keep else 0
        kept = np.zeros((self.envs if keep else 0, front), room.dtype)
        losses, beside = engine.train(
            features.numpy(),
            labels.numpy(),
            picked.numpy(),
            rates.double().numpy(),
            self.values.numpy(),
            self.mean.numpy(),
            self.square.numpy(),
            self.clocks.numpy(),
            np.zeros(chart.parameters, room.dtype),
            room,
            bits,
            chart.tables,
            self.size.numpy(),
            self.act.numpy(),
            plan.felt.to(kind).numpy(),
            plan.shadow.to(kind).numpy(),
            plan.training.to(kind).numpy(),
            float(self.decay),
            float(self.newborn[0]),
            float(self.newborn[1]),
            kept,
        )
        return Trained(
            torch.from_numpy(losses),
            torch.from_numpy(beside),
            self._places(torch.from_numpy(kept)) if keep else None,
        )

    def count(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Int64[Tensor, "_ example"],
        felt: Float[Tensor, "env slot"],
        asked: Bool[Tensor, " env"] | None = None,
    ) -> Int64[Tensor, " env"]:
        """Rows that every host guesses right; 0 where it is not asked."""
        if asked is None:
            asked = torch.ones(self.envs, dtype=torch.bool, device=self.size.device)
        felt = felt.to(self.values.dtype)
        if not self.kernels:
            x = self._shaped(features.expand(self.envs, -1, -1))
            with torch.no_grad():
                passed = tensors.forward(
                    self.chart, self.values, x, Seeds(self.size, self.act), felt
                )
            right = (passed.answer.argmax(dim=2) == labels).sum(dim=1)
            return torch.where(asked, right, 0)
        room, _ = self._scratch()
        right = engine.count(
            features.numpy(),
            labels.numpy(),
            asked.numpy(),
            self.values.numpy(),
            room,
            self.chart.tables,
            self.batch,
            self.size.numpy(),
            self.act.numpy(),
            felt.numpy(),
        )
        return torch.from_numpy(right)

    def _scratch(self) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
        """Room for the activations of one environment, and the same as numbers."""
        if self._room is None:
            # A tensor begins at a cache line, an array need not: a third of the time.
            room = torch.zeros(self.chart.room * self.batch, dtype=self.values.dtype)
            self._room = room.numpy()
        whole = np.int32 if self._room.itemsize == 4 else np.int64
        return self._room, self._room.view(whole)

    def _places(self, kept: Float[Tensor, "env room"]) -> list[Place]:
        """What the hosts' own pass left at every place."""
        rows, chart = self.batch, self.chart

        def part(layer: int, what: str, channels: int, *, framed: bool) -> Tensor:
            own, start = chart.maps[layer], int(chart.layers[layer][what]) * rows
            edge = 2 if framed and own.kind == CONV else 0
            high, wide = own.high + edge, own.wide + edge
            length = channels * high * wide * rows
            cut = kept[:, start : start + length]
            cut = cut.view(-1, channels, high, wide, rows).movedim(4, 1)
            return cut[..., 1:-1, 1:-1] if edge else cut

        found = []
        for place in range(chart.places):
            before, own = chart.maps[place], chart.maps[place + 1]
            answer = part(place + 1, "z", own.outputs, framed=False)
            gradient = part(place + 1, "gz", own.outputs, framed=True)
            given = part(place, "x", before.inputs, framed=True)
            plain = before.kind == own.kind == DENSE
            found.append(Place(given.flatten(2), answer, gradient, plain))
        return found

    def _train_tensors(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Int64[Tensor, "_ example"],
        picked: Int64[Tensor, "env step row"],
        plan: Plan,
        rates: Float[Tensor, "env step"],
        *,
        keep: bool,
    ) -> Trained:
        """The same with tensors."""
        kind, device = self.values.dtype, self.values.device
        felt, shadow, training = (
            part.to(kind) for part in (plan.felt, plan.shadow, plan.training)
        )
        seeds = Seeds(self.size, self.act)
        active = (felt > 0) | (training > 0)
        move = tensors.moves(self.chart, seeds, active)
        whose = tensors.owners(self.chart).to(device)
        anybody = device.type == "meta" or bool((training > 0).any())
        trains = F.pad(training, (1, 0))[:, whose] > 0 if anybody else None
        grow = F.pad(active & (self.size > 0), (1, 0), value=True)
        everyone = torch.arange(self.envs, device=device).unsqueeze(1) % len(features)
        total = beside = torch.zeros(self.envs, device=device, dtype=kind)
        factor, youth = self.newborn
        for number in range(picked.shape[1]):
            rows = picked[:, number]
            x = self._shaped(features[everyone, rows])
            y = labels[everyone, rows]
            looks = keep and number == picked.shape[1] - 1
            found, loss, ghost, passed, said = tensors.gradients(
                self.chart,
                self.values,
                x,
                y,
                seeds,
                felt,
                shadow,
                trains,
                tensors.compiled_losses()
                if self.compiles and not looks
                else tensors.losses,
            )
            total, beside = total + loss, beside + ghost
            stretch = 1 + (factor - 1) * (1 - self.clocks.double() / youth).clamp(
                min=0.0
            )
            stretch[:, 0] = 1.0
            self.clocks += grow
            tensors.adamw(
                whose,
                self.values,
                found,
                self.mean,
                self.square,
                move,
                rates[:, number, None] * stretch,
                self.clocks,
                self.decay,
            )
        steps = picked.shape[1]
        places = None
        if keep:
            places = [
                Place(
                    passed.inputs[p].detach().flatten(2),
                    passed.outputs[p + 1].detach(),
                    said[p + 1],
                    self.chart.maps[p].kind == self.chart.maps[p + 1].kind == DENSE,
                )
                for p in range(self.places)
            ]
        return Trained(total / steps, beside / steps, places)

    def _shaped(self, rows: Float[Tensor, "env row input"]) -> Tensor:
        """Rows as the first layer reads them."""
        own = self.chart.maps[0]
        if own.kind != CONV:
            return rows
        return rows.reshape(*rows.shape[:2], own.inputs, own.high, own.wide)
