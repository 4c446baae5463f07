"""Calling a host on an example without side effects, and tracing what it does.

An example is what the host is called with: one tensor, a tuple of arguments or a
dictionary of keyword arguments. `isolated` restores everything that a call may change.

New hidden units can be put between two layers if everything between them works on each
channel by itself: activations, dropout, pooling, flattening, and norms that can be
given units of their own. `PathTracer` follows the tensor from the first layer's output
to the second one's input through every torch function. What it does not know it tries:
a step is channel-wise if it gives the same for some of the channels as for all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from esper.growth.blueprints.geometry import Layout

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


def call(host: nn.Module, example: Example) -> Any:  # noqa: ANN401
    """The host's output on an example."""
    if isinstance(example, Mapping):
        return host(**example)
    if isinstance(example, tuple):
        return host(*example)
    return host(example)


def tensors_of(output: object) -> list[Tensor]:
    """The floating-point tensors in an output, whatever holds them."""
    if not isinstance(output, Tensor | tuple | list | dict) and hasattr(
        output, "__dict__"
    ):
        output = vars(output)
    return [
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def eval_outputs(module: nn.Module, example: Example) -> list[Tensor]:
    """A module's output tensors on an example in eval mode; nothing changes."""
    with isolated(module, training=False), torch.no_grad():
        return [tensor.clone() for tensor in tensors_of(call(module, example))]


def batch_size(example: Example) -> int:
    """Rows of an example: the length of its first tensor."""
    first = next(leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor))
    return int(first.shape[0])


def first_tensor(values: Iterable[Any]) -> Any:  # noqa: ANN401
    """The first tensor among the arguments of a module; None if there is none."""
    return next((value for value in values if isinstance(value, Tensor)), None)


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
    """Restore torch's random state after the block, on every device in use."""
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=[*devices], device_type="cuda"):
        yield


@contextmanager
def isolated(host: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the block in a mode; then restore modes, buffers and random state."""
    modes = {module: module.training for module in host.modules()}
    host.train(training)
    try:
        with swapped_buffers(host), kept_randomness(host):
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@dataclass(slots=True)
class TraceStep:
    """One function between two layers."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None
    """The module that called it; None if the host did so itself."""
    before: Tensor
    after: Tensor


@dataclass(slots=True)
class Path:
    """What was traced between two layers."""

    tail: Tensor
    """The newest tensor on the path."""
    tensors: list[Tensor]
    """All tensors on the path."""
    steps: list[TraceStep] = field(default_factory=list)
    arrived: bool = False
    problem: str = ""


class FunctionModule(nn.Module):
    """A torch function that the host called directly, as a module."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        super().__init__()
        self.function, self.args, self.kwargs = function, args, kwargs

    def forward(self, h: Tensor) -> Tensor:
        """The same call on another tensor."""
        result: Tensor = self.function(h, *self.args, **self.kwargs)
        return result


class PathTracer(TorchFunctionMode):
    """Follows tensors from the outputs of some layers to the inputs of others."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, Path] = {}
        self.running: list[nn.Module] = []
        """Leaf modules that are being called, innermost last."""

    def begin(self, name: str, output: Tensor) -> None:
        """The first layer of a path has been called."""
        self.paths[name] = Path(output, [output])

    def arrive(self, name: str, given: object) -> None:
        """The second layer of a path is being called."""
        path = self.paths.get(name)
        if path is not None and not path.arrived:
            path.arrived = given is path.tail

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the function and note it on every path that it lies on."""
        kwargs = dict(kwargs or {})
        # The function may work in place, so its input is copied first.
        before = [path.tail.clone() for path in self.paths.values()]
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            for path, tail in zip(self.paths.values(), before, strict=True):
                self._extend(path, func, args, kwargs, tail, result)
        return result

    def _extend(
        self,
        path: Path,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Tensor,
        result: Tensor,
    ) -> None:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        on_path = any(a is tensor for a in given for tensor in path.tensors)
        if not on_path or path.problem:
            return
        called = self.running[-1] if self.running else None
        if path.arrived:
            # The second layer itself reads the tail; any other reader is a fork.
            if called is None or not hasattr(called, "weight"):
                path.problem = "the hidden tensor is also used elsewhere"
            return
        function = getattr(func, "__name__", str(func))
        if not args or args[0] is not path.tail:
            path.problem = f"the hidden tensor forks or meets another at {function}"
        elif len(given) > 1 and not isinstance(called, NORMS):
            path.problem = f"{function} mixes the hidden tensor with another"
        else:
            # What a module does inside is one step of that module.
            if path.steps and called is not None and path.steps[-1].module is called:
                path.steps[-1].after = result.clone()
            else:
                step = TraceStep(func, args, kwargs, called, before, result.clone())
                path.steps.append(step)
            path.tail = result
            path.tensors.append(result)


def path_modules(
    path: Path | None, width: int, layout: Layout
) -> tuple[tuple[nn.Module, ...], str]:
    """The path as modules, and why new units cannot be put on it ("" if they can)."""
    if path is None:
        return (), "its first layer was never called"
    if path.problem:
        return (), path.problem
    if not path.arrived:
        return (), "no channel-wise way leads from the first layer to the second"
    modules = []
    for step in path.steps:
        module, problem = _as_module(step, width, layout)
        if module is None:
            return (), problem
        modules.append(module)
    return tuple(modules), ""


def _as_module(
    step: TraceStep, width: int, layout: Layout
) -> tuple[nn.Module | None, str]:
    name = getattr(step.function, "__name__", str(step.function))
    what = type(step.module).__name__ if step.module is not None else name
    if isinstance(step.module, nn.LayerNorm) and len(step.module.normalized_shape) > 1:
        return None, "LayerNorm between the layers runs over more than the channels"
    if isinstance(step.module, NORMS):
        return step.module, ""
    if step.module is not None:
        if any(True for _ in step.module.parameters()):
            return None, f"{what} between the layers has weights of its own"
        return _if_channelwise(deepcopy(step.module), step, width, layout, what)
    if name == "dropout":
        rate = step.args[1] if len(step.args) > 1 else step.kwargs.get("p", 0.5)
        return nn.Dropout(rate), ""
    if step.after.dim() == 2 and step.before.dim() > 2:
        return _if_channelwise(nn.Flatten(1), step, width, layout, what)
    if any(isinstance(a, Tensor) for a in (*step.args[1:], *step.kwargs.values())):
        return None, f"{what} mixes the hidden tensor with another"
    kwargs = {k: v for k, v in step.kwargs.items() if k != "inplace"}
    copied = FunctionModule(step.function, step.args[1:], kwargs)
    return _if_channelwise(copied, step, width, layout, what)


def _if_channelwise(
    module: nn.Module, step: TraceStep, width: int, layout: Layout, what: str
) -> tuple[nn.Module | None, str]:
    """The module, if it gives some channels the same as all of them."""
    flat = step.before.dim() == 2 and layout is not Layout.VECTOR
    per = step.before.shape[1] // width if flat else 1
    axis = 1 if layout.channels_first or step.before.dim() == 2 else -1
    some = max(1, width // 2)
    module.eval()
    if hasattr(module, "inplace"):
        module.inplace = False  # type: ignore[assignment]
    try:
        with torch.no_grad():
            part = module(step.before.narrow(axis, 0, some * per).clone())
            whole = module(step.before.clone())
    except Exception:  # whatever it cannot do is the answer
        return None, f"{what} between the layers does not take fewer channels"
    if whole.dim() == 2 and step.before.dim() > 2:
        per = whole.shape[1] // width
        axis = 1
    if not _close(part, whole.narrow(axis, 0, some * per)) or not _close(
        whole, step.after
    ):
        return None, f"{what} between the layers mixes channels"
    return module, ""


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree but for rounding, which may differ by their shape."""
    if one.shape != other.shape:
        return False
    size = float(other.nan_to_num().abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=1e-4 * size, equal_nan=True)


def new_middle(middle: tuple[nn.Module, ...], units: int, width: int) -> nn.Sequential:
    """What lies between two layers, for new units with norms of their own."""
    modules: list[nn.Module] = []
    for module in middle:
        made = deepcopy(module)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            # After a flatten a unit has several features.
            made = type(module)(
                units * (module.num_features // width),
                eps=module.eps,
                momentum=module.momentum,
                affine=module.affine,
                track_running_stats=module.track_running_stats,
            )
        elif isinstance(module, nn.GroupNorm):
            size = width // module.num_groups
            groups = units // size if units % size == 0 else 1
            made = nn.GroupNorm(groups, units, eps=module.eps, affine=module.affine)
        elif isinstance(module, nn.LayerNorm):
            made = nn.LayerNorm(
                units * (module.normalized_shape[-1] // width),
                eps=module.eps,
                elementwise_affine=module.elementwise_affine,
            )
        modules.append(made)
    return nn.Sequential(*modules)
