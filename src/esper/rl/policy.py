r"""A policy for any spaces: encoder, memory, heads and a value.

    vector ──linear─┐       (or an encoder of the user, and a linear layer)
    images ──conv───┴─▶ tanh ──▶ memory ──▶ hidden ──▶ heads
                                    └─────▶ hidden ──▶ V(s)

Heads are drawn independently of each other, with two exceptions:

    head_relevance[op, head]  the first head is the op: the others are drawn given its
                        choice, and those that the op does not use are forced to their
                        first legal choice or to the number 0, the middle of a range, so
                        they have no part in ratio, entropy, KL and gradient
    autoregressive      every head is drawn given the choices of all heads before it

A choice is given by adding its embedding to what the hidden layer of a head puts out,
a number by adding a learnt vector times its tanh. Mask tables make legality, not
preference, depend on the op's choice; they need neither.
"""

import math
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64, Shaped
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from esper.contracts.devices import to_device
from esper.contracts.features import Leaf
from esper.rl.encoders import Encoder, image_encoder, own_encoder
from esper.rl.settings import PPOSettings
from esper.rl.spaces import SpaceSpec
from esper.simic.agent.distribution import Decision, family_of, first_choice, gumbel
from esper.simic.agent.memory import Starts, State, make_memory

Array = NDArray[Any]
Masks = Bool[Tensor, "env *op head choice"]
Hidden = Float[Tensor, "row hidden"]
Features = dict[str, Tensor]
INITIAL_LOG_DEVIATION: Final = 0.0
"""Log standard deviation of numbers before learning; [-1, 1] is the range of a Box."""
NEAR: Final = 0.25
"""Share of an image's bound that its largest number must reach to use the bound."""


class Trunk(nn.Module):
    """Encoder, memory and a hidden layer: from features to what heads read."""

    def __init__(
        self,
        spec: SpaceSpec,
        config: PPOSettings,
        outputs: int,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__()
        width, leaves = config.width, spec.observation
        self._spec, self.encoder = spec, nn.ModuleList()
        if encoder is not None:
            module, columns = own_encoder(encoder, spec)
            self.encoder.append(module)
            leaves = {"vector": Leaf((columns,))}
        self.vector_in = None
        if "vector" in leaves:
            self.vector_in = nn.Linear(leaves["vector"].shape[0], width)
        self.image_in = nn.ModuleDict(
            {
                name: image_encoder(leaf.shape, width)
                for name, leaf in leaves.items()
                if name != "vector"
            }
        )
        self.memory = make_memory(config.memory, width, config.layers)
        self.hidden = nn.Linear(width, outputs)

    def forward(
        self, features: Features, episode_start: Starts, state: State
    ) -> tuple[Hidden, State]:
        """The hidden layer before its activation, and the last state.

        Rows are environments x steps.
        """
        parts = []
        for encoder in self.encoder:
            leaves = self._spec.observation
            rows = {n: x.reshape(-1, *leaves[n].shape) for n, x in features.items()}
            features = {"vector": encoder(self._spec.encoder_input(rows))}
        if self.vector_in is not None:
            vector = features["vector"]
            parts.append(self.vector_in(vector.reshape(-1, vector.shape[-1])))
        for name, encoder in self.image_in.items():
            image = features[name]
            parts.append(encoder(image.reshape(-1, *image.shape[-3:])))
        core = parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)
        core = tanh(core)
        core, state = self.memory(
            core.view(*episode_start.shape, -1), episode_start, state
        )
        return self.hidden(core.flatten(0, 1)), state


class SpacePolicy(nn.Module):
    """Recurrent, masked policy over heads or numbers, with a value."""

    value_mean: Tensor
    value_scale: Tensor
    image_scale: Tensor | None
    """What each image is multiplied by; see `scale_images`."""
    _allowed: Tensor
    _places: Tensor
    _numeric: Tensor
    _relevant: Tensor | None
    _starts: Tensor
    _sees: Tensor

    def __init__(
        self,
        spec: SpaceSpec,
        config: PPOSettings | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.config = spec, (config := config or PPOSettings())
        width, heads = config.width, len(spec.sizes)
        # One trunk has the hidden layers of heads and value side by side.
        parts = (width, width) if config.separate_value else (2 * width,)
        trunks = [Trunk(spec, config, part, encoder) for part in parts]
        layers, size = trunks[0].memory.state_shape
        self.state_shape = (len(parts) * layers, size)
        self.trunks = nn.ModuleList(trunks)
        self.value_out = nn.Linear(width, 1)
        self.family = family_of(spec.numeric)
        # A number has one output, its mean; its deviation does not depend on the state.
        outputs = np.where(spec.numeric, 1, spec.sizes)
        self.head_out = nn.Linear(width, int(outputs.sum()))
        self.log_deviation = nn.Parameter(
            torch.full((sum(spec.numeric),), INITIAL_LOG_DEVIATION)
        )
        chained = config.autoregressive
        self.choice_embedding = None
        if chained or spec.head_relevance is not None:
            self.choice_embedding = nn.Embedding(int(outputs.sum()), width)
        self.stages = heads if chained else 1 + (spec.head_relevance is not None)
        """How many groups of heads are drawn one after the other."""
        self._start_even()
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_scale", torch.ones(()))
        bounds = torch.from_numpy(spec.image_bounds)
        scale = torch.where(bounds.isinf(), 1.0, 1.0 / bounds).float()
        self.register_buffer("image_scale", scale if len(scale) else None)
        earlier = torch.ones(heads, heads).tril(-1)
        if not chained:
            earlier[:, 1:] = 0.0
        for name, table in {
            "_relevant": None
            if spec.head_relevance is None
            else torch.tensor(spec.head_relevance),
            "_allowed": spec.allowed,
            "_places": torch.from_numpy(_places(spec)),
            "_numeric": torch.tensor(spec.numeric),
            "_starts": torch.from_numpy(outputs.cumsum() - outputs),
            "_sees": earlier,
        }.items():
            self.register_buffer(name, table, persistent=False)

    def initial_state(self, envs: int) -> State:
        """Memory that has seen nothing."""
        return self.value_mean.new_zeros(envs, *self.state_shape)

    @torch.no_grad()
    def scale_images(self, largest: Array, *, only_down: bool) -> None:
        """Divide each image by its bound or by the largest number seen.

        The latter where no number comes near the bound: MiniGrid declares 0..255 and
        shows codes up to 10, which would all look like black. Must not be called
        between a rollout and its update, which would see another policy then.
        `largest` is 0 where unknown; `only_down` keeps a scale below the new one.
        """
        if self.image_scale is None:
            return
        bounds = self.spec.image_bounds
        known = np.where(NEAR * bounds > largest, largest, bounds)
        scale = self.image_scale.new_tensor(1.0 / np.where(largest > 0, known, 1.0))
        if only_down:
            scale = scale.minimum(self.image_scale)
        seen = torch.from_numpy(largest > 0).to(scale.device)
        self.image_scale.copy_(torch.where(seen, scale, self.image_scale))

    def read(self, observation: Any) -> tuple[Features, Any]:
        """Features and masks of what `Vector` shows."""
        return observation.features, observation.masks

    @torch.no_grad()
    def act(
        self,
        features: Features,
        masks: Masks | None,
        episode_start: Bool[Tensor, " env"],
        state: State,
        generator: Generator | None,
    ) -> Decision:
        """Decide for every environment; greedily without a generator.

        `masks` are the legal choices of each head, or of each head for every choice of
        the first one; None allows all.
        """
        envs = episode_start.shape[0]
        noise = None if generator is None else self._noise(envs, generator)
        hidden, seen, state = self.encode(features, episode_start.unsqueeze(1), state)
        rows = self._allowed.expand(envs, -1, -1) if masks is None else masks
        outputs, rows, actions = self.choose(hidden, rows, noise)
        distribution = self.family.distribution(outputs, rows)
        return Decision(
            actions=actions,
            log_probs=self.family.log_probs(distribution, actions),
            masks=rows,
            distribution=distribution,
            values=torch.addcmul(self.value_mean, self.value_scale, self._values(seen)),
            state=state,
        )

    def _noise(self, envs: int, generator: Generator) -> Tensor:
        """Noise of all heads; drawn first, so that its copy waits for nothing."""
        numeric, place = [*self.spec.numeric], generator.device
        normal = partial(torch.randn, envs, generator=generator, device=place)
        if all(numeric):
            noise = normal(len(numeric))
        else:
            noise = gumbel((envs, *self._allowed.shape), generator, place)
            if any(numeric):
                noise[:, numeric, 0] = normal(sum(numeric))
        return to_device(noise, self.value_mean.device)

    def choose(
        self,
        hidden: Float[Tensor, "env hidden"],
        masks: Masks,
        noise: Float[Tensor, "env head *choice"] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, the rows that choices are drawn from, and choices of all heads."""
        has_table = masks.ndim == 4
        rows = masks[:, 0] if has_table else masks
        outputs = self.head_outputs(hidden, None)
        actions = self.family.draw(outputs, rows, noise)
        for stage in range(1, max(self.stages, 1 + has_table)):
            if stage == 1:
                rows = self._rows_given(actions[:, 0].long(), masks)
            if self.choice_embedding is not None:
                outputs = self.head_outputs(hidden, actions)
            later = self.family.draw(outputs, rows, noise)
            actions = torch.cat((actions[:, :stage], later[:, stage:]), dim=1)
        return outputs, rows, actions

    def _rows_given(
        self, op: Int64[Tensor, " env"], masks: Masks
    ) -> Bool[Tensor, "env head choice"]:
        """What may be chosen with an op; one choice for heads it does not use."""
        rows = masks
        if masks.ndim == 4:
            rows = masks[torch.arange(op.shape[0], device=op.device), op]
        if self._relevant is not None:
            uses = self._relevant.index_select(0, op).unsqueeze(2)
            # The first legal choice, or choice 0 if none is legal with this op.
            one = rows & (rows.cumsum(2) == 1)
            none = ~rows.any(2, keepdim=True)
            one |= none & first_choice(rows.shape[2], rows.device)
            # Not torch.where: ONNX Runtime has none for booleans.
            rows = (uses & rows) | (~uses & one)
        return rows

    def evaluate_actions(
        self,
        features: Features,
        actions: Shaped[Tensor, "env time head"],
        episode_start: Starts,
        state: State,
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Logits of every head given the stored choices, and normalised values."""
        hidden, seen, _ = self.encode(features, episode_start, state)
        given = None if self.choice_embedding is None else actions.flatten(0, 1)
        outputs = self.head_outputs(hidden, given).unflatten(0, episode_start.shape)
        return outputs, self._values(seen).view(episode_start.shape)

    @torch.no_grad()
    def value(
        self, features: Features, episode_start: Bool[Tensor, " env"], state: State
    ) -> Float[Tensor, " env"]:
        """V(s) of one more observation; memory is read, not advanced."""
        _, seen, _ = self.encode(features, episode_start.unsqueeze(1), state)
        return torch.addcmul(self.value_mean, self.value_scale, self._values(seen))

    def encode(
        self, features: Features, episode_start: Starts, state: State
    ) -> tuple[Tensor, Tensor, State]:
        """The hidden layers of heads and value `[row, hidden]`, and the last state.

        That of heads is before its activation where they see the choices of others.
        """
        is_conditional = self.choice_embedding is not None
        if self.image_scale is not None:
            images = [name for name in self.spec.observation if name != "vector"]
            scaled = {
                name: features[name].float() * self.image_scale[index]
                for index, name in enumerate(images)
            }
            features = {**features, **scaled}
        if len(self.trunks) == 1:
            both, state = self.trunks[0](features, episode_start, state)
            if not is_conditional:  # one call for both takes less time
                hidden, seen = tanh(both).chunk(2, dim=1)
                return hidden, seen, state
            hidden, seen = both.chunk(2, dim=1)
            return hidden, tanh(seen), state
        ours, values = state.chunk(2, dim=1)
        hidden, ours = self.trunks[0](features, episode_start, ours)
        seen, values = self.trunks[1](features, episode_start, values)
        hidden = hidden if is_conditional else tanh(hidden)
        return hidden, tanh(seen), torch.cat((ours, values), dim=1)

    def head_outputs(
        self, hidden: Hidden, actions: Shaped[Tensor, "row head"] | None
    ) -> Float[Tensor, "row head choice"]:
        """Logits of every head, padded; of numbers, mean and log deviation.

        `actions` are needed where heads see the choices of others; with None, only the
        first head is right.
        """
        if self.choice_embedding is not None:
            if actions is not None:
                return self._outputs_given(hidden, actions)
            hidden = tanh(hidden)
        flat: Tensor = self.head_out(hidden)
        numbers = len(self.log_deviation)
        if numbers == flat.shape[1]:
            return torch.stack((flat, self.log_deviation.expand_as(flat)), dim=-1)
        heads, width = self._allowed.shape
        if flat.shape[1] == heads * width:
            return flat.view(-1, heads, width)
        if numbers:
            deviations = self.log_deviation.expand(flat.shape[0], -1)
            flat = torch.cat((flat, deviations), dim=1)
        padded: Tensor = self._padded(flat.T).T.unflatten(1, (heads, width))
        return padded

    def _outputs_given(self, hidden: Tensor, actions: Tensor) -> Tensor:
        """Logits of every head, each with the embeddings of the choices it sees."""
        assert self.choice_embedding is not None
        numbers = len(self.log_deviation)
        weight: Tensor = self.head_out.weight
        bias: Tensor = self.head_out.bias
        if numbers:
            choices = actions.masked_fill(self._numeric, 0).long()
            factors = torch.where(self._numeric, tanh(actions), 1.0).unsqueeze(2)
            chosen = self.choice_embedding(choices + self._starts) * factors
            weight = F.pad(weight, (0, 0, 0, numbers))
            bias = torch.cat((bias, self.log_deviation))
        else:
            chosen = self.choice_embedding(actions + self._starts)
        hidden = tanh(hidden.unsqueeze(1) + self._sees @ chosen)
        weight = self._padded(weight).unflatten(0, self._allowed.shape)
        bias = self._padded(bias).view(self._allowed.shape)
        outputs = torch.bmm(hidden.transpose(0, 1), weight.transpose(1, 2))
        return outputs.transpose(0, 1) + bias

    def _padded(self, outputs: Float[Tensor, " output *row"]) -> Tensor:
        """Outputs of all heads after each other with room for the widest in each."""
        blank = outputs.new_zeros(self._allowed.numel(), *outputs.shape[1:])
        return blank.index_copy(0, self._places, outputs)

    def _values(self, seen: Hidden) -> Float[Tensor, " row"]:
        values: Tensor = self.value_out(seen)
        return values.squeeze(1)

    def _start_even(self) -> None:
        """Begin with near-uniform choices and with a value of exactly 0."""
        with torch.no_grad():
            for module in (
                *self.children(),
                *(m for t in self.trunks for m in t.children()),
            ):
                if isinstance(module, nn.Linear):
                    for part in module.weight.split(self.config.width):
                        nn.init.orthogonal_(part, gain=math.sqrt(2.0))
                    module.bias.zero_()
            self.head_out.weight.mul_(0.01)
            self.value_out.weight.zero_()


class _Tanh(torch.autograd.Function):
    """The hyperbolic tangent by a sigmoid; on a CPU torch.tanh is four times slower."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return 2 sigmoid(2 x) - 1."""
        y = torch.sigmoid(x + x).mul_(2.0).sub_(1.0)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return grad (1 - y^2)."""
        (y,) = ctx.saved_tensors
        slope: Tensor = torch.ops.aten.tanh_backward(grad, y)
        return slope


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    if torch.compiler.is_compiling():  # the exporter knows no functions of our own
        return torch.tanh(x)
    y: Tensor = _Tanh.apply(x)  # type: ignore[no-untyped-call]
    return y


def _places(spec: SpaceSpec) -> Array:
    """Where outputs, then log deviations, belong in rows `[head, choice]`, flat."""
    rows, numeric = spec.allowed.numpy().copy(), np.array(spec.numeric)
    rows[numeric, 1:] = False
    deviations = np.flatnonzero(numeric) * spec.width + 1
    return np.concatenate((np.flatnonzero(rows), deviations))
