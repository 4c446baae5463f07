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
  of weight decay, and for `early` of the newborns' learning rate. No test row is read.
- Counted: ten random seeds. The test rows are read once, at the end of each run.

The whole takes about half an hour on one core. With `--file` results are kept line by
line, and an interrupted study continues if it is given the same one.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

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
        work: Carries out runs; see `Ledger`.
    """
    plan = _Plan(protocol, work)
    plan.tune([EARLY])
    plan.outcomes([EARLY], protocol.tuning, counted=False)
    plan.tune(PLAIN)
    early = plan.outcomes([EARLY], protocol.counted, counted=True)
    plain = plan.outcomes(PLAIN, protocol.counted, counted=True)
    outcomes = {task: {**early[task], **plain[task]} for task in protocol.tasks}
    return Study(protocol, plan.settings, outcomes)


def run(
    file: str | None = None, workers: int = 1, save: str | None = None
) -> list[Report]:
    """Run the study, or what is missing of it, and put it into tables.

    Args:
        file: Where results are kept as they come; None: nowhere.
        workers: Processes, of one thread each.
        save: Where to write everything that was found, as one JSON document.
    """
    use = QUICK if timing.QUICK else Protocol()
    found = study(use, Ledger(None if file is None else Path(file), workers, use.runs))
    reports = [table for task in use.tasks for table in _tables(found, task)]
    if save is not None:
        tables = [report.as_data() for report in reports]
        document = json.dumps(asdict(found) | {"tables": tables}, indent=1)
        Path(save).write_text(document + "\n", encoding="utf-8")
    return reports


class Ledger:
    """Carries out runs that are not in a file, and keeps what came of them there.

    One line of JSON per run; a line that was cut off is as if it were not there.

    Args:
        file: Where to keep outcomes; None: in memory only.
        workers: Processes; with 1, runs are carried out in this one.
        total: How many runs there will be, for the progress on stderr.
    """

    def __init__(self, file: Path | None, workers: int = 1, total: int = 0) -> None:
        self._file, self._workers, self._total = file, workers, total
        self._known: dict[str, Outcome] = {}
        if file is not None and file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                self._known[_key(Run(**entry["job"]))] = Outcome(**entry["result"])

    def __call__(self, runs: Sequence[Run]) -> list[Outcome]:
        """The outcomes of runs, in their order."""
        missing = {_key(one): one for one in runs if _key(one) not in self._known}
        for key, outcome in self._carry_out(missing):
            self._known[key] = outcome
            self._write(missing[key], outcome)
        return [self._known[_key(one)] for one in runs]

    def _carry_out(self, runs: Mapping[str, Run]) -> Iterator[tuple[str, Outcome]]:
        if self._workers == 1:
            for key, one in runs.items():
                yield key, carry_out(one)
            return
        with ProcessPoolExecutor(
            self._workers, mp_context=get_context("spawn")
        ) as pool:
            futures = {pool.submit(carry_out, one): key for key, one in runs.items()}
            for future in as_completed(futures):
                yield futures[future], future.result()

    def _write(self, one: Run, outcome: Outcome) -> None:
        print(
            f"{len(self._known)} of {self._total}: {one.task}, {one.arm}, rng_seed "
            f"{one.rng_seed}, rate {one.rate:g}: {outcome.decisions:.1%} on the "
            f"decision rows, {outcome.seconds:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        if self._file is None:
            return
        line = json.dumps({"job": asdict(one), "result": asdict(outcome)})
        cut_off = self._file.is_file() and not self._file.read_bytes().endswith(b"\n")
        with self._file.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut_off else "") + line + "\n")


def _key(one: Run) -> str:
    return json.dumps(asdict(one), sort_keys=True)


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


def _tables(found: Study, task: str) -> list[Report]:
    outcomes, use = found.outcomes[task], found.protocol
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
        arms.notes.append(f"{arm}: chosen {_words(found.settings[task][arm].chosen)}")
    grown = outcomes[EARLY][0]
    refused = sum(one.incidents for one in outcomes[EARLY])
    arms.notes += [
        f"host: {host:,} parameters; grown to {grown.parameters:,}, which an export "
        f"writes as {grown.exported:,} numbers with the zeros between seeds",
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


def _words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in setting.items())
