"""A task: data, the host that learns it, and the terms on which it learns.

A task is plain data and one function: a number goes in, three sets of rows come out.
An episode is `horizon` decisions, with `decision_every` batches of training between
them. The loss is the cross-entropy and the score the share of rows that are classified
correctly; if the host has one output, the loss is the squared error and the score

    1 - (mean squared error) / (variance of the targets), at least 0,

both over the rows that are scored.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

from esper.contracts.errors import InvalidInputError
from esper.tasks.data import Splits, check_data
from esper.tasks.hosts import CnnHost, Loss, MlpHost, loss_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is to be learnt, by what, and for how long."""

    name: str
    description: str
    """A few words for a list of tasks."""
    data: Callable[[int], Splits]
    """The rows that a number stands for; `splits` also checks them."""
    host: MlpHost | CnnHost
    batch: int = 64
    decision_every: int = 16
    """Batches between two decisions."""
    horizon: int = 30
    """Decisions of an episode."""
    compute: int | None = None
    """Training compute of an episode by the clock `compute`, in batches of the starting
    host; none: what the world's horizon makes."""
    learning_rate: float = 4e-3
    weight_decay: float = 0.01
    varied: bool = False
    """Whether every environment is to have data of its own."""
    unit_host: MlpHost | CnnHost | None = None
    """The starting host, in which size and compute are counted; none: the host."""

    def __post_init__(self) -> None:
        """Refuse terms on which nothing can be learnt."""
        name = self.name
        if not isinstance(name, str) or not name:
            raise InvalidInputError(f"expected a task's name; got {name!r}")
        if not isinstance(self.host, MlpHost | CnnHost):
            raise InvalidInputError(
                f"{name}: expected an MlpHost or a CnnHost; got "
                f"{type(self.host).__name__}; hosts are declared, not built"
            )
        if not callable(self.data):
            raise InvalidInputError(
                f"{name}: expected data as a function of rng_seed; got "
                f"{type(self.data).__name__}"
            )
        for word in ("batch", "decision_every", "horizon", "compute"):
            count = getattr(self, word)
            if word == "compute" and count is None:
                continue
            if not isinstance(count, int) or count < 1:
                raise InvalidInputError(
                    f"{name}: expected {word} as a whole number from 1; got {count!r}"
                )
        rate, decay = self.learning_rate, self.weight_decay
        if not (rate > 0 and isfinite(rate) and decay >= 0 and isfinite(decay)):
            raise InvalidInputError(
                f"{name}: expected learning_rate > 0 and weight_decay >= 0, both "
                f"finite; got {rate} and {decay}"
            )

    @property
    def unit(self) -> MlpHost | CnnHost:
        """The host in which size and compute are counted."""
        return self.unit_host or self.host

    @property
    def classes(self) -> int:
        """How many classes there are; 1: targets."""
        return self.host.num_outputs

    @property
    def loss(self) -> Loss:
        """What is learnt: to classify the rows, or to predict their targets."""
        return loss_of(self.classes)

    def splits(self, rng_seed: int) -> Splits:
        """The rows of this number, if they are what the host can learn from."""
        splits = self.data(rng_seed)
        if not isinstance(splits, Splits):
            raise InvalidInputError(
                f"{self.name}: expected data to return Splits(train, val, test); "
                f"got {type(splits).__name__}"
            )
        for word, part in zip(Splits._fields, splits, strict=True):
            shape = tuple(part.features.shape[1:])
            if shape != self.host.shape or part.classes != self.classes:
                raise InvalidInputError(
                    f"{self.name}: expected rows of shape {self.host.shape} in "
                    f"{self.classes} classes, as {self.host} reads them; {word} has "
                    f"{shape} in {part.classes}"
                )
            check_data(part)
        check_data(splits.train, batch=self.batch)
        return splits

    def summary(self) -> dict[str, Any]:
        """The task in one row of a table."""
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
