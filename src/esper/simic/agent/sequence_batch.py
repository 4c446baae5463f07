"""One rollout as whole sequences: one row per environment, padded at its end.

Minibatches split environments, never time, so memory can be unrolled from the row's
first state. Every tensor is `[env, time, ...]` and contiguous; what stands on padding
is finite and legal, and `valid_mask` says where it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor

from esper.contracts.errors import BadInput
from esper.contracts.features import Features


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceBatch:
    """What an update learns from; a copy that no buffer changes any more."""

    features: Features
    """What was seen before each choice."""
    first: Bool[Tensor, "env time"]
    """Whether the step is the first of an episode: memory starts anew before it."""
    rows: Bool[Tensor, "env time head choice"]
    """The mask rows the choices were drawn from."""
    actions: Int64[Tensor, "env time head"]
    log_probs: Float[Tensor, "env time head"]
    """Log-probability of each choice under the policy that made it."""
    distribution: Float[Tensor, "env time head choice"]
    """Log-probabilities of all choices under that policy."""
    values: Float[Tensor, "env time"]
    advantages: Float[Tensor, "env time"]
    returns: Float[Tensor, "env time"]
    valid_mask: Bool[Tensor, "env time"]
    """False on padding."""
    state: Float[Tensor, "env layers width"]
    """Memory before each row's first step."""
    group_size: int = 1
    """How many rows after each other have the same random streams."""

    def __getitem__(self, name: str) -> Tensor | Features | int:
        """A field by its name."""
        if name not in self.__slots__:
            raise KeyError(f"no field {name!r}; there are {', '.join(self.__slots__)}.")
        field: Tensor | Features | int = getattr(self, name)
        return field

    @property
    def num_envs(self) -> int:
        """How many rows there are."""
        return self.valid_mask.shape[0]

    def select(self, index: Int64[Tensor, " chosen"]) -> "SequenceBatch":
        """The rows of some environments, copied; groups are not kept together."""
        index = index.to(self.valid_mask.device)
        chosen = {
            field.name: getattr(self, field.name).index_select(0, index)
            for field in fields(self)
            if field.name not in ("features", "group_size")
        }
        seen = {
            field.name: getattr(self.features, field.name).index_select(0, index)
            for field in fields(self.features)
        }
        return SequenceBatch(features=Features(**seen), **chosen)

    def minibatches(
        self, count: int, generator: Generator
    ) -> Iterator["SequenceBatch"]:
        """Split the environments at random; each is in exactly one part.

        Args:
            count: How many parts; their sizes differ by at most one.
            generator: A CPU generator; the only source of chance. It has moved on
                when this returns, however many parts are taken.
        """
        if not 1 <= count <= self.num_envs:
            raise BadInput(
                f"count must lie in 1..{self.num_envs}, the number of environments, "
                f"got {count}."
            )
        order = torch.randperm(self.num_envs, generator=generator)
        return (self.select(part) for part in order.tensor_split(count))


def padded_sequences(
    storage: Mapping[str, Tensor],
    valid: Bool[Tensor, "env time"],
    state: Float[Tensor, "env layers width"],
    *,
    padding: bool,
    group_size: int = 1,
) -> SequenceBatch:
    """Copy time-major storage to whole sequences on the device of `valid`.

    What lies beyond a row's end is selected away, never multiplied: numbers and
    actions are 0, `first` is False, and only choice 0 is legal.

    Args:
        storage: `[time, env, ...]` tensors by name, at least as long as `valid`.
        valid: False on padding.
        state: Memory before each row's first step.
        padding: Whether there is any; False saves the work of looking.
        group_size: How many environments in a row have the same random streams.
    """
    device, length = valid.device, valid.shape[1]
    beyond = ~valid

    def sequences(name: str) -> Tensor:
        whole = storage[name][:length].to(device).transpose(0, 1)
        whole = whole.clone(memory_format=torch.contiguous_format)
        if padding:
            whole.masked_fill_(beyond.view(*beyond.shape, *[1] * (whole.ndim - 2)), 0)
        return whole

    rows = sequences("rows")
    if padding:
        rows[..., 0] |= beyond[..., None]
    return SequenceBatch(
        features=Features(
            host=sequences("features.host"),
            slots=sequences("features.slots"),
            offers=sequences("features.offers"),
        ),
        first=sequences("first"),
        rows=rows,
        actions=sequences("actions"),
        log_probs=sequences("log_probs"),
        distribution=sequences("distribution"),
        values=sequences("values"),
        advantages=sequences("advantages"),
        returns=sequences("returns"),
        valid_mask=valid,
        state=state.to(device).clone(),
        group_size=group_size,
    )
