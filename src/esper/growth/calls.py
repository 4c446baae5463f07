"""Calling a host on an example, without leaving a trace of it.

An example is what the host is called with: one tensor, a tuple of arguments or a
dictionary of keyword arguments. `shielded` gives everything back that a call may
change: buffers, training mode and torch's random state.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


def call(host: nn.Module, example: Example) -> Any:  # noqa: ANN401
    """The host's answer to an example."""
    if isinstance(example, Mapping):
        return host(**example)
    if isinstance(example, tuple):
        return host(*example)
    return host(example)


def tensors_of(answer: object) -> list[Tensor]:
    """The floating-point tensors in an answer, whatever holds them."""
    if not isinstance(answer, Tensor | tuple | list | dict) and hasattr(
        answer, "__dict__"
    ):
        answer = vars(answer)
    return [
        leaf
        for leaf in tree_leaves(answer)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def batch_size(example: Example) -> int:
    """Rows of an example: the length of its first tensor."""
    first = next(leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor))
    return int(first.shape[0])


@contextmanager
def swapped_buffers(
    *modules: nn.Module, but: Iterable[nn.Module] = ()
) -> Iterator[None]:
    """Let the block work on copies of all buffers, but those of some modules.

    The buffers themselves are never written, so a graph that saved one can still be
    walked backwards.
    """
    skip = {id(module) for root in but for module in root.modules()}
    kept = [
        (module, name, buffer)
        for root in modules
        for module in root.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and id(module) not in skip
    ]
    for module, name, buffer in kept:
        module._buffers[name] = buffer.clone()
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@contextmanager
def kept_randomness(module: nn.Module) -> Iterator[None]:
    """Give torch's random state back after the block, on every device in use."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices], device_type="cuda"):
        yield


@contextmanager
def shielded(host: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the block in a mode, and give everything back that a call may change."""
    modes = {module: module.training for module in host.modules()}
    host.train(training)
    try:
        with swapped_buffers(host), kept_randomness(host):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
