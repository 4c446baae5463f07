"""When a run is watched and saved: rows first, then its state.

A disk that refuses is tried again at the next checkpoint, three times in a row.
"""

from collections.abc import Callable
from typing import Any, Final

from esper.contracts.errors import BadInput, StorageTrouble
from esper.contracts.state import Stateful, save
from esper.experiment.checkpoint import CheckpointFolder, Loaded
from esper.experiment.conclusion import LEARNED
from esper.experiment.config import SIMULATED, TrainConfig, digest
from esper.experiment.loop import RoundRecord, Training
from esper.experiment.news import News, Said, Watched
from esper.experiment.run import Run
from esper.experiment.store import Store
from esper.experiment.watching import watch

PATIENCE: Final = 3
"""Failures in a row that are borne."""


class Saving:
    """Checkpoints every so often, after the rows up to them are durable."""

    def __init__(
        self,
        config: TrainConfig,
        state: Stateful,
        training: Training,
        store: Store,
        checkpoints: CheckpointFolder,
        hear: Callable[[News], None],
    ) -> None:
        self._config, self._state, self._training = config, state, training
        self._store, self._checkpoints = store, checkpoints
        self._hear, self._failed = hear, 0
        self._facts = _facts(config, training)

    def after(self, record: RoundRecord, *, over: bool, last: bool) -> None:
        """Watch and save if it is time to.

        Args:
            record: The round that was played.
            over: Whether training is complete.
            last: Whether a signal ends the run here.
        """
        config, number = self._config, record.round
        score = None
        # An interruption must not choose another best checkpoint.
        if number % config.judging.every == 0 or over:
            score = self.watch(number)
        if over or last or score is not None or number % config.keeping.every == 0:
            self.save(number, score, last=over or last)

    def save(self, number: int, score: float | None, *, last: bool) -> None:
        """Rows first, then the state; failures are borne for a while."""
        try:
            self._store.flush()
            self._checkpoints.publish(
                number, save(self._state), self._facts, score=score
            )
            self._failed = 0
        except StorageTrouble as trouble:
            self._failed += 1
            if last or self._failed == PATIENCE:
                raise
            self._hear(Said(f"{trouble} Training goes on.", warning=True))

    def watch(self, number: int) -> float | None:
        """How good the policy is on the same hosts as ever."""
        if SIMULATED in self._config.tasks:
            return None
        seen = Watched(number, watch(self._training.policy, self._config))
        for task, judged in seen.tasks.items():
            self._store.add_evaluation(
                judged, round=number, stage="watched", controller=LEARNED, task=task
            )
        self._hear(seen)
        return seen.mean_return


def _facts(config: TrainConfig, training: Training) -> dict[str, Any]:
    """What must be as it was for a checkpoint to be gone on from."""
    spec = training.world.spec.describe()
    return {"config": digest(config), "actions": spec}


def require_same(
    run: Run, config: TrainConfig, training: Training, found: Loaded
) -> None:
    """Refuse to go on from what other settings have made."""
    for name, value in _facts(config, training).items():
        if found.manifest.facts.get(name) != value:
            raise BadInput(
                f"the {name} of run {run.name} changed since its last checkpoint; put "
                f"it back, or begin another run with --start_from {run.name}."
            )
