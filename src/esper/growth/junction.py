"""Where seeds touch a host: two hooks per place.

The inlet's hook keeps the tensor that the seeds read; the outlet's hook adds what they
say to the tensor there. An empty place costs two calls of a few instructions; the
host's own modules, names and weights stay as they are. A seed whose code raises is left
out from then on and `Flow.failed` says so.

    ADD     z + alpha * s
    SCALE   z * (1 + alpha * s)

both are the identity at s = 0. While the host trains, the hooks also keep a few rows of
what passed the place, and the gradient that came back: what a place promises is
computed from them when somebody asks, and costs nothing until then.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.contracts.errors import BadInput
from esper.growth.blueprints.registry import first_line
from esper.growth.places import Place, first_tensor

ADD: Final = 0
SCALE: Final = 1

ROWS: Final = 1024
"""Rows (or positions) of a place that are kept for its promise."""
EXAMPLES: Final = 16
"""Examples that are kept at least, however many positions each has."""
LARGE: Final = 2**15
"""Numbers in a batch at a place from which only some batches are kept: what is kept
cannot be used again by the next batch, and large memory is dear to come by."""
STRIDE: Final = 16
"""Every which batch is kept of large ones."""
SAMPLES: Final = 16
"""Batches of a place that are kept at most."""


@dataclass(slots=True)
class Branch:
    """One seed at its place."""

    seed: nn.Module
    alpha: float = 0.0
    style: int = ADD
    shadow: bool = True
    """Whether the seed is in TRAINING: felt in shadow passes only."""


@dataclass(slots=True)
class Flow:
    """How the next pass through a host treats its seeds; shared by all places."""

    shadow: bool = False
    """Whether TRAINING seeds are felt, at alpha 1."""
    quiet: bool = False
    """Whether nothing is kept of what passes."""
    left_out: int | None = None
    """A slot whose seed is not felt in this pass."""
    tried: int | None = None
    """A slot whose seed is felt at alpha 1 in this pass."""
    failed: dict[int, str] = field(default_factory=dict)
    """Slots whose seeds' own code failed, and how: they are not felt any more."""


@dataclass(slots=True)
class Sample:
    """Some rows that passed a place in training, and what came back."""

    given: Tensor
    answer: Tensor
    rows: int
    """Rows of the batch they are from."""
    gradient: Tensor | None = None


@dataclass(slots=True)
class Junction:
    """The hooks of one place and the seeds that stand there."""

    place: Place
    flow: Flow
    branches: dict[int, Branch] = field(default_factory=dict)
    """Seeds by slot number, in the order of slots."""
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    keeping: bool = True
    """Whether rows are kept for the place's promise."""
    passed: int = 0
    """Batches that passed since the last decision."""
    _given: Tensor | None = None
    _handles: list[RemovableHandle] = field(default_factory=list)

    def attach(self) -> None:
        """Put the hooks on the host."""
        for hook in self.place.outlet._forward_hooks.values():
            other = getattr(hook, "__self__", None)
            if isinstance(other, Junction) and other.flow is not self.flow:
                raise BadInput(
                    f"{self.place.site.outlet!r} has slots of another Grower; call "
                    "its detach() first."
                )
        if not self.place.site.residual:
            self._handles.append(
                self.place.inlet.register_forward_pre_hook(self.read, with_kwargs=True)
            )
        self._handles.append(self.place.outlet.register_forward_hook(self.write))

    def detach(self) -> None:
        """Take the hooks off the host."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.forget()

    def forget(self) -> None:
        """Drop whatever was kept of earlier batches."""
        self._given = None
        self.passed = 0
        self.samples.clear()

    def read(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Keep what the inlet is given."""
        self._given = first_tensor((*args, *kwargs.values()))

    def write(self, module: nn.Module, args: Any, answer: Tensor) -> Tensor:  # noqa: ANN401
        """Add what the seeds say to what the outlet says."""
        given = answer if self.place.site.residual else self._given
        self._given = None
        result = answer
        for slot, branch in self.branches.items():
            alpha = self._alpha(slot, branch)
            if alpha == 0.0 or given is None:
                continue
            if branch.seed.training != module.training:
                branch.seed.train(module.training)
            try:
                said = _said(branch.seed, given, answer)
            except Exception as error:  # a seed is code of others; the host goes on
                self.flow.failed[slot] = f"its forward failed ({first_line(error)})"
                continue
            said = said if alpha == 1.0 else alpha * said
            result = result + said if branch.style == ADD else result * (1 + said)
        if (
            self.keeping
            and module.training
            and result.requires_grad
            and given is not None
            and not (self.flow.quiet or self.flow.shadow)
            and torch.is_grad_enabled()
        ):
            self._keep(given, result)
        return result

    def _alpha(self, slot: int, branch: Branch) -> float:
        if slot == self.flow.left_out or slot in self.flow.failed:
            return 0.0
        if slot == self.flow.tried or (branch.shadow and self.flow.shadow):
            return 1.0
        return 0.0 if branch.shadow else branch.alpha

    def _keep(self, given: Tensor, answer: Tensor) -> None:
        rows = answer.shape[0]
        large = given.numel() + answer.numel() > LARGE
        self.passed += 1
        if large and self.passed % STRIDE and self.samples:
            return
        positions = max(1, self.place.geometry.outlet_positions)
        enough = max(EXAMPLES, ROWS // positions)
        some = min(rows, enough)
        while self.samples and sum(s.given.shape[0] for s in self.samples) >= enough:
            self.samples.popleft()
        sample = Sample(_some(given, some), _some(answer, some), rows)
        self.samples.append(sample)

        def came_back(gradient: Tensor) -> None:
            sample.gradient = _some(gradient, some)

        answer.register_hook(came_back)


def _said(seed: nn.Module, given: Tensor, answer: Tensor) -> Tensor:
    """What a seed says, which must not be broadcast by accident."""
    said: Tensor = seed(given)
    if said.shape != answer.shape:
        raise ValueError(f"it gave {[*said.shape]} for {[*answer.shape]}")
    return said


def _some(tensor: Tensor, rows: int) -> Tensor:
    """The first rows; a copy if there are more, so that the rest can be freed."""
    tensor = tensor.detach()
    return tensor if rows == tensor.shape[0] else tensor[:rows].clone()
