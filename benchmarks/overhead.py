"""What does it cost to keep a run: every row in a store, and checkpoints?

A run of the default preset beside the same training without store and checkpoints, in
one process: after every round of the run, the other plays the same round. Both do the
same to the bit, which is checked. The first round, which compiles, does not count; two
checkpoints do. The difference of the two is what keeping costs, with all that is noise;
a stopwatch at the store and at the checkpoints tells their own time apart.

The second table times every call of each logger in a training of PPO on CartPole. The
third plays the same rounds with and without rows of decisions and layers. The fourth
trains the same network twice, with a `Grower` that writes a run and with one that does
not. Both alternate and count CPU time.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks import timing
from benchmarks.round import KEEPING, SMALL, Stopwatch, on_the_watch, without_evaluation
from benchmarks.timing import Report
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import unknown
from esper.fitting import ShuffledBatches, accuracy
from esper.grower import Grower
from esper.rl.ppo import PPO
from esper.runs.database import open_store
from esper.runs.records import RoundRecord
from esper.runs.run import STORE
from esper.runs.sinks import SINKS, RunInfo, Sinks
from esper.runs.store import Store
from esper.runs.train_config import DEFAULT, Budget, TrainConfig, preset
from esper.tasks.catalogue import task
from esper.training import controller_ppo, rows
from esper.training.callbacks import Record
from esper.training.controller_ppo import controller_loop
from esper.training.loop import OnRoundEnd
from esper.training.train import begin_run
from esper.training.worlds import mixture_for, steps_of

CYCLES = 2
"""Checkpoints that are timed."""
SIZES = """SELECT count(*), avg(length(action) + length(features) + length(heads))
FROM decisions"""
"""Number of decisions and mean bytes of their texts."""
MOST = 3.0
"""Percent that store and checkpoints may take together."""


@dataclass(frozen=True)
class Kept:
    """What rounds took, one by one, with all that is kept and without."""

    kept: list[float]
    bare: list[float]
    parts: dict[str, float]
    """Seconds by part of the run, over all rounds."""


def run(only: str = "") -> list[Report]:
    """Measure all, or `only` one of kept, loggers, decisions and growers."""
    parts = {each.__name__: each for each in (kept, loggers, decisions, growers)}
    if only and only not in parts:
        raise unknown("there is no part", only, parts)
    return [part() for name, part in parts.items() if only in ("", name)]


def kept() -> Report:
    """Share of a run that store and checkpoints take."""
    config = preset(DEFAULT)
    rounds = Budget(rounds=1 + CYCLES * config.checkpoint.every)
    config = SMALL if timing.QUICK else replace(config, budget=rounds)
    return as_report(config, measure(config))


class TimedLogger:
    """A logger whose calls are timed."""

    def __init__(self, name: str, folder: Path) -> None:
        info = RunInfo(name=name, folder=folder, settings={})
        self._sinks, self.seconds = Sinks([f"{name}:{folder}"], info), list[float]()

    def log(self, values: dict[str, float], step: int) -> None:
        """Log, and keep the seconds of the first call apart."""
        began = perf_counter()
        self._sinks.log(values, step)
        self.seconds.append(perf_counter() - began)

    def close(self) -> None:
        """Close the logger."""
        self._sinks.close()


def loggers() -> Report:
    """Share of a training that each installed logger takes."""
    steps = 8_192 if timing.QUICK else 200_000
    report = Report(
        f"Loggers: PPO on CartPole, default settings, {steps:,} steps",
        ("logger", "calls", "ms per call", "% of the training"),
        notes=["Without the first call, which opens files."],
    )
    for name in SINKS:
        if find_spec(name) is None and name != "csv":
            continue
        with TemporaryDirectory() as folder:
            try:
                timed = TimedLogger(name, Path(folder))
            except InvalidInputError:  # Trackio has another folder in this process
                continue
            began = perf_counter()
            PPO("CartPole-v1", seed=0).learn(steps, logger=timed)
            took = perf_counter() - began
            timed.close()
        _, *seconds = timed.seconds
        total = sum(seconds)
        report.add(name, len(seconds), 1e3 * total / len(seconds), 100 * total / took)
    return report


def decisions() -> Report:
    """What rows of decisions and layers cost in a training, and their size."""
    config = SMALL if timing.QUICK else preset(DEFAULT)
    hosts = (rows.RECORDED_HOSTS, 0)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        loops, stores = [], []
        for number in hosts:
            store = stack.enter_context(Store(Path(folder) / f"{number}.sqlite"))
            store.begin_attempt()
            steps = steps_of(config)
            record = Record(store, config.tasks)
            loops.append(controller_loop(mixture_for(config), config, steps, [record]))
            stores.append(store)

        spent, made = {"rows": 0.0, "rounds": 0.0}, controller_ppo.decision_rows

        def timed(*what: Any) -> Any:  # noqa: ANN401
            began = process_time()
            found = made(*what)
            spent["rows"] += process_time() - began
            return found

        def play(side: int) -> None:
            began = process_time()
            with (
                patch.object(rows, "RECORDED_HOSTS", hosts[side]),
                patch.object(controller_ppo, "decision_rows", timed),
            ):
                loops[side].call("on_round_end", loops[side], loops[side].play_round())
            stores[side].flush()
            spent["rounds"] += (process_time() - began) * (side == 0)

        ratio = cpu_ratio(play, turns=1 if timing.QUICK else 10)
        ((count, size),) = stores[0].fetch(SIZES)
        pages = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        files = [store.fetch(pages)[0][0] for store in stores]
    report = Report(
        f"Decisions of {hosts[0]} hosts: {' and '.join(config.tasks)}, "
        f"{config.num_envs} environments each",
        ("what", "value"),
    )
    report.add("decisions", count)
    report.add("bytes of text per decision", float(size))
    report.add("bytes of the store, with and without", f"{files[0]:,} and {files[1]:,}")
    report.add("% of the CPU time of a round, alternating", 100 * (ratio - 1))
    share = 100 * spent["rows"] / spent["rounds"]
    report.add("the same, by a clock at their function", share)
    return report


def growers() -> Report:
    """What a `Grower` costs that writes a run."""
    (learn, val, _), shuffle = task("letter").splits(0), torch.Generator()
    count = 2 if timing.QUICK else 250
    batches = [*ShuffledBatches(learn, 64, count, shuffle)]
    report = Report(
        f"Grower with a run, on letter: {count} batches of 64 rows for each decision",
        ("controller", "% of the CPU time", "bytes of text per decision"),
    )
    for controller in timing.sizes(("tamiyo", "early")):
        with TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            sides = [_growing(controller, logger) for logger in (run, None)]
            train = partial(_train, sides, batches, (val.features, val.labels))
            ratio = cpu_ratio(train, turns=1 if timing.QUICK else 12)
            grower = sides[0][2]
            grower.close()
            with closing(open_store(run / STORE)) as db:
                ((_, size),) = db.execute(SIZES)
        report.add(controller, 100 * (ratio - 1), float(size))
    return report


Growing = tuple[nn.Module, Optimizer, Grower]
Rows = tuple[torch.Tensor, torch.Tensor]


def _train(
    sides: Sequence[Growing], batches: Sequence[Rows], val: Rows, side: int
) -> None:
    """Train one of the networks until its next decision, and decide."""
    model, optimizer, grower = sides[side]

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    for x, y in batches:
        total = grower.loss(partial(loss, x, y))
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    grower.step(metric=lambda: accuracy(model, [val]))


def _growing(controller: str, logger: Path | None) -> Growing:
    """A network with two hidden layers of 64 units, its optimizer and its Grower."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()),
        nn.Linear(64, 26),
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    example = torch.zeros(4, 16)
    grower = Grower(
        model, optimizer, example=example, controller=controller, logger=logger
    )
    return model, optimizer, grower


def cpu_ratio(play: Callable[[int], None], turns: int) -> float:
    """CPU time of side 0 divided by that of side 1, turn by turn; the median.

    The first turn, which compiles, does not count.
    """
    ratios = []
    for turn in range(turns + 1):
        taken = [0.0, 0.0]
        for side in (0, 1) if turn % 2 else (1, 0):
            began = process_time()
            play(side)
            taken[side] = process_time() - began
        ratios.append(taken[0] / taken[1])
    return median(ratios[1:])


def measure(config: TrainConfig) -> Kept:
    """Play a run and the same training alone, round by round."""
    with TemporaryDirectory() as folder:
        config = without_evaluation(config, Path(folder))
        last = config.budget.rounds
        alone = controller_loop(mixture_for(config), config, steps_of(config))
        watch, kept, bare = Stopwatch(), list[float](), list[float]()
        parts: dict[str, float] = {}
        since = 0.0

        def tell(record: RoundRecord) -> None:
            nonlocal since
            began = perf_counter()
            kept.append(began - since)
            if record.round == last:
                parts.update(watch.stop())
            with watch.part("alone"):
                same = alone.play_round()
            if repr(record.update) != repr(same.update):  # NaN is not itself
                raise RuntimeError(f"round {record.round} is not the same in both.")
            bare.append(perf_counter() - began)
            if record.round == 1:
                watch.start()
            since = perf_counter()

        with on_the_watch(watch, KEEPING):
            begin_run(config, [OnRoundEnd(tell)])
    parts.pop("alone", None)
    return Kept(kept[1:], bare[1:], parts)


def as_report(config: TrainConfig, found: Kept) -> Report:
    """The table of shares."""
    rounds, total = len(found.kept), sum(found.parts.values())
    tasks = " and ".join(config.tasks)
    report = Report(
        f"Keeping a run: {tasks}, {config.num_envs} environments each",
        ("what", "ms per round", "% of the run"),
        notes=[
            f"{rounds} rounds, a checkpoint after every {config.checkpoint.every}.",
            f"Allowed are {MOST:g} % for store and checkpoints together.",
            "The difference is noisy: compare it with the two above it.",
        ],
    )

    def add(what: str, seconds: float) -> None:
        report.add(what, 1e3 * seconds / rounds, 100 * seconds / total)

    store, checkpoints = found.parts["store"], found.parts["checkpoint"]
    add("store", store)
    add("checkpoints", checkpoints)
    add("store and checkpoints", store + checkpoints)
    add("the run less the training alone", sum(found.kept) - sum(found.bare))
    pairs = zip(found.kept, found.bare, strict=True)
    add("the same, median of rounds", rounds * median(one - two for one, two in pairs))
    add("the run", total)
    return report
