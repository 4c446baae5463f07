"""How well a host does, and what each seed contributes to that.

A score lies in [0, 1] and more is better. An accuracy is its own score; a loss m
becomes m0 / (m0 + m), with m0 its first value: 1/2 at the start, 1 at no loss.
"""

from collections.abc import Callable
from math import isfinite, nan
from typing import Final

from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.growth.calls import shielded
from esper.growth.model import GrowingModel

Metric = float | Callable[[], float]
"""A number, or a function that measures it."""
FELT: Final = (Stage.BLENDING, Stage.HOLDING)
"""Stages of a seed that the host feels and that can still be removed."""


class Ruler:
    """Turns a user's metric of a growing model into scores."""

    def __init__(self, model: GrowingModel, mode: str) -> None:
        if mode not in ("max", "min"):
            raise BadInput(f"mode must be 'max' or 'min', got {mode!r}.")
        self._model, self._mode = model, mode
        self.first = nan
        """The first metric of mode "min"."""

    def measure(self, metric: Metric) -> float:
        """The metric; a function's side effects on the model are undone."""
        if not callable(metric):
            return _number(metric)
        flow = self._model.flow
        flow.quiet = True
        try:
            with shielded(self._model, training=self._model.host.training):
                return _number(metric())
        finally:
            flow.quiet = False

    def score(self, metric: float) -> float:
        """The metric as a score."""
        if self._mode == "max":
            if not 0.0 <= metric <= 1.0:
                raise BadInput(
                    f"the metric must lie in [0, 1], got {metric}; for a loss, build "
                    "the Grower with mode='min'."
                )
            return metric
        if not isfinite(metric) or metric < 0:
            raise BadInput(f"a loss must be finite and not negative, got {metric}.")
        if self.first != self.first:
            self.first = metric
        return self.first / max(self.first + metric, 1e-30)

    def contributions(self, metric: Metric, score: float) -> dict[int, float]:
        """Score lost without each living seed; empty if it cannot be measured.

        A seed in training is tried at alpha 1 instead of being left out.
        """
        if not callable(metric):
            return {}
        found = {}
        for slot, name in enumerate(self._model.slots):
            stage = self._model.stage(name)
            if stage in FELT:
                with self._model.without(slot):
                    found[slot] = score - self._score_or_none(metric)
            elif stage is Stage.TRAINING:
                with self._model.trying(slot):
                    found[slot] = self._score_or_none(metric) - score
        return found

    def _score_or_none(self, metric: Metric) -> float:
        """A score of 0 where a broken seed spoils the metric."""
        measured = self.measure(metric)
        return self.score(measured) if isfinite(measured) else 0.0


def _number(metric: object) -> float:
    try:
        return float(metric)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise BadInput(f"the metric must be a number, got {metric!r}.") from error
