"""A census of state: whatever changes must be saved, or declared to follow from it."""

import copy

import torch
from torch import nn
from torch.optim import Optimizer

from esper.contracts.state import Stateful
from esper.runs.store import Store

OUTSIDE = (Store,)
"""What is no part of a run's state: where it is written to."""


def stateful(value, path="it"):
    """Every object with named state, with its path."""
    if isinstance(value, Stateful):
        yield path, value
        for name in value.STATE:
            yield from stateful(getattr(value, name), f"{path}/{name}")
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from stateful(part, f"{path}/{number}")


def fingerprint(value, known=frozenset()):
    """What an attribute holds, deeply, but for what is `known` to be saved."""
    if isinstance(value, OUTSIDE):
        return None
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, torch.Tensor):
        if value.data_ptr() in known:
            return None
        return value.detach().cpu().numpy().tobytes()
    if hasattr(value, "tobytes"):
        return value.tobytes()
    if isinstance(value, dict):
        return {key: fingerprint(part, known) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [fingerprint(part, known) for part in value]
    if isinstance(value, nn.Module):
        own = {key: part for key, part in vars(value).items() if key[0] != "_"}
        inner = [value._buffers, value._parameters, value._modules]
        return [fingerprint(own, known), fingerprint(inner, known)]
    if isinstance(value, Optimizer):
        return fingerprint([*value.state.values()], known)
    if hasattr(value, "__slots__") and not hasattr(value, "__dict__"):
        names = [n for n in value.__slots__ if hasattr(value, n)]
        return [fingerprint(getattr(value, name), known) for name in names]
    if hasattr(value, "__dict__") and type(value).__module__.startswith("esper"):
        if id(value) in known:
            return None  # has entries of its own
        return {key: fingerprint(part, known) for key, part in vars(value).items()}
    if callable(value):
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)


def fixed(whole):
    """All attributes that are said never to change, and what they hold."""
    held = {}
    parts = list(stateful(whole))
    reached = {id(part) for _, part in parts}
    for path, part in parts:
        known = reached | _saved_in_place(part)
        for name, value in vars(part).items():
            if name not in (*part.STATE, *part.DERIVED):
                held[path, name] = copy.deepcopy(fingerprint(value, known))
    return held


def changed(whole, before):
    """Attributes that changed or appeared although nobody said they would."""
    after = fixed(whole)
    return sorted(
        f"{path}.{name}"
        for (path, name), value in after.items()
        if before.get((path, name), "not there") != value
    )


def _saved_in_place(part):
    """Where the tensors of modules and optimisers lie that are saved."""
    places = set()
    for name in part.STATE:
        value = getattr(part, name)
        if isinstance(value, nn.Module):
            places |= {tensor.data_ptr() for tensor in value.state_dict().values()}
    return places
