"""Data, minibatches and drawn terms of the current episode of every environment.

Run, environment and episode number seed separate random streams for data, initial
weights, batch order and terms. So an environment does not depend on the others or on
their number. Environments of a group share their streams (common random numbers): they
differ only by the decisions.
"""

from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int64, Num
from numpy.typing import NDArray
from torch import Generator, Tensor

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import Stateful
from esper.environment.settings import TERMS, WorldSettings
from esper.tasks.task import Task

BUDGET_TOLERANCE: Final = 1e-6
"""Relative tolerance of a budget, against rounding."""
Rows = tuple[Float[Tensor, "set _ input"], Num[Tensor, "set _"]]
"""Features and labels; the first axis has size 1 if all environments share them."""


class EpisodeData(Stateful):
    """Data, minibatches, and rent, budget and rate of every environment."""

    STATE = ("begun", "drawn", "rent", "budget", "rate", "streams")
    DERIVED = ("rows", "_orders")

    rent: Float[Tensor, " env"]
    budget: Float[Tensor, " env"]
    rate: Float[Tensor, " env"]

    def __init__(
        self, task: Task, envs: int, rng_seed: int, settings: WorldSettings
    ) -> None:
        self.task, self._envs, self.run = task, envs, rng_seed
        self._settings = settings
        self.begun = np.zeros(envs, dtype=np.int64)
        """Number of episodes that each environment has started."""
        self.drawn = np.zeros(envs, dtype=np.int64)
        """Number of minibatches drawn in the current episodes."""
        self._orders = self._empty_batch_orders()
        self.rent, self.budget, self.rate = (torch.zeros(envs) for _ in TERMS)
        self.streams = [Generator() for _ in range(envs)]
        """Random streams of the weights."""
        self.rows: list[Rows] = []
        """Training, validation and test rows, once an episode has started."""

    def _empty_batch_orders(self) -> list[tuple[int, NDArray[np.int64]]]:
        return [(-1, np.empty(0, np.int64))] * self._envs

    def begin(self, env: int) -> None:
        """Start the next episode of an environment."""
        data, weights, _, terms = self._sequences(env, int(self.begun[env]))
        self.begun[env] += 1
        self._draw_rows(env, data)
        # Torch's CPU generator uses 32 bits of its seed.
        drawn = int(weights.generate_state(1, np.uint64)[0] >> np.uint64(1))
        self.streams[env].manual_seed(drawn % 2**32)
        self.drawn[env] = 0
        self._orders[env] = (-1, np.empty(0, np.int64))
        self._draw_terms(env, terms)

    def loaded(self) -> None:
        """Draw rows and orders again; they follow from the episode numbers."""
        self.rows, self._orders = [], self._empty_batch_orders()
        for env, begun in enumerate(self.begun.tolist()):
            if begun:
                self._draw_rows(env, self._sequences(env, begun - 1)[0])

    def minibatches(
        self, steps: Int64[Tensor, " env"], most: int
    ) -> Int64[Tensor, "env step row"]:
        """Draw the row indices of the next minibatches, `steps` per environment."""
        batch = self.task.batch
        picked = np.zeros((self._envs, most, batch), dtype=np.int64)
        for env, count in enumerate(steps.tolist()):
            start = int(self.drawn[env]) * batch
            rows = self._rows_between(env, start, start + count * batch)
            picked[env, :count] = rows.reshape(count, batch)
            self.drawn[env] += count
        return torch.from_numpy(picked)

    def rates(self, shares: Float[Tensor, "env step"]) -> Float[Tensor, "env step"]:
        """Return learning rates, given the fractions of the schedule."""
        return self.task.learning_rate * self.rate[:, None] * shares

    def _rows_between(self, env: int, start: int, end: int) -> NDArray[np.int64]:
        """Part of the endless sequence of permutations of an episode."""
        count = self.rows[0][1].shape[1]
        parts = []
        for number in range(start // count, -(-end // count)):
            if self._orders[env][0] != number:
                order = self._sequences(env, int(self.begun[env]) - 1)[2]
                key = np.random.SeedSequence(
                    order.entropy, spawn_key=(*order.spawn_key, number)
                )
                drawn = np.random.default_rng(key).permutation(count)
                self._orders[env] = (number, drawn)
            own = self._orders[env][1]
            begins = number * count
            parts.append(own[max(start - begins, 0) : min(end - begins, count)])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _sequences(self, env: int, episode: int) -> list[np.random.SeedSequence]:
        """Seeds of data, weights, order and terms of an episode."""
        key = (self.run, env // self._settings.group_size, episode)
        return np.random.SeedSequence(key).spawn(4)

    def _draw_rows(self, env: int, sequence: np.random.SeedSequence) -> None:
        varied, set_ = self.task.varied, env if self.task.varied else 0
        if self.rows and not varied:
            return
        seed = int(sequence.generate_state(1)[0]) if varied else self.run
        splits = self.task.splits(seed)
        drawn = [(part.features.flatten(1), part.labels) for part in splits]
        if not self.rows:
            copies = self._envs if varied else 1
            self.rows = [
                (x.float().repeat(copies, 1, 1), y.repeat(copies, 1)) for x, y in drawn
            ]
        wanted = [tuple(x.shape[1:]) for x, _ in self.rows]
        found = [tuple(x.shape) for x, _ in drawn]
        if found != wanted:
            raise InvalidInputError(
                f"{splits.train.name}: training, validation and test rows must have "
                f"shapes {wanted} for every seed; got {found}."
            )
        for (x, y), (new_x, new_y) in zip(self.rows, drawn, strict=True):
            x[set_].copy_(new_x)
            y[set_].copy_(new_y)

    def _draw_terms(self, env: int, sequence: np.random.SeedSequence) -> None:
        generator = np.random.default_rng(sequence)
        for name in TERMS:
            drawn = self._settings.term(name, float(generator.random()))
            getattr(self, name)[env] = drawn
        # A seed that costs exactly the budget is affordable in spite of rounding.
        self.budget[env] *= 1 + BUDGET_TOLERANCE
