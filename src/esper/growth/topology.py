"""Changes of a growing model while an optimiser trains it.

Every op goes through `Topology`: it changes the model, updates the optimiser, measures
the change of the output on the example, and records receipts and events. A change is
applied completely or not at all, even if something raises; Ctrl-C is delayed.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import inf
from weakref import ref

from jaxtyping import Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.errors import IllegalActionError, InvalidInputError
from esper.contracts.stages import Stage, StageChanged
from esper.growth.distributed import DistributedContext
from esper.growth.hooks import Change, TopologyListener
from esper.growth.model import GrowingModel
from esper.growth.optimiser import OptimizerSurgery
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import (
    SeedModules,
    grown_part,
    host_parameters,
    slot_number,
    uninterrupted,
)

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


class Topology(TopologyListener):
    """A growing model with its optimiser."""

    removes_failed = True

    def __init__(
        self,
        model: GrowingModel,
        optimizer: Optimizer,
        ranks: DistributedContext | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.ranks = ranks or DistributedContext()
        self.surgery = OptimizerSurgery(
            optimizer, host_parameters(model.host), model.seed_parameters()
        )
        put_back = self.surgery.restore_point()
        try:
            self._join(model.seed_parameters(), {*self.surgery.joined})
        except BaseException:
            put_back()
            self.surgery.detach()
            raise
        model.flow.listener = ref(self)
        self.is_replaced = False
        """Whether another `Topology` has taken over the host."""
        self.after_load: Callable[[], None] | None = None
        """Called after a state was loaded into the host."""
        self._copies: list[tuple[ref[SeedModules], dict[str, nn.Module]]] = []
        """Copies of the host that grow with it, and the seeds that they copied."""
        self.step = 0
        """Number of the decision in recorded events."""
        self.receipts: list[Receipt] = []
        self.events: list[StageChanged] = []

    def act(self, actions: Int64[Tensor, "1 head"]) -> Receipt:
        """Apply an action, update the optimiser and measure the change of output."""
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        before, stages = self.model.example_outputs(), self.model.states.stage
        kind = int(self.model.states.blueprint[0, index])
        without: list[Tensor] = []
        if op is Op.PRUNE:  # it fades later; the receipt holds the total change
            with self.model.flow.using(left_out=index):
                without = self.model.example_outputs()

        def change() -> None:
            self.model.act(actions)
            without[:] = without or self.model.example_outputs()

        self.follow(change)
        kind = max(kind, int(self.model.states.blueprint[0, index]))
        receipt = Receipt(
            op=op.name,
            slot=self.model.slots[index],
            blueprint=self.model.spec.blueprints[kind].name if kind >= 0 else "",
            jump=_jump(before, without),
        )
        self.receipts.append(receipt)
        self._record_stages(stages, op.name)
        return receipt

    def tick(self, batches: int = 1, *, decision: bool = True) -> None:
        """Advance stages and alphas; see `GrowingModel.tick`."""
        stages = self.model.states.stage
        self.follow(lambda: self.model.tick(batches, decision=decision))
        self._record_stages(stages, "")

    def remove(self, slot: int, reason: str) -> None:
        """Remove a seed at once."""
        stages = self.model.states.stage
        self.follow(lambda: self.model.remove(slot))
        self._record_stages(stages, reason)

    def collect(self) -> tuple[tuple[Receipt, ...], tuple[StageChanged, ...]]:
        """Return receipts and events since the last call."""
        found = tuple(self.receipts), tuple(self.events)
        self.receipts, self.events = [], []
        return found

    def follow(self, change: Change) -> None:
        """Change topology, optimiser and copies of the host; all or nothing."""
        with uninterrupted():
            put_back = self.model.seeds.restore_point(), self.surgery.restore_point()
            before = self.model.seed_parameters()
            try:
                change()
                after = self.model.seed_parameters()
                gone = [p for name, p in before.items() if after.get(name) is not p]
                self.surgery.leave(gone)
                self._join(after, {*before.values()})
            except BaseException:
                for undo in put_back:
                    undo()
                raise
            for copy, twins in self._copies:
                if (living := copy()) is not None:
                    living.mirror(self.model.seeds, twins)

    def add_copy(self, module: nn.Module) -> None:
        """Let a copy of the host, such as an average, grow with it from now on."""
        found = [part for part in module.modules() if isinstance(part, SeedModules)]
        if len(found) != 1 or found[0].slots != self.model.slots:
            raise InvalidInputError(
                "only a copy of the host can follow it. Make it after the Grower."
            )
        (copy,) = found
        if [*copy] != [*self.model.seeds]:
            raise InvalidInputError(
                "the host has grown since the copy was made. Copy it again."
            )
        self._copies.append((ref(copy), dict(self.model.seeds.items())))

    def give_up(self, successor: TopologyListener) -> None:
        """Hand the host and its copies over to another listener."""
        self.is_replaced = True
        self.surgery.detach()
        if (
            isinstance(successor, Topology)
            and successor.model.slots == self.model.slots
        ):
            successor._copies = self._copies
        self._copies = []

    def lagging_copies(self) -> list[SeedModules]:
        """Copies of the host that do not grow with it and have other seeds."""
        followed = [copy() for copy, _ in self._copies]
        living = [copy() for copy in self.model.seeds.copies]
        return [
            copy
            for copy in living
            if copy is not None and all(copy is not other for other in followed)
            if grown_part(copy.host) is copy and [*copy] != [*self.model.seeds]
        ]

    def loaded(self) -> None:
        """Call `after_load`."""
        if self.after_load is not None:
            self.after_load()

    def _join(self, named: dict[str, nn.Parameter], known: set[nn.Parameter]) -> None:
        """Add new parameters to the groups of their neighbouring layers."""
        new = {name: p for name, p in named.items() if p not in known}
        for name, parameter in new.items():
            slot = slot_number(name.removeprefix(f"{NAME}."))
            self.surgery.join({name: parameter}, self._neighbour(slot, parameter))
        self.ranks.from_first(new.values())

    def _neighbour(self, slot: int, new: nn.Parameter) -> nn.Parameter | None:
        """A trained parameter of the outlet or inlet of a slot.

        Vectors, such as biases, join vectors of that layer or else of the host, since
        these often have no weight decay.
        """
        place = self.model.place(slot)
        groups = self.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        near = [
            parameter
            for module in (place.outlet, place.inlet)
            for parameter in module.parameters()
            if id(parameter) in trained
        ]
        vector = new.ndim < 2
        if vector:
            own = host_parameters(self.model.host).values()
            near += [p for p in own if p.ndim < 2 and id(p) in trained]
        alike = [p for p in near if (p.ndim < 2) == vector]
        return next(iter(alike or near), None)

    def _record_stages(self, before: Tensor, reason: str) -> None:
        """Record an event for every slot whose stage changed."""
        after = self.model.states.stage
        for slot in (before[0] != after[0]).nonzero().flatten().tolist():
            self.events.append(
                StageChanged(
                    env=0,
                    slot=slot,
                    step=self.step,
                    before=Stage(int(before[0, slot])),
                    after=Stage(int(after[0, slot])),
                    reason=reason or PASSED[Stage(int(after[0, slot]))],
                )
            )


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


def _jump(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest absolute change; infinite if none is a number."""
    jumps = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    return max((jump for jump in jumps if jump == jump), default=inf)
