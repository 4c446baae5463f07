"""What the learner asks of a policy, and what a decision consists of."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.features import Features


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What was chosen, and everything needed to learn from it."""

    actions: Int64[Tensor, "env head"]
    log_probs: Float[Tensor, "env head"]
    """Log-probability of each choice given the heads before it."""
    rows: Bool[Tensor, "env head choice"]
    """The exact mask rows the choices were drawn from."""
    distribution: Float[Tensor, "env head choice"]
    """Log-probabilities of all choices; 0 where illegal."""
    values: Float[Tensor, " env"]
    state: Float[Tensor, "env layer state"]
    """Memory after this decision."""


@runtime_checkable
class Policy(Protocol):
    """A recurrent, masked policy over several heads, with a normalised value."""

    spec: ActionSpec
    state_shape: tuple[int, int]
    """Layers and width of its memory."""
    value_out: nn.Linear
    """The last layer of the value, rescaled when the statistics move."""
    value_mean: Tensor
    value_scale: Tensor

    def parameters(self) -> Iterator[nn.Parameter]:
        """What is trained."""
        ...

    def initial_state(self, envs: int) -> Float[Tensor, "env layer state"]:
        """Empty memory."""
        ...

    def act(
        self,
        features: Features,
        masks: ActionMasks,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
        generator: Generator | None,
    ) -> Decision:
        """Decide for every environment; greedily without a generator."""
        ...

    def scores(
        self,
        features: Features,
        actions: Int64[Tensor, "env time head"],
        first: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time head choice"], Float[Tensor, "env time"]]:
        """Logits of every head given the stored choices, and normalised values."""
        ...

    def value(
        self,
        features: Features,
        first: Bool[Tensor, " env"],
        state: Float[Tensor, "env layer state"],
    ) -> Float[Tensor, " env"]:
        """V(s) of one more observation; memory is read, not advanced."""
        ...
