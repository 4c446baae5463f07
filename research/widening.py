"""Is a network that was widened as good as one that had its size from the start?

Written down before the random seeds that count were run. Two runs on others had led to
larger first weights of new units, to a fifth learning rate, and to nine random seeds
that choose it instead of three, which chose by luck:

- Six tasks, one and two hidden layers. The host has 8 units in each, is widened
  fourfold (new units of neighbouring layers feed each other) before the first batch or
  after a tenth of the run, and is compared with the static network of the shape that it
  is exported in, 32 units in each, at equal batches: 480 of 64 rows, AdamW, one cycle
  of the learning rate over the run.
- Every arm's learning rate is the best of one grid for each task, by the decision rows
  of nine random seeds that are not counted. Counted: twelve others, paired: the same
  rows, the same order of batches.
- A difference is a share of the errors that the host makes if it is never widened.

About ten minutes on two cores. With `--networks` the same of the networks of two
examples, through `Grower`: the CNN on digits and the transformer on text, both widened
fourfold at every slot, at the learning rates of their examples halved, as they are and
doubled; two random seeds choose, eight others count.
"""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import timing
from benchmarks.timing import Report
from esper.grower import Grower
from esper.tamiyo.schedule import Schedule
from esper.tasks.data import split
from esper.tasks.datasets import digits
from esper.tasks.text import text, windows
from research.anytime import pooled
from research.timetables import (
    NEVER,
    Episodes,
    Floats,
    Study,
    best_rates,
    over_stops,
    train_all,
)

TASKS: Final = ("letter", "mnist1d", "penbased", "satimage", "optdigits", "texture")
RATES: Final = (4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)
BATCHES: Final = 480
WIDENED: Final = {
    moment: Schedule(blueprint="widen_x4", count=1, start=start, every=0.0)
    for moment, start in (("at the start", 0.0), ("after a tenth", 0.1))
}
SEEDS, TUNING = 12, 9
COUNTED: Final = 8_000
"""Random seed of the hosts that count."""
NETWORKS: Final = {"CNN on digits": 340, "transformer on text": 300}
"""Training steps of each."""
ARMS: Final = ("never", "static", *WIDENED)
FACTORS: Final = (0.5, 1.0, 2.0)
NETWORK_TUNING, NETWORK_SEEDS = range(2), range(2, 10)


def run(
    processes: int = 2,
    networks: bool = False,
    rng_seed: int = COUNTED,
    tuning: int = TUNING,
) -> list[Report]:
    """Tune, train and compare.

    Args:
        processes: Trainings at the same time.
        networks: Networks of the examples, grown by `Grower`.
        rng_seed: Of the hosts that count.
        tuning: Hosts that choose a learning rate.
    """
    quick = timing.QUICK
    if networks:
        return [grown_networks(1 if quick else processes)]
    tasks, rates, seeds = (TASKS[1:2], RATES[:1], 2) if quick else (TASKS, RATES, SEEDS)
    batches = 40 if quick else BATCHES
    studies = [
        Study(name, 32, layers, batches, "end", 1 / 4)
        for name in tasks
        for layers in (1, 2)
    ]
    arms = [
        (study, *kind)
        for study in studies
        for kind in (
            (0.25, NEVER),
            (1.0, NEVER),
            *((0.25, w) for w in WIDENED.values()),
        )
    ]
    processes = 1 if quick else processes
    tuned = best_rates(arms, rates, tuning, 2_000, processes)
    best = {
        arm: rates[int(np.argmax([over_stops(c, 0.0, "score").mean() for c in curves]))]
        for arm, curves in tuned.items()
    }
    many = [Episodes(*arm, best[arm], seeds, rng_seed) for arm in arms]
    found = dict(zip(arms, train_all(many, processes), strict=True))
    return tables(studies, {arm: over_stops(found[arm], 0.0) for arm in arms}, best)


def tables(
    studies: Sequence[Study],
    test: dict[tuple[Study, float, Schedule], Floats],
    rates: dict[tuple[Study, float, Schedule], float],
) -> list[Report]:
    """Every task, and all together."""
    each = Report(
        "Test score, %: never widened, as wide from the start, widened",
        ("task", "layers", "widened", "never", "static", "grown", "share", "rates"),
    )
    shares: dict[tuple[int, str], list[Floats]] = {}
    for study in studies:
        never, static = (test[study, share, NEVER] for share in (0.25, 1.0))
        for moment, schedule in WIDENED.items():
            grown = test[study, 0.25, schedule]
            share = (grown - static) / (1 - never.mean())
            shares.setdefault((study.layers, moment), []).append(share)
            each.add(
                study.name,
                study.layers,
                moment,
                *(100 * one.mean() for one in (never, static, grown)),
                share.mean(),
                f"{rates[study, 1.0, NEVER]:g} {rates[study, 0.25, schedule]:g}",
            )
    pool = Report(
        "Widened less static, as a share of the errors of the host that never is",
        ("layers", "widened", "difference", "95 % interval"),
    )
    groups: dict[tuple[int | str, str], list[Floats]] = {**shares}
    together = zip(*shares.values(), strict=True)
    groups["all", "all"] = [np.concatenate(found) for found in together]
    for (layers, moment), found in groups.items():
        interval = pooled(found)
        bounds = f"{interval.low:+.4f} {interval.high:+.4f}"
        pool.add(layers, moment, interval.estimate, bounds)
    return [each, pool]


# Networks of the examples, through Grower.


class Training(NamedTuple):
    """One network of one arm."""

    name: str
    arm: str
    factor: float
    """Learning rate, as a multiple of the example's."""
    rng_seed: int


def grown_networks(processes: int) -> Report:
    """Test score of networks that `Grower` widened, beside static ones."""
    quick = timing.QUICK
    factors = FACTORS[:1] if quick else FACTORS
    tuning, counted = (range(1), range(2)) if quick else (NETWORK_TUNING, NETWORK_SEEDS)
    arms = [*product(NETWORKS, ARMS)]
    tried = _trained_all([*product(arms, factors, tuning)], processes)
    best = {
        arm: max(
            factors,
            key=lambda f: np.mean([tried[arm, f, seed][0] for seed in tuning]),
        )
        for arm in arms
    }
    wanted = [(arm, best[arm], seed) for arm in arms for seed in counted]
    found = _trained_all(wanted, processes)
    report = Report(
        "Networks of the examples, grown by Grower: test score",
        ("network", "widened", "never", "static", "grown", "less static", "95 %"),
        notes=["digits: images named right, %; text: bits per character, negative"],
    )
    for name in NETWORKS:
        scale = 1 if "text" in name else 100
        test = {
            arm: scale
            * np.array([found[(name, arm), best[name, arm], s][1] for s in counted])
            for arm in ARMS
        }
        for moment in WIDENED:
            interval = pooled([test[moment] - test["static"]])
            means = (float(test[arm].mean()) for arm in ("never", "static", moment))
            bounds = f"{interval.low:+.3f} {interval.high:+.3f}"
            report.add(name, moment, *means, interval.estimate, bounds)
    return report


def _trained_all(
    many: Sequence[tuple[tuple[str, str], float, int]], processes: int
) -> dict[tuple[tuple[str, str], float, int], tuple[float, float]]:
    """Scores of networks by arm, learning rate and random seed."""
    trainings = [Training(*arm, factor, seed) for arm, factor, seed in many]
    if processes == 1:
        return dict(zip(many, map(trained, trainings), strict=True))
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return dict(zip(many, pool.map(trained, trainings, chunksize=4), strict=True))


def trained(what: Training) -> tuple[float, float]:
    """Scores on decision and test rows after training; more is better."""
    torch.set_num_threads(1)
    torch.manual_seed(what.rng_seed)
    example = _example(what.name)
    steps = 8 if timing.QUICK else NETWORKS[what.name]
    model = example.build()
    if what.arm == "static":  # of the exported shape
        model = _grower(model, example, example.optimizer(model, 1.0)).export()
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    optimizer = example.optimizer(model, what.factor)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(what.rng_seed)
    for step in range(steps):
        if step == {"at the start": 0, "after a tenth": steps // 10}.get(what.arm):
            _grower(model, example, optimizer)
        x, y = example.batch(generator)
        loss = example.loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    with torch.no_grad():
        return example.score(model, 1), example.score(model, 2)


def _grower(model: nn.Module, example: "Example", optimizer: Optimizer) -> Grower:
    """Widen a network fourfold at every slot, from the next batch on."""
    grower = Grower(
        model,
        optimizer,
        example.slots,
        example=example.rows,
        blueprints=["widen_x4"],
        seeds_per_slot=1,
    )
    for slot in grower.model.slots:
        grower.plant(slot, "widen_x4", tempo="AT_ONCE")
    return grower


class Example(NamedTuple):
    """A network of `examples/`, and what it learns from."""

    build: Callable[[], nn.Module]
    slots: list[str]
    rows: Tensor
    """What it can be called with."""
    optimizer: Callable[[nn.Module, float], Optimizer]
    """For a network, at a multiple of the example's learning rate."""
    batch: Callable[[Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[nn.Module, int], float]
    """On part 1, decision rows, or 2, test rows; more is better."""


@cache
def _example(name: str) -> Example:
    folder = str(Path(__file__).parents[1] / "examples")
    if folder not in sys.path:
        sys.path.append(folder)
    if "CNN" in name:
        parts = split(digits(), rng_seed=0)
        own = import_module("grow_cnn_on_digits")

        def images(generator: Generator) -> tuple[Tensor, Tensor]:
            at = torch.randint(len(parts.train), (own.BATCH,), generator=generator)
            return parts.train.features[at], parts.train.labels[at]

        return Example(
            own.CNN,
            ["conv1->conv2", "conv2->fc"],
            parts.train.features[:8],
            lambda net, factor: SGD(net.parameters(), 0.1 * factor, momentum=0.9),
            images,
            F.cross_entropy,
            lambda net, part: own.accuracy(net, parts[part]),
        )
    own, ids = import_module("grow_transformer_on_text"), text()

    def characters(generator: Generator) -> tuple[Tensor, Tensor]:
        return windows(ids.train, count=32, length=own.LENGTH, generator=generator)

    return Example(
        own.Transformer,
        [f"blocks.{n}.up->blocks.{n}.down" for n in range(2)],
        ids.train[None, : own.LENGTH],
        lambda net, factor: AdamW(net.parameters(), 1e-2 * factor),
        characters,
        lambda found, wanted: F.cross_entropy(found.mT, wanted),
        lambda net, part: -own.bits(net, ids[part]),
    )
