"""A host with slots: plant, advance, set alpha, prune, keep. It decides nothing.

    growing = GrowingModel(host, ["fc1->fc2"], example)
    growing.plant("fc1->fc2#0", "widen_16")

The host stays the user's own module: its names, weights and calls are untouched, seeds
stand beside it. Every op is checked by the one lifecycle and refused in one line if it
is not possible now; nothing has changed then. Time passes only when `tick` is called.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.errors import BadInput, IllegalAction
from esper.contracts.slots import SlotConfig
from esper.contracts.stages import Stage
from esper.growth import lifecycle
from esper.growth.blueprints.registry import find
from esper.growth.blueprints.seed import build, cost, misfit
from esper.growth.calls import Example, call, shielded, tensors_of
from esper.growth.initialisers import start
from esper.growth.junction import Branch, Flow, Junction
from esper.growth.lifecycle import Lives
from esper.growth.places import Place, Survey, survey
from esper.growth.saved import FORMAT, topology
from esper.growth.sites import find_sites
from esper.growth.trace import fresh_middle
from esper.growth.words import sentence


class GrowingModel(nn.Module):
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
        rng_seed: int = 0,
    ) -> None:
        super().__init__()
        if seeds_per_slot < 1:
            raise BadInput(f"seeds_per_slot must be at least 1, got {seeds_per_slot}.")
        chosen = BLUEPRINTS if blueprints is None else tuple(map(find, blueprints))
        self.survey: Survey = survey(host, find_sites(host, slots), example)
        self.host = host
        self.seeds = nn.ModuleDict()
        self.example: Example = example
        self.flow = Flow()
        self.junctions = [Junction(place, self.flow) for place in self.survey.places]
        # Slots of one place lie apart, so that filling them in order spreads.
        self.slots: tuple[str, ...] = tuple(
            f"{place.site.name}#{index}"
            for index in range(seeds_per_slot)
            for place in self.survey.places
        )
        self.spec = ActionSpec(SlotConfig(len(self.slots), min_age), chosen)
        self.lives = Lives.empty(1, len(self.slots))
        self.generator = torch.Generator().manual_seed(rng_seed)
        self.note = ""
        """How the last seed was started, in words."""
        self._costs: dict[tuple[str, str], tuple[int, int]] = {}
        self._prices: dict[tuple[str, str], tuple[int, int] | None] = {}
        try:
            for junction in self.junctions:
                junction.attach()
        except BadInput:
            self.detach()
            raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The grown host's answer."""
        return self.host(*args, **kwargs)

    # Ops, by name.

    def plant(
        self,
        slot: str,
        blueprint: str,
        *,
        style: str = "ADD",
        tempo: str = "STANDARD",
        alpha_target: str = "FULL",
        initialiser: str = "zero_out",
    ) -> None:
        """Plant a seed; the host does not feel it until it is advanced."""
        said: dict[str, int | str] = {
            "slot": self.index(slot),
            "blueprint": self._blueprint_index(blueprint),
            "style": style,
            "tempo": tempo,
            "alpha_target": alpha_target,
        }
        self.act(sentence(Op.GERMINATE, said), initialiser)

    def advance(self, slot: str) -> None:
        """Move a seed on: from training to blending, from blending to holding."""
        self.act(sentence(Op.ADVANCE, {"slot": self.index(slot)}))

    def set_alpha(
        self,
        slot: str,
        target: str,
        *,
        speed: str = "FAST",
        curve: str = "LINEAR",
        style: str = "ADD",
    ) -> None:
        """Let a seed's alpha travel to another target."""
        said: dict[str, int | str] = {
            "slot": self.index(slot),
            "alpha_target": target,
            "alpha_speed": speed,
            "alpha_curve": curve,
            "style": style,
        }
        self.act(sentence(Op.SET_ALPHA, said))

    def prune(
        self, slot: str, *, speed: str = "INSTANT", curve: str = "LINEAR"
    ) -> None:
        """Fade a seed out; a training seed leaves at the next tick."""
        said: dict[str, int | str] = {
            "slot": self.index(slot),
            "alpha_speed": speed,
            "alpha_curve": curve,
        }
        self.act(sentence(Op.PRUNE, said))

    def keep(self, slot: str) -> None:
        """Fossilise a holding seed: it stays for good."""
        self.act(sentence(Op.FOSSILIZE, {"slot": self.index(slot)}))

    # The same, as a controller says it.

    def act(
        self, actions: Int64[Tensor, "1 head"], initialiser: str = "zero_out"
    ) -> None:
        """Carry out one sentence; refuses what is not possible now."""
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        after, done = lifecycle.act(self.lives, actions, self.spec.slots.min_age)
        if not bool(done):
            raise IllegalAction(self._why_not(op, index))
        if op is Op.GERMINATE:
            blueprint = self.spec.blueprints[int(actions[0, HEAD["blueprint"]])]
            self._grow(index, blueprint, initialiser)
        self._put(after)

    def tick(self) -> None:
        """Let one decision pass: alphas travel, what has cooled down leaves."""
        self._put(lifecycle.tick(self.lives))

    def remove(self, slot: int) -> None:
        """Take a seed out at once, whatever its stage: for one that failed."""
        gone = torch.zeros_like(self.lives.stage, dtype=torch.bool)
        gone[0, slot] = True
        self._put(lifecycle.select(gone, Lives.empty(*gone.shape), self.lives))

    # What is there.

    def index(self, slot: str) -> int:
        """The number of a slot."""
        if slot not in self.slots:
            near = get_close_matches(slot, self.slots, n=1, cutoff=0.0)
            raise BadInput(f"there is no slot {slot!r}; did you mean {near[0]!r}?")
        return self.slots.index(slot)

    def stage(self, slot: str) -> Stage:
        """Where a slot is in its life."""
        return Stage(int(self.lives.stage[0, self.index(slot)]))

    def place(self, slot: int) -> Place:
        """The place that a slot belongs to."""
        return self.survey.places[slot % len(self.survey.places)]

    def junction(self, slot: int) -> Junction:
        """The hooks of a slot's place."""
        return self.junctions[slot % len(self.junctions)]

    def seed_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of all seeds by name."""
        return {f"seeds.{name}": p for name, p in self.seeds.named_parameters()}

    def training_seeds(self) -> dict[int, nn.Module]:
        """The seeds that learn in shadow passes, by slot number."""
        return {
            slot: branch.seed
            for junction in self.junctions
            for slot, branch in junction.branches.items()
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

    @property
    def parameters_added(self) -> int:
        """Parameters of all seeds."""
        return sum(p.numel() for p in self.seeds.parameters())

    def cost(self, slot: int, blueprint: Blueprint) -> tuple[int, int]:
        """Parameters and multiply-adds per row of a blueprint in a slot it fits."""
        place = self.place(slot)
        key = (place.site.name, blueprint.name)
        if key not in self._costs:
            known = cost(blueprint, place.geometry)
            norms = sum(p.numel() for p in _middle(place, blueprint).parameters())
            self._costs[key] = (known.parameters + norms, known.macs)
        return self._costs[key]

    def price(self, slot: int, blueprint: Blueprint) -> tuple[int, int] | None:
        """The cost of a blueprint in a slot; None if it cannot stand there."""
        key = (self.place(slot).site.name, blueprint.name)
        if key not in self._prices:
            try:
                fits = not misfit(blueprint, self.place(slot).geometry)
                self._prices[key] = self.cost(slot, blueprint) if fits else None
            except BadInput:  # a user's own that does not know where it fits
                self._prices[key] = None
        return self._prices[key]

    @property
    def macs(self) -> int:
        """Multiply-adds per row of the host with every seed that it feels."""
        felt = [
            self.cost(slot, self.spec.blueprints[int(self.lives.blueprint[0, slot])])[1]
            for slot in range(len(self.slots))
            if float(self.lives.alpha[0, slot]) > 0
        ]
        return self.survey.macs + sum(felt)

    def answer(self) -> list[Tensor]:
        """What the model says to its example in eval mode; nothing changes."""
        with shielded(self, training=False), torch.no_grad():
            return [t.clone() for t in tensors_of(call(self.host, self.example))]

    @contextmanager
    def without(self, slot: int) -> Iterator[None]:
        """Let passes in the block not feel one seed."""
        self.flow.left_out = slot
        try:
            yield
        finally:
            self.flow.left_out = None

    @contextmanager
    def trying(self, slot: int) -> Iterator[None]:
        """Let passes in the block feel one seed at alpha 1."""
        self.flow.tried = slot
        try:
            yield
        finally:
            self.flow.tried = None

    def detach(self) -> None:
        """Take all hooks off the host; it is then as it was before, co-trained."""
        for junction in self.junctions:
            junction.detach()

    # Saving: the topology goes with the weights.

    def get_extra_state(self) -> dict[str, Any]:
        """All that is no weight, as plain data."""
        return {
            "format": FORMAT,
            "slots": [*self.slots],
            "blueprints": [blueprint.name for blueprint in self.spec.blueprints],
            "lives": asdict(self.lives),
            "generator": self.generator.get_state(),
        }

    def set_extra_state(self, state: Mapping[str, Any]) -> None:
        """Lives and chance; the seeds themselves were planted by `load_state_dict`."""
        self.generator.set_state(state["generator"])
        self._put(Lives(**state["lives"]))

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
        saved = topology(state_dict, self.host, self.slots, names)
        for slot in range(len(self.slots)):
            index = int(saved["lives"]["blueprint"][0, slot])
            self._uproot(slot)
            if index >= 0:
                self._grow(slot, self.spec.blueprints[index], "zero_out")
        return super().load_state_dict(state_dict)

    # Inside.

    def _put(self, lives: Lives) -> None:
        """Make the seeds be what the lives say."""
        self.lives = lives
        for slot in range(len(self.slots)):
            stage = int(lives.stage[0, slot])
            junction = self.junction(slot)
            if stage == Stage.DORMANT:
                self._uproot(slot)
            elif slot in junction.branches:
                branch = junction.branches[slot]
                branch.alpha = float(lives.alpha[0, slot])
                branch.style = int(lives.style[0, slot])
                branch.shadow = stage == Stage.TRAINING
        for junction in self.junctions:
            mine = [s for s in range(len(self.slots)) if self.junction(s) is junction]
            junction.keeping = any(lives.stage[0, s] == Stage.DORMANT for s in mine)
            if not junction.keeping:
                junction.samples.clear()

    def _grow(self, slot: int, blueprint: Blueprint, initialiser: str) -> None:
        place, junction = self.place(slot), self.junction(slot)
        if reason := misfit(blueprint, place.geometry):
            raise BadInput(
                f"blueprint {blueprint.name!r} does not fit slot "
                f"{self.slots[slot]!r}: {reason}."
            )
        seed = build(
            blueprint, place.geometry, self.generator, _middle(place, blueprint)
        )
        self.note = start(seed, place, junction.samples, initialiser, self.generator)
        near = (place.outlet, place.inlet, self.host)
        like = next(p for m in near for p in m.parameters() if p.is_floating_point())
        seed = seed.to(device=like.device, dtype=like.dtype)
        seed.train(self.host.training)
        self.seeds[f"slot_{slot}"] = seed
        junction.branches[slot] = Branch(seed)
        junction.branches = dict(sorted(junction.branches.items()))

    def _uproot(self, slot: int) -> None:
        if f"slot_{slot}" in self.seeds:
            del self.seeds[f"slot_{slot}"]
            self.junction(slot).branches.pop(slot, None)
            self.flow.failed.pop(slot, None)

    def _why_not(self, op: Op, slot: int) -> str:
        stage = Stage(int(self.lives.stage[0, slot])).name
        age = int(self.lives.age[0, slot])
        moving = "" if bool(self.lives.settled[0, slot]) else ", alpha still moving"
        return (
            f"{op.name} is not possible in slot {self.slots[slot]!r}: it is {stage} "
            f"for {age} decisions{moving}."
        )

    def _blueprint_index(self, name: str) -> int:
        names = [blueprint.name for blueprint in self.spec.blueprints]
        if name not in names:
            known = find(name).name  # refuses an unknown one with the nearest name
            raise BadInput(
                f"blueprint {known!r} is not among this model's: {', '.join(names)}."
            )
        return names.index(name)


def _middle(place: Place, blueprint: Blueprint) -> nn.Module:
    """What a seed of this blueprint does between its layers, of its own."""
    if blueprint.form is not Form.WIDEN:
        return nn.Identity()
    units = place.inlet.get_parameter("weight").shape[0]
    made, _ = fresh_middle(place.middle, blueprint.size, int(units))
    return made
