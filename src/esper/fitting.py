"""Training and growing in one call, for people without a loop of their own.

    fitted = esper.fit(model, train_loader, val_loader, loss=F.cross_entropy, epochs=20)
    fitted.model(x)

Loaders give pairs (x, y) of tensors; the model is called as `model(x)` and the loss as
`loss(model(x), y)`. One decision is made after each epoch. What is returned is the
network as it is after the last epoch, not the best one on the way.

`esper grow` does the same with a host of a task, with a decision after every few
batches, and writes the network as a `torch.export` program, which loads without Esper:

    torch.export.load("grown.pt2").module()(x)
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from esper.contracts.errors import InvalidInputError, StorageError, unknown
from esper.contracts.messages import short
from esper.grower import Grower
from esper.growth.analysis.tracing import Example, isolated
from esper.growth.blueprints.registry import first_line
from esper.growth.history import GrowthDecision
from esper.runs.progress import Progress
from esper.runs.streams import stream
from esper.tamiyo.registry import ControllerChoice

if TYPE_CHECKING:
    from esper.tasks.data import Data
    from esper.tasks.task import Task

EXAMPLE: Final = 32
"""Rows of the first training batch that the model is traced with, at most."""
LINES: Final = 8
"""About decisions of `esper grow`, at most; two more give the result."""
ROWS: Final = 512
"""Rows of a batch that is only evaluated."""

Batches = Iterable[Any]
"""Pairs (x, y), as often as they are asked for: a `DataLoader`, or a list."""
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Fitted:
    """A fitted model."""

    model: nn.Module
    """The grown network as a plain module, in eval mode, after the last epoch."""
    history: tuple[GrowthDecision, ...]
    """One entry for each epoch."""
    summary: str
    """What was done, on one page."""
    grower: Grower
    """For going on by hand; its model is the one that was passed in."""


def fit(
    model: nn.Module,
    train_loader: Batches,
    val_loader: Batches,
    *,
    loss: Loss,
    epochs: int,
    slots: Sequence[str] | str = "auto",
    example: Example | None = None,
    optimizer: Optimizer | None = None,
    learning_rate: float = 3e-3,
    controller: ControllerChoice = "early",
    metric: Callable[[nn.Module], float] | None = None,
    budget: float = 2.0,
    progress: bool = True,
    **options: Any,  # noqa: ANN401
) -> Fitted:
    """Train a model and grow it meanwhile.

    Args:
        model: The network; it is trained in place, on the device it lies on.
        train_loader: Batches (x, y) to learn from.
        val_loader: Batches (x, y) that decide how it grows.
        loss: One number from the model's answer and y.
        epochs: Passes over the training batches, with a decision after each.
        slots: Where it may grow, by module name; "auto" finds places.
        example: What the model is traced with; rows of the first batch if None.
        optimizer: Trains the model at its own learning rates. If None: AdamW, with
            a learning rate that rises and falls once.
        learning_rate: The highest one of that cycle.
        controller: See `Grower`.
        metric: Measures the model, in eval mode and without gradients, where more is
            better unless mode="min" is passed too. If None: the accuracy on the
            validation batches if y holds classes, else the loss on them.
        budget: How much may be added; see `Grower`.
        progress: Whether to show progress.
        options: Whatever else `Grower` takes.
    """
    if epochs < 1:
        raise InvalidInputError(f"epochs must be at least 1, got {epochs}.")
    _refuse_unknown(options, own_metric=metric is not None)
    x, y = _first(train_loader, "train_loader", model)
    classes = _try(model, loss, x, y, "train_loader")
    held_out = _first(val_loader, "val_loader", model)
    _try(model, loss, *held_out, "val_loader")
    schedule = None
    if optimizer is None:
        if not learning_rate > 0.0:
            raise InvalidInputError(
                f"learning_rate must be positive, got {learning_rate}."
            )
        try:
            steps = epochs * len(train_loader)  # type: ignore[arg-type]
        except TypeError:
            raise InvalidInputError(
                "train_loader has no length, which the learning-rate schedule needs; "
                "pass an optimizer of your own."
            ) from None
        optimizer = AdamW(model.parameters(), lr=learning_rate)
        schedule = OneCycleLR(
            optimizer, learning_rate, total_steps=steps, cycle_momentum=False
        )
    if metric is None:
        measure = accuracy if classes else partial(mean_loss, loss=loss)
        metric = partial(measure, batches=val_loader)
        options["mode"] = "max" if classes else "min"
    grower = Grower(
        model,
        optimizer,
        slots,
        example=x[:EXAMPLE] if example is None else example,
        controller=controller,
        budget=budget,
        decisions=epochs,
        **options,
    )

    def batch_loss(x: Tensor, y: Tensor) -> Tensor:
        return loss(model(x), y)

    def measured() -> float:
        model.eval()
        with torch.no_grad():
            return metric(model)

    name = type(model).__name__
    try:
        with Progress([name], unit="epoch") if progress else nullcontext() as bar:
            for epoch in range(1, epochs + 1):
                model.train()
                for x, y in _batches(train_loader, "train_loader", model):
                    total = grower.loss(partial(batch_loss, x, y))
                    optimizer.zero_grad()
                    total.backward()
                    optimizer.step()
                    if schedule is not None:
                        schedule.step()
                decision = grower.step(metric=measured)
                if bar is not None:
                    text = (
                        f"loss {decision.loss:.4g}  metric {decision.metric:.4g}  "
                        f"{decision.parameters:,} parameters  {decision.action}"
                    )
                    bar.update(name, epoch, epochs, text)
    except BaseException:
        grower.model.detach()
        raise
    return Fitted(
        grower.export().eval(), tuple(grower.history), grower.summary(), grower
    )


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Share of the targets whose class the model names first."""
    right, count = 0.0, 0
    for x, y in _batches(batches, "val_loader", model):
        right += float((model(x).argmax(dim=1) == y).sum())
        count += y.numel()
    return right / count


def mean_loss(model: nn.Module, batches: Batches, loss: Loss) -> float:
    """Mean loss of a row."""
    total, count = 0.0, 0
    for x, y in _batches(batches, "val_loader", model):
        total += float(loss(model(x), y)) * len(x)
        count += len(x)
    return total / count


def _batches(
    loader: Batches, who: str, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs of a loader, where the model lies."""
    device = next(model.parameters()).device
    for batch in loader:
        if (
            not isinstance(batch, tuple | list)
            or len(batch) != 2
            or not all(isinstance(part, Tensor) for part in batch)
        ):
            what = f"{type(batch).__name__}"
            if isinstance(batch, tuple | list):
                what += f" of {', '.join(type(part).__name__ for part in batch)}"
            raise InvalidInputError(
                f"{who} must give pairs (x, y) of tensors, got {what}; write your own "
                "loop around esper.Grower for anything else."
            )
        x, y = batch
        yield x.to(device), y.to(device)


def _first(loader: Batches, who: str, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The first pair of a loader that can be walked through again."""
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise InvalidInputError(
            f"the model must be an nn.Module with parameters, got "
            f"{type(model).__name__}."
        )
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise InvalidInputError(
            f"{who} must be a DataLoader or a list of batches, got "
            f"{type(loader).__name__}. It is iterated over once per epoch."
        )
    for x, y in _batches(loader, who, model):
        if not len(x):
            raise InvalidInputError(
                f"{who} must give rows, got an empty batch {[*x.shape]}."
            )
        return x, y
    raise InvalidInputError(f"{who} is empty; pass at least one batch (x, y).")


def _try(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, who: str) -> bool:
    """Whether y holds classes of the answer; refuses what no loss comes from."""
    with isolated(model, training=False), torch.no_grad():
        try:
            answer = model(x)
        except Exception as error:
            raise InvalidInputError(
                f"the model cannot be called with the x {[*x.shape]} of {who}: "
                f"{first_line(error)}."
            ) from error
        shape = [*answer.shape] if isinstance(answer, Tensor) else type(answer).__name__
        try:
            value = loss(answer, y)
        except Exception as error:
            raise InvalidInputError(
                f"the loss failed on the model's output {shape} and y {[*y.shape]} "
                f"({y.dtype}) of {who}: {first_line(error)}."
            ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = [*value.shape] if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInputError(f"the loss must be one number, as a tensor, got {got}.")
    whole = not y.is_floating_point() and y.dtype is not torch.bool
    return isinstance(answer, Tensor) and whole and answer.ndim == y.ndim + 1


def _refuse_unknown(options: dict[str, Any], *, own_metric: bool) -> None:
    known = {*signature(Grower).parameters} - {"model", "decisions"}
    for option in options:
        if option == "decisions":
            raise InvalidInputError(
                "fit makes one decision per epoch; leave decisions out."
            )
        if option == "mode" and not own_metric:
            raise InvalidInputError(
                "mode goes with a metric of your own; pass one, or neither."
            )
        if option not in known:
            raise unknown("fit has no option", option, known)


class ShuffledBatches:
    """The batches until the next decision, on and on through shuffled rows.

    Args:
        data: Rows to train on.
        batch: Rows of a batch.
        count: Batches until the next decision.
        generator: Decides the order.
    """

    def __init__(
        self, data: "Data", batch: int, count: int, generator: Generator
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
    task: "Task",
    controller: ControllerChoice = "early",
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
    from esper.environment.settings import OFFERED

    if task.loss == "regression":
        raise InvalidInputError(
            f"{task.name} is a regression task; only classification is supported here. "
            "Call esper.fit with your own loss."
        )
    splits = task.splits(rng_seed)
    fitted = fit(
        task.host.build(stream(rng_seed, "host")),
        ShuffledBatches(
            splits.train, task.batch, task.decision_every, stream(rng_seed, "rows")
        ),
        _parts(splits.val),
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


def write(model: nn.Module, task: "Task", out: Path) -> None:
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
        raise StorageError(f"cannot write {short(out)}: {why:.99}.") from None
    finally:
        with suppress(OSError):
            beside.unlink()


def _parts(data: "Data") -> list[tuple[Tensor, Tensor]]:
    return list(zip(data.features.split(ROWS), data.labels.split(ROWS), strict=True))


def free_name(stem: str) -> Path:
    """A file here that is not there yet."""
    names = (f"{stem}{'' if n == 1 else f'-{n}'}.pt2" for n in count(1))
    return next(path for path in map(Path, names) if not path.exists())


def check_free(out: Path) -> None:
    """Refuse a file that is there or cannot be written, before any work."""
    if out.suffix != ".pt2":
        raise InvalidInputError(
            f"the network's file must end in .pt2, got {out.name!r:.99}."
        )
    if os.path.lexists(out):
        raise InvalidInputError(f"{short(out)} is there already; choose another name.")
    if not os.path.isdir(out.parent) or not os.access(out.parent, os.W_OK):
        raise InvalidInputError(f"{short(out.parent)} is not a writable folder.")
