"""Changing a growing model while an optimiser trains it.

Every op goes through `Topology`: the model changes, parameters join or leave the
optimiser, the change of the model's output on its example is measured, and receipts
and events are kept until they are collected.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from jaxtyping import Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.errors import BadInput, IllegalAction
from esper.contracts.stages import Stage, StageChanged
from esper.growth.model import GrowingModel
from esper.growth.optimiser import OptimizerSurgery

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
"""Why a stage was entered when nothing was said."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What one op did to the model's output on its example."""

    op: str
    slot: str
    blueprint: str
    jump: float
    """Largest change of any number of the output, in eval mode."""

    def __str__(self) -> str:
        """One line."""
        what = f" {self.blueprint}" if self.blueprint else ""
        return f"{self.op} {self.slot}{what}: output changed by {self.jump:.3g}"


class Topology:
    """A growing model and the optimiser that follows its changes."""

    def __init__(self, model: GrowingModel, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.surgery = OptimizerSurgery(optimizer, model.host)
        self.step = 0
        """The decision that events are recorded under."""
        self.receipts: list[Receipt] = []
        self.events: list[StageChanged] = []

    def act(self, actions: Int64[Tensor, "1 head"]) -> Receipt:
        """Change a slot, let the optimiser follow, and measure the jump."""
        op, index = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        before, stages = self.model.example_outputs(), self.model.states.stage
        kind = int(self.model.states.blueprint[0, index])
        without: list[Tensor] = []
        if op is Op.PRUNE:  # it fades; the receipt prints the whole of the jump
            with self.model.flow.using(left_out=index):
                without = self.model.example_outputs()
        self._follow(lambda: self.model.act(actions), index)
        kind = max(kind, int(self.model.states.blueprint[0, index]))
        receipt = Receipt(
            op=op.name,
            slot=self.model.slots[index],
            blueprint=self.model.spec.blueprints[kind].name if kind >= 0 else "",
            jump=_jump(before, without or self.model.example_outputs()),
        )
        self.receipts.append(receipt)
        self._record_stages(stages, op.name)
        return receipt

    @property
    def moving(self) -> bool:
        """Whether a seed trains, blends or fades: batches matter to it."""
        states = self.model.states
        return bool((states.moved < states.length).any())

    def tick(self, batches: int = 1, *, decision: bool = True) -> None:
        """Let batches pass, up to a decision."""
        stages = self.model.states.stage
        self._follow(lambda: self.model.tick(batches, decision=decision), None)
        self._record_stages(stages, "")

    def remove(self, slot: int, reason: str) -> None:
        """Take a seed out at once."""
        stages = self.model.states.stage
        self._follow(lambda: self.model.remove(slot), slot)
        self._record_stages(stages, reason)

    def collect(self) -> tuple[tuple[Receipt, ...], tuple[StageChanged, ...]]:
        """Receipts and events since the last time."""
        found = tuple(self.receipts), tuple(self.events)
        self.receipts, self.events = [], []
        return found

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by the names that the optimiser's groups are saved under."""
        host = dict(self.model.host.named_parameters())
        return {**host, **self.model.seed_parameters()}

    def _follow(self, change: Callable[[], None], slot: int | None) -> None:
        """Let the optimiser follow a change of topology."""
        before = self.model.seed_parameters()
        change()
        after = self.model.seed_parameters()
        gone = [p for name, p in before.items() if after.get(name) is not p]
        born = {name: p for name, p in after.items() if before.get(name) is not p}
        self.surgery.leave(gone)
        if born and slot is not None:
            try:
                self.surgery.join(born, self._neighbour(slot))
            except BadInput:
                self.model.remove(slot)
                raise

    def _neighbour(self, slot: int) -> nn.Parameter | None:
        """A trained parameter of the layer that a slot writes to, or reads."""
        place = self.model.place(slot)
        groups = self.optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        for module in (place.outlet, place.inlet):
            for parameter in module.parameters():
                if id(parameter) in trained:
                    return parameter
        return None

    def _record_stages(self, before: Tensor, reason: str) -> None:
        """An event for every slot whose stage changed, by an op or by itself."""
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
    """Refuse an action that its masks forbid: a controller may be anyone's code."""
    if actions.shape != (1, NUM_HEADS):
        raise IllegalAction(
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
        raise IllegalAction(
            f"the controller chose what its masks forbid: op {op}, slot {slot}, "
            f"blueprint {kind}."
        )


def _jump(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest change of any number."""
    jumps = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    return max((jump for jump in jumps if jump == jump), default=inf)
