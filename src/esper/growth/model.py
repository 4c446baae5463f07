"""A host with slots: plant, advance, set alpha, prune, keep. It decides nothing.

    growing = GrowingModel(host, ["fc1->fc2"], example)
    growing.plant("fc1->fc2#0", "widen_16")

The host stays the user's own module: its names, weights and calls are untouched, and
what grows becomes a submodule of it (`growth.grown`). Every op is checked by the
lifecycle and refused in one line if it is not possible now; nothing has changed then.
Time passes only when `tick` is called; seeds train, blend and hold by themselves then,
at the tempo that they were planted with.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, Generic, TypeVar
from weakref import ref

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import IllegalActionError, InvalidInputError, unknown
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.growth import lifecycle
from esper.growth.analysis.host_layers import units_of
from esper.growth.analysis.slot_search import choose_slots
from esper.growth.analysis.slots import HostAnalysis, InsertionPoint, analyse_host
from esper.growth.analysis.tracing import Example, eval_outputs
from esper.growth.blueprints.layers import Layer
from esper.growth.blueprints.registry import find
from esper.growth.blueprints.seed import Cost, FormSeed, cost, misfit
from esper.growth.hooks import ADD, Change, Flow, SlotHooks, TopologyListener
from esper.growth.lifecycle import SeedStates
from esper.growth.saving.export import why_units_do_not_fold
from esper.growth.saving.merge_rules import why_no_merge
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import SeedModules, grown_part, seed_middle

OPS: Final = tuple(op.name for op in Op if op is not Op.ADVANCE)
"""What a controller decides; seeds advance by themselves, or by hand."""

Done = TypeVar("Done")
Parts = tuple[Sequence[nn.Module], Sequence[nn.Module]]


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
        """Plant a seed; it leaves the output unchanged until it blends in.

        Args:
            slot: Name of the slot, such as "fc1->fc2#0".
            blueprint: Name of the blueprint, such as "widen_16".
            style: How the seed changes the output: "ADD" or "SCALE".
            tempo: How long it trains before it blends in: "AT_ONCE", "FAST",
                "STANDARD" or "SLOW".
            alpha_target: Weight of the seed after blending: "HALF", "MOST" or "FULL".
        """
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
        """Move a seed's alpha to another target.

        Args:
            slot: Name of the slot.
            target: New weight of the seed: "HALF", "MOST" or "FULL".
            speed: Duration of the change: "INSTANT", "FAST" or "SLOW".
            curve: Shape of the change over time: "LINEAR", "COSINE" or
                "SIGMOID".
            style: How the seed changes the output: "ADD" or "SCALE".
        """
        how = {"alpha_target": target, "alpha_speed": speed, "alpha_curve": curve}
        return self._op(Op.SET_ALPHA, slot, style=style, **how)

    def prune(
        self, slot: str, *, speed: str = "INSTANT", curve: str = "LINEAR"
    ) -> Done:
        """Fade a seed out; a training seed leaves at once.

        Args:
            slot: Name of the slot.
            speed: Duration of the fade: "INSTANT", "FAST" or "SLOW".
            curve: Shape of the fade over time: "LINEAR", "COSINE" or
                "SIGMOID".
        """
        return self._op(Op.PRUNE, slot, alpha_speed=speed, alpha_curve=curve)

    def keep(self, slot: str) -> Done:
        """Fossilise a holding seed: it stays for good."""
        return self._op(Op.FOSSILIZE, slot)

    def _op(self, op: Op, slot: str, **choices: str) -> Done:
        raise NotImplementedError


class GrowingModel(nn.Module, NamedOps[None], TopologyListener):
    """A host and the seeds in its slots.

    Args:
        host: The network; it is not copied.
        slots: Places by module name: "fc1->fc2" for new hidden units between two
            layers, "fc2->fc2" beside one, "block" for a residual seed; patterns, or
            "auto" (`choose_slots`).
        example: What the host is called with: a tensor, a tuple or a dictionary.
        blueprints: Names of what may be planted; all built-in ones if None.
        seeds_per_slot: How many seeds a place can hold; its slots are called
            "fc1->fc2#0", "fc1->fc2#1" and so on.
        min_age: Decisions a seed spends in a stage before it may be moved.
        tick: Batches in which tempos and speeds are counted.
        rng_seed: Where the seeds' first weights come from.
        merge_only: Whether only seeds are planted that `export` folds into the host's
            own layers; places without such seeds are refused, or not found.
    """

    seeds: SeedModules

    def __init__(
        self,
        host: nn.Module,
        slots: Sequence[str] | str,
        example: Example,
        *,
        blueprints: Sequence[str] | None = None,
        seeds_per_slot: int = 4,
        min_age: int = 1,
        tick: int = 1,
        rng_seed: int = 0,
        merge_only: bool = False,
    ) -> None:
        super().__init__()
        if seeds_per_slot < 1:
            raise InvalidInputError(
                f"seeds_per_slot must be at least 1, got {seeds_per_slot}."
            )
        if tick < 1:
            raise InvalidInputError(f"tick must be at least 1 batch, got {tick}.")
        if isinstance(blueprints, str):
            raise InvalidInputError(
                f"blueprints must be a list of names, got {blueprints!r}."
            )
        chosen = BLUEPRINTS if blueprints is None else tuple(map(find, blueprints))
        before = grown_part(host)
        put_back: Change | None = None
        if before is not None:
            before.refuse_followed()
            put_back = before.restore_point()
            before.detach()
        self._before = before, put_back
        try:
            self.merge_only = merge_only

            def reject(place: InsertionPoint) -> str:
                return (
                    why_none_merges(host, place, chosen, example) if merge_only else ""
                )

            names = choose_slots(host, slots, example, reject)
            self.analysis: HostAnalysis = analyse_host(host, names, example)
            for place in self.analysis.places:
                if why := reject(place):
                    raise InvalidInputError(f"slot {place.site.name!r}: {why}.")
            # Slots of one place lie apart, so that filling them in order spreads.
            numbered = tuple(
                f"{place.site.name}#{index}"
                for index in range(seeds_per_slot)
                for place in self.analysis.places
            )
            slot_config = SlotConfig(len(numbered), min_age)
            narrowed = {"op": OPS, **({"style": ("ADD",)} if merge_only else {})}
            self.spec = ActionSpec(slot_config, chosen, narrowed)
            grown = SeedModules(host, self.analysis.places, numbered, chosen, rng_seed)
            if before is not None:
                grown.adopt(before)
            grown.attach()
        except BaseException:
            self._put_back()
            raise
        self.host = host
        self.__dict__["seeds"] = grown  # a submodule of the host, not of this
        grown.flow.listener = ref(self)
        self.example: Example = example
        self.batches_per_tick = tick
        self._prices: dict[tuple[str, Blueprint, tuple[Layer, ...]], Cost] = {}
        self._parts: Parts = ([], [])
        self._parts_at = -1
        """The number of changes that they were found after."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of all slots."""
        return self.seeds.slots

    @property
    def states(self) -> SeedStates:
        """Stages and alphas of all slots."""
        return self.seeds.states

    @property
    def hooks(self) -> list[SlotHooks]:
        """The hooks of every place."""
        return self.seeds.hooks

    @property
    def flow(self) -> Flow:
        """How the next pass treats the seeds."""
        return self.seeds.flow

    @property
    def generator(self) -> torch.Generator:
        """Where the seeds' first weights come from."""
        return self.seeds.generator

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The grown host's output."""
        return self.host(*args, **kwargs)

    def encode(self, op: Op, slot: str, **choices: str) -> Int64[Tensor, "1 head"]:
        """An action as numbers; heads that are not named are 0.

        Args:
            op: The operation.
            slot: Name of the slot.
            choices: Names of the choices of other heads, by head.
        """
        numbers: dict[str, int | str] = {"slot": self.index(slot), **choices}
        if "blueprint" in choices:
            names = [blueprint.name for blueprint in self.spec.blueprints]
            name = find(choices["blueprint"]).name  # refuses an unknown one
            if name not in names:
                raise InvalidInputError(
                    f"blueprint {name!r} is not among this model's: {', '.join(names)}."
                )
            numbers["blueprint"] = names.index(name)
        return encode_action(op, **numbers)

    def act(self, actions: Int64[Tensor, "1 head"]) -> None:
        """Carry out one action; refuses what is not possible now."""
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        if self.merge_only and op in (Op.GERMINATE, Op.SET_ALPHA):
            self._refuse_unmerging(op, index, actions)
        after, done = lifecycle.act(
            self.states, actions, self.spec.slots.min_age, self.batches_per_tick
        )
        if not bool(done):
            raise IllegalActionError(self._why_not(op, index))
        if op is Op.GERMINATE:
            blueprint = self.spec.blueprints[int(actions[0, HEAD["blueprint"]])]
            self.seeds.grow(index, blueprint)
        self.seeds.states = after
        self.tick(0, decision=False)  # what takes no time is done

    def tick(self, batches: int = 1, *, decision: bool = True) -> None:
        """Let batches pass, up to a decision: seeds move on, alphas move, faded leave.

        A seed trains for the ticks of its tempo, blends for as many, and holds.
        """
        passed = torch.tensor([batches])
        self.seeds.apply_states(lifecycle.after(self.states, passed, decision=decision))

    def remove(self, slot: int) -> None:
        """Take a seed out at once, whatever its stage: for one that failed."""
        gone = torch.zeros_like(self.states.stage, dtype=torch.bool)
        gone[0, slot] = True
        self.seeds.apply_states(
            lifecycle.select(gone, SeedStates.empty(*gone.shape), self.states)
        )

    # What is there.

    def index(self, slot: str) -> int:
        """The number of a slot."""
        return self.seeds.index(slot)

    def stage(self, slot: str) -> Stage:
        """The stage of a slot."""
        return Stage(int(self.states.stage[0, self.index(slot)]))

    def place(self, slot: int) -> InsertionPoint:
        """The place that a slot belongs to."""
        return self.seeds.place(slot)

    def hooks_of(self, slot: int) -> SlotHooks:
        """The hooks of a slot's place."""
        return self.seeds.hooks_of(slot)

    def seed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of all seeds by the names that they have in the host."""
        return {f"{NAME}.{name}": p for name, p in self.seeds.named_parameters()}

    def training_seeds(self) -> dict[int, nn.Module]:
        """The seeds that learn in shadow passes, by slot number."""
        if not len(self.seeds):
            return {}
        return {
            slot: branch.seed
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
            if branch.shadow
        }

    def parts(self) -> Parts:
        """Modules of the seeds that learn in shadow passes, and of all the rest.

        Only those that hold tensors themselves. Every batch asks for them, and walking
        a tree of modules takes time, so it is walked once per topology.
        """
        if self._parts_at != self.flow.changes:
            training = self.training_seeds().values()
            seeds = dict.fromkeys(m for seed in training for m in seed.modules())
            others = [m for m in self.modules() if m not in seeds]
            self._parts = _holders(seeds), _holders(others)
            self._parts_at = self.flow.changes
        return self._parts

    def training_parameters(self) -> list[nn.Parameter]:
        """Parameters of the seeds that learn in shadow passes."""
        held = (p for m in self.parts()[0] for p in m._parameters.values())
        return [*dict.fromkeys(p for p in held if p is not None and p.requires_grad)]

    # What it costs.

    def count(self, *, active: bool = False, exported: bool = False) -> Cost:
        """Parameters and multiply-adds per row of the host with its living seeds.

        With `active`, without those that do not change the output and that an export
        leaves out; with `exported`, also without linear seeds that an export adds to
        the weights of a layer. This is the one count for budget, rent, receipts and
        summary.
        """
        counted = {
            slot
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
            if not (active or exported) or (branch.alpha > 0 and not branch.shadow)
        }
        total = Cost(self.analysis.parameters, self.analysis.macs)
        folded = {slot for slot in counted if exported and self._is_linear(slot)}
        new_biases = {
            self.place(slot).outlet
            for slot in folded
            if self.spec.blueprints[int(self.states.blueprint[0, slot])].form
            is Form.SCALE_SHIFT
            and self.place(slot).outlet._parameters.get("bias") is None
        }
        for layer in new_biases:
            total += Cost(units_of(layer), 0)
        counted -= folded
        return sum((self.cost_of(slot, counted) for slot in counted), total)

    def _is_linear(self, slot: int) -> bool:
        """Whether a seed folds into weights that are there already."""
        kind = self.spec.blueprints[int(self.states.blueprint[0, slot])]
        return (
            kind.form in (Form.LOW_RANK, Form.SCALE_SHIFT)
            and self.hooks_of(slot).branches[slot].style == ADD
            and not why_no_merge(self.place(slot), kind)
        )

    def cost_of(self, slot: int, others: Collection[int] | None = None) -> Cost:
        """Cost of a planted seed and of its blocks with seeds of others (None: all)."""
        seed, at = self.seeds[f"slot_{slot}"], self.place(slot).geometry
        if not isinstance(seed, FormSeed):
            kind = self.spec.blueprints[int(self.states.blueprint[0, slot])]
            return Cost(_size(seed), cost(kind, at).macs)
        own = cost(seed.blueprint, at) + Cost(_size(seed.interlayer), 0)
        blocks = self.seeds.blocks(slot, seed.blueprint).items()
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
        return self.count().parameters - self.analysis.parameters

    @property
    def macs(self) -> int:
        """Multiply-adds per row of the host with every active seed."""
        return self.count(active=True).macs

    def cost(self, slot: int, blueprint: Blueprint) -> Cost:
        """Parameters and multiply-adds per row that a blueprint adds in a slot now."""
        place, blueprint = self.place(slot), self.seeds.sized(slot, blueprint)
        blocks = tuple(self.seeds.blocks(slot, blueprint).values())
        key = (place.site.name, blueprint, blocks)
        if key not in self._prices:
            norms = Cost(_size(seed_middle(place, blueprint)), 0)
            own = cost(blueprint, place.geometry) + norms
            self._prices[key] = sum(map(_block_cost, blocks), own)
        return self._prices[key]

    def price(self, slot: int, blueprint: Blueprint) -> Cost | None:
        """The cost of a blueprint in a slot; None if it is not planted there."""
        place = self.place(slot)
        if self.merge_only and why_no_merge(place, self.seeds.sized(slot, blueprint)):
            return None
        try:
            fits = not misfit(blueprint, place.geometry)
            return self.cost(slot, blueprint) if fits else None
        except InvalidInputError:  # a user's own that does not know where it fits
            return None

    def example_outputs(self) -> list[Tensor]:
        """The model's output on its example in eval mode; nothing changes."""
        return eval_outputs(self, self.example)

    def detach(self) -> None:
        """Take seeds and hooks off the host; it is as it was before, co-trained."""
        self.seeds.detach()

    def undo(self) -> None:
        """Leave the host as it was before this was built, with the seeds it had."""
        self.seeds.detach()
        self._put_back()

    def _put_back(self) -> None:
        before, put_back = self._before
        if before is not None and put_back is not None:
            put_back()
            before.attach()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:  # noqa: ANN401
        """Plant what was planted, then load all weights strictly.

        The host must come from the same factory, and its slots and the blueprints
        must be there.

        Args:
            state_dict: What `state_dict()` returned.
            strict: Must be True.
            assign: Must be False.
        """
        if assign or not strict:
            raise InvalidInputError("a growing model loads strictly and in place only.")
        if not isinstance(state_dict, Mapping) or not any(
            str(name).startswith("host.") for name in state_dict
        ):
            raise InvalidInputError(
                "this is no saved GrowingModel; pass what state_dict() returned."
            )
        self.seeds.validated(state_dict, "host.")
        return super().load_state_dict(state_dict)

    # Inside.

    def _why_not(self, op: Op, slot: int) -> str:
        stage = Stage(int(self.states.stage[0, slot])).name
        age = int(self.states.age[0, slot])
        moving = "" if bool(self.states.settled[0, slot]) else ", alpha still moving"
        return (
            f"{op.name} is not possible in slot {self.slots[slot]!r}: it is {stage} "
            f"for {age} decisions{moving}."
        )

    def _refuse_unmerging(
        self, op: Op, slot: int, actions: Int64[Tensor, "1 head"]
    ) -> None:
        why = "" if int(actions[0, HEAD["style"]]) == ADD else "it scales its outlet"
        if op is Op.GERMINATE and not why:
            kind = self.spec.blueprints[int(actions[0, HEAD["blueprint"]])]
            why = why_no_merge(self.place(slot), self.seeds.sized(slot, kind))
        if why:
            raise InvalidInputError(
                f"the seed in slot {self.slots[slot]!r} would not merge, and "
                f"merge_only is set: {why}."
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


def why_none_merges(
    host: nn.Module,
    place: InsertionPoint,
    kinds: Sequence[Blueprint],
    example: Example,
) -> str:
    """Why no blueprint that fits a place merges there; empty if one does."""
    fitting = [kind for kind in kinds if not misfit(kind, place.geometry)]
    whys = {kind: why_no_merge(place, kind) for kind in fitting}
    folding = [kind for kind in fitting if not whys[kind]]
    why = next(iter(whys.values()), "none fits")
    if folding and all(kind.form is Form.WIDEN for kind in folding):
        why = why_units_do_not_fold(host, place, folding[0], example)
    elif folding:
        why = ""
    return f"no seed there merges, {why}" if why else ""


def _holders(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules that hold parameters or buffers themselves."""
    return [module for module in modules if module._parameters or module._buffers]


def _size(module: nn.Module) -> int:
    """Parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def _block_cost(block: Layer) -> Cost:
    return Cost(prod(block.weight_shape), block.macs)
