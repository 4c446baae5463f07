"""Grow a network with the Trainer of Lightning.

    trainer = Trainer(callbacks=[GrowCallback(["fc1->fc2"], example=x, monitor="acc")])
    trainer.fit(module, train_loader, val_loader)

The callback builds a `Grower` for the module and its only optimizer, computes the loss
of every `training_step` with it and takes a decision at the end of every epoch.
Lightning's checkpoints include the seeds and resume with them. Manual optimization is
not supported.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from math import ceil, inf
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from esper.contracts.errors import InvalidInputError
from esper.grower import Grower
from esper.growth.analysis.tracing import Example
from esper.growth.measurements import Mode
from esper.growth.model import GrowingModel
from esper.growth.saving.saved_topology import NAME
from esper.growth.seed_modules import grown_part

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:  # pragma: no cover
    raise InvalidInputError(
        "esper.lightning needs Lightning: pip install '.[lightning]'."
    ) from error

SAVED_BY_LIGHTNING = ("model", "optimizer")
"""Entries of a Grower's state that Lightning saves itself."""
METRIC_CACHE = ("_update_count", "_computed")
"""Attributes of a torchmetrics metric that are not in its declared states."""


class GrowCallback(Callback):
    """Grows the module, or a submodule, while a Trainer fits it.

    Args:
        slots: Module names, or "auto"; see `esper.Grower`.
        example: Input of the host.
        monitor: Name of the logged metric that decisions use.
        mode: "max" if a larger metric is better, "min" for a loss.
        host: Name of the submodule to grow; the whole module if empty.
        options: Other arguments of `Grower`.
    """

    def __init__(
        self,
        slots: Sequence[str] | str,
        example: Example,
        *,
        monitor: str,
        mode: Mode = "max",
        host: str = "",
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.slots, self.example = slots, example
        self.monitor, self.mode, self.host = monitor, mode, host
        self.options = options
        self.grower: Grower | None = None
        """Set when training begins."""
        self._saved: Mapping[str, Any] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the host to load a checkpoint with seeds."""
        if stage == "fit" and self.grower is None:
            host = pl_module.get_submodule(self.host)
            if grown_part(host) is None:
                names = ("blueprints", "seeds_per_slot", "merge_only")
                some = {n: self.options[n] for n in names if n in self.options}
                model = GrowingModel(host, self.slots, self.example, **some)
                model.seeds.flow.owner_ref = None  # the Grower takes it over

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Build the Grower."""
        if not pl_module.automatic_optimization:
            raise InvalidInputError(
                "GrowCallback needs automatic optimization. Use esper.Grower in your "
                "own loop instead."
            )
        if len(trainer.optimizers) != 1:
            raise InvalidInputError(
                f"GrowCallback needs one optimizer, got {len(trainer.optimizers)}."
            )
        wrapped = trainer.strategy.model
        ddp = wrapped if isinstance(wrapped, DistributedDataParallel) else None
        if self.grower is None:
            self.grower = Grower(
                pl_module.get_submodule(self.host),
                trainer.optimizers[0],
                self.slots,
                example=pl_module.transfer_batch_to_device(
                    self.example, pl_module.device, 0
                ),
                mode=self.mode,
                wrapper=ddp,
                **{"decisions": _decisions(trainer), **self.options},
            )
        elif trainer.optimizers[0] is not self.grower.optimizer:
            raise InvalidInputError(
                "this GrowCallback was used in another fit. Create a new one."
            )
        self._wrap(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the state of a checkpoint; Lightning has loaded its part."""
        if self._saved and self.grower is not None:
            now = self.grower.state_dict()
            self.grower.load_state_dict(
                {**self._saved, **{name: now[name] for name in SAVED_BY_LIGHTNING}}
            )
            self._saved = {}

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take one decision."""
        assert self.grower is not None
        if (trainer.current_epoch + 1) % _epochs_between(trainer):
            return  # no validation in this epoch
        found = trainer.callback_metrics
        if self.monitor not in found:
            raise InvalidInputError(
                f"{self.monitor!r} was not logged. Logged were: "
                f"{', '.join(sorted(found)) or 'nothing'}."
            )
        decision = self.grower.step(metric=float(found[self.monitor]))
        pl_module.log("grown_parameters", float(decision.parameters))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the module's own `training_step`."""
        pl_module.__dict__.pop("training_step", None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Restore the module's own `training_step`."""
        self.on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """The part of the Grower's state that Lightning does not save."""
        if self.grower is None:
            return {}
        state = self.grower.state_dict()
        return {
            name: part for name, part in state.items() if name not in SAVED_BY_LIGHTNING
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state until the Grower exists."""
        self._saved = state_dict

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Exclude seeds from DDP; the Grower reduces their gradients."""
        tensors = [*pl_module.named_parameters(), *pl_module.named_buffers()]
        ignored = [name for name, _ in tensors if f"{NAME}." in name]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            pl_module, ignored
        )

    def _wrap(self, pl_module: LightningModule) -> None:
        """Compute the loss of every training step with the Grower."""
        own: Callable[..., Any] = pl_module.training_step

        def training_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            assert self.grower is not None
            answer: Any = None
            flow = self.grower.model.seeds.flow

            def closure() -> Tensor:
                nonlocal answer
                with _silent(pl_module) if flow.shadow else nullcontext():
                    answer = own(*args, **kwargs)
                if answer is None:
                    raise _Skipped
                loss: Tensor = answer["loss"] if isinstance(answer, Mapping) else answer
                return loss

            try:
                loss = self.grower.loss(closure)
            except _Skipped:
                return None
            return {**answer, "loss": loss} if isinstance(answer, Mapping) else loss

        pl_module.__dict__["training_step"] = training_step


class _Skipped(Exception):  # noqa: N818
    """A training step returned None: Lightning skips the batch."""


def _decisions(trainer: Trainer) -> int | None:
    """Planned number of decisions; None if unknown."""
    epochs = inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
    if trainer.max_steps > 0:
        trainer.fit_loop.setup_data()
        batches = trainer.num_training_batches
        steps = (
            ceil(batches / trainer.accumulate_grad_batches) if batches < inf else inf
        )
        epochs = min(epochs, ceil(trainer.max_steps / max(steps, 1)))
    if epochs == inf:
        return None
    return max(1, int(epochs) // _epochs_between(trainer))


def _epochs_between(trainer: Trainer) -> int:
    """Epochs from one validation to the next."""
    every = trainer.check_val_every_n_epoch or 1
    return every if trainer.enable_validation else 1


@contextmanager
def _silent(pl_module: LightningModule) -> Iterator[None]:
    """Disable logging and torchmetrics, for the extra pass with seeds in training."""
    names = ("log", "log_dict")
    metrics: list[Any] = [m for m in pl_module.modules() if hasattr(m, "update_count")]
    kept = [
        deepcopy({name: m.__dict__[name] for name in (*m._defaults, *METRIC_CACHE)})
        for m in metrics
    ]
    for name in names:
        pl_module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in names:
            pl_module.__dict__.pop(name, None)
        for metric, state in zip(metrics, kept, strict=True):
            metric.__dict__.update(state)
