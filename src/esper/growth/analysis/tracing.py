"""Call a host on an example without side effects, and trace the call.

An example is a tensor, a tuple of arguments or a dictionary of keyword arguments.
`isolated` restores everything that a call may change.

New hidden units fit between two layers if all steps between them are channel-wise.
`Trace` follows every layer's output to the layer that reads it. Unknown steps are
tested: a channel-wise step gives the same output for a subset of the channels. A branch
that leaves the tensor and is multiplied with it, as squeeze-excite, is one step.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import permutations, product, zip_longest
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import described
from esper.growth.analysis.host_layers import (
    COUPLING,
    NORMS,
    is_layer,
    is_shared,
    kind_of,
    swap_layout,
    unit_size,
    units_of,
)
from esper.growth.analysis.interlayer import (
    BATCH_SIZE,
    DROPOUTS,
    RESHAPES,
    FunctionModule,
    Join,
    UnitParameter,
    function_module,
    table_name,
    units_part,
)
from esper.growth.blueprints.geometry import Layout

SIGNAL_LAYERS: Final = (
    nn.Conv1d,
    nn.ConvTranspose1d,
    nn.BatchNorm1d,
    nn.MaxPool1d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveMaxPool1d,
    nn.InstanceNorm1d,
    nn.GroupNorm,
)
CHANNELS_LAST: Final = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding)
"""Layers whose type shows where the channels of their output are."""
MAX_TRAINING_CALLS: Final = 8
"""Calls in training mode if some layers are skipped at random (LayerDrop)."""

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


def call(host: nn.Module, example: Example) -> Any:  # noqa: ANN401
    """The host's output on an example."""
    if isinstance(example, Mapping):
        return host(**example)
    if isinstance(example, tuple):
        return host(*example)
    return host(example)


def example_like(example: Example, like: Tensor) -> Example:
    """The example on the device of `like`, floating-point tensors in its dtype."""

    def moved(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        kind = like.dtype if leaf.is_floating_point() else leaf.dtype
        return leaf.to(device=like.device, dtype=kind)

    alike: Example = tree_map(moved, example)
    return alike


def run_example(host: nn.Module, example: Example) -> Any:  # noqa: ANN401
    """The host's output on an example; its errors become an `InvalidInputError`."""
    try:
        return call(host, example)
    except Exception as error:
        raise InvalidInputError(
            f"the host cannot be called with the example: {described(error)}"
        ) from error


def tensors_of(output: object) -> list[Tensor]:
    """All floating-point tensors in an output of any type."""
    plain = isinstance(output, Tensor | tuple | list | dict)
    if not plain and hasattr(output, "__dict__"):
        output = vars(output)
    return [t for t in _all_tensors(output) if t.is_floating_point()]


def _all_tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def eval_outputs(module: nn.Module, example: Example) -> list[Tensor]:
    """A module's output tensors on an example in eval mode, without side effects."""
    with isolated(module, training=False), torch.no_grad():
        return [tensor.clone() for tensor in tensors_of(call(module, example))]


class _NoModules(nullcontext[None]):
    """Replaces the counter's module tracker, which would hook every module."""

    parents = ("Global",)


def count_macs(run: Callable[[], object]) -> int:
    """Multiply-adds of the matrix products and convolutions in a call."""
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    # The counter does not support fused kernels of attention and LSTMs.
    with (
        warnings.catch_warnings(action="ignore"),
        torch.backends.mkldnn.flags(enabled=False),
        torch.backends.cudnn.flags(enabled=False),
        counter,
        sdpa_kernel(SDPBackend.MATH),
        torch.no_grad(),
    ):
        run()
    return int(counter.get_total_flops()) // 2


def batch_size(example: Example) -> int:
    """Length of the first tensor of an example that has an axis."""
    return next(int(t.shape[0]) for t in _all_tensors(example) if t.dim())


def first_tensor(values: Iterable[Any]) -> Any:  # noqa: ANN401
    """The first tensor among a module's arguments; None if there is none."""
    return next((value for value in values if isinstance(value, Tensor)), None)


@contextmanager
def swapped_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Use copies of these modules' own buffers inside the block.

    The originals are never written, so a graph that saved one can still run backward.
    """
    kept = [
        (module, name, buffer)
        for module in modules
        for name, buffer in module._buffers.items()
        if buffer is not None
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
    """Restore torch's random state after the block."""
    streams = random_state(module)
    try:
        yield
    finally:
        set_random_state(streams)


def random_state(module: nn.Module) -> dict[str, Tensor]:
    """Torch's random state on the CPU and on the module's CUDA devices."""
    streams = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        devices = {str(p.device) for p in module.parameters() if p.is_cuda}
        streams |= {each: torch.cuda.get_rng_state(each) for each in sorted(devices)}
    return streams


def set_random_state(streams: Mapping[str, Tensor]) -> None:
    """Restore a random state of `random_state`."""
    for device, state in streams.items():
        if device == "cpu":
            torch.set_rng_state(state)
        else:
            torch.cuda.set_rng_state(state, device)


@contextmanager
def isolated(host: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the block in one mode; then restore modes, buffers and random state."""
    modes = {module: module.training for module in host.modules()}
    # Fused attention rounds differently and is not used on modules with hooks.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    host.train(training)
    torch.clear_autocast_cache()  # casts of weights from before a change
    try:
        with swapped_buffers(host.modules()), kept_randomness(host):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        torch.clear_autocast_cache()
        for module, mode in modes.items():
            module.training = mode


@dataclass(slots=True)
class TraceStep:
    """One module or function of the host on the path between two layers."""

    module: nn.Module
    name: str
    given: tuple[Tensor, ...]
    """Copies of the inputs: the path's tensor, and that of a joining branch."""
    result: Tensor
    branch: Sequence["TraceStep"] = ()
    """The steps of the joining branch."""


@dataclass(slots=True, eq=False)
class Path:
    """The steps from a layer's output to the layer that reads it."""

    layer: nn.Module
    given: object
    """The tensor object that the layer read."""
    tensors: list[Tensor]
    """The layer's output and that of every step."""
    steps: list[TraceStep] = field(default_factory=list)
    joined: "Path | None" = None
    """The path that joined this one."""
    inside: nn.Module | None = None
    """The leaf module that is running on the path."""
    reader: nn.Module | None = None
    """The module with weights that read the path."""
    problem: str = ""
    """Why units cannot be added; empty if they can."""
    differs: str = ""
    """How training mode differs from eval mode; empty if it does not."""

    @property
    def tail(self) -> Tensor:
        """The newest tensor."""
        return self.tensors[-1]

    def compare(self, trained: "Path | None", names: Mapping[nn.Module, str]) -> None:
        """Compare with the path of training mode, and take over its dropouts."""
        if self.problem:
            return
        if trained is None:
            self.differs = f"{names[self.layer]!r} is never called"
        elif trained.problem or trained.reader is not self.reader:
            other = trained.reader and f"{names[trained.reader]!r} reads it"
            self.differs = trained.problem or other or "nothing reads it"
        elif (steps := _with_dropouts(self.steps, trained.steps)) is None:
            self.differs = "the steps are different"
        else:
            self.steps = steps


@dataclass(slots=True)
class ModuleCalls:
    """Inputs and outputs of one module in one call of the host."""

    inputs: Any = None
    given_version: int = 0
    version_after: dict[str, int] = field(default_factory=dict)
    """Version of the input when another module returned."""
    outputs: Any = None
    calls: int = 0
    last_leaf: nn.Module | None = None
    order: int = 0


class Trace(TorchFunctionMode):
    """One call of the host; follows every layer's output to the layer that reads it."""

    def __init__(self, host: nn.Module, ends: Iterable[str], example: Example) -> None:
        super().__init__()
        self.modules = dict(host.named_modules())
        self.names = {module: name for name, module in self.modules.items()}
        layers = (name for module, name in self.names.items() if is_layer(module))
        self.records = {name: ModuleCalls() for name in (*ends, *layers)}
        """Records of all layers and of the modules `ends`, by name."""
        self.paths: dict[nn.Module, Path] = {}
        """By first layer."""
        self.leaves = 0
        """Calls of leaf modules."""
        self._on: dict[int, list[Path]] = {}
        """By the id of each tensor on them."""
        self._running: list[tuple[nn.Module, object, dict[Path, Tensor]]] = []
        """Running leaf modules, their first inputs, and copies of the path tails."""
        self._last_leaf: nn.Module | None = None
        self._constants: dict[int, tuple[Tensor, list[TraceStep]]] = {}
        """Parameters and tensors made from one, by id, with the steps."""
        for name, parameter in host.named_parameters():
            step = TraceStep(UnitParameter(name, parameter), name, (), parameter)
            self._constants[id(parameter)] = parameter, [step]
        with ExitStack() as stack:
            for module in self.names:
                before = module.register_forward_pre_hook(self._enter, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(self._leave).remove)
            with self:
                outputs = tensors_of(run_example(host, example))
        for path in self.paths.values():
            returned = any(one is other for one in path.tensors for other in outputs)
            if path.reader is not None and returned and not path.problem:
                path.problem = "the hidden tensor is part of the host's output"
        self.outputs = [tensor.clone() for tensor in outputs]

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Record that a module is called."""
        if not [*module.children()]:
            self._enter_leaf(module, _all_tensors((args, kwargs)))
            self.leaves += 1
            if isinstance(module, (*SIGNAL_LAYERS, *CHANNELS_LAST)) or kind_of(module):
                self._last_leaf = module
        record = self.records.get(self.names[module])
        if record is not None:
            record.calls += 1
            record.inputs = first_tensor((*args, *kwargs.values()))
            record.given_version = getattr(record.inputs, "_version", 0)

    def _leave(self, module: nn.Module, args: Any, answer: Any) -> None:  # noqa: ANN401
        """Record a module's output."""
        if not [*module.children()]:
            self._leave_leaf(module, answer)
        name = self.names[module]
        record = self.records.get(name)
        if record is not None:
            record.outputs, record.order = answer, self.leaves
            record.last_leaf = self._last_leaf
            for other in self.records.values():
                if other.calls:
                    other.version_after[name] = getattr(other.inputs, "_version", 0)

    def _enter_leaf(self, module: nn.Module, given: Sequence[Tensor]) -> None:
        """Extend the paths that a leaf module reads."""
        passing: dict[Path, Tensor] = {}
        for path in self._touched(given):
            if path.reader is not None:
                where = self._operation(module)
                path.problem = f"the hidden tensor is also used elsewhere, by {where}"
            elif len(given) > 1 or given[0] is not path.tail:
                where = self._operation(module)
                path.problem = f"the hidden tensor forks, or meets another, at {where}"
            elif _keeps_units(module, units_of(path.layer)):
                path.inside, passing[path] = module, _copied(path.tail)
            else:
                path.reader = module
        self._running.append((module, given[0] if given else None, passing))

    def _leave_leaf(self, module: nn.Module, answer: object) -> None:
        """Add a leaf module's output to its paths; a layer starts a new path."""
        _, given, passing = self._running.pop()
        name = self._operation(module)
        for path, before in passing.items():
            path.inside = None
            if isinstance(answer, Tensor):
                step = TraceStep(module, name, (before,), _copied(answer))
                self._extend(path, step, answer)
            else:
                path.problem = f"{name} between the layers does not return one tensor"
        if is_layer(module) and isinstance(answer, Tensor):
            self.paths[module] = Path(module, given, [answer])
            self._on.setdefault(id(answer), []).append(self.paths[module])

    def _operation(self, module: nn.Module) -> str:
        """A module as messages name it."""
        return f"{self.names[module]!r} ({type(module).__name__})"

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the function and record it on every path that it reads."""
        kwargs = dict(kwargs or {})
        given = _all_tensors([args, kwargs])
        running = self._running[-1][0] if self._running else None
        touched = [
            path
            for path in self._touched(given)
            # Calls inside a module belong to that module's step.
            if running is None or running not in (path.inside, path.reader)
        ]
        # The function may work in place, so its input is copied first.
        before = {id(tensor): _copied(tensor) for tensor in given if touched}
        result = func(*args, **kwargs)
        if touched and _all_tensors(result):
            self._record(func, args, kwargs, given, touched, before, result)
        elif len(given) == 1 and args[:1] == (given[0],) and isinstance(result, Tensor):
            _, steps = self._constants.get(id(given[0]), (None, []))
            if steps:
                step = _function_step(func, args[1:], kwargs, given[0], result)
                self._constants[id(result)] = result, [*steps, step]
        return result

    def _record(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        given: Sequence[Tensor],
        touched: Sequence[Path],
        before: Mapping[int, Tensor],
        result: object,
    ) -> None:
        """Add a function of these tensors to the paths that it reads."""
        name = getattr(func, "__name__", str(func))
        pair = [path for arg in args[:2] for path in touched if path.tail is arg]
        free = all(path.reader is None for path in touched) and not self._running
        if self._rejoin(func, args, kwargs, touched, before, result):
            return
        if not free or not isinstance(result, Tensor):
            problem = f"the hidden tensor is also used elsewhere, by {name}"
            problem = f"{name} splits the hidden tensor" if free else problem
        elif len(given) == 1 and pair == [*touched]:
            for path in touched:
                own = before[id(args[0])]
                step = _function_step(func, args[1:], kwargs, own, _copied(result))
                self._extend(path, step, result)
            return
        elif len(given) == len(pair) == 2 and args[0] is not args[1]:
            problem = self._why_no_join(name, *pair)
            if not problem:
                function = function_module(func, args[2:], kwargs, joins=True)
                self._join(pair, function, name, before, result)
                return
        else:
            problem = f"{name} mixes the hidden tensor with another"
        for path in touched:
            earlier = [t for t in path.tensors if t is not path.tail]
            forks = any(one is other for one in given for other in earlier)
            path.problem = f"the hidden tensor forks at {name}" if forks else problem

    def _rejoin(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        touched: Sequence[Path],
        before: Mapping[int, Tensor],
        result: object,
    ) -> bool:
        """Join paths with a branch that left them, or a parameter, if `func` does."""
        name, function = getattr(func, "__name__", str(func)), table_name(func)
        ended = []
        for path, (h, other) in product(touched, permutations(args[:2], 2)):
            branch = self._branch(path, h, other, layers=function == "mul")
            if not branch or len(before) != 2 or not isinstance(result, Tensor):
                continue
            at = _last_index(path.tensors, h)
            steps, tensors = branch
            for tensor in tensors:
                self._on.setdefault(id(tensor), []).append(path)
            del path.steps[at:], path.tensors[at + 1 :]
            joining = function_module(func, args[2:], kwargs, joins=True)
            joint = Join(joining, "", [s.module for s in steps], swapped=h is args[1])
            inner = [units_of(module) for module in joint.branch if is_layer(module)]
            joint.squeeze = max(
                [units_of(path.layer) // units for units in inner] or [1]
            )
            given = before[id(h)], before[id(other)]
            path.reader = None
            step = TraceStep(joint, name, given, _copied(result), steps)
            self._extend(path, step, result)
            ended.append(path)
        for path in touched if ended else ():
            if path not in ended:
                path.problem = f"{name} joins it with the tensor that it came from"
        return bool(ended)

    def _branch(
        self, path: Path, h: object, other: object, *, layers: bool
    ) -> tuple[list[TraceStep], list[Tensor]] | None:
        """How a tensor is made from `h`, which is on a path, or from a parameter.

        Returns the steps, and the tensors on the way.
        """
        if self._running or not any(h is tensor for tensor in path.tensors):
            return None
        if id(other) in self._constants and h is path.tail and path.reader is None:
            return self._constants[id(other)][1], []
        at = _last_index(path.tensors, h)
        steps, tensors = path.steps[at:], path.tensors[at + 1 :]
        while path.reader is not None and path.tail is not other:
            after = self.paths.get(path.reader)
            if after is None or after.problem or not layers:
                return None
            name = self._operation(after.layer)
            first = TraceStep(after.layer, name, (), after.tensors[0])
            steps, path = [*steps, first, *after.steps], after
            tensors += after.tensors
        made = path.tail is other and path.reader is None and other is not h
        return (steps, tensors) if made else None

    def _why_no_join(self, name: str, first: Path, second: Path) -> str:
        """Why two paths cannot be joined; empty if they can."""
        ends = f"{self.names[first.layer]!r} and {self.names[second.layer]!r}"
        if first.given is not second.given:
            return f"{name} joins {ends}, which read different tensors"
        if units_of(first.layer) != units_of(second.layer):
            return f"{name} joins {ends}, which differ in width"
        return ""

    def _join(
        self,
        pair: Sequence[Path],
        function: FunctionModule,
        name: str,
        before: Mapping[int, Tensor],
        result: Tensor,
    ) -> None:
        """Join two paths; each has the other as its second branch."""
        steps = {path: [*path.steps] for path in pair}
        tails = {path: before[id(path.tail)] for path in pair}
        for path, other in (pair, pair[::-1]):
            modules = [step.module for step in steps[other]]
            layer, swapped = self.names[other.layer], path is pair[1]
            joint = Join(function, layer, modules, swapped=swapped)
            given = (tails[path], tails[other])
            made = TraceStep(joint, name, given, _copied(result), steps[other])
            path.joined = other
            self._extend(path, made, result)

    def _touched(self, given: Sequence[Tensor]) -> list[Path]:
        """The paths without a problem that contain one of these tensors."""
        found = [path for tensor in given for path in self._on.get(id(tensor), ())]
        return [path for path in dict.fromkeys(found) if not path.problem]

    def _extend(self, path: Path, step: TraceStep, result: Tensor) -> None:
        path.steps.append(step)
        path.tensors.append(result)
        self._on.setdefault(id(result), []).append(path)


def compare_training(host: nn.Module, trace: Trace, example: Example) -> None:
    """Record where training mode takes other paths than this trace of eval mode."""
    trained = dict[nn.Module, Path]()
    with isolated(host, training=True), torch.no_grad():
        for _ in range(MAX_TRAINING_CALLS):
            trained = {**Trace(host, (), example).paths, **trained}
            if trace.paths.keys() <= trained.keys():
                break
    for layer, path in trace.paths.items():
        path.compare(trained.get(layer), trace.names)


def compare_sizes(host: nn.Module, trace: Trace, example: Example) -> None:
    """Refuse paths with numbers that depend on the size of an axis of the example.

    Every axis gets another size once, if the host accepts one.
    """
    tensors = _all_tensors(example)
    accepted: dict[object, bool] = {}
    sizes = {(a, n) for t in tensors for a, n in enumerate(t.shape) if n}
    for axis, size in sorted(sizes):
        if not any(map(_has_arguments, trace.paths.values())):
            return
        what = f"the length of axis {axis} of the example" if axis else "the batch size"
        half, odd = size // 2 or 2, size // 2 + 1  # often odd after strides, too
        # A length may be on several axes, as in a mask. Sizes beyond 2 only shrink:
        # an index beyond a table of positions stops CUDA.
        lengths = (odd, True), (half, True), (odd, False), (half, False)
        for new, every in lengths if axis else lengths[-1:]:
            alike = ([a for a, n in enumerate(t.shape) if n == size] for t in tensors)
            axes = tuple(tuple(a for a in one if every or a == axis) for one in alike)
            if (new, axes) not in accepted:
                accepted[new, axes] = new != size and _accepts(
                    host, trace, _resized(example, axes, new), what
                )
            if accepted[new, axes]:
                break


def _resized(example: Example, axes: Iterable[Sequence[int]], size: int) -> Example:
    """A copy of an example with another size, at most doubled, of some axes."""
    each = iter(axes)

    def resized(leaf: Any) -> Any:  # noqa: ANN401
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach().clone()  # which a host may change in place
        for axis in next(each):
            leaf = torch.cat([leaf, leaf], axis).narrow(axis, 0, size)
        return leaf

    made: Example = tree_map(resized, example)
    return made


def _accepts(host: nn.Module, trace: Trace, example: Example, what: str) -> bool:
    """Compare with the paths of another example, if the host accepts it."""
    with (
        isolated(host, training=False),
        _kept_attributes(host),
        warnings.catch_warnings(action="ignore"),
        torch.no_grad(),
    ):
        try:
            paths = Trace(host, (), example).paths
        except InvalidInputError:
            return False
    for path in filter(_has_arguments, trace.paths.values()):
        if why := _why_size_matters(path, paths.get(path.layer)):
            path.problem = f"{why} between the layers depends on {what}"
    return True


@contextmanager
def _kept_attributes(host: nn.Module) -> Iterator[None]:
    """Restore the attributes of all modules after the block, such as caches."""
    kept = {module: dict(vars(module)) for module in host.modules()}
    try:
        yield
    finally:
        for module, attributes in kept.items():
            vars(module).clear()
            vars(module).update(attributes)


def _every_step(steps: Iterable[TraceStep]) -> Iterator[TraceStep]:
    """All steps of a path, including those of joining branches."""
    for step in steps:
        yield from (step, *_every_step(step.branch))


def _has_arguments(path: Path) -> bool:
    """Whether a function on the path of new units has more arguments than tensors."""
    if path.reader is None or path.problem:
        return False
    modules = [step.module for step in _every_step(path.steps)]
    functions = [m.function if isinstance(m, Join) else m for m in modules]
    return any(
        isinstance(f, FunctionModule) and (f.args or f.kwargs) for f in functions
    )


def _why_size_matters(path: Path, other: Path | None) -> str:
    """What differs in the same path of an example of another size; empty if nothing."""
    if other is None or other.problem or other.reader is not path.reader:
        return ""
    for one, its in zip_longest(_every_step(path.steps), _every_step(other.steps)):
        if one is None or its is None or one.name != its.name:
            return (one or its).name
        # A reshape to a wrong length gives a wrong number of units, and fails.
        passes = one.name in RESHAPES or _is_dropout(one)
        if not passes and _identity(one) != _identity(its):
            return f"a number of {one.name}"
    return ""


def _last_index(tensors: Sequence[Tensor], wanted: object) -> int:
    """Index of the last entry that is this tensor object."""
    return max(index for index, tensor in enumerate(tensors) if tensor is wanted)


def _keeps_units(module: nn.Module, units: int) -> bool:
    """Whether a leaf module may work on each unit alone, by its weights' shapes."""
    size = unit_size(module)
    fits = is_shared(module) or bool(size and size % units == 0)
    return fits or isinstance(module, NORMS) or not [*module.parameters()]


def unit_macs(steps: Iterable[TraceStep], units: int) -> int:
    """Multiply-adds per unit and row of the layers between two layers."""
    total = 0
    for step in steps:
        total += unit_macs(step.branch, 1)
        if is_layer(step.module) or isinstance(step.module, _ConvNd):
            weight = step.module.get_parameter("weight")
            total += weight.numel() * step.result[0].numel() // units_of(step.module)
    return total // units


def _copied(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunction():
        return tensor.clone()


def _function_step(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    before: Tensor,
    after: Tensor,
) -> TraceStep:
    """A step for a function of one tensor; dropouts and flattens become modules."""
    function = function_module(func, args, kwargs)
    module: nn.Module = function
    name = getattr(func, "__name__", str(func))
    if function.name in DROPOUTS:
        module = DROPOUTS[function.name](**function.kwargs)
    elif name in (*RESHAPES, "flatten") and after.dim() == 2 and before.dim() > 2:
        module = FunctionModule("flatten", {"start_dim": 1})
    elif name in RESHAPES and not kwargs:
        shape = [*args[0]] if args and isinstance(args[0], tuple | list) else [*args]
        if shape[:1] == [before.shape[0]]:  # other batches may have another size
            shape[0] = BATCH_SIZE
        if -1 not in shape and shape[1:2] == [before.shape[before.dim() > 1]]:
            shape[1] = -1  # and new units another number
        module = function_module(Tensor.reshape, (shape,), {})
    return TraceStep(module, name, (before,), after)


def _with_dropouts(
    steps: Sequence[TraceStep], trained: Sequence[TraceStep]
) -> list[TraceStep] | None:
    """Eval-mode steps with the dropouts of training mode; None if others differ."""
    plain = iter([step for step in steps if not _is_dropout(step)])
    made: list[TraceStep] = []
    for step in trained:
        own = step if _is_dropout(step) else next(plain, None)
        if own is None or _identity(own) != _identity(step):
            return None
        if isinstance(own.module, Join):
            branch = _with_dropouts(own.branch, step.branch)
            if branch is None:
                return None
            joint = own.module.with_branch(one.module for one in branch)
            own = replace(own, module=joint, branch=branch)
        made.append(own)
    return made if next(plain, None) is None else None


def _is_dropout(step: TraceStep) -> bool:
    return isinstance(step.module, tuple(DROPOUTS.values()))


def _identity(step: TraceStep) -> object:
    """A key that is equal for two calls of one module or function."""
    module = step.module
    if isinstance(module, Join):
        join = module.function
        return join.name, join.args, join.kwargs, module.layer, module.swapped
    if isinstance(module, FunctionModule):
        return module.name, module.args, module.kwargs
    return module.name if isinstance(module, UnitParameter) else id(module)


class NoSpanError(Exception):
    """Why new units do not fit between two layers."""


def path_modules(path: Path, width: int, layout: Layout) -> tuple[nn.Module, ...]:
    """The path as modules; raises a `NoSpanError` if units cannot be added."""
    if problem := path.problem or (path.joined.problem if path.joined else ""):
        raise NoSpanError(problem)
    return tuple(_step_module(step, width, layout) for step in path.steps)


def _step_module(step: TraceStep, width: int, layout: Layout) -> nn.Module:
    """A step as a new module, or as the host's own if it has weights."""
    module, problem = step.module, ""
    function = module.function if isinstance(module, Join) else module
    if isinstance(module, COUPLING) and len(module.normalized_shape) > 1:
        problem = "normalizes more than the channels"
    elif isinstance(module, (*NORMS, *DROPOUTS.values())):
        pass
    elif isinstance(module, nn.LocalResponseNorm) or step.name == "local_response_norm":
        problem = "mixes channels"  # too little to be seen on small inputs
    elif isinstance(function, FunctionModule) and "training" in function.kwargs:
        problem = "depends on the training mode; call it as a module"
    elif isinstance(function, FunctionModule) and not function.copyable:
        problem = "cannot be copied; use a torch function with plain arguments"
    elif isinstance(module, Join):
        module = module.with_branch(_branch_modules(step, width, layout))
        whole = not module.layer and not any(map(is_layer, module.branch))
        step = replace(step, given=step.given[:1]) if whole else step
        tried = module if whole else module.function
        problem = _why_not_channelwise(tried, step, width, layout)
    else:
        if not unit_size(module) and not is_shared(module):
            module = deepcopy(module).eval()
        if hasattr(module, "inplace"):
            module.inplace = False  # type: ignore[assignment]
        problem = _why_not_channelwise(module, step, width, layout)
    if problem:
        raise NoSpanError(f"{step.name} between the layers {problem}")
    return module


def _branch_modules(step: TraceStep, width: int, layout: Layout) -> Iterator[nn.Module]:
    """The modules of a join's second branch; a layer in it may change the width."""
    units = width
    constant = any(isinstance(one.module, UnitParameter) for one in step.branch)
    for one in step.branch:
        module = one.module
        fits = is_shared(module) or unit_size(module) % width == 0
        if is_layer(module):
            shape = swap_layout(module, module.get_parameter("weight")).shape
            fits, units = shape[1] == units, shape[0]
        elif not constant:
            module = _step_module(one, units, layout)
        if not fits or (one is step.branch[-1] and units != width):
            raise NoSpanError(f"{one.name} between the layers is not per unit")
        yield module


def _why_not_channelwise(
    module: nn.Module, step: TraceStep, width: int, layout: Layout
) -> str:
    """Why a module is not channel-wise at a step; empty if it is."""
    given = step.given
    if isinstance(step.module, Join) and step.module.swapped and len(given) > 1:
        given = given[::-1]
    try:
        with torch.no_grad():
            alike = _is_channelwise(module, given, step.result, width, layout)
            # A last batch may be smaller.
            units_part(module, 0, width, width).eval()(*(t[:1].clone() for t in given))
    except Exception:  # the module is code of others
        return "fails with fewer channels or fewer rows"
    return "" if alike else "mixes channels"


def _is_channelwise(
    module: nn.Module,
    given: Sequence[Tensor],
    result: Tensor,
    width: int,
    layout: Layout,
) -> bool:
    """Whether the first half and the last half of the channels give the same alone."""
    some = max(1, width // 2)
    whole = units_part(module, 0, width, width).eval()(*(t.clone() for t in given))
    ends = [_channels(tensor, width, layout) for tensor in (given[0], whole)]
    (axis, per), (axis_after, per_after) = ends
    alike = _close(whole, result)
    for first in (0, width - some):
        part = (t.narrow(axis, first * per, some * per).clone() for t in given)
        same = whole.narrow(axis_after, first * per_after, some * per_after)
        alone = units_part(module, first, some, width).eval()
        alike &= _close(alone(*part), same)
    return alike


def _channels(tensor: Tensor, width: int, layout: Layout) -> tuple[int, int]:
    """The channel axis, and the number of entries per channel on it."""
    flat = tensor.dim() == 2
    per = tensor.shape[1] // width if flat and layout is not Layout.VECTOR else 1
    return (1 if layout.channels_first or flat else -1), per


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal up to rounding, which depends on their shape."""
    if one.shape != other.shape:
        return False
    size = float(other.nan_to_num().abs().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=1e-4 * size, equal_nan=True)
