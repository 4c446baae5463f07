"""Growing one network of a task for real: `esper grow`.

The host trains as in the world, with a decision after every few batches; the exported
network is written as a `torch.export` program, which loads without Esper:

    torch.export.load("grown.pt2").module()(x)
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from esper.contracts.errors import BadInput
from esper.experiment.fit import Fitted, fit
from esper.experiment.fit import accuracy as share_right
from esper.experiment.streams import stream
from esper.tasks.catalogue import task as find_task
from esper.tasks.data import Data
from esper.tasks.task import Task

ROWS: Final = 512
"""Rows of a batch that is only looked at."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowConfig:
    """What to grow, who decides, and where to write it."""

    task: str
    controller: str = "early"
    budget: float = 4.0
    """Parameters that may be added, as a multiple of the host's."""
    rng_seed: int = 0
    out: Path | None = None
    """File of the exported network; it must not exist. None: it is not written."""


@dataclass(frozen=True, slots=True)
class Grown:
    """What came of it."""

    fitted: Fitted
    test: float
    """Share of test rows that the exported network guesses right."""


class Turns:
    """The batches until the next decision, on and on through shuffled rows.

    Args:
        data: Rows to train on.
        batch: Rows of a batch.
        turns: Batches until the next decision.
        generator: Decides the order.
    """

    def __init__(
        self, data: Data, batch: int, turns: int, generator: Generator
    ) -> None:
        self._data, self._batch, self._turns = data, batch, turns
        self._generator = generator
        self._order = torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self._turns

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self._turns):
            if len(self._order) < self._batch:
                self._order = torch.randperm(len(self._data), generator=self._generator)
            rows = self._order[: self._batch]
            self._order = self._order[self._batch :]
            yield self._data.features[rows], self._data.labels[rows]


def run_grow(config: GrowConfig) -> None:
    """Grow a network, tell its story, write it."""
    if config.out is not None:
        _check_free(config.out)
    task, console = find_task(config.task), Console()
    grown = grow(task, config)
    host = task.host.parameters
    after = sum(parameter.numel() for parameter in grown.fitted.model.parameters())
    console.print(grown.fitted.summary, highlight=False, markup=False)
    console.print(
        f"Test score {grown.test:.1%}; {host:,} parameters became {after:,}.",
        highlight=False,
    )
    if config.out is not None:
        write(grown.fitted.model, task, config.out)
        console.print(f"The network is in {config.out}.", highlight=False)


def grow(task: Task, config: GrowConfig, *, progress: bool = True) -> Grown:
    """Train a host of the task from scratch and let a controller grow it."""
    splits = task.splits(config.rng_seed)
    model = task.host.build(stream(config.rng_seed, "host"))
    turns = Turns(
        splits.train, task.batch, task.decision_every, stream(config.rng_seed, "rows")
    )
    fitted = fit(
        model,
        turns,
        _parts(splits.decisions),
        loss=cross_entropy,
        epochs=task.horizon,
        slots=list(task.host.slots),
        learning_rate=task.learning_rate,
        controller=config.controller,
        budget=config.budget,
        progress=progress,
    )
    with torch.no_grad():
        test = share_right(fitted.model, _parts(splits.test))
    return Grown(fitted, test)


def write(model: nn.Module, task: Task, out: Path) -> None:
    """Write a network that loads without Esper; whole or not at all."""
    rows = torch.export.Dim("rows", min=1)
    example = torch.zeros(2, *task.host.shape)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: rows},))
    beside = out.with_name(f".{os.getpid()}-{out.name}")
    try:
        torch.export.save(program, beside)
        os.replace(beside, out)
    finally:
        beside.unlink(missing_ok=True)


def _parts(data: Data) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data.features.split(ROWS), data.labels.split(ROWS), strict=True))


def _check_free(out: Path) -> None:
    """Refuse a file that is there or cannot be written, before any work."""
    if out.suffix != ".pt2":
        raise BadInput(f"the network's file must end in .pt2, got {out.name!r:.99}.")
    if out.exists():
        raise BadInput(f"{out} is there already; choose another name.")
    if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise BadInput(f"{out.parent} is no folder that can be written to.")
