"""Growing a network that the Trainer of Hugging Face trains.

    trainer = Trainer(model, args, train_dataset=..., eval_dataset=...,
                      callbacks=[GrowCallback()])
    trainer.train()
    trainer.save_model("grown")

The callback builds a `Grower` over the model and the Trainer's optimiser, computes the
loss of every batch through it and takes a decision after every evaluation. Checkpoints
of the Trainer hold what has grown, and resume from them. When training ends, what has
grown is folded into the model's own layers and the config gets their sizes, so that
`from_pretrained` loads it. Where the config has no word for them, `save_pretrained` is
refused with one line that says what to do instead.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
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
from esper.files import Disk, open_regular, publish
from esper.grower import Grower
from esper.growth.analysis.tracing import Example, kept_randomness
from esper.growth.blueprints.registry import first_line
from esper.growth.measurements import Mode
from esper.growth.saving.export import Branches
from esper.growth.saving.saved_topology import NAME
from esper.growth.saving.serialization import save
from esper.growth.seed_modules import grown_part

try:
    from transformers import TrainerCallback
    from transformers.utils.logging import get_logger
except ImportError as error:  # pragma: no cover
    raise InvalidInputError(
        "esper.huggingface needs transformers: pip install 'esper-lite[huggingface]'."
    ) from error

FILE: Final = "esper.pt"
"""What a checkpoint of the Trainer holds beside its own files."""
WEIGHTS: Final = "model.safetensors"
ROWS: Final = 2
"""Rows of the training data that make an example."""
WIDTHS: Final = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "hidden_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
"""What configs call the width of the layers that grow."""

INSTEAD: Final = (
    "it keeps its seeds: write it with esper.save(model, path), read it with "
    "esper.load(path, model)"
)

log = get_logger(__name__)


class GrowCallback(TrainerCallback):  # type: ignore[misc]
    """Grows the model of a Trainer while it is trained.

    Args:
        slots: Places by module name, patterns such as "*.mlp", or "auto"; see
            `esper.Grower`.
        example: What the model is called with; the first rows of the training data
            if None.
        monitor: The metric of the evaluations that decisions see.
        mode: "min" for a loss, "max" for an accuracy or another gain.
        checkpoint: Folder of the checkpoint that is resumed, if it does not lie in
            the Trainer's output folder.
        merge: Whether what has grown is folded into the model when training ends.
        options: Whatever else `Grower` takes.
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
        """What grows the network, once training has begun."""
        self._unwrap: Callable[[], None] | None = None
        """Gives the model its own forward back; None before and after training."""
        self._handle: Any = None
        self._dropped = False
        """Whether seeds of a state wait to be loaded."""

    # What the Trainer calls.

    def on_init_end(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        model: nn.Module | None = None,
        **_: object,
    ) -> None:
        """Seeds of a checkpoint are loaded later, when the optimiser is there."""
        if model is not None and grown_part(model) is None:
            hook = model.register_load_state_dict_pre_hook(self._drop_seeds)
            self._handle = hook

    def on_train_begin(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        model: nn.Module,
        optimizer: Any = None,  # noqa: ANN401
        train_dataloader: Any = None,  # noqa: ANN401
        **_: object,
    ) -> None:
        """Build the Grower, and go on where a checkpoint stopped."""
        _refuse_arguments(args, state)
        if self.grower is not None:
            raise InvalidInputError(
                "this GrowCallback has grown a network already; make a new one for "
                "another training."
            )
        if self._handle is not None:
            self._handle.remove()
        model.__dict__.pop("save_pretrained", None)  # of a training before this one
        if self._dropped and not state.global_step:
            raise InvalidInputError(
                "a grown state was loaded into the model after the Trainer was built; "
                "give the Trainer esper.rebuild(model, state) instead."
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
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        metrics: Mapping[str, float],
        **_: object,
    ) -> None:
        """One decision."""
        if self.grower is None or self._unwrap is None:
            return
        if self.monitor not in metrics:
            known = ", ".join(sorted(metrics)) or "nothing"
            raise InvalidInputError(
                f"{self.monitor!r} was not measured; there is {known}."
            )
        self.grower.step(metric=float(metrics[self.monitor]))

    def on_save(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        model: nn.Module,
        **_: object,
    ) -> None:
        """Put beside the Trainer's files what they do not hold."""
        assert self.grower is not None
        saved = self.grower.state_dict()
        own = f"host.{NAME}."
        seeds = {n: t for n, t in saved["model"].items() if n.startswith(own)}
        folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
        _keep_names(folder / WEIGHTS, model)
        data = BytesIO()
        torch.save({**saved, "model": seeds, "step": state.global_step}, data)
        publish(Disk(), folder / FILE, data.getvalue())

    def on_train_end(
        self,
        args: Any,  # noqa: ANN401
        state: Any,  # noqa: ANN401
        control: Any,  # noqa: ANN401
        model: nn.Module,
        **_: object,
    ) -> None:
        """Give the model its own forward back and fold in what has grown."""
        assert self.grower is not None
        assert self._unwrap is not None
        self._unwrap()
        self._unwrap = None
        if not self.grower.model.seeds:
            self.grower.detach()
            return
        try:
            if not self.merge:
                raise InvalidInputError(f"merge=False was given, so {INSTEAD}.")
            merge_into_model(self.grower)
        except InvalidInputError as error:
            if self.merge:
                log.warning(str(error))
            if hasattr(model, "save_pretrained"):
                model.__dict__["save_pretrained"] = partial(_save, model, str(error))

    # Inside.

    def _drop_seeds(self, model: nn.Module, state: dict[str, Any], *_: object) -> None:
        """Take the seeds out of a state that a plain model is about to load."""
        for name in [name for name in state if name.startswith(f"{NAME}.")]:
            del state[name]
            self._dropped = True

    def _resume(self, output: Path, step: int) -> None:
        """Load what `on_save` has written."""
        assert self.grower is not None
        folder = Path(self.checkpoint or output / f"checkpoint-{step}")
        try:
            with open_regular(folder / FILE) as stream:
                saved = torch.load(stream, weights_only=True)
        except Exception as error:
            raise InvalidInputError(
                f"{FILE} of the checkpoint cannot be read ({first_line(error)}); name "
                "its folder: GrowCallback(checkpoint=...)."
            ) from error
        if saved.pop("step", None) != step:
            raise InvalidInputError(f"{FILE} in {folder.name!r} is not of step {step}.")
        now = self.grower.state_dict()["model"]
        host = {n: t for n, t in now.items() if not n.startswith(f"host.{NAME}.")}
        self.grower.load_state_dict({**saved, "model": {**host, **saved["model"]}})


def merge_into_model(grower: Grower) -> nn.Module:
    """Fold what a Grower has grown into its host, whose config gets the new sizes.

    The Grower ends with that. Refuses a network that its config cannot describe; then
    nothing has changed.
    """
    model, plain = grower.model.host, grower.export()
    apart = plain._modules.get(NAME)
    if isinstance(apart, Branches):
        raise InvalidInputError(
            f"some seeds do not merge ({apart.reasons[0]}), so {INSTEAD}."
        )
    config: Any = getattr(model, "config", None)  # any module can have a Trainer
    try:
        sized = None if config is None else sized_config(plain)
    except InvalidInputError as error:
        raise InvalidInputError(f"{error}, so {INSTEAD}.") from error
    grower.detach()
    modules = dict(model.named_modules())
    for name, module in plain.named_modules():
        own = modules[name]
        own._parameters, own._buffers = module._parameters, module._buffers
        sizes = {k: v for k, v in vars(module).items() if type(v) is int}
        own.__dict__.update(sizes)
    for key in WIDTHS:
        if hasattr(sized, key):
            setattr(config, key, getattr(sized, key))
    return model


def _save(model: Any, why: str, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
    """What `save_pretrained` does for a model that has kept seeds."""
    if grown_part(model):
        raise InvalidInputError(f"from_pretrained would not load what has grown: {why}")
    type(model).save_pretrained(model, *args, **kwargs)


def sized_config(model: Any) -> Any:  # noqa: ANN401
    """A config that builds layers of the sizes that a model has; refuses if none does.

    What a width of the config decides is found by changing it and looking which shapes
    change.
    """
    config, wanted = deepcopy(model.config), _shapes(model)
    for key in [key for key in WIDTHS if hasattr(config, key)]:
        probe = deepcopy(config)
        setattr(probe, key, (getattr(config, key) or 0) + 1)
        before, after = (_shapes(_built(model, one)) for one in (config, probe))
        sizes = {
            wanted[name][axis]
            for name in wanted.keys() & before.keys()
            for axis, size in enumerate(before[name])
            if size != after[name][axis]
        }
        if len(sizes) > 1:
            found = ", ".join(map(str, sorted(sizes)))
            raise InvalidInputError(
                f"layers have grown to different sizes ({found}) and "
                f"{type(config).__name__} has one {key}"
            )
        if sizes:
            setattr(config, key, sizes.pop())
    if _shapes(_built(model, config)) != wanted:
        raise InvalidInputError(
            f"{type(config).__name__} has no word for the layers that grew"
        )
    return config


def _built(model: nn.Module, config: Any) -> nn.Module:  # noqa: ANN401
    with torch.device("meta"):
        made: nn.Module = type(model)(config)
    return made


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def _refuse_arguments(args: Any, state: Any) -> None:  # noqa: ANN401
    if state.is_hyper_param_search:
        raise InvalidInputError(
            "GrowCallback grows one model; it takes no part in a search."
        )
    if args.world_size > 1 or args.n_gpu > 1 or args.fsdp or args.deepspeed:
        raise InvalidInputError(
            "GrowCallback trains on one device; on several use esper.Grower with a "
            "DistributedDataParallel model."
        )
    if args.torch_compile:
        raise InvalidInputError(
            "a compiled model does not grow; leave torch_compile out."
        )
    if args.eval_strategy == "no":
        raise InvalidInputError(
            "GrowCallback decides after evaluations; set eval_strategy and give the "
            "Trainer an eval_dataset."
        )


def _evaluations(args: Any, state: Any) -> int:  # noqa: ANN401
    """How often the Trainer will evaluate."""
    if args.eval_strategy == "epoch":
        return max(1, round(float(state.num_train_epochs)))
    return max(1, int(state.max_steps) // max(1, int(state.eval_steps)))


def _first_rows(loader: Any, model: nn.Module, device: Any) -> Example:  # noqa: ANN401
    """An example from the training data, as the Trainer would collate it."""
    rows = [*islice(iter(loader.dataset), ROWS)]
    with kept_randomness(model):
        batch: Mapping[str, Any] = dict(loader.collate_fn(rows))
    moved: Mapping[str, Any] = tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, batch
    )
    return moved


def _plain_state(optimizer: Optimizer) -> Callable[[], dict[str, Any]]:
    """What the Trainer saves of the optimiser: groups without seeds, and no state.

    A new Trainer's optimiser can load it. All of the state is in our own file.
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
    """Write a model's weights anew if the Trainer has given them other names.

    It saves some models, such as ViT, under the names of former versions, and does not
    find these when it resumes.
    """
    if file.exists():
        with safe_open(file, "pt") as saved:
            renamed = {*saved.keys()} - model.state_dict().keys()
        if renamed:
            save(model, file)


class _NoLoss(Exception):  # noqa: N818
    """The model has answered without a loss."""


def _wrap_forward(model: nn.Module, grower: Grower) -> Callable[[], None]:
    """Compute the loss of every training batch through a Grower; returns the undoing.

    Not by a hook, since the Grower must begin before the batch does.
    """
    own: Callable[..., Any] = model.forward
    before = model.__dict__.get("forward")  # mixed precision wraps it too

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if not model.training or not torch.is_grad_enabled():
            return own(*args, **kwargs)
        answers: list[Any] = []  # of the host's own pass

        def closure() -> Tensor:
            answer = own(*args, **kwargs)
            if not grower.model.flow.shadow:
                answers.append(answer)
            loss = answer.get("loss") if isinstance(answer, Mapping) else answer[0]
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise _NoLoss
            return loss

        try:
            loss = grower.loss(closure)
        except _NoLoss:  # the Trainer computes one; seeds then train as they blend in
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
