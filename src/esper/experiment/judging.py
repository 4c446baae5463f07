"""One controller on hosts of a real task that no training saw.

The number and the task decide data, first weights and order of batches, whoever
controls: controllers that are judged with the same number are paired, host by host.
"""

from dataclasses import dataclass, fields, replace
from time import perf_counter

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.controller import Controller
from esper.contracts.observation import Observation
from esper.contracts.step import StepResult, VectorWorld
from esper.environment.growing import GrowingWorld
from esper.experiment.collect import play
from esper.experiment.config import World
from esper.experiment.spending import Spending
from esper.experiment.statistics import Floats
from esper.experiment.streams import stream, stream_seed
from esper.experiment.worlds import world_of
from esper.tamiyo.registry import Maker, controller_for
from esper.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of every host under one controller."""

    returns: Floats
    """Score that was gained on the decision rows, less rent."""
    score: Floats
    """Share of decision rows that the final network guesses right."""
    test: Floats
    """Share of test rows that the final network guesses right."""
    area: Floats
    """Mean share of decision rows that were guessed right, over the decisions."""
    added: Floats
    """Parameters added, as a multiple of the host's."""
    macs: Floats
    """Multiply-adds per row, as a multiple of the host's."""
    training_macs: Floats
    """Multiply-adds that the training took, with every pass that was only a look."""
    seconds: Floats
    """Time that the training took, hosts side by side."""
    panicked: NDArray[np.bool_]
    """Whether the host's numbers were no longer finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What was done with every host, decision by decision, and how it went."""

    actions: Int64[Tensor, "decision env head"]
    """Sentences; WAIT where one was not possible, and after the end."""
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
        controller: Who decides, what makes one, or the name of one that does not learn.
        task: What the hosts learn.
        hosts: How many.
        rng_seed: Decides which hosts.
        settings: On what terms they grow; None: the default ones.
        stage: What it is done for; another word stands for other hosts.
    """
    return judge_closely(controller, task, hosts, rng_seed, settings, stage=stage)[0]


def judge_closely(
    controller: Controller | Maker | str,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: World | None = None,
    *,
    stage: str = "judged",
) -> tuple[Judged, Recording]:
    """The same as `judge`, and all that was done."""
    world = judged_world(task, hosts, rng_seed, settings, stage=stage)
    controller = controller_for(controller, world.spec)
    journal = watch(world, controller, rng_seed)
    final = journal.final
    panicked = final["panicked"].bool()
    spending = Spending(
        task=world.task,
        blueprints=world.spec.blueprints,
        decision_rows=len(world.task.splits(rng_seed).decisions),
        measure_every=(settings or World()).measure_every,
    )
    judged = Judged(
        returns=journal.returns,
        score=final["score"].numpy(),
        test=final["test"].numpy(),
        area=journal.area,
        added=final["added"].numpy(),
        macs=final["macs"].numpy(),
        training_macs=spending.total(*journal.lives(), panicked),
        seconds=journal.seconds,
        panicked=panicked.numpy(),
    )
    return judged, journal.recording()


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
    return world_of(task, hosts, number, settings)


def watch(world: GrowingWorld, controller: Controller, rng_seed: int) -> "Journal":
    """Let a controller live through one episode everywhere, and note it all."""
    journal = Journal(world)
    began = perf_counter()
    returns = play(journal, controller, stream(rng_seed, "judging"))
    journal.seconds[:] = (perf_counter() - began) / world.num_envs
    journal.returns[:] = returns.numpy()
    return journal


class Journal(VectorWorld):
    """A world, and what became of the first episode of every host in it."""

    def __init__(self, world: GrowingWorld) -> None:
        self.world = world
        names = ("score", "test", "added", "macs", "panicked")
        hosts = world.num_envs
        self.final = {n: torch.zeros(hosts, dtype=torch.float64) for n in names}
        """What the world reported of each host at its end."""
        self.returns, self.seconds = np.zeros(hosts), np.zeros(hosts)
        self._scores = torch.zeros(hosts, dtype=torch.float64)
        self._running = torch.ones(hosts, dtype=torch.bool)
        self._pages: list[Recording] = []

    @property
    def spec(self) -> ActionSpec:
        """What can be said in this world."""
        return self.world.spec

    @property
    def num_envs(self) -> int:
        """How many hosts."""
        return self.world.num_envs

    @property
    def area(self) -> Floats:
        """Mean score after a decision; 0 since a panic."""
        means: Floats = self._scores.numpy() / self.world.task.horizon
        return means

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        return self.world.reset()

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Step the world and note what came of it."""
        result = self.world.step(actions)
        lived, report = self.world.trained_lives, self.world.ended
        assert lived is not None  # there was a step
        # Where an episode has ended, what is seen next is of another one.
        score = result.observation.host.score.double()
        if report is not None:
            score[report.env] = torch.where(report.panicked, 0.0, report.score.double())
            # A host that ended before does so again if its next episode panics.
            first = self._running[report.env]
            for name, values in self.final.items():
                values[report.env[first]] = getattr(report, name)[first].double()
        score = torch.where(self._running, score, 0.0)
        done = self._running & ~self.world.illegal
        page = Recording(
            actions=torch.where(done[:, None], actions, 0)[None],
            stage=lived.stage[None],
            blueprint=lived.blueprint[None],
            alpha=lived.alpha[None],
            score=score[None],
            lived=self._running[None],
        )
        self._pages.append(page)
        self._scores += score
        self._running = self._running & ~(result.terminated | result.truncated)
        return result

    def lives(
        self,
    ) -> tuple[
        Int64[Tensor, "decision env slot"],
        Int64[Tensor, "decision env slot"],
        Bool[Tensor, "decision env"],
    ]:
        """Stage and blueprint of every seed in every training, and who still lived."""
        whole = self.recording()
        return whole.stage, whole.blueprint, whole.lived

    def recording(self) -> Recording:
        """All that was done so far, and what came of it."""
        pages = self._pages
        return Recording(
            **{
                each.name: torch.cat([getattr(page, each.name) for page in pages])
                for each in fields(Recording)
            }
        )
