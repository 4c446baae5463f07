"""A controller restricted to the actions that it was trained with.

Blueprints and choices outside of its training are removed from observation and masks,
and its actions are mapped back into the full action space. If none of the offered
blueprints is known, it sees all of them, and `notes` contains a warning.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from typing import Final

import torch
from jaxtyping import Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.world import (
    BlueprintOffers,
    Controller,
    ControllerState,
    Observation,
)
from esper.simic.agent.distribution import Decision

BLUEPRINT: Final = HEAD["blueprint"]
GERMINATE: Final = Op.GERMINATE.value


class Restricted:
    """A controller in a larger action space than its own.

    Args:
        make: Creates the controller for the restricted action space.
        spec: The full action space.
        names: Blueprints it was trained with.
        choices: Choices of each head it was trained with; all if a head is missing.
    """

    def __init__(
        self,
        make: Callable[[ActionSpec], Controller],
        spec: ActionSpec,
        names: Collection[str],
        choices: Mapping[str, Collection[str]],
    ) -> None:
        self.notes: tuple[str, ...] = ()
        """Warnings for the user."""
        offered = [known.name for known in spec.blueprints]
        known = [at for at, name in enumerate(offered) if name in names]
        if not known:
            known = [*range(len(offered))]
            self.notes = (
                "the controller was trained with none of these blueprints, so its "
                f"choice is a guess. Offer {', '.join(sorted(names))}.",
            )
        narrowed = dict[str, tuple[str, ...]]()
        for head in (head for head in HEADS if head.choices):
            allowed = spec.narrowed.get(head.name, head.choices)
            trained = {Op.WAIT.name, *choices.get(head.name, head.choices)}
            order = [choice for choice in head.choices if choice in allowed]
            both = [choice for choice in order if choice in trained]
            narrowed[head.name] = tuple(both or order)
        blueprints = tuple(spec.blueprints[at] for at in known)
        self.plants = frozenset(blueprint.name for blueprint in blueprints)
        """Names of the blueprints that it may plant."""
        self.spec = replace(spec, blueprints=blueprints, narrowed=narrowed)
        self._controller = make(self.spec)
        self._known = torch.tensor(known)
        self._position = torch.full((len(offered),), -1)
        self._position[self._known] = torch.arange(len(known))

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Choose a legal action in every environment, of those it was trained with."""
        device = masks.op.device
        self._known = self._known.to(device)
        self._position = self._position.to(device)
        actions, state = self._controller.decide(
            self._observed(observation), self._legal(masks), state, generator
        )
        plants = actions[:, HEAD["op"]] == GERMINATE
        actions = actions.clone()
        actions[:, BLUEPRINT] = torch.where(
            plants, self._known[actions[:, BLUEPRINT]], 0
        )
        return actions, state

    @property
    def decided(self) -> Decision | None:
        """The last decision of a policy, in the restricted action space."""
        return getattr(self._controller, "decided", None)

    def _observed(self, observation: Observation) -> Observation:
        """Return the observation without unknown blueprints."""
        offers, planted = observation.offers, observation.slots.blueprint
        kept = {
            each.name: getattr(offers, each.name).index_select(2, self._known)
            for each in fields(offers)
        }
        planted = torch.where(planted >= 0, self._position[planted.clamp(min=0)], -1)
        return replace(
            observation,
            offers=BlueprintOffers(**kept),
            slots=replace(observation.slots, blueprint=planted),
        )

    def _legal(self, masks: ActionMasks) -> ActionMasks:
        """Return the masks without unknown actions; WAIT stays legal."""
        allowed = self.spec.allowed.to(masks.op.device)
        ops = allowed[HEAD["op"], : len(Op)]
        blueprint = masks.blueprint.index_select(2, self._known)
        slot = masks.slot & ops[:, None]
        slot[:, GERMINATE] &= blueprint.any(dim=2)
        op = masks.op & ops
        op[:, GERMINATE] &= slot[:, GERMINATE].any(dim=1)
        fixed = masks.fixed[..., : self.spec.width] & allowed
        return ActionMasks(op, slot, blueprint, fixed)
