"""Kind and device of tensors: checks, and copies to a device."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from esper.contracts.errors import InvalidInputError

Tree = TypeVar("Tree")
LARGE_BLOCK: Final = 31 * 2**20  # glibc ignores those from 32 MB


def usable_device(
    device: torch.device | str, *, has_values: bool = True
) -> torch.device:
    """Return the device; raise an error if this machine cannot use it.

    With `has_values`, "meta" is refused, whose tensors have shapes only.
    """
    with suppress(RuntimeError, AssertionError, TypeError):
        found = torch.empty(0, device=device).device
        if found.type != "meta" or not has_values:
            return found
    others = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    others += ["mps"] if torch.backends.mps.is_available() else []
    raise InvalidInputError(
        f"device '{device}' cannot be used here. Use one of: "
        f"{', '.join(['cpu', *others])}."
    )


def require_tensor(
    name: str,
    value: object,
    shape: Sequence[Any],  # sizes may be symbols while a model is exported
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
    hint: str = "Convert it.",
) -> None:
    """Raise an error unless a value is a tensor of this shape, dtype and device."""
    dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    found = type(value).__name__
    if isinstance(value, Tensor):
        if value.shape == shape and value.dtype in dtypes and value.device == device:
            return
        found = f"{value.dtype} of shape {tuple(value.shape)} on {value.device}"
    wanted = " or ".join(map(str, dtypes))
    raise InvalidInputError(
        f"{name} must be {wanted} of shape {tuple(shape)} on {device}, got {found}. "
        f"{hint}"
    )


def map_tensors(function: Callable[[Tensor], Tensor], value: Tree) -> Tree:
    """Apply a function to every tensor of a dataclass, dict or tuple, recursively."""
    if isinstance(value, Tensor):
        return function(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {  # type: ignore[return-value]
            name: map_tensors(function, part) for name, part in value.items()
        }
    if isinstance(value, tuple):
        return tuple(map_tensors(function, part) for part in value)  # type: ignore[return-value]
    if not is_dataclass(value):
        return value
    names = [field.name for field in fields(value)]
    parts = {name: map_tensors(function, getattr(value, name)) for name in names}
    return replace(value, **parts)  # type: ignore[type-var]


def keep_freed_memory() -> None:
    """Make malloc keep up to 62 MB of freed memory for the next tensors.

    glibc returns the end of its heap to the system once it is larger than twice the
    largest block that was freed. A backward pass frees more than that, and every update
    would ask for the same pages again. So one large block is freed here, unused.
    """
    torch.empty(LARGE_BLOCK, dtype=torch.uint8)


def to_device(tree: Tree, device: torch.device) -> Tree:
    """Copy the tensors of a tree from the CPU to a device, as one block of bytes.

    Tensors that are there are kept. Returns the tree itself if the device is the CPU.
    The copy does not wait for the work that the device still has to do.
    """
    if device.type == "cpu":
        return tree
    tensors: list[Tensor] = []
    map_tensors(lambda x: tensors.append(x) or x, tree)  # type: ignore[func-returns-value]
    tensors = [tensor for tensor in tensors if tensor.device != device]
    if not tensors:
        return tree
    tensors.sort(key=lambda x: -x.element_size())  # aligns all of them
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    block = torch.cat(parts)
    if device.type == "cuda":
        block = block.pin_memory()  # only copies from pinned memory do not wait
    pieces = block.to(device, non_blocking=True).split([len(part) for part in parts])
    moved = {
        id(tensor): piece.view(tensor.dtype).view(tensor.shape)
        for tensor, piece in zip(tensors, pieces, strict=True)
    }
    return map_tensors(lambda x: moved.get(id(x), x), tree)
