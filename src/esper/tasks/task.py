"""A task: data, the host that learns it, and training settings.

An episode has `horizon` decisions with `decision_every` training batches between them.
The loss is cross-entropy and the score is accuracy. If the host has one output, the
loss is the squared error and the score is

    max(0, 1 - (mean squared error) / (variance of the targets))
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, prod
from typing import Any

from esper.contracts.checks import require_int
from esper.contracts.errors import InvalidInputError
from esper.tasks.data import Splits, check_data
from esper.tasks.hosts import CnnHost, Loss, MlpHost, loss_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Data, host and training settings."""

    name: str
    description: str
    """A few words for the list of tasks."""
    data: Callable[[int], Splits]
    """Function from a random seed to the rows; `splits` also checks them."""
    host: MlpHost | CnnHost
    batch: int = 64
    decision_every: int = 16
    """Batches between two decisions."""
    horizon: int = 30
    """Decisions of an episode."""
    compute: int | None = None
    """Compute of an episode in batches of the initial host (clock `compute`); none: the
    world's horizon decides."""
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    varied: bool = False
    """Whether each environment has its own data."""
    unit_host: MlpHost | CnnHost | None = None
    """The initial host, the unit of size and compute; none: the host."""

    def __post_init__(self) -> None:
        """Check the types and ranges of the settings."""
        name = self.name
        if not isinstance(name, str) or not name:
            raise InvalidInputError(
                f"a task name must be a non-empty string; got {name!r}."
            )
        if not isinstance(self.host, MlpHost | CnnHost):
            raise InvalidInputError(
                f"{name}: host must be an MlpHost or a CnnHost; got "
                f"{type(self.host).__name__}."
            )
        if not callable(self.data):
            raise InvalidInputError(
                f"{name}: data must be a function of rng_seed; got "
                f"{type(self.data).__name__}."
            )
        for word in ("batch", "decision_every", "horizon", "compute"):
            count = getattr(self, word)
            if word != "compute" or count is not None:
                require_int(f"{name}: {word}", count)
        rate, decay = self.learning_rate, self.weight_decay
        if not (0 < rate < inf and 0 <= decay < inf):
            raise InvalidInputError(
                f"{name}: learning_rate must be > 0 and weight_decay >= 0, both "
                f"finite; got {rate} and {decay}."
            )

    @property
    def unit(self) -> MlpHost | CnnHost:
        """The unit of size and compute."""
        return self.unit_host or self.host

    @property
    def classes(self) -> int:
        """Number of classes; 1 means regression."""
        return self.host.num_outputs

    @property
    def loss(self) -> Loss:
        """Kind of loss: classification or regression."""
        return loss_of(self.classes)

    def splits(self, rng_seed: int) -> Splits:
        """Return the rows of this seed after checking that they fit the host."""
        splits = self.data(rng_seed)
        if not isinstance(splits, Splits):
            raise InvalidInputError(
                f"{self.name}: data must return Splits(train, val, test); got "
                f"{type(splits).__name__}."
            )
        for word, part in zip(Splits._fields, splits, strict=True):
            shape = tuple(part.features.shape[1:])
            if shape != self.host.shape or part.classes != self.classes:
                raise InvalidInputError(
                    f"{self.name}: {self.host} needs rows of shape {self.host.shape} "
                    f"in {self.classes} classes; {word} has {shape} in {part.classes}."
                )
            check_data(part)
        check_data(splits.train, batch=self.batch)
        return splits

    def summary(self) -> dict[str, Any]:
        """Return the task as one row of a table."""
        return {
            "name": self.name,
            "description": self.description,
            "inputs": prod(self.host.shape),
            "classes": self.classes,
            "loss": self.loss,
            "host": str(self.host),
            "parameters": self.host.parameters,
            "macs": self.host.macs,
            "slots": len(self.host.slots),
            "batch": self.batch,
            "decision_every": self.decision_every,
            "horizon": self.horizon,
            "learning_rate": self.learning_rate,
        }
