"""A host with slots: plant, advance, set alpha, prune, keep. It decides nothing.

    growing = GrowingModel(host, ["fc1->fc2"], example)
    growing.plant("fc1->fc2#0", "widen_16")

The host stays the user's own module: its names, weights and calls are untouched. Every
op is checked by the lifecycle and refused in one line if it is not possible now;
nothing has changed then. Time passes only when `tick` is called; seeds train, blend and
hold by themselves then, at the tempo that they were planted with.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from math import isfinite, prod
from typing import Any, Final, Generic, TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import BadInput, IllegalAction, unknown
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.growth import lifecycle
from esper.growth.blueprints.forms import cross_layer
from esper.growth.blueprints.layers import Layer
from esper.growth.blueprints.registry import find
from esper.growth.blueprints.seed import Cost, FormSeed, build, cost, misfit
from esper.growth.hooks import Branch, Flow, SlotHooks
from esper.growth.lifecycle import SeedStates
from esper.growth.slots import InsertionPoint, Survey, survey
from esper.growth.tracing import Example, eval_outputs, new_middle

FORMAT: Final = 3
"""Version of what a saved growing model holds besides weights."""
OPS: Final = tuple(op.name for op in Op if op is not Op.ADVANCE)
"""What a controller decides; seeds advance by themselves, or by hand."""

Done = TypeVar("Done")


class NamedOps(Generic[Done]):
    """The ops of a growing model as calls, by the names of slots and choices."""

    def plant(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = "ADD",
        tempo: str = "STANDARD",
        alpha_target: str = "FULL",
    ) -> Done:
        """Plant a seed; it leaves the output unchanged until it blends in."""
        how = {"style": style, "tempo": tempo, "alpha_target": alpha_target}
        return self._op(Op.GERMINATE, slot, blueprint=blueprint, **how)

    def advance(self, slot: str) -> Done:
        """Let a training seed blend in now; left alone it does so by its tempo."""
        return self._op(Op.ADVANCE, slot)

    def set_alpha(
        self,
        slot: str,
        target: str,
        *,
        speed: str = "FAST",
        curve: str = "LINEAR",
        style: str = "ADD",
    ) -> Done:
        """Move a seed's alpha to another target."""
        how = {"alpha_target": target, "alpha_speed": speed, "alpha_curve": curve}
        return self._op(Op.SET_ALPHA, slot, style=style, **how)

    def prune(
        self, slot: str, *, speed: str = "INSTANT", curve: str = "LINEAR"
    ) -> Done:
        """Fade a seed out; a training seed leaves at once."""
        return self._op(Op.PRUNE, slot, alpha_speed=speed, alpha_curve=curve)

    def keep(self, slot: str) -> Done:
        """Fossilise a holding seed: it stays for good."""
        return self._op(Op.FOSSILIZE, slot)

    def _op(self, op: Op, slot: str, **choices: str) -> Done:
        raise NotImplementedError


class GrowingModel(nn.Module, NamedOps[None]):
    """A host and the seeds in its slots.

    Args:
        host: The network; it is not copied.
        slots: Places by module name: "fc1->fc2" for new hidden units between two
            layers, "fc2->fc2" beside one, "block" for a residual seed.
        example: What the host is called with: a tensor, a tuple or a dictionary.
        blueprints: Names of what may be planted; all built-in ones if None.
        seeds_per_slot: How many seeds a place can hold; its slots are called
            "fc1->fc2#0", "fc1->fc2#1" and so on.
        min_age: Decisions a seed spends in a stage before it may be moved.
        tick: Batches in which tempos and speeds are counted.
        rng_seed: Where the seeds' first weights come from.
    """

    def __init__(
        self,
        host: nn.Module,
        slots: Sequence[str],
        example: Example,
        *,
        blueprints: Sequence[str] | None = None,
        seeds_per_slot: int = 4,
        min_age: int = 1,
        tick: int = 1,
        rng_seed: int = 0,
    ) -> None:
        super().__init__()
        if seeds_per_slot < 1:
            raise BadInput(f"seeds_per_slot must be at least 1, got {seeds_per_slot}.")
        if tick < 1:
            raise BadInput(f"tick must be at least 1 batch, got {tick}.")
        chosen = BLUEPRINTS if blueprints is None else tuple(map(find, blueprints))
        self.survey: Survey = survey(host, slots, example)
        self.host = host
        self.seeds = nn.ModuleDict()
        self.example: Example = example
        self.flow = Flow()
        self.hooks = [SlotHooks(place, self.flow) for place in self.survey.places]
        # Slots of one place lie apart, so that filling them in order spreads.
        self.slots: tuple[str, ...] = tuple(
            f"{place.site.name}#{index}"
            for index in range(seeds_per_slot)
            for place in self.survey.places
        )
        slot_config = SlotConfig(len(self.slots), min_age)
        self.spec = ActionSpec(slot_config, chosen, {"op": OPS})
        self.states = SeedStates.empty(1, len(self.slots))
        self.batches_per_tick = tick
        self.generator = torch.Generator().manual_seed(rng_seed)
        self._prices: dict[tuple[str, Blueprint, tuple[Layer, ...]], Cost] = {}
        for hooks in self.hooks:
            own = hooks.place
            hooks.below = [
                other
                for other in self.hooks
                if other.place.inlet is own.outlet
                and own.geometry.spans
                and other.place.geometry.spans
            ]
        try:
            for hooks in self.hooks:
                hooks.attach()
        except BadInput:
            self.detach()
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The grown host's output."""
        return self.host(*args, **kwargs)

    def encode(self, op: Op, slot: str, **choices: str) -> Int64[Tensor, "1 head"]:
        """An action as numbers; heads that are not named are 0."""
        numbers: dict[str, int | str] = {"slot": self.index(slot), **choices}
        if "blueprint" in choices:
            names = [blueprint.name for blueprint in self.spec.blueprints]
            name = find(choices["blueprint"]).name  # refuses an unknown one
            if name not in names:
                raise BadInput(
                    f"blueprint {name!r} is not among this model's: {', '.join(names)}."
                )
            numbers["blueprint"] = names.index(name)
        return encode_action(op, **numbers)

    def act(self, actions: Int64[Tensor, "1 head"]) -> None:
        """Carry out one action; refuses what is not possible now."""
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        after, done = lifecycle.act(
            self.states, actions, self.spec.slots.min_age, self.batches_per_tick
        )
        if not bool(done):
            raise IllegalAction(self._why_not(op, index))
        if op is Op.GERMINATE:
            blueprint = self.spec.blueprints[int(actions[0, HEAD["blueprint"]])]
            self._grow(index, blueprint)
        self.states = after
        self.tick(0, decision=False)  # what takes no time is done

    def tick(self, batches: int = 1, *, decision: bool = True) -> None:
        """Let batches pass, up to a decision: seeds move on, alphas move, faded leave.

        A seed trains for the ticks of its tempo, blends for as many, and holds.
        """
        passed = torch.tensor([batches])
        self._put(lifecycle.after(self.states, passed, decision=decision))

    def remove(self, slot: int) -> None:
        """Take a seed out at once, whatever its stage: for one that failed."""
        gone = torch.zeros_like(self.states.stage, dtype=torch.bool)
        gone[0, slot] = True
        self._put(lifecycle.select(gone, SeedStates.empty(*gone.shape), self.states))

    # What is there.

    def index(self, slot: str) -> int:
        """The number of a slot."""
        if slot not in self.slots:
            raise unknown("there is no slot", slot, self.slots)
        return self.slots.index(slot)

    def stage(self, slot: str) -> Stage:
        """The stage of a slot."""
        return Stage(int(self.states.stage[0, self.index(slot)]))

    def place(self, slot: int) -> InsertionPoint:
        """The place that a slot belongs to."""
        return self.survey.places[slot % len(self.survey.places)]

    def hooks_of(self, slot: int) -> SlotHooks:
        """The hooks of a slot's place."""
        return self.hooks[slot % len(self.hooks)]

    def seed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of all seeds by name."""
        return {f"seeds.{name}": p for name, p in self.seeds.named_parameters()}

    def training_seeds(self) -> dict[int, nn.Module]:
        """The seeds that learn in shadow passes, by slot number."""
        return {
            slot: branch.seed
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
            if branch.shadow
        }

    def training_parameters(self) -> list[nn.Parameter]:
        """Parameters of the seeds that learn in shadow passes."""
        return [
            p
            for seed in self.training_seeds().values()
            for p in seed.parameters()
            if p.requires_grad
        ]

    # What it costs.

    def count(self, *, active: bool = False) -> Cost:
        """Parameters and multiply-adds per row of the host with its living seeds.

        With `active`, without those that do not change the output and that an export
        leaves out. This is the one count for budget, rent, receipts and summary.
        """
        counted = {
            slot
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
            if not active or (branch.alpha > 0 and not branch.shadow)
        }
        host = Cost(self.survey.parameters, self.survey.macs)
        return sum((self.cost_of(slot, counted) for slot in counted), host)

    def cost_of(self, slot: int, others: Collection[int] | None = None) -> Cost:
        """Cost of a planted seed and of its blocks with seeds of others (None: all)."""
        seed, at = self.seeds[f"slot_{slot}"], self.place(slot).geometry
        if not isinstance(seed, FormSeed):
            kind = self.spec.blueprints[int(self.states.blueprint[0, slot])]
            return Cost(_size(seed), cost(kind, at).macs)
        own = cost(seed.blueprint, at) + Cost(_size(seed.middle), 0)
        blocks = self._blocks(slot, seed.blueprint).items()
        shared = [
            _block_cost(block)
            for key, block in blocks
            if key in seed.cross
            and (others is None or int(key.split("_")[1]) in others)
        ]
        return sum(shared, own)

    @property
    def parameters_added(self) -> int:
        """Parameters of all seeds."""
        return self.count().parameters - self.survey.parameters

    @property
    def macs(self) -> int:
        """Multiply-adds per row of the host with every active seed."""
        return self.count(active=True).macs

    def width(self, slot: int) -> int:
        """Units between the two layers of a slot's place, those of seeds included."""
        place = self.place(slot)
        return int(place.inlet.get_parameter("weight").shape[0]) + sum(
            seed.blueprint.size
            for other, seed in self.widening_seeds().items()
            if self.place(other) is place
        )

    def sized(self, slot: int, blueprint: Blueprint) -> Blueprint:
        """The blueprint at the size that it has in a slot now."""
        if not blueprint.share or not self.place(slot).geometry.spans:
            return blueprint
        return replace(blueprint, size=blueprint.units(self.width(slot)), share=0.0)

    def cost(self, slot: int, blueprint: Blueprint) -> Cost:
        """Parameters and multiply-adds per row that a blueprint adds in a slot now."""
        place, blueprint = self.place(slot), self.sized(slot, blueprint)
        blocks = tuple(self._blocks(slot, blueprint).values())
        key = (place.site.name, blueprint, blocks)
        if key not in self._prices:
            norms = Cost(_size(seed_middle(place, blueprint)), 0)
            own = cost(blueprint, place.geometry) + norms
            self._prices[key] = sum(map(_block_cost, blocks), own)
        return self._prices[key]

    def price(self, slot: int, blueprint: Blueprint) -> Cost | None:
        """The cost of a blueprint in a slot; None if it does not fit there."""
        try:
            fits = not misfit(blueprint, self.place(slot).geometry)
            return self.cost(slot, blueprint) if fits else None
        except BadInput:  # a user's own that does not know where it fits
            return None

    def widening_seeds(self) -> dict[int, FormSeed]:
        """Seeds with hidden units of their own by slot number, the oldest first."""
        return {
            int(name.removeprefix("slot_")): seed
            for name, seed in self.seeds.items()
            if isinstance(seed, FormSeed) and seed.widens
        }

    def _blocks(self, slot: int, blueprint: Blueprint) -> dict[str, Layer]:
        """Blocks that a new seed has with the units of neighbouring places."""
        here, size, blocks = self.place(slot), blueprint.size, dict[str, Layer]()
        if blueprint.form is not Form.WIDEN:
            return blocks
        for other, seed in self.widening_seeds().items():
            there, units = self.place(other), seed.blueprint.size
            if there.outlet is here.inlet:
                blocks[f"from_{other}"] = cross_layer(there.geometry, units, size)
            elif there.inlet is here.outlet:
                blocks[f"into_{other}"] = cross_layer(here.geometry, size, units)
        return blocks

    def example_outputs(self) -> list[Tensor]:
        """The model's output on its example in eval mode; nothing changes."""
        return eval_outputs(self, self.example)

    def detach(self) -> None:
        """Take all hooks off the host; it is then as it was before, co-trained."""
        for hooks in self.hooks:
            hooks.detach()

    # Saving: the topology goes with the weights.

    def get_extra_state(self) -> dict[str, Any]:
        """All that is no weight, as plain data."""
        return {
            "format": FORMAT,
            "slots": [*self.slots],
            "blueprints": [blueprint.name for blueprint in self.spec.blueprints],
            "states": asdict(self.states),
            "seeds": [
                [int(name[5:]), size_of(seed)] for name, seed in self.seeds.items()
            ],
            "generator": self.generator.get_state(),
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Lifecycle and generator; `load_state_dict` has planted the seeds."""
        self.generator.set_state(state["generator"])
        self._put(SeedStates(**state["states"]))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:  # noqa: ANN401
        """Plant what was planted, then load all weights strictly.

        The host must come from the same factory and the slots and blueprints must be
        those of the saved model.
        """
        if assign or not strict:
            raise BadInput("a growing model loads strictly and in place only.")
        names = [blueprint.name for blueprint in self.spec.blueprints]
        saved = _saved_topology(state_dict, self.host, self.slots, names)
        for slot in range(len(self.slots)):
            self._uproot(slot)
        for slot, size in saved["seeds"]:  # the oldest first, for their blocks
            kind = self.spec.blueprints[int(saved["states"]["blueprint"][0, slot])]
            self._grow(slot, replace(kind, size=size, share=0.0))
        return super().load_state_dict(state_dict)

    # Inside.

    def _put(self, states: SeedStates) -> None:
        """Give the seeds the alphas of the next batch; remove those of free slots."""
        self.states = states
        alphas, training = lifecycle.schedule(states, 1)
        for slot in range(len(self.slots)):
            stage = int(states.stage[0, slot])
            hooks = self.hooks_of(slot)
            if stage == Stage.DORMANT:
                self._uproot(slot)
            elif slot in hooks.branches:
                branch = hooks.branches[slot]
                branch.alpha = float(alphas[0, 0, slot])
                branch.style = int(states.style[0, slot])
                branch.shadow = bool(training[0, 0, slot])

    def _grow(self, slot: int, blueprint: Blueprint) -> None:
        place, hooks = self.place(slot), self.hooks_of(slot)
        blueprint = self.sized(slot, blueprint)
        if reason := misfit(blueprint, place.geometry):
            raise BadInput(
                f"blueprint {blueprint.name!r} does not fit slot "
                f"{self.slots[slot]!r}: {reason}."
            )
        middle = seed_middle(place, blueprint)
        seed = build(blueprint, place.geometry, self.generator, middle)
        if isinstance(seed, FormSeed) and seed.widens:
            _scale_like(seed.weights["first"], place.inlet.get_parameter("weight"))
            self._add_blocks(slot, seed)
        near = (place.outlet, place.inlet, self.host)
        like = next(p for m in near for p in m.parameters() if p.is_floating_point())
        seed = seed.to(device=like.device, dtype=like.dtype)
        seed.train(self.host.training)
        self.seeds[f"slot_{slot}"] = seed
        hooks.branches[slot] = Branch(seed)
        hooks.branches = dict(sorted(hooks.branches.items()))

    def _add_blocks(self, slot: int, seed: FormSeed) -> None:
        """Blocks with older seeds: zero into their units, random from them.

        Random ones are drawn like the first layer, which is scaled down as if all that
        the units read had been drawn with it. What reads the units is zero, so that
        nothing changes.
        """
        blocks = self._blocks(slot, seed.blueprint)
        above = [block for key, block in blocks.items() if key.startswith("from")]
        bound = 0.0
        if above:
            first = seed.weights["first"].detach()
            fan_in = first.numel() / seed.blueprint.size
            fan_in_all = fan_in + sum(block.fan_in for block in above)
            first.mul_((fan_in / fan_in_all) ** 0.5)
            bound = float(first.std(correction=0)) * 3**0.5
        for key, block in blocks.items():
            weight = torch.zeros(block.weight_shape)
            if key.startswith("from"):
                weight.uniform_(-bound, bound, generator=self.generator)
            seed.cross[key] = nn.Parameter(weight)

    def _uproot(self, slot: int) -> None:
        if f"slot_{slot}" in self.seeds:
            del self.seeds[f"slot_{slot}"]
            self.hooks_of(slot).branches.pop(slot, None)
            self.flow.failed.pop(slot, None)
            for seed in self.widening_seeds().values():
                for key in (f"from_{slot}", f"into_{slot}"):
                    if key in seed.cross:
                        del seed.cross[key]

    def _why_not(self, op: Op, slot: int) -> str:
        stage = Stage(int(self.states.stage[0, slot])).name
        age = int(self.states.age[0, slot])
        moving = "" if bool(self.states.settled[0, slot]) else ", alpha still moving"
        return (
            f"{op.name} is not possible in slot {self.slots[slot]!r}: it is {stage} "
            f"for {age} decisions{moving}."
        )

    def _op(self, op: Op, slot: str, **choices: str) -> None:
        self.act(self.encode(op, slot, **choices))


def encode_action(op: Op, **choices: int | str) -> Int64[Tensor, "1 head"]:
    """One action as numbers, from names or indices; heads that are not named are 0."""
    row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
    row[0, HEAD["op"]] = op
    for head, choice in choices.items():
        names = [*HEADS[HEAD[head]].choices]
        if isinstance(choice, str) and choice not in names:
            raise unknown(f"{head} has no choice", choice, names)
        index = names.index(choice) if isinstance(choice, str) else choice
        row[0, HEAD[head]] = index
    return row


def seed_middle(place: InsertionPoint, blueprint: Blueprint) -> nn.Module:
    """What a seed of this blueprint has between its two layers."""
    if blueprint.form is not Form.WIDEN:
        return nn.Identity()
    units = place.inlet.get_parameter("weight").shape[0]
    return new_middle(place.middle, blueprint.size, int(units))


@torch.no_grad()
def _scale_like(weight: Tensor, host: Tensor) -> None:
    """Scale new units' weights to the standard deviation of the host's own."""
    own, built = (float(w.double().std(correction=0)) for w in (host, weight))
    if isfinite(own) and own > 0.0 and built > 0.0:
        weight.mul_(own / built)


def _size(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def _block_cost(block: Layer) -> Cost:
    return Cost(prod(block.weight_shape), block.macs)


def size_of(seed: nn.Module) -> int:
    """The size that a seed was built with."""
    return seed.blueprint.size if isinstance(seed, FormSeed) else 0


def _saved_topology(
    state: Mapping[str, Any],
    host: nn.Module,
    slots: Sequence[str],
    blueprints: Sequence[str],
) -> Mapping[str, Any]:
    """What was saved besides weights; refuses a state of another model."""
    saved = state.get("_extra_state")
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise BadInput(
            "this is no saved GrowingModel, or one of another version; pass what "
            "state_dict() returned."
        )
    for what, here in (("slots", [*slots]), ("blueprints", [*blueprints])):
        if saved[what] != here:
            gone = [name for name in saved[what] if name not in here]
            raise BadInput(
                f"the saved model has other {what}: "
                f"{', '.join(gone) or ', '.join(saved[what])}; build this one "
                "with the same."
            )
    mine = {f"host.{name}": [*t.shape] for name, t in host.state_dict().items()}
    other = {
        name: [*value.shape]
        for name, value in state.items()
        if name.startswith("host.") and isinstance(value, Tensor)
    }
    odd = [n for n in sorted({*mine, *other}) if mine.get(n) != other.get(n)]
    if odd:
        named = [
            f"{n.removeprefix('host.')} was {other.get(n, 'absent')} and is "
            f"{mine.get(n, 'absent')}"
            for n in odd[:3]
        ]
        raise BadInput(f"the saved host is another one: {', '.join(named)}.")
    return saved
