"""Does a run that is killed go on as if nothing had happened, to the bit?

Small runs on real tasks, and of PPO on CartPole, are killed with SIGKILL at moments
drawn from the whole length of a run, once, twice or five times, and gone on with until
they are complete. Each is then held against a run that nobody disturbed: every number
of every checkpoint, every row that counts, every row that was acknowledged. Besides,
each change that two checkpoints make to a disk is a moment to die at, and to lose power
at. Twins that do one thing badly must be caught by the same means.
"""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from torch import Tensor

from benchmarks import timing
from benchmarks.timing import Cell, Report, sizes
from esper.contracts.errors import InvalidInputError
from esper.rl.settings import PPORunConfig
from esper.runs.run import Run
from esper.runs.train_config import TrainConfig
from tests.runs.crash_points import LOSSES, InPlace, Saves
from tests.training.killed_runs import (
    Audit,
    Life,
    audit,
    forgotten_normaliser,
    ghostly_store,
    hasty_store,
    live,
    small_ppo,
    small_run,
    warm_up,
)

Settings = TrainConfig | PPORunConfig
Twin = Callable[[], AbstractContextManager[object]]
Tensors = dict[str, Tensor]
Trial = tuple[Audit, list[Life]]

DEATHS = (1, 1, 2, 1, 5)
"""How often successive runs are killed, over and over."""
COLUMNS = (
    "when",
    "runs",
    "kills",
    "same bits",
    "same rows",
    "acknowledged",
    "lost",
    "doubled",
    "missing",
    "ready, ms",
    "at most",
)


def run(kills: int = 50) -> list[Report]:
    """Kill runs, saves and twins.

    Args:
        kills: Runs that are killed at random moments, some of them several times.
    """
    if kills < 1:
        raise InvalidInputError(f"kills must be at least 1, got {kills}.")
    warm_up()
    with TemporaryDirectory() as folder:
        rounds = 6 if timing.QUICK else 10
        trials = Trials(Path(folder), rounds)
        return [
            killed_runs(trials, kills),
            killed_runs(Trials(Path(folder), rounds, small_ppo), min(kills, 20)),
            crash_points(trials),
            bad_twins(trials),
        ]


class Trials:
    """Runs that are killed, beside one that is not.

    Args:
        folder: Where they are.
        rounds: Of each; there is a checkpoint after every second one.
        make: Settings of a run from folder, name and rounds.
    """

    def __init__(
        self, folder: Path, rounds: int, make: Callable[..., Settings] = small_run
    ) -> None:
        self.folder, self.rounds, self.make, self._count = folder, rounds, make, 0
        self.whole, self.seconds = self.undisturbed()

    def undisturbed(self, twin: Twin = nullcontext) -> tuple[Path, float]:
        """A run that is not killed, and how long it took."""
        config = self._next()
        return self._path(config), live(config, twin=twin).seconds

    def at_random(self, deaths: int, chance: random.Random) -> Trial:
        """A run that is killed so often, at moments of what is left of it."""
        config, lives = self._next(), list[Life]()
        while len(lives) < deaths:
            left = 1 - max((life.saved for life in lives), default=0) / self.rounds
            until = chance.uniform(0, self.seconds * left)
            lives.append(live(config, until=until))
            if not lives[-1].killed:  # it was faster than its death
                config, lives = self._next(), []
        return self._judged(config, lives, nullcontext, self.whole)

    def after(
        self, *words: str, twins: Sequence[Twin] = (), whole: Path | None = None
    ) -> Trial:
        """A run whose lives end with these words; a twin may live each of them."""
        config, lives = self._next(), list[Life]()
        everyone = [*twins, *(len(words) + 1 - len(twins)) * [nullcontext]]
        for last, twin in zip(words, everyone, strict=False):
            lives.append(live(config, last_words=last, twin=twin))
        return self._judged(config, lives, everyone[-1], whole or self.whole)

    def states(self) -> dict[int, Tensors]:
        """The last three states of the whole run, by step."""
        kept = Run.read(self.whole).checkpoints()
        return {step: kept.load(step).tensors for step in kept.steps()[-3:]}

    def _next(self) -> Settings:
        self._count += 1
        name = f"{self.make.__name__}-{self._count}"
        return self.make(self.folder, name, self.rounds)

    def _path(self, config: Settings) -> Path:
        return self.folder / str(config.name)

    def _judged(
        self, config: Settings, lives: list[Life], twin: Twin, whole: Path
    ) -> Trial:
        """Go on to the end and hold it against the whole run; nothing is left."""
        path = self._path(config)
        if not path.exists() or Run.read(path).finished is None:
            lives.append(live(config, twin=twin))
        found = audit(path, lives, whole)
        shutil.rmtree(path)
        return found, lives


def killed_runs(trials: Trials, kills: int) -> Report:
    """The table of runs that were killed."""
    length = f"{trials.rounds} rounds in {trials.seconds:.1f} s"
    report = Report(
        f"Runs of {trials.make.__name__}, {length}, killed by SIGKILL",
        COLUMNS,
        notes=[
            "Same bits: SHA-256 of every tensor of every checkpoint that is kept.",
            "Same rows: all that count, but for how long they took. Acknowledged: "
            "rows that were reported as written.",
            "Ready: median of resumed ones, from the start of a process that has "
            "imported everything.",
            f"0 failures of {kills} runs would mean that at most "
            f"{min(300 / kills, 100):.3g} % of them fail (95 %).",
        ],
    )
    chance, found = random.Random(0), dict[str, list[Trial]]()
    everything: list[Trial] = []
    for number in range(kills):
        deaths = DEATHS[number % len(DEATHS)]
        trial = trials.at_random(deaths, chance)
        when = f"at random, {deaths} {'time' if deaths == 1 else 'times'}"
        found.setdefault(when, []).append(trial)
        everything.append(trial)
    found["at random, in all"] = everything
    words: list[tuple[str, ...]] = [
        ("saved 4",),
        ("rows 1",),  # before there is any checkpoint
        ("saved 0", "rows 2"),  # rows that no checkpoint knows of
        ("round 3", "rows 2", "saved 6"),
        (f"saved {trials.rounds}", "ready"),  # only the last word is left
    ]
    found["right after rows or a save"] = [trials.after(*w) for w in sizes(words)]
    for when, some in found.items():
        report.add(when, *summed_up(some))
        report.notes += [] if some is everything else troubles(some)
    return report


def summed_up(trials: Sequence[Trial]) -> Iterator[Cell]:
    """The cells of a row."""
    audits = [found for found, _ in trials]
    resumed = [life.ready for _, lives in trials for life in lives[1:] if life.ready]
    yield len(trials)
    yield sum(life.killed for _, lives in trials for life in lives)
    for name in ("same_state", "same_rows"):
        yield f"{sum(getattr(found, name) for found in audits)} of {len(trials)}"
    for name in ("acknowledged", "lost", "doubled", "missing"):
        yield sum(getattr(found, name) for found in audits)
    yield 1e3 * median(resumed) if resumed else None
    yield 1e3 * max(resumed) if resumed else None


def troubles(trials: Sequence[Trial]) -> list[str]:
    """What else was wrong, one line each."""
    return [line for found, _ in trials for line in found.troubles]


def crash_points(trials: Trials) -> Report:
    """The table of every moment of two saves that a crash can hit."""
    report = Report(
        "Crashes at every change that two checkpoints make to a disk",
        ("crash", "moments", "whole states", "torn states"),
    )
    states = trials.states()
    saves = Saves(trials.folder, states)
    for crash, left in saves.crashes().items():
        torn = left.count(None)
        report.add(crash, len(left), len(left) - torn, torn)
    changes = ", ".join(f"{count} {word}" for word, count in saves.changes().items())
    size = sum(tensor.nbytes for tensor in next(iter(states.values())).values())
    report.notes += [
        f"The changes: {changes}.",
        f"States of a run, {size / 1e6:.1f} MB each. Whole: one of the three, every "
        "bit, and none older than one whose save had returned.",
        f"Power: {len(LOSSES)} ways to lose what was not synced, after each change.",
    ]
    return report


def bad_twins(trials: Trials) -> Report:
    """The table of twins that do one thing badly."""
    report = Report(
        "The same with one thing done badly", ("twin", "result", "how it shows")
    )

    def add(twin: str, count: int, what: str) -> None:
        result = "caught" if count else "MISSED"
        report.add(twin, result, f"{count} {what}")

    left = Saves(trials.folder, trials.states(), InPlace).crashes()
    torn = sum(found.count(None) for found in left.values())
    add("checkpoints are written in place", torn, "torn states")
    forgetful = [forgotten_normaliser] * 2
    whole, _ = trials.undisturbed(forgotten_normaliser)
    found, _ = trials.after("saved 4", twins=forgetful, whole=whole)
    other = int(not found.same_state)
    add("statistics of returns are forgotten", other, "run of other bits")
    found, _ = trials.after("saved 4", twins=[hasty_store])
    add("rows are acknowledged when queued", found.lost, "rows lost")
    twins = [nullcontext, nullcontext, ghostly_store]
    found, _ = trials.after("saved 0", "rows 2", twins=twins)
    add("rows of the dead go on counting", found.doubled, "rows doubled")
    return report
