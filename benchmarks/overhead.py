"""What does it cost to keep a run: every row in a store, and checkpoints?

A run of the default preset beside the same training without store and checkpoints, in
one process: after every round of the run, the other plays the same round. Both do the
same to the bit, which is checked. The first round, which compiles, does not count; two
checkpoints do. The difference of the two is what keeping costs, with all that is noise;
a stopwatch at the store and at the checkpoints tells their own time apart.

The second table times every call of each logger in a training of PPO on CartPole.
"""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks import timing
from benchmarks.round import KEEPING, SMALL, Stopwatch, on_the_watch, without_evaluation
from benchmarks.timing import Report
from esper.contracts.errors import InvalidInputError
from esper.rl.ppo import PPO
from esper.runs.records import RoundRecord
from esper.runs.sinks import SINKS, RunInfo, Sinks
from esper.runs.train_config import DEFAULT, Budget, TrainConfig, preset
from esper.training.controller_ppo import controller_loop
from esper.training.loop import OnRoundEnd
from esper.training.train import begin_run
from esper.training.worlds import mixture_for, steps_of

CYCLES = 2
"""Checkpoints that are timed."""
MOST = 3.0
"""Percent that store and checkpoints may take together."""


@dataclass(frozen=True)
class Kept:
    """What rounds took, one by one, with all that is kept and without."""

    kept: list[float]
    bare: list[float]
    parts: dict[str, float]
    """Seconds by part of the run, over all rounds."""


def run() -> list[Report]:
    """Time the rounds of two checkpoints, and loggers."""
    config = preset(DEFAULT)
    rounds = Budget(rounds=1 + CYCLES * config.checkpoint.every)
    config = SMALL if timing.QUICK else replace(config, budget=rounds)
    return [as_report(config, measure(config)), loggers()]


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
