"""How much faster do N hosts train as one cohort than one after the other?

One minibatch of every host: forward, backward, shadow pass, AdamW. Every environment
holds other seeds in other stages. The twin is plain PyTorch, host by host, with an
`AdamW` each; it is spared what ours includes: gathering the rows. Ours is given the
minibatches of one decision at a time, as
the world gives them. Then the same in two processes; then how the time grows, one thing
changed at a time. About seven minutes.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.synchronize import Barrier
from typing import Any

import torch
from torch import Generator, Tensor

from benchmarks import timing
from benchmarks.timing import Report, alternate, micro
from esper.contracts.stages import Stage
from esper.environment.cohort import Cohort
from esper.tasks.hosts import CnnHost, Host, MlpHost
from tests.references.cohort import PlainNetwork

ALPHA = {Stage.TRAINING: 0.0, Stage.BLENDING: 0.5, Stage.HOLDING: 1.0}
UNITS = {"mlp": (4, 8, 12, 16, 32), "cnn": (8, 16)}
"""Sizes of seeds."""
STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.TRAINING, Stage.DORMANT)
"""By environment and slot in turn: two of four seeds are in training."""
PER_PLACE, RATE, EXAMPLES = 2, 1e-3, 1024
STEPS = {"mlp": 16, "cnn": 4}
"""Minibatches until the next decision."""
MLP, CNN = MlpHost((16, 32, 32, 26)), CnnHost((1, 28, 28), (4, 8), 10)


@dataclass(frozen=True)
class Case:
    """Hosts to train, and the seeds in the slots of each."""

    host: Host
    envs: int
    seeds: Sequence[Mapping[int, tuple[int, Stage]]]
    """Units and stage by slot; one after the other for the environments, then again."""
    steps: int
    batch: int = 64

    def of(self, env: int) -> Mapping[int, tuple[int, Stage]]:
        """Seeds of an environment."""
        return self.seeds[env % len(self.seeds)]


class Cohorts:
    """The hosts of a case, as a cohort and one by one."""

    def __init__(self, case: Case, *, plain: bool) -> None:
        self.case, chance = case, Generator().manual_seed(0)
        host = case.host
        self.cohort = Cohort(
            case.envs,
            host,
            slots_per_place=PER_PLACE,
            capacity=64 * host.parameters,
            batch=case.batch,
        )
        self.hosts: list[PlainNetwork] = []
        shape = (case.envs, self.cohort.slots)
        self.alpha, self.training = torch.zeros(shape), torch.zeros(shape).bool()
        for env in range(case.envs):
            network = host.build(chance)
            self.cohort.set_host(env, network)
            if plain:
                decay = self.cohort.decay
                self.hosts.append(PlainNetwork(network, rate=RATE, decay=decay))
            for slot, (units, stage) in case.of(env).items():
                inputs, taps = self.cohort.inputs(env, slot % self.cohort.places)
                weight = 0.1 * torch.randn(units, inputs, taps, generator=chance)
                bias = torch.zeros(units)
                self.cohort.plant(env, slot, weight, bias)
                self.alpha[env, slot] = ALPHA[stage]
                self.training[env, slot] = stage is Stage.TRAINING
                if plain:
                    self.hosts[env].plant(slot, weight, bias)
        steps = (case.envs, case.steps, self.cohort.slots)
        self.schedule = [
            part[:, None].expand(steps).contiguous()
            for part in (self.alpha, self.training)
        ]
        self.features = torch.randn(EXAMPLES, *host.shape, generator=chance)
        self.labels = torch.randint(0, host.num_outputs, (EXAMPLES,), generator=chance)
        self.picked = torch.randint(
            0, EXAMPLES, (case.envs, case.steps, case.batch), generator=chance
        )
        self.rates = torch.full((case.envs, case.steps), RATE)
        self.x = self.features[self.picked[:, 0]]
        self.y = self.labels[self.picked[:, 0]]

    def train(self) -> Tensor:
        """All minibatches until the next decision, as a cohort."""
        flat = self.features.flatten(1).unsqueeze(0)
        return self.cohort.train(
            flat, self.labels.unsqueeze(0), self.picked, *self.schedule, self.rates
        )[0]

    def one_by_one(self) -> None:
        """One minibatch of every host, prepared beforehand."""
        for env, host in enumerate(self.hosts):
            lives = self.alpha[env].tolist(), self.training[env].tolist()
            host.train_step(self.x[env], self.y[env], *lives)


def run() -> list[Report]:
    """Compare, in one process and in two; measure the growth."""
    return [compare(), in_processes(), growth()]


def mixed(host: Host, envs: int) -> Case:
    """Other sizes in other stages everywhere."""
    sizes, slots = UNITS[host.kind], PER_PLACE * len(host.slots)
    seeds = [
        {
            slot: (sizes[(3 * env + slot + slot // 2) % len(sizes)], stage)
            for slot in range(slots)
            if (stage := STAGES[(env + slot) % len(STAGES)]) is not Stage.DORMANT
        }
        for env in range(envs)
    ]
    return Case(host, envs, seeds, STEPS[host.kind])


def measured(
    sides: Sequence[Mapping[str, Callable[[], object]]], sweeps: int, seconds: float
) -> list[dict[str, float]]:
    """Best seconds of all sides in turn, again and again: a slow minute spoils one."""
    best = [dict.fromkeys(each, float("inf")) for each in sides]
    for _ in range(1 if timing.QUICK else sweeps):
        for each, least in zip(sides, best, strict=True):
            took = alternate(each, seconds=seconds, budget=2.0)
            least.update({name: min(least[name], took[name]) for name in took})
    return best


def compare() -> Report:
    """One minibatch of every host, for cohorts of growing size."""
    report = Report(
        "One minibatch of 64 rows for every host, up to 4 seeds each",
        (
            "host", "envs", "seeds", "training", "µs per env", "one by one µs", "ratio",
        ),
        notes=["Forward, backward, shadow pass, AdamW; in ours also gathering rows."],
    )  # fmt: skip
    mlps = [(MlpHost((16, w, w, 26)), envs) for w in (12, 64) for envs in (4, 16, 64)]
    cases = [mixed(host, envs) for host, envs in [*mlps, (CNN, 4), (CNN, 16)]]
    cases = list(timing.sizes(cases))
    sides = []
    for case in cases:
        ours = Cohorts(case, plain=True)
        sides.append({"ours": ours.train, "plain": ours.one_by_one})
    for case, least in zip(cases, measured(sides, 4, 0.5), strict=True):
        ours = least["ours"] / case.steps / case.envs
        plain = least["plain"] / case.envs
        stages = [s for env in range(case.envs) for _, s in case.of(env).values()]
        report.add(
            str(case.host),
            case.envs,
            len(stages),
            stages.count(Stage.TRAINING),
            *map(micro, (ours, plain)),
            plain / ours,
        )
    return report


def in_processes() -> Report:
    """Half of the hosts in each of two processes, beside one loop in one process."""
    host, envs, turns = (MLP, 4, 1) if timing.QUICK else (CNN, 16, 5)
    case, each = mixed(host, envs), 2
    own = Cohorts(case, plain=True)
    spawn = multiprocessing.get_context("spawn")
    gate, times = spawn.Barrier(3, timeout=300), spawn.Array("d", 2)
    halves = [
        spawn.Process(target=_half, args=(number, host, envs, gate, times, each, turns))
        for number in range(2)
    ]
    for half in halves:
        half.start()
    own.one_by_one()
    own.train()
    gate.wait()  # both are warm
    plain = alone = both = float("inf")
    for _ in range(turns):
        plain = min(plain, _took(own.one_by_one, each) / each)
        alone = min(alone, _took(own.train, each) / (each * case.steps))
        gate.wait()
        gate.wait()
        both = min(both, max(times) / (each * case.steps))
    for half in halves:
        half.join()
    report = Report(
        f"{case.envs} hosts, {host}, up to 4 seeds each: two processes of one thread",
        ("what", "µs per env", "minibatches per second", "ratio"),
        notes=["Both processes measure at the same time; the slower one counts."],
    )
    for name, seconds in (
        ("one by one, one process", plain),
        (f"a cohort of {envs}, one process", alone),
        (f"two cohorts of {envs // 2}, two processes", both),
    ):
        report.add(
            name, micro(seconds / case.envs), case.envs / seconds, plain / seconds
        )
    return report


def _half(
    number: int,
    host: Host,
    envs: int,
    gate: Barrier,
    times: Any,  # noqa: ANN401
    each: int,
    turns: int,
) -> None:
    """Train every second host whenever the gate opens."""
    torch.set_num_threads(1)
    whole = mixed(host, envs)
    half = replace(whole, envs=envs // 2, seeds=whole.seeds[number::2])
    mine = Cohorts(half, plain=False)
    mine.train()
    gate.wait()
    for _ in range(turns):
        gate.wait()
        times[number] = _took(mine.train, each)
        gate.wait()


def _took(call: Callable[[], object], times: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - began


def growing_cases() -> Iterator[tuple[str, int, Case]]:
    """Axis, value on it, and case: one thing is changed at a time."""
    pair = [{0: (8, Stage.HOLDING), 1: (8, Stage.TRAINING)}]
    wider: dict[str, list[Host]] = {
        "mlp": [MlpHost((16, w, w, 26)) for w in (8, 12, 16, 24, 32, 48, 64, 96, 128)],
        "cnn": [CnnHost(CNN.image, (c, 2 * c), 10) for c in (2, 4, 6, 8, 12, 16)],
    }
    for base in (Case(MLP, 16, pair, 16), Case(CNN, 4, pair, 2)):
        for envs in (1, 2, 4, 8, 16, 32, 64, 128):
            yield "envs", envs, replace(base, envs=envs)
        for host in wider[base.host.kind]:
            yield "parameters", host.parameters, replace(base, host=host)
        for axis, stage in (("active", Stage.HOLDING), ("training", Stage.TRAINING)):
            for seeds in range(5):
                held = {slot: (8, stage) for slot in range(seeds)}
                yield axis, seeds, replace(base, seeds=[held])
        for batch in (16, 32, 64, 128, 256):
            yield "batch", batch, replace(base, batch=batch)


def growth() -> Report:
    """Time along each axis."""
    cases = list(growing_cases())
    cases = list(timing.sizes(cases))
    sides = [{"ours": Cohorts(case, plain=False).train} for _, _, case in cases]
    curves = Report(
        "How the time of a host's minibatch grows; one thing is changed at a time",
        ("host", "axis", "value", "envs", "rows", "µs per env"),
        notes=[
            "A host has one active seed and one in training, of 8 units each, "
            "except where seeds are counted."
        ],
    )
    for (axis, value, case), best in zip(cases, measured(sides, 5, 0.1), strict=True):
        seconds = best["ours"] / case.steps / case.envs
        row = (axis, value, case.envs, case.batch, micro(seconds))
        curves.add(str(case.host), *row)
    return curves
