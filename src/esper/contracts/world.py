"""Protocols of worlds and controllers, and the records they exchange.

A controller maps an `Observation` to actions; a world maps actions to a `StepResult`.
`terminated` means that the episode has no future; `truncated` means that it was cut.
Worlds reset ended environments in the same step: `observation` is then the first of
the next episode and `final` the last of the old one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from jaxtyping import Bool, Float, Int64, Shaped
from torch import Generator, Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.slots import SlotStates


@dataclass(frozen=True, slots=True, kw_only=True)
class HostStates:
    """State of all hosts as `[env]` tensors."""

    progress: Float[Tensor, " env"]
    """Elapsed fraction of the horizon, in [0, 1]; 0 if there is no horizon."""
    end_known: Bool[Tensor, " env"]
    compute: Float[Tensor, " env"]
    """Compute so far: log2(1 + equivalent batches of the initial host)."""
    budget_left: Float[Tensor, " env"]
    """Parameters that can still be added, as a multiple of the host's; can be inf."""
    rent: Float[Tensor, " env"]
    """Score charged per added multiple of the host's parameters."""
    added: Float[Tensor, " env"]
    """Parameters added so far as a multiple of the host's."""
    score: Float[Tensor, " env"]
    """Score on the validation split, in [0, 1]."""
    score_slope: Float[Tensor, " env"]
    """Recent change of the score per step."""
    loss: Float[Tensor, " env"]
    """Training loss divided by its initial value."""
    loss_slope: Float[Tensor, " env"]
    """Recent relative change of the training loss per step."""
    plateau: Float[Tensor, " env"]
    """Fraction of the horizon since the score last improved, in [0, 1].

    Without a horizon: of the steps so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlueprintOffers:
    """Blueprints that each slot can take, as `[env, slot, blueprint]` tensors."""

    fits: Bool[Tensor, "env slot blueprint"]
    parameters: Float[Tensor, "env slot blueprint"]
    """Parameters that it adds, as a multiple of the host's."""
    macs: Float[Tensor, "env slot blueprint"]
    """Multiply-adds that it adds, as a multiple of the host's."""
    promise: Float[Tensor, "env slot blueprint"]
    """First-order estimate of its gain; meaningful only where known."""
    promise_known: Bool[Tensor, "env slot blueprint"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What a controller observes at one decision in all environments."""

    episode_start: Bool[Tensor, " env"]
    """Whether an episode starts here; reset any memory."""
    host: HostStates
    slots: SlotStates
    offers: BlueprintOffers
    acts: ClassVar[None] = None
    """Every action counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeReport:
    """Results of the episodes that ended in a step."""

    env: Int64[Tensor, " ended"]
    score: Float[Tensor, " ended"]
    """On the validation split."""
    test: Float[Tensor, " ended"]
    """On the test split, which no decision and no reward uses."""
    objective: Float[Tensor, " ended"]
    """On the test split: score minus rent, weighted over the stops."""
    added: Float[Tensor, " ended"]
    """Parameters added, as a multiple of the host's."""
    macs: Float[Tensor, " ended"]
    """Multiply-adds per row, as a multiple of the host's."""
    training_macs: Float[Tensor, " ended"]
    """Multiply-adds of training and scoring, float64."""
    panicked: Bool[Tensor, " ended"]


Seen = TypeVar("Seen", covariant=True)
"""Observation of a world. `Seen.episode_start` is where episodes start; `Seen.acts` is
where the next action counts, None if everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(Generic[Seen]):
    """Result of one step in all environments."""

    observation: Seen
    """The next observation; the first of a new episode where one ended."""
    reward: Float[Tensor, " env"]
    terminated: Bool[Tensor, " env"]
    """The episode has no future."""
    truncated: Bool[Tensor, " env"]
    """The episode was cut although it had a future."""
    final: Seen | None = None
    """The last observation where truncated; None if nothing was truncated."""
    illegal: Bool[Tensor, " env"] | None = None
    """Where the action was illegal; None if the world does not report it."""
    report: EpisodeReport | None = None
    """Results of the episodes that ended; None if there are none."""


@runtime_checkable
class World(Protocol[Seen]):
    """Environments that step together."""

    num_envs: int
    group_size: int = 1
    """Consecutive environments that share data, batches and terms."""

    def reset(self) -> Seen:
        """Start a new episode in every environment."""
        ...

    def step(self, actions: Shaped[Tensor, "env head"]) -> StepResult[Seen]:
        """Take one action per environment; ended environments are reset."""
        ...


@runtime_checkable
class VectorWorld(World[Observation], Protocol):
    """Hosts that train and grow together."""

    spec: ActionSpec


@runtime_checkable
class LayeredWorld(VectorWorld, Protocol):
    """Hosts whose slots and layers have names; all layers but the last can grow."""

    slot_names: Sequence[str]
    layer_names: Sequence[str]
    outputs: int
    """Units of the last layer."""


ControllerState = Tensor | tuple[Tensor, ...] | None
"""Memory of a controller between decisions; None if it has none."""


@runtime_checkable
class Controller(Protocol):
    """Chooses actions for all environments."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Choose one legal action per environment.

        Args:
            observation: Where `observation.episode_start` is set, `state` belongs to
                another episode and must not be used.
            masks: Legal choices. Set heads that the chosen op does not use to 0.
            state: Memory returned by the previous decision; None at the first.
            generator: The only source of random numbers.
        """
        ...
