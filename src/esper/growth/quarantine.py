"""Taking out seeds that fail, and noting what was not let through.

A seed whose code raises leaves at once. A training seed leaves when its gradients or
weights are broken; the host never felt it. When all went back to a snapshot, the felt
seeds that spoil the answer leave; if none can be told and training fails a third time,
the newest one does. Nobody else is touched.
"""

from esper.growth.governor import all_finite
from esper.growth.guard import Guard, Incident
from esper.growth.hand import Hand
from esper.growth.measure import FELT
from esper.growth.model import GrowingModel


class Quarantine:
    """Removes broken seeds of one growing model; `incidents` tells of it."""

    def __init__(self, model: GrowingModel) -> None:
        self.incidents: list[str] = []
        """What happened since the last decision, in words."""
        self.hand: Hand | None = None
        self.guard: Guard | None = None
        self._model = model

    def remove(self, slot: int, reason: str) -> None:
        """Take a seed out at once."""
        assert self.hand is not None
        self.hand.remove(slot, reason)
        self.incidents.append(f"removed {self._model.slots[slot]}: {reason}")
        if self.guard is not None:
            self.guard.follow()

    def remove_failed(self) -> None:
        """Take out seeds whose own code failed."""
        for slot, reason in [*self._model.flow.failed.items()]:
            self.remove(slot, reason)

    def remove_broken(self) -> None:
        """Take out training seeds with weights, buffers or moments beyond repair."""
        for slot in self.guard.broken_seeds() if self.guard is not None else ():
            self.remove(slot, "its weights are not finite")

    def report(self, incident: Incident) -> None:
        """Note what the guard did not let through; after a fall, find the culprit."""
        what = "rolled back" if incident.rolled_back else "refused"
        self.incidents.append(f"{what}: {incident.reason}")
        if not incident.rolled_back:
            return
        culprits = self._culprits()
        for slot in culprits:
            self.remove(slot, "what it says is not finite")
        if not culprits and self.guard is not None and self.guard.falls > 2:
            self._remove_youngest()

    def give_up(self, reason: str) -> None:
        """Take out the training seeds that are broken; all, if none can be told."""
        training = [*self._model.training_seeds()]
        broken = []
        for slot in training:
            with self._model.trying(slot):
                if not all_finite(self._model.answer()):
                    broken.append(slot)
        for slot in broken or training:
            self.remove(slot, reason)

    def _culprits(self) -> list[int]:
        """Felt seeds without which the answer is finite, if it is not with them."""
        found: list[int] = []
        if all_finite(self._model.answer()):
            return found
        for slot in range(len(self._model.slots)):
            with self._model.without(slot):
                if all_finite(self._model.answer()):
                    found.append(slot)
        return found

    def _remove_youngest(self) -> None:
        names, ages = self._model.slots, self._model.lives.age
        felt = [slot for slot, n in enumerate(names) if self._model.stage(n) in FELT]
        if felt:
            youngest = min(felt, key=lambda slot: int(ages[0, slot]))
            self.remove(youngest, "training kept failing with it")
