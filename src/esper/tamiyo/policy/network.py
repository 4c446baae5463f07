r"""Tamiyo's policy and value network for any number of slots and blueprints.

    offers ──encode──┐max
    slots  ──encode──┴──mean, max──┐
    host   ──encode────────────────┴──▶ core ──memory──▶ V(s), op
                                              op ──▶ slot, pointing at slots
                                        op, slot ──▶ blueprint, pointing at offers
                             op, slot, blueprint ──▶ the rest

One encoder is shared by all slots and one by all (slot, blueprint) offers, so no weight
depends on their number. `act` and `evaluate_actions` run the same encoder and heads:
acting is a sequence of length one.
"""

import math
from collections.abc import Generator as Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float, Int64
from pydantic import Field
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from esper.contracts.actions import (
    HEAD_NAMES,
    NUM_HEADS,
    ActionMasks,
    ActionSpec,
    Op,
)
from esper.contracts.devices import map_tensors, require_tensor
from esper.contracts.errors import InvalidInputError
from esper.contracts.features import OFFER_COLUMNS, SLOT_COLUMNS, UNMEASURED_SLOT
from esper.contracts.state import Tensors
from esper.contracts.world import ControllerState, Observation
from esper.simic.agent.distribution import (
    Decision,
    choose,
    chosen,
    gumbel,
    masked_log_softmax,
    require_choice,
)
from esper.simic.agent.memory import MemoryName, make_memory, require_sizes
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import (
    BLUEPRINT_COLUMNS,
    Features,
    blueprint_table,
    compute_features,
)
from esper.tamiyo.policy.heads import (
    HEAD_GROUPS,
    NO_CHOICE_HINT,
    join_groups,
    require_masks,
    rows_by_group,
)


@dataclass(frozen=True, slots=True)
class Context:
    """Inputs of the heads; a row is one step of one environment."""

    core: Float[Tensor, "row core"]
    slots: Float[Tensor, "row slot slot_width"]
    offers: Float[Tensor, "row slot blueprint offer_width"]


Width = Annotated[int, Field(le=4_096)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Size and memory of the policy network."""

    width: Width = 128
    """Width of the core network and of the memory."""
    slot_width: Width = 64
    """Width of the slot encoder."""
    offer_width: Width = 32
    """Width of the encoder of (slot, blueprint) pairs."""
    memory: MemoryName = "mingru"
    """Memory type: mingru, conv-mingru, attention, gru, lstm or none."""
    layers: Annotated[int, Field(le=16)] = 1
    """Number of memory layers."""
    causal: bool = True
    """Sample and train only the heads that the chosen op uses."""

    def __post_init__(self) -> None:
        """Check all sizes."""
        widths = {"slot_width": self.slot_width, "offer_width": self.offer_width}
        require_sizes(width=self.width, layers=self.layers, **widths)


class TamiyoPolicy(nn.Module):
    """Recurrent, masked, autoregressive policy with a value head."""

    value_mean: Tensor
    value_scale: Tensor
    _blueprints: Tensor
    _rest_at: Tensor

    def __init__(self, spec: ActionSpec, config: PolicyConfig | None = None) -> None:
        super().__init__()
        if not isinstance(spec, ActionSpec):
            raise InvalidInputError(
                f"spec must be an ActionSpec, got {type(spec).__name__}."
            )
        self.spec = spec
        self.config = config = config or PolicyConfig()
        core, slot, offer = config.width, config.slot_width, config.offer_width
        columns = {name: leaf.shape[-1] for name, leaf in spec.observation.items()}
        self.offer_in = nn.Linear(columns["offers"], offer)
        self.blueprint_in = nn.Linear(len(BLUEPRINT_COLUMNS), offer, bias=False)
        self.offer_out = nn.Linear(offer, offer)
        self.slot_in = nn.Linear(columns["slots"], slot)
        self.pooled_offers = nn.Linear(offer, slot, bias=False)
        self.slot_out = nn.Linear(slot, slot)
        self.host_in = nn.Linear(columns["host"], core)
        self.pooled_slots = nn.Linear(2 * slot, core, bias=False)
        self.core_out = nn.Linear(core, core)
        self.memory = make_memory(config.memory, core, config.layers)
        self.value_hidden = nn.Linear(core, slot)
        self.value_out = nn.Linear(slot, 1)
        self.op_hidden = nn.Linear(core, core)
        self.op_out = nn.Linear(core, len(Op))
        self.op_embedding = nn.Embedding(len(Op), core)
        self.slot_query = nn.Linear(core, slot)
        self.slot_key = nn.Linear(slot, slot, bias=False)
        self.slot_score = nn.Linear(slot, 1)
        self.offer_query = nn.Linear(core + slot, slot)
        self.offer_key = nn.Linear(offer, slot, bias=False)
        self.offer_score = nn.Linear(slot, 1)
        self.rest_hidden = nn.Linear(core + slot + offer, core)
        rest = sum(spec.sizes[head] for head in HEAD_GROUPS[-1])
        self.rest_out = nn.Linear(core, rest)
        self._start_even()
        self.register_buffer("value_mean", torch.zeros(()))
        self.register_buffer("value_scale", torch.ones(()))
        self.register_buffer("_blueprints", blueprint_table(spec), persistent=False)
        self.register_buffer("_rest_at", self._rest_positions(), persistent=False)
        self.state_shape = self.memory.state_shape
        self.decided: Decision | None = None
        """The last result of `decide`, with its probabilities."""

    def initial_state(self, envs: int) -> Float[Tensor, "env layer state"]:
        """Return empty memory."""
        return self.value_mean.new_zeros(envs, *self.state_shape)

    def read(self, observation: Observation) -> tuple[Features, ActionMasks]:
        """Features and masks of what a world shows."""
        spec = self.spec
        return compute_features(observation, spec), compute_masks(observation, spec)

    @torch.no_grad()
    def act(
        self,
        features: Features,
        masks: ActionMasks,
        episode_start: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Choose an action in every environment.

        Args:
            features: Result of `compute_features`.
            masks: Result of `compute_masks`.
            episode_start: Whether the observation is the first of an episode; memory is
                reset before it.
            state: Memory before the step.
            generator: Source of randomness; None takes the likeliest choices.
        """
        envs = episode_start.shape[0]
        require_masks(masks, envs, self.spec)
        noises = self._noise(envs, generator)  # first, so that its copy does not wait
        context, state = self._encode_step(features, episode_start, state)
        logits, rows = list[Tensor](), list[Tensor]()
        picked = list[Tensor]()
        scores_of = self.head_logits(context)
        rows_of = rows_by_group(masks, causal=self.config.causal)
        choice = None
        for noise in noises:
            logits.append(scores_of.send(choice))
            rows.append(rows_of.send(choice))
            choice = choose(logits[-1], rows[-1], noise)
            picked.append(choice)
        actions = torch.cat((torch.stack(picked[:-1], dim=1), picked[-1]), dim=1)
        legal = join_groups(rows, self.spec.width)
        if legal.device.type == "cpu":
            require_choice(legal, HEAD_NAMES, NO_CHOICE_HINT)
        distribution = masked_log_softmax(join_groups(logits, self.spec.width), legal)
        return Decision(
            actions=actions,
            log_probs=chosen(distribution, actions),
            masks=legal,
            distribution=distribution,
            values=self.value_mean + self.value_scale * self._values(context.core),
            state=state,
        )

    def evaluate_actions(
        self,
        features: Features,
        actions: Int64[Tensor, "env time head"],
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Return logits of every head given the stored actions, and normalised values.

        Args:
            features: Features of every step.
            actions: Actions of every step.
            episode_start: Whether the step is the first of an episode.
            state: Memory before the first step.
        """
        self._require_actions(actions)
        context, _ = self.encode(features, episode_start, state)
        groups = self.head_logits(context)
        choices = actions.flatten(0, 1).unbind(1)
        parts = [next(groups), *map(groups.send, choices[: len(HEAD_GROUPS) - 1])]
        logits = join_groups(parts, self.spec.width).unflatten(0, episode_start.shape)
        return logits, self._values(context.core).view(episode_start.shape)

    @torch.no_grad()
    def value(
        self,
        features: Features,
        episode_start: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """Return V(s) of an observation without changing the memory.

        Args:
            features: Result of `compute_features`.
            episode_start: Whether the observation is the first of an episode.
            state: Memory before the observation.
        """
        context, _ = self._encode_step(features, episode_start, state)
        return self.value_mean + self.value_scale * self._values(context.core)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator | None,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Choose a legal action in every environment; see `Controller`.

        Args:
            observation: Observation of every environment.
            masks: Legal actions.
            state: State that the last call returned; None at first.
            generator: Source of randomness; None takes the likeliest choices.
        """
        if state is None:
            state = self.initial_state(observation.episode_start.shape[0])
        if not isinstance(state, Tensor):
            raise InvalidInputError(
                f"state must be a tensor or None, got {type(state)}."
            )
        with torch.inference_mode():
            features = compute_features(observation, self.spec)
            decision = self.act(
                features, masks, observation.episode_start, state, generator
            )
        self.decided = decision
        return decision.actions, decision.state

    def encode(
        self,
        features: Features,
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Context, Float[Tensor, "env layer state"]]:
        """Encode sequences; return the inputs of the heads and the last state.

        Args:
            features: Features of every step.
            episode_start: Whether the step is the first of an episode.
            state: Memory before the first step.
        """
        self._require_inputs(features, episode_start, state)
        # With two-dimensional inputs a layer returns no view, so that relu can be
        # applied in place without a copy.
        places, _, columns = features.offers.shape[-3:]
        declared = self.blueprint_in(self._blueprints)
        offers = self.offer_in(features.offers.reshape(-1, columns))
        offers = (offers.view(-1, *declared.shape) + declared).relu_()
        offers = self.offer_out(offers.view(-1, declared.shape[1])).relu_()
        offers = offers.view(-1, places, *declared.shape)
        best = self.pooled_offers(offers.amax(dim=2).flatten(0, 1))
        slots = self.slot_in(features.slots.reshape(-1, features.slots.shape[-1]))
        slots = self.slot_out((slots + best).relu_()).relu_()
        slots = slots.view(-1, places, slots.shape[1])
        pooled = torch.cat((slots.mean(dim=1), slots.amax(dim=1)), dim=1)
        core = self.host_in(features.host.reshape(-1, features.host.shape[-1]))
        core = self.core_out((core + self.pooled_slots(pooled)).relu_()).relu_()
        core, state = self.memory(
            core.view(*episode_start.shape, -1), episode_start, state
        )
        return Context(core.flatten(0, 1), slots, offers), state

    def _encode_step(
        self, features: Features, episode_start: Tensor, state: Tensor
    ) -> tuple[Context, Tensor]:
        """Encode one step: a sequence of length one."""
        step = map_tensors(lambda x: x.unsqueeze(1), features)
        return self.encode(step, episode_start.unsqueeze(1), state)

    def _noise(self, envs: int, generator: Generator | None) -> list[Tensor | None]:
        """Return the noise for the logits of each group of heads."""
        if generator is None:
            return [None] * len(HEAD_GROUPS)
        shape = (envs, NUM_HEADS, self.spec.width)
        noise = gumbel(shape, generator, self.value_mean.device)
        *single, rest = HEAD_GROUPS
        return [
            *(noise[:, head, : self.spec.sizes[head]] for (head,) in single),
            noise[:, rest[0] :],
        ]

    def _require_inputs(
        self, features: Features, episode_start: Tensor, state: Tensor
    ) -> None:
        """Check shapes, dtype and device of features and state."""
        like, steps = self.value_mean, tuple(episode_start.shape)
        shape = (steps[0], *self.state_shape)
        require_tensor("state", state, shape, like.dtype, like.device)
        for name, leaf in self.spec.observation.items():
            value, wanted = getattr(features, name, None), (*steps, *leaf.shape)
            require_tensor(f"features.{name}", value, wanted, like.dtype, like.device)

    def _require_actions(self, actions: Int64[Tensor, "env time head"]) -> None:
        """Check the range of the actions; on the CPU only."""
        if actions.device.type != "cpu" or not actions.numel():
            return
        array = actions.numpy().reshape(-1, NUM_HEADS)
        low, high = array.min(axis=0), array.max(axis=0)
        for head, size in enumerate(self.spec.sizes):
            if low[head] < 0 or high[head] >= size:
                raise InvalidInputError(
                    f"actions of head {HEAD_NAMES[head]!r} must lie in 0..{size - 1}, "
                    f"got {low[head]}..{high[head]}."
                )

    def _values(self, core: Float[Tensor, "row core"]) -> Float[Tensor, " row"]:
        values: Tensor = self.value_out(self.value_hidden(core).relu_())
        return values.squeeze(1)

    def head_logits(self, context: Context) -> Coroutine[Tensor, Any, None]:
        """Yield the logits of one group of heads after the other.

        Yields logits of op, slot and blueprint `[row, choice]` and is sent the choices
        `[row]`; then yields the padded logits of all other heads `[row, head, choice]`.
        """
        core, slots = context.core, context.slots
        op = yield self.op_out(self.op_hidden(core).relu_())

        core = (core + self.op_embedding(op)).relu_()
        keys = self.slot_key(slots.flatten(0, 1))
        slot = yield _match(self.slot_query(core), keys, self.slot_score)

        place = _places(slot, slots.shape[1])
        slot = _rows_at(slots, place)
        offers = _rows_at(context.offers, place)
        query = self.offer_query(torch.cat((core, slot), dim=1))
        keys = self.offer_key(offers.flatten(0, 1))
        blueprint = yield _match(query, keys, self.offer_score)

        offer = _rows_at(offers, _places(blueprint, offers.shape[1]))
        hidden = self.rest_hidden(torch.cat((core, slot, offer), dim=1)).relu_()
        flat = self.rest_out(hidden)
        heads = len(HEAD_GROUPS[-1])
        padded = flat.new_zeros(flat.shape[0], heads * self.spec.width)
        padded = padded.index_copy(1, self._rest_at, flat)
        yield padded.view(-1, heads, self.spec.width)

    def logit_layers(self) -> tuple[nn.Linear, ...]:
        """Return the last layer of every head."""
        return self.op_out, self.slot_score, self.offer_score, self.rest_out

    def _rest_positions(self) -> Int64[Tensor, " choices"]:
        """Return the positions of the choices of the last group in padded rows."""
        return torch.cat(
            [
                torch.arange(self.spec.sizes[head]) + index * self.spec.width
                for index, head in enumerate(HEAD_GROUPS[-1])
            ]
        )

    def _start_even(self) -> None:
        """Initialise to near-uniform choices and a value of exactly 0.

        With a zero value the first advantages scale with the rewards, so that the scale
        of the reward does not matter.
        """
        with torch.no_grad():
            for module in self.children():
                if isinstance(module, nn.Linear):
                    # This gain preserves the variance through relu layers.
                    nn.init.orthogonal_(module.weight, gain=math.sqrt(2.0))
                    if module.bias is not None:
                        module.bias.zero_()
            for last in self.logit_layers():
                last.weight.mul_(0.01)
                last.bias.zero_()
            self.value_out.weight.zero_()
            self.value_out.bias.zero_()


def without_measurements(weights: Tensors) -> Tensors:
    """Return the weights of a policy for hosts that do not measure slots.

    The columns of a world that does are constant there, so they become part of the
    biases. Weights without these columns are returned unchanged.
    """
    slots, offers = len(SLOT_COLUMNS), len(OFFER_COLUMNS)
    wide, bias = weights["slot_in.weight"], weights["slot_in.bias"]
    if wide.shape[1] == slots:
        return weights
    constants = torch.tensor(UNMEASURED_SLOT, dtype=torch.float64)
    return weights | {
        "slot_in.weight": wide[:, :slots].contiguous(),
        "slot_in.bias": (bias + wide[:, slots:].double() @ constants).to(bias),
        "offer_in.weight": weights["offer_in.weight"][:, :offers].contiguous(),
    }


def _match(
    query: Float[Tensor, "row unit"], keys: Float[Tensor, "key unit"], score: nn.Linear
) -> Float[Tensor, "row key_of_row"]:
    """Return a score of each key of a row for the row's query."""
    hidden = keys.view(query.shape[0], -1, keys.shape[1]) + query.unsqueeze(1)
    scores: Tensor = score(hidden.relu_().flatten(0, 1))
    return scores.view(query.shape[0], -1)


def _places(index: Int64[Tensor, " row"], count: int) -> Int64[Tensor, " row"]:
    """Return the index of each row's item in a flat table of rows of `count` items."""
    start = torch.arange(0, index.shape[0] * count, count, device=index.device)
    return start.add_(index)


def _rows_at(
    items: Float[Tensor, "row item ..."], places: Int64[Tensor, " row"]
) -> Float[Tensor, "row ..."]:
    """Return one item of every row."""
    # The gradient of an embedding adds whole rows; that of a gather single numbers.
    table = items.reshape(items.shape[0] * items.shape[1], -1)
    return F.embedding(places, table).view(-1, *items.shape[2:])
