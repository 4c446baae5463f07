"""What training a growing model costs in multiply-adds, and the sizes of plain MLPs.

A decision costs a pass over the decision rows, the promises of all places (and one
more, for a start that is computed), and a few answers to the example.
"""

from typing import Final

from esper.contracts.stages import Stage
from esper.growth.hooks import ROWS
from esper.growth.macs import promise_macs, step_macs
from esper.growth.model import GrowingModel
from esper.growth.slots import is_layer

ANSWERS: Final = 4
"""Answers to the example in one decision, at most."""


class Meter:
    """Adds up what training a growing model costs."""

    def __init__(
        self, model: GrowingModel, decision_rows: int, example_rows: int
    ) -> None:
        self.spent = 0
        self._model = model
        self._rows, self._example = decision_rows, example_rows
        self._layers = [
            n for n, module in model.host.named_modules() if is_layer(module)
        ]
        largest = max(blueprint.size for blueprint in model.spec.blueprints)
        costs = []
        for place in model.survey.places:
            at = place.geometry
            costs.append(
                promise_macs(ROWS, at.inlet_width + 1, at.outlet_width, largest)
            )
        self._promises = sum(costs) + max(costs)

    def steps(self, rows: int) -> None:
        """Rows were trained on, since the last decision."""
        model = self._model
        training = [
            slot
            for slot, name in enumerate(model.slots)
            if model.stage(name) is Stage.TRAINING
        ]
        cost = step_macs(
            model.macs, sum(map(self._seed, training)), self._behind(training)
        )
        self.spent += rows * cost

    def decision(self) -> None:
        """A decision is taken now."""
        rows = self._rows + ANSWERS * self._example
        self.spent += rows * self._model.macs + self._promises

    def _seed(self, slot: int) -> int:
        kind = int(self._model.states.blueprint[0, slot])
        return self._model.cost(slot, self._model.spec.blueprints[kind])[1]

    def _behind(self, training: list[int]) -> int:
        """What reads, directly or not, what the first of some seeds writes."""
        if not training:
            return 0
        model, order = self._model, self._layers
        first = min(order.index(model.place(slot).site.outlet) for slot in training)
        host = model.host
        behind = sum(
            host.get_submodule(name).get_parameter("weight").numel()
            for name in order[first + 1 :]
        )
        living = [
            slot
            for slot in range(len(model.slots))
            if int(model.states.blueprint[0, slot]) >= 0
            and order.index(model.place(slot).site.inlet) > first
        ]
        return behind + sum(map(self._seed, living))


def mlp_macs(inputs: int, width: int, classes: int) -> int:
    """Multiply-adds per row of input -> width -> width -> classes."""
    return inputs * width + width * width + width * classes


def mlp_parameters(inputs: int, width: int, classes: int) -> int:
    """Weights and biases of input -> width -> width -> classes."""
    return mlp_macs(inputs, width, classes) + 2 * width + classes


def width_for(inputs: int, classes: int, parameters: int) -> int:
    """The width whose number of parameters is nearest to the one asked for."""
    width = 1
    while mlp_parameters(inputs, width, classes) < parameters:
        width += 1
    return min(
        (max(1, width - 1), width),
        key=lambda one: abs(mlp_parameters(inputs, one, classes) - parameters),
    )
