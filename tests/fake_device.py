"""A device without hardware: it computes on hidden CPU tensors and logs transfers.

    with FakeDevice() as device:
        agent = PPO("CartPole-v1", device=FAKE)
        agent.learn(1_000)
    device.copies("to_host")

Outside of `FakeDevice` its tensors cannot be used. As on a real device, operations on
tensors of two devices raise, and so does `numpy()`.
"""

import sys
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FAKE = "privateuseone:0"
"""Needs an index: torch looks for drivers where it is missing."""
READS = (
    *("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "item"),
    *("masked_select", "_unique2", "unique_consecutive"),
)
"""Operations whose result or shape the host must know."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
TO_DEVICE, TO_HOST, COMPUTE = "to_device", "to_host", "compute"


class FakeTensor(Tensor):
    """A tensor whose numbers are in `host`; to C++ it has none."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "FakeTensor":
        """Wrap a tensor of the CPU."""
        # In inference mode views of normal tensors must be normal too.
        with torch.inference_mode(False):
            fake = Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device="meta",
            )
        fake.host = host
        return fake

    device = property(lambda self: torch.device(FAKE))

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse operations outside of `FakeDevice`."""
        raise RuntimeError(f"{func} on a fake device that is not active")


class Event(NamedTuple):
    """Something that the device did."""

    kind: str
    operation: str
    waits: bool
    """Whether the host waits until the device has done it."""


class _Constructors(TorchFunctionMode):
    """Makes tensors of Python numbers on the CPU and copies them, as drivers do."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.new_tensor and isinstance(args[0], FakeTensor):
            kwargs = {"dtype": args[0].dtype, "device": FAKE, **kwargs}
            func, args = torch.tensor, args[1:]
        if func not in (torch.tensor, torch.as_tensor) or "device" not in kwargs:
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])


class FakeDevice(TorchDispatchMode):
    """Runs operations of fake tensors, in the order of `events`."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._constructors = _Constructors()
        # torch imports this module where it makes the first tensor of the device.
        sys.modules.setdefault("torch.privateuseone", _driver())

    def __enter__(self) -> "FakeDevice":
        """Make the device usable."""
        self._constructors.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End it."""
        super().__exit__(*error)
        self._constructors.__exit__(*error)

    def copies(self, kind: str) -> list[str]:
        """The operations of all transfers of a kind so far."""
        return [event.operation for event in self.events if event.kind == kind]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the hidden tensors and log it."""
        kwargs = dict(kwargs or {})
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        fakes = [x for x in given if isinstance(x, FakeTensor)]
        target = kwargs.get("device")
        where = None if target is None else torch.device(target).type
        # C++ takes fake tensors for tensors of the meta device.
        names_fake = where in ("privateuseone", "meta")
        if not fakes and not names_fake:
            return func(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(COMPOSITE):  # in inference mode only
            super().__enter__()
            try:
                with torch._C.DisableTorchFunction():
                    return func.decompose(*args, **kwargs)
            finally:
                super().__exit__(None, None, None)
        name = func.overloadpacket.__name__
        kind = self._kind(name, args, given, fakes, where)
        if kind is not None:
            waits = kind == TO_HOST or not kwargs.get("non_blocking", kind == COMPUTE)
            self.events.append(Event(kind, name, waits))
        if target is not None:
            kwargs["device"] = "cpu"
        with torch.inference_mode(False), torch.no_grad():
            hosts = tree_map(_host, (args, kwargs))
            result = func(*hosts[0], **hosts[1])
            if name == "_to_copy" and where == "cpu":
                return result.clone()
        if kind == TO_HOST and name not in ("nonzero", *READS[-3:]):
            return result if name != "copy_" else args[0]
        known = {id(fake.host): fake for fake in fakes}

        def wrapped(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else FakeTensor(x)

        return tree_map(wrapped, result)

    def _kind(
        self, name: str, args: Any, given: list[Any], fakes: list[Any], where: Any
    ) -> str | None:
        """What to log of an operation; None: nothing happens on the device."""
        if name in READS or (name == "_to_copy" and where == "cpu"):
            return TO_HOST
        if name == "_to_copy":
            return COMPUTE if fakes else TO_DEVICE
        if name in ("copy_", "_foreach_copy_") and len(fakes) < len(given):
            plain = isinstance(tree_leaves(args[0])[0], FakeTensor)
            return TO_DEVICE if plain else TO_HOST
        others = [x for x in given if not isinstance(x, FakeTensor) and x.ndim]
        if fakes and others:
            raise RuntimeError(f"{name}: tensors on the CPU and on {FAKE}")
        is_view = name in VIEWS or not fakes  # a new tensor waits for nothing
        return None if is_view else COMPUTE


VIEWS = {
    *("view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "detach", "alias", "t"),
    *("transpose", "permute", "select", "slice", "split", "split_with_sizes"),
    *("unbind", "as_strided"),
}
"""Operations that compute nothing."""


def _host(x: Any) -> Any:
    return x.host if isinstance(x, FakeTensor) else x


def _driver() -> ModuleType:
    module = ModuleType("torch.privateuseone")
    module._lazy_init = lambda: None  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    return module
