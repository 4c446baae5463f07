"""A policy that says only what it has learnt to say.

A policy can point at any blueprint, also at forms and sizes that it never saw, where
its choice means nothing. So it is shown only those that it was trained with: others
are cut out of what it sees and of what it may say. What it says is put back into the
action space of whoever asked. If nothing that it knows is offered, it is shown
everything, and `notes` says so; if nothing that it knows can be planted now, it waits
or tends what is there.
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


class Familiar:
    """A controller in an action space of which it knows a part.

    Args:
        make: What makes the controller for the part that it knows.
        spec: What may be said.
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
        """What whoever uses it should know."""
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
        self._places = torch.full((len(spec.blueprints),), -1)
        self._places[self._known] = torch.arange(len(known))

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """One legal sentence per environment, of what it knows."""
        actions, state = self._controller.decide(
            self._seen(observation), self._possible(masks), state, generator
        )
        if self._all:
            return actions, state
        plants = actions[:, HEAD["op"]] == GERMINATE
        chosen = self._known.to(actions.device)[actions[:, BLUEPRINT]]
        actions = actions.clone()
        actions[:, BLUEPRINT] = torch.where(plants, chosen, 0)
        return actions, state

    def _seen(self, observation: Observation) -> Observation:
        """What is seen of the blueprints that it knows."""
        if self._all:
            return observation
        offers, planted = observation.offers, observation.slots.blueprint
        known, places = (x.to(planted.device) for x in (self._known, self._places))
        there = {
            each.name: getattr(offers, each.name).index_select(2, known)
            for each in fields(offers)
        }
        planted = torch.where(planted >= 0, places[planted.clamp(min=0)], -1)
        return replace(
            observation,
            offers=BlueprintOffers(**there),
            slots=replace(observation.slots, blueprint=planted),
        )

    def _possible(self, masks: ActionMasks) -> ActionMasks:
        """What is possible of what it knows; to wait always is."""
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
