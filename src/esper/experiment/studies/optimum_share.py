"""Judging: every controller on the same instances, beside the best that is possible.

0 % is the better of never and random, 100 % the exact optimum of the very instances
that were played. Intervals are over instances, drawn anew for all arms together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from esper.contracts.controller import Controller
from esper.environment.instances import Instances, draw_instances
from esper.environment.optimum import best_memoryless_returns, optimal_returns
from esper.environment.simulated import SimulatedWorld
from esper.experiment.collect import play
from esper.experiment.statistics import Floats, Interval, bootstrap, mean_interval
from esper.experiment.streams import stream
from esper.tamiyo.controls import Never, Random
from esper.tamiyo.heuristic import PromiseGreedy

OPTIMUM, MEMORYLESS = "optimum", "best without memory"
CONTROLS: Mapping[str, Controller] = {
    "never": Never(),
    "random": Random(),
    "heuristic": PromiseGreedy(),
}


@dataclass(frozen=True, slots=True)
class Score:
    """One arm on one set of instances."""

    name: str
    mean_return: Interval
    share: Interval
    """Percent of the way from the better of never and random to the optimum."""


def held_out(num: int, *, hidden: bool) -> Instances:
    """Instances from a random stream that no training draws from."""
    generator = stream(0, f"held out, hidden {hidden}")
    return draw_instances(num, generator, torch.full((num,), hidden))


def returns_of(controller: Controller, instances: Instances) -> Floats:
    """Return of `controller` on each instance."""
    world = SimulatedWorld.from_instances(instances)
    returns = play(world, controller, stream(0, "judging"))
    return returns.double().numpy()


def control_returns(instances: Instances) -> dict[str, Floats]:
    """Returns of the controllers that do not learn, and the bounds."""
    arms = {name: returns_of(arm, instances) for name, arm in CONTROLS.items()}
    if bool(instances.hidden.all()):
        arms[MEMORYLESS] = best_memoryless_returns(instances).numpy()
    arms[OPTIMUM] = optimal_returns(instances).numpy()
    return arms


def scores(arms: Mapping[str, Floats]) -> list[Score]:
    """Mean return and share of the optimum of every arm, with intervals."""
    never, random, optimum = arms["never"], arms["random"], arms[OPTIMUM]
    return [
        Score(
            name,
            mean_interval(returns),
            bootstrap(np.stack([never, random, returns, optimum]), _share),
        )
        for name, returns in arms.items()
    ]


def share_of_optimum(arms: Mapping[str, Floats], name: str) -> float:
    """Percent of the optimum that one arm reaches."""
    rows: Sequence[Floats] = [arms[key] for key in ("never", "random", name, OPTIMUM)]
    return float(_share(np.stack(rows).mean(axis=1, keepdims=True))[0])


def _share(means: Floats) -> Floats:
    never, random, arm, optimum = means
    base = np.maximum(never, random)
    share: Floats = 100.0 * (arm - base) / (optimum - base)
    return share
