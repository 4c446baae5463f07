"""Ops by hand: what a controller can say, as calls with the optimiser following."""

from collections.abc import Callable

from esper.contracts.actions import Op
from esper.growth.guard import Guard
from esper.growth.hand import Hand
from esper.growth.history import Receipt
from esper.growth.model import GrowingModel


class ByHand:
    """The ops of a growing model that an optimiser trains."""

    model: GrowingModel
    hand: Hand
    guard: Guard | None
    initialiser: str

    def plant(self, slot: str, blueprint: str, **manner: str) -> Receipt:
        """Plant a seed now; see `GrowingModel.plant`."""
        manner = {"initialiser": self.initialiser, **manner}
        return self._change(
            lambda: self.model.plant(slot, blueprint, **manner), Op.GERMINATE, slot
        )

    def advance(self, slot: str) -> Receipt:
        """Move a seed on; see `GrowingModel.advance`."""
        return self._change(lambda: self.model.advance(slot), Op.ADVANCE, slot)

    def set_alpha(self, slot: str, target: str, **manner: str) -> Receipt:
        """Let alpha travel; see `GrowingModel.set_alpha`."""
        return self._change(
            lambda: self.model.set_alpha(slot, target, **manner), Op.SET_ALPHA, slot
        )

    def prune(self, slot: str, **manner: str) -> Receipt:
        """Fade a seed out; see `GrowingModel.prune`."""
        return self._change(lambda: self.model.prune(slot, **manner), Op.PRUNE, slot)

    def keep(self, slot: str) -> Receipt:
        """Keep a seed for good; see `GrowingModel.keep`."""
        return self._change(lambda: self.model.keep(slot), Op.FOSSILIZE, slot)

    def _change(self, change: Callable[[], None], op: Op, slot: str) -> Receipt:
        receipt = self.hand.change(change, op, slot)
        if self.guard is not None:
            self.guard.follow()
        return receipt
