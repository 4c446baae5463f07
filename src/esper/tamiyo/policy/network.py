r"""Tamiyo's policy and value: any number of slots, any set of blueprints.

    offers ──encode──┐max
    slots  ──encode──┴──mean, max──┐
    host   ──encode────────────────┴──▶ core ──memory──▶ V(s), op
                                              op ──▶ slot, pointing at slots
                                        op, slot ──▶ blueprint, pointing at offers
                             op, slot, blueprint ──▶ the rest

One shared encoder per slot and one per (slot, blueprint) offer, whose input are the
offer's observed and the blueprint's declared properties: no weight knows how many
there are. Acting is training with a sequence of length one: `act` and `evaluate` run
the same encoder and the same heads, the first drawing the actions that the second is
given.
"""

import math
from collections.abc import Generator as Coroutine
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn

from esper.contracts.actions import HEAD, HEAD_NAMES, NUM_HEADS, ActionSpec, Op
from esper.contracts.controller import ControllerState
from esper.contracts.errors import BadInput
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation
from esper.tamiyo.policy import acting
from esper.tamiyo.policy.distribution import (
    HEAD_GROUPS,
    chosen,
    evaluation,
    likeliest,
    masked_log_softmax,
    pick,
    require_choice,
    require_masks,
    rows_of_group,
)
from esper.tamiyo.policy.encoding import Encoded, Seen, encode, encoder_of
from esper.tamiyo.policy.features import (
    BLUEPRINT_COLUMNS,
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Features,
    blueprint_table,
    compute_features,
)
from esper.tamiyo.policy.memory import make_memory
from esper.tamiyo.policy.records import Context, Decision, Evaluation
from esper.tamiyo.policy.scoring import heads_of, score


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The size and kind of the policy."""

    width: int = 128
    """Numbers in the core, which the memory carries."""
    slot_width: int = 64
    """Numbers per slot."""
    offer_width: int = 32
    """Numbers per (slot, blueprint) offer."""
    memory: str = "mingru"
    """What remembers: mingru, lstm or none."""
    layers: int = 1
    """Layers of the memory."""
    causal: bool = True
    """Let only the heads that an op uses be drawn, counted and taught."""

    def __post_init__(self) -> None:
        """Refuse sizes that are none."""
        for name in ("width", "slot_width", "offer_width", "layers"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} must be at least 1, got {getattr(self, name)}.")


class TamiyoPolicy(nn.Module):
    """Recurrent, masked, autoregressive policy with a value."""

    compiled = True
    """Whether compiled loops serve on the CPU; torch alone says the same."""
    value_mean: Tensor
    value_scale: Tensor
    _blueprints: Tensor
    _rest_at: Tensor

    def __init__(self, spec: ActionSpec, config: PolicyConfig | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.config = config = config or PolicyConfig()
        core, slot, offer = config.width, config.slot_width, config.offer_width
        self.offer_in = nn.Linear(len(OFFER_COLUMNS), offer)
        self.blueprint_in = nn.Linear(len(BLUEPRINT_COLUMNS), offer, bias=False)
        self.offer_out = nn.Linear(offer, offer)
        self.slot_in = nn.Linear(len(SLOT_COLUMNS), slot)
        self.pooled_offers = nn.Linear(offer, slot, bias=False)
        self.slot_out = nn.Linear(slot, slot)
        self.host_in = nn.Linear(len(HOST_COLUMNS), core)
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

    def initial_state(self, envs: int) -> Float[Tensor, "env layer state"]:
        """Memory that has seen nothing."""
        return self.value_mean.new_zeros(envs, *self.state_shape)

    def act(
        self,
        features: Features,
        masks: ActionMasks,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Decide for every environment; the likeliest choices without a generator."""
        require_masks(masks, first.shape[0], self.spec)
        draws = self._draws(first.shape[0], generator)
        if self._acts_compiled(features, first, state):
            return self._act_compiled(features, masks, first, state, draws)
        context, state = self.encode(one_step(features), first.unsqueeze(1), state)
        values = self._values(context.core)[:, 0]
        context = Context(context.core[:, 0], context.slots[:, 0], context.offers[:, 0])
        actions = first.new_zeros(first.shape[0], NUM_HEADS, dtype=torch.int64)
        rows, distributions = [], []
        groups = self.head_logits(context)
        for group, heads in enumerate(HEAD_GROUPS):
            logits = groups.send(actions) if group else next(groups)
            row = rows_of_group(masks, group, actions, causal=self.config.causal)
            if row.device.type == "cpu":
                require_choice(row, [HEAD_NAMES[head] for head in heads])
            log_probs = masked_log_softmax(logits, row)
            here = slice(heads[0], heads[-1] + 1)
            if draws is None:
                actions[:, here] = likeliest(log_probs, row)
            else:
                actions[:, here] = pick(log_probs, row, draws[:, here])
            rows.append(row)
            distributions.append(log_probs)
        distribution = torch.cat(distributions, dim=1)
        return Decision(
            actions=actions,
            log_probs=chosen(distribution, actions),
            rows=torch.cat(rows, dim=1),
            distribution=distribution,
            values=self.value_mean + self.value_scale * values,
            state=state,
        )

    def evaluate(
        self,
        features: Features,
        rows: Bool[Tensor, "env time head choice"],
        actions: Int64[Tensor, "env time head"],
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> Evaluation:
        """The current distribution of every head, given the stored choices."""
        logits, values = self.scores(features, actions, first, state)
        return evaluation(logits, values, rows, actions)

    def scores(
        self,
        features: Features,
        actions: Int64[Tensor, "env time head"],
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Logits of every head given the stored choices, and normalised values."""
        context, _ = self.encode(features, first, state)
        if self.is_compiled(first):
            read = (context.core, context.slots, context.offers)
            flat = Encoded(*(each.flatten(0, 1) for each in read))
            said = actions.flatten(0, 1)
            found = score(heads_of(self._modules), flat, said, self.spec.sizes)
            return found[0].unflatten(0, first.shape), found[1].view(first.shape)
        groups = self.head_logits(context)
        parts = [next(groups), *(groups.send(actions) for _ in HEAD_GROUPS[1:])]
        return torch.cat(parts, dim=-2), self._values(context.core)

    def value(
        self,
        features: Features,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """V(s) of one more observation; memory is read, not advanced."""
        if self._acts_compiled(features, first, state):
            seen = self._encoded(features)
            acting.remember(self.memory, seen.core, first, state)
            values = acting.value(self._modules, seen.core)
            return self.value_mean + self.value_scale * values
        context, _ = self.encode(one_step(features), first.unsqueeze(1), state)
        return self.value_mean + self.value_scale * self._values(context.core)[:, 0]

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator | None,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Choose as every controller does; the likeliest without a generator."""
        if state is None:
            state = self.initial_state(observation.first.shape[0])
        if not isinstance(state, Tensor):
            raise BadInput(f"state must be a tensor or None, got {type(state)}.")
        with torch.inference_mode():
            features = compute_features(observation, self.spec)
            decision = self.act(features, masks, observation.first, state, generator)
        return decision.actions, decision.state

    def encode(
        self,
        features: Features,
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Context, Float[Tensor, "env layer state"]]:
        """Read whole sequences from `state`; return encodings and the last state."""
        if self.is_compiled(first):
            rows = (getattr(features, f.name).flatten(0, 1) for f in fields(features))
            flat = self._encoded(Features(*rows))
            core, slots, offers = (x.unflatten(0, first.shape) for x in flat)
            core, state = self.memory(core, first, state)
            return Context(core, slots, offers), state
        declared = self.blueprint_in(self._blueprints)
        offers = torch.relu(self.offer_in(features.offers) + declared)
        offers = torch.relu(self.offer_out(offers))
        slots = self.slot_in(features.slots) + self.pooled_offers(offers.amax(dim=-2))
        slots = torch.relu(self.slot_out(torch.relu(slots)))
        pooled = torch.cat((slots.mean(dim=-2), slots.amax(dim=-2)), dim=-1)
        core = torch.relu(self.host_in(features.host) + self.pooled_slots(pooled))
        core, state = self.memory(torch.relu(self.core_out(core)), first, state)
        return Context(core, slots, offers), state

    def is_compiled(self, given: Tensor) -> bool:
        """Whether compiled loops read what is given."""
        return (
            self.compiled and given.device.type == self.value_mean.device.type == "cpu"
        )

    def _acts_compiled(self, features: Features, first: Tensor, state: Tensor) -> bool:
        kinds = {features.host.dtype, state.dtype, self.value_mean.dtype}
        return (
            self.is_compiled(first)
            and not torch.is_grad_enabled()
            and self.config.memory != "lstm"
            and kinds == {torch.float32}
            and state.shape == (first.shape[0], *self.state_shape)
        )

    def _act_compiled(
        self,
        features: Features,
        masks: ActionMasks,
        first: Tensor,
        state: Tensor,
        draws: Tensor | None,
    ) -> Decision:
        layers, causal = self._modules, self.config.causal
        seen = self._encoded(features)
        state = acting.remember(self.memory, seen.core, first, state)
        values = self.value_mean + self.value_scale * acting.value(layers, seen.core)
        said = acting.speak(layers, seen, masks, self.spec, draws, causal=causal)
        return Decision(**said._asdict(), values=values, state=state)

    def _encoded(self, features: Features) -> Encoded:
        """Encodings of rows without time, before memory, on the CPU."""
        seen = Seen(features.host, features.slots, features.offers, self._blueprints)
        return encode(encoder_of(self._modules), seen)

    def _draws(self, envs: int, generator: Generator | None) -> Tensor | None:
        """Chance for every head, drawn at once; None without a generator."""
        if generator is None:
            return None
        flat = torch.rand(
            envs * NUM_HEADS, generator=generator, device=generator.device
        )
        # One group after the other, as they are chosen.
        groups = flat.split([envs * len(heads) for heads in HEAD_GROUPS])
        draws = torch.cat([group.view(envs, -1) for group in groups], dim=1)
        return draws.to(self.value_mean.device)

    def _values(self, core: Float[Tensor, "*batch core"]) -> Float[Tensor, " *batch"]:
        values: Tensor = self.value_out(torch.relu(self.value_hidden(core)))
        return values.squeeze(-1)

    def head_logits(self, context: Context) -> Coroutine[Tensor, Tensor, None]:
        """Logits of one group of heads after the other, padded to the widest head.

        A coroutine: it yields a group's logits and is sent the actions
        `[*batch, head]` chosen so far, on which the next group depends.
        """
        core = context.core
        ops = self.op_out(torch.relu(self.op_hidden(core)))
        actions = yield self._pad(ops)

        core = torch.relu(core + self.op_embedding(actions[..., HEAD["op"]]))
        query = self.slot_query(core).unsqueeze(-2)
        hidden = torch.relu(query + self.slot_key(context.slots))
        actions = yield self._pad(self.slot_score(hidden).squeeze(-1))

        slot = _pick(context.slots, actions[..., HEAD["slot"]])
        offers = _pick(context.offers, actions[..., HEAD["slot"]])
        query = self.offer_query(torch.cat((core, slot), dim=-1)).unsqueeze(-2)
        hidden = torch.relu(query + self.offer_key(offers))
        actions = yield self._pad(self.offer_score(hidden).squeeze(-1))

        offer = _pick(offers, actions[..., HEAD["blueprint"]])
        hidden = torch.relu(self.rest_hidden(torch.cat((core, slot, offer), dim=-1)))
        flat = self.rest_out(hidden)
        heads = len(HEAD_GROUPS[-1])
        padded = flat.new_zeros(*flat.shape[:-1], heads * self.spec.width)
        padded = padded.index_copy(-1, self._rest_at, flat)
        yield padded.view(*flat.shape[:-1], heads, self.spec.width)

    def _pad(
        self, logits: Float[Tensor, "*batch choices"]
    ) -> Float[Tensor, "*batch group choice"]:
        missing = self.spec.width - logits.shape[-1]
        return nn.functional.pad(logits, (0, missing)).unsqueeze(-2)

    def _rest_positions(self) -> Int64[Tensor, " choices"]:
        """Where the choices of the last group stand in their padded rows."""
        return torch.cat(
            [
                torch.arange(self.spec.sizes[head]) + index * self.spec.width
                for index, head in enumerate(HEAD_GROUPS[-1])
            ]
        )

    def _start_even(self) -> None:
        """Begin with near-uniform choices and with a value of exactly 0.

        A zero value makes the first advantages scale with the rewards, so that the
        unit of the reward never matters.
        """
        with torch.no_grad():
            for module in self.children():
                if isinstance(module, nn.Linear):
                    # Relu halves the signal; this gain keeps its size through layers.
                    nn.init.orthogonal_(module.weight, gain=math.sqrt(2.0))
                    if module.bias is not None:
                        module.bias.zero_()
            for last in (
                self.op_out,
                self.slot_score,
                self.offer_score,
                self.rest_out,
            ):
                last.weight.mul_(0.01)
                last.bias.zero_()
            self.value_out.weight.zero_()
            self.value_out.bias.zero_()


def one_step(features: Features) -> Features:
    """The features of one decision as a sequence of length one."""
    return Features(
        features.host.unsqueeze(1),
        features.slots.unsqueeze(1),
        features.offers.unsqueeze(1),
    )


def _pick(
    items: Float[Tensor, "..."], index: Int64[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """The item at `index` [*batch] of items [*batch, item, *rest]: [*batch, *rest]."""
    axis = index.dim()
    shape = (*index.shape, 1, *items.shape[axis + 1 :])
    index = index.reshape(*index.shape, *([1] * (items.dim() - axis)))
    return items.gather(axis, index.expand(shape)).squeeze(axis)
