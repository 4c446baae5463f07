"""Where else the figures of a round can go, besides the store.

A sink is told of every round and may be slow, broken or absent without harm to the
store. TensorBoard comes with the extra `tensorboard`.
"""

from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from esper.contracts.errors import BadInput
from esper.experiment.loop import RoundRecord
from esper.simic.agent.metrics import HeadRecord, UpdateRecord


@runtime_checkable
class Sink(Protocol):
    """Listens to a run."""

    def add_round(self, record: RoundRecord) -> None:
        """Take note of one round."""
        ...

    def close(self) -> None:
        """Finish writing."""
        ...


class TensorBoardSink:
    """Writes the figures of every round for TensorBoard, by env-steps.

    Args:
        folder: What `tensorboard --logdir` is pointed at.
        resume_step: Env-steps that a run goes on from; what was told of later ones
            is no longer shown. None: from the start.
    """

    def __init__(self, folder: Path | str, resume_step: int | None = None) -> None:
        later = None if resume_step is None else resume_step + 1
        self._writer = summary_writer()(str(folder), purge_step=later)

    def add_round(self, record: RoundRecord) -> None:
        """Write the figures of one round; what is NaN or missing is left out."""
        for name, value in scalars(record):
            self._writer.add_scalar(name, value, record.env_steps)

    def close(self) -> None:
        """Finish writing."""
        self._writer.close()


def scalars(record: RoundRecord) -> Iterator[tuple[str, float]]:
    """The figures of a round by name, as far as they are known."""
    named = {"round/mean_return": record.mean_return, "round/seconds": record.seconds}
    update = record.update
    named |= {
        f"update/{field.name}": getattr(update, field.name)
        for field in fields(UpdateRecord)
        if field.name != "heads"
    }
    named |= {
        f"{field.name}/{head}": getattr(figures, field.name)
        for head, figures in update.heads.items()
        for field in fields(HeadRecord)
    }
    for name, value in named.items():
        if value is not None and not isnan(value):
            yield name, float(value)


def summary_writer() -> Any:  # noqa: ANN401
    """What writes for TensorBoard, or a refusal if it is not there."""
    try:
        return import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError:
        raise BadInput(
            "TensorBoard is not installed: pip install 'esper-lite[tensorboard]'."
        ) from None
