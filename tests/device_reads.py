"""Counting what makes a device wait for the host."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item")


class ReadCounter(TorchDispatchMode):
    """Counts operations that would stall a device: scalar reads and copies to the host.

    On the CPU a copy to the host is one that names the CPU as its target.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Note the operation and run it."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        target = kwargs.get("device")
        to_host = name == "_to_copy" and target is not None
        if name in READS or (to_host and torch.device(target).type == "cpu"):
            self.reads.append(name)
        return func(*args, **kwargs)


def count_device_reads(call: Callable[[], object]) -> int:
    """How often `call` makes the device wait."""
    with ReadCounter() as counter:
        call()
    return len(counter.reads)
