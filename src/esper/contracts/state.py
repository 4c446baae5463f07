"""What must be kept of an object so that it goes on as if nothing had happened.

A class that changes while a run goes on names its attributes:

    STATE     change, and are saved
    DERIVED   change, and follow from what is saved

All others never change. `save` turns what is named into tensors by path, such as
`world/cohort/values`; `load` puts them back into an object that was made in the same
way. Nothing but numbers is saved, and loading runs nothing.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.optim import Optimizer

from esper.contracts.errors import BadInput

Tensors = dict[str, Tensor]


class Stateful:
    """Something that changes while a run goes on."""

    STATE: ClassVar[tuple[str, ...]] = ()
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def loaded(self) -> None:
        """Renew what follows from what was just loaded."""


def save(value: object, path: str = "") -> Tensors:
    """Copies of all numbers that are named, by path."""
    return {name: tensor.detach().cpu().clone() for name, tensor in _walk(value, path)}


def load(value: object, tensors: Mapping[str, Tensor], path: str = "") -> None:
    """Put saved numbers back; refuses before anything is changed.

    Args:
        value: An object with `STATE`, made as the saved one was.
        tensors: What `save` gave.
        path: What every name begins with.
    """
    _check({name: there for name, there in _walk(value, path)}, tensors)
    _fill(value, tensors, path)


def _walk(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401
    """Every leaf with its path."""
    if isinstance(value, Stateful):
        for name in value.STATE:
            yield from _walk(getattr(value, name), _join(path, name))
    elif isinstance(value, Optimizer):
        yield from _moments(value, path)
    elif isinstance(value, nn.Module):
        for name, tensor in value.state_dict().items():
            yield _join(path, name), tensor
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _walk(getattr(value, field.name), _join(path, field.name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _walk(part, _join(path, str(index)))
    else:
        yield path, _as_tensor(value, path)


def _fill(value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:  # noqa: ANN401
    """The value with saved numbers; objects are filled, plain values made anew."""
    if isinstance(value, Stateful):
        for name in value.STATE:
            old = getattr(value, name)
            new = _fill(old, tensors, _join(path, name))
            if new is not old:
                setattr(value, name, new)
        value.loaded()
        return value
    if isinstance(value, Optimizer | nn.Module):
        with torch.no_grad():
            for name, there in _walk(value, path):
                there.copy_(tensors[name])
        return value
    if isinstance(value, Generator):
        value.set_state(tensors[path])
        return value
    if is_dataclass(value) and not isinstance(value, type):
        parts = {
            field.name: _fill(
                getattr(value, field.name), tensors, _join(path, field.name)
            )
            for field in fields(value)
        }
        return replace(value, **parts)
    if isinstance(value, list | tuple):
        filled = [
            _fill(part, tensors, _join(path, str(index)))
            for index, part in enumerate(value)
        ]
        named = hasattr(value, "_fields")
        return type(value)(*filled) if named else type(value)(filled)
    return _like(value, tensors[path])


def _moments(optimizer: Optimizer, path: str) -> Iterator[tuple[str, Tensor]]:
    """What an optimiser remembers; it must have taken or made room for a step."""
    number = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, kept in sorted(optimizer.state[parameter].items()):
                yield _join(path, f"{number}/{name}"), kept
            number += 1


def _as_tensor(value: Any, path: str) -> Tensor:  # noqa: ANN401
    match value:
        case Tensor():
            return value
        case Generator():
            return value.get_state()
        case np.ndarray():
            return torch.from_numpy(value)
        case bool() | int():
            return torch.tensor(value)
        case float():
            return torch.tensor(value, dtype=torch.float64)
    raise BadInput(f"{path} is {type(value).__name__}, which cannot be saved.")


def _like(value: Any, saved: Tensor) -> Any:  # noqa: ANN401
    match value:
        case Tensor():
            return saved.to(value.device, copy=True)
        case np.ndarray():
            return saved.clone().numpy()
    return type(value)(saved.item())


def _check(there: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse another set of names, shapes or kinds, and name the first three."""
    wrong = [f"{name} is missing" for name in there.keys() - saved.keys()]
    wrong += [f"{name} is not known here" for name in saved.keys() - there.keys()]
    for name in there.keys() & saved.keys():
        one, other = there[name], saved[name]
        if one.shape != other.shape or one.dtype != other.dtype:
            wrong.append(f"{name} is {_say(other)}, expected {_say(one)}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise BadInput(
            f"This state does not fit: {'; '.join(sorted(wrong)[:3])}{more}."
        )


def _say(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name
