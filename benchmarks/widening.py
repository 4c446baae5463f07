"""Does growing a small network early, by widening it, pay?

Early widening beside its host and beside plain static networks: equal epochs, equal
multiply-adds, equal parameters; see `benchmarks.widening_study` for the
protocol. The whole takes about half an hour on one core. Results are kept line by line
in a file, so an interrupted run continues if it is given the same one:

    python -c "from benchmarks.widening import main; main('widening.jsonl', workers=2)"
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ledger import Ledger
from benchmarks.timing import Report, machine, show
from benchmarks.training import Outcome, Run
from benchmarks.widening_study import (
    EARLY,
    GROWING_CHANGES,
    PLAIN,
    PLAIN_CHANGES,
    Protocol,
    Study,
    carry_out,
    compare,
    host_size,
    in_words,
    project,
    study,
)
from esper.experiment.statistics import iqm_interval, mean_interval


def run(
    file: str | Path | None = None,
    *,
    workers: int = 1,
    protocol: Protocol | None = None,
    save: str | Path | None = None,
) -> list[Report]:
    """Run the study, or what is missing of it, and put it into tables.

    Args:
        file: Where results are kept as they come; a temporary one if None.
        workers: Processes, of one thread each.
        protocol: What to run.
        save: Where to write everything that was found, as one JSON document.
    """
    use = Protocol() if protocol is None else protocol
    if file is None:
        file = Path(tempfile.mkdtemp(prefix="esper-widening-")) / "results.jsonl"
    _say(f"results are kept in {file}")
    ledger = Ledger(
        Path(file), carry_out, Outcome, workers=workers, tell=_Progress(use.runs)
    )
    if not Path(file).is_file():
        minutes = project(use) / 60
        _say(f"about {minutes:.0f} minutes of one core for {use.runs} trainings")
    found = study(use, ledger)
    reports = [table for task in use.tasks for table in _tables(found, task)]
    if save is not None:
        document = as_data(found, reports)
        Path(save).parent.mkdir(parents=True, exist_ok=True)
        Path(save).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return reports


def main(
    file: str | Path | None = None,
    *,
    workers: int = 1,
    save: str | Path | None = None,
    as_json: bool = False,
) -> None:
    """Run and print."""
    show(run(file, workers=workers, save=save), as_json=as_json)


def as_data(found: Study, reports: list[Report]) -> dict[str, Any]:
    """The protocol, what tuning tried and chose, every counted run, and the tables."""
    return {
        "machine": machine(),
        "protocol": asdict(found.protocol),
        "settings": {
            task: {arm: asdict(setting) for arm, setting in arms.items()}
            for task, arms in found.settings.items()
        },
        "outcomes": {
            task: {arm: [asdict(one) for one in each] for arm, each in arms.items()}
            for task, arms in found.outcomes.items()
        },
        "tables": [report.as_data() for report in reports],
    }


def _tables(found: Study, task: str) -> list[Report]:
    outcomes, settings = found.outcomes[task], found.settings[task]
    seeds, host = len(found.protocol.counted), host_size(task, found.protocol)
    arms = Report(
        f"{task}: test accuracy in percent, {seeds} random seeds [95 % interval]",
        ("arm", "mean", "middle half", "parameters", "GMAC", "wall s", "CPU s"),
    )
    accuracies = {}
    for arm in (EARLY, *PLAIN):
        each = outcomes[arm]
        values = accuracies[arm] = np.array([one.test for one in each])
        arms.add(
            arm,
            f"{mean_interval(100 * values):.1f}",
            f"{iqm_interval(100 * values):.1f}",
            f"{np.mean([one.parameters for one in each]):,.0f}",
            f"{np.mean([one.training_macs for one in each]) / 1e9:.2f}",
            f"{np.median([one.seconds for one in each]):.1f}",
            f"{np.median([one.cpu_seconds for one in each]):.1f}",
        )
        chosen = ", ".join(f"{k} {v}" for k, v in settings[arm].chosen.items())
        arms.notes.append(f"{arm}: chosen {chosen}")
    grown = outcomes[EARLY][0]
    refused = sum(one.incidents for one in outcomes[EARLY])
    arms.notes += [
        f"host: {host:,} parameters; grown to {grown.parameters:,}, which an export "
        f"writes as {grown.exported:,} numbers with the zeros between seeds",
        f"offered in tuning besides learning rates: {_offers(GROWING_CHANGES)} to "
        f"{EARLY}, {_offers(PLAIN_CHANGES)} to the others",
        f"batches refused by the guard: {refused}; GMAC: 10^9 multiply-adds in all of "
        "training, with shadow passes, decisions and promises; seconds: medians",
    ]
    gaps = Report(
        f"{task}: {EARLY} less the others, in points, paired by random seed",
        ("against", "difference [95 %]", "p", "p (Holm)", "ahead", "behind"),
    )
    others = {arm: accuracies[arm] for arm in PLAIN}
    for one in compare(accuracies[EARLY], others):
        gap = one.difference
        points = replace(
            gap, estimate=100 * gap.estimate, low=100 * gap.low, high=100 * gap.high
        )
        gaps.add(
            one.name,
            f"{points:+.2f}",
            f"{one.p:.3g}",
            f"{one.adjusted:.3g}",
            f"{one.won} of {one.pairs}",
            f"{one.lost} of {one.pairs}",
        )
        gaps.notes.append(in_words(one, f"On {task}, {EARLY}"))
    return [arms, gaps]


def _offers(changes: Sequence[Mapping[str, Any]]) -> str:
    return " | ".join(f"{k} {v}" for change in changes for k, v in change.items())


class _Progress:
    """A line on stderr for every run that was done just now."""

    def __init__(self, total: int) -> None:
        self._total, self._seen, self._done = total, 0, 0
        self._began = time.monotonic()

    def __call__(self, job: Run, result: Outcome, fresh: bool) -> None:
        self._seen += 1
        if not fresh:
            return
        self._done += 1
        each = (time.monotonic() - self._began) / self._done
        left = max(0, self._total - self._seen) * each / 60
        _say(
            f"{self._seen} of {self._total}: {job.task}, {job.arm}, rng_seed "
            f"{job.rng_seed}, rate {job.rate:g}: {result.decisions:.1%} on the "
            f"decision rows, {result.seconds:.1f} s; about {left:.0f} min left"
        )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
