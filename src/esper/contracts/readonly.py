"""Read-only tensors: a write raises an error instead of being lost."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from esper.contracts.errors import InvalidInputError

WRITES: Final = frozenset({"__setitem__", "__set__"})
READS: Final = frozenset({"__int__", "__index__", "__invert__"})
"""Methods that are named like `__iadd__` but do not write."""


class ReadOnly(Tensor):
    """A read-only tensor. Its views are read-only; copies and results are not."""

    instead: str
    """What to do instead of writing; the end of the error message."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Raise an error for functions that write; run the others as usual."""
        kwargs = kwargs or {}
        written = (args[:1] if _writes(func.__name__) else (), kwargs.get("out"))
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tree_leaves(written):
                if isinstance(tensor, ReadOnly):
                    raise InvalidInputError(
                        f"this tensor is read-only; {tensor.instead}"
                    )
            result = func(*args, **kwargs)
            own = [x for x in tree_leaves(args) if isinstance(x, ReadOnly)]
            return tree_map(lambda value: _guarded(value, own), result)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        """Copy to a plain tensor."""
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401
        """Pickle as a plain tensor."""
        return self.clone().__reduce_ex__(protocol)


def read_only(tensor: Tensor, instead: str) -> Tensor:
    """A read-only view of a tensor; `instead` ends the error message."""
    shown = tensor.detach().as_subclass(ReadOnly)
    shown.instead = instead
    return shown


def _writes(name: str) -> bool:
    """Whether a function of this name writes into its first argument."""
    inplace = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in READS
    return inplace or operator or name in WRITES


def _guarded(value: object, own: Sequence[ReadOnly]) -> object:
    """The value, read-only if it shares memory with one of these tensors."""
    if isinstance(value, np.ndarray):
        value.flags.writeable = False
    if isinstance(value, Tensor) and not isinstance(value, ReadOnly):
        memory = value.untyped_storage().data_ptr()
        for tensor in own:
            if tensor.untyped_storage().data_ptr() == memory:
                return read_only(value, tensor.instead)
    return value
