"""Several worlds with one action space; hosts, data, horizons and terms may differ."""

from collections.abc import Callable, Sequence
from typing import Any

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import InvalidInputError
from esper.contracts.state import Stateful, Tensors, load, save
from esper.contracts.world import VectorWorld


class Mixture:
    """The worlds of a training run, in order.

    A pickled mixture creates its worlds again in the other process.

    Args:
        make: Function from world index and round, both from 0, to a world.
        count: Number of worlds.
        redrawn: Whether every round has new worlds; if not, round 0's are used.
    """

    def __init__(
        self,
        make: Callable[[int, int], VectorWorld],
        count: int,
        *,
        redrawn: bool = False,
    ) -> None:
        worlds = [make(number, 0) for number in range(count)]
        if not worlds:
            raise InvalidInputError("a mixture needs at least one world, got none.")
        for number, world in enumerate(worlds):
            if world.spec != worlds[0].spec:
                raise InvalidInputError(
                    f"all worlds of a mixture must have the same action space; number "
                    f"{number} differs from the first: {_describe(world.spec)}, not "
                    f"{_describe(worlds[0].spec)}."
                )
        self._make, self.redrawn = make, redrawn
        self.spec = worlds[0].spec
        self.counts = [world.num_envs for world in worlds]
        """Environments of every world."""
        self.num_envs = sum(self.counts)
        sizes = {world.group_size for world in worlds}
        self.group_size = sizes.pop() if len(sizes) == 1 else 1
        self._worlds: dict[int, VectorWorld] = {}
        if not redrawn:
            self._worlds = dict(enumerate(worlds))
        self._states: dict[int, Tensors] = {}

    @classmethod
    def of(cls, worlds: Sequence[VectorWorld]) -> "Mixture":
        """Mix existing worlds; this mixture cannot move to another process."""
        return cls(lambda number, round: worlds[number], len(worlds))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_worlds": {}, "_states": {}}

    def world(
        self, number: int, round: int = 0, state: Tensors | None = None
    ) -> VectorWorld:
        """Return one of the worlds, restored to `state` from `keep` if given."""
        if self.redrawn:
            return self._make(number, round)
        if number not in self._worlds:
            self._worlds[number] = self._make(number, 0)
        world = self._worlds[number]
        # An unchanged world need not be loaded.
        if state is not None and self._states.get(number) is not state:
            load(world, state)
        return world

    def keep(self, number: int, world: VectorWorld) -> Tensors | None:
        """Return the state of a world, if it is kept between rounds."""
        if self.redrawn or not isinstance(world, Stateful):
            return None
        self._states[number] = save(world)
        return self._states[number]


def _describe(spec: ActionSpec) -> str:
    names = ", ".join(blueprint.name for blueprint in spec.blueprints)
    return f"{spec.slots.max_slots} slots and {names}"
