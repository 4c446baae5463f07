"""A host with slots: plant, advance, set alpha, prune and keep seeds.

    growing = GrowingModel(host, ["fc1->fc2"], example)
    growing.plant("fc1->fc2#0", "widen_16")

The host keeps its names, weights and calls; seeds become a submodule of it
(`growth.seed_modules`). Every op changes the model, its optimiser if it has one, and
copies that follow it. It returns a receipt with the change of the output on the
example. A change is applied completely or not at all, even if something raises; Ctrl-C
is delayed. Only `tick` advances time: then seeds train, blend and hold at their tempo.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf, prod
from numbers import Integral
from typing import Any, Final
from weakref import ref

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import IllegalActionError, InvalidInputError, unknown
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage, StageChanged
from esper.growth import lifecycle
from esper.growth.analysis.host_layers import restore_sizes, units_of
from esper.growth.analysis.slots import (
    HostAnalysis,
    InsertionPoint,
    analyse_host,
    choose_slots,
    insertion_point,
)
from esper.growth.analysis.tracing import (
    Example,
    Trace,
    batch_size,
    call,
    count_macs,
    eval_outputs,
    isolated,
)
from esper.growth.blueprints.forms import FormSeed, Layer
from esper.growth.blueprints.registry import Cost, cost, find, misfit
from esper.growth.distributed import DistributedContext
from esper.growth.hooks import ADD, Change
from esper.growth.lifecycle import SeedStates
from esper.growth.optimiser import OptimizerSurgery
from esper.growth.saving.export import difference, plan, why_units_do_not_fold
from esper.growth.saving.folding import ActiveSeed, Reading, folded, why_no_merge
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import (
    SeedModules,
    all_or_nothing,
    grown_part,
    host_parameters,
    seed_interlayer,
    slot_number,
    uninterrupted,
)

GRADIENTS: Final = "gradients"
FOLDED: Final = "folded into its layers"
OPS: Final = tuple(op.name for op in Op if op is not Op.ADVANCE)
"""Ops of a controller; seeds advance by their tempo, or by hand."""

VERBS = {
    Op.ADVANCE: "advance",
    Op.SET_ALPHA: "set alpha of",
    Op.PRUNE: "prune",
    Op.FOSSILIZE: "keep",
}
PASSED = {
    Stage.BLENDING: "trained for its tempo",
    Stage.HOLDING: "alpha reached its target",
    Stage.DORMANT: "alpha reached 0",
}
"""Reason for entering a stage without an op."""
Parts = tuple[Sequence[nn.Module], Sequence[nn.Module]]


@dataclass(frozen=True, slots=True)
class Receipt:
    """Effect of one op on the model's output on its example."""

    op: str
    slot: str
    blueprint: str
    jump: float
    """Largest absolute change of the output in eval mode."""

    def __str__(self) -> str:
        """One line."""
        what = f" {self.blueprint}" if self.blueprint else ""
        return f"{self.op} {self.slot}{what}: output changed by {self.jump:.3g}"


class FoldError(Exception):
    """Seeds cannot be folded; nothing has changed."""


class NamedOps:
    """The ops of a growing model as methods that take names."""

    def plant(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = "ADD",
        tempo: str = "STANDARD",
        alpha_target: str = "FULL",
    ) -> Receipt:
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

    def advance(self, slot: str) -> Receipt:
        """Let a training seed blend in now instead of at the end of its tempo."""
        return self._op(Op.ADVANCE, slot)

    def set_alpha(
        self,
        slot: str,
        target: str,
        *,
        speed: str = "FAST",
        curve: str = "LINEAR",
        style: str = "ADD",
    ) -> Receipt:
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
    ) -> Receipt:
        """Fade a seed out; a training seed is removed at once.

        Args:
            slot: Name of the slot.
            speed: Duration of the fade: "INSTANT", "FAST" or "SLOW".
            curve: Shape of the fade over time: "LINEAR", "COSINE" or
                "SIGMOID".
        """
        return self._op(Op.PRUNE, slot, alpha_speed=speed, alpha_curve=curve)

    def keep(self, slot: str) -> Receipt:
        """Keep a holding seed for good: fold it into the host's own layers.

        Its slot is free again. A seed that does not fold stays a branch.
        """
        return self._op(Op.FOSSILIZE, slot)

    def _op(self, op: Op, slot: str, **choices: str) -> Receipt:
        raise NotImplementedError


class GrowingModel(nn.Module, NamedOps):
    """A host and the seeds in its slots.

    Args:
        host: The network; it is not copied.
        slots: Places by module name: "fc1->fc2" for new hidden units between two
            layers, "fc2->fc2" for a branch around one, "block" for a residual seed;
            patterns, or "auto" (`choose_slots`).
        example: Input of the host: a tensor, a tuple or a dictionary.
        blueprints: Names of the blueprints; all built-in ones if None.
        seeds_per_slot: Slots per place, called "fc1->fc2#0", "fc1->fc2#1" and so on.
        min_age: Decisions that a seed stays in a stage before ops can move it.
        tick: Batches per tick, the unit of tempos and speeds.
        rng_seed: Random seed of the seeds' initial weights.
        merge_only: Allow only seeds that `export` folds into the host's own layers.
        take_over: Replace the Grower or GrowingModel that uses the host.
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
        take_over: bool = False,
    ) -> None:
        super().__init__()
        check_number("seeds_per_slot", seeds_per_slot, least=1)
        check_number("tick", tick, least=1)
        check_number("min_age", min_age, least=0)
        check_number("rng_seed", rng_seed, least=0)
        if isinstance(blueprints, str):
            raise InvalidInputError(
                f"blueprints must be a list of names, got {blueprints!r}."
            )
        chosen = BLUEPRINTS if blueprints is None else tuple(map(find, blueprints))
        before = grown_part(host)
        self.former = None if before is None else before.flow.owner
        """The model that used the host before."""
        if self.former is not None and not take_over:
            raise InvalidInputError(
                "the host has slots of another Grower. Call its detach() first."
            )
        self.undo_steps: list[Change] = []
        """Restore the host as it was before; for errors in a constructor."""
        if before is not None:
            self.undo_steps += [before.attach, before.restore_point()]
            before.detach()

        def reject(place: InsertionPoint) -> str:
            return why_none_merges(host, place, chosen, example) if merge_only else ""

        with all_or_nothing(self.undo_steps):
            names = choose_slots(host, slots, example, reject)
            self.analysis: HostAnalysis = analyse_host(host, names, example)
            for place in self.analysis.places:
                if why := reject(place):
                    raise InvalidInputError(f"slot {place.site.name!r}: {why}.")
            # All places come before the second slot of any place, so that filling
            # the slots in order spreads the seeds.
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
            self.undo_steps.append(grown.detach)
            grown.attach()
        self.host = host
        self.__dict__["seeds"] = grown  # not registered: the host's submodule
        self.slots, self.hooks, self.flow = grown.slots, grown.hooks, grown.flow
        self.index, self.place = grown.index, grown.place
        grown.flow.owner_ref = ref(self)
        self.merge_only = merge_only
        self.example: Example = example
        self.batches_per_tick = tick
        self.base = Cost(self.analysis.parameters, self.analysis.macs)
        """Current cost of the host without its seeds."""
        if self.former is not None:  # growth counts from the first host
            self.analysis = replace(
                self.analysis,
                parameters=self.former.analysis.parameters,
                macs=self.former.analysis.macs,
            )
        self.why_branches: dict[int, str] = {}
        """Why kept seeds are not folded, by slot."""
        self.surgery: OptimizerSurgery | None = None
        """Adds seeds to the optimiser, if there is one."""
        self.ranks = DistributedContext()
        self.is_replaced = False
        """Whether another model has taken over the host."""
        self.after_load: Callable[[], None] | None = None
        """Called after a state was loaded into the host."""
        self.step = 0
        """Number of the decision in recorded events."""
        self.receipts: list[Receipt] = []
        self.events: list[StageChanged] = []
        self._copies: list[tuple[ref[SeedModules], dict[str, nn.Module]]] = []
        """Copies of the host that grow with it, and the seeds that they copied."""
        self._prices: dict[tuple[str, Blueprint, tuple[Layer, ...]], Cost] = {}
        self._parts: Parts = ([], [])
        self._parts_at = -1  # value of `flow.changes` for which `_parts` holds

    @property
    def states(self) -> SeedStates:
        """Stages and alphas of all slots."""
        return self.seeds.states

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Call the host with its seeds."""
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
            name = find(choices["blueprint"]).name  # raises if it is unknown
            if name not in names:
                raise InvalidInputError(
                    f"blueprint {name!r} is not among this model's: {', '.join(names)}."
                )
            numbers["blueprint"] = names.index(name)
        return encode_action(op, **numbers)

    def act(self, actions: Int64[Tensor, "1 head"]) -> Receipt:
        """Apply one action and measure its effect; raises if it is not possible."""
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        if self.merge_only and op in (Op.GERMINATE, Op.SET_ALPHA):
            self._refuse_unmerging(op, index, actions)
        states, min_age = self.states, self.spec.slots.min_age
        after, done = lifecycle.act(states, actions, min_age, self.batches_per_tick)
        if not bool(done):
            raise IllegalActionError(self._why_not(op, index))
        self.why_branches.pop(index, None)
        if op is Op.FOSSILIZE:
            return self.keep_seeds([index])[0]
        before, without = self.example_outputs(), list[Tensor]()
        if op is Op.PRUNE:  # it fades later; the receipt holds the total change
            with self.flow.using(left_out=index):
                without = self.example_outputs()

        def change() -> None:
            if op is Op.GERMINATE:
                blueprint = self.spec.blueprints[int(actions[0, HEAD["blueprint"]])]
                self.seeds.insert(index, self.seeds.new_seed(index, blueprint))
            self.seeds.states = after
            self._pass(0, decision=False)  # finish changes of zero length
            without[:] = without or self.example_outputs()

        self.follow(change)
        self.record_stages(states.stage, op.name)
        known = max(states, self.states, key=lambda s: int(s.blueprint[0, index]))
        return self._receipt(op, index, known, _jump(before, without))

    def _receipt(self, op: Op, slot: int, states: SeedStates, jump: float) -> Receipt:
        kind = int(states.blueprint[0, slot])
        name = self.spec.blueprints[kind].name if kind >= 0 else ""
        self.receipts.append(Receipt(op.name, self.slots[slot], name, jump))
        return self.receipts[-1]

    def keep_seeds(self, slots: Sequence[int]) -> list[Receipt]:
        """Keep holding seeds: those that fold are folded, the others stay branches."""
        states, before = self.states, self.example_outputs()
        whys = self.fold(slots)
        for slot in slots:
            now = self.states.stage
            kept = now.clone()
            kept[0, slot] = Stage.FOSSILIZED
            self._record_change(slot, states.stage, kept, Op.FOSSILIZE.name)
            self.why_branches.pop(slot, None)
            if slot in whys:
                self.why_branches[slot] = whys[slot]
                age = self.states.age.clone()
                age[0, slot] = 0
                self.seeds.states = replace(self.states, stage=kept, age=age)
            else:
                self._record_change(slot, kept, now, FOLDED)
        jump = _jump(before, self.example_outputs())
        return [self._receipt(Op.FOSSILIZE, slot, states, jump) for slot in slots]

    def fold(self, slots: Collection[int], *, rewrap: bool = False) -> dict[int, str]:
        """Fold seeds into the host's own layers at their alphas.

        Returns why others stay branches, by slot. Parameters of the host stay the same
        objects and get more rows or columns, so `DistributedDataParallel` must wrap
        the host again: in one, nothing folds without `rewrap`.
        """
        living = self.seeds.living_seeds()
        waits = {
            one.slot: "it is not kept yet" for one in living if one.slot not in slots
        }
        if self.ranks.wrapper is not None and not rewrap:
            waits |= dict.fromkeys(slots, "DistributedDataParallel keeps old sizes")
        frozen = [one for one in living if self._is_frozen(one)]
        waits |= {one.slot: "its layers are frozen" for one in frozen}
        reasons = plan(living, waits, together=False)
        folds = [one for one in living if one.slot not in reasons]
        if problem := self._fold(folds):
            # Fold one place after the other, where that works.
            for _, group in groupby(folds, key=lambda one: one.place.site):
                alone = [*group]
                if len(alone) < len(folds):
                    problem = self._fold(alone)
                reasons |= {one.slot: problem for one in alone if problem}
        return {slot: reasons[slot] for slot in slots if slot in reasons}

    def _is_frozen(self, one: ActiveSeed) -> bool:
        """Whether a layer that would take up a seed is not trained."""
        layers = (*one.place.first_layers(self.host).values(), one.place.outlet)
        held = [p for layer in layers for p in layer.parameters(recurse=False)]
        return not all(p.requires_grad for p in held)

    def _fold(self, folds: Sequence[ActiveSeed]) -> str:
        """Fold seeds with gradients and moments; returns why not, empty if it did."""
        if not folds:
            return ""
        slots, surgery = [one.slot for one in folds], self.surgery
        stays = [one for one in self.seeds.living_seeds() if one.slot not in slots]
        names = {module: name for name, module in self.host.named_modules()}
        readings = {GRADIENTS: Reading(lambda p: p.grad, power=-1)}
        if surgery is not None:
            readings |= surgery.moments()
        read = partial(folded, self.host, names, folds, living=stays)
        changed = read()
        if any(getattr(module, name) is None for module, name in changed):
            return "its layer has no bias that could take up the shift"
        found = {key: read(reading=reading) for key, reading in readings.items()}
        expected = self.example_outputs()
        before = {(module, n): getattr(module, n).shape for module, n in changed}

        def change() -> None:
            self.seeds.fold(slots)
            gradients = found.pop(GRADIENTS)
            for (module, name), value in gradients.items():
                parameter = getattr(module, name)
                parameter.grad = value.to(parameter)
            if surgery is not None:
                now = {(module, n): getattr(module, n) for module, n in changed}
                resized = [now[at] for at in now if now[at].shape != before[at]]
                surgery.put_moments(resized, found)
            self.measure_host(stays)
            if why := difference(expected, self.example_outputs()):
                raise FoldError(why)

        norms = [norm for one in folds for norm, _ in one.norms(self.host, names)]
        touched = {*(module for module, _ in changed), *norms}
        try:
            self.follow(change, [restore_sizes(touched)], slots)
        except FoldError as error:
            return str(error)
        except InvalidInputError as error:  # the host's code needs the old width
            return f"with its units, {error}"
        return ""

    def measure_host(self, living: Sequence[ActiveSeed] = ()) -> None:
        """Update the geometry of all places and the cost after layers were resized.

        `living` are the seeds that must fit the new geometry.
        """
        sites = [place.site for place in self.seeds.places]
        ends = [end for site in sites for end in (site.inlet, site.outlet)]
        muted = self.flow.using(muted=True)
        with muted, isolated(self.host, training=False), torch.no_grad():
            trace = Trace(self.host, ends, self.example)
            macs = count_macs(lambda: call(self.host, self.example))
        found = {site.name: insertion_point(site, trace).geometry for site in sites}
        for one in living:
            old, new = one.place.geometry, found[one.place.site.name]
            shapes = [(at.inlet_shape, at.outlet_shape) for at in (old, new)]
            widens = isinstance(one.seed, FormSeed) and one.seed.widens
            if shapes[0] != shapes[1] and not widens:
                raise FoldError(f"branch {one.name} reads or adds to its units")
        self.seeds.resize(found)
        self.analysis = replace(self.analysis, places=self.seeds.places)
        parameters = sum(p.numel() for p in host_parameters(self.host).values())
        self.base = Cost(parameters, macs // max(1, batch_size(self.example)))
        self._prices.clear()

    def tick(self, batches: int = 1, *, decision: bool = True) -> None:
        """Advance stages and alphas by some batches and, with `decision`, the ages."""
        stages = self.states.stage
        self.follow(lambda: self._pass(batches, decision=decision))
        self.record_stages(stages, "")

    def _pass(self, batches: int, *, decision: bool) -> None:
        passed = torch.tensor([batches])
        self.seeds.apply_states(lifecycle.after(self.states, passed, decision=decision))

    def remove(self, slot: int, reason: str = "") -> None:
        """Remove a seed at once in any stage, for example after an error."""
        stages = self.states.stage
        gone = torch.zeros_like(stages, dtype=torch.bool)
        gone[0, slot] = True
        empty = SeedStates.empty(*gone.shape)
        after = lifecycle.select(gone, empty, self.states)
        self.follow(lambda: self.seeds.apply_states(after))
        self.record_stages(stages, reason)

    def record_stages(self, before: Tensor, reason: str) -> None:
        """Record an event for every slot whose stage changed."""
        after = self.states.stage
        for slot in (before[0] != after[0]).nonzero().flatten().tolist():
            self._record_change(slot, before, after, reason)

    def _record_change(
        self, slot: int, before: Tensor, after: Tensor, reason: str
    ) -> None:
        now = Stage(int(after[0, slot]))
        self.events.append(
            StageChanged(
                env=0,
                slot=slot,
                step=self.step,
                before=Stage(int(before[0, slot])),
                after=now,
                reason=reason or PASSED[now],
            )
        )

    def collect(self) -> tuple[tuple[Receipt, ...], tuple[StageChanged, ...]]:
        """Return receipts and events since the last call."""
        found = tuple(self.receipts), tuple(self.events)
        self.receipts, self.events = [], []
        return found

    # The optimiser and copies of the host.

    def train_with(
        self, optimizer: Optimizer, ranks: DistributedContext | None = None
    ) -> OptimizerSurgery:
        """Let parameters of seeds join and leave an optimiser from now on."""
        seeds = self.seed_parameters()
        surgery = OptimizerSurgery(optimizer, host_parameters(self.host), seeds)
        self.undo_steps += [surgery.detach, surgery.restore_point()]
        self.surgery, self.ranks = surgery, ranks or self.ranks
        with all_or_nothing(self.undo_steps[-2:]):
            self._join(surgery, seeds, {*surgery.joined})
        return surgery

    def follow(
        self,
        change: Change,
        undo_steps: Sequence[Change] = (),
        folds: Collection[int] = (),
    ) -> None:
        """Change topology, optimiser and copies of the host; all or nothing.

        Args:
            change: Changes the host and its seeds.
            undo_steps: Undo what the restore points of seeds and optimiser do not.
            folds: Slots whose seeds are folded; copies fold their own.
        """
        surgery = self.surgery
        with uninterrupted():
            undo = [self._measured_before(), self.seeds.restore_point(), *undo_steps]
            if surgery is not None:
                undo.append(surgery.restore_point())
            before = self.seed_parameters()
            with all_or_nothing(undo):
                change()
                if surgery is not None:
                    after = self.seed_parameters()
                    gone = [p for name, p in before.items() if after.get(name) is not p]
                    surgery.leave(gone)
                    self._join(surgery, after, {*before.values()})
            for copy, twins in self._copies:
                if (living := copy()) is not None:
                    if folds:
                        living.fold(folds)
                        for slot in folds:
                            del twins[f"slot_{slot}"]
                    if living.shapes() != self.seeds.shapes():  # after loading
                        living.host.load_state_dict(self.host.state_dict())
                        twins.update(self.seeds.items())
                    living.mirror(self.seeds, twins)

    def _measured_before(self) -> Change:
        """Return a function that restores what `measure_host` sets."""
        analysis, base = self.analysis, self.base

        def put_back() -> None:
            self.analysis, self.base = analysis, base
            self._prices.clear()

        return put_back

    def add_copy(self, module: nn.Module) -> None:
        """Let a copy of the host, such as an average, grow with it from now on."""
        found = [part for part in module.modules() if isinstance(part, SeedModules)]
        if len(found) != 1 or found[0].slots != self.slots:
            raise InvalidInputError(
                "only a copy of the host can follow it. Make it after the Grower."
            )
        alike = found[0].shapes() == self.seeds.shapes()
        if not alike or [*found[0]] != [*self.seeds]:
            raise InvalidInputError(
                "the host has grown since the copy was made. Copy it again."
            )
        self._copies.append((ref(found[0]), dict(self.seeds.items())))

    def give_up(self, successor: "GrowingModel") -> None:
        """Hand the host and its copies over to another model."""
        self.is_replaced = True
        if self.surgery is not None:
            self.surgery.detach()
        if successor.slots == self.slots:
            successor._copies = self._copies
        self._copies = []

    def lagging_copies(self) -> list[SeedModules]:
        """Copies of the host that do not grow with it and have other seeds."""
        followed = [copy() for copy, _ in self._copies]
        living = [copy() for copy in self.seeds.copies]
        return [
            copy
            for copy in living
            if copy is not None and all(copy is not other for other in followed)
            if grown_part(copy.host) is copy and [*copy] != [*self.seeds]
        ]

    def _join(
        self,
        surgery: OptimizerSurgery,
        named: dict[str, nn.Parameter],
        known: set[nn.Parameter],
    ) -> None:
        """Add new parameters to the groups of their neighbouring layers."""
        new = {name: p for name, p in named.items() if p not in known}
        for name, parameter in new.items():
            place = self.place(slot_number(name.removeprefix(f"{NAME}.")))
            near = [*place.outlet.parameters(), *place.inlet.parameters()]
            # Vectors, such as biases, join vectors of that layer or else of the host,
            # since these often have no weight decay.
            vector = parameter.ndim < 2
            own = host_parameters(self.host).values() if vector else ()
            near += [p for p in own if p.ndim < 2]
            near.sort(key=lambda p: (p.ndim < 2) is not vector)
            surgery.join({name: parameter}, near)
        self.ranks.from_first(new.values())

    # Slots, parts and costs.

    def stage(self, slot: str) -> Stage:
        """Stage of a slot."""
        return Stage(int(self.states.stage[0, self.index(slot)]))

    def seed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of all seeds by their names in the host."""
        return {f"{NAME}.{name}": p for name, p in self.seeds.named_parameters()}

    def training_seeds(self) -> dict[int, nn.Module]:
        """Seeds in TRAINING by slot number."""
        return {
            slot: branch.seed
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
            if branch.shadow
        }

    def parts(self) -> Parts:
        """Modules with tensors of their own: of seeds in TRAINING, and all others.

        Every batch needs them, so they are cached until the topology changes.
        """
        if self._parts_at != self.flow.changes:
            training = self.training_seeds().values()
            seeds = dict.fromkeys(m for seed in training for m in seed.modules())
            others = [m for m in self.modules() if m not in seeds]
            self._parts = _holders(seeds), _holders(others)
            self._parts_at = self.flow.changes
        return self._parts

    def training_parameters(self) -> list[nn.Parameter]:
        """Parameters of seeds in TRAINING."""
        held = (p for m in self.parts()[0] for p in m._parameters.values())
        return [*dict.fromkeys(p for p in held if p is not None and p.requires_grad)]

    def count(self, *, active: bool = False, exported: bool = False) -> Cost:
        """Parameters and multiply-adds per row of the host with its seeds.

        With `active`, only seeds that change the output count; with `exported`, linear
        ones that an export adds to the weights of a layer do not count either.
        """
        counted = {
            slot
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
            if not (active or exported) or (branch.alpha > 0 and not branch.shadow)
        }
        total = self.base
        linear = {slot for slot in counted if exported and self._is_linear(slot)}
        new_biases = {
            self.place(slot).outlet
            for slot in linear
            if self.seeds.blueprint_of(slot).form is Form.SCALE_SHIFT
            and self.place(slot).outlet._parameters.get("bias") is None
        }
        for layer in new_biases:
            total += Cost(units_of(layer), 0)
        counted -= linear
        return sum((self.cost_of(slot, counted) for slot in counted), total)

    def _is_linear(self, slot: int) -> bool:
        """Whether a seed folds into existing weights."""
        kind = self.seeds.blueprint_of(slot)
        return (
            kind.form in (Form.LOW_RANK, Form.SCALE_SHIFT)
            and self.seeds.hooks_of(slot).branches[slot].style == ADD
            and not why_no_merge(self.place(slot), kind)
        )

    def cost_of(self, slot: int, others: Collection[int] | None = None) -> Cost:
        """Cost of a planted seed and its blocks with the slots `others` (None: all)."""
        seed, at = self.seeds[f"slot_{slot}"], self.place(slot).geometry
        if not isinstance(seed, FormSeed):
            return Cost(_size(seed), cost(self.seeds.blueprint_of(slot), at).macs)
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
        """Parameters of all seeds, folded or not."""
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
            norms = Cost(_size(seed_interlayer(place, blueprint)), 0)
            own = cost(blueprint, place.geometry) + norms
            self._prices[key] = sum(map(_block_cost, blocks), own)
        return self._prices[key]

    def price(self, slot: int, blueprint: Blueprint) -> Cost | None:
        """Cost of a blueprint in a slot; None if it cannot be planted there."""
        place = self.place(slot)
        if self.merge_only and why_no_merge(place, self.seeds.sized(slot, blueprint)):
            return None
        try:
            fits = not misfit(blueprint, place.geometry)
            return self.cost(slot, blueprint) if fits else None
        except InvalidInputError:  # a user's blueprint that fails at this place
            return None

    def example_outputs(self) -> list[Tensor]:
        """Output on the example in eval mode; the model does not change."""
        return eval_outputs(self, self.example)

    def finish(self) -> None:
        """Fold active seeds at their alphas and remove those in TRAINING.

        The host is a plain network then, apart from seeds that do not fold.
        """
        stages = self.states.stage
        for one in self.seeds.living_seeds():
            if one.branch.shadow or one.branch.alpha == 0.0:
                self.remove(one.slot, "growth is finished")
        living = [one.slot for one in self.seeds.living_seeds()]
        self.why_branches = self.fold(living, rewrap=True)
        folded = [slot for slot in living if slot not in self.why_branches]
        for slot in folded:
            self._record_change(slot, stages, self.states.stage, FOLDED)

    def detach(self) -> None:
        """Finish growth and leave the host; seeds that do not fold stay branches."""
        self.finish()
        self.flow.owner_ref = None
        if not len(self.seeds):
            self.seeds.detach()

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

    def _op(self, op: Op, slot: str, **choices: str) -> Receipt:
        return self.act(self.encode(op, slot, **choices))


def check_number(
    name: str, value: object, least: int, *, most: float = inf, whole: bool = True
) -> None:
    """Raise if an argument is not a number of at least `least`."""
    kind = Integral if whole else int | float
    is_kind = isinstance(value, kind) and not isinstance(value, bool)
    if not is_kind or not least <= value <= most:  # type: ignore[operator]
        what = "whole number" if whole else "number"
        raise InvalidInputError(
            f"{name} must be a {what} of at least {least}, got {value!r}."
        )


def encode_action(op: Op, **choices: int | str) -> Int64[Tensor, "1 head"]:
    """Encode an action from names or indices; other heads are 0."""
    row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
    row[0, HEAD["op"]] = op
    for head, choice in choices.items():
        names = [*HEADS[HEAD[head]].choices]
        if isinstance(choice, str) and choice not in names:
            raise unknown(f"{head} has no choice", choice, names)
        index = names.index(choice) if isinstance(choice, str) else choice
        row[0, HEAD[head]] = index
    return row


def action_text(
    actions: Int64[Tensor, "1 head"], slots: Sequence[str], spec: ActionSpec
) -> str:
    """An action in words: "plant widen_16 in fc1->fc2#0 (ADD, STANDARD, FULL)"."""
    op = Op(int(actions[0, HEAD["op"]]))
    if op is Op.WAIT:
        return "wait"
    slot = slots[int(actions[0, HEAD["slot"]])]
    options = [
        [*head.choices][int(actions[0, index])]
        for index, head in enumerate(HEADS)
        if head.choices and head.name != "op" and op in head.used_by
    ]
    how = f" ({', '.join(options)})" if options else ""
    if op is Op.GERMINATE:
        what = spec.blueprints[int(actions[0, HEAD["blueprint"]])].name
        return f"plant {what} in {slot}{how}"
    return f"{VERBS[op]} {slot}{how}"


def refuse_illegal(actions: Int64[Tensor, "env head"], masks: ActionMasks) -> None:
    """Raise if the masks forbid an action: a controller may be the user's code."""
    if actions.shape != (1, NUM_HEADS):
        raise IllegalActionError(
            f"a decision must be int64 [1, {NUM_HEADS}], got {[*actions.shape]}."
        )
    op, slot, kind = actions[0, : HEAD["blueprint"] + 1].tolist()
    legal = 0 <= op < len(Op) and bool(masks.op[0, op])
    if legal and op != Op.WAIT:
        legal = 0 <= slot < masks.slot.shape[2] and bool(masks.slot[0, op, slot])
    if legal and op == Op.GERMINATE:
        kinds = masks.blueprint.shape[2]
        legal = 0 <= kind < kinds and bool(masks.blueprint[0, slot, kind])
    if not legal:
        raise IllegalActionError(
            f"the controller chose what its masks forbid: op {op}, slot {slot}, "
            f"blueprint {kind}."
        )


def without_slots(masks: ActionMasks, slots: Collection[int]) -> ActionMasks:
    """Masks that forbid every op in some slots."""
    if not slots:
        return masks
    slot = masks.slot.clone()
    slot[:, :, [*slots]] = False
    op = masks.op & slot.any(dim=2)
    op[:, Op.WAIT] = True
    return replace(masks, op=op, slot=slot)


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
    """Modules with parameters or buffers of their own."""
    return [module for module in modules if module._parameters or module._buffers]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _block_cost(block: Layer) -> Cost:
    return Cost(prod(block.weight_shape), block.macs)


def _jump(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest absolute change; infinite if none is a number."""
    jumps = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    return max((jump for jump in jumps if jump == jump), default=inf)
