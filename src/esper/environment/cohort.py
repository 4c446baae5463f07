"""N hosts of one task that train and grow together.

Each environment stores its weights as a prefix of its row, and the optimizer moments
likewise; `NetworkLayout` defines the positions. The compiled `engine` trains one
environment after the other on the CPU. The result equals N separate trainings and does
not depend on the other environments.
"""

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int64, Num
from numpy.typing import NDArray
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import Stateful
from esper.environment import engine
from esper.environment.network_layout import (
    BLOCK,
    LAYER,
    NetworkLayout,
    Widening,
)
from esper.kernels import require_compiler
from esper.tasks.hosts import Host


class Cohort(Stateful):
    """Hosts of one shape with slots for new units.

    Args:
        envs: Number of hosts.
        host: Their shape.
        slots_per_place: Seeds per pair of layers; slot s is at place s % places.
        capacity: Maximum number of parameters of a network, seeds included.
        batch: Rows of a minibatch.
        decay: Weight decay.
        dtype: Dtype of the weights.
    """

    STATE = ("values", "mean", "square", "clocks", "units", "born")
    DERIVED = ("layouts", "_layers", "_blocks", "_counts", "_buffer")

    def __init__(
        self,
        envs: int,
        host: Host,
        *,
        slots_per_place: int = 2,
        capacity: int | None = None,
        batch: int = 64,
        decay: float = 1e-2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        require_compiler()
        self.envs, self.host, self.batch, self.decay = envs, host, batch, decay
        self.shapes = host.layers
        self.places = len(self.shapes) - 1
        self.slots = self.places * slots_per_place
        self.capacity = max(capacity or 0, host.parameters)
        self.values = torch.zeros(envs, self.capacity, dtype=dtype)
        self.mean, self.square = (torch.zeros_like(self.values) for _ in range(2))
        self.units = np.zeros((envs, self.slots), np.int64)
        """Number of units of every seed; 0 if the slot is free."""
        self.born = np.zeros((envs, self.slots), np.int64)
        """Birth order of every seed in its environment, from 1."""
        pairs = slots_per_place**2 * max(self.places - 1, 0)
        most = 2 * len(self.shapes) + 3 * self.slots + pairs
        self.clocks = torch.zeros((envs, most), dtype=torch.int64)
        """Optimizer steps of every block."""
        self.layouts = [NetworkLayout(self.shapes)] * envs
        self._layers = np.zeros((envs, len(self.shapes)), LAYER)
        self._blocks = np.zeros((envs, most), BLOCK)
        self._counts = np.zeros(envs, np.int64)
        self._buffer: NDArray[np.floating] | None = None
        self.loaded()

    def loaded(self) -> None:
        """Compute the layouts, which follow from the seeds."""
        for env in range(self.envs):
            order = np.argsort(self.born[env], kind="stable")
            alive = [slot for slot in order.tolist() if self.units[env, slot]]
            seeds = [
                Widening(slot, slot % self.places, int(self.units[env, slot]))
                for slot in alive
            ]
            self._show(env, NetworkLayout(self.shapes, seeds))

    # Hosts and seeds.

    def set_host(self, env: int, network: nn.Module) -> None:
        """Replace the host of an environment and remove its seeds."""
        vector = nn.utils.parameters_to_vector(network.parameters()).detach()
        for rows in (self.values, self.mean, self.square, self.clocks):
            rows[env] = 0
        self.units[env] = self.born[env] = 0
        self.values[env, : len(vector)] = vector.to(self.values)
        self._show(env, NetworkLayout(self.shapes))

    def plant(
        self,
        env: int,
        slot: int,
        weight: Float[Tensor, "unit input tap"],
        bias: Float[Tensor, " unit"],
    ) -> None:
        """Plant a seed in a free slot; its outgoing weights are zero.

        Args:
            env: Index of the environment.
            slot: Index of the slot.
            weight: Incoming weights of the new units from all units of the layer
                before, seeds included; see `inputs`.
            bias: Biases of the new units.
        """
        place = slot % self.places
        seeds = (*self.layouts[env].seeds, Widening(slot, place, len(bias)))
        grown = NetworkLayout(self.shapes, seeds)
        if grown.parameters > self.capacity:  # compiled loops do not check
            raise InvalidInputError(
                f"{len(bias)} units at place {place} make {grown.parameters:,} "
                f"parameters, more than the cohort's capacity of {self.capacity:,}."
            )
        self.units[env, slot] = len(bias)
        self.born[env, slot] = self.born[env].max() + 1
        self._move(env, grown)
        own = grown.layers[place]
        flat = weight.detach().to(self.values)
        for block in grown.blocks[own["biases"] : own["end"]]:
            if block["out_owner"] == slot + 1:
                at, length = int(block["offset"]), int(block["length"])
                into = slice(block["into"], block["into"] + block["ins"])
                part = flat[:, into] if block["ins"] else bias.detach().to(flat)
                self.values[env, at : at + length] = part.reshape(-1)

    def remove(self, env: int, slot: int) -> None:
        """Remove the seed of a slot."""
        seeds = [seed for seed in self.layouts[env].seeds if seed.slot != slot]
        self.units[env, slot] = self.born[env, slot] = 0
        self._move(env, NetworkLayout(self.shapes, seeds))

    def inputs(self, env: int, place: int) -> tuple[int, int]:
        """Return the inputs and kernel taps of a new unit at a place."""
        own = self.layouts[env].layers[place]
        return int(own["inputs"]), int(own["taps"])

    def parameters(self) -> Int64[Tensor, " env"]:
        """Return the parameters of every network, seeds included."""
        return torch.tensor([layout.parameters for layout in self.layouts])

    def macs(self) -> Int64[Tensor, " env"]:
        """Return the multiply-adds per row of every network, seeds included."""
        return torch.tensor([layout.macs for layout in self.layouts])

    def widths(self) -> Int64[Tensor, "env place"]:
        """Return the units of every place, seeds included."""
        return torch.tensor([layout.widths[:-1] for layout in self.layouts])

    def unit_costs(
        self,
    ) -> tuple[Int64[Tensor, "env place"], Int64[Tensor, "env place"]]:
        """Return parameters and multiply-adds per row of one new unit at each place."""
        own, after = self._layers[:, :-1], self._layers[:, 1:]
        into, out = own["inputs"] * own["taps"], after["each"] * after["taps"]
        out = out * after["outputs"]
        positions = [layers["high"] * layers["wide"] for layers in (own, after)]
        macs = into * positions[0] + out * positions[1]
        return torch.from_numpy(into + 1 + out), torch.from_numpy(macs)

    def seed_parameters(self) -> Int64[Tensor, "env slot"]:
        """Return the parameters of every seed; a shared block is the younger one's."""
        found = np.zeros((self.envs, 1 + self.slots), np.int64)
        for env, layout in enumerate(self.layouts):
            np.add.at(found[env], layout.blocks["owner"], layout.blocks["length"])
        return torch.from_numpy(found[:, 1:])

    def _move(self, env: int, layout: NetworkLayout) -> None:
        """Copy the blocks that both layouts share to their new positions."""
        old = self.layouts[env]
        kept, there = old.shared_with(layout), layout.shared_with(old)
        source, target = (
            torch.from_numpy(own.parameters_of(mask))
            for own, mask in ((old, kept), (layout, there))
        )
        for rows in (self.values, self.mean, self.square):
            held = rows[env, source]
            rows[env] = 0
            rows[env, target] = held
        held = self.clocks[env, torch.from_numpy(np.flatnonzero(kept))]
        self.clocks[env] = 0
        self.clocks[env, torch.from_numpy(np.flatnonzero(there))] = held
        self._show(env, layout)

    def _show(self, env: int, layout: NetworkLayout) -> None:
        """Store a layout and its arrays for the engine."""
        self.layouts[env] = layout
        self._layers[env] = layout.layers
        self._counts[env] = len(layout.blocks)
        self._blocks[env, : len(layout.blocks)] = layout.blocks

    # Training and measuring.

    def train(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Num[Tensor, "_ example"],
        picked: Int64[Tensor, "env step row"],
        alpha: Float[Tensor, "env step slot"],
        training: Bool[Tensor, "env step slot"],
        rates: Float[Tensor, "env step"],
        steps: Int64[Tensor, " env"] | None = None,
    ) -> tuple[Float[Tensor, " env"], Float[Tensor, " env"]]:
        """Train every host; return mean losses of hosts and shadow passes, 0 if none.

        Args:
            features: Training rows per environment, or one set for all.
            labels: Classes, or targets if the host has one output.
            picked: Row indices of each minibatch.
            alpha: Weight of every seed in the host's own pass; 0 for one in training.
            training: Whether a seed trains in the shadow pass, with weight 1.
            rates: Learning rate of every minibatch.
            steps: Minibatches of each environment; None: all.
        """
        if steps is None:
            steps = torch.full((self.envs,), picked.shape[1])
        kind = self.values.dtype
        buffer, bits = self._buffers()
        losses, shadow_losses = engine.train(
            features.numpy(),
            labels.to(kind).numpy(),
            picked.numpy(),
            steps.numpy(),
            rates.double().numpy(),
            self.values.numpy(),
            self.mean.numpy(),
            self.square.numpy(),
            self.clocks.numpy(),
            np.zeros(self.capacity, buffer.dtype),
            buffer,
            bits,
            *(self._layers, self._blocks, self._counts),
            alpha.to(kind).numpy(),
            training.numpy(),
            float(self.decay),
        )
        return torch.from_numpy(losses), torch.from_numpy(shadow_losses)

    def score(
        self,
        features: Float[Tensor, "_ example input"],
        labels: Num[Tensor, "_ example"],
        alpha: Float[Tensor, "env slot"],
        wanted: Int64[Tensor, " env"] | None = None,
    ) -> Float32[Tensor, " env"]:
        """Return the accuracy of every host, or R^2 (at least 0) with one output.

        Args:
            features: Rows per environment, or one set for all.
            labels: Classes or targets.
            alpha: Alpha of every seed.
            wanted: Number of leading rows to use per environment; None: all. The score
                of 0 rows is 0.
        """
        if wanted is None:
            wanted = torch.full((self.envs,), labels.shape[1])
        alpha = alpha.to(self.values.dtype)
        found = engine.measure(
            features.numpy(),
            labels.to(alpha.dtype).numpy(),
            wanted.numpy(),
            self.values.numpy(),
            self._buffers()[0],
            *(self._layers, self._blocks, self._counts),
            self.batch,
            alpha.numpy(),
        )
        return self._share(torch.from_numpy(found), labels, wanted)

    def _share(
        self,
        found: Float64[Tensor, " env"],
        labels: Num[Tensor, "_ example"],
        wanted: Int64[Tensor, " env"],
    ) -> Float32[Tensor, " env"]:
        """Scores in [0, 1] from the results of an engine."""
        mean = found / wanted.clamp(min=1)
        if self.shapes[-1].outputs > 1:
            return mean.float()
        variance = torch.ones_like(mean)
        for count in wanted[wanted > 0].unique().tolist():
            of_rows = labels[:, :count].double().var(dim=1, correction=0)
            variance = torch.where(wanted == count, of_rows, variance)
        share = 1 - mean / variance.clamp(min=torch.finfo().tiny)
        # A diverged host has score 0.
        share = share.nan_to_num(nan=0.0).clamp(0, 1).float()
        return torch.where(wanted > 0, share, 0.0)

    def _buffers(self) -> tuple[NDArray[np.floating], NDArray[np.integer]]:
        """Buffer for the activations of one environment, also viewed as integers."""
        length = max(layout.activations for layout in self.layouts) * self.batch
        if self._buffer is None or len(self._buffer) < length:
            # A tensor is aligned to a cache line, which is faster.
            self._buffer = torch.zeros(length, dtype=self.values.dtype).numpy()
        whole = np.int32 if self._buffer.itemsize == 4 else np.int64
        return self._buffer, self._buffer.view(whole)
