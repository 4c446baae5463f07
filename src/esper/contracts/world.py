"""What passes between worlds and controllers, and the protocols of both.

A controller sees an `Observation` and decides; a world answers with a `StepResult`.
`terminated` and `truncated` are two facts: the episode has no future, or it was only
cut. Worlds reset ended environments in the same step: `observation` is then the first
of the next episode and `final` the last of the old one.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.slots import SlotStates


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStates:
    """Every host in one record of `[env]` tensors."""

    progress: Float[Tensor, " env"]
    """Share of the horizon that has passed, in [0, 1]; 0 if the end is not known."""
    end_known: Bool[Tensor, " env"]
    """Whether there is a horizon."""
    compute: Float[Tensor, " env"]
    """Compute so far: log2(1 + batches of the starting host that cost as much)."""
    budget_left: Float[Tensor, " env"]
    """Parameters that may still be added, as a multiple of the host's; inf: any."""
    rent: Float[Tensor, " env"]
    """Score charged per added multiple of the host's parameters."""
    added: Float[Tensor, " env"]
    """Parameters added so far as a multiple of the host's."""
    score: Float[Tensor, " env"]
    """Score on the decision split, in [0, 1]."""
    score_slope: Float[Tensor, " env"]
    """Change of the score per step, recently."""
    loss: Float[Tensor, " env"]
    """Training loss against its value at the start (1 at the start)."""
    loss_slope: Float[Tensor, " env"]
    """Relative change of the training loss per step, recently."""
    plateau: Float[Tensor, " env"]
    """Share of the horizon since the score last improved, or of what has passed if the
    end is not known, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlueprintOffers:
    """What each slot could be planted with: `[env, slot, blueprint]` tensors."""

    fits: Bool[Tensor, "env slot blueprint"]
    """Whether the blueprint can serve the tensors at this slot."""
    parameters: Float[Tensor, "env slot blueprint"]
    """Parameters it would add, as a multiple of the host's."""
    macs: Float[Tensor, "env slot blueprint"]
    """Multiply-adds it would add, as a multiple of the host's."""
    promise: Float[Tensor, "env slot blueprint"]
    """First-order gain it promises here; meaningful only where known."""
    promise_known: Bool[Tensor, "env slot blueprint"]
    """Whether `promise` was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One decision's view of every environment."""

    episode_start: Bool[Tensor, " env"]
    """Whether this is the first observation of an episode: memory starts anew."""
    host: HostStates
    slots: SlotStates
    offers: BlueprintOffers


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """Results of the episodes that ended in a step."""

    env: Int64[Tensor, " ended"]
    score: Float[Tensor, " ended"]
    """On the decision rows."""
    test: Float[Tensor, " ended"]
    """On the test rows, which no decision and no reward ever sees."""
    objective: Float[Tensor, " ended"]
    """On the test rows: net of rent, weighted over the stops."""
    added: Float[Tensor, " ended"]
    """Parameters added, as a multiple of the host's."""
    macs: Float[Tensor, " ended"]
    """Multiply-adds per row, as a multiple of the host's."""
    training_macs: Float[Tensor, " ended"]
    """Multiply-adds that training and scoring took, in float64."""
    panicked: Bool[Tensor, " ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One step of every environment."""

    observation: Observation
    """The next observation; of a new episode where the old one ended."""
    reward: Float[Tensor, " env"]
    terminated: Bool[Tensor, " env"]
    """The episode has no future."""
    truncated: Bool[Tensor, " env"]
    """The episode was cut although it had a future."""
    final: Observation | None = None
    """The true last observation where truncated; None if nothing was truncated."""
    illegal: Bool[Tensor, " env"] | None = None
    """Where the action was not possible; None if the world does not report it."""
    report: EpisodeReport | None = None
    """Results of the episodes that ended, if any did and the world has results."""


@runtime_checkable
class VectorWorld(Protocol):
    """Many environments that step together."""

    spec: ActionSpec
    num_envs: int
    group_size: int = 1
    """Environments in a row that have the same data, batches and terms."""

    def reset(self) -> Observation:
        """Start a new episode everywhere."""
        ...

    def step(self, actions: Int64[Tensor, "env head"]) -> StepResult:
        """Act everywhere; ended environments start anew in the same step."""
        ...


ControllerState = Tensor | tuple[Tensor, ...] | None
"""What a controller remembers between decisions; None if nothing."""


@runtime_checkable
class Controller(Protocol):
    """Decides for all environments at once."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Choose one legal action per environment.

        Args:
            observation: What is seen; where `observation.first` is set, whatever was
                remembered is of another episode and must not be used.
            masks: What is possible. Heads that the chosen op does not use are 0.
            state: What this controller returned at the last decision; None at first.
            generator: The only source of randomness.
        """
        ...
