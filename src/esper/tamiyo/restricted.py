"""A controller restricted to the actions that it was trained with.

A policy can point at any blueprint, also at forms and sizes that it never saw, where
its choice means nothing. So the blueprints and choices that it was not trained with are
cut out of observation and masks, and what it chooses is mapped back into the full
action space. If none of the offered blueprints is known, it sees all of them, and
`notes` says so; if none of them can be planted now, it waits or moves other seeds on.
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

BLUEPRINT: Final = HEAD["blueprint"]
GERMINATE: Final = Op.GERMINATE.value


class Restricted:
    """A controller in a larger action space than its own.

    Args:
        make: Makes the controller for the part that it knows.
        spec: The full action space.
        names: Blueprints that it knows.
        choices: For some heads, the choices that it knows; all if a head is left out.
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
                "the controller was trained with none of these blueprints, so what it "
                f"plants is a guess; offer {', '.join(sorted(names))}.",
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
        """Names of the blueprints that it ever plants."""
        self.spec = ActionSpec(spec.slots, blueprints, narrowed)
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
        """One legal action per environment, of those it knows."""
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

    def _observed(self, observation: Observation) -> Observation:
        """The observation without blueprints that it does not know."""
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
        """The masks of the actions that it knows; WAIT is always legal."""
        allowed = self.spec.allowed.to(masks.op.device)
        ops = allowed[HEAD["op"], : len(Op)]
        blueprint = masks.blueprint.index_select(2, self._known)
        slot = masks.slot & ops[:, None]
        slot[:, GERMINATE] &= blueprint.any(dim=2)
        op = masks.op & ops
        op[:, GERMINATE] &= slot[:, GERMINATE].any(dim=1)
        fixed = masks.fixed[..., : self.spec.width] & allowed
        return ActionMasks(op, slot, blueprint, fixed)
