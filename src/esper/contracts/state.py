"""Saving and loading the state of objects as tensors.

A `Stateful` class lists the attributes that change during a run:

    STATE     saved
    DERIVED   computed again from STATE after loading

`save` returns a flat dict of tensors by path, such as `world/cohort/values`. `load`
writes them into an object that was constructed with the same arguments. Only numbers
are saved, and loading executes no code from the file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import printable

Tensors = dict[str, Tensor]


class Stateful:
    """Base class of objects whose state is saved in checkpoints."""

    STATE: ClassVar[tuple[str, ...]] = ()
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def loaded(self) -> None:
        """Compute DERIVED attributes after loading."""


def leaves(value: object, path: str = "") -> Tensors:
    """The state of an object as tensors by path, not copied."""
    return {name: _as_tensor(leaf, name) for name, leaf in _walk(value, path)}


def save(value: object, path: str = "") -> Tensors:
    """The state of an object as copied tensors by path."""
    found = leaves(value, path)
    return {name: tensor.detach().cpu().clone() for name, tensor in found.items()}


def load(value: object, tensors: Mapping[str, Tensor], path: str = "") -> None:
    """Write the result of `save` into an object; an error changes nothing."""
    check_fit(leaves(value, path), tensors)
    for name, leaf in _walk(value, path):
        if isinstance(leaf, Generator):
            try:
                Generator(leaf.device).set_state(tensors[name])
            except RuntimeError:
                raise InvalidInputError(
                    f"{name} is not the state of a random generator."
                ) from None
    _fill(value, tensors, path)


def _parts(value: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Children of a value by name; None if it is a leaf."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if isinstance(value, Stateful):
        return {name: getattr(value, name) for name in value.STATE}
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    if isinstance(value, Optimizer):  # has state only after a step
        parameters = [p for group in value.param_groups for p in group["params"]]
        return {
            f"{number}/{name}": kept
            for number, parameter in enumerate(parameters)
            for name, kept in sorted(value.state[parameter].items())
        }
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, list | tuple):
        return {str(index): part for index, part in enumerate(value)}
    return None


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """All leaves with their paths."""
    parts = _parts(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts.items():
        yield from _walk(part, f"{path}/{name}".lstrip("/"))


def _fill(value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:  # noqa: ANN401
    """The value with saved numbers; objects in place, plain values as copies."""
    parts = _parts(value)
    if parts is None:
        return _like(value, tensors[path])
    paths = {name: f"{path}/{name}".lstrip("/") for name in parts}
    if isinstance(value, Optimizer | nn.Module):
        with torch.no_grad():
            for name, part in parts.items():
                part.copy_(tensors[paths[name]])
        return value
    filled = {n: _fill(part, tensors, paths[n]) for n, part in parts.items()}
    if isinstance(value, Stateful):
        for name, part in filled.items():
            if part is not parts[name]:
                setattr(value, name, part)
        value.loaded()
        return value
    if value is None or isinstance(value, dict):
        return None if value is None else filled
    if is_dataclass(value):
        return replace(value, **filled)  # type: ignore[type-var]
    named = hasattr(value, "_fields")
    return type(value)(*filled.values()) if named else type(value)(filled.values())


def _as_tensor(value: Any, path: str) -> Tensor:  # noqa: ANN401
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Generator):
        return value.get_state()
    if not isinstance(value, np.ndarray | int | float):
        raise InvalidInputError(
            f"{path} is {type(value).__name__}, which cannot be saved."
        )
    exact = torch.float64 if isinstance(value, float) else None
    return torch.as_tensor(value, dtype=exact)


def _like(value: Any, saved: Tensor) -> Any:  # noqa: ANN401
    if isinstance(value, Tensor):
        return saved.to(value.device, copy=True)
    if isinstance(value, Generator):
        value.set_state(saved)
        return value
    if isinstance(value, np.ndarray):
        return saved.clone().numpy()
    return type(value)(saved.item())


def check_fit(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Raise an error if names, shapes or dtypes differ; meta tensors are allowed."""
    wrong = [f"{name} is missing" for name in own.keys() - saved.keys()]
    wrong += [f"{name} is unknown" for name in saved.keys() - own.keys()]
    for name in own.keys() & saved.keys():
        expected, found = (
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            for tensor in (own[name], saved[name])
        )
        if found != expected:
            wrong.append(f"{name} is {found}, expected {expected}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = f"This state does not fit: {'; '.join(sorted(wrong)[:3])}{more}."
        raise InvalidInputError(printable(text))
