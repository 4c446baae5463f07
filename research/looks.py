"""Which of the things that could be looked at foretell what growing brings?

Hosts of drawn tasks, by the clock of compute: one never grows, the others of the same
luck double one layer at a quarter, 40 %, 55 % or 70 % of their decisions. What planting
brought is their mean score over all stops less that of the host that never grew, as a
share of its errors. Every signal is taken before the decision, of the host as it was;
the contribution, the score that is lost without the new units, at the decision after
it. Rank correlations are over all hosts, and within kinds of task, averaged over kinds.
What a look costs is its share of the multiply-adds of an episode.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Generator

from benchmarks import timing
from benchmarks.timing import Report
from esper.environment import growing
from esper.environment.clock import BACKWARD
from esper.environment.growing import GrowingWorld
from esper.environment.settings import LEAST_ERROR, LOOKED_ROWS
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.scripts import Scripted
from esper.tasks.family import KINDS, drawn_task
from esper.tasks.task import Task
from esper.training.recordings import world_settings

MOMENTS: Final = (0.25, 0.4, 0.55, 0.7)
DOUBLE: Final = 3
"""The script's code of planting the third amount, twice as wide, at the first place."""
OBSERVED: Final = ("score", "score_slope", "loss", "loss_slope", "plateau", "compute")
"""Signals that a controller sees; the loss of a minibatch costs nothing."""
TRIED: Final = ("units", "gap", "contribution")
"""Signals that it does not see: the width of the layer, which is known, and two that
take another look, at as many training rows and without the seed."""
LEAST: Final = 6
"""Hosts of a kind from which a correlation within it is taken."""
Row = dict[str, float]


def run(
    tasks: int = 2, hosts: int = 2, rng_seed: int = 0, rows: int = LOOKED_ROWS
) -> Report:
    """One row for each signal.

    Args:
        tasks: Tasks of every kind.
        hosts: Hosts of each task, and moments.
        rng_seed: Which family.
        rows: Decision rows of a look between two stops.
    """
    growing.LOOKED_ROWS = rows
    kinds = ("parity", "boxes") if timing.QUICK else KINDS
    found: dict[str, list[Row]] = {}
    for number in range(tasks * len(kinds)):
        task = drawn_task(rng_seed, number, kinds)
        found.setdefault(task.description, []).extend(measured(task, hosts, number))
    whole = [row for rows in found.values() for row in rows]
    report = Report(
        "What foretells the gain of planting",
        ("signal", "rank correlation", "within kinds", "cost, % of an episode"),
        notes=[
            f"{len(whole)} plantings on hosts of {len(found)} kinds; the gain is "
            f"{np.mean([row['gain'] for row in whole]):+.3f} of never's errors in the "
            f"mean, {np.std([row['gain'] for row in whole]):.3f} its deviation."
        ],
    )
    for name in (*OBSERVED, *TRIED):
        inside = [_correlation(own, name) for own in found.values()]
        cost = "look" if name.startswith("score") or name == "plateau" else name
        report.add(
            name,
            _correlation(whole, name),
            float(np.nanmean(inside)) if not np.isnan(inside).all() else None,
            100 * float(np.mean([row.get(f"cost {cost}", 0.0) for row in whole])),
        )
    return report


def _correlation(rows: Sequence[Row], name: str) -> float:
    """Spearman's, or NaN if there is nothing to correlate."""
    pairs = np.array([(row[name], row["gain"]) for row in rows])
    if len(pairs) < LEAST or (np.ptp(pairs, axis=0) == 0).any():
        return float("nan")
    return float(spearmanr(*pairs.T).statistic)


@torch.no_grad()
def measured(task: Task, hosts: int, rng_seed: int) -> list[Row]:
    """What was seen before every planting, and what it brought."""
    group = 1 + len(MOMENTS)
    settings = replace(world_settings("anytime"), group_size=group)
    world = GrowingWorld(task, hosts * group, rng_seed, settings=settings)
    horizon = world.task.horizon
    moments = [int(share * horizon) for share in MOMENTS]
    codes = np.zeros((hosts, group, horizon), dtype=np.int64)
    for script, moment in enumerate(moments, start=1):
        codes[:, script, moment] = DOUBLE
    codes = codes.reshape(-1, horizon)
    controller = Scripted(world.spec, codes, world.cohort.places)
    observation, state = world.reset(), None
    before: list[dict[str, torch.Tensor]] = []
    total, look_cost = torch.zeros(world.num_envs), torch.zeros(world.num_envs)
    for _ in range(horizon):
        seen = {name: getattr(observation.host, name) for name in OBSERVED}
        train, held = world._episodes.rows[:2]
        alpha, looked = observation.slots.alpha, world.looked_rows
        seen["gap"] = world.cohort.score(*train, alpha, looked) - observation.host.score
        seen["units"] = world.cohort.widths()[:, 0]
        without = world.cohort.score(*held, torch.zeros_like(alpha), looked)
        seen["contribution"] = observation.host.score - without
        before.append(seen)
        masks = compute_masks(observation, world.spec)
        actions, state = controller.decide(observation, masks, state, Generator())
        result = world.step(actions)
        looks = world.looked_rows / (task.batch * (1 + BACKWARD))
        look_cost += looks * world.trained_macs / task.unit.macs
        observation = result.observation
        if result.report is not None:
            total = result.report.training_macs / world.batch_macs()
            test, objective = result.report.score, result.report.objective
    grouped = objective.view(hosts, group)
    error = (1 - test.view(hosts, group)[:, :1]).clamp(min=LEAST_ERROR)
    gain = ((grouped - grouped[:, :1]) / error).numpy()
    share = (look_cost / total).view(hosts, group).numpy()
    found = []
    for host in range(hosts):
        for script, moment in enumerate(moments, start=1):
            env = host * group + script
            row = {
                name: float(before[moment][name][env]) for name in (*OBSERVED, *TRIED)
            }
            # Of the new units themselves, once there are any.
            row["contribution"] = float(before[moment + 1]["contribution"][env])
            row |= {"gain": float(gain[host, script])}
            one = float(share[host, script])
            row |= {"cost look": one, "cost gap": one, "cost contribution": one}
            found.append(row)
    return found
