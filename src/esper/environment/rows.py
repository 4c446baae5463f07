"""The rows of a task, for all environments of a cohort.

On most tasks all environments share them. Where each has its own, there is room for all
from the start, and an environment that begins anew has its part overwritten.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from esper.contracts.errors import BadInput
from esper.tasks.data import Data, Splits

Features = Float[Tensor, "set _ input"]
Labels = Int64[Tensor, "set _"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Train, decision and test rows; the first axis is 1 if all share them."""

    features: tuple[Features, Features, Features]
    labels: tuple[Labels, Labels, Labels]

    @classmethod
    def of(cls, splits: Splits, device: torch.device, apart: int = 1) -> "Rows":
        """These rows for everybody, or room for so many sets, each with them at first.

        Args:
            splits: The rows.
            device: Where they are to live.
            apart: How many sets there are.
        """
        parts = [part.to(device) for part in splits]
        train, decisions, test = (
            part.features.float().flatten(1).repeat(apart, 1, 1) for part in parts
        )
        y, judged, unseen = (part.labels.repeat(apart, 1) for part in parts)
        return cls((train, decisions, test), (y, judged, unseen))

    def give(self, env: int, splits: Splits) -> None:
        """Replace the rows of one environment."""
        for name, part, room in zip(Splits._fields, splits, self.features, strict=True):
            _check_alike(name, part, room[env])
        for part, x, y in zip(splits, self.features, self.labels, strict=True):
            x[env].copy_(part.features.flatten(1))
            y[env].copy_(part.labels)

    @property
    def train(self) -> int:
        """How many rows there are to train on."""
        return int(self.labels[0].shape[1])

    def decisions(self, count: int) -> tuple[Features, Labels]:
        """The first decision rows."""
        return self.features[1][:, :count], self.labels[1][:, :count]

    def tests(self) -> tuple[Features, Labels]:
        """All test rows."""
        return self.features[2], self.labels[2]


def _check_alike(name: str, part: Data, there: Tensor) -> None:
    """Refuse rows that do not fit into the place of others."""
    found = part.features.flatten(1).shape
    if found != there.shape:
        raise BadInput(
            f"{part.name}: expected {name} rows of shape {tuple(there.shape)} whatever "
            f"the number; got {tuple(found)}; give every number as many"
        )
