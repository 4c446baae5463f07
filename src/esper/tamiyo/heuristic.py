"""Hand-written controllers that look: at a plateau, or at what is promised.

Both tend their seeds like the schedules do. *When* to plant is the question of the one:
when the score has stopped improving. *What* and *where* is the question of the other:
the offer with the largest first-order gain per parameter, among those that promise more
than their rent.
"""

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import ActionSpec
from esper.contracts.controller import ControllerState
from esper.contracts.errors import BadInput
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation
from esper.contracts.stages import Stage
from esper.tamiyo.gardening import PATIENCE, SLOW, Preference, by_size, tend

_FREE = 1e-12  # stands for no parameters at all: such an offer costs next to nothing


class Plateau:
    """Plants when the score has not improved for a while and no seed is on its way.

    Args:
        spec: The action space.
        patience: Share of the horizon without improvement.
        blueprint: The only one to plant; the largest widening that fits if None.
        seed_patience: Steps a seed trains before it is blended in.
    """

    def __init__(
        self,
        spec: ActionSpec,
        patience: float = 0.1,
        *,
        blueprint: str | None = None,
        seed_patience: int = PATIENCE,
    ) -> None:
        if not 0.0 <= patience <= 1.0:
            raise BadInput(f"patience must be a share in [0, 1], got {patience}.")
        self.patience, self.seed_patience = patience, seed_patience
        self._preference = Preference(spec, blueprint)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Tend, and plant on a plateau."""
        stage = observation.slots.stage
        growing = (stage == Stage.TRAINING.value) | (stage == Stage.BLENDING.value)
        due = (observation.host.plateau >= self.patience) & ~growing.any(dim=1)
        wish = self._preference.wish(observation.offers, due)
        return tend(observation, masks, wish, patience=self.seed_patience), None


class PromiseGreedy:
    """Plants by promise, keeps by contribution; blends slowly and fully.

    An offer of which no promise is known is worth a trial when nothing else pays.

    Args:
        spec: The action space; says which trials are of widening, and these come
            first. If None, the largest do.
        patience: Steps a seed trains before it is blended in.
    """

    def __init__(
        self, spec: ActionSpec | None = None, *, patience: int = PATIENCE
    ) -> None:
        self.patience = patience
        self._preference = None if spec is None else Preference(spec)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Tend, and plant what promises most per parameter."""
        offers, rent = observation.offers, observation.host.rent[:, None, None]
        pays = offers.promise - rent * offers.parameters > 0.0
        gain = offers.promise / offers.parameters.clamp_min(_FREE)
        known = torch.where(pays, gain, -torch.inf)
        liked = self._preference.scores if self._preference else by_size
        trial = liked(offers) - 3.0  # below every gain that pays
        wish = torch.where(offers.promise_known, known, trial)
        actions = tend(observation, masks, wish, patience=self.patience, manner=SLOW)
        return actions, None
