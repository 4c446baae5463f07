"""The training loop: rounds of a rollout and an update, with callbacks around them.

    loop = TrainingLoop(algorithm, rounds=100, callbacks=[...])
    loop.run()

`esper train`, `esper ppo` and `PPO.learn` all use it. They differ in the algorithm:
`ControllerPPO` trains Tamiyo in many worlds, `PPO` trains in one Gymnasium environment.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import numpy as np
from torch import Tensor

from esper.contracts.errors import InvalidInputError, NotFiniteError
from esper.contracts.messages import quoted
from esper.contracts.state import Stateful, leaves
from esper.runs.records import Floats, Results, RoundRecord, bounded, interquartile_mean
from esper.simic.agent.metrics import UpdateRecord
from esper.simic.agent.ppo import PPOAgent
from esper.simic.rollout import EpisodeStats, concat

PATIENCE: Final = 3
"""Failures in a row that are tolerated: refused checkpoints, refused updates."""
OVERFLOW: Final = 1e30
"""A number of this size counts as infinite: its square is."""
BROKEN: Final = f"{PATIENCE} rounds in a row had no finite update"
EVALUATION: Final = "evaluation/mean_return"
EVALUATION_IQM: Final = "evaluation/iqm_return"
"""Name of the metric of evaluations."""
WINDOW: Final = 100
"""Episodes in the running mean of returns."""


@dataclass(frozen=True, slots=True)
class WorldRollout:
    """What one world contributed to a rollout."""

    rows: Mapping[str, Mapping[str, Any]]
    """Columns of the store's tables, with `index`: the step within the rollout."""
    stats: EpisodeStats


class Algorithm(Protocol):
    """What a `TrainingLoop` trains: it collects rollouts and learns from them."""

    agent: PPOAgent
    relative: bool
    """Whether rewards are fractions of the errors of hosts that never grow."""
    rollout_steps: int
    """Steps of each environment between two updates."""

    @property
    def env_steps(self) -> int:
        """Steps since the start, over all environments."""
        ...

    def collect(self) -> Sequence[WorldRollout]:
        """Fill the agent's buffer; one part for each world."""
        ...

    def update(self) -> UpdateRecord:
        """Learn from what was collected."""
        ...

    def memories(self) -> dict[str, Tensor]:
        """The policy's memory in running episodes, by names for errors."""
        ...

    def forget_episodes(self) -> None:
        """Start new episodes everywhere with the next rollout."""
        ...

    def change_streams(self, rollbacks: int) -> None:
        """Use other random numbers after a rollback."""
        ...


class Callback:
    """Hooks into a training; each does nothing unless it is overridden."""

    def on_message(self, text: str, *, warning: bool = False) -> None:
        """A line for people to read."""

    def on_progress(self, name: str, done: int, total: int, text: str) -> None:
        """One step of something that takes a while before or after the rounds."""

    def on_train_start(self, loop: "TrainingLoop", *, resumed: bool) -> None:
        """Before the first round; `resumed`: from a checkpoint."""

    def on_rollout(self, loop: "TrainingLoop", rollout: Sequence[WorldRollout]) -> None:
        """After every rollout, before the update; one part for each world."""

    def on_round_end(self, loop: "TrainingLoop", record: RoundRecord) -> None:
        """After every round."""

    def on_evaluation(self, loop: "TrainingLoop", results: Results) -> None:
        """After a periodic evaluation."""

    def on_metrics(self, loop: "TrainingLoop", metrics: Mapping[str, float]) -> None:
        """Further metrics of this round, by name; any callback may call the hook."""

    def on_train_end(self, loop: "TrainingLoop") -> None:
        """After the last round of `PPO.learn`, unless there was an error."""

    def on_close(self) -> None:
        """At the very end, also after a signal or an error."""


class OnRoundEnd(Callback):
    """Calls a function with the record of every round; False ends the training."""

    def __init__(self, function: Callable[[RoundRecord], object]) -> None:
        self._function = function

    def on_round_end(self, loop: "TrainingLoop", record: RoundRecord) -> None:
        """Call it."""
        answer = self._function(record)
        if isinstance(answer, bool | np.bool_) and not answer:
            loop.stopping = True


OnRecord = Callable[[RoundRecord], object]
Callbacks = Callback | OnRecord | Sequence[Callback | OnRecord] | None


def callbacks_of(given: Callbacks) -> list[Callback]:
    """Callbacks as a list; functions get the record of every round."""
    if isinstance(given, list | tuple):
        return [callback for each in given for callback in callbacks_of(each)]
    if given is None:
        return []
    if isinstance(given, Callback):
        return [given]
    if not callable(given) or isinstance(given, type):
        raise InvalidInputError(
            f"callback must be a function or a Callback, got {quoted(given)}."
        )
    return [OnRoundEnd(given)]


class TrainingLoop(Stateful):
    """Rounds of an algorithm that learns, with callbacks around them.

    Args:
        algorithm: What learns.
        rounds: Maximum number of rounds.
        minutes: Maximum time in minutes; None: no limit.
        factors: Factor of learning rate and entropy coefficients, and factor of the
            clip range, as a function of progress from 0 to 1.
        callbacks: Called around rollouts and rounds.
        signals: Training ends after a round in which this is no longer empty.
        fresh_every: Start new episodes every so many rounds. Only then is the state
            complete, if that of the environments cannot be saved.
        recent: The last episodes, if training goes on from an earlier loop.
        start: Progress in the first round, if training goes on from an earlier loop.
    """

    STATE: ClassVar[tuple[str, ...]] = ("algorithm", "round", "seconds", "rollbacks")
    DERIVED: ClassVar[tuple[str, ...]] = (
        "refused_rounds",
        "stopping",
        "last_progress",
        "_recent",
    )

    def __init__(
        self,
        algorithm: Algorithm,
        rounds: int,
        minutes: float | None = None,
        factors: Callable[[float], tuple[float, float]] = lambda progress: (1.0, 1.0),
        callbacks: Sequence[Callback] = (),
        signals: Sequence[int] = (),
        fresh_every: int | None = None,
        recent: deque[tuple[float, int]] | None = None,
        start: float = 0.0,
    ) -> None:
        self.algorithm: Any = algorithm
        self.rounds, self.minutes, self._factors = rounds, minutes, factors
        self.callbacks, self._signals = tuple(callbacks), signals
        self._fresh_every = fresh_every
        self._recent = deque(maxlen=WINDOW) if recent is None else recent
        self._start = self.last_progress = start
        """Progress in the last round."""
        self.round = 0
        """Rounds so far."""
        self.seconds = 0.0
        """Time that they took."""
        self.rollbacks = 0
        """How often the run went back to a checkpoint because updates were refused."""
        self.refused_rounds = 0
        """Rounds in a row, up to the last one, whose updates were all refused."""
        self.stopping = False
        """Whether training ends with the last round."""

    @property
    def env_steps(self) -> int:
        """Steps since the start, over all environments."""
        return int(self.algorithm.env_steps)

    @property
    def done(self) -> float:
        """Fraction of the budget that is used up, from 0 to 1."""
        fraction = self.round / max(self.rounds - 1, 1)
        if self.minutes is not None:
            fraction = max(fraction, self.seconds / (60 * self.minutes))
        return min(fraction, 1.0)

    @property
    def progress(self) -> float:
        """Progress of the schedules in the next round, from 0 to 1."""
        return self._start + (1.0 - self._start) * self.done

    @property
    def over(self) -> bool:
        """Whether the budget is used up."""
        late = self.minutes is not None and self.seconds >= 60 * self.minutes
        return late or self.round >= self.rounds

    @property
    def diverged(self) -> bool:
        """Whether so many updates in a row were refused that it should go back."""
        return self.refused_rounds >= PATIENCE

    @property
    def starts_episodes(self) -> bool:
        """Whether all environments start new episodes with the next round."""
        return self._fresh_every is not None and self.round % self._fresh_every == 0

    @property
    def sound(self) -> bool:
        """Whether the state is complete and worth going back to, or the last one."""
        whole = self._fresh_every is None or self.starts_episodes or self.over
        return whole and (not self.refused_rounds or (self.over and not self.diverged))

    def interrupted(self) -> bool:
        """Whether a signal has come."""
        return bool(self._signals)

    def call(self, hook: str, *args: Any, **options: Any) -> None:  # noqa: ANN401
        """Call one hook of all callbacks, by name."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args, **options)

    def close(self) -> None:
        """Call `on_close` of all callbacks, also after an error in one of them."""
        with ExitStack() as opened:
            for callback in reversed(self.callbacks):
                opened.callback(callback.on_close)

    def run(self) -> RoundRecord | None:
        """Play rounds until the budget is used up, a signal comes or it diverges.

        Returns:
            The last round, if there was one.
        """
        record = None
        self.stopping = self.interrupted()
        while not (self.over or self.stopping or self.diverged):
            record = self.play_round()
            self.refused_rounds = self.refused_rounds + 1 if record.refused else 0
            self.stopping = self.interrupted()
            self.call("on_round_end", self, record)
        return record

    def play_round(self) -> RoundRecord:
        """Collect a rollout and learn from it."""
        began, agent = time.monotonic(), self.algorithm.agent
        if self.starts_episodes:
            self.algorithm.forget_episodes()
        self.last_progress = self.progress
        factors = self._factors(self.last_progress)
        agent.anneal(*factors)
        rollout = self.algorithm.collect()
        self.call("on_rollout", self, rollout)
        self.require_finite()  # NaN in a moment would reach the weights
        update = self.algorithm.update()
        self.require_finite()
        self.round += 1
        self.seconds += time.monotonic() - began
        stats = concat([part.stats for part in rollout])
        ended = stats.returns.tolist(), stats.lengths.tolist()
        returns = np.array(ended[0])
        relative = self.algorithm.relative
        self._recent.extend(zip(*ended, strict=True))
        return RoundRecord(
            round=self.round,
            rounds=self.rounds,
            env_steps=self.env_steps,
            seconds=self.seconds,
            episodes=len(ended[0]),
            mean_return=_mean(bounded(returns) if relative else returns),
            iqm_return=interquartile_mean(returns),
            mean_length=_mean(ended[1]),
            recent_return=_mean([total for total, _ in self._recent]),
            recent_length=_mean([length for _, length in self._recent]),
            mean_score=stats.mean("score"),
            added=stats.mean("added"),
            learning_rate=factors[0] * agent.config.learning_rate,
            update=update,
        )

    def require_finite(self) -> None:
        """Refuse weights, moments and memories that are not usable numbers.

        Only on the CPU: elsewhere each look stalls the device, and the update itself
        refuses what is not finite.
        """
        if self.algorithm.agent.device.type != "cpu":
            return
        found = leaves(self.algorithm.agent, "agent") | self.algorithm.memories()
        for name, tensor in found.items():
            if tensor.is_floating_point() and not bool((tensor.abs() < OVERFLOW).all()):
                raise NotFiniteError(
                    f"{name} holds NaN, infinity or a number above {OVERFLOW:g} in "
                    f"round {self.round}"
                )

    def change_streams(self, rollbacks: int) -> None:
        """Use other random numbers after a rollback."""
        self.rollbacks = rollbacks
        self.algorithm.change_streams(rollbacks)


def _mean(figures: Sequence[float] | Floats) -> float:
    return float(np.mean(figures)) if len(figures) else float("nan")
