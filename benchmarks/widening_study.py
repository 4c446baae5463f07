"""Does early widening pay? A small host, grown while it trains, beside what it is not.

Fixed before any run that is counted. A first run of this study, on other random seeds,
offered weight decay to the plain arms only; this one offers it to all:

- Tasks: letter (20,000 rows) and MNIST-1D (5,000 rows, drawn once). A random seed
  deals out 60 / 20 / 20 percent for training, decisions and the test.
- Host: input -> 12 -> 12 -> classes with ReLU; 30 epochs of whole batches of 128,
  AdamW, one-cycle over the run's own steps. All arms share one training loop and, by
  random seed, the split, the order of batches and the stream of first weights.
- Arms: `early` grows by widen_8 / 16 / 32 with controller "early", to at most 4.2 x the
  host's parameters. The host as it is, for as many epochs and for as many multiply-adds
  as `early` spent. Plain static networks input -> w -> w -> classes with as many
  parameters as the grown one, for its multiply-adds and for its epochs; and with the
  shape that the grown one is exported in, for its multiply-adds.
- Multiply-adds are counted in full (see `macs`): shadow passes, decisions, promises.
- Tuning: on three random seeds that are not counted, by accuracy on the decision rows.
  Every arm gets one grid of five learning rates and then, at its best, three changes:
  of weight decay, and for `early` of the newborns' learning rate. No test row is read.
- Counted: ten random seeds. The test rows are read once, at the end of each run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from benchmarks.macs import mlp_macs, mlp_parameters, width_for
from benchmarks.training import Outcome, Run, train
from esper.contracts.errors import BadInput
from esper.experiment.statistics import (
    LEVEL,
    Floats,
    Interval,
    holm,
    mean_interval,
    paired_wilcoxon,
)
from esper.tasks.data import Data
from esper.tasks.letter import letter
from esper.tasks.mnist1d import mnist1d

TASKS: Final[Mapping[str, Callable[[], Data]]] = MappingProxyType(
    {"letter": letter, "mnist1d": mnist1d}
)
EARLY: Final = "early widening"
NEVER: Final = "never, equal epochs"
NEVER_MACS: Final = "never, equal multiply-adds"
STATIC_MACS: Final = "static, equal parameters and multiply-adds"
STATIC: Final = "static, equal parameters and epochs"
SHAPED: Final = "static, shape of the export, equal multiply-adds"
PLAIN: Final = (NEVER, NEVER_MACS, STATIC_MACS, STATIC, SHAPED)
"""The arms that `EARLY` is compared with."""

GROWING_CHANGES: Final[tuple[Mapping[str, Any], ...]] = (
    {"newborn": 1.0},
    {"decay": 0.1},
    {"newborn": 1.0, "decay": 0.1},
)
PLAIN_CHANGES: Final[tuple[Mapping[str, Any], ...]] = (
    {"decay": 0.0},
    {"decay": 1e-3},
    {"decay": 0.1},
)
PILOT: Final = 3
"""Epochs of the short runs that tell how long the long ones will take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """What is run; the defaults are what the module's first lines say."""

    tasks: tuple[str, ...] = tuple(TASKS)
    rates: tuple[float, ...] = (3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
    tuning: tuple[int, ...] = (2000, 2001, 2002)
    """Random seeds that choose settings."""
    counted: tuple[int, ...] = tuple(range(100, 110))
    """Random seeds that are counted."""
    epochs: int = 30
    batch: int = 128
    width: int = 12
    budget: float = 3.2
    """Parameters that may be added, as a multiple of the host's."""
    rows: int | None = None
    """Rows of each task that are used; None: all."""

    def __post_init__(self) -> None:
        """Refuse a protocol that would judge what it tuned."""
        unknown = [task for task in self.tasks if task not in TASKS]
        if unknown or not self.tasks:
            raise BadInput(f"tasks must be some of {[*TASKS]}, got {[*self.tasks]}.")
        shared = {*self.tuning} & {*self.counted}
        if shared or not self.tuning or not self.counted or not self.rates:
            raise BadInput(
                "tuning and counted random seeds must be some, and no one both; got "
                f"{self.tuning} and {self.counted}, with rates {self.rates}."
            )

    @property
    def runs(self) -> int:
        """How many trainings this is."""
        changes = len(self.rates) + len(GROWING_CHANGES)
        each = changes * len(self.tuning) + len(self.counted)
        return each * len(self.tasks) * (1 + len(PLAIN))


@dataclass(frozen=True, slots=True)
class Setting:
    """What tuning chose for one arm, and from what."""

    chosen: Mapping[str, Any]
    scores: Mapping[str, float]
    """Mean accuracy on the decision rows, by what was tried."""


@dataclass(frozen=True, slots=True)
class Study:
    """Everything that came of a protocol, by task and arm."""

    protocol: Protocol
    settings: Mapping[str, Mapping[str, Setting]]
    outcomes: Mapping[str, Mapping[str, list[Outcome]]]
    """One per counted random seed, in their order."""


Workers = Callable[[Sequence[Run]], list[Outcome]]
"""Carries out runs, in any order, and gives their outcomes in the order of the runs."""


@dataclass(slots=True)
class _Plan:
    """The runs of one protocol, step by step: each arm follows from `EARLY`."""

    protocol: Protocol
    work: Workers
    settings: dict[str, dict[str, Setting]] = field(default_factory=dict)
    grown: dict[tuple[str, int], Outcome] = field(default_factory=dict)
    """What `EARLY` came to in its chosen setting, by task and random seed."""

    def tune(self, arms: Sequence[str]) -> None:
        """Choose a learning rate for each arm, then perhaps one change."""
        tasks, rates = self.protocol.tasks, self.protocol.rates
        pairs = [(task, arm) for task in tasks for arm in arms]
        tried: list[tuple[str, str, dict[str, Any]]] = [
            (task, arm, {"rate": rate}) for task, arm in pairs for rate in rates
        ]
        found = self._scores(tried)
        best = {
            pair: max(found[pair], key=lambda one: one[1])[0]["rate"] for pair in pairs
        }
        tried = [
            (task, arm, {"rate": best[task, arm], **change})
            for task, arm in pairs
            for change in (GROWING_CHANGES if arm == EARLY else PLAIN_CHANGES)
        ]
        for pair, more in self._scores(tried).items():
            found[pair] += more
        for task, arm in pairs:
            scores = found[task, arm]
            chosen = max(scores, key=lambda one: one[1])[0]
            self.settings.setdefault(task, {})[arm] = Setting(
                chosen, {_words(setting): score for setting, score in scores}
            )

    def outcomes(
        self, arms: Sequence[str], rng_seeds: Sequence[int], *, counted: bool
    ) -> dict[str, dict[str, list[Outcome]]]:
        """Run arms in their chosen settings."""
        runs = [
            self.run(task, arm, rng_seed, self.settings[task][arm].chosen, counted)
            for task in self.protocol.tasks
            for arm in arms
            for rng_seed in rng_seeds
        ]
        done = iter(self.work(runs))
        found: dict[str, dict[str, list[Outcome]]] = {}
        for task in self.protocol.tasks:
            found[task] = {arm: [next(done) for _ in rng_seeds] for arm in arms}
            if EARLY in arms:
                for rng_seed, one in zip(rng_seeds, found[task][EARLY], strict=True):
                    self.grown[task, rng_seed] = one
        return found

    def run(
        self,
        task: str,
        arm: str,
        rng_seed: int,
        setting: Mapping[str, Any],
        counted: bool = False,
    ) -> Run:
        """One training of one arm."""
        use = self.protocol
        data = load(task, use.rows)
        inputs = data.features.shape[1]
        epoch = round(0.6 * len(data)) // use.batch
        base = Run(
            task=task,
            arm=arm,
            rng_seed=rng_seed,
            rows=use.rows,
            width=use.width,
            batch=use.batch,
            steps=use.epochs * epoch,
            budget=use.budget if arm == EARLY else None,
            epochs=use.epochs,
            judged=counted,
            rate=0.0,
        )
        if arm not in (EARLY, NEVER):
            grown, width = self.grown[task, rng_seed], use.width
            if arm in (STATIC, STATIC_MACS):
                width = width_for(inputs, data.classes, grown.parameters)
            elif arm == SHAPED:
                width = width_for(inputs, data.classes, grown.exported)
            steps = base.steps
            if arm != STATIC:
                cost = 3 * mlp_macs(inputs, width, data.classes) * use.batch
                steps = max(1, round(grown.training_macs / cost))
            base = replace(base, width=width, steps=steps)
        return replace(base, **setting)

    def _scores(
        self, tried: Sequence[tuple[str, str, dict[str, Any]]]
    ) -> dict[tuple[str, str], list[tuple[dict[str, Any], float]]]:
        runs = [
            self.run(task, arm, rng_seed, setting)
            for task, arm, setting in tried
            for rng_seed in self.protocol.tuning
        ]
        done = iter(self.work(runs))
        found: dict[tuple[str, str], list[tuple[dict[str, Any], float]]] = {}
        for task, arm, setting in tried:
            each = [next(done).decisions for _ in self.protocol.tuning]
            found.setdefault((task, arm), []).append((setting, float(np.mean(each))))
        return found


def study(protocol: Protocol, work: Workers) -> Study:
    """Tune every arm, then run it on the counted random seeds.

    Args:
        protocol: What to run.
        work: Carries out runs; see `ledger` for one that can be interrupted.
    """
    plan = _Plan(protocol, work)
    plan.tune([EARLY])
    plan.outcomes([EARLY], protocol.tuning, counted=False)
    plan.tune(PLAIN)
    early = plan.outcomes([EARLY], protocol.counted, counted=True)
    plain = plan.outcomes(PLAIN, protocol.counted, counted=True)
    outcomes = {task: {**early[task], **plain[task]} for task in protocol.tasks}
    return Study(protocol, plan.settings, outcomes)


@dataclass(frozen=True, slots=True)
class Gap:
    """One arm less another, paired by random seed."""

    name: str
    """The other arm."""
    difference: Interval
    p: float
    adjusted: float
    """The p-value, corrected for how many comparisons were made."""
    won: int
    lost: int
    pairs: int

    @property
    def shown(self) -> bool:
        """Whether the difference is more than luck would explain."""
        low, high = self.difference.low, self.difference.high
        return self.adjusted < LEVEL and (low > 0.0 or high < 0.0)


def compare(ours: Floats, others: Mapping[str, Floats]) -> list[Gap]:
    """Compare one arm with each of the others; values are paired by position."""
    p_values = [paired_wilcoxon(ours, theirs) for theirs in others.values()]
    return [
        Gap(
            name,
            mean_interval(ours - theirs),
            p,
            adjusted,
            won=int((ours > theirs).sum()),
            lost=int((ours < theirs).sum()),
            pairs=len(ours),
        )
        for (name, theirs), p, adjusted in zip(
            others.items(), p_values, holm(p_values), strict=True
        )
    ]


def in_words(gap: Gap, subject: str) -> str:
    """What a comparison shows or does not show, in one sentence; figures in points."""
    points = abs(100 * gap.difference.estimate)
    low, high = 100 * gap.difference.low, 100 * gap.difference.high
    record = f"ahead on {gap.won} of {gap.pairs} random seeds, p = {gap.adjusted:.2g}"
    against, better = f"'{gap.name}'", gap.difference.estimate > 0
    if gap.shown:
        return (
            f"{subject} {'beats' if better else 'loses to'} {against} by {points:.1f} "
            f"points ({low:+.1f} to {high:+.1f}; {record})."
        )
    if low > 0.0 or high < 0.0:
        return (
            f"{subject} is {'ahead of' if better else 'behind'} {against} by "
            f"{points:.1f} points on these seeds ({low:+.1f} to {high:+.1f}), but the "
            f"ranks do not settle it ({record})."
        )
    return (
        f"{subject} against {against}: no difference is shown; it may lie anywhere "
        f"from {low:+.1f} to {high:+.1f} points ({record})."
    )


def project(protocol: Protocol) -> float:
    """Seconds that all runs would take one after the other, from short ones."""
    plan = _Plan(protocol, lambda runs: [carry_out(one) for one in runs])
    seconds = 0.0
    for task in protocol.tasks:
        long = plan.run(task, EARLY, protocol.tuning[0], {"rate": protocol.rates[0]})
        steps = PILOT * long.steps // protocol.epochs
        short = replace(long, steps=steps, epochs=PILOT)
        growing, plain = plan.work([short, replace(short, budget=None)])
        # Equal multiply-adds are about as many more steps as the host has grown.
        times = len(PLAIN) + protocol.budget
        each = growing.seconds + times * plain.seconds
        seconds += each * long.steps / steps
    return seconds * protocol.runs / len(protocol.tasks) / (1 + len(PLAIN))


def carry_out(run_: Run) -> Outcome:
    """One run on its own; what processes are given to do."""
    return train(run_, load(run_.task, run_.rows))


@cache
def load(task: str, rows: int | None) -> Data:
    """The data of a task; only its first rows if a number is given."""
    data = TASKS[task]()
    if rows is None:
        return data
    return replace(data, features=data.features[:rows], labels=data.labels[:rows])


def host_size(task: str, protocol: Protocol) -> int:
    """Parameters of a task's host."""
    data = load(task, protocol.rows)
    return mlp_parameters(data.features.shape[1], protocol.width, data.classes)


def _words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())
