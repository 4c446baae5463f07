"""Everybody who is compared: what each arm does with the hosts of one block.

Arms know nothing of the ledger. What they are made from, be it a controller's folder
or what Tamiyo did on the same hosts, is handed to them as `Supplies`; they return one
result for each host and, where somebody decided, all that was done.

    random       as many seeds as Tamiyo planted, in the same time, at random
    replay       its actions on the next host, replay-elsewhere: on another task
    static       a plain network of as many parameters as its, static-macs: trained
                 until it has cost as many multiply-adds
    longer       the host as it is, trained until it has cost as many multiply-adds
    scratch      hidden layers as wide as its at the end, from the start
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from esper.contracts.actions import HEAD, NUM_HEADS, Op
from esper.contracts.blueprints import Form
from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.environment.cohort import find_blueprints
from esper.experiment.config import World
from esper.experiment.controllers import load_controller
from esper.experiment.judging import (
    Recording,
    judge_in,
    judge_plain,
    judged_world,
    widened,
)
from esper.experiment.records import Judged
from esper.tamiyo.registry import Maker
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.task import Task
from evidence import contextual, search
from evidence.baselines import MatchedRandom, Replay
from evidence.ledger import Recorded, Result
from evidence.protocol import APART

STAGE: Final = "evidence"
"""What the hosts are for: no training sees these."""
INACTIVE: Final = (Stage.DORMANT, Stage.TRAINING)
"""Stages in which a seed adds nothing to the host's activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supplies:
    """What an arm is made from; most arms need little of it."""

    controller: Path | None = None
    """Folder of the run that learnt."""
    facts: str = ""
    """What search or fit found, as JSON."""
    added: float = 0.0
    """Parameters that Tamiyo added, mean over its controllers and the hosts."""
    training_macs: float = 0.0
    """Multiply-adds that its trainings took, the same."""
    recordings: tuple[Recorded, ...] = ()
    """What it did, for each host, on it or wherever is meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One arm on the hosts of one block."""

    stage: str
    arm: str
    member: int
    task: Task
    settings: tuple[str, ...]
    """What the results count for."""
    world: World
    rate: float
    block: int
    hosts: int
    record: str = ""
    """The name that all that was done is kept under; empty: it is not kept."""


Outcome = tuple[Judged, Recording | None]
Arm = Callable[[Batch, Supplies], Outcome]


def carry_out(
    batch: Batch, supplies: Supplies
) -> tuple[list[Result], tuple[Recorded, ...]]:
    """What became of every host, and what was done with it."""
    judged, recording = ARMS.get(batch.arm, _learned)(batch, supplies)
    planted = [0] * batch.hosts if recording is None else recording.planted.tolist()
    results = [
        Result(
            stage=batch.stage,
            arm=batch.arm,
            member=batch.member,
            task=batch.task.name,
            setting=setting,
            rate=batch.rate,
            seed=APART * batch.block + host,
            score=float(judged.score[host]),
            test=float(judged.test[host]),
            added=float(judged.added[host]),
            macs=float(judged.macs[host]),
            training_macs=float(judged.training_macs[host]),
            area=float(judged.area[host]),
            seconds=float(judged.seconds[host]),
            panicked=int(judged.panicked[host]),
            planted=planted[host],
        )
        for setting in batch.settings
        for host in range(batch.hosts)
    ]
    if recording is None or not batch.record:
        return results, ()
    return results, tuple(_kept(batch, recording, n) for n in range(batch.hosts))


def _grown(batch: Batch, who: Maker | str) -> Outcome:
    """Somebody decides."""
    world = judged_world(batch.task, batch.hosts, batch.block, batch.world, stage=STAGE)
    recording = judge_in(world, who, batch.block)
    return recording.judged, recording


def _plain(
    batch: Batch, host: Host, spend: float | None = None, hosts: int | None = None
) -> Outcome:
    """Nobody decides."""
    judged = judge_plain(
        host,
        batch.task,
        hosts or batch.hosts,
        batch.block,
        batch.world,
        spend=spend,
        stage=STAGE,
    )
    return judged, None


def _named(batch: Batch, supplies: Supplies) -> Outcome:
    return _grown(batch, batch.arm)


def _learned(batch: Batch, supplies: Supplies) -> Outcome:
    if supplies.controller is None:
        raise BadInput(f"{batch.arm} needs the folder of a controller; got none.")
    return _grown(batch, load_controller(supplies.controller))


def _searched(batch: Batch, supplies: Supplies) -> Outcome:
    return _grown(batch, search.from_json(supplies.facts))


def _bandit(batch: Batch, supplies: Supplies) -> Outcome:
    return _grown(batch, contextual.from_json(supplies.facts))


def _random(batch: Batch, supplies: Supplies) -> Outcome:
    horizon = batch.world.horizon or batch.task.horizon
    germinate = Op.GERMINATE.value
    times = [
        np.flatnonzero(one.actions[:, HEAD["op"]] == germinate)
        for one in _all(batch, supplies)
    ]
    counts = torch.tensor([len(each) for each in times])
    first = torch.tensor([each[0] / horizon if len(each) else 0.0 for each in times])
    last = torch.tensor([each[-1] / horizon if len(each) else 0.0 for each in times])
    return _grown(
        batch, lambda spec: MatchedRandom(spec, counts, first, last, horizon=horizon)
    )


def _replay(batch: Batch, supplies: Supplies) -> Outcome:
    recordings = _all(batch, supplies)
    actions = stacked_actions(recordings)
    return _grown(batch, lambda spec: Replay(actions))


def _static(batch: Batch, supplies: Supplies) -> Outcome:
    return _plain(batch, _as_large(batch, supplies))


def _static_macs(batch: Batch, supplies: Supplies) -> Outcome:
    return _plain(batch, _as_large(batch, supplies), supplies.training_macs)


def _longer(batch: Batch, supplies: Supplies) -> Outcome:
    return _plain(batch, batch.task.host, supplies.training_macs)


def _scratch(batch: Batch, supplies: Supplies) -> Outcome:
    """Hosts of one topology train side by side."""
    wanted = [topology(batch.task.host, one) for one in _all(batch, supplies)]
    whole: dict[str, np.ndarray] = {}
    for host in dict.fromkeys(wanted):
        mine = [n for n, other in enumerate(wanted) if other == host]
        # What a host is made of depends on its place among the others.
        part, _ = _plain(batch, host, hosts=mine[-1] + 1)
        for item in fields(Judged):
            values = getattr(part, item.name)
            if item.name not in whole:
                whole[item.name] = np.zeros(batch.hosts, values.dtype)
            whole[item.name][mine] = values[mine]
    return Judged(**whole), None


ARMS: Final[Mapping[str, Arm]] = MappingProxyType(
    {
        "never": _named,
        "early": _named,
        "periodic": _named,
        "plateau": _named,
        "promise": _named,
        "tamiyo": _learned,
        "random": _random,
        "searched": _searched,
        "bandit": _bandit,
        "replay": _replay,
        "replay-elsewhere": _replay,
        "static": _static,
        "static-macs": _static_macs,
        "longer": _longer,
        "scratch": _scratch,
    }
)
"""What each arm does; whoever is not named has learnt."""


def stacked_actions(recordings: Sequence[Recorded]) -> Tensor:
    """Recorded actions of several hosts, int64 [time, env, head]; WAIT at the end."""
    longest = max(len(one.actions) for one in recordings)
    whole = torch.zeros(longest, len(recordings), NUM_HEADS, dtype=torch.int64)
    for env, one in enumerate(recordings):
        whole[: len(one.actions), env] = torch.from_numpy(one.actions.astype(np.int64))
    return whole


def topology(host: Host, recorded: Recorded) -> Host:
    """The host with hidden layers as wide as a recorded network was at its end."""
    places = len(host.slots)
    kinds = find_blueprints(recorded.names)
    units = [0] * places
    last = (recorded.stages[-1].tolist(), recorded.blueprints[-1].tolist())
    for slot, (stage, kind) in enumerate(zip(*last, strict=True)):
        if stage not in INACTIVE and kinds[kind].form is Form.WIDEN:
            units[slot % places] += kinds[kind].size
    match host:
        case MlpHost():
            hidden = zip(host.widths[1:-1], units, strict=True)
            return MlpHost(
                (host.widths[0], *(a + b for a, b in hidden), host.widths[-1])
            )
        case CnnHost():
            channels = zip(host.channels, units, strict=True)
            wider = tuple(a + b for a, b in channels)
            return CnnHost(host.image, wider, host.classes)


def _as_large(batch: Batch, supplies: Supplies) -> Host:
    host = batch.task.host
    return widened(host, host.parameters * (1.0 + supplies.added))


def _all(batch: Batch, supplies: Supplies) -> tuple[Recorded, ...]:
    got = len(supplies.recordings)
    if got != batch.hosts:
        raise BadInput(
            f"{batch.arm} needs what Tamiyo did on {batch.hosts} hosts; got {got}."
        )
    return supplies.recordings


def _kept(batch: Batch, recording: Recording, host: int) -> Recorded:
    """One host's part of a recording, until its end."""
    own = slice(0, int(recording.lived[:, host].sum()))
    places, per = batch.task.host.slots, batch.world.seeds_per_slot
    assert batch.world.blueprints is not None  # a protocol names them

    def whole(values: Tensor) -> np.ndarray:
        return values[own, host].numpy().astype(np.int8)

    return Recorded(
        arm=batch.record,
        member=batch.member,
        task=batch.task.name,
        setting=batch.settings[0],
        seed=APART * batch.block + host,
        actions=whole(recording.actions),
        stages=whole(recording.stage),
        blueprints=whole(recording.blueprint),
        alphas=recording.alpha[own, host].numpy().astype(np.float32),
        scores=recording.score[own, host].numpy().astype(np.float32),
        slots=tuple(f"{place} #{n + 1}" for n in range(per) for place in places),
        names=batch.world.blueprints,
    )
