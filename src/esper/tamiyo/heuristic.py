"""A sensible hand-written controller: plant what promises most, keep what contributes.

One table of scores over (op, slot), highest legal one first: keep a holding seed that
earns its rent, prune one that does not, move grown seeds on, plant the best offer
whose promise exceeds its rent, and otherwise wait. Blends are gentle: slow and full.
"""

import torch
from jaxtyping import Float, Int64
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, NUM_HEADS, RELEVANT, Op
from esper.contracts.controller import ControllerState
from esper.contracts.masks import ActionMasks
from esper.contracts.observation import Observation


class PromiseGreedy:
    """Plants by promise, keeps by contribution."""

    def __init__(self, patience: int = 2) -> None:
        self.patience = patience
        """Steps a seed may train or blend before it is moved on."""

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """The best-scored legal (op, slot), with gentle settings."""
        offers, slots, host = observation.offers, observation.slots, observation.host
        net = offers.promise - host.rent[:, None, None] * offers.parameters
        net = torch.where(offers.promise_known, net, 0.01)  # unknown: worth a trial
        net = torch.where(masks.blueprint, net, -torch.inf)
        best_net, best_blueprint = net.max(dim=-1)  # [env, slot]
        scores = self._scores(observation, best_net)
        scores = torch.where(masks.slot, scores, -torch.inf)
        scores[:, Op.WAIT, 0] = 0.0
        choice = scores.flatten(1).argmax(dim=1)
        op, slot = choice // slots.stage.shape[1], choice % slots.stage.shape[1]

        envs, device = op.shape[0], op.device
        # The last allowed choice of each head is its gentlest or fullest one.
        width = masks.fixed.shape[1]
        order = torch.arange(width, device=device)
        last = torch.where(masks.fixed, order, -1).amax(dim=1)
        actions = last.expand(envs, NUM_HEADS).clone()
        actions[:, HEAD["style"]] = masks.fixed[HEAD["style"]].to(torch.int8).argmax()
        actions[:, HEAD["op"]] = op
        actions[:, HEAD["slot"]] = slot
        actions[:, HEAD["blueprint"]] = best_blueprint[torch.arange(envs), slot]
        return torch.where(RELEVANT.to(device)[op], actions, 0), None

    def _scores(
        self, observation: Observation, best_net: Float[Tensor, "env slot"]
    ) -> Float[Tensor, "env op slot"]:
        slots, rent = observation.slots, observation.host.rent
        earns = slots.contribution > rent[:, None] * slots.parameters
        judged = slots.contribution_measured
        grown = slots.age >= self.patience
        never = torch.full_like(best_net, -1.0)
        scores = {
            Op.WAIT: never,
            Op.GERMINATE: best_net.clamp(-1.0, 1.0),
            Op.ADVANCE: torch.where(grown, 2.0, never),
            Op.SET_ALPHA: never,
            Op.PRUNE: torch.where(judged & ~earns, 3.0, never),
            Op.FOSSILIZE: torch.where(judged & earns, 4.0, never),
        }
        return torch.stack([scores[op] for op in Op], dim=1)
