"""What lies between two layers of a host, found by watching one call.

New hidden units can be put between two layers if everything on the way works on each
channel by itself: activations, dropout, pooling, flattening, and norms that can be
given units of their own. `Watch` follows the tensor from the first layer's output to
the second one's input through every torch function, whether it was called by a module
or by hand; whatever it does not know it tries: a step is channel-wise if it gives the
same bits for some of the channels as for all of them.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from esper.growth.blueprints.geometry import Layout

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


@dataclass(slots=True)
class Step:
    """One function on the way."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module | None
    """The module that called it; None if the host did by hand."""
    before: Tensor
    after: Tensor


@dataclass(slots=True)
class Way:
    """What was seen between two layers."""

    steps: list[Step] = field(default_factory=list)
    arrived: bool = False
    trouble: str = ""


class Functional(nn.Module):
    """A torch function that the host called by hand, as a module."""

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


class Watch(TorchFunctionMode):
    """Follows tensors from the outputs of some layers to the inputs of others."""

    def __init__(self) -> None:
        super().__init__()
        self.ways: dict[str, Way] = {}
        self._tails: dict[str, Tensor] = {}
        self._kept: dict[str, list[Tensor]] = {}
        self.running: list[nn.Module] = []
        """Leaf modules that are being called, innermost last."""

    def leave(self, name: str, output: Tensor) -> None:
        """The first layer of a way has spoken."""
        self.ways[name] = Way()
        self._tails[name] = output
        self._kept[name] = [output]

    def arrive(self, name: str, given: object) -> None:
        """The second layer of a way is being called."""
        way = self.ways.get(name)
        if way is not None and not way.arrived:
            way.arrived = given is self._tails[name]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the function and note it on every way that it lies on."""
        kwargs = dict(kwargs or {})
        # The function may work in place, so what it was given is copied first.
        before = {name: tail.clone() for name, tail in self._tails.items()}
        result = func(*args, **kwargs)
        if isinstance(result, Tensor):
            for name, way in self.ways.items():
                self._note(name, way, func, args, kwargs, before[name], result)
        return result

    def _note(
        self,
        name: str,
        way: Way,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Tensor,
        result: Tensor,
    ) -> None:
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        passed = any(a is kept for a in given for kept in self._kept[name])
        if not passed or way.trouble:
            return
        tail = self._tails[name]
        if way.arrived:
            # The second layer itself reads the tail; anybody else is a fork.
            if not self.running or not hasattr(self.running[-1], "weight"):
                way.trouble = "the hidden tensor is also used elsewhere"
            return
        called = self.running[-1] if self.running else None
        function = getattr(func, "__name__", str(func))
        if not args or args[0] is not tail:
            way.trouble = f"the hidden tensor forks or meets another at {function}"
        elif len(given) > 1 and not isinstance(called, NORMS):
            way.trouble = f"{function} mixes the hidden tensor with another"
        else:
            # What a module does inside is one step of that module.
            if way.steps and called is not None and way.steps[-1].module is called:
                way.steps[-1].after = result.clone()
            else:
                step = Step(func, args, kwargs, called, before, result.clone())
                way.steps.append(step)
            self._tails[name] = result
            self._kept[name].append(result)


def describe_way(
    way: Way | None, width: int, layout: Layout
) -> tuple[tuple[nn.Module, ...], str]:
    """The way as modules, and what stands in the way of new units ("" if nothing)."""
    if way is None:
        return (), "its first layer was never called"
    if way.trouble:
        return (), way.trouble
    if not way.arrived:
        return (), "no channel-wise way leads from the first layer to the second"
    middle = []
    for step in way.steps:
        module, trouble = _as_module(step, width, layout)
        if module is None:
            return (), trouble
        middle.append(module)
    return tuple(middle), ""


def _as_module(step: Step, width: int, layout: Layout) -> tuple[nn.Module | None, str]:
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
        chance = step.args[1] if len(step.args) > 1 else step.kwargs.get("p", 0.5)
        return nn.Dropout(chance), ""
    if step.after.dim() == 2 and step.before.dim() > 2:
        return _if_channelwise(nn.Flatten(1), step, width, layout, what)
    if any(isinstance(a, Tensor) for a in (*step.args[1:], *step.kwargs.values())):
        return None, f"{what} mixes the hidden tensor with another"
    kwargs = {k: v for k, v in step.kwargs.items() if k != "inplace"}
    copied = Functional(step.function, step.args[1:], kwargs)
    return _if_channelwise(copied, step, width, layout, what)


def _if_channelwise(
    module: nn.Module, step: Step, width: int, layout: Layout, what: str
) -> tuple[nn.Module | None, str]:
    """The module, if it gives some channels the same bits as all of them."""
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
    if not torch.equal(part, whole.narrow(axis, 0, some * per)) or not torch.equal(
        whole, step.after
    ):
        return None, f"{what} between the layers mixes channels"
    return module, ""


def fresh_middle(
    middle: tuple[nn.Module, ...], units: int, width: int
) -> tuple[nn.Sequential, bool]:
    """The way for new units of their own, and whether it merges with the host's."""
    merges = True
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
            merges &= units % size == 0
            groups = units // size if units % size == 0 else 1
            made = nn.GroupNorm(groups, units, eps=module.eps, affine=module.affine)
        elif isinstance(module, nn.LayerNorm):
            merges = False
            made = nn.LayerNorm(
                units * (module.normalized_shape[-1] // width),
                eps=module.eps,
                elementwise_affine=module.elementwise_affine,
            )
        modules.append(made)
    return nn.Sequential(*modules), merges
