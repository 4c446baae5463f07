"""What training a host of a cohort took, in multiply-adds, from its seeds' lives.

    decision = batches * rows * step + decision rows * felt + look

A step and a promise are counted as `growth.macs` does: three forward passes of all
that is felt; while seeds train, a whole shadow pass on top. After every decision, and
once at the start, the decision rows are scored. A look, where it is due, is a promise
of every place between dense layers, for units with a bias and without, and a pass over
rows that are tried with all that is felt and for every seed that can still be pruned.
Nothing is left out because an engine could reuse it. Test rows are no part of training.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Int64
from torch import Tensor

from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.stages import LIVING, Stage
from esper.environment.growing import CONTRIBUTION_ROWS, SCORED_ROWS
from esper.environment.memory_layout import (
    DENSE,
    layer_shapes,
    place_geometries,
)
from esper.experiment.statistics import Floats
from esper.growth.blueprints.seed import cost
from esper.growth.macs import promise_macs, step_macs
from esper.growth.promise import LEAST_ROWS
from esper.tasks.task import Task

Garden = tuple[tuple[Stage, int], ...]
"""Stage and blueprint (-1: none) of every slot of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The prices of one task.

    Args:
        task: With the horizon and the batches that are played.
        blueprints: What can be planted, by index.
        decision_rows: Rows that there are to decide on.
        measure_every: Decisions between two looks.
    """

    task: Task
    blueprints: tuple[Blueprint, ...]
    decision_rows: int
    measure_every: int

    def total(
        self,
        stage: Int64[Tensor, "decision env slot"],
        blueprint: Int64[Tensor, "decision env slot"],
        lived: Bool[Tensor, "decision env"],
        panicked: Bool[Tensor, " env"],
    ) -> Floats:
        """Multiply-adds that each host took.

        Args:
            stage: Of every seed, as it was while the host trained after a decision.
            blueprint: The same, -1 where there is no seed.
            lived: Whether the episode was still running.
            panicked: Whether it ended in a panic, which is not looked at.
        """
        spent = np.empty(stage.shape[1])
        known: dict[tuple[Garden, bool], int] = {}
        for env in range(stage.shape[1]):
            count = int(lived[:, env].sum())
            pairs = zip(
                *(part[:count, env].tolist() for part in (stage, blueprint)),
                strict=True,
            )
            gardens = [tuple(zip(map(Stage, a), b, strict=True)) for a, b in pairs]
            looks = [
                self._due(n) and not (n == count and bool(panicked[env]))
                for n in range(1, count + 1)
            ]
            counted = Counter(zip(gardens, looks, strict=True))
            for key in counted.keys() - known.keys():
                known[key] = self.decision(*key)
            spent[env] = self.start + sum(known[k] * n for k, n in counted.items())
        return spent

    @property
    def start(self) -> int:
        """The score of a host that has not trained."""
        return self._judged * self.task.host.macs

    def decision(self, garden: Garden, look: bool) -> int:
        """From one decision to the next."""
        task, maps = self.task, tuple(layer_shapes(self.task.host))
        places = len(maps) - 1
        seeds = [
            (slot % places, stage, self._seed(slot % places, kind))
            for slot, (stage, kind) in enumerate(garden)
            if stage is not Stage.DORMANT
        ]
        felt = task.host.macs + sum(
            price for _, stage, price in seeds if stage is not Stage.TRAINING
        )
        young = [(at, price) for at, stage, price in seeds if stage is Stage.TRAINING]
        behind = 0
        if young:
            outlet = 1 + min(at for at, _ in young)
            behind = sum(own.weights * own.positions for own in maps[outlet + 1 :])
            behind += sum(price for at, _, price in seeds if at > outlet)
        step = step_macs(felt, sum(price for _, price in young), behind)
        spent = task.decision_every * task.batch * step + self._judged * felt
        if not look:
            return spent
        tried = [
            felt + (price if stage is Stage.TRAINING else -price)
            for _, stage, price in seeds
            if stage in LIVING
        ]
        rows = min(CONTRIBUTION_ROWS, self.decision_rows)
        return spent + self._promises() + rows * (sum(tried) + felt * bool(tried))

    @property
    def _judged(self) -> int:
        return min(SCORED_ROWS, self.decision_rows)

    def _due(self, decision: int) -> bool:
        return decision % self.measure_every == 0 and decision < self.task.horizon

    def _seed(self, place: int, kind: int) -> int:
        """Multiply-adds per row of a seed."""
        geometry = place_geometries(self.task.host)[place]
        return cost(self.blueprints[kind], geometry).macs

    def _promises(self) -> int:
        """What one look at all places takes."""
        if self.task.batch // 2 < LEAST_ROWS:
            return 0
        largest = max(blueprint.size for blueprint in self.blueprints)
        kinds = len({blueprint.form is Form.LOW_RANK for blueprint in self.blueprints})
        return kinds * sum(
            promise_macs(self.task.batch, first.inputs + 1, last.outputs, largest)
            for first, last in pairwise(layer_shapes(self.task.host))
            if first.kind == last.kind == DENSE
        )
