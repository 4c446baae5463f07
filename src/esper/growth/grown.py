"""A copied host with the seeds that could not be folded into it, frozen in place.

    ADD     z + alpha * s
    SCALE   z * (1 + alpha * s)

Alphas are constants, nothing is recorded and nothing can be planted: this is a plain
module to be trained, saved, copied, moved and exported like any other. A layer that
other seeds have widened has more channels than a seed knows of; the seed reads the
first ones and says nothing to the others.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from esper.growth.blueprints.geometry import Layout, width
from esper.growth.junction import ADD
from esper.growth.places import Place, first_tensor


@dataclass(frozen=True, slots=True)
class Felt:
    """A seed that a host feels, as an export takes it."""

    slot: int
    name: str
    """Of the slot."""
    place: Place
    seed: nn.Module
    alpha: float
    style: int


class Grown(nn.Module):
    """A host that calls its seeds.

    Args:
        host: A copy of the host, without hooks of a growing model.
        felt: Seeds, in the order in which they speak; they are copied.
    """

    def __init__(self, host: nn.Module, felt: list[Felt]) -> None:
        super().__init__()
        self.host = host
        self.seeds = nn.ModuleDict({f"slot_{f.slot}": deepcopy(f.seed) for f in felt})
        self.training = self.seeds.training = host.training
        self.joints: dict[str, Joint] = {}
        for one in felt:
            site = one.place.site
            if site.name not in self.joints:
                self.joints[site.name] = joint = Joint(one.place)
                inlet, outlet = map(host.get_submodule, (site.inlet, site.outlet))
                if not site.residual:
                    inlet.register_forward_pre_hook(joint.read, with_kwargs=True)
                outlet.register_forward_hook(joint.write)
            seed = self.seeds[f"slot_{one.slot}"]
            self.joints[site.name].branches.append((seed, one.alpha, one.style))
        # Loaded in another process, the youngest handle keeps torch from giving the
        # numbers of these hooks to others.
        self.youngest = RemovableHandle(self._forward_hooks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """The host's answer, its seeds included."""
        try:
            return self.host(*args, **kwargs)
        finally:
            for joint in self.joints.values():
                joint.given = None


class Joint:
    """The hooks of one place."""

    def __init__(self, place: Place) -> None:
        at = place.geometry
        self.residual = place.site.residual
        self.reads = width(at.inlet_shape, at.inlet_layout)
        self.reads_along = channel_axis(at.inlet_layout)
        self.writes_along = channel_axis(at.outlet_layout)
        self.branches: list[tuple[nn.Module, float, int]] = []
        """Seed, alpha and style."""
        self.given: Tensor | None = None

    def read(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        """Keep what the inlet is given."""
        self.given = first_tensor((*args, *kwargs.values()))

    def write(self, module: nn.Module, args: Any, answer: Tensor) -> Tensor:  # noqa: ANN401
        """Add what the seeds say to what the outlet says."""
        given = answer if self.residual else self.given
        self.given = None
        if given is None:
            return answer
        if given.shape[self.reads_along] != self.reads:
            given = given.narrow(self.reads_along, 0, self.reads)
        for seed, alpha, style in self.branches:
            if seed.training != module.training:
                seed.train(module.training)
            said = _padded(alpha * seed(given), answer, self.writes_along)
            answer = answer + said if style == ADD else answer * (1 + said)
        return answer


def channel_axis(layout: Layout) -> int:
    """The axis of a tensor that its channels lie along."""
    return 1 if layout.channels_first else -1


def _padded(
    said: Float[Tensor, "..."], answer: Float[Tensor, "..."], axis: int
) -> Float[Tensor, "..."]:
    """The tensor with zeros for the channels that only the answer has."""
    more = answer.shape[axis] - said.shape[axis]
    if more == 0:
        return said
    after = said.dim() - 2 if axis == 1 else 0
    return F.pad(said, (0, 0) * after + (0, more))
