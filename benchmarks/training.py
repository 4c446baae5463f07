"""One training of a small network, grown or not, and what it costs in multiply-adds.

A decision costs a pass over the decision rows, the promises of all places (and one
more, for a start that is computed), and a few answers to the example.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from esper.contracts.stages import Stage
from esper.experiment.streams import stream, stream_seed
from esper.grower import Grower
from esper.growth.hooks import ROWS
from esper.growth.macs import promise_macs, step_macs
from esper.growth.model import GrowingModel
from esper.growth.slots import is_layer
from esper.tasks.data import Data, split

BLUEPRINTS: Final = ("widen_8", "widen_16", "widen_32")
EXAMPLE: Final = 8
"""Rows of the example that a growing model is watched with."""
ANSWERS: Final = 4
"""Answers to the example in one decision, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that decides how one training goes."""

    task: str
    arm: str
    rng_seed: int
    rows: int | None
    """Rows of the task that are used; None: all."""
    width: int
    batch: int
    steps: int
    rate: float
    """Highest learning rate of the one cycle."""
    decay: float = 1e-2
    judged: bool = False
    """Whether the test rows are looked at, at the end."""
    budget: float | None = None
    """Parameters that may be added, relative to the host's; None: never grown."""
    epochs: int = 0
    """Decisions of a growing run, spread evenly over its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one training."""

    decisions: float
    """Accuracy on the decision rows, at the end."""
    test: float | None
    """Accuracy on the test rows; None if they were not looked at."""
    parameters: int
    """Numbers that were trained."""
    exported: int
    """Numbers in the exported network."""
    training_macs: int
    seconds: float
    cpu_seconds: float
    incidents: int = 0
    """Batches that the guard refused."""


def train(what: Run, data: Data) -> Outcome:
    """Train, and judge what came of it."""
    torch.set_num_threads(1)
    parts = split(data, what.rng_seed)
    began, cpu = time.perf_counter(), time.process_time()
    inputs, classes = data.features.shape[1], data.classes
    net = mlp(inputs, what.width, classes, stream_seed(what.rng_seed, "weights"))
    optimizer = AdamW(
        net.parameters(), lr=what.rate, weight_decay=what.decay, fused=True
    )
    schedule = OneCycleLR(
        optimizer, what.rate, total_steps=what.steps, cycle_momentum=False
    )
    grower = _grower(what, net, optimizer, parts.train.features[:EXAMPLE])
    meter = Meter(grower.model, len(parts.decisions), EXAMPLE) if grower else None
    every = what.steps // max(1, what.epochs)
    orders = stream(what.rng_seed, "batches")
    batches = _batches(parts.train, what.batch, orders)
    for step, (features, labels) in zip(
        range(1, what.steps + 1), batches, strict=False
    ):
        closure = partial(_loss, net, features, labels)
        loss = grower.loss(closure) if grower else closure()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if grower and meter and step % every == 0:
            meter.steps(every * what.batch)
            meter.decision()
            grower.step(metric=accuracy(net, parts.decisions))
    final = grower.export() if grower else net
    plain_macs = mlp_macs(inputs, what.width, classes)
    history = grower.history if grower else []
    return Outcome(
        decisions=accuracy(final, parts.decisions),
        test=accuracy(final, parts.test) if what.judged else None,
        parameters=history[-1].parameters if history else _count(net),
        exported=_count(final),
        training_macs=meter.spent
        if meter
        else what.steps * what.batch * step_macs(plain_macs),
        seconds=time.perf_counter() - began,
        cpu_seconds=time.process_time() - cpu,
        incidents=sum(len(decision.incidents) for decision in history),
    )


def mlp(inputs: int, width: int, classes: int, rng_seed: int) -> nn.Sequential:
    """Input -> width -> width -> classes with ReLU."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rng_seed)
        return nn.Sequential(
            nn.Linear(inputs, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, classes),
        )


def accuracy(net: nn.Module, data: Data) -> float:
    """Share of the rows whose class is named first."""
    with torch.no_grad():
        right = net(data.features).argmax(dim=1) == data.labels
    return float(right.double().mean())


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
        beside = model.count().macs - model.macs
        self.spent += rows * step_macs(model.macs, beside, self._behind(training))

    def decision(self) -> None:
        """A decision is taken now."""
        rows = self._rows + ANSWERS * self._example
        self.spent += rows * self._model.macs + self._promises

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
            and order.index(model.place(slot).site.inlet) >= first
        ]
        return behind + sum(self._model.cost_of(slot).macs for slot in living)


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


def _grower(
    what: Run, net: nn.Module, optimizer: AdamW, example: Tensor
) -> Grower | None:
    if what.budget is None:
        return None
    return Grower(
        net,
        optimizer,
        "auto",
        example=example,
        controller="early",
        budget=what.budget,
        decisions=what.epochs,
        blueprints=BLUEPRINTS,
        rng_seed=stream_seed(what.rng_seed, "growth"),
    )


def _batches(
    data: Data, size: int, orders: Generator
) -> Iterator[tuple[Tensor, Tensor]]:
    """Whole batches for ever, in a new order each epoch."""
    count = len(data) // size
    while True:
        order = torch.randperm(len(data), generator=orders)[: count * size]
        features = data.features[order].unflatten(0, (count, size))
        labels = data.labels[order].unflatten(0, (count, size))
        yield from zip(features, labels, strict=True)


def _loss(net: nn.Module, features: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(net(features), labels)


def _count(net: nn.Module) -> int:
    return sum(parameter.numel() for parameter in net.parameters())
