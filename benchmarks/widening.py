"""Does growing a small network early, by widening it, pay?

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
- Multiply-adds are counted in full (`training`): shadow passes, decisions, promises.
- Tuning: on three random seeds that are not counted, by accuracy on the decision rows.
  Every arm gets one grid of five learning rates and then, at its best, three changes:
  of weight decay. No test row is read.
- Counted: ten random seeds. The test rows are read once, at the end of each run.

The whole takes about half an hour on one core.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from typing import Final

import numpy as np

from benchmarks import timing
from benchmarks.timing import Report
from benchmarks.training import (
    Outcome,
    Run,
    mlp_macs,
    mlp_parameters,
    train,
    width_for,
)
from esper.contracts.errors import BadInput
from esper.experiment.statistics import (
    LEVEL,
    Interval,
    holm,
    iqm_interval,
    mean_interval,
    paired_wilcoxon,
)
from esper.tasks.data import Data
from esper.tasks.letter import letter
from esper.tasks.mnist1d import mnist1d

TASKS: Final[Mapping[str, Callable[[], Data]]] = {"letter": letter, "mnist1d": mnist1d}
EARLY: Final = "early widening"
NEVER: Final = "never, equal epochs"
NEVER_MACS: Final = "never, equal multiply-adds"
STATIC_MACS: Final = "static, equal parameters and multiply-adds"
STATIC: Final = "static, equal parameters and epochs"
SHAPED: Final = "static, shape of the export, equal multiply-adds"
PLAIN: Final = (NEVER, NEVER_MACS, STATIC_MACS, STATIC, SHAPED)
"""The arms that `EARLY` is compared with."""

Setting = dict[str, float]
"""Learning rate and whatever else of a `Run` is tuned."""
CHANGES: Final[tuple[Setting, ...]] = (
    {"decay": 0.0},
    {"decay": 1e-3},
    {"decay": 0.1},
)


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


QUICK: Final = Protocol(
    tasks=("mnist1d",),
    rates=(3e-2,),
    tuning=(100,),
    counted=(0, 1),
    epochs=2,
    batch=60,
    rows=200,
)
"""What `--quick` runs."""


Outcomes = dict[str, dict[str, list[Outcome]]]
"""By task and arm: one for each random seed, in their order."""
Workers = Callable[[Sequence[Run]], list[Outcome]]
"""Carries out runs and gives their outcomes in the same order."""


class Study:
    """The runs of one protocol: every other arm follows from what `EARLY` came to.

    Args:
        protocol: What to run.
        work: Carries out runs; see `in_processes`.
    """

    def __init__(self, protocol: Protocol, work: Workers) -> None:
        self.protocol, self._work = protocol, work
        self.settings: dict[tuple[str, str], Setting] = {}
        """What tuning chose, by task and arm."""
        self._grown: dict[tuple[str, int], Outcome] = {}

    def run(self) -> Outcomes:
        """Tune every arm, then run it on the counted random seeds."""
        use = self.protocol
        self._tune([EARLY])
        self._outcomes([EARLY], use.tuning)
        self._tune(PLAIN)
        early = self._outcomes([EARLY], use.counted, judged=True)
        plain = self._outcomes(PLAIN, use.counted, judged=True)
        return {task: {**early[task], **plain[task]} for task in use.tasks}

    def _tune(self, arms: Sequence[str]) -> None:
        """Choose a learning rate for each arm, then perhaps one change."""
        use = self.protocol
        for task in use.tasks:
            for arm in arms:
                scores = self._scores(task, arm, [{"rate": r} for r in use.rates])
                _, best = max(scores, key=lambda one: one[0])
                scores += self._scores(task, arm, [best | more for more in CHANGES])
                self.settings[task, arm] = max(scores, key=lambda one: one[0])[1]

    def _scores(
        self, task: str, arm: str, settings: Sequence[Setting]
    ) -> list[tuple[float, Setting]]:
        """Mean accuracy on the decision rows, beside each setting."""
        rng_seeds = self.protocol.tuning
        done = self._work(
            [self._one(task, arm, n, each) for each in settings for n in rng_seeds]
        )
        scores = np.reshape([each.decisions for each in done], (len(settings), -1))
        return list(zip(scores.mean(axis=1).tolist(), settings, strict=True))

    def _outcomes(
        self, arms: Sequence[str], rng_seeds: Sequence[int], *, judged: bool = False
    ) -> Outcomes:
        """Run arms in their chosen settings."""
        found: Outcomes = {task: {} for task in self.protocol.tasks}
        for task in found:
            for arm in arms:
                setting = self.settings[task, arm]
                runs = [self._one(task, arm, n, setting, judged) for n in rng_seeds]
                done = found[task][arm] = self._work(runs)
                if arm == EARLY:
                    pairs = zip(rng_seeds, done, strict=True)
                    self._grown |= {(task, n): each for n, each in pairs}
        return found

    def _one(
        self, task: str, arm: str, rng_seed: int, setting: Setting, judged: bool = False
    ) -> Run:
        """One training of one arm."""
        use = self.protocol
        data = load(task, use.rows)
        inputs = data.features.shape[1]
        width, steps = use.width, use.epochs * (round(0.6 * len(data)) // use.batch)
        if arm not in (EARLY, NEVER):
            grown = self._grown[task, rng_seed]
            if arm in (STATIC, STATIC_MACS):
                width = width_for(inputs, data.classes, grown.parameters)
            elif arm == SHAPED:
                width = width_for(inputs, data.classes, grown.exported)
            if arm != STATIC:
                cost = 3 * mlp_macs(inputs, width, data.classes) * use.batch
                steps = max(1, round(grown.training_macs / cost))
        run = Run(
            task=task,
            arm=arm,
            rng_seed=rng_seed,
            rows=use.rows,
            width=width,
            batch=use.batch,
            steps=steps,
            budget=use.budget if arm == EARLY else None,
            epochs=use.epochs,
            judged=judged,
            rate=0.0,
        )
        return replace(run, **setting)  # type: ignore[arg-type]


def run(workers: int = 1) -> list[Report]:
    """Run the study and put it into tables.

    Args:
        workers: Processes, of one thread each.
    """
    use = QUICK if timing.QUICK else Protocol()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        study = Study(use, in_processes(map if workers == 1 else pool.map))
        found = study.run()
    return [table for task in use.tasks for table in _tables(study, task, found[task])]


def in_processes(mapped: Callable[..., Iterable[Outcome]]) -> Workers:
    """Carries out every run once, by a function such as `map`."""
    known: dict[Run, Outcome] = {}

    def work(runs: Sequence[Run]) -> list[Outcome]:
        missing = [one for one in dict.fromkeys(runs) if one not in known]
        for one, outcome in zip(missing, mapped(carry_out, missing), strict=True):
            known[one] = outcome
            print(
                f"{len(known)}: {one.task}, {one.arm}, rng_seed {one.rng_seed}, rate "
                f"{one.rate:g}: {outcome.decisions:.1%} on the decision rows, "
                f"{outcome.seconds:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        return [known[one] for one in runs]

    return work


def carry_out(one: Run) -> Outcome:
    """One run on its own; what processes are given to do."""
    return train(one, load(one.task, one.rows))


@cache
def load(task: str, rows: int | None) -> Data:
    """The data of a task; only its first rows if a number is given."""
    data = TASKS[task]()
    if rows is None:
        return data
    return replace(data, features=data.features[:rows], labels=data.labels[:rows])


def _tables(
    study: Study, task: str, outcomes: Mapping[str, Sequence[Outcome]]
) -> list[Report]:
    use = study.protocol
    data = load(task, use.rows)
    host = mlp_parameters(data.features.shape[1], use.width, data.classes)
    arms = Report(
        f"{task}: test accuracy in percent, {len(use.counted)} random seeds "
        "[95 % interval]",
        ("arm", "mean", "middle half", "parameters", "GMAC", "wall s", "CPU s"),
    )
    accuracies = {}
    for arm in (EARLY, *PLAIN):
        each = outcomes[arm]
        values = accuracies[arm] = 100 * np.array([one.test for one in each])
        arms.add(
            arm,
            f"{mean_interval(values):.1f}",
            f"{iqm_interval(values):.1f}",
            f"{np.mean([one.parameters for one in each]):,.0f}",
            f"{np.mean([one.training_macs for one in each]) / 1e9:.2f}",
            f"{np.median([one.seconds for one in each]):.1f}",
            f"{np.median([one.cpu_seconds for one in each]):.1f}",
        )
        chosen = ", ".join(f"{k} {v}" for k, v in study.settings[task, arm].items())
        arms.notes.append(f"{arm}: chosen {chosen}")
    grown = outcomes[EARLY][0]
    refused = sum(one.incidents for one in outcomes[EARLY])
    arms.notes += [
        f"host: {host:,} parameters; grown to {grown.parameters:,}, which an export "
        f"writes as {grown.exported:,} numbers",
        f"batches refused by the guard: {refused}; GMAC: 10^9 multiply-adds in all of "
        "training, with shadow passes, decisions and promises; seconds: medians",
    ]
    gaps = Report(
        f"{task}: {EARLY} less the others, in points, paired by random seed",
        ("against", "difference [95 %]", "p", "p (Holm)", "ahead", "behind", "shown"),
    )
    ours = accuracies.pop(EARLY)
    p_values = [paired_wilcoxon(ours, theirs) for theirs in accuracies.values()]
    for (arm, theirs), p, adjusted in zip(
        accuracies.items(), p_values, holm(p_values), strict=True
    ):
        gap = mean_interval(ours - theirs)
        gaps.add(
            arm,
            f"{gap:+.2f}",
            f"{p:.3g}",
            f"{adjusted:.3g}",
            f"{(ours > theirs).sum()} of {len(ours)}",
            f"{(ours < theirs).sum()} of {len(ours)}",
            shown(gap, adjusted),
        )
    return [arms, gaps]


def shown(gap: Interval, adjusted: float) -> str:
    """Whether a difference is more than luck would explain."""
    if adjusted >= LEVEL or gap.low <= 0.0 <= gap.high:
        return "no"
    return "better" if gap.estimate > 0 else "worse"
