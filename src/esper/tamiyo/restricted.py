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

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.blueprints import Form
from esper.contracts.controller import Controller, ControllerState
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import BlueprintOffers, Observation

Kind = tuple[Form, int]
"""Form and size of a blueprint."""

BLUEPRINT: Final = HEAD["blueprint"]
GERMINATE: Final = Op.GERMINATE.value


class Restricted:
    """A controller in a larger action space than its own.

    Args:
        make: Makes the controller for the part that it knows.
        spec: The full action space.
        kinds: Blueprints that it knows.
        choices: For some heads, the choices that it knows; all if a head is left out.
    """

    def __init__(
        self,
        make: Callable[[ActionSpec], Controller],
        spec: ActionSpec,
        kinds: Collection[Kind],
        choices: Mapping[str, Collection[str]],
    ) -> None:
        offered = range(len(spec.blueprints))
        known = [at for at in offered if _kind(spec, at) in kinds]
        self.notes: tuple[str, ...] = ()
        """Warnings for the user."""
        if not known:
            known = [*offered]
            self.notes = (
                "the controller was trained with none of these blueprints, so what it "
                "plants is a guess; offer "
                f"{', '.join(sorted(f'{f.name.lower()}_{n}' for f, n in kinds))}.",
            )
        self.spec = ActionSpec(
            spec.slots,
            tuple(spec.blueprints[at] for at in known),
            {
                head.name: _known(head.name, [*head.choices], spec, choices)
                for head in HEADS
                if head.choices
            },
        )
        self._controller = make(self.spec)
        self._all = len(known) == len(spec.blueprints)
        self._known = torch.tensor(known)
        self._position = torch.full((len(spec.blueprints),), -1)
        self._position[self._known] = torch.arange(len(known))

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """One legal action per environment, of those it knows."""
        actions, state = self._controller.decide(
            self._observed(observation), self._legal(masks), state, generator
        )
        if self._all:
            return actions, state
        plants = actions[:, HEAD["op"]] == GERMINATE
        chosen = self._known.to(actions.device)[actions[:, BLUEPRINT]]
        actions = actions.clone()
        actions[:, BLUEPRINT] = torch.where(plants, chosen, 0)
        return actions, state

    def _observed(self, observation: Observation) -> Observation:
        """The observation without blueprints that it does not know."""
        if self._all:
            return observation
        offers, planted = observation.offers, observation.slots.blueprint
        known, position = (x.to(planted.device) for x in (self._known, self._position))
        kept = {
            each.name: getattr(offers, each.name).index_select(2, known)
            for each in fields(offers)
        }
        planted = torch.where(planted >= 0, position[planted.clamp(min=0)], -1)
        return replace(
            observation,
            offers=BlueprintOffers(**kept),
            slots=replace(observation.slots, blueprint=planted),
        )

    def _legal(self, masks: ActionMasks) -> ActionMasks:
        """The masks of the actions that it knows; WAIT is always legal."""
        device = masks.op.device
        allowed = self.spec.allowed.to(device)
        ops = allowed[HEAD["op"], : len(Op)]
        blueprint = masks.blueprint.index_select(2, self._known.to(device))
        slot = masks.slot & ops[:, None]
        slot[:, GERMINATE] &= blueprint.any(dim=2)
        op = masks.op & ops
        op[:, GERMINATE] &= slot[:, GERMINATE].any(dim=1)
        fixed = masks.fixed[..., : self.spec.width] & allowed
        return ActionMasks(op, slot, blueprint, fixed)


def _kind(spec: ActionSpec, at: int) -> Kind:
    return spec.blueprints[at].form, spec.blueprints[at].size


def _known(
    head: str,
    all_choices: list[str],
    spec: ActionSpec,
    choices: Mapping[str, Collection[str]],
) -> tuple[str, ...]:
    """Choices of a head that are both allowed and known, or else those allowed."""
    allowed = [c for c in all_choices if c in spec.narrowed.get(head, all_choices)]
    known = choices.get(head, all_choices)
    both = [c for c in allowed if c in known or c == Op.WAIT.name]
    return tuple(both or allowed)
