"""One controller on hosts of a real task that no training saw, and what it cost.

The number and the task decide data, first weights and order of batches, whoever
controls: controllers that are judged with the same number are paired, host by host.

The cost of training a host is counted in multiply-adds from its seeds' lifecycles:

    decision = batches * rows * step + decision rows * forward + look

A step and a promise are counted as `growth.macs` does: three forward passes of all
active parts; while seeds train, a whole shadow pass on top. After every decision, and
once at the start, the decision rows are scored. A look, where it is due, is a promise
of every place between dense layers, for units with a bias and without, and a pass over
rows that are tried with all active parts and for every seed that can still be pruned.
Nothing is left out because an engine could reuse it. Test rows are no part of training.
"""

from collections import Counter
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEAD, Op
from esper.contracts.blueprints import Blueprint, Form
from esper.contracts.stages import LIVING, Stage
from esper.contracts.world import Controller, StepResult
from esper.environment.growing import CONTRIBUTION_ROWS, SCORED_ROWS, GrowingWorld
from esper.environment.memory_layout import place_geometries
from esper.environment.settings import WorldSettings as World
from esper.experiment.records import Floats, Judged
from esper.experiment.rollout import play
from esper.experiment.streams import stream, stream_seed
from esper.growth.blueprints.seed import cost
from esper.growth.macs import promise_macs, step_macs
from esper.growth.promise import LEAST_ROWS
from esper.tamiyo.registry import Maker, controller_for
from esper.tasks.hosts import DENSE
from esper.tasks.task import Task

SlotContents = tuple[tuple[Stage, int], ...]
"""Stage and blueprint (-1: none) of every slot of a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """One episode of every host, decision by decision."""

    actions: Int64[Tensor, "decision env head"]
    """WAIT where the action was not possible, and after the end."""
    stage: Int64[Tensor, "decision env slot"]
    """Of the seeds, in the training after the decision."""
    blueprint: Int64[Tensor, "decision env slot"]
    """The same; -1 where there is no seed."""
    alpha: Float[Tensor, "decision env slot"]
    score: Float[Tensor, "decision env"]
    """On the decision rows, after that training; 0 since a panic."""
    lived: Bool[Tensor, "decision env"]
    """Whether the episode was still running at the decision."""

    @property
    def planted(self) -> Int64[Tensor, " env"]:
        """How many seeds were planted in each host."""
        return (self.actions[..., HEAD["op"]] == Op.GERMINATE.value).sum(dim=0)


def judge(
    controller: Controller | Maker | str,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: World | None = None,
    *,
    stage: str = "judged",
) -> Judged:
    """One episode of a controller on every host.

    Args:
        controller: A controller, a factory of one, or the name of one.
        task: What the hosts learn.
        hosts: How many.
        rng_seed: Decides which hosts.
        settings: How they grow; None: the defaults.
        stage: Another stage stands for other hosts.
    """
    world = judged_world(task, hosts, rng_seed, settings, stage=stage)
    return judge_in(world, controller, rng_seed)[0]


def judge_in(
    world: GrowingWorld, controller: Controller | Maker | str, rng_seed: int
) -> tuple[Judged, Recording]:
    """One episode of a controller on every host of a world, and its recording."""
    log = play_logged(world, controller_for(controller, world.spec), rng_seed)
    cost = TrainingCost(
        task=world.task,
        blueprints=world.spec.blueprints,
        decision_rows=len(world.task.splits(rng_seed).decisions),
        measure_every=world.settings.measure_every,
    )
    recording = log.recording()
    return log.judged(cost.total(recording, log.final["panicked"].bool())), recording


def judged_world(
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: World | None = None,
    *,
    stage: str = "judged",
) -> GrowingWorld:
    """The hosts of a task that a number stands for."""
    number = stream_seed(rng_seed, f"{stage}, {task.name}")
    # Judged hosts differ from each other, whatever the training groups.
    settings = replace(settings or World(), group_size=1)
    return GrowingWorld(task, hosts, number, settings=settings)


def play_logged(
    world: GrowingWorld, controller: Controller, rng_seed: int
) -> "EpisodeLog":
    """One episode of a controller in every environment, and its log."""
    log = EpisodeLog(world)
    began = perf_counter()
    returns = play(world, controller, stream(rng_seed, "judging"), on_step=log.add)
    log.seconds[:] = (perf_counter() - began) / world.num_envs
    log.returns[:] = returns.numpy()
    return log


class EpisodeLog:
    """The first episode of every host of a world."""

    def __init__(self, world: GrowingWorld) -> None:
        self.world = world
        names = ("score", "test", "added", "macs", "panicked")
        hosts = world.num_envs
        self.final = {n: torch.zeros(hosts, dtype=torch.float64) for n in names}
        """What the world reported of each host at its end."""
        self.returns, self.seconds = np.zeros(hosts), np.zeros(hosts)
        self._running = torch.ones(hosts, dtype=torch.bool)
        self._parts: list[Recording] = []

    def add(self, actions: Int64[Tensor, "env head"], result: StepResult) -> None:
        """One step of the world."""
        lived = self.world.trained_lives
        assert lived is not None  # there was a step
        assert result.illegal is not None
        # Where an episode has ended, the next observation is of another one.
        score = result.observation.host.score.double()
        if (report := result.report) is not None:
            score[report.env] = torch.where(report.panicked, 0.0, report.score.double())
            # A host that ended before does so again if its next episode panics.
            first = self._running[report.env]
            for name, values in self.final.items():
                values[report.env[first]] = getattr(report, name)[first].double()
        done = self._running & ~result.illegal
        self._parts.append(
            Recording(
                actions=torch.where(done[:, None], actions, 0)[None],
                stage=lived.stage[None],
                blueprint=lived.blueprint[None],
                alpha=lived.alpha[None],
                score=torch.where(self._running, score, 0.0)[None],
                lived=self._running[None],
            )
        )
        self._running = self._running & ~(result.terminated | result.truncated)

    def recording(self) -> Recording:
        """All decisions so far."""
        names = [each.name for each in fields(Recording)]
        return Recording(
            **{n: torch.cat([getattr(one, n) for one in self._parts]) for n in names}
        )

    def judged(self, training_macs: Floats) -> Judged:
        """The results of every host; the score is 0 since a panic."""
        total = sum(part.score[0].double() for part in self._parts)
        final = {name: values.numpy() for name, values in self.final.items()}
        panicked = final.pop("panicked").astype(bool)
        return Judged(
            returns=self.returns,
            area=np.asarray(total) / self.world.task.horizon,
            training_macs=training_macs,
            seconds=self.seconds,
            panicked=panicked,
            **final,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """Multiply-adds of training hosts of one task.

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

    def total(self, recording: Recording, panicked: Bool[Tensor, " env"]) -> Floats:
        """Multiply-adds that each host took.

        Args:
            recording: With every seed as it was while the host trained.
            panicked: Where the episode ended in a panic, which is not looked at.
        """
        stage, blueprint = recording.stage, recording.blueprint
        spent = np.empty(stage.shape[1])
        known: dict[tuple[SlotContents, bool], int] = {}
        for env in range(stage.shape[1]):
            count = int(recording.lived[:, env].sum())
            pairs = zip(
                *(part[:count, env].tolist() for part in (stage, blueprint)),
                strict=True,
            )
            slots = [tuple(zip(map(Stage, a), b, strict=True)) for a, b in pairs]
            looks = [
                self._due(n) and not (n == count and bool(panicked[env]))
                for n in range(1, count + 1)
            ]
            counted = Counter(zip(slots, looks, strict=True))
            for key in counted.keys() - known.keys():
                known[key] = self.decision(*key)
            spent[env] = self.start + sum(known[k] * n for k, n in counted.items())
        return spent

    @property
    def start(self) -> int:
        """The score of a host that has not trained."""
        return self._judged * self.task.host.macs

    def decision(self, slots: SlotContents, look: bool) -> int:
        """From one decision to the next."""
        task, maps = self.task, self.task.host.layers
        places = len(maps) - 1
        seeds = [
            (slot % places, stage, self._seed(slot % places, kind))
            for slot, (stage, kind) in enumerate(slots)
            if stage is not Stage.DORMANT
        ]
        active = task.host.macs + sum(
            price for _, stage, price in seeds if stage is not Stage.TRAINING
        )
        young = [(at, price) for at, stage, price in seeds if stage is Stage.TRAINING]
        behind = 0
        if young:
            outlet = 1 + min(at for at, _ in young)
            behind = sum(own.weights * own.positions for own in maps[outlet + 1 :])
            behind += sum(price for at, _, price in seeds if at > outlet)
        step = step_macs(active, sum(price for _, price in young), behind)
        spent = task.decision_every * task.batch * step + self._judged * active
        if not look:
            return spent
        tried = [
            active + (price if stage is Stage.TRAINING else -price)
            for _, stage, price in seeds
            if stage in LIVING
        ]
        rows = min(CONTRIBUTION_ROWS, self.decision_rows)
        return spent + self._promises() + rows * (sum(tried) + active * bool(tried))

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
        """Multiply-adds of one look at all places."""
        if self.task.batch // 2 < LEAST_ROWS:
            return 0
        largest = max(blueprint.size for blueprint in self.blueprints)
        kinds = len({blueprint.form is Form.LOW_RANK for blueprint in self.blueprints})
        return kinds * sum(
            promise_macs(self.task.batch, first.inputs + 1, last.outputs, largest)
            for first, last in pairwise(self.task.host.layers)
            if first.kind == last.kind == DENSE
        )
