"""What does it cost to store a round, and how many rows can be stored in a second?

A round is 16 environments with 30 decisions each, some events at every decision, and
the update's figures. The twin commits every row of a step by itself and stores nothing
else. Ours is measured with a flush at the end of the round, with and without a sync.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import Report, alternate
from esper.contracts.actions import HEAD_NAMES
from esper.contracts.stages import Stage
from esper.experiment.records import RoundRecord
from esper.experiment.seed_events import EVENTS, Changes
from esper.experiment.store import Store
from esper.simic.agent.metrics import HeadRecord, UpdateRecord
from tests.references.store import FIGURES, RowByRow

ENVS, DECISIONS, CHANGES = 16, 30, 4
BLUEPRINTS = ("small", "large")


def run() -> Report:
    """Time a round of each."""
    report = Report(
        f"Storing one round of {ENVS} environments x {DECISIONS} decisions",
        ("store", "ms per round", "rows per round", "rows/s", "against row by row"),
        notes=["Row by row stores the steps only and never syncs."],
    )
    figures = {name: torch.rand(ENVS) for name in FIGURES}
    episode = torch.ones(ENVS, dtype=torch.int64)
    steps = ENVS * DECISIONS
    rows = {
        "row by row": steps,
        "flush": steps + CHANGES * DECISIONS + 1 + len(HEAD_NAMES),
        "durable flush": steps + CHANGES * DECISIONS + 1 + len(HEAD_NAMES),
    }
    with TemporaryDirectory() as folder:
        naive = RowByRow(Path(folder) / "naive.sqlite")
        store = Store(Path(folder) / "ours.sqlite")
        store.begin_attempt()
        record, changes = _record(), _changes()

        def by_row() -> None:
            for step in range(DECISIONS):
                naive.add_steps(1, step, "letter", episode, **figures)

        def ours(*, durable: bool) -> None:
            where = {"round": 1, "task": "letter", "episode": 1}
            for step in range(DECISIONS):
                store.add("steps", step=step, env=range(ENVS), **where, **figures)
                store.add_events(changes, BLUEPRINTS, step=step, **where)
            store.add_round(record)
            store.flush(durable=durable)

        took = alternate(
            {
                "row by row": by_row,
                "flush": lambda: ours(durable=False),
                "durable flush": lambda: ours(durable=True),
            }
        )
        naive.close()
        store.close()
    for name, seconds in took.items():
        times = took["row by row"] / seconds
        report.add(name, seconds * 1e3, rows[name], rows[name] / seconds, times)
    return report


def _changes() -> Changes:
    whole = torch.zeros(CHANGES, dtype=torch.int64)
    return Changes(
        env=torch.arange(CHANGES),
        slot=whole,
        what=whole + EVENTS.index("planted"),
        before=whole,
        after=whole + Stage.TRAINING,
        blueprint=whole,
        alpha=torch.zeros(CHANGES),
    )


def _record() -> RoundRecord:
    return RoundRecord(
        round=1,
        rounds=1,
        env_steps=ENVS * DECISIONS,
        seconds=1.0,
        mean_return=0.5,
        learning_rate=1e-3,
        update=UpdateRecord(
            policy_loss=0.0,
            value_loss=0.0,
            clip_fraction=0.0,
            clamped=0.0,
            grad_norm=0.0,
            kl=0.0,
            last_kl=0.0,
            explained_variance=0.0,
            steps_planned=8,
            steps_taken=8,
            stopped_at=None,
            refused=0,
            heads={name: HeadRecord(0.0, 1.0, 1.0, 0.0) for name in HEAD_NAMES},
        ),
    )
