"""The seeds of a host as its submodule `esper_seeds`.

So `parameters`, `state_dict`, `to`, `deepcopy`, pickling and averaging include seeds. A
`state_dict` also holds the topology, as JSON in a byte tensor. Loading one validates
all of it, rebuilds the topology and then copies the weights.
`growth.saving.serialization` does the same for a plain host.
"""

import signal
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from math import inf, isfinite
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.errors import InvalidInputError, unknown
from esper.contracts.messages import described
from esper.contracts.stages import Stage
from esper.files import FORMAT
from esper.growth import lifecycle
from esper.growth.analysis.host_layers import fit_sizes, units_of
from esper.growth.analysis.interlayer import new_interlayer
from esper.growth.analysis.slots import InsertionPoint
from esper.growth.blueprints.forms import FORMS, FormSeed, Layer, cross_layer
from esper.growth.blueprints.geometry import Geometry
from esper.growth.blueprints.registry import Gated, build, misfit
from esper.growth.hooks import Branch, Change, Flow, SlotHooks
from esper.growth.lifecycle import SeedStates
from esper.growth.saving.folding import ActiveSeed, fold
from esper.growth.saving.saved_topology import (
    HINT,
    NAME,
    SavedPlace,
    SavedSeed,
    SavedTopology,
    check_tensors,
    host_tensors,
    read_topology,
)


class SeedModules(nn.ModuleDict):
    """The seeds of a host by slot, oldest first, with their hooks and stages."""

    host: nn.Module

    def __init__(
        self,
        host: nn.Module,
        places: Sequence[InsertionPoint],
        slots: Sequence[str],
        blueprints: Sequence[Blueprint],
        rng_seed: int = 0,
    ) -> None:
        super().__init__()
        self.__dict__["host"] = host  # not registered: this is its submodule
        self.places, self.slots = tuple(places), tuple(slots)
        self.blueprints = tuple(blueprints)
        self.flow = Flow()
        self.hooks = [SlotHooks(place, self.flow) for place in places]
        by_inlet: dict[nn.Module, list[SlotHooks]] = {}
        spans = [hooks for hooks in self.hooks if hooks.place.geometry.spans]
        for hooks in spans:
            by_inlet.setdefault(hooks.place.inlet, []).append(hooks)
        for hooks in spans:
            hooks.below = by_inlet.get(hooks.place.outlet, [])
        self._states = SeedStates.empty(1, len(self.slots))
        self._pending_batches = 0
        """Batches that `_states` does not include yet."""
        self._batches_to_change = inf
        """Batches until a stage or an alpha changes."""
        self.generator = torch.Generator().manual_seed(rng_seed)
        self.traced = True
        """Whether the places come from a call of the host, not from a file."""
        self.training = host.training
        self.sizes = self.shapes()
        """Shapes of the host's tensors before any seed was folded."""
        self._handles: list[Any] = []
        self.copies: list[ref[SeedModules]] = []
        """Deep copies of this, in copies of the host."""
        self.twins: dict[str, nn.Module] | None = None
        """Of a copy that grows with the host: the host's seeds that it has, too."""

    @property
    def states(self) -> SeedStates:
        """Stages and alphas of all slots."""
        if self._pending_batches:
            passed = torch.tensor([self._pending_batches])
            self.states = lifecycle.after(self._states, passed, decision=False)
        return self._states

    @states.setter
    def states(self, states: SeedStates) -> None:
        self._states, self._pending_batches = states, 0
        moving = states.moved < states.length
        training = states.stage == Stage.TRAINING
        left = torch.where(training, states.length - states.moved, 1)[moving]
        self._batches_to_change = int(left.min()) if len(left) else inf

    def count_batch(self) -> bool:
        """Count a batch if no stage or alpha changes in it; returns whether it did."""
        if self._batches_to_change == inf:
            return True
        unchanged = self._pending_batches + 1 < self._batches_to_change
        self._pending_batches += unchanged
        return unchanged

    def attach(self) -> None:
        """Add this and the hooks to the host."""
        for hooks in self.hooks:
            hooks.attach(self.host)
        self.host.add_module(NAME, self)
        self._handles = [
            self.host.register_load_state_dict_pre_hook(self._before_load),
            self.host.register_load_state_dict_post_hook(self._after_load),
        ]

    def detach(self) -> None:
        """Remove seeds and hooks from the host."""
        for hooks in self.hooks:
            hooks.detach()
        self.leave()

    def leave(self) -> None:
        """Remove this from the host's submodules; the hooks of places stay."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.host._modules.get(NAME) is self:
            del self.host._modules[NAME]

    def adopt(self, other: "SeedModules") -> None:
        """Take over the seeds of a rebuilt or copied host."""
        topology = other.topology()
        self.check_slots(topology)
        seeds = {other.slots[slot_number(n)]: seed for n, seed in other.items()}
        # Names of cross blocks hold the number of the other slot.
        number = {other.slots.index(n): self.slots.index(n) for n in seeds}
        for seed in other.widening_seeds().values():
            blocks = dict(seed.cross.items())
            seed.cross.clear()
            for key, block in blocks.items():
                end, old = key.split("_")
                seed.cross[f"{end}_{number[int(old)]}"] = block
        self.rebuild(topology, seeds)
        self.copies, self.sizes = other.copies, other.sizes

    def __getstate__(self) -> dict[str, Any]:
        """State for copies and pickles: copies have no copies."""
        return {**self.__dict__, "copies": [], "twins": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "SeedModules":
        """Copy this and record the copy in `copies`."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update(deepcopy(self.__getstate__(), memo))
        self.copies = [copy for copy in self.copies if copy() is not None]
        self.copies.append(ref(made))
        return made

    def living_copies(self, *, following: bool = True) -> "list[SeedModules]":
        """Copies that grow with this, or those that do not and have other seeds."""
        living = (copy() for copy in self.copies)
        return [
            copy
            for copy in living
            if copy is not None and (copy.twins is not None) is following
            if following or grown_part(copy.host) is copy
            if following or (copy.slots, [*copy]) != (self.slots, [*self])
        ]

    def forward(self, h: Any) -> Any:  # noqa: ANN401
        """Return the input: some hosts call all their submodules in a chain."""
        return h

    # Slots and seeds.

    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the host's tensors."""
        held = host_tensors(self.host).items()
        return {name: t.shape for name, t in held if isinstance(t, Tensor)}

    def index(self, slot: str) -> int:
        """Number of a slot."""
        if slot not in self.slots:
            raise unknown("there is no slot", slot, self.slots)
        return self.slots.index(slot)

    def place(self, slot: int) -> InsertionPoint:
        """Place of a slot."""
        return self.places[slot % len(self.places)]

    def hooks_of(self, slot: int) -> SlotHooks:
        """The hooks of a slot's place."""
        return self.hooks[slot % len(self.hooks)]

    def widening_seeds(self) -> dict[int, FormSeed]:
        """Seeds with hidden units by slot number, oldest first."""
        return {
            slot_number(name): seed
            for name, seed in self.items()
            if isinstance(seed, FormSeed) and seed.widens
        }

    def width(self, slot: int) -> int:
        """Units between the two layers of a slot's place, including those of seeds."""
        place = self.place(slot)
        return units_of(place.inlet) + sum(
            seed.blueprint.size
            for other, seed in self.widening_seeds().items()
            if self.place(other) is place
        )

    def sized(self, slot: int, blueprint: Blueprint) -> Blueprint:
        """Blueprint with the size that it has in a slot now."""
        if not blueprint.share or not self.place(slot).geometry.spans:
            return blueprint
        return replace(blueprint, size=blueprint.units(self.width(slot)), share=0.0)

    def blocks(self, slot: int, blueprint: Blueprint) -> dict[str, Layer]:
        """Layers between the units of a new seed and those of neighbouring places."""
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

    def apply_states(self, states: SeedStates) -> None:
        """Set the alphas of the next batch and remove seeds of free slots."""
        alphas, training = lifecycle.schedule(states, 1)
        self.states = states
        for slot in range(len(self.slots)):
            hooks = self.hooks_of(slot)
            if int(states.stage[0, slot]) == Stage.DORMANT:
                self.remove_seed(slot)
            elif slot in hooks.branches:
                branch = hooks.branches[slot]
                branch.alpha = float(alphas[0, 0, slot])
                branch.style = int(states.style[0, slot])
                shadow = bool(training[0, 0, slot])
                self.flow.changes += branch.shadow is not shadow
                branch.shadow = shadow

    def new_seed(
        self, slot: int, blueprint: Blueprint, gated: bool | None = None
    ) -> nn.Module:
        """Build a seed for a slot; see `build` for `gated`."""
        place, blueprint = self.place(slot), self.sized(slot, blueprint)
        self._refuse_misfit(slot, blueprint)
        interlayer = seed_interlayer(place, blueprint, self.generator)
        seed = build(blueprint, place.geometry, self.generator, interlayer, gated)
        if isinstance(seed, FormSeed) and seed.widens:
            for name, layer in place.first_layers(self.host).items():
                own: Any = layer.weight
                _init_weight(seed.weights, name, None if place.in_mlp else own)
            self._add_blocks(slot, seed)
        near = (place.outlet, place.inlet, self.host)
        like = next(p for m in near for p in m.parameters() if p.is_floating_point())
        seed = seed.to(device=like.device, dtype=like.dtype)
        return seed.train(self.host.training)

    def outline(self, slot: int, blueprint: Blueprint, gated: bool) -> nn.Module:
        """Build a saved seed on the meta device, for its names and shapes."""
        self._refuse_misfit(slot, blueprint)
        place = self.place(slot)
        custom = blueprint.form is Form.CUSTOM
        # An interrupt between the two would leave the device on for everybody.
        where = torch.device("cpu" if custom and self.traced else "meta")
        with uninterrupted(), where:
            interlayer = seed_interlayer(place, blueprint)
            if custom:
                at = place.geometry
                return build(blueprint, at, self.generator, interlayer, gated)
            shapes = FORMS[blueprint.form].shapes(place.geometry, blueprint.size)
            params = {name: torch.empty(shape) for name, shape in shapes.items()}
            seed = FormSeed(blueprint, place.geometry, params, interlayer)
            for key, block in self.blocks(slot, blueprint).items():
                seed.cross[key] = nn.Parameter(torch.empty(block.weight_shape))
        return seed

    def _refuse_misfit(self, slot: int, blueprint: Blueprint) -> None:
        if reason := misfit(blueprint, self.place(slot).geometry):
            raise InvalidInputError(
                f"blueprint {blueprint.name!r} does not fit slot "
                f"{self.slots[slot]!r}: {reason}."
            )

    def insert(self, slot: int, seed: nn.Module) -> None:
        """Put a seed into a free slot; it is in TRAINING until `apply_states`."""
        hooks = self.hooks_of(slot)
        self[f"slot_{slot}"] = seed
        hooks.branches = {**hooks.branches, slot: Branch(seed)}

    def remove_seed(self, slot: int) -> None:
        """Remove the seed of a slot and its cross blocks, if there is one."""
        if f"slot_{slot}" in self:
            del self[f"slot_{slot}"]
            hooks = self.hooks_of(slot)
            hooks.branches = {s: b for s, b in hooks.branches.items() if s != slot}
            self.flow.failed.pop(slot, None)
            for seed in self.widening_seeds().values():
                for key in (f"from_{slot}", f"into_{slot}"):
                    if key in seed.cross:
                        del seed.cross[key]

    def _add_blocks(self, slot: int, seed: FormSeed) -> None:
        """Add cross blocks: zero into the units of older seeds, random from them.

        Random blocks have the deviation of the first layer, after that is scaled down
        for the larger fan-in. Blocks that read the new units are zero, so the output
        stays the same.
        """
        blocks = self.blocks(slot, seed.blueprint)
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

    def living_seeds(self) -> list[ActiveSeed]:
        """All seeds in order of application."""
        return [
            ActiveSeed(slot, self.slots[slot], hooks.place, branch)
            for hooks in self.hooks
            for slot, branch in hooks.branches.items()
        ]

    def fold(self, slots: Collection[int]) -> None:
        """Fold the values of some seeds into the host and free their slots."""
        living = self.living_seeds()
        folds = [one for one in living if one.slot in slots]
        fold(self.host, folds, [one for one in living if one.slot not in slots])
        self.apply_states(lifecycle.freed(self.states, slots))

    def resize(self, geometries: Mapping[str, Geometry]) -> None:
        """Set the geometry of places by their names."""
        self.places = tuple(
            replace(place, geometry=geometries.get(place.site.name, place.geometry))
            for place in self.places
        )
        for slot_hooks, place in zip(self.hooks, self.places, strict=True):
            slot_hooks.place = place
            for branch in slot_hooks.branches.values():
                if isinstance(branch.seed, FormSeed):
                    branch.seed.geometry = place.geometry

    # All or nothing.

    def restore_point(self) -> Change:
        """Return a function that restores seeds, blocks, stages and random stream."""
        seeds, states = dict(self.items()), self.states
        geometries = {place.site.name: place.geometry for place in self.places}
        crosses = {s: dict(s.cross.items()) for s in self.widening_seeds().values()}
        branches = [
            {slot: replace(branch) for slot, branch in hooks.branches.items()}
            for hooks in self.hooks
        ]
        failed, stream = dict(self.flow.failed), self.generator.get_state()
        twins = None if self.twins is None else dict(self.twins)

        def put_back() -> None:
            self.clear()
            self.update(seeds)
            for seed, blocks in crosses.items():
                seed.cross.clear()
                seed.cross.update(blocks)
            for hooks, kept in zip(self.hooks, branches, strict=True):
                hooks.branches = kept
            self.resize(geometries)
            self.states, self.flow.failed, self.twins = states, failed, twins
            self.generator.set_state(stream)

        return put_back

    def mirror(self, other: "SeedModules", folds: Collection[int] = ()) -> None:
        """Copy the topology of another, after folding the same slots."""
        assert self.twins is not None
        twins = self.twins
        if folds:
            self.fold(folds)
            for slot in folds:
                del twins[f"slot_{slot}"]
        if self.shapes() != other.shapes():  # after loading
            self.host.load_state_dict(other.host.state_dict())
            twins.update(other.items())
        for name, seed in [*twins.items()]:
            if other._modules.get(name) is not seed:
                del twins[name]
                self.remove_seed(slot_number(name))
        self.resize({place.site.name: place.geometry for place in other.places})
        own, theirs = (
            {**dict(host.named_modules()), **host_parameters(host)}
            for host in (self.host, other.host)
        )
        # A seed may call modules of its host.
        memo = {id(x): own[n] for n, x in theirs.items() if not n.startswith(NAME)}
        for name, seed in other.items():
            if name not in twins:
                twins[name] = seed
                self.insert(slot_number(name), deepcopy(seed, {**memo}))
        self.apply_states(other.states)

    # Saving.

    def get_extra_state(self) -> Tensor:
        """Topology as JSON bytes."""
        return self.topology().to_tensor()

    def topology(self) -> SavedTopology:
        """Description of places and seeds, without weights."""
        return SavedTopology(
            format=FORMAT,
            places=tuple(
                SavedPlace(
                    name=place.site.name,
                    geometry=place.geometry,
                    interlayer=place.recipe,
                    depth=place.depth,
                )
                for place in self.places
            ),
            slots=self.slots,
            seeds=self._saved_seeds(),
            generator=bytes(self.generator.get_state().tolist()).hex(),
        )

    def _saved_seeds(self) -> tuple[SavedSeed, ...]:
        states = asdict(self.states)
        used = ((slot_number(name), seed) for name, seed in self.items())
        return tuple(
            SavedSeed(
                slot=self.slots[slot],
                blueprint=self.blueprint_of(slot).name,
                size=seed.blueprint.size if isinstance(seed, FormSeed) else 0,
                gated=isinstance(seed, Gated),
                state={
                    name: float(values[0, slot])
                    for name, values in states.items()
                    if name != "blueprint"
                },
            )
            for slot, seed in used
        )

    def blueprint_of(self, slot: int) -> Blueprint:
        """Blueprint of a planted seed."""
        return self.blueprints[int(self.states.blueprint[0, slot])]

    def _save_to_state_dict(
        self,
        destination: Any,  # noqa: ANN401
        prefix: str,
        keep_vars: bool,
    ) -> None:
        if len(self):  # a host without seeds saves a plain state
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[f"{prefix}{HINT}"] = torch.zeros(0)

    def _load_from_state_dict(self, *args: Any) -> None:  # noqa: ANN401
        """Do nothing: `_before_load` has validated and built all seeds."""

    def _before_load(
        self,
        host: nn.Module,
        state: Mapping[str, Any],
        prefix: str,
        metadata: Mapping[str, Any] | None,
        *_: object,
    ) -> None:
        """Validate a state and load all of it or nothing; torch then repeats it."""
        topology = self.validated(state, prefix)
        if (metadata or {}).get("assign_to_params_buffers"):
            raise InvalidInputError(
                "a growing host loads in place only. Load it without assign=True."
            )

        owner = self.flow.owner
        shapes = {p: p.shape for p in host_parameters(self.host).values()}

        def change() -> None:
            undo.append(self._fit_sizes(state, prefix))
            self.resize({place.name: place.geometry for place in topology.places})
            self.rebuild(topology)
            with torch.no_grad():
                for name, mine in self.host.state_dict().items():
                    value = state.get(f"{prefix}{name}")
                    if isinstance(value, Tensor) and value.shape == mine.shape:
                        mine.copy_(value)
            resized = [p for p, shape in shapes.items() if p.shape != shape]
            if owner is not None and resized:
                if owner.ranks.wrapper is not None:
                    raise InvalidInputError(
                        "DistributedDataParallel keeps the sizes of layers. Rebuild "
                        "the plain host with this state, then wrap it."
                    )
                owner.measure_host()
                owner.follow_config()
                if owner.surgery is not None:
                    owner.surgery.put_moments(resized, {})  # of other sizes

        with uninterrupted():
            undo = [self.restore_point(), restore_tensors(self.host)]
            with all_or_nothing(undo):
                change() if owner is None else owner.follow(change)

    def _fit_sizes(self, state: Mapping[str, Any], prefix: str) -> Change:
        """Give layers the sizes that they have in a state; returns an undo."""
        held = {
            name.removeprefix(prefix): value
            for name, value in state.items()
            if name.startswith(prefix) and not name.startswith(f"{prefix}{NAME}.")
        }
        return fit_sizes(self.host, held, self.sizes)

    def _after_load(self, host: nn.Module, keys: Any) -> None:  # noqa: ANN401
        owner = self.flow.owner
        if owner is not None and owner.after_load is not None:
            owner.after_load()

    def validated(self, state: Mapping[str, Any], prefix: str = "") -> SavedTopology:
        """Read the topology of a state; raises if it cannot be built here."""
        topology = read_topology(state, prefix)
        if topology is None:
            undo = self._fit_sizes(state, prefix)
            try:
                if len(self):  # a state from before anything grew
                    check_tensors(self.host, nn.ModuleDict(), state, prefix)
            finally:
                undo()
            return SavedTopology(
                format=FORMAT, places=(), slots=self.slots, seeds=(), generator=""
            )
        if topology.slots != self.slots:
            gone = [name for name in topology.slots if name not in self.slots]
            raise InvalidInputError(
                f"the saved model has other slots: "
                f"{', '.join(gone or topology.slots)}. Build this one with the same."
            )
        self.check_slots(topology)
        outlines = SeedModules(self.host, self.places, self.slots, self.blueprints)
        outlines.traced = self.traced
        undo = self._fit_sizes(state, prefix)
        try:
            outlines.resize({place.name: place.geometry for place in topology.places})
            outlines.rebuild(topology, outlines=True)
            check_tensors(self.host, outlines, state, prefix)
        except InvalidInputError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"the saved seeds cannot be built: {described(error)}"
            ) from error
        finally:
            undo()
        return topology

    def check_slots(self, topology: SavedTopology) -> None:
        """Raise if a seed of a topology has no slot, blueprint or shape here."""
        names = [blueprint.name for blueprint in self.blueprints]
        places = {place.name: place.geometry for place in topology.places}
        for seed in topology.seeds:
            if seed.slot not in self.slots:
                raise InvalidInputError(
                    f"the saved model has a seed in {seed.slot}, and this one has "
                    "no such slot. Build it with the same slots."
                )
            if seed.blueprint not in names:
                raise InvalidInputError(
                    f"the saved model has a seed {seed.blueprint}, which is not "
                    "among this model's blueprints. Build it with the same."
                )
            here = self.place(self.slots.index(seed.slot))
            own = here.geometry
            shapes = {
                name: getattr(own, name)
                for name in ("inlet_shape", "outlet_shape", "hidden_shape")
            }
            if replace(places[here.site.name], **shapes) != own:
                raise InvalidInputError(
                    f"the host's shapes at {here.site.name} are not those that were "
                    "saved. Build the same host with an example of the same shape."
                )

    def rebuild(
        self,
        topology: SavedTopology,
        seeds: Mapping[str, nn.Module] | None = None,
        *,
        outlines: bool = False,
    ) -> None:
        """Plant the seeds of a topology in its order, without their weights.

        Current seeds stay if they are the same. `seeds` are used instead of new ones;
        with `outlines`, new ones are on the meta device.
        """
        there = [replace(seed, state={}) for seed in topology.seeds]
        here = [replace(seed, state={}) for seed in self._saved_seeds()]
        stay = seeds is None and here == there
        for slot in range(len(self.slots) if not stay else 0):
            self.remove_seed(slot)
        empty = asdict(SeedStates.empty(1, len(self.slots)))
        states = {name: values.clone() for name, values in empty.items()}
        names = [blueprint.name for blueprint in self.blueprints]
        make = self.outline if outlines else self.new_seed
        for saved in topology.seeds:
            slot = self.slots.index(saved.slot)
            kind = names.index(saved.blueprint)
            sized = replace(self.blueprints[kind], size=saved.size, share=0.0)
            if seeds is not None:
                self.insert(slot, seeds[saved.slot])
            elif not stay:
                self.insert(slot, make(slot, sized, saved.gated))
            for name, value in {**saved.state, "blueprint": kind}.items():
                states[name][0, slot] = value
        if topology.generator:
            stream = bytearray.fromhex(topology.generator)
            self.generator.set_state(torch.frombuffer(stream, dtype=torch.uint8))
        self.apply_states(SeedStates(**states))

    def extra_repr(self) -> str:
        """Slots and stages."""
        stages = (Stage(int(s)).name for s in self.states.stage[0])
        used = zip(self.slots, stages, strict=True)
        return ", ".join(f"{slot}: {s}" for slot, s in used if s != "DORMANT")


def restore_tensors(host: nn.Module) -> Change:
    """Return a function that restores the values of all tensors of a host's state."""
    state = host.state_dict().values()
    held = [(tensor, tensor.clone()) for tensor in state if isinstance(tensor, Tensor)]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)

    return put_back


@contextmanager
def all_or_nothing(undo: Sequence[Change]) -> Iterator[None]:
    """Undo a change, the last step first, if the block raises."""
    try:
        yield
    except BaseException:
        for put_back in reversed(undo):
            put_back()
        raise


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(before):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []

    def wait(number: int, frame: FrameType | None) -> Any:  # noqa: ANN401
        waiting.append((number, frame))

    try:
        signal.signal(signal.SIGINT, wait)
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])


def grown_part(host: nn.Module) -> SeedModules | None:
    """The `SeedModules` of a host, or None."""
    found = getattr(host, "_modules", {}).get(NAME)
    return found if isinstance(found, SeedModules) else None


def host_parameters(host: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of a host without those of seeds."""
    named = host.named_parameters()
    return {name: p for name, p in named if not name.startswith(f"{NAME}.")}


def slot_number(name: str) -> int:
    """Slot number in the name of a seed, "slot_3", or of its parameters."""
    return int(name.split(".")[0].removeprefix("slot_"))


def seed_interlayer(
    place: InsertionPoint,
    blueprint: Blueprint,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Module between the two layers of a seed of this blueprint."""
    if blueprint.form is not Form.WIDEN:
        return nn.Identity()
    width = units_of(place.inlet)
    return new_interlayer(place.interlayer, blueprint.size, width, generator)


@torch.no_grad()
def _init_weight(weights: nn.ParameterDict, name: str, host: Tensor | None) -> None:
    """Scale the first weights of new units in place.

    In an MLP (`host` is None) as in training controllers: He's deviation, sqrt(2 /
    inputs), and zero biases. Elsewhere to the deviation of the host's weights: a CNN on
    digits scored 0.966 with that and 0.959 with He's (4 random seeds).
    """
    weight = weights[name]
    built = float(weight.double().std(correction=0))
    if host is None:
        wanted = (2 / weight.shape[0]) ** 0.5  # matrices keep inputs first
        if f"{name}_bias" in weights:
            weights[f"{name}_bias"].zero_()
    else:
        wanted = float(host.double().std(correction=0))
    if isfinite(wanted) and wanted > 0.0 and built > 0.0:
        weight.mul_(wanted / built)
