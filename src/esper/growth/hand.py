"""Changing a growing model while an optimiser trains it.

Every op goes through `Hand`: the model changes, parameters join or leave the
optimiser, the change of the model's answer on its example is measured, and what
happened is noted as receipts and events until somebody collects them.
"""

from collections.abc import Callable, Sequence
from math import inf

from jaxtyping import Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import BadInput
from esper.contracts.events import StageChanged
from esper.contracts.stages import Stage
from esper.growth.history import Receipt
from esper.growth.model import GrowingModel
from esper.growth.optimiser import Newborn, Surgeon


class Hand:
    """A growing model and the optimiser that follows its changes."""

    def __init__(
        self, model: GrowingModel, optimizer: Optimizer, newborn: Newborn | None
    ) -> None:
        self.model = model
        self.surgeon = Surgeon(optimizer, model.host, newborn)
        self.step = 0
        """The decision that events are noted under."""
        self._optimizer = optimizer
        self._receipts: list[Receipt] = []
        self._events: list[StageChanged] = []

    def change(self, change: Callable[[], None], op: Op, slot: str) -> Receipt:
        """Do something to a slot, let the optimiser follow, and measure the jump."""
        index = self.model.index(slot)
        before, stages = self.model.answer(), self.model.lives.stage
        kind = int(self.model.lives.blueprint[0, index])
        self._follow(change, index)
        kind = max(kind, int(self.model.lives.blueprint[0, index]))
        receipt = Receipt(
            op=op.name,
            slot=slot,
            blueprint=self.model.spec.blueprints[kind].name if kind >= 0 else "",
            jump=_jump(before, self.model.answer()),
            note=self.model.note if op is Op.GERMINATE else "",
        )
        self._receipts.append(receipt)
        self._tell(stages, f"{op.name} was said")
        return receipt

    def act(self, actions: Int64[Tensor, "1 head"], initialiser: str) -> None:
        """Carry out a controller's sentence."""
        op, slot = Op(int(actions[0, HEAD["op"]])), int(actions[0, HEAD["slot"]])
        if op is not Op.WAIT:
            self.change(
                lambda: self.model.act(actions, initialiser),
                op,
                self.model.slots[slot],
            )

    def let_pass(self) -> None:
        """One decision passes; a jump of the answer is told."""
        moving = bool((self.model.lives.moved < self.model.lives.length).any())
        before = self.model.answer() if moving else []
        stages = self.model.lives.stage
        self._follow(self.model.tick, None)
        if moving:
            jump = _jump(before, self.model.answer())
            self._receipts.append(Receipt("ALPHA", "moved", "", jump))
        self._tell(stages, "it had cooled down")

    def remove(self, slot: int, reason: str) -> None:
        """Take a seed out at once."""
        stages = self.model.lives.stage
        self._follow(lambda: self.model.remove(slot), slot)
        self._tell(stages, reason)

    def pending(self) -> tuple[tuple[Receipt, ...], tuple[StageChanged, ...]]:
        """What would be collected now."""
        return tuple(self._receipts), tuple(self._events)

    def restore(
        self, receipts: Sequence[Receipt], events: Sequence[StageChanged]
    ) -> None:
        """What was pending when this was saved."""
        self._receipts, self._events = [*receipts], [*events]

    def collect(self) -> tuple[tuple[Receipt, ...], tuple[StageChanged, ...]]:
        """What happened since the last time."""
        found = self.pending()
        self._receipts, self._events = [], []
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
        self.surgeon.leave(gone)
        if born and slot is not None:
            try:
                self.surgeon.join(born, self._neighbour(slot))
            except BadInput:
                self.model.remove(slot)
                raise

    def _neighbour(self, slot: int) -> nn.Parameter | None:
        """A trained parameter of the layer that a slot writes to, or reads."""
        place = self.model.place(slot)
        groups = self._optimizer.param_groups
        trained = {id(p) for group in groups for p in group["params"]}
        for module in (place.outlet, place.inlet):
            for parameter in module.parameters():
                if id(parameter) in trained:
                    return parameter
        return None

    def _tell(self, before: Tensor, reason: str) -> None:
        """Note every slot whose stage changed."""
        for slot in range(len(self.model.slots)):
            was, now = int(before[0, slot]), int(self.model.lives.stage[0, slot])
            if was != now:
                self._events.append(
                    StageChanged(
                        env=0,
                        slot=slot,
                        step=self.step,
                        before=Stage(was),
                        after=Stage(now),
                        reason=reason,
                    )
                )


def _jump(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest change of any number."""
    jumps = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    return max((jump for jump in jumps if jump == jump), default=inf)
