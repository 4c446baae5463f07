r"""A policy for any spaces: encoder, memory, heads and a value.

    vector ──linear─┐
    images ──conv───┴─▶ tanh ──▶ memory ──▶ hidden ──▶ heads
                                    └─────▶ hidden ──▶ V(s)

Heads are drawn independently of each other. With a table `relevant[op, head]` the first
head is the op: the others are drawn given its choice, and those that the op does not
use are forced to choice 0, so they have no part in ratio, entropy, KL and gradient.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from esper.contracts.errors import BadInput
from esper.rl.spaces import SpaceSpec
from esper.simic.agent.distribution import (
    Decision,
    choose,
    family_of,
    first_choice,
    gumbel,
)
from esper.simic.agent.memory import make_memory

Features = dict[str, Tensor]
CHANNELS: Final = (16, 32)
"""Of the two layers that read images, each of which halves their sides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpacePolicyConfig:
    """The size and kind of the policy."""

    width: int = 64
    """Numbers in every hidden layer, and in the memory."""
    memory: str = "none"
    """What remembers: mingru, gru, lstm or none."""
    layers: int = 1
    """Layers of the memory."""
    separate_value: bool = False
    """Give the value an encoder and a memory of its own."""

    def __post_init__(self) -> None:
        """Refuse sizes that are none."""
        for name in ("width", "layers"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, got {getattr(self, name)}.")


class Trunk(nn.Module):
    """Encoder and memory: from features to what heads read."""

    def __init__(self, spec: SpaceSpec, config: SpacePolicyConfig) -> None:
        super().__init__()
        width, leaves = config.width, spec.observation
        self.vector_in = None
        if "vector" in leaves:
            self.vector_in = nn.Linear(leaves["vector"].shape[0], width)
        self.image_in = nn.ModuleDict(
            {
                name: _image_encoder(leaf.shape, width)
                for name, leaf in leaves.items()
                if name != "vector"
            }
        )
        self.memory = make_memory(config.memory, width, config.layers)

    def forward(
        self,
        features: Features,
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "row core"], Float[Tensor, "env layer state"]]:
        """Encodings, whose rows are environments x steps, and the last state."""
        parts = []
        if self.vector_in is not None:
            vector = features["vector"]
            parts.append(self.vector_in(vector.reshape(-1, vector.shape[-1])))
        for name, encoder in self.image_in.items():
            image = features[name]
            image = image.reshape(-1, *image.shape[-3:])
            scale = 1.0 / 255.0 if image.dtype == torch.uint8 else 1.0
            parts.append(encoder(image.float() * scale))
        core = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        core = core.tanh()
        core, state = self.memory(core.view(*first.shape, -1), first, state)
        return core.flatten(0, 1), state


class SpacePolicy(nn.Module):
    """Recurrent, masked policy over heads or numbers, with a value."""

    value_mean: Tensor
    value_scale: Tensor
    _allowed: Tensor
    _places: Tensor
    _relevant: Tensor

    def __init__(
        self, spec: SpaceSpec, config: SpacePolicyConfig | None = None
    ) -> None:
        super().__init__()
        self.spec, self.config = spec, (config := config or SpacePolicyConfig())
        width, heads = config.width, len(spec.sizes)
        count = 1 + config.separate_value
        trunks = [Trunk(spec, config) for _ in range(count)]
        layers, size = trunks[0].memory.state_shape
        self.state_shape = (count * layers, size)
        self.trunks = nn.ModuleList(trunks)
        self.head_hidden = nn.Linear(width, width)
        self.value_hidden = nn.Linear(width, width)
        self.value_out = nn.Linear(width, 1)
        outputs = heads if spec.is_continuous else sum(spec.sizes)
        self.head_out = nn.Linear(width, outputs)
        self.log_deviation = nn.Parameter(
            torch.zeros(heads if spec.is_continuous else 0)
        )
        self.op_embedding = None
        if spec.relevant is not None:
            self.op_embedding = nn.Embedding(spec.sizes[0], width)
        self._start_even()
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_scale", torch.ones(()))
        table = None if spec.relevant is None else torch.tensor(spec.relevant)
        self.register_buffer("_relevant", table, persistent=False)
        self.register_buffer("_allowed", spec.allowed, persistent=False)
        places = spec.allowed.flatten().nonzero().squeeze(1)
        self.register_buffer("_places", places, persistent=False)

    def initial_state(self, envs: int) -> Float[Tensor, "env layer state"]:
        """Memory that has seen nothing."""
        return self.value_mean.new_zeros(envs, *self.state_shape)

    @torch.no_grad()
    def act(
        self,
        features: Features,
        masks: Bool[Tensor, "env head choice"] | None,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Decide for every environment; greedily without a generator.

        `masks` are the legal choices of each head; None allows all.
        """
        envs = first.shape[0]
        core, seen, state = self.encode(features, first.unsqueeze(1), state)
        rows = self._allowed.expand(envs, -1, -1) if masks is None else masks
        if self.spec.is_continuous:
            outputs = self.head_outputs(core, None)
            mean, log_deviation = outputs.unbind(-1)
            actions = mean
            if generator is not None:
                noise = torch.randn(
                    mean.shape, generator=generator, device=generator.device
                )
                actions = mean + log_deviation.exp() * noise.to(mean.device)
        else:
            noise = None
            if generator is not None:
                noise = gumbel(rows.shape, generator).to(core.device)
            outputs, rows, actions = self._choose(core, rows, noise)
        family = family_of(actions.dtype)
        distribution = family.distribution(outputs, rows)
        return Decision(
            actions=actions,
            log_probs=family.log_probs(distribution, actions),
            rows=rows,
            distribution=distribution,
            values=self.value_mean + self.value_scale * self._values(seen),
            state=state,
        )

    def _choose(
        self, core: Tensor, rows: Tensor, noise: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, rows and choices of all heads; the op first if there is one."""
        if self.op_embedding is None:
            outputs = self.head_outputs(core, None)
            return outputs, rows, choose(outputs, rows, noise)
        # The op's logits do not depend on what it will be.
        blank = core.new_zeros(core.shape[0], dtype=torch.int64)
        first = self.head_outputs(core, blank)[:, 0]
        op = choose(first, rows[:, 0], None if noise is None else noise[:, 0])
        outputs = self.head_outputs(core, op)
        uses = self._relevant.index_select(0, op).unsqueeze(2)
        rows = torch.where(uses, rows, first_choice(rows.shape[2], rows.device))
        actions = choose(outputs, rows, noise)
        actions[:, 0] = op
        return outputs, rows, actions

    def scores(
        self,
        features: Features,
        actions: Shaped[Tensor, "env time head"],
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Logits of every head given the stored op, and normalised values."""
        core, seen, _ = self.encode(features, first, state)
        op = None if self.op_embedding is None else actions[..., 0].flatten()
        outputs = self.head_outputs(core, op).unflatten(0, first.shape)
        return outputs, self._values(seen).view(first.shape)

    @torch.no_grad()
    def value(
        self,
        features: Features,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """V(s) of one more observation; memory is read, not advanced."""
        _, seen, _ = self.encode(features, first.unsqueeze(1), state)
        return self.value_mean + self.value_scale * self._values(seen)

    def encode(
        self,
        features: Features,
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Tensor, Tensor, Float[Tensor, "env layer state"]]:
        """What heads read, what the value reads `[row, core]`, and the last state."""
        if len(self.trunks) == 1:
            core, state = self.trunks[0](features, first, state)
            return core, core, state
        ours, values = state.chunk(2, dim=1)
        core, ours = self.trunks[0](features, first, ours)
        seen, values = self.trunks[1](features, first, values)
        return core, seen, torch.cat((ours, values), dim=1)

    def head_outputs(
        self, core: Float[Tensor, "row core"], op: Tensor | None
    ) -> Float[Tensor, "row head choice"]:
        """Logits of every head, padded; of numbers, mean and log deviation."""
        hidden = self.head_hidden(core)
        flat: Tensor = self.head_out(hidden.tanh())
        if self.spec.is_continuous:
            return torch.stack((flat, self.log_deviation.expand_as(flat)), dim=-1)
        if op is not None:
            assert self.op_embedding is not None
            given = self.head_out((hidden + self.op_embedding(op)).tanh())
            size = self.spec.sizes[0]
            flat = torch.cat((flat[:, :size], given[:, size:]), dim=1)
        heads, width = len(self.spec.sizes), self.spec.width
        if len(self._places) == heads * width:
            return flat.view(-1, heads, width)
        padded = flat.new_zeros(flat.shape[0], heads * width)
        return padded.index_copy(1, self._places, flat).view(-1, heads, width)

    def _values(self, seen: Float[Tensor, "row core"]) -> Float[Tensor, " row"]:
        values: Tensor = self.value_out(self.value_hidden(seen).tanh())
        return values.squeeze(1)

    def _start_even(self) -> None:
        """Begin with near-uniform choices and with a value of exactly 0."""
        with torch.no_grad():
            for module in (
                *self.children(),
                *(m for t in self.trunks for m in t.children()),
            ):
                if isinstance(module, nn.Linear):
                    nn.init.orthogonal_(module.weight, gain=math.sqrt(2.0))
                    module.bias.zero_()
            self.head_out.weight.mul_(0.01)
            self.value_out.weight.zero_()


def _image_encoder(shape: tuple[int, ...], width: int) -> nn.Module:
    """Two convolutions that halve the sides, and one linear layer."""
    one, two = CHANNELS
    sides = [-(-side // 4) for side in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], one, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(one, two, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(two * sides[0] * sides[1], width),
    )
