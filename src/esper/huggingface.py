"""Grow a model with the Trainer of Hugging Face.

    trainer = Trainer(model, args, train_dataset=..., eval_dataset=...,
                      callbacks=[GrowCallback()])
    trainer.train()
    trainer.save_model("grown")

The callback builds a `Grower` for the model and the Trainer's optimizer, computes the
loss of every batch with it and takes a decision after every evaluation. The Trainer's
checkpoints include the seeds. After training, seeds are merged into the model's layers
and the config gets the new sizes, so that `from_pretrained` loads the model. If the
config cannot describe the sizes, `save_pretrained` raises an error.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described, short
from esper.files import Disk, open_regular, publish, require_readable
from esper.grower import Grower
from esper.growth.analysis.config_fields import (
    built_shapes,
    copy_fields,
    shapes_of,
    sized_config,
)
from esper.growth.analysis.host_layers import fit_sizes
from esper.growth.analysis.tracing import Example, kept_randomness
from esper.growth.measurements import Mode
from esper.growth.saving.export import Branches
from esper.growth.saving.saved_topology import NAME
from esper.growth.saving.serialization import save
from esper.growth.seed_modules import grown_part

try:
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers.utils.logging import get_logger
except ImportError as error:  # pragma: no cover
    raise InvalidInputError(
        "esper.huggingface needs transformers: pip install '.[huggingface]'."
    ) from error

STATE_FILE: Final = "esper.pt"
"""State of the Grower in a checkpoint of the Trainer."""
WEIGHTS_FILE: Final = "model.safetensors"
EXAMPLE_ROWS: Final = 2
KEEPS_SEEDS: Final = (
    "the model keeps its seeds. Save it with esper.save(model, path) and load it with "
    "esper.load(path, model)"
)

SEEDS: Final = f"host.{NAME}."
"""Prefix of the seeds' names in the state of a Grower."""

log = get_logger(__name__)


class GrowCallback(TrainerCallback):  # type: ignore[misc]
    """Grows the model of a Trainer.

    Args:
        slots: Module names, patterns such as "*.mlp", or "auto"; see `esper.Grower`.
        example: Input of the model; the first rows of the training data if None.
        monitor: Name of the evaluation metric that decisions use.
        mode: "min" for a loss, "max" if a larger metric is better.
        checkpoint: Folder of the checkpoint to resume, if it is not in the Trainer's
            output folder.
        merge: Whether to merge seeds into the model's layers after training.
        options: Other arguments of `Grower`.
    """

    def __init__(
        self,
        slots: Sequence[str] | str = "auto",
        example: Example | None = None,
        *,
        monitor: str = "eval_loss",
        mode: Mode = "min",
        checkpoint: str | Path | None = None,
        merge: bool = True,
        **options: Any,  # noqa: ANN401
    ) -> None:
        self.slots, self.example = slots, example
        self.monitor, self.mode = monitor, mode
        self.checkpoint, self.merge = checkpoint, merge
        self.options = {"merge_only": merge, **options}
        self.grower: Grower | None = None
        """Set when training begins."""
        self._unwrap: Callable[[], None] | None = None
        """Restores the model's own forward; None before and after training."""
        self._handle: Any = None
        self._dropped = False
        """Whether seeds were removed from a state that the model loaded."""

    def on_init_end(
        self, *_: object, model: nn.Module | None = None, **__: object
    ) -> None:
        """Load seeds of a checkpoint later, when the optimizer exists."""
        if model is not None and grown_part(model) is None:
            self._handle = model.register_load_state_dict_pre_hook(self._drop_seeds)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Any = None,  # noqa: ANN401
        train_dataloader: Any = None,  # noqa: ANN401
        **_: object,
    ) -> None:
        """Build the Grower and resume from a checkpoint."""
        _check_arguments(args, state)
        if self.grower is not None:
            raise InvalidInputError(
                "this GrowCallback has grown a network already. Create a new one."
            )
        if self._handle is not None:
            self._handle.remove()
        model.__dict__.pop("save_pretrained", None)  # set by an earlier training
        if self._dropped and not state.global_step:
            raise InvalidInputError(
                "a state with seeds was loaded into the model after the Trainer was "
                "built. Give the Trainer esper.rebuild(model, state) instead."
            )
        torch_optimizer = getattr(optimizer, "optimizer", optimizer)
        example = self.example
        if example is None:
            example = _first_rows(train_dataloader, model, args.device)
        self.grower = Grower(
            model,
            torch_optimizer,
            self.slots,
            example=example,
            mode=self.mode,
            **{"decisions": _evaluations(args, state), **self.options},
        )
        if optimizer is not torch_optimizer:
            optimizer.state_dict = _plain_state(torch_optimizer)
        if state.global_step:
            self._resume(Path(args.output_dir), state.global_step)
        self._unwrap = _wrap_forward(model, self.grower)

    def on_evaluate(
        self, *_: object, metrics: Mapping[str, float], **__: object
    ) -> None:
        """Take one decision."""
        if self.grower is None or self._unwrap is None:
            return
        if self.monitor not in metrics:
            raise InvalidInputError(
                f"{self.monitor!r} was not measured. Measured were: "
                f"{', '.join(sorted(metrics)) or 'nothing'}."
            )
        self.grower.step(metric=float(metrics[self.monitor]))

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **_: object,
    ) -> None:
        """Save the part of the Grower's state that the Trainer does not save."""
        assert self.grower is not None
        saved = self.grower.state_dict()
        seeds = {n: t for n, t in saved["model"].items() if n.startswith(SEEDS)}
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        _keep_names(folder / WEIGHTS_FILE, model)
        data = BytesIO()
        torch.save({**saved, "model": seeds, "step": state.global_step}, data)
        publish(Disk(), folder / STATE_FILE, data.getvalue())

    def on_train_end(self, *_: object, model: nn.Module, **__: object) -> None:
        """Restore the model's own forward and merge the seeds."""
        assert self.grower is not None
        assert self._unwrap is not None
        self._unwrap()
        self._unwrap = None
        if not self.grower.model.parameters_added:
            self.grower.detach()
            return
        try:
            if not self.merge:
                raise InvalidInputError(f"merge=False was given, so {KEEPS_SEEDS}.")
            merge_into_model(self.grower)
        except InvalidInputError as error:
            if self.merge:
                log.warning(str(error))
            if hasattr(model, "save_pretrained"):
                model.__dict__["save_pretrained"] = partial(_save, model, str(error))

    def _drop_seeds(self, model: nn.Module, state: dict[str, Any], *_: object) -> None:
        """Remove seeds from a state that a plain model is about to load."""
        for name in [name for name in state if name.startswith(f"{NAME}.")]:
            del state[name]
            self._dropped = True
        with suppress(InvalidInputError):  # torch refuses another model itself
            fit_sizes(model, state)

    def _resume(self, output: Path, step: int) -> None:
        """Load the state that `on_save` has written."""
        assert self.grower is not None
        folder = Path(self.checkpoint or output / f"checkpoint-{step}")
        try:
            with open_regular(folder / STATE_FILE) as stream:
                saved = torch.load(stream, weights_only=True)
        except Exception as error:
            raise InvalidInputError(
                f"{STATE_FILE} of the checkpoint cannot be read ({described(error)}). "
                "Pass its folder: GrowCallback(checkpoint=...)."
            ) from error
        about = f"{short(folder)}/{STATE_FILE}"
        found = saved.get("format") if isinstance(saved, dict) else None
        require_readable(about, found, "Train it again.")
        if saved.pop("step", None) != step:
            raise InvalidInputError(
                f"{STATE_FILE} in {folder.name!r} is not of step {step}."
            )
        now = self.grower.state_dict()["model"]
        host = {n: t for n, t in now.items() if not n.startswith(SEEDS)}
        self.grower.load_state_dict({**saved, "model": {**host, **saved["model"]}})


def merge_into_model(grower: Grower) -> nn.Module:
    """Merge seeds into the host, set the new sizes in its config and detach the Grower.

    Raises an error and changes nothing if the config cannot describe the network.
    """
    model, plain = grower.model.host, grower.export()
    unmerged = plain._modules.get(NAME)
    if isinstance(unmerged, Branches):
        raise InvalidInputError(
            f"some seeds do not merge ({unmerged.reasons[0]}), so {KEEPS_SEEDS}."
        )
    config: Any = getattr(model, "config", None)  # a plain nn.Module has none
    try:
        wanted = shapes_of(dict(plain.named_parameters()))
        sized = None if config is None else sized_config(plain, wanted)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, so {KEEPS_SEEDS}.") from error
    grower.detach()
    copy_fields(sized, config)
    return model


def _save(model: Any, why: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """`save_pretrained` of a model that keeps seeds, or sizes that no config has."""
    config = getattr(model, "config", None)
    shapes = shapes_of(dict(model.named_parameters()))
    if grown_part(model) or shapes != built_shapes(model, config):
        raise InvalidInputError(f"from_pretrained would not load what grew: {why}")
    type(model).save_pretrained(model, *args, **kwargs)


def _check_arguments(args: TrainingArguments, state: TrainerState) -> None:
    distributed = args.world_size > 1 or args.n_gpu > 1 or args.fsdp or args.deepspeed
    for unsupported, message in (
        (state.is_hyper_param_search, "GrowCallback does not support searches."),
        (
            distributed,
            "GrowCallback supports one device. For several, use esper.Grower with a "
            "DistributedDataParallel model.",
        ),
        (args.torch_compile, "a compiled model does not grow. Omit torch_compile."),
        (
            args.eval_strategy == "no",
            "GrowCallback decides after evaluations. Set eval_strategy and pass an "
            "eval_dataset to the Trainer.",
        ),
    ):
        if unsupported:
            raise InvalidInputError(message)


def _evaluations(args: TrainingArguments, state: TrainerState) -> int:
    """Planned number of evaluations."""
    if args.eval_strategy == "epoch":
        return max(1, round(float(state.num_train_epochs)))
    return max(1, int(state.max_steps) // max(1, int(state.eval_steps)))


def _first_rows(loader: Any, model: nn.Module, device: Any) -> Example:  # noqa: ANN401
    """The first rows of the training data, collated as by the Trainer."""
    rows = [*islice(iter(loader.dataset), EXAMPLE_ROWS)]
    with kept_randomness(model):
        batch: Mapping[str, Any] = dict(loader.collate_fn(rows))
    moved: Mapping[str, Any] = tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch
    )
    return moved


def _plain_state(optimizer: Optimizer) -> Callable[[], dict[str, Any]]:
    """A `state_dict` that a new Trainer's optimizer can load: no seeds and no state.

    The state itself is in `STATE_FILE`.
    """
    sizes = [len(group["params"]) for group in optimizer.param_groups]

    def state_dict() -> dict[str, Any]:
        groups, first = [], 0
        for group, size in zip(optimizer.param_groups, sizes, strict=True):
            groups.append({**group, "params": [*range(first, first + size)]})
            first += size
        return {"state": {}, "param_groups": groups}

    return state_dict


def _keep_names(file: Path, model: nn.Module) -> None:
    """Save the weights again if the Trainer has renamed them.

    It saves some models, such as ViT, with names of former versions, which it does not
    find when it resumes.
    """
    if file.exists():
        with safe_open(file, "pt") as saved:
            renamed = {*saved.keys()} - model.state_dict().keys()
        if renamed:
            save(model, file)


class _NoLoss(Exception):  # noqa: N818
    """The model returned no loss."""


def _wrap_forward(model: nn.Module, grower: Grower) -> Callable[[], None]:
    """Compute the loss of every training batch with a Grower; returns an undo function.

    A hook would not do: the Grower must call the forward itself.
    """
    own: Callable[..., Any] = model.forward
    before = model.__dict__.get("forward")  # mixed precision wraps it too

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not model.training or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        answers: list[Any] = []  # of the host's own pass

        def closure() -> Tensor:
            answer = own(*args, **kwargs)
            if not grower.model.seeds.flow.shadow:
                answers.append(answer)
            loss = answer.get("loss") if isinstance(answer, Mapping) else answer[0]
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise _NoLoss
            return loss

        try:
            loss = grower.loss(closure)
        except _NoLoss:  # the Trainer computes it; seeds then train while blending
            return answers[0] if answers else own(*args, **kwargs)
        (first,) = answers
        if isinstance(first, Mapping):
            first["loss"] = loss  # type: ignore[index]
            return first
        return (loss, *first[1:])

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]
    model.__dict__["forward"] = forward

    def unwrap() -> None:
        del model.__dict__["forward"]
        if before is not None:
            model.__dict__["forward"] = before

    return unwrap
