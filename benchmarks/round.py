"""Where does the time of a round go?

A run on `letter` with 16 environments and default settings: rollout, update, rows and
checkpoints. Time is split by a stopwatch at the calls of each part; what an inner
call takes is not the outer one's too. All rounds count but the first, which compiles,
and as many follow as lie between two checkpoints. Instead of a naive twin there are
bars: control, update and store at most 10 %, observing at most 20 %.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any
from unittest.mock import patch

from benchmarks import timing
from benchmarks.timing import Report
from esper.environment.growing import GrowingWorld
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.records import RoundRecord
from esper.runs.store import Store
from esper.runs.train_config import (
    Budget,
    CheckpointConfig,
    EvalConfig,
    TrainConfig,
    World,
)
from esper.simic.agent.ppo import PPOAgent
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy import network
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.training import callbacks, controller_ppo
from esper.training.callbacks import Record
from esper.training.loop import OnRoundEnd
from esper.training.train import begin_run

PARTS = {
    "_train": "training",
    "_score": "score",
    "_act": "acting",
    "_reset_envs": "beginning",
    "_report": "reporting",
    "_observe": "showing",
}
"""What each method of the world is for."""
Calls = Iterable[tuple[object, str, str]]
NEVER = 1_000_000

KEEPING: Calls = (
    (Record, "on_rollout", "store"),
    (controller_ppo, "rows_of", "store"),
    (Store, "add_round", "store"),
    (Store, "flush", "store"),
    (callbacks, "save", "checkpoint"),
    (CheckpointFolder, "publish", "checkpoint"),
)
"""Who is called, by which name, and for what: what a run keeps."""
PLAYING: Calls = (
    *((GrowingWorld, name, part) for name, part in PARTS.items()),
    (network, "compute_features", "features"),
    (network, "compute_masks", "masks"),
    (TamiyoPolicy, "act", "policy"),
    (TamiyoPolicy, "value", "policy"),
    (TamiyoRolloutBuffer, "add", "buffer"),
    (TamiyoRolloutBuffer, "finish", "buffer"),
    (PPOAgent, "update", "update"),
)
"""The same: rollout and update."""
ROWS = {
    "training hosts": ("training",),
    "observing": ("score",),
    "carrying out": ("acting",),
    "resets": ("beginning", "reporting"),
    "control": ("features", "masks", "policy", "buffer"),
    "update": ("update",),
    "store": ("store",),
    "checkpoint": ("checkpoint",),
    "rest": ("showing", "rest"),
}
"""Rows of the table, and the parts that each of them sums up."""
SMALL = TrainConfig(
    tasks=("teacher",),
    num_envs=2,
    budget=Budget(rounds=3),
    world=World(horizon=4, decision_every=1),
    checkpoint=CheckpointConfig(every=1),
)
"""The run that `--quick` times."""
BARS = {
    "control + update + store": ("control", "update", "store"),
    "observing": ("observing",),
}


class Stopwatch:
    """Seconds by part; what an inner part takes is not the outer one's too."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = ["rest"]
        self._since = perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time goes to this part while it lasts, unless it opens another."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def start(self) -> None:
        """Forget everything and count from now."""
        self.seconds.clear()
        self._since = perf_counter()

    def stop(self) -> dict[str, float]:
        """What every part took since the start; together, all the time there was."""
        self._turn()
        return dict(self.seconds)

    def _turn(self) -> None:
        now = perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Rounds:
    """What some rounds took."""

    count: int
    seconds: dict[str, float]
    computed: float
    """Seconds that the process was computing; less than all if it had to wait."""

    @property
    def total(self) -> float:
        """All seconds."""
        return sum(self.seconds.values())

    def took(self, row: str) -> float:
        """Seconds of a row of the table."""
        return sum(self.seconds.get(part, 0.0) for part in ROWS[row])

    def share(self, *rows: str) -> float:
        """Percent of the time that these rows took."""
        return 100 * sum(map(self.took, rows)) / self.total


def run() -> list[Report]:
    """Time the rounds between two checkpoints."""
    config = TrainConfig(tasks=("letter",))
    rounds = Budget(rounds=1 + config.checkpoint.every)
    config = SMALL if timing.QUICK else replace(config, budget=rounds)
    return reports(config, measure(config))


def measure(config: TrainConfig) -> Rounds:
    """What the parts of all rounds but the first take."""
    watch, last = Stopwatch(), config.budget.rounds
    assert last is not None
    assert last > 1
    found: list[Rounds] = []
    began = 0.0

    def tell(record: RoundRecord) -> None:
        nonlocal began
        if record.round == last:
            found.append(Rounds(last - 1, watch.stop(), process_time() - began))
        elif record.round == 1:
            began = process_time()
            watch.start()

    with TemporaryDirectory() as folder, on_the_watch(watch, (*PLAYING, *KEEPING)):
        begin_run(without_evaluation(config, Path(folder)), [OnRoundEnd(tell)])
    return found[0]


def without_evaluation(config: TrainConfig, folder: Path) -> TrainConfig:
    """The same run in a folder of its own, with nothing but rounds."""
    evaluation = EvalConfig(every=NEVER, hosts=1, controllers=())
    return replace(
        config, name="timed", runs=str(folder), start_from=None, evaluation=evaluation
    )


@contextmanager
def on_the_watch(watch: Stopwatch, calls: Calls) -> Iterator[None]:
    """Time these calls while this lasts."""
    with ExitStack() as stack:
        for owner, name, part in calls:
            call = timed(watch, part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, call))
        yield


def reports(config: TrainConfig, rounds: Rounds) -> list[Report]:
    """The table of parts and that of bars."""
    tasks, core = " and ".join(config.tasks), 100 * rounds.computed / rounds.total
    parts = Report(
        f"A round of {config.num_envs} environments on {tasks}",
        ("part", "ms per round", "%"),
        notes=[
            f"{rounds.count} rounds, with {core:.0f} % of a core; trust no time far "
            "below 100.",
            "Observing: scores. Carrying out: actions, planting, lifecycle.",
            "Control: features, masks, policy, and storing the step to learn from.",
            "Rest: rewards, tracks and putting the observation together.",
        ],
    )
    for row in ROWS:
        parts.add(row, 1e3 * rounds.took(row) / rounds.count, rounds.share(row))
    parts.add("together", 1e3 * rounds.total / rounds.count, 100.0)
    bars = Report("Held against the bars", ("what", "%", "at most"))
    for (what, rows), most in zip(BARS.items(), (10.0, 20.0), strict=True):
        bars.add(what, rounds.share(*rows), most)
    return [parts, bars]


def timed(watch: Stopwatch, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, on the watch."""

    @wraps(call)
    def on_the_watch(*what: Any, **more: Any) -> Any:  # noqa: ANN401
        with watch.part(part):
            return call(*what, **more)

    return on_the_watch
