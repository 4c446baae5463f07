"""What the running episode of every environment has of its own.

Run, environment and the number of the episode decide its data, first weights, order of
batches and terms, each by a stream of its own: nothing of one environment depends on
another, or on how many there are. Twins are environments in a row that have the same
chances: what becomes of them differs only by what was decided.
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor

from esper.contracts.state import Stateful
from esper.environment.rows import Rows
from esper.environment.terms import Terms
from esper.tasks.task import Task

RISE: Final = 0.1
"""Share of an episode over which the learning rate rises."""
SLACK: Final = 1e-6
"""Share of a budget by which it may be passed."""
FLOOR: Final = 0.02
"""Share of the learning rate that is left at the end."""


class Episodes(Stateful):
    """Data, batches and terms of every environment.

    Args:
        task: What is learnt.
        envs: How many environments.
        rng_seed: The run.
        terms: Ranges to draw from.
        device: Where rows and terms live.
        twins: How many environments in a row have the same chances.
    """

    STATE = ("begun", "rent", "budget", "rate", "streams")
    DERIVED = ("_rows", "batches")

    rent: Float[Tensor, " env"]
    budget: Float[Tensor, " env"]
    rate: Float[Tensor, " env"]

    def __init__(
        self,
        task: Task,
        envs: int,
        rng_seed: int,
        terms: Terms,
        device: torch.device,
        *,
        twins: int = 1,
    ) -> None:
        self.task, self._envs, self._run, self._terms = task, envs, rng_seed, terms
        self._device, self._twins = device, twins
        self.begun = np.zeros(envs, dtype=np.int64)
        """Episodes that each environment has begun."""
        steps = task.horizon * task.decision_every
        self.batches = torch.zeros(envs, steps, task.batch, dtype=torch.int64)
        self.rent, self.budget, self.rate = (
            torch.zeros(envs, device=device) for _ in range(3)
        )
        self.streams = [Generator() for _ in range(envs)]
        """Where the weights of each environment come from."""
        self._rows: Rows | None = None

    @property
    def rows(self) -> Rows:
        """The rows of all environments; there are some once an episode has begun."""
        assert self._rows is not None
        return self._rows

    def begin(self, env: int) -> None:
        """Draw the next episode of an environment."""
        data, weights, order, terms = self._chances(env, int(self.begun[env]))
        self.begun[env] += 1
        self._give_rows(env, data)
        # Torch's CPU generator keeps 32 bits of its seed.
        drawn = int(weights.generate_state(1, np.uint64)[0] >> np.uint64(1))
        self.streams[env].manual_seed(drawn % 2**32)
        self._give_batches(env, order)
        self._give_terms(env, terms)

    def loaded(self) -> None:
        """Rows and batches of the running episodes follow from their numbers."""
        self._rows = None
        for env, begun in enumerate(self.begun.tolist()):
            if begun:
                data, _, order, _ = self._chances(env, begun - 1)
                self._give_rows(env, data)
                self._give_batches(env, order)

    def _chances(self, env: int, episode: int) -> list[np.random.SeedSequence]:
        """Streams of data, weights, order and terms of an episode."""
        key = (self._run, env // self._twins, episode)
        return np.random.SeedSequence(key).spawn(4)

    def minibatches(
        self, decision: Int64[Tensor, " env"]
    ) -> tuple[Int64[Tensor, "env step row"], Float[Tensor, "env step"]]:
        """Rows and learning rates of the minibatches after a decision (from 0)."""
        every = self.task.decision_every
        steps = decision.cpu()[:, None] * every + torch.arange(every)
        picked = self.batches[torch.arange(self._envs)[:, None], steps]
        rates = self.task.learning_rate * self.rate[:, None] * self._pace(steps)
        return picked.to(self._device), rates

    def _pace(self, done: Int64[Tensor, "env step"]) -> Float[Tensor, "env step"]:
        """A short rise and a long fall of the learning rate, as in one cycle."""
        share = done / (self.task.horizon * self.task.decision_every)
        rise = (share / RISE).clamp(max=1.0)
        fall = (1 + torch.cos(torch.pi * ((share - RISE) / (1 - RISE)).clamp(0, 1))) / 2
        return (FLOOR + (1 - FLOOR) * torch.minimum(rise, fall)).to(self._device)

    def _give_rows(self, env: int, chance: np.random.SeedSequence) -> None:
        if not self.task.varied:
            if self._rows is None:
                self._rows = Rows.of(self.task.splits(self._run), self._device)
            return
        splits = self.task.splits(int(chance.generate_state(1)[0]))
        if self._rows is None:
            self._rows = Rows.of(splits, self._device, apart=self._envs)
        self._rows.give(env, splits)

    def _give_batches(self, env: int, chance: np.random.SeedSequence) -> None:
        order = np.random.default_rng(chance)
        rows, needed = self.rows.train, self.batches[env].numel()
        passes = -(-needed // rows)
        drawn = np.concatenate([order.permutation(rows) for _ in range(passes)])
        self.batches[env] = torch.from_numpy(drawn[:needed]).view_as(self.batches[env])

    def _give_terms(self, env: int, chance: np.random.SeedSequence) -> None:
        drawn = np.random.default_rng(chance)
        for values, (low, high) in (
            (self.rent, self._terms.rent),
            (self.budget, self._terms.budget),
            (self.rate, self._terms.rate),
        ):
            share = float(drawn.random())
            # Rents and rates differ by factors: evenly on a log scale.
            factors = values is not self.budget and low > 0
            values[env] = (
                low * (high / low) ** share if factors else low + share * (high - low)
            )
        # What costs exactly the budget is affordable, whatever sums round to.
        self.budget[env] *= 1 + SLACK
