"""Training and growing in one call, for people without a loop of their own.

    fitted = esper.fit(model, train_loader, val_loader, loss=F.cross_entropy, epochs=20)
    fitted.model(x)

Loaders give pairs (x, y) of tensors; the model is called as `model(x)` and the loss as
`loss(model(x), y)`. One decision is made after each epoch. What is returned is the
network as it is after the last epoch, not the best one on the way.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from esper.contracts.errors import BadInput
from esper.contracts.world import Controller
from esper.experiment.progress import Progress
from esper.grower import Grower
from esper.growth.blueprints.registry import first_line
from esper.growth.history import GrowthDecision
from esper.growth.tracing import Example, isolated
from esper.tamiyo.registry import Maker

EXAMPLE: Final = 32
"""Rows of the first training batch that the model is traced with, at most."""

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
    controller: str | Controller | Maker = "early",
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
        raise BadInput(f"epochs must be at least 1, got {epochs}.")
    _refuse_unknown(options, own_metric=metric is not None)
    x, y = _first(train_loader, "train_loader", model)
    classes = _try(model, loss, x, y, "train_loader")
    held_out = _first(val_loader, "val_loader", model)
    _try(model, loss, *held_out, "val_loader")
    schedule = None
    if optimizer is None:
        if not learning_rate > 0.0:
            raise BadInput(f"learning_rate must be positive, got {learning_rate}.")
        try:
            steps = epochs * len(train_loader)  # type: ignore[arg-type]
        except TypeError:
            raise BadInput(
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
            raise BadInput(
                f"{who} must give pairs (x, y) of tensors, got {what}; write your own "
                "loop around esper.Grower for anything else."
            )
        x, y = batch
        yield x.to(device), y.to(device)


def _first(loader: Batches, who: str, model: nn.Module) -> tuple[Tensor, Tensor]:
    """The first pair of a loader that can be walked through again."""
    if not isinstance(model, nn.Module) or next(model.parameters(), None) is None:
        raise BadInput(
            f"the model must be an nn.Module with parameters, got "
            f"{type(model).__name__}."
        )
    if not isinstance(loader, Iterable) or isinstance(loader, Iterator):
        raise BadInput(
            f"{who} must be a DataLoader or a list of batches, got "
            f"{type(loader).__name__}; it is walked through once each epoch."
        )
    for x, y in _batches(loader, who, model):
        if not len(x):
            raise BadInput(f"{who} must give rows, got an empty batch {[*x.shape]}.")
        return x, y
    raise BadInput(f"{who} is empty; pass at least one batch (x, y).")


def _try(model: nn.Module, loss: Loss, x: Tensor, y: Tensor, who: str) -> bool:
    """Whether y holds classes of the answer; refuses what no loss comes from."""
    with isolated(model, training=False), torch.no_grad():
        try:
            answer = model(x)
        except Exception as error:
            raise BadInput(
                f"the model cannot be called with the x {[*x.shape]} of {who}: "
                f"{first_line(error)}."
            ) from error
        shape = [*answer.shape] if isinstance(answer, Tensor) else type(answer).__name__
        try:
            value = loss(answer, y)
        except Exception as error:
            raise BadInput(
                f"no loss from the model's answer {shape} and the y {[*y.shape]} "
                f"({y.dtype}) of {who}: {first_line(error)}."
            ) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = [*value.shape] if isinstance(value, Tensor) else type(value).__name__
        raise BadInput(f"the loss must be one number, as a tensor, got {got}.")
    whole = not y.is_floating_point() and y.dtype is not torch.bool
    return isinstance(answer, Tensor) and whole and answer.ndim == y.ndim + 1


def _refuse_unknown(options: dict[str, Any], *, own_metric: bool) -> None:
    known = {*signature(Grower).parameters} - {"model", "decisions"}
    for option in options:
        if option == "decisions":
            raise BadInput("fit makes one decision per epoch; leave decisions out.")
        if option == "mode" and not own_metric:
            raise BadInput("mode goes with a metric of your own; pass one, or neither.")
        if option not in known:
            near = get_close_matches(option, known, n=1, cutoff=0.0)
            raise BadInput(f"fit has no option {option!r}; did you mean {near[0]!r}?")
