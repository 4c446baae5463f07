"""Baselines that do not grow: a plain network of equal size or cost.

    static    the host with all hidden layers wider, from the start: as many parameters
              as the reference ended with on average, or the most that are not more
    longer    the host as it is, trained on until it has cost as many multiply-adds as
              the reference; the learning rate's rise and fall are stretched along

Both have the hosts' data, order of batches, random stream and terms, and pay rent for
what they have more than the host. The learning rate is the task's own, tuned for
neither. There is no controller, so nothing is measured and only training counts:
three forward passes per row. The reference is the learned controller, or `early`.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Final

import numpy as np

from esper.contracts.errors import BadInput
from esper.environment.settings import WorldSettings as World
from esper.experiment.judging import judged_world, play_logged
from esper.experiment.records import STATIC, Judged
from esper.growth.macs import step_macs
from esper.tamiyo.rule_based import Never
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.task import Task

NO_LOOK: Final = 10_000
"""Decisions between two looks: more than any episode has."""
LONGEST: Final = 10_000
"""Decisions of an episode, at most."""


def judge_static(
    name: str,
    task: Task,
    hosts: int,
    rng_seed: int,
    reference: Judged,
    settings: World | None = None,
    *,
    stage: str = "judged",
) -> Judged:
    """One static arm on the hosts that the reference was judged on.

    Args:
        name: Which of `STATIC`.
        task: What the hosts learn.
        hosts: How many.
        rng_seed: Decides which hosts.
        reference: Results of the arm to be measured by.
        settings: How they grow; None: the defaults.
        stage: As for `judge`.
    """
    if name not in STATIC:
        raise BadInput(f"no static arm {name!r}; there are {', '.join(STATIC)}.")
    if name == "static":
        size = task.host.parameters * (1.0 + float(reference.added.mean()))
        host, spend = widened(task.host, size), None
    else:
        host, spend = task.host, float(reference.training_macs.mean())
    own = (settings or World()).horizon or task.horizon
    return judge_plain(
        host, task, hosts, rng_seed, settings, spend=spend, least=own, stage=stage
    )


def judge_plain(
    host: Host,
    task: Task,
    hosts: int,
    rng_seed: int,
    settings: World | None = None,
    *,
    spend: float | None = None,
    least: int = 1,
    stage: str = "judged",
) -> Judged:
    """A network that does not grow, on the data of the hosts that a number stands for.

    Args:
        host: Trained in place of the task's own, which rent is relative to.
        task: What is learnt.
        hosts: How many.
        rng_seed: Decides which hosts.
        settings: How others grow; None: the defaults.
        spend: Multiply-adds to train for; None: as many decisions as others have.
        least: Decisions to train for, at least, however little there is to spend.
        stage: As for `judge`.
    """
    settings = settings or World()
    plain = judged_world(task, hosts, rng_seed, settings, stage=stage)
    own = plain.task
    # All arms begin with the score of the same plain host.
    before = plain.reset().host
    horizon = own.horizon
    if spend is not None:
        decision = own.decision_every * own.batch * step_macs(host.macs)
        horizon = min(max(round(spend / decision), least), LONGEST)
    terms = replace(settings, horizon=horizon, measure_every=NO_LOOK)
    trained = replace(task, host=host)
    world = judged_world(trained, hosts, rng_seed, terms, stage=stage)
    log = play_logged(world, Never(), rng_seed)
    decisions = log.recording().lived.sum(dim=0).double().numpy()
    spent = decisions * own.decision_every * own.batch * step_macs(host.macs)
    judged = log.judged(spent)
    added = host.parameters / task.host.parameters - 1.0
    worth = judged.score - before.rent.double().numpy() * added
    start = before.score.double().numpy()
    return replace(
        judged,
        returns=np.where(judged.panicked, -1.0, worth) - start,
        added=np.full(hosts, added),
        macs=np.full(hosts, host.macs / task.host.macs),
    )


def widened(host: Host, parameters: int | float) -> Host:
    """The host with hidden layers as wide as so many parameters allow, in proportion.

    It is never narrower than it was.
    """
    match host:
        case MlpHost():
            hidden, ends = host.widths[1:-1], (host.widths[0], host.widths[-1])
            return _largest(
                hidden, lambda wide: MlpHost((ends[0], *wide, ends[1])), parameters
            )
        case CnnHost():
            return _largest(
                host.channels, lambda wide: replace(host, channels=wide), parameters
            )


def _largest(
    hidden: tuple[int, ...],
    make: Callable[[tuple[int, ...]], Host],
    parameters: int | float,
) -> Host:
    best = make(hidden)
    narrowest = min(hidden)
    for more in count(1):
        wide = make(tuple(n * (narrowest + more) // narrowest for n in hidden))
        if wide.parameters > parameters:
            return best
        best = wide
    raise AssertionError  # count() does not end
