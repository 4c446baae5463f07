"""What does it cost to keep a run: every row in a store, and checkpoints?

A run of the default preset beside the same training without store and checkpoints, in
one process: after every round of the run, the other plays the same round. Both do the
same to the bit, which is checked. The first round, which compiles, does not count; two
checkpoints do. The difference of the two is what keeping costs, with all that is noise;
a stopwatch at the store and at the checkpoints tells their own time apart.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks import timing
from benchmarks.round import KEEPING, SMALL, Stopwatch, on_the_watch, without_evaluation
from benchmarks.timing import Report
from esper.runs.records import RoundRecord
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


def run() -> Report:
    """Time the rounds of two checkpoints."""
    config = preset(DEFAULT)
    rounds = Budget(rounds=1 + CYCLES * config.checkpoint.every)
    config = SMALL if timing.QUICK else replace(config, budget=rounds)
    return as_report(config, measure(config))


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
