"""Growing a network inside the user's own training loop.

    grower = esper.Grower(model, optimizer, slots=["fc1->fc2"], example=x)
    for epoch in range(epochs):
        for x, y in loader:
            loss = grower.loss(lambda: criterion(model(x), y))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        grower.step(metric=accuracy())
    grown = grower.export()

`Grower` is a `GrowingModel` with a controller, an optimiser whose state follows every
change of topology, and a guard that lets nothing broken into the weights. It says what
it did, and why it did not grow when it did not.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from math import isfinite, nan
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper.contracts.actions import HEAD, Op
from esper.contracts.controller import Controller, ControllerState
from esper.contracts.errors import BadInput, CallOrder
from esper.contracts.stages import Stage
from esper.growth.by_hand import ByHand
from esper.growth.calls import Example
from esper.growth.export import export
from esper.growth.governor import GovernorConfig
from esper.growth.guard import Guard
from esper.growth.hand import Hand
from esper.growth.history import (
    Decision,
    from_plain,
    pending,
    summary,
    to_plain,
)
from esper.growth.initialisers import find_initialiser
from esper.growth.junction import Sample
from esper.growth.measure import Ruler
from esper.growth.model import GrowingModel
from esper.growth.observe import Track, observe
from esper.growth.optimiser import Newborn
from esper.growth.quarantine import Quarantine
from esper.growth.shadow import carry, shadow_gradients
from esper.growth.snapshots import random_state, set_random_state
from esper.growth.suggest import suggest_slots
from esper.growth.words import in_words, refuse_illegal
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.registry import Maker, controller_for
from esper.tamiyo.rule_based import explain_no_planting

FORMAT: Final = 1
"""Version of what `state_dict` holds."""


class Grower(ByHand):
    """Grows a host while the user trains it.

    Args:
        model: The host, uncompiled and unwrapped; it stays the user's own module.
        optimizer: Trains the host; seeds join and leave its groups.
        slots: Places by module name: "fc1->fc2" for new hidden units between two
            layers, "fc2->fc2" beside one layer, "block" for residual seeds; or "auto".
        example: What the model is called with: a tensor, a tuple or a dictionary.
        controller: "never", "random", "early", "periodic", "plateau", "promise",
            "tamiyo" (the trained one that comes with Esper), or any `Controller`, or
            what makes one: `load_controller(run)`.
        budget: How much may be added: a float is a multiple of the host's
            parameters, an int a number of parameters.
        decisions: How often `step` will be called; schedules need to know.
        rent: Score that one more multiple of the host's parameters must earn.
        blueprints: Names of what may be planted; all built-in ones if None.
        seeds_per_slot: How many seeds a place can hold.
        initialiser: How seeds start: "zero_out", "gradmax" or "tiny".
        newborn: Learning rate of new parameters, relative to their group's.
        governor: Limits of what counts as healthy; None switches the guard off.
        mode: "max" if a larger metric is better (it must lie in [0, 1]), "min" if
            it is a loss.
        min_age: Decisions a seed spends in a stage before it may be moved.
        rng_seed: Where the seeds' weights and the controller's chances come from.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        slots: Sequence[str] | str,
        *,
        example: Example,
        controller: str | Controller | Maker = "early",
        budget: float | int = 2.0,
        decisions: int = 30,
        rent: float = 0.0,
        blueprints: Sequence[str] | None = None,
        seeds_per_slot: int = 4,
        initialiser: str = "zero_out",
        newborn: Newborn | None = None,
        governor: GovernorConfig | None = GovernorConfig(),  # noqa: B008
        mode: str = "max",
        min_age: int = 1,
        rng_seed: int = 0,
    ) -> None:
        if decisions < 1:
            raise BadInput(f"decisions must be at least 1, got {decisions}.")
        if not isfinite(rent) or rent < 0:
            raise BadInput(f"rent must be a number of at least 0, got {rent}.")
        if budget != budget or budget < 0:
            raise BadInput(f"budget must not be negative, got {budget}.")
        find_initialiser(initialiser)
        if isinstance(slots, str):
            slots = _automatic(model, slots, example)
        self.model = GrowingModel(
            model,
            slots,
            example,
            blueprints=blueprints,
            seeds_per_slot=seeds_per_slot,
            min_age=min_age,
            rng_seed=rng_seed,
        )
        self.guard: Guard | None = None
        self.quarantine = Quarantine(self.model)
        try:
            self._ruler = Ruler(self.model, mode)
            self.controller = controller_for(controller, self.model.spec)
            # The guard's hook comes first: what it refuses, nobody else shall see.
            if governor is not None and isinstance(optimizer, Optimizer):
                self.guard = Guard(
                    self.model,
                    optimizer,
                    governor,
                    self.quarantine.report,
                    self.quarantine.give_up,
                )
            self.hand = Hand(self.model, optimizer, newborn)
        except BaseException:
            self.model.detach()
            if self.guard is not None:
                self.guard.detach()
            raise
        self.quarantine.guard, self.quarantine.hand = self.guard, self.hand
        host = self.model.survey.parameters
        self.budget: float = budget if isinstance(budget, float) else budget / host
        self.decisions, self.rent = decisions, rent
        self.initialiser = initialiser
        self.history: list[Decision] = []
        self._optimizer = optimizer
        self._generator = torch.Generator().manual_seed(rng_seed)
        self._remembered: ControllerState = None
        self._track = Track.fresh(1)
        self._losses: list[Tensor] = []
        self._used_loss = False
        self._skipped_training = False
        like = next(model.parameters())
        self._home = (like.device, like.dtype)
        self._own = [id(parameter) for parameter in model.parameters()]

    # In the batch loop.

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of one batch; walk it backwards as usual.

        While seeds train, the closure is called a second time with them in place.
        Their gradients come with this loss; the host's are what they would be
        without the seeds, to the bit. The closure must not draw random numbers other
        than torch's own.
        """
        self._refuse_moved()
        if self.guard is not None:
            self.guard.before_batch()
        loss = closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BadInput("the closure must return one number, as a tensor.")
        self.quarantine.remove_failed()
        if not torch.is_grad_enabled():
            return loss
        if self.guard is not None:
            self.guard.after_batch(loss)
        self._used_loss = True
        self._losses.append(loss.detach())
        learning = self.model.training_parameters()
        if not learning:
            return loss
        _, gradients = shadow_gradients(
            closure,
            self.model.flow,
            self.model.host,
            self.model,
            learning,
            self.model.training_seeds().values(),
        )
        self.quarantine.remove_failed()
        return carry(loss, learning, gradients)

    def parameters(self) -> Iterator[nn.Parameter]:
        """What the host's own step moves: host and seeds that it feels.

        Clip the gradients of these; seeds in training stay out of the host's step.
        """
        skip = {id(p) for p in self.model.training_parameters()}
        return (p for p in self.model.parameters() if id(p) not in skip)

    # Once per decision.

    def step(self, metric: float | Callable[[], float]) -> Decision:
        """Let the controller decide.

        Args:
            metric: How well the host does, on data it is not trained on; a number,
                or a function that measures it. With a function, the contribution of
                every seed is measured too, by leaving it out.

        Returns:
            What was decided; true if anything changed.
        """
        self._refuse_moved()
        self._refuse_replaced()
        healed = self.guard is not None and self.guard.decision()
        measured = self._ruler.measure(metric)
        if healed and not callable(metric) and not isfinite(measured) and self.history:
            measured = self.history[-1].metric  # this one was of the broken model
        score = self._ruler.score(measured)
        self.quarantine.remove_failed()
        loss = nan
        if self._losses:
            loss = float(
                torch.stack([x.float().reshape(()) for x in self._losses]).mean()
            )
        track = self._track.after(
            torch.tensor([score]), torch.tensor([loss], dtype=torch.float32)
        )
        self.quarantine.remove_broken()
        contributions = self._ruler.contributions(metric, score)
        self.quarantine.remove_failed()
        if not self._used_loss:
            self._pass_training()
        observation = observe(
            self.model,
            track,
            horizon=self.decisions,
            budget=self.budget,
            rent=self.rent,
            contributions=contributions,
        )
        masks = compute_masks(observation, self.model.spec)
        actions, remembered = self.controller.decide(
            observation, masks, self._remembered, self._generator
        )
        refuse_illegal(actions, masks)
        op = Op(int(actions[0, HEAD["op"]]))
        why_not = explain_no_planting(observation, masks) if op is Op.WAIT else ""
        said = in_words(actions, self.model.slots, self.model.spec)
        self.hand.act(actions, self.initialiser)
        self._track, self._remembered = track, remembered
        self.hand.let_pass()
        receipts, events = self.hand.collect()
        decision = Decision(
            step=len(self.history),
            metric=measured,
            loss=loss,
            said=said,
            grew=bool(receipts or events),
            why_not=why_not,
            parameters=self.model.survey.parameters + self.model.parameters_added,
            macs=self.model.macs,
            receipts=receipts,
            events=events,
            incidents=tuple(self.quarantine.incidents),
        )
        self.history.append(decision)
        self.hand.step = len(self.history)
        self._losses, self._used_loss = [], False
        self.quarantine.incidents = []
        for junction in self.model.junctions:
            junction.forget()
        if self.guard is not None:
            self.guard.follow()
        return decision

    # What came of it.

    def export(self, *, merge: bool = True) -> nn.Module:
        """A plain module that computes what the grown host computes."""
        return export(self.model, merge=merge)

    def summary(self) -> str:
        """The story on one page."""
        notes: list[str] = [*getattr(self.controller, "notes", ())]
        if self._skipped_training:
            notes.append(
                "grower.loss was not used, so seeds were not trained beside the host "
                "before they were blended in."
            )
        return summary(self.model, self.history, notes)

    def __str__(self) -> str:
        """The story on one page."""
        return self.summary()

    def detach(self) -> None:
        """Take all hooks off the host and the optimiser; seeds are not felt then."""
        self.model.detach()
        self.hand.surgeon.detach()
        if self.guard is not None:
            self.guard.detach()

    # Saving and resuming.

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on to the bit, as plain data and tensors.

        Build the same model, optimiser and Grower from your own factory in the new
        process, then `load_state_dict`. A scheduler and a data loader are yours. The
        guard's snapshot is not saved: after loading, there is one of that moment.
        """
        return {
            "format": FORMAT,
            "model": self.model.state_dict(),
            "groups": self.hand.surgeon.names(),
            "optimizer": self._optimizer.state_dict(),
            "surgeon": self.hand.surgeon.state_dict(),
            "governor": self.guard.governor.state_dict() if self.guard else None,
            "track": asdict(self._track),
            "remembered": self._remembered,
            "generator": self._generator.get_state(),
            "random": random_state(dict(self.model.named_parameters())),
            "first_metric": self._ruler.first,
            "losses": [*self._losses],
            "flags": [self._used_loss, self._skipped_training],
            "passed": [junction.passed for junction in self.model.junctions],
            "samples": [
                [[s.given, s.answer, s.rows, s.gradient] for s in junction.samples]
                for junction in self.model.junctions
            ],
            "history": [to_plain(decision) for decision in self.history],
            "pending": to_plain(
                pending(*self.hand.pending(), tuple(self.quarantine.incidents))
            ),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another process stopped."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise BadInput(
                "this is no saved Grower, or one of another version; pass what "
                "state_dict() returned."
            )
        self.model.load_state_dict(state["model"])
        self.hand.surgeon.restore(state["groups"], self.hand.named_parameters())
        # Torch's optimisers go on in the very tensors that they are given.
        self._optimizer.load_state_dict(deepcopy(state["optimizer"]))
        self.hand.surgeon.load_state_dict(state["surgeon"])
        if self.guard is not None and state["governor"] is not None:
            self.guard.governor.load_state_dict(state["governor"])
        self._track = Track(**state["track"])
        self._remembered = state["remembered"]
        self._generator.set_state(state["generator"])
        self._ruler.first = state["first_metric"]
        self._losses = [*state["losses"]]
        self._used_loss, self._skipped_training = state["flags"]
        for junction, passed, samples in zip(
            self.model.junctions, state["passed"], state["samples"], strict=True
        ):
            junction.forget()
            junction.passed = passed
            junction.samples.extend(Sample(*sample) for sample in samples)
        self.hand.step = len(state["history"])
        self.history = [from_plain(decision) for decision in state["history"]]
        unfinished = from_plain(state["pending"])
        self.hand.restore(unfinished.receipts, unfinished.events)
        self.quarantine.incidents = [*unfinished.incidents]
        set_random_state(state["random"])
        if self.guard is not None and not self.guard.take():
            self.guard.follow()

    # Inside.

    def _pass_training(self) -> None:
        """Without `grower.loss` a seed cannot train beside the host."""
        for slot, name in enumerate(self.model.slots):
            grown = int(self.model.lives.age[0, slot]) >= self.model.spec.slots.min_age
            if self.model.stage(name) is Stage.TRAINING and grown:
                self._skipped_training = True
                self.advance(name)

    def _refuse_replaced(self) -> None:
        if self._own != [id(parameter) for parameter in self.model.host.parameters()]:
            raise CallOrder(
                "the host's parameters are other objects than when the Grower was "
                "built; load weights into them in place (without assign=True)."
            )

    def _refuse_moved(self) -> None:
        like = next(self.model.host.parameters())
        if (like.device, like.dtype) != self._home:
            raise CallOrder(
                f"the host was {self._home[1]} on {self._home[0]} and is {like.dtype} "
                f"on {like.device} now; move it before building the Grower."
            )


def _automatic(model: nn.Module, slots: str, example: Example) -> tuple[str, ...]:
    if slots != "auto":
        raise BadInput(f"slots must be a list of names or 'auto', got {slots!r}.")
    return suggest_slots(model, example)
