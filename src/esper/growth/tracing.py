"""Calling a host on an example without side effects, and tracing what it does.

An example is what the host is called with: one tensor, a tuple of arguments or a
dictionary of keyword arguments. `isolated` restores everything that a call may change.

New hidden units can be put between two layers if everything between them works on each
channel by itself: activations, dropout, pooling, flattening, and norms that can be
given units of their own. `PathTracer` follows the tensor from the first layer's output
to the second one's input through every torch function. What it does not know it tries:
a step is channel-wise if it gives the same for some of the channels as for all.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from esper.contracts.errors import BadInput
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


class FunctionModule(nn.Module):
    """A torch function that the host called directly, as a module.

    It is kept by name, since not every torch function can be pickled.
    """

    def __init__(
        self, name: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = {}
    ) -> None:
        super().__init__()
        self.name, self.args = name, tuple(args)
        self.kwargs = {key: kwargs[key] for key in kwargs if key != "inplace"}

    def forward(self, h: Tensor) -> Tensor:
        """The same call on another tensor."""
        result: Tensor = _torch_function(self.name)(h, *self.args, **self.kwargs)
        return result

    def extra_repr(self) -> str:
        """The function's name."""
        return self.name

    @property
    def savable(self) -> bool:
        """Whether name and arguments are plain data."""
        return bool(self.name) and all(
            isinstance(value, int | float | str | bool | None)
            for value in tree_leaves([*self.args, self.kwargs])
        )


NAMESPACES = {"torch": torch, "torch.nn.functional": F, "torch.Tensor": Tensor}


@cache
def _function_names() -> dict[int, str]:
    return {
        id(getattr(space, name)): f"{where}.{name}"
        for where, space in NAMESPACES.items()
        for name in dir(space)
        if callable(getattr(space, name, None))
    }


@cache
def _torch_function(name: str) -> Callable[..., Any]:
    """A torch function by its full name; nothing else can be named."""
    where, _, last = name.rpartition(".")
    function = getattr(NAMESPACES.get(where), last, None)
    if function is None or id(function) not in _function_names():
        raise BadInput(f"{name!r} is no function of this version of torch.")
    found: Callable[..., Any] = function
    return found


@dataclass(slots=True)
class TraceStep:
    """One module, or function of the host, between two layers."""

    module: nn.Module
    name: str
    before: Tensor
    after: Tensor


@dataclass(slots=True)
class Path:
    """What was traced between two layers."""

    tensors: list[Tensor]
    """All tensors on the path, the newest last."""
    steps: list[TraceStep] = field(default_factory=list)
    arrived: bool = False
    problem: str = ""

    def extend(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        called: nn.Module | None,
        before: Tensor,
        result: Tensor,
    ) -> None:
        """Note a function of a tensor on the path, called by a leaf module or none."""
        name = getattr(func, "__name__", str(func))
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if self.arrived:
            # The second layer itself reads the tail; any other reader is a fork.
            if called is None or not hasattr(called, "weight"):
                self.problem = "the hidden tensor is also used elsewhere"
        elif not args or args[0] is not self.tensors[-1]:
            self.problem = f"the hidden tensor forks or meets another at {name}"
        elif len(given) > 1 and not isinstance(called, NORMS):
            self.problem = f"{name} mixes the hidden tensor with another"
        else:
            after = result.clone()
            # What a module does inside is one step of that module.
            if self.steps and self.steps[-1].module is called:
                self.steps[-1].after = after
            elif called is not None:
                step = TraceStep(called, type(called).__name__, before, after)
                self.steps.append(step)
            else:
                known = _function_names().get(id(func), "")
                made: nn.Module = FunctionModule(known, args[1:], kwargs)
                if name == "dropout":
                    made = nn.Dropout(
                        args[1] if len(args) > 1 else kwargs.get("p", 0.5)
                    )
                elif after.dim() == 2 and before.dim() > 2:
                    made = nn.Flatten(1)
                self.steps.append(TraceStep(made, name, before, after))
            self.tensors.append(result)


class PathTracer(TorchFunctionMode):
    """Follows tensors from the outputs of some layers to the inputs of others."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, Path] = {}
        self.running: list[nn.Module] = []
        """Leaf modules that are being called, innermost last."""

    def begin(self, name: str, output: Tensor) -> None:
        """The first layer of a path has been called."""
        self.paths[name] = Path([output])

    def arrive(self, name: str, given: object) -> None:
        """The second layer of a path is being called."""
        path = self.paths.get(name)
        if path is not None and not path.arrived:
            path.arrived = given is path.tensors[-1]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the function and note it on every path that it lies on."""
        kwargs = dict(kwargs or {})
        given = {id(value) for value in (*args, *kwargs.values())}
        # The function may work in place, so its input is copied first.
        touched = [
            (path, path.tensors[-1].clone())
            for path in self.paths.values()
            if not path.problem and any(id(t) in given for t in path.tensors)
        ]
        result = func(*args, **kwargs)
        called = self.running[-1] if self.running else None
        for path, before in touched if isinstance(result, Tensor) else ():
            path.extend(func, args, kwargs, called, before, result)
        return result


def path_modules(
    path: Path | None, width: int, layout: Layout
) -> tuple[tuple[nn.Module, ...], str]:
    """The path as modules, and why new units cannot be put on it ("" if they can)."""
    problem = "its first layer was never called" if path is None else path.problem
    if path is None or problem:
        return (), problem
    if not path.arrived:
        return (), "no channel-wise way leads from the first layer to the second"
    modules: list[nn.Module] = []
    for step in path.steps:
        module = step.module
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) > 1:
            problem = "runs over more than the channels"
        elif isinstance(module, (*NORMS, nn.Dropout)):
            pass
        elif any(True for _ in module.parameters()):
            problem = "has weights of its own"
        elif isinstance(module, FunctionModule) and not module.savable:
            problem = "is no torch function of plain arguments, so it cannot be saved"
        else:
            module = deepcopy(module)
            problem = _why_not_channelwise(module, step, width, layout)
        if problem:
            return (), f"{step.name} between the layers {problem}"
        modules.append(module)
    return tuple(modules), ""


def _why_not_channelwise(
    module: nn.Module, step: TraceStep, width: int, layout: Layout
) -> str:
    """Whether a module gives some channels the same as all of them; else why not."""
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
        return "does not take fewer channels"
    if whole.dim() == 2 and step.before.dim() > 2:
        per, axis = whole.shape[1] // width, 1
    alike = _close(part, whole.narrow(axis, 0, some * per))
    return "" if alike and _close(whole, step.after) else "mixes channels"


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors agree but for rounding, which may differ by their shape."""
    if one.shape != other.shape:
        return False
    size = float(other.nan_to_num().abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=1e-4 * size, equal_nan=True)


def describe_middle(
    steps: Sequence[nn.Module], names: Mapping[nn.Module, str]
) -> list[dict[str, Any]]:
    """What lies between two layers as plain data; the host's modules by their names."""
    described: list[dict[str, Any]] = []
    for module in steps:
        if module in names:
            described.append({"module": names[module]})
        elif isinstance(module, FunctionModule):
            how = {"args": [*module.args], "kwargs": module.kwargs}
            described.append({"function": module.name, **how})
        elif isinstance(module, nn.Dropout):
            described.append({"dropout": module.p})
        else:
            described.append({"flatten": 1})
    return described


def restore_middle(
    described: Sequence[Mapping[str, Any]], host: nn.Module
) -> tuple[nn.Module, ...]:
    """The modules that `describe_middle` has described."""
    modules: list[nn.Module] = []
    for one in described:
        if "module" in one:
            own = host.get_submodule(one["module"])
            kept = isinstance(own, (*NORMS, nn.Dropout))
            modules.append(own if kept else deepcopy(own))
        elif "function" in one:
            _torch_function(one["function"])
            modules.append(FunctionModule(one["function"], one["args"], one["kwargs"]))
        elif "dropout" in one:
            modules.append(nn.Dropout(one["dropout"]))
        else:
            modules.append(nn.Flatten(one["flatten"]))
    return tuple(modules)


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
