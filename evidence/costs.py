r"""What training a controller took, when it pays, and what went wrong.

Break-even: somebody without her trains the plain network at 1, 2, 4 and 5 times the
host's size and keeps the best; one use of her is one training.

    saved by a use = 4 * seconds of a plain training - seconds of hers
    uses           = seconds of training one controller / saved by a use
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isfinite, nan
from typing import Final

import numpy as np

from evidence.claims import LEARNED
from evidence.readout import Cells, Readout, Row

SIZES: Final = (1, 2, 4, 5)
"""Of plain networks that are tried instead, as a multiple of the host's."""
HOUR: Final = 3_600.0
PLAIN: Final = "static"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What training her took, and what a use of her saves."""

    controllers: int
    hours: float
    """Of one, on one core."""
    env_steps: float
    """Decisions of one."""
    use: float
    """Seconds of one network under her, mean over tasks."""
    plain: float
    """Seconds of one plain training of equal parameters, mean over the same tasks."""
    work: float
    """Multiply-adds of one use, as a share of those of all plain sizes."""

    @property
    def saved(self) -> float:
        """Seconds that one use saves; below 0: it costs more."""
        return len(SIZES) * self.plain - self.use

    @property
    def uses(self) -> int | None:
        """After how many uses she has paid for herself; None: never, or not known."""
        if not (self.saved > 0.0 and isfinite(self.hours)):
            return None
        return ceil(self.hours * HOUR / self.saved)


def cost(readout: Readout, trainings: Sequence[Row], tasks: Sequence[str]) -> Cost:
    """Read the cost of a controller from what its campaign noted.

    Args:
        readout: What was counted.
        trainings: Rows of the table of trainings.
        tasks: Those of the protocol.
    """
    own = [row for row in trainings if row["arm"] == LEARNED]
    seconds, macs = readout.figure("seconds"), readout.figure("training_macs")
    added = readout.figure("added")
    both = [t for t in seconds.done(LEARNED, tasks) if seconds.done(PLAIN, [t])]
    shares = []
    for task in both:
        # A plain network's work grows with its size.
        per_size = _mean(macs, PLAIN, task) / (1.0 + _mean(added, PLAIN, task))
        shares.append(_mean(macs, LEARNED, task) / (sum(SIZES) * per_size))
    return Cost(
        controllers=len(own),
        hours=_of([float(row["seconds"]) for row in own]) / HOUR,
        env_steps=_of([float(row["env_steps"]) for row in own]),
        use=_of([_mean(seconds, LEARNED, task) for task in both]),
        plain=_of([_mean(seconds, PLAIN, task) for task in both]),
        work=_of(shares),
    )


def told(found: Cost) -> list[str]:
    """The same in sentences."""
    if not found.controllers:
        return ["No controller is trained yet."]
    many = "controller" if found.controllers == 1 else "controllers"
    said = [
        f"Training one controller took {found.hours:.1f} hours of one core and "
        f"{found.env_steps:,.0f} decisions (mean of {found.controllers} {many})."
    ]
    if not isfinite(found.use):
        return said
    sizes = ", ".join(f"{size}×" for size in SIZES[:-1]) + f" and {SIZES[-1]}×"
    said.append(
        f"*Break-even.* Somebody without her would train the plain network at {sizes} "
        "the host's size and keep the best: each of these trainings is taken to last "
        f"as long as `{PLAIN}` did, {found.plain:.2f} seconds per network, and one use "
        f"of her took {found.use:.2f}. {_break_even(found)} In multiply-adds, which "
        f"leave out what small tensors cost, one use is {found.work:.2f} of the work "
        "of all those sizes."
    )
    return said


def failures(rows: Iterable[Row], jobs: Sequence[Row]) -> list[str]:
    """What went wrong, a line each."""
    counted = [row for row in rows if row["stage"] == "counted"]
    panicked = Counter(row["arm"] for row in counted if row["panicked"])
    total = Counter(row["arm"] for row in counted)
    said = [
        f"{count} of {total[arm]} networks of `{arm}` panicked: their numbers were no "
        "longer finite. They count as guessing nothing right."
        for arm, count in panicked.items()
    ]
    if counted and not panicked:
        said.append(f"No network of {len(counted):,} panicked.")
    failed = [job for job in jobs if job["state"] == "failed"]
    said += [f"The job `{job['id']}` failed: {_line(job['note'])}" for job in failed]
    if jobs and not failed:
        said.append("No job failed.")
    return said


def found_facts(trainings: Sequence[Row]) -> list[str]:
    """What the search and the bandit found, as they wrote it."""
    said = []
    for row in trainings:
        if row["arm"] in ("searched", "bandit", "search"):
            facts = json.dumps(json.loads(row["facts"] or "{}"), sort_keys=True)
            short = facts if len(facts) <= 300 else f"{facts[:299]}…"
            said.append(
                f"`{row['name']}`: {row['env_steps']:,} decisions, "
                f"{row['seconds'] / HOUR:.2f} hours: `{short}`"
            )
    return said


def _break_even(found: Cost) -> str:
    if found.uses is None:
        return (
            "At this size a use of her takes longer than all of them, so in hours she "
            "never pays for her training."
        )
    return (
        f"A use saves {found.saved:.1f} seconds, so her training has paid for itself "
        f"after {found.uses:,} uses."
    )


def _mean(cells: Cells, arm: str, task: str) -> float:
    figures = cells.at(arm, task)
    known = figures[np.isfinite(figures)]
    return float(known.mean()) if known.size else nan


def _of(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else nan


def _line(text: object) -> str:
    return " ".join(str(text or "without a word").split())[:300]
