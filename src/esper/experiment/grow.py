"""Growing one network of a task for real: `esper grow`.

The host trains as in the world, with a decision after every few batches; the exported
network is written as a `torch.export` program, which loads without Esper:

    torch.export.load("grown.pt2").module()(x)
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import Parameter, signature
from itertools import count
from pathlib import Path
from typing import Final

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from esper.contracts.errors import BadInput, StorageTrouble
from esper.environment.settings import OFFERED
from esper.experiment.fit import Fitted, accuracy, fit
from esper.experiment.messages import short
from esper.experiment.streams import stream
from esper.growth.history import GrowthDecision
from esper.tamiyo.registry import Maker
from esper.tasks.data import Data
from esper.tasks.task import Task

LINES: Final = 8
"""About decisions, at most; two more give the result."""
ROWS: Final = 512
"""Rows of a batch that is only evaluated."""


class ShuffledBatches:
    """The batches until the next decision, on and on through shuffled rows.

    Args:
        data: Rows to train on.
        batch: Rows of a batch.
        count: Batches until the next decision.
        generator: Decides the order.
    """

    def __init__(
        self, data: Data, batch: int, count: int, generator: Generator
    ) -> None:
        self._data, self._batch, self._count = data, batch, count
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self._count):
            if len(self._order) < self._batch:
                self._order = torch.randperm(len(self._data), generator=self._generator)
            rows = self._order[: self._batch]
            self._order = self._order[self._batch :]
            yield self._data.features[rows], self._data.labels[rows]


def summary_lines(history: Sequence[GrowthDecision]) -> list[str]:
    """What was planted, kept and pruned, in eight lines at most."""
    acts = [d for d in history if d.action.split()[0] in ("plant", "keep", "prune")]
    shown = acts if len(acts) <= LINES else acts[: LINES - 1]
    lines = [f"decision {d.step:>3}, score {d.metric:.3f}: {d.action}" for d in shown]
    if len(shown) < len(acts):
        rest = Counter(d.action.split()[0] for d in acts[len(shown) :])
        words = ", ".join(f"{count} x {word}" for word, count in rest.items())
        lines.append(f"and then, by decision {acts[-1].step}: {words}.")
    return lines or ["Nothing was planted."]


def grow(
    task: Task,
    controller: Maker | str = "early",
    *,
    budget: float = 4.0,
    rng_seed: int = 0,
    progress: bool = True,
) -> tuple[Fitted, float]:
    """Train a host of the task from scratch and let a controller grow it.

    Args:
        task: What it learns.
        controller: What decides.
        budget: Parameters that may be added, as a multiple of the host's.
        rng_seed: Decides everything.
        progress: Whether to show how it goes.

    Returns:
        What was fitted, and the share of test rows that the exported network guesses
        right.
    """
    if task.loss == "regression":
        raise BadInput(
            f"{task.name} has targets, and only classifiers are grown by name; call "
            "esper.fit with a loss of your own."
        )
    splits = task.splits(rng_seed)
    fitted = fit(
        task.host.build(stream(rng_seed, "host")),
        ShuffledBatches(
            splits.train, task.batch, task.decision_every, stream(rng_seed, "rows")
        ),
        _parts(splits.decisions),
        loss=cross_entropy,
        epochs=task.horizon,
        slots=list(task.host.slots),
        learning_rate=task.learning_rate,
        controller=controller,
        budget=budget,
        blueprints=OFFERED,
        progress=progress,
    )
    with torch.no_grad():
        return fitted, accuracy(fitted.model, _parts(splits.test))


def write(model: nn.Module, task: Task, out: Path) -> None:
    """Write a network that loads without Esper; whole or not at all."""
    rows = torch.export.Dim("rows", min=1)
    example, shapes = torch.zeros(2, *task.host.shape), ({0: rows},)
    kinds = [each.kind for each in signature(model.forward).parameters.values()]
    # Seeds that cannot be folded in leave a module that takes whatever its host takes.
    given = (shapes,) if Parameter.VAR_POSITIONAL in kinds else shapes
    program = torch.export.export(model, (example,), dynamic_shapes=given)
    beside = out.with_name(f".esper-{os.getpid()}.pt2")
    try:
        torch.export.save(program, beside)
        os.replace(beside, out)
    except (OSError, RuntimeError) as error:  # torch writes some files by itself
        why = getattr(error, "strerror", None) or str(error).split("\n")[0]
        raise StorageTrouble(f"cannot write {short(out)}: {why:.99}.") from None
    finally:
        with suppress(OSError):
            beside.unlink()


def _parts(data: Data) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data.features.split(ROWS), data.labels.split(ROWS), strict=True))


def free_name(stem: str) -> Path:
    """A file here that is not there yet."""
    names = (f"{stem}{'' if n == 1 else f'-{n}'}.pt2" for n in count(1))
    return next(path for path in map(Path, names) if not path.exists())


def check_free(out: Path) -> None:
    """Refuse a file that is there or cannot be written, before any work."""
    if out.suffix != ".pt2":
        raise BadInput(f"the network's file must end in .pt2, got {out.name!r:.99}.")
    if os.path.lexists(out):
        raise BadInput(f"{short(out)} is there already; choose another name.")
    if not os.path.isdir(out.parent) or not os.access(out.parent, os.W_OK):
        raise BadInput(f"{short(out.parent)} is no folder that can be written to.")
