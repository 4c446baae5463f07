"""Train and grow a network in one call.

    fitted = esper.fit(model, train_loader, val_loader, loss=F.cross_entropy, epochs=20)
    fitted.model(x)

Loaders yield pairs (x, y) of tensors; the loss is `loss(model(x), y)`. One decision
follows each epoch. The result is the network after the last epoch. `esper grow` does
the same for a task and writes a `torch.export` program, which loads without Esper.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described, short
from esper.files import Disk, publish
from esper.grower import Grower
from esper.growth.analysis.tracing import Example, isolated
from esper.growth.history import GrowthDecision
from esper.runs.progress import Progress
from esper.runs.sinks import Loggers
from esper.runs.streams import stream
from esper.tamiyo.registry import ControllerChoice

if TYPE_CHECKING:
    from esper.tasks.data import Data
    from esper.tasks.task import Task

MAX_EXAMPLE_ROWS: Final = 32
"""Rows of the first training batch that are used as the example."""
MAX_SUMMARY_LINES: Final = 8
EVAL_BATCH_SIZE: Final = 512

Batches = Iterable[Any]
"""Pairs (x, y) that can be iterated over repeatedly: a `DataLoader` or a list."""
Loss = Callable[[Any, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Fitted:
    """Result of `fit`."""

    model: nn.Module
    """The grown network as a plain module, in eval mode, after the last epoch."""
    history: tuple[GrowthDecision, ...]
    """One decision per epoch."""
    summary: str
    """One-page report."""
    grower: Grower
    """For further training; its host is the model that was passed in."""


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
    budget: float = 16.0,
    progress: bool = True,
    logger: Loggers = None,
    **options: Any,  # noqa: ANN401
) -> Fitted:
    """Train a model and grow it.

    Args:
        model: The network; it is trained in place, on its own device.
        train_loader: Training batches (x, y).
        val_loader: Validation batches (x, y) that the decisions are based on.
        loss: Function of the model's output and y that returns one number.
        epochs: Passes over the training batches; one decision follows each.
        slots: Where to grow, by module name, or "auto".
        example: Input to trace the model with; rows of the first batch if None.
        optimizer: Optimizer of the model. If None: AdamW with `OneCycleLR`.
        learning_rate: Maximum learning rate of that schedule.
        controller: See `Grower`.
        metric: Function of the model that returns a metric, called in eval mode
            without gradients. Larger is better unless mode="min". If None: validation
            accuracy if y holds classes, else validation loss.
        budget: Limit of added parameters; see `Grower`.
        progress: Whether to show progress.
        logger: Where metrics, growth and decisions go; see `Grower`.
        options: Other arguments of `Grower`.
    """
    if epochs < 1:
        raise InvalidInputError(f"epochs must be at least 1, got {epochs}.")
    if metric is None and "mode" in options:
        raise InvalidInputError(
            "mode belongs to your own metric. Pass both or neither."
        )
    x, classes = _tried(train_loader, "train_loader", model, loss)
    _tried(val_loader, "val_loader", model, loss)
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
                "train_loader has no length, which the learning-rate schedule needs. "
                "Pass your own optimizer."
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
        example=x[:MAX_EXAMPLE_ROWS] if example is None else example,
        controller=controller,
        budget=budget,
        decisions=epochs,
        logger=logger,
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
        grower.close()
    except BaseException:
        grower.close(finished=False)
        grower.model.seeds.detach()
        raise
    return Fitted(
        grower.export().eval(), tuple(grower.history), grower.summary(), grower
    )


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Fraction of the targets that are predicted correctly."""
    right, count = 0.0, 0
    for x, y in _batches(batches, "val_loader", model):
        right += float((model(x).argmax(dim=1) == y).sum())
        count += y.numel()
    return right / count


def mean_loss(model: nn.Module, batches: Batches, loss: Loss) -> float:
    """Mean loss per row."""
    total, count = 0.0, 0
    for x, y in _batches(batches, "val_loader", model):
        total += float(loss(model(x), y)) * len(x)
        count += len(x)
    return total / count


def _batches(
    loader: Batches, who: str, model: nn.Module
) -> Iterator[tuple[Tensor, Tensor]]:
    """The pairs (x, y) of a loader, on the device of the model."""
    device = next(model.parameters()).device
    for batch in loader:
        parts = batch if isinstance(batch, tuple | list) else ()
        if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            what = type(batch).__name__ + (f" of {kinds}" if kinds else "")
            raise InvalidInputError(
                f"{who} must yield pairs (x, y) of tensors, got {what}. Use "
                "esper.Grower in your own loop for other data."
            )
        x, y = parts
        yield x.to(device), y.to(device)


def _tried(
    loader: Batches, who: str, model: nn.Module, loss: Loss
) -> tuple[Tensor, bool]:
    """Try model and loss on the first batch; its x, and whether its y holds classes."""
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise InvalidInputError(
            f"model must be an nn.Module with parameters, got {type(model).__name__}."
        )
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise InvalidInputError(
            f"{who} must be a DataLoader or a list of batches, got "
            f"{type(loader).__name__}. It is iterated over once per epoch."
        )
    x, y = next(_batches(loader, who, model), (None, None))
    if x is None or y is None:
        raise InvalidInputError(f"{who} is empty. Pass at least one batch (x, y).")
    if not len(x):
        raise InvalidInputError(f"{who} yields an empty batch {[*x.shape]}.")
    with isolated(model, training=False), torch.no_grad():
        try:
            output = model(x)
        except Exception as error:
            raise InvalidInputError(
                f"the model cannot be called with the x {[*x.shape]} of {who}: "
                f"{described(error)}."
            ) from error
        try:
            value = loss(output, y)
        except Exception as error:
            raise InvalidInputError(
                f"the loss failed on the model's output {_shape(output)} and y "
                f"{[*y.shape]} ({y.dtype}) of {who}: {described(error)}."
            ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise InvalidInputError(
            f"the loss must be one number, as a tensor, got {_shape(value)}."
        )
    integers = not y.is_floating_point() and y.dtype is not torch.bool
    return x, isinstance(output, Tensor) and integers and output.ndim == y.ndim + 1


def _shape(value: object) -> str:
    return f"{[*value.shape]}" if isinstance(value, Tensor) else type(value).__name__


class ShuffledBatches:
    """Iterates over `count` shuffled batches; the next iteration continues there."""

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
    """What was planted, kept and pruned, in at most eight lines."""
    acts = [d for d in history if d.action.split()[0] in ("plant", "keep", "prune")]
    shown = acts if len(acts) <= MAX_SUMMARY_LINES else acts[: MAX_SUMMARY_LINES - 1]
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
    """Train and grow the host of a task; returns the result and its test accuracy."""
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
    """Write a network as a program that loads without Esper, atomically."""
    rows = torch.export.Dim("rows", min=1)
    example, shapes = torch.zeros(2, *task.host.shape), ({0: rows},)
    kinds = [each.kind for each in signature(model.forward).parameters.values()]
    # With seeds that cannot be merged, `forward` takes *args.
    given = (shapes,) if Parameter.VAR_POSITIONAL in kinds else shapes
    program = torch.export.export(model, (example,), dynamic_shapes=given)
    data = BytesIO()
    torch.export.save(program, data)
    publish(Disk(), out, data.getvalue())


def _parts(data: "Data") -> list[tuple[Tensor, Tensor]]:
    parts = (x.split(EVAL_BATCH_SIZE) for x in (data.features, data.labels))
    return [*zip(*parts, strict=True)]


def free_name(stem: str) -> Path:
    """A path in the current folder that does not exist."""
    names = (f"{stem}{'' if n == 1 else f'-{n}'}.pt2" for n in count(1))
    return next(path for path in map(Path, names) if not path.exists())


def check_free(out: Path) -> None:
    """Raise an error if a file exists or cannot be written."""
    if out.suffix != ".pt2":
        raise InvalidInputError(
            f"the file name must end in .pt2, got {out.name!r:.99}."
        )
    if os.path.lexists(out):
        raise InvalidInputError(f"{short(out)} exists already. Choose another name.")
    if not os.path.isdir(out.parent) or not os.access(out.parent, os.W_OK):
        raise InvalidInputError(f"{short(out.parent)} is not a writable folder.")
