"""Fields of a model's config that set the sizes of its layers.

Models of Hugging Face are built from a config, `type(model)(config)`. A field sets the
sizes that change when the field changes, which is tried on the meta device. Layers of
one field grow together, so that a config can describe the grown network.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError

WIDTH_FIELDS: Final = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "hidden_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
"""Names that configs use for the width of MLPs."""
RATIO_FIELDS: Final = ("mlp_ratio", "expand_ratio")
"""Names that configs use for the width of MLPs as a multiple of their input."""
POSITION: Final = re.compile(r"(layer|block)_?(i|idx|index|id|num|number)|idx|index")
"""Names of attributes that may hold the position of a block."""
Shapes = dict[str, tuple[int, ...]]
Axis = tuple[str, int]
"""An axis of a parameter, by name and number."""


def shapes_of(parameters: Mapping[str, Tensor]) -> Shapes:
    """Shapes of parameters by name."""
    return {name: tuple(p.shape) for name, p in parameters.items()}


def built(model: nn.Module, config: Any) -> nn.Module:  # noqa: ANN401
    """A model of the same class with another config, on the meta device."""
    with torch.device("meta"):
        made: nn.Module = type(model)(config)
    return made


def built_shapes(model: nn.Module, config: Any) -> Shapes:  # noqa: ANN401
    """Shapes that a model of the same class has with another config."""
    return shapes_of(dict(built(model, config).named_parameters()))


def configured_parts(model: nn.Module) -> dict[str, Any]:
    """The model, or the models of Hugging Face in it, by prefix of their names.

    Those whose config has fields for widths.
    """
    parts: dict[str, Any] = {}
    for name, part in model.named_modules():
        prefix, config = f"{name}." if name else "", getattr(part, "config", None)
        known = not name or hasattr(config, "model_type")
        if known and any(_fields(config)) and not any(map(prefix.startswith, parts)):
            parts[prefix] = part
    return parts


def fields_of_axes(model: nn.Module) -> dict[Axis, str]:
    """The field that sets the size of an axis; empty without such a config."""
    found = dict[Axis, str]()
    for prefix, part in configured_parts(model).items():
        with suppress(Exception):  # a config of the user's own, or built another way
            config: Any = deepcopy(part.config)
            found |= {
                (f"{prefix}{name}", axis): f"{prefix}{field}"
                for field in _fields(config)
                for name, axis in _changed(part, config, field)
            }
    return found


def sized_config(model: Any, wanted: Shapes) -> Any:  # noqa: ANN401
    """The config of a model whose parameters have the wanted shapes.

    Raises an error if no config describes them.
    """
    config = deepcopy(model.config)
    kind = type(config).__name__
    for field in _fields(config):
        before, old = built_shapes(model, config), _get(config, field)
        sizes = {
            (wanted[name][axis], before[name][axis])
            for name, axis in _changed(model, config, field)
            if name in wanted
        }
        if not sizes or all(new == known for new, known in sizes):
            continue
        if field.split(".")[-1] in RATIO_FIELDS:
            new, known = max(sizes)
            ratio = old * new / known  # some configs take integers only
            value = type(old)(ratio) if ratio.is_integer() else ratio
            try:
                _set(config, field, value)
            except Exception as error:
                raise InvalidInputError(
                    f"{kind} has no {field} of {value:g}"
                ) from error
        elif len({new for new, _ in sizes}) == 1:
            _set(config, field, next(iter(sizes))[0])
        else:
            listed = ", ".join(str(new) for new, _ in sorted(sizes))
            raise InvalidInputError(
                f"layers have grown to different sizes ({listed}) and {kind} has one "
                f"{field}"
            )
    found = built_shapes(model, config)  # which may have more, such as a pooler
    if any(found.get(name) != shape for name, shape in wanted.items()):
        raise InvalidInputError(f"{kind} has no field for the layers that grew")
    return config


def follow_sizes(model: nn.Module, wanted: Shapes) -> None:
    """Let the configs of a model describe these shapes, if they can."""
    for prefix, part in configured_parts(model).items():
        names = (name for name in wanted if name.startswith(prefix))
        own = {name.removeprefix(prefix): wanted[name] for name in names}
        with suppress(Exception):  # a config of the user's own, or of no such sizes
            copy_fields(sized_config(part, own), part.config)


def restore_fields(model: nn.Module) -> Callable[[], None]:
    """Return a function that restores the fields of a model's configs."""
    configs = [part.config for part in configured_parts(model).values()]
    held = [(one, field, _get(one, field)) for one in configs for field in _fields(one)]

    def put_back() -> None:
        for config, field, value in held:
            _set(config, field, value)

    return put_back


def follow_depth(
    model: Any,  # noqa: ANN401
    name: str,
    order: Sequence[int],
    parameters: Mapping[str, Tensor],
) -> Callable[[], None]:
    """Let a config describe a list with copies of its blocks, if it can.

    Returns an undo function. Raises if `save_pretrained` would lose them, or if the
    config gives them other settings than their originals have, such as Swin's shifts.

    Args:
        model: The model, or a part of it with a config.
        name: Name of the list in the model.
        order: The former position of the block at each position.
        parameters: Parameters of the model with its new blocks.
    """
    config, before = getattr(model, "config", None), nn.Module()
    with suppress(Exception):  # a config of the user's own
        before = built(model, config)
    known = dict(before.named_parameters()).keys()
    if known == parameters.keys():  # it follows already, as the config of an outer part
        return lambda: None
    for field in _depth_fields(config, max(order) + 1) if known else ():
        trial, after = deepcopy(config), nn.Module()
        with suppress(Exception):
            _set_depth(trial, field, order)
            after = built(model, trial)
        if dict(after.named_parameters()).keys() == parameters.keys():
            old, new = ([*m.get_submodule(name).children()] for m in (before, after))
            pairs = ((old[source], new[at]) for at, source in enumerate(order))
            if other := {key for one, two in pairs for key in _differ(one, two)}:
                raise InvalidInputError(
                    f"{name!r} cannot get these blocks: {type(config).__name__} gives "
                    f"them another {min(other)} than their originals have. Use another "
                    "number of blocks."
                )
            return _set_depth(config, field, order)
    if known and known <= parameters.keys() and hasattr(model, "save_pretrained"):
        raise InvalidInputError(
            f"{name!r} cannot get more blocks: {type(config).__name__} has no field "
            "for their number, so save_pretrained would lose them."
        )
    return lambda: None


def _differ(block: nn.Module, other: nn.Module) -> Iterator[str]:
    """Names of settings that differ between two blocks, but for their positions."""
    there = {path: vars(module) for path, module in other.named_modules()}
    for path, module in block.named_modules():
        for name, value in vars(module).items():
            setting = type(value) in (int, bool, str) and not POSITION.fullmatch(name)
            if setting and there.get(path, {}).get(name, value) != value:
                yield name


def _depth_fields(config: Any, blocks: int, prefix: str = "") -> Iterator[str]:  # noqa: ANN401
    """Fields that may hold the length of a list of blocks, such as "depths.2"."""
    for name, value in getattr(config, "__dict__", {}).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _depth_fields(value, blocks, f"{prefix}{name}.")
        elif re.search("layer|depth|block", name):
            values = enumerate(value) if isinstance(value, list | tuple) else ()
            found = {"": value, **{f".{at}": one for at, one in values}}
            for end, one in found.items():
                if type(one) is int and one == blocks:
                    yield f"{prefix}{name}{end}"


def _set_depth(config: Any, field: str, order: Sequence[int]) -> Callable[[], None]:  # noqa: ANN401
    """Set a field, and repeat the entries of lists with one entry per block."""
    *parents, last = re.sub(r"\.\d+$", "", field).split(".")
    owner = _get(config, ".".join(parents)) if parents else config
    held = dict(vars(owner))
    if (at := field.rpartition(".")[2]).isdecimal():
        lengths = [*held[last]]
        lengths[int(at)] = len(order)
        setattr(owner, last, lengths)
    else:
        setattr(owner, last, len(order))
        for name, value in held.items():
            listed = "layer" in name and isinstance(value, list | tuple)
            if listed and len(value) == max(order) + 1:
                setattr(owner, name, [value[source] for source in order])
    return partial(vars(owner).update, held)


def copy_fields(source: Any, target: Any) -> None:  # noqa: ANN401
    """Set the fields for widths of a config to those of another one."""
    for field in _fields(target):
        _set(target, field, _get(source, field))


def _fields(config: Any, prefix: str = "") -> Iterator[str]:  # noqa: ANN401
    """Fields for widths that a config and its sub-configs have, as dotted names."""
    for name in (*WIDTH_FIELDS, *RATIO_FIELDS):
        if hasattr(config, name):
            yield f"{prefix}{name}"
    for name, value in getattr(config, "__dict__", {}).items():
        if hasattr(value, "model_type") and hasattr(value, "to_dict"):
            yield from _fields(value, f"{prefix}{name}.")


def _changed(model: nn.Module, config: Any, field: str) -> list[Axis]:  # noqa: ANN401
    """Axes that get another size if a field changes."""
    probe = deepcopy(config)
    _set(probe, field, (_get(config, field) or 0) + 1)
    before, after = (built_shapes(model, one) for one in (config, probe))
    return [
        (name, axis)
        for name in before
        if name in after
        for axis, size in enumerate(before[name])
        if size != after[name][axis]
    ]


def _get(config: Any, field: str) -> Any:  # noqa: ANN401
    for name in field.split("."):
        config = getattr(config, name)
    return config


def _set(config: Any, field: str, value: Any) -> None:  # noqa: ANN401
    *parents, name = field.split(".")
    setattr(_get(config, ".".join(parents)) if parents else config, name, value)
