"""One controller on hosts of a real task that no training saw.

The number and the task decide data, first weights and order of batches, whoever
controls: controllers that are judged with the same number are paired, host by host.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool
from numpy.typing import NDArray
from torch import Tensor

from esper.contracts.controller import Controller
from esper.environment.growing import GrowingWorld
from esper.experiment.collect import play
from esper.experiment.statistics import Floats
from esper.experiment.streams import stream, stream_seed
from esper.tamiyo.named import named
from esper.tasks.task import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What became of every host under one controller."""

    returns: Floats
    """Score that was gained on the decision rows, less rent."""
    test: Floats
    """Share of test rows that the final network guesses right."""
    added: Floats
    """Parameters added, as a multiple of the host's."""
    macs: Floats
    """Multiply-adds per row, as a multiple of the host's."""
    panicked: NDArray[np.bool_]
    """Whether the host's numbers were no longer finite."""


def judge(
    controller: Controller | str, task: Task, hosts: int, rng_seed: int
) -> Judged:
    """One episode of a controller on every host.

    Args:
        controller: Who decides, or the name of one that does not learn.
        task: What the hosts learn.
        hosts: How many.
        rng_seed: Decides which hosts.
    """
    world = judged_world(task, hosts, rng_seed)
    if isinstance(controller, str):
        controller = named(controller, world.spec)
    final = {name: torch.zeros(hosts) for name in ("test", "added", "macs", "panicked")}

    def keep(ended: Bool[Tensor, " env"]) -> None:
        report = world.ended
        assert report is not None  # the world's own word for `ended`
        # A host that ended before does so again if its next episode panics.
        counts = ended[report.env]
        for name, values in final.items():
            values[report.env[counts]] = getattr(report, name)[counts].float()

    returns = play(world, controller, stream(rng_seed, "judging"), on_end=keep)
    return Judged(
        returns=returns.double().numpy(),
        test=final["test"].double().numpy(),
        added=final["added"].double().numpy(),
        macs=final["macs"].double().numpy(),
        panicked=final["panicked"].bool().numpy(),
    )


def judged_world(task: Task, hosts: int, rng_seed: int) -> GrowingWorld:
    """The hosts of a task that a number stands for."""
    return GrowingWorld(task, hosts, stream_seed(rng_seed, f"judged, {task.name}"))
