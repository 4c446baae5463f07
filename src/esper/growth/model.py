"""A host with slots: plant, advance, set alpha, prune and keep seeds.

    growing = GrowingModel(host, ["fc1->fc2"], example)
    growing.plant("fc1->fc2#0", "widen_16")

The host keeps its names, weights and calls; seeds become a submodule of it
(`growth.seed_modules`). Every op changes the model, its optimiser if it has one, and
copies that follow it. It returns a receipt with the change of the output on the
example. A change is applied completely or not at all, even if something raises; Ctrl-C
is delayed. Only `tick` advances time: then seeds train, blend and hold at their tempo.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any, Final
from weakref import ref

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.checks import require_int
from esper.contracts.errors import (
    EsperWarning,
    IllegalActionError,
    InvalidInputError,
    InvalidStateError,
)
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage, StageChanged
from esper.growth import lifecycle
from esper.growth.actions import (
    OPS,
    DepthBlueprint,
    NamedOps,
    Receipt,
    encode_action,
)
from esper.growth.analysis.config_fields import (
    Axis,
    fields_of_axes,
    follow_sizes,
    restore_fields,
    shapes_of,
)
from esper.growth.analysis.host_layers import is_layer, restore_sizes, units_of
from esper.growth.analysis.slots import (
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
from esper.growth.depth import deepen, split_slots
from esper.growth.distributed import DistributedContext
from esper.growth.hooks import ADD, Change
from esper.growth.lifecycle import SeedStates
from esper.growth.optimiser import OptimizerSurgery
from esper.growth.saving.export import why_units_do_not_fold
from esper.growth.saving.folding import (
    ActiveSeed,
    FoldError,
    Reading,
    difference,
    fold_possible,
    folded,
    why_no_merge,
    why_not,
)
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
PASSED = {
    Stage.BLENDING: "trained for its tempo",
    Stage.HOLDING: "alpha reached its target",
    Stage.DORMANT: "alpha reached 0",
}
"""Reason for entering a stage without an op."""
Parts = tuple[Sequence[nn.Module], Sequence[nn.Module]]


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
        tie_widths: Whether layers that one field of the host's config sizes grow
            together.
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
        tie_widths: bool = True,
        take_over: bool = False,
    ) -> None:
        super().__init__()
        require_int("seeds_per_slot", seeds_per_slot)
        require_int("tick", tick)
        require_int("min_age", min_age, least=0)
        require_int("rng_seed", rng_seed, least=0)
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

        def unfit(place: InsertionPoint) -> str:
            whys = [misfit(kind, place.geometry) for kind in chosen]
            return whys[0] if all(whys) else reject(place)

        with all_or_nothing(self.undo_steps):
            self.fields = fields_of_axes(host) if tie_widths else {}
            """Config fields that size axes of the host's parameters."""
            slots, self.lists = split_slots(host, slots)
            """Lists of blocks among the slots."""
            names: tuple[str, ...] = ()
            if slots or not self.lists:
                names = choose_slots(host, slots, example, unfit, self.fields)
            self.skipped: Mapping[str, str] = getattr(names, "skipped", {})
            """Layers that "auto" found no pair for, and why."""
            analysis = analyse_host(host, names, example)
            places = analysis.places
            for place in places:
                if why := reject(place):
                    raise InvalidInputError(f"slot {place.site.name!r}: {why}.")
            # All places come before the second slot of any place, so that filling
            # the slots in order spreads the seeds.
            self.slots = tuple(
                f"{place.site.name}#{index}"
                for index in range(seeds_per_slot)
                for place in places
            )
            _warn_of_partly_sized(places, self.fields)
            self.tied = tied_places(places, self.fields)
            """Numbers of the places that grow together, for every place."""
            leads = [group[0] == n for n, group in enumerate(self.tied)]
            self.decided = torch.tensor(leads * seeds_per_slot).nonzero().flatten()
            """Slots that a controller decides about: the first of every tied group."""
            slot_config = SlotConfig(len(self.decided) or 1, min_age)
            narrowed = {"op": OPS, **({"style": ("ADD",)} if merge_only else {})}
            self.spec = ActionSpec(slot_config, chosen, narrowed)
            grown = SeedModules(host, places, self.slots, chosen, rng_seed)
            if before is not None:
                grown.adopt(before)
            self.undo_steps.append(grown.detach)
            grown.attach()
        self.host = host
        self.__dict__["seeds"] = grown  # not registered: the host's submodule
        grown.flow.owner_ref = ref(self)
        self.merge_only, self.tie_widths = merge_only, tie_widths
        self.seeds_per_slot = seeds_per_slot
        self.depths: list[tuple[str, list[int]]] = []
        """Lists that got blocks, and which of its blocks each had at its positions."""
        self.example: Example = example
        self.batches_per_tick = tick
        self.base = Cost(analysis.parameters, analysis.macs)
        """Current cost of the host without its seeds."""
        former = self.former
        self.first_cost: Cost = self.base if former is None else former.first_cost
        """Cost of the host before anything grew."""
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
        self._prices: dict[tuple[object, ...], Cost] = {}
        self._parts: Parts = ([], [])
        self._parts_at = -1  # value of `flow.changes` for which `_parts` holds

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
        numbers: dict[str, int | str] = {"slot": self.seeds.index(slot), **choices}
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
        """Apply one action and measure its effect; raises if it is not possible.

        It applies to all slots that are tied to the action's. Each gets a receipt, with
        the effect of all together; the first is returned.
        """
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        blueprint = self.spec.blueprints[int(actions[0, HEAD["blueprint"]])]
        states = after = self.seeds.states
        members = self.tied_slots(index)
        for slot in members:
            if self.merge_only and op in (Op.GERMINATE, Op.SET_ALPHA):
                self._refuse_unmerging(op, slot, actions)
            mine = actions.clone()
            mine[0, HEAD["slot"]] = slot
            min_age = self.spec.slots.min_age
            after, done = lifecycle.act(after, mine, min_age, self.batches_per_tick)
            if not bool(done):
                raise IllegalActionError(self._why_not(op, slot))
            self.why_branches.pop(slot, None)
        if op is Op.GERMINATE and (why := self._why_uneven(index, blueprint)):
            raise InvalidInputError(f"{why}.")
        if op is Op.FOSSILIZE:
            return self.keep_seeds(members)[0]
        before, without = self.example_outputs(), list[Tensor]()
        if op is Op.PRUNE:  # it fades later; the receipt holds the total change
            with self.seeds.flow.using(left_out=members):
                without = self.example_outputs()

        def change() -> None:
            for slot in members if op is Op.GERMINATE else ():
                self.seeds.insert(slot, self.seeds.new_seed(slot, blueprint))
            self.seeds.states = after
            self._pass(0, decision=False)  # finish changes of zero length
            without[:] = without or self.example_outputs()

        self.follow(change)
        self._record(states.stage, self.seeds.states.stage, op.name)
        known = max(states, self.seeds.states, key=lambda s: int(s.blueprint[0, index]))
        jump = _jump(before, without)
        first, *_ = [self._receipt(op, slot, known, jump) for slot in members]
        return first

    def _receipt(self, op: Op, slot: int, states: SeedStates, jump: float) -> Receipt:
        kind = int(states.blueprint[0, slot])
        name = self.spec.blueprints[kind].name if kind >= 0 else ""
        self.receipts.append(Receipt(op.name, self.slots[slot], name, jump))
        return self.receipts[-1]

    def keep_seeds(self, slots: Sequence[int]) -> list[Receipt]:
        """Keep holding seeds: those that fold are folded, the others stay branches."""
        states, before = self.seeds.states, self.example_outputs()
        kept = states.stage.clone()
        kept[0, [*slots]] = Stage.FOSSILIZED
        self.why_branches = self.fold({*slots, *self.why_branches})
        self._record(states.stage, kept, Op.FOSSILIZE.name)
        stays = [slot for slot in slots if slot in self.why_branches]
        after = self.seeds.states
        now, age = after.stage.clone(), after.age.clone()
        now[0, stays], age[0, stays] = Stage.FOSSILIZED, 0
        self.seeds.states = replace(after, stage=now, age=age)
        self._record(kept, now, FOLDED)
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

        def bound(stays: ActiveSeed, folds: ActiveSeed) -> str:
            tied = folds.slot in self.tied_slots(stays.slot)
            return f"{stays.name} stays" if tied else ""

        whys = fold_possible(self.seeds.living_seeds, waits, bound, self._fold)
        return {slot: whys[slot] for slot in slots if slot in whys}

    def _is_frozen(self, one: ActiveSeed) -> bool:
        """Whether a layer that would take up a seed is not trained."""
        layers = (*one.place.first_layers(self.host).values(), one.place.outlet)
        held = [p for layer in layers for p in layer.parameters(recurse=False)]
        return not all(p.requires_grad for p in held)

    def _fold(self, folds: Sequence[ActiveSeed]) -> str:
        """Fold seeds with gradients and moments; returns why not, empty if it did."""
        slots, surgery = [one.slot for one in folds], self.surgery
        stays = [one for one in self.seeds.living_seeds() if one.slot not in slots]
        readings = {GRADIENTS: Reading(lambda p: p.grad, power=-1)}
        if surgery is not None:
            readings |= surgery.moments()
        read = partial(folded, self.host, folds, living=stays)
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
            self.follow_config()
            if why := difference(expected, self.example_outputs()):
                raise FoldError(why)

        undo = restore_sizes(self.host.modules()), restore_fields(self.host)
        try:
            self.follow(change, undo, slots)
        except FoldError as error:
            return str(error)
        except InvalidInputError as error:  # the host's code needs the old width
            return f"with its units, {error}"
        return ""

    def follow_config(self) -> None:
        """Let the host's config describe its sizes, if it can."""
        if self.fields:
            follow_sizes(self.host, shapes_of(host_parameters(self.host)))

    def measure_host(self, living: Sequence[ActiveSeed] = ()) -> None:
        """Update the geometry of all places and the cost after layers were resized.

        `living` are the seeds that must fit the new geometry.
        """
        sites = [place.site for place in self.seeds.places]
        ends = [end for site in sites for end in (site.inlet, site.outlet)]
        muted = self.seeds.flow.using(muted=True)
        with muted, isolated(self.host, training=False), torch.no_grad():
            trace = Trace(self.host, ends, self.example)
            macs = count_macs(lambda: call(self.host, self.example))
        found = {site.name: insertion_point(site, trace).geometry for site in sites}
        for one in living:
            old, new = one.place.geometry, found[one.place.site.name]
            shapes = [(at.inlet_shape, at.outlet_shape) for at in (old, new)]
            widens = isinstance(one.seed, FormSeed) and one.seed.widens
            if (shapes[0] != shapes[1] and not widens) or old.spans is not new.spans:
                raise FoldError(f"branch {one.name} reads or adds to its units")
        self.seeds.resize(found)
        parameters = sum(p.numel() for p in host_parameters(self.host).values())
        self.base = Cost(parameters, macs // max(1, batch_size(self.example)))

    def tick(self, batches: int = 1, *, decision: bool = True) -> None:
        """Advance stages and alphas by some batches and, with `decision`, the ages."""
        stages = self.seeds.states.stage
        self.follow(lambda: self._pass(batches, decision=decision))
        self._record(stages, self.seeds.states.stage)

    def _pass(self, batches: int, *, decision: bool) -> None:
        states, passed = self.seeds.states, torch.tensor([batches])
        self.seeds.apply_states(lifecycle.after(states, passed, decision=decision))

    def remove(self, slot: int, reason: str = "") -> None:
        """Remove a seed at once in any stage, for example after an error."""
        states = self.seeds.states
        after = lifecycle.freed(states, self.tied_slots(slot))
        self.follow(lambda: self.seeds.apply_states(after))
        self._record(states.stage, after.stage, reason)

    def _record(self, before: Tensor, after: Tensor, reason: str = "") -> None:
        """Record an event for every slot whose stage changed."""
        for slot in (before[0] != after[0]).nonzero().flatten().tolist():
            was, now = (Stage(int(stages[0, slot])) for stages in (before, after))
            self.events.append(
                StageChanged(
                    env=0,
                    slot=slot,
                    step=self.step,
                    before=was,
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
        self,
        optimizer: Optimizer | Sequence[Optimizer],
        ranks: DistributedContext | None = None,
    ) -> OptimizerSurgery:
        """Let parameters of seeds join and leave optimisers from now on."""
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
            base: Change = partial(setattr, self, "base", self.base)
            undo = [base, self.seeds.restore_point(), *undo_steps]
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
                for copy in self.seeds.living_copies():
                    undo += [copy.restore_point(), restore_sizes(copy.host.modules())]
                    copy.mirror(self.seeds, folds)

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
        found[0].twins = dict(self.seeds.items())
        if ref(found[0]) not in self.seeds.copies:  # a copy of a copy
            self.seeds.copies.append(ref(found[0]))

    def give_up(self, successor: "GrowingModel") -> None:
        """Hand the host and its copies over to another model."""
        self.is_replaced = True
        if self.surgery is not None:
            self.surgery.detach()
        for copy in self.seeds.living_copies() if successor.slots != self.slots else ():
            copy.twins = None

    def _join(
        self,
        surgery: OptimizerSurgery,
        named: dict[str, nn.Parameter],
        known: set[nn.Parameter],
    ) -> None:
        """Add new parameters to the groups of their neighbouring layers."""
        new = {name: p for name, p in named.items() if p not in known}
        for name, parameter in new.items():
            place = self.seeds.place(slot_number(name.removeprefix(f"{NAME}.")))
            near = [*place.outlet.parameters(), *place.inlet.parameters()]
            # Vectors, such as biases, join vectors of that layer or else of the host,
            # since these often have no weight decay.
            vector = parameter.ndim < 2
            own = host_parameters(self.host).values() if vector else ()
            near += [p for p in own if p.ndim < 2]
            axes = parameter.ndim
            near.sort(key=lambda p: ((p.ndim < 2) is not vector, p.ndim != axes))
            surgery.join({name: parameter}, near)
        self.ranks.from_first(new.values())

    # Slots, parts and costs.

    def tied_slots(self, slot: int) -> list[int]:
        """Slots that grow together with a slot, including itself."""
        place = slot % len(self.tied)
        return [slot - place + other for other in self.tied[place]]

    def _why_uneven(self, slot: int, blueprint: Blueprint) -> str:
        """Why a blueprint would give tied layers sizes that no config has."""
        members = self.tied_slots(slot)
        if blueprint.share or len(members) == 1 or blueprint.form is not Form.WIDEN:
            return ""
        units = {units_of(self.seeds.place(member).inlet) for member in members}
        if len(units) == 1:
            return ""
        found = ", ".join(map(str, sorted(units)))
        return (
            f"{blueprint.name!r} adds the same units to layers of {found} units that "
            "one config field sizes; use a share such as 'widen_x2'"
        )

    def stage(self, slot: str) -> Stage:
        """Stage of a slot."""
        return Stage(int(self.seeds.states.stage[0, self.seeds.index(slot)]))

    def seed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of all seeds by their names in the host."""
        return {f"{NAME}.{name}": p for name, p in self.seeds.named_parameters()}

    def training_seeds(self) -> dict[int, nn.Module]:
        """Seeds in TRAINING by slot number."""
        return {
            slot: branch.seed
            for hooks in self.seeds.hooks
            for slot, branch in hooks.branches.items()
            if branch.shadow
        }

    def parts(self) -> Parts:
        """Modules with tensors of their own: of seeds in TRAINING, and all others.

        Every batch needs them, so they are cached until the topology changes.
        """
        if self._parts_at != self.seeds.flow.changes:
            training = self.training_seeds().values()
            seeds = dict.fromkeys(m for seed in training for m in seed.modules())
            others = [m for m in self.modules() if m not in seeds]
            self._parts = _holders(seeds), _holders(others)
            self._parts_at = self.seeds.flow.changes
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
            one.slot: one
            for one in self.seeds.living_seeds()
            if not (active or exported) or (one.branch.alpha and not one.branch.shadow)
        }
        total, new_biases = self.base, set[nn.Module]()
        for slot, one in [*counted.items()] if exported else ():
            form, outlet = self.seeds.blueprint_of(slot).form, one.place.outlet
            if form in (Form.LOW_RANK, Form.SCALE_SHIFT) and not why_not(one):
                del counted[slot]
                if form is Form.SCALE_SHIFT and outlet._parameters.get("bias") is None:
                    new_biases.add(outlet)
        total += Cost(sum(map(units_of, new_biases)), 0)
        total += self._squeeze_cost(counted.values()) if exported else Cost(0, 0)
        return sum((self._cost_of(one, counted) for one in counted.values()), total)

    def _cost_of(self, one: ActiveSeed, others: Collection[int]) -> Cost:
        """Cost of a seed and its blocks between its units and those of some slots."""
        seed, at = one.seed, one.place.geometry
        if not isinstance(seed, FormSeed):
            return Cost(_size(seed), cost(self.seeds.blueprint_of(one.slot), at).macs)
        blocks = self.seeds.blocks(one.slot, seed.blueprint).items()
        own = [key for key in seed.cross if int(key.split("_")[1]) in others]
        shared = [_block_cost(block) for key, block in blocks if key in own]
        macs = one.place.unit_macs * seed.blueprint.size if seed.widens else 0
        steps = Cost(_size(seed.interlayer), macs)
        return sum(shared, cost(seed.blueprint, at) + steps)

    def _squeeze_cost(self, seeds: Iterable[ActiveSeed]) -> Cost:
        """Weights between units of squeeze-excite layers that only an export has."""
        parts: dict[nn.Module, dict[nn.Module, None]] = {}
        for layer, _, own in (step for one in seeds for step in one.steps(self.host)):
            if is_layer(own):
                parts.setdefault(layer, {layer: None})[own] = None
        more = 0
        for group in parts.values():
            sizes = [module.get_parameter("weight").numel() for module in group]
            outputs = [units_of(module) for module in group]
            inputs = [n // units for n, units in zip(sizes, outputs, strict=True)]
            more += sum(outputs) * sum(inputs) - sum(sizes)
        return Cost(more, more)

    @property
    def parameters_added(self) -> int:
        """Parameters of all seeds, folded or not."""
        return self.count().parameters - self.first_cost.parameters

    @property
    def macs(self) -> int:
        """Multiply-adds per row of the host with every active seed."""
        return self.count(active=True).macs

    def cost(self, slot: int, blueprint: Blueprint) -> Cost:
        """Parameters and multiply-adds per row that a blueprint adds in a slot now."""
        place, blueprint = self.seeds.place(slot), self.seeds.sized(slot, blueprint)
        blocks = tuple(self.seeds.blocks(slot, blueprint).values())
        key = (place.site, place.geometry, blueprint, blocks)
        if key not in self._prices:
            between = place.unit_macs * blueprint.size * (blueprint.form is Form.WIDEN)
            steps = Cost(_size(seed_interlayer(place, blueprint)), between)
            own = cost(blueprint, place.geometry) + steps
            self._prices[key] = sum(map(_block_cost, blocks), own)
        return self._prices[key]

    def price(self, slot: int, blueprint: Blueprint) -> Cost | None:
        """Cost of a blueprint in a slot and its tied slots; None if it does not fit."""
        if self._why_uneven(slot, blueprint):
            return None
        total = Cost(0, 0)
        for member in self.tied_slots(slot):
            place = self.seeds.place(member)
            sized = self.seeds.sized(member, blueprint)
            if self.merge_only and why_no_merge(place, sized):
                return None
            try:
                if misfit(blueprint, place.geometry):
                    return None
                total += self.cost(member, blueprint)
            except InvalidInputError:  # a user's blueprint that fails at this place
                return None
        return total

    def example_outputs(self) -> list[Tensor]:
        """Output on the example in eval mode; the model does not change."""
        return eval_outputs(self, self.example)

    def finish(self, *, rewrap: bool = False) -> None:
        """Fold active seeds at their alphas and remove those in TRAINING.

        The host is a plain network then, apart from seeds that do not fold. See `fold`
        for `rewrap`.
        """
        for one in self.seeds.living_seeds():
            if one.branch.shadow or one.branch.alpha == 0.0:
                self.remove(one.slot, "growth is finished")
        stages = self.seeds.states.stage
        living = [one.slot for one in self.seeds.living_seeds()]
        self.why_branches = self.fold(living, rewrap=rewrap)
        self._record(stages, self.seeds.states.stage, FOLDED)

    def detach(self) -> None:
        """Finish growth and leave the host; seeds that do not fold stay branches."""
        sizes, wrapper = self.seeds.shapes(), self.ranks.wrapper
        self.finish(rewrap=True)
        if wrapper is not None and self.seeds.shapes() != sizes:
            wrapper.register_forward_pre_hook(_refuse_training)
        self.seeds.flow.owner_ref = None
        if not len(self.seeds):
            self.seeds.detach()

    def _why_not(self, op: Op, slot: int) -> str:
        states = self.seeds.states
        stage, age = Stage(int(states.stage[0, slot])).name, int(states.age[0, slot])
        moving = "" if bool(states.settled[0, slot]) else ", alpha still moving"
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
            why = why_no_merge(self.seeds.place(slot), self.seeds.sized(slot, kind))
        if why:
            raise InvalidInputError(
                f"the seed in slot {self.slots[slot]!r} would not merge, and "
                f"merge_only is set: {why}."
            )

    def _op(self, op: Op, slot: str, **choices: str) -> Receipt:
        return self.act(self.encode(op, slot, **choices))

    def _deepen(self, name: str, by: int, how: DepthBlueprint) -> Receipt:
        name, jump = deepen(self, name, by, how)
        self.receipts.append(Receipt("DEEPEN", name, f"deepen_{how}", jump))
        return self.receipts[-1]


def tied_places(
    places: Sequence[InsertionPoint], fields: Mapping[Axis, str]
) -> tuple[tuple[int, ...], ...]:
    """For every place, the numbers of the places that grow together with it.

    These are the spans whose units one field of the host's config sets.
    """
    keys: list[object] = [
        (place.geometry.spans and fields.get(place.units_axis)) or number
        for number, place in enumerate(places)
    ]
    return tuple(
        tuple(n for n, other in enumerate(keys) if other == key) for key in keys
    )


def _warn_of_partly_sized(
    places: Sequence[InsertionPoint], fields: Mapping[Axis, str]
) -> None:
    """Warn if a field of the config sizes layers that have no slots, too."""
    spans = [place for place in places if place.geometry.spans]
    slotted = {
        name
        for place in spans
        for name in (
            *(*place.widened, place.site.outlet),
            *(step.name for step in place.recipe),
        )
    }
    grows = {fields[p.units_axis] for p in spans if p.units_axis in fields}
    for (name, _), field in fields.items():
        if field in grows and (layer := name.rpartition(".")[0]) not in slotted:
            warnings.warn(
                f"{field} of the config also sizes {layer!r}, which has no slot, so "
                "the config cannot describe what grows: save with esper.save. Use "
                "slots='auto' to grow such layers together.",
                EsperWarning,
                stacklevel=4,
            )
            return


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


def _refuse_training(wrapper: nn.Module, *_: object) -> None:
    if wrapper.training and torch.is_grad_enabled():
        raise InvalidStateError(
            "detach() has changed sizes of layers, and this DistributedDataParallel "
            "would not average their gradients. Wrap the host again."
        )


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
