"""The rows of a task, for all environments of a cohort."""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.tasks.data import Splits


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of all environments: shared by all, or each with its own."""

    features: tuple[Tensor, Tensor, Tensor]
    labels: tuple[Tensor, Tensor, Tensor]
    own: bool

    @classmethod
    def of(cls, data: list[Splits], device: torch.device) -> "Rows":
        """Put the rows of all environments together; one set of rows is shared."""
        parts: list[tuple[Tensor, Tensor]] = []
        for part in range(3):
            features = [splits[part].features for splits in data]
            labels = [splits[part].labels for splits in data]
            own = len(data) > 1
            x = torch.stack(features) if own else features[0]
            y = torch.stack(labels) if own else labels[0]
            parts.append((x.to(device), y.to(device)))
        train, decisions, test = parts
        return cls(
            (train[0], decisions[0], test[0]), (train[1], decisions[1], test[1]), own
        )

    @property
    def train(self) -> int:
        """How many rows there are to train on."""
        return int(self.labels[0].shape[-1])

    def batch(self, rows: Int64[Tensor, "env row"]) -> tuple[Tensor, Tensor]:
        """Rows of every environment."""
        x, y = self.features[0], self.labels[0]
        if not self.own:
            return x[rows], y[rows]
        everyone = torch.arange(rows.shape[0], device=x.device).unsqueeze(1)
        return x[everyone, rows], y[everyone, rows]

    def decisions(self, count: int) -> tuple[Tensor, Tensor]:
        """The first decision rows."""
        x, y = self.features[1], self.labels[1]
        if self.own:
            return x[:, :count], y[:, :count]
        return x[:count], y[:count]

    def tests(self) -> tuple[Tensor, Tensor]:
        """All test rows."""
        return self.features[2], self.labels[2]
