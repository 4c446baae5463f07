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

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import printable

Tensors = dict[str, Tensor]


class Stateful:
    """Something that changes while a run goes on."""

    STATE: ClassVar[tuple[str, ...]] = ()
    DERIVED: ClassVar[tuple[str, ...]] = ()

    def loaded(self) -> None:
        """Renew what follows from what was just loaded."""


def leaves(value: object, path: str = "") -> Tensors:
    """All numbers that are named, by path; as they are, not copied."""
    return {name: _as_tensor(leaf, name) for name, leaf in _walk(value, path)}


def save(value: object, path: str = "") -> Tensors:
    """Copies of all numbers that are named, by path."""
    return {
        n: tensor.detach().cpu().clone() for n, tensor in leaves(value, path).items()
    }


def load(value: object, tensors: Mapping[str, Tensor], path: str = "") -> None:
    """Put saved numbers back; refuses before anything is changed.

    Args:
        value: An object with `STATE`, made as the saved one was.
        tensors: What `save` gave.
        path: What every name begins with.
    """
    check_fit(leaves(value, path), tensors)
    for name, leaf in _walk(value, path):
        if isinstance(leaf, Generator):
            try:
                Generator(leaf.device).set_state(tensors[name])
            except RuntimeError:
                raise InvalidInputError(
                    f"{name} is no state of a random generator."
                ) from None
    _fill(value, tensors, path)


def _parts(value: Any) -> dict[str, Any] | None:  # noqa: ANN401
    """Named parts of a value; None if it is a number, tensor or generator."""
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    if isinstance(value, Stateful):
        return {name: getattr(value, name) for name in value.STATE}
    if isinstance(value, nn.Module):
        return dict(value.state_dict())
    if isinstance(value, Optimizer):  # must have taken or made room for a step
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
    """Every leaf with its path."""
    parts = _parts(value)
    if parts is None:
        yield path, value
        return
    for name, part in parts.items():
        yield from _walk(part, f"{path}/{name}".lstrip("/"))


def _fill(value: Any, tensors: Mapping[str, Tensor], path: str) -> Any:  # noqa: ANN401
    """The value with saved numbers; objects are filled, plain values made anew."""
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
    if isinstance(value, Generator):
        return value.get_state()
    if not isinstance(value, Tensor | np.ndarray | int | float):
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


def check_fit(there: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Refuse another set of names, shapes or dtypes, and name the first three.

    Args:
        there: What an object has; see `leaves`.
        saved: What it is to be given; tensors without memory will do.
    """
    wrong = [f"{name} is missing" for name in there.keys() - saved.keys()]
    wrong += [f"{name} is not known here" for name in saved.keys() - there.keys()]
    for name in there.keys() & saved.keys():
        expected, found = (
            f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
            for tensor in (there[name], saved[name])
        )
        if found != expected:
            wrong.append(f"{name} is {found}, expected {expected}")
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = f"This state does not fit: {'; '.join(sorted(wrong)[:3])}{more}."
        raise InvalidInputError(printable(text))
