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
change of topology, and checks that keep broken numbers out of the weights. It reports
what it did, and why it did not grow when it did not.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from math import inf, isfinite, nan
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from esper.contracts.actions import HEAD, ActionMasks, Op
from esper.contracts.errors import EsperWarning, InvalidInputError, InvalidStateError
from esper.contracts.stages import Stage
from esper.contracts.world import Controller, ControllerState, Observation
from esper.environment.clock import ENDS, Stop
from esper.growth.analysis.tracing import Example, random_state, set_random_state
from esper.growth.blueprints.registry import first_line
from esper.growth.blueprints.seed import misfit
from esper.growth.distributed import unwrapped
from esper.growth.history import PLAIN, GrowthDecision, summary
from esper.growth.hooks import TopologyListener, attach_gradients, shadow_gradients
from esper.growth.measurements import MetricScorer, Mode, Track, observe
from esper.growth.model import GrowingModel, NamedOps
from esper.growth.safety import GovernorConfig, Safety
from esper.growth.saving.export import export
from esper.growth.seed_modules import grown_part, host_parameters, uninterrupted
from esper.growth.topology import (
    Receipt,
    Topology,
    action_text,
    refuse_illegal,
    without_slots,
)
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.registry import ControllerChoice, controller_for
from esper.tamiyo.rule_based import explain_no_planting

FORMAT: Final = 8
"""Version of what `state_dict` holds."""
UNSEEN: Final = 20
"""Batches without any seed, one after the other, from which a loss is refused."""
DECISIONS: Final = 30
"""Decisions of a run whose end is known but was not given."""
PLAIN_MEMORY: Final = (Tensor, tuple, list, dict, int, float)
"""What a controller may remember."""
_SAVED: Final[Mapping[str, Callable[[Any], bool]]] = {
    "model": lambda x: isinstance(x, Mapping),
    "groups": lambda x: isinstance(x, list),
    "optimizer": lambda x: isinstance(x, Mapping),
    "governor": lambda x: x is None or isinstance(x, Mapping),
    "track": lambda x: isinstance(x, Mapping),
    "controller": lambda x: x is None or isinstance(x, PLAIN_MEMORY),
    "generator": lambda x: isinstance(x, Tensor),
    "random": lambda x: isinstance(x, Mapping) and "cpu" in x,
    "first_metric": lambda x: isinstance(x, float),
    "losses": lambda x: all(isinstance(y, Tensor) and y.numel() == 1 for y in x or ()),
    "flags": lambda x: isinstance(x, list) and [*map(type, x)] == [bool] * 3,
    "compute": lambda x: isinstance(x, list) and len(x) == 2 and min(x) >= 0,
    "by_hand": lambda x: isinstance(x, list),
    "history": lambda x: isinstance(x, list) and len(x) > 0,
}
"""What a saved Grower holds, and how that looks."""


class Grower(NamedOps[Receipt]):
    """Grows a host while the user trains it.

    Args:
        model: The host, uncompiled; it stays the user's own module. A host that is
            trained on several ranks comes as its `DistributedDataParallel` model. If it
            has a Grower, this one takes over its seeds.
        optimizer: Trains the host; seeds join and leave its groups.
        slots: Places by module name: "fc1->fc2" for new hidden units between two
            layers, "fc2->fc2" beside one layer, "block" for residual seeds; patterns
            such as "*.mlp"; or "auto" for all that `suggest_slots` finds.
        example: What the model is called with: a tensor, a tuple or a dictionary.
        controller: "never", "random", "early", "periodic", "plateau", "tamiyo" (the
            trained one that comes with Esper), or any `Controller`, or what makes
            one: `load_controller(run)`.
        budget: How much may be added: a float is a multiple of the host's
            parameters, an int a number of parameters.
        decisions: How often `step` will be called; with stop="anytime" it is not used.
        stop: "end" if what counts is the end, after so many decisions; "anytime" if
            training may end at any moment: then nothing that is seen depends on it.
        rent: Score that one more multiple of the host's parameters must earn.
        blueprints: Names of what may be planted; all built-in ones if None.
        seeds_per_slot: How many seeds a place can hold.
        governor: Limits of what counts as healthy; None switches the checks off.
        mode: "max" if a larger metric is better, "min" if it is a loss. An accuracy
            in [0, 1] and a loss above 0 are what controllers know best.
        min_age: Decisions a seed spends in a stage before it may be moved by hand.
        tick: Batches in which the tempos of seeds are counted: they train for 0
            (AT_ONCE) to 4 ticks (SLOW), blend in for as many, and hold.
        rng_seed: Where the seeds' weights and the controller's chances come from.
        merge_only: Whether only seeds are planted that `export` folds into the host's
            own layers, so that it has the host's own class.
        wrapper: The `DistributedDataParallel` model that a host is only a part of.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        slots: Sequence[str] | str,
        *,
        example: Example,
        controller: ControllerChoice = "early",
        budget: float | int = 2.0,
        decisions: int | None = None,
        stop: Stop = "end",
        rent: float = 0.0,
        blueprints: Sequence[str] | None = None,
        seeds_per_slot: int = 4,
        governor: GovernorConfig | None = GovernorConfig(),  # noqa: B008
        mode: Mode = "max",
        min_age: int = 1,
        tick: int = 16,
        rng_seed: int = 0,
        merge_only: bool = False,
        wrapper: DistributedDataParallel | None = None,
    ) -> None:
        if stop not in ENDS:
            raise InvalidInputError(f"stop must be 'end' or 'anytime', got {stop!r}.")
        _refuse_unless_whole("seeds_per_slot", seeds_per_slot, least=1)
        _refuse_unless_whole("decisions", 1 if decisions is None else decisions, 1)
        _refuse_unless_whole("tick", tick, least=1)
        _refuse_unless_whole("min_age", min_age, least=0)
        _refuse_unless_whole("rng_seed", rng_seed, least=0)
        _refuse_unless_number("rent", rent, most=1e30)
        _refuse_unless_number("budget", budget, most=inf)
        if not isinstance(governor, GovernorConfig | None):
            raise InvalidInputError(
                f"governor must be a GovernorConfig or None, got {governor!r}."
            )
        if not (isinstance(controller, str | Controller) or callable(controller)):
            raise InvalidInputError(
                f"controller must be a name, a Controller or what makes one, got "
                f"{controller!r}; 'never' leaves all to you."
            )
        model, ranks = unwrapped(model, wrapper)
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(inner, Optimizer):  # accelerate's stands before torch's own
            optimizer = inner
        groups = getattr(optimizer, "param_groups", ())
        held = {parameter for group in groups for parameter in group["params"]}
        with _without_listener(model) as former:
            self.model = GrowingModel(
                model,
                slots,
                example,
                blueprints=blueprints,
                seeds_per_slot=seeds_per_slot,
                min_age=min_age,
                tick=tick,
                rng_seed=rng_seed,
                merge_only=merge_only,
            )
            try:
                self._scorer = MetricScorer(self.model, mode)
                self.controller = controller_for(controller, self.model.spec)
                self.topology = Topology(self.model, optimizer, ranks)
                if ranks.many:
                    reduce = partial(ranks.before_step, self.model.seeds)
                    self.topology.surgery.reduce = reduce
                self.safety = Safety(self.topology, governor)
                self.topology.surgery.after_step = self._after_step
                self.topology.after_load = self._after_load
            except BaseException:
                self.model.undo()
                if hasattr(self, "topology"):
                    surgery = self.topology.surgery
                    surgery.leave([p for p in surgery.joined if p not in held])
                    surgery.detach()
                raise
            former.give_up(self.topology)
        if type(former) is not TopologyListener:
            warnings.warn(
                "the host had a Grower already. This one has taken over its seeds, "
                "with its own settings and an empty history; do not use the other one.",
                EsperWarning,
                stacklevel=2,
            )
        host = self.model.analysis.parameters
        self.budget: float = budget if isinstance(budget, float) else budget / host
        self.decisions = None if stop == "anytime" else decisions or DECISIONS
        self.rent = rent
        if isinstance(budget, int):
            self._warn_of_tiny(budget)
        self._plants = torch.tensor(self._planted_kinds())
        """Whether the controller ever plants each blueprint."""
        self._barren = self._why_barren()
        """Why the controller can plant nothing in these slots; empty if it can."""
        if self._barren:
            warnings.warn(
                f"{self._barren}. esper.suggest_slots(model, example) prints what was "
                "skipped and why; controller='plateau' plants whatever fits.",
                EsperWarning,
                stacklevel=2,
            )
        self._settings = {
            "controller": controller if isinstance(controller, str) else "",
            "kind of controller": type(self.controller).__name__,
            "mode": mode,
            "optimizer": type(optimizer).__name__,
        }
        self._ranks = ranks
        self.history: list[GrowthDecision] = []
        self._optimizer = optimizer
        self._generator = torch.Generator().manual_seed(rng_seed)
        self._controller_state: ControllerState = None
        self._track = Track.fresh(1)
        self._losses: list[Tensor] = []
        self._used_loss = False
        self._skipped_training = False
        self._moved = False
        """Whether an alpha has moved since the last decision."""
        self._batches = 0
        """Since the last decision."""
        self._unseen = 0
        """Batches in a row in which no seed took part."""
        self._compute = 0.0
        """Batches of the host as it was given that cost as much as training so far."""
        self._like = next(model.parameters())
        self._home = (self._like.device, self._like.dtype)
        self._own = [id(p) for p in host_parameters(model).values()]
        self._lagging: WeakKeyDictionary[nn.Module, list[float]] = WeakKeyDictionary()
        """What copies of the host were when they were first seen to lag behind it."""
        self._has_warned = False
        self._by_hand: set[int] = set()
        """Slots with seeds that were planted by hand: the controller leaves them."""

    # In the batch loop.

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of one batch; walk it backwards as usual.

        While seeds train, the closure is called twice, first with them in place.
        Their gradients come with this loss; the host's are what they would be
        without the seeds, to the bit. The closure must not draw random numbers other
        than torch's own.
        """
        if not callable(closure):
            raise InvalidInputError(
                "grower.loss takes a function, since it may call it twice: "
                "grower.loss(lambda: criterion(model(x), y))."
            )
        self._refuse_moved()
        self.safety.before_batch()
        learning: Sequence[nn.Parameter] = ()
        gradients: Sequence[Tensor] = ()
        if len(self.model.seeds) and torch.is_grad_enabled():
            learning = self.model.training_parameters()
        if learning:
            # First: one graph is held at a time, and what the closure or the host
            # keeps of its last call is of the host's own pass.
            with self._ranks.no_sync():
                _, gradients = shadow_gradients(
                    lambda: self._passed(closure),
                    self.model.flow,
                    self.model,
                    learning,
                    self.model.parts()[1],
                )
            self.safety.remove_failed_seeds()
        has_seeds = len(self.model.seeds) > 0
        if has_seeds:
            self.model.flow.ran = False
        loss = self._passed(closure)
        if has_seeds:
            self._refuse_unseen()
            self.safety.remove_failed_seeds()
        if not torch.is_grad_enabled():
            return loss
        number = loss.detach()
        self.safety.after_batch(number)
        self._losses.append(number)
        self._used_loss = True
        if not has_seeds:
            return loss
        loss = self._ranks.reducing(loss, self.model.seeds)
        return attach_gradients(loss, learning, gradients) if learning else loss

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the host and of every seed that is active in it.

        Clip the gradients of these, and seeds in training have no part in the norm;
        `model.parameters()` has them too.
        """
        skip = {id(p) for p in self.model.training_parameters()}
        return (p for p in self.model.parameters() if id(p) not in skip)

    # Once per decision.

    def step(self, metric: float | Callable[[], float]) -> GrowthDecision:
        """Let the controller decide.

        Args:
            metric: How well the host does, on data it is not trained on; a number,
                or a function that measures it; what the function changes of the host
                is put back. Of several ranks, the first one's counts.

        Returns:
            What was decided; true if anything changed.
        """
        self._refuse_moved()
        self._refuse_replaced()
        self.safety.refuse_untrained()
        self._warn_of_average()
        healed = self.safety.check_decision()
        measured = self._ranks.value_of_first(lambda: self._scorer.measure(metric))
        if healed and not callable(metric) and not isfinite(measured) and self.history:
            measured = self.history[-1].metric  # this one was of the broken model
        earlier = [decision.metric for decision in self.history]
        score = self._scorer.score(measured, earlier)
        self.safety.remove_failed_seeds(together=True)
        loss = self._mean_loss()
        track = self._scored_track(measured, earlier).after(
            torch.tensor([score]), torch.tensor([loss], dtype=torch.float32)
        )
        self.safety.remove_broken_seeds()
        macs = self.model.macs / max(self.model.analysis.macs, 1)
        self._compute += self._batches * macs
        self._batches = 0
        if not self._used_loss:
            self._pass_training()
        observation = observe(
            self.model,
            track,
            horizon=self.decisions,
            compute=self._compute,
            budget=self.budget,
            rent=self.rent,
        )
        masks = compute_masks(observation, self.model.spec)
        masks = without_slots(masks, self._slots_by_hand())
        actions, state = self.controller.decide(
            observation, masks, self._controller_state, self._generator
        )
        self._ranks.from_first([actions])
        refuse_illegal(actions, masks)
        op = Op(int(actions[0, HEAD["op"]]))
        why_not = self._why_not(observation, masks) if op is Op.WAIT else ""
        action = action_text(actions, self.model.slots, self.model.spec)
        with uninterrupted():
            if op is not Op.WAIT:
                self.topology.act(actions)
            self._track, self._controller_state = track, state
            self.topology.tick(0)
            receipts, events = self.topology.collect()
            decision = GrowthDecision(
                step=len(self.history),
                metric=measured,
                loss=loss,
                action=action,
                grew=bool(receipts or events) or self._moved,
                why_not=why_not,
                parameters=self.model.count().parameters,
                macs=self.model.macs,
                receipts=receipts,
                events=events,
                incidents=tuple(self.safety.incidents),
            )
            self.history.append(decision)
            self.topology.step = len(self.history)
            self._ranks.from_first(self.model.buffers())
            self._ranks.refuse_different(self.model)
            self._losses, self._used_loss, self._moved = [], False, False
            self.safety.incidents = []
            self.safety.topology_changed()
            return decision

    # What came of it.

    def export(self, *, merge: bool = True) -> nn.Module:
        """A plain module that computes what the grown host computes."""
        return export(self.model, merge=merge)

    def follow(self, average: nn.Module) -> None:
        """Let an average of the host, such as an `AveragedModel`, grow with it.

        Make it after the Grower and update it as usual. A plain copy of a host does
        not follow: it stays what it was.
        """
        self.topology.add_copy(average)

    def summary(self) -> str:
        """What grew, what it cost and why nothing grew, on one page."""
        notes: list[str] = [*getattr(self.controller, "notes", ())]
        if self._barren:
            notes.append(f"{self._barren}.")
        if self._skipped_training:
            notes.append(
                "grower.loss was not used, so seeds were not trained beside the host "
                "before they were blended in."
            )
        if not self.history:
            notes.append("grower.step was not called yet, so nothing was decided.")
        return summary(self.model, self.history, notes)

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def detach(self) -> None:
        """Take seeds and hooks off the host and the optimiser."""
        if self.topology.is_replaced:
            return
        with uninterrupted():
            self.topology.surgery.leave([*self.topology.surgery.joined])
            self.topology.surgery.detach()
            self.model.detach()

    # Saving and resuming.

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on to the bit, as plain data and tensors.

        Build the same model, optimiser and Grower from your own factory in the new
        process, then `load_state_dict`. A scheduler and a data loader are yours. The
        snapshot to roll back to is not saved: after loading, one is taken.
        """
        monitor = self.safety.monitor
        pending = GrowthDecision(
            step=-1,
            metric=nan,
            loss=nan,
            receipts=tuple(self.topology.receipts),
            events=tuple(self.topology.events),
            incidents=tuple(self.safety.incidents),
        )
        return {
            "format": FORMAT,
            "model": self.model.state_dict(),
            "groups": self.topology.surgery.names(),
            "optimizer": self._optimizer.state_dict(),
            "governor": monitor.state_dict() if monitor else None,
            "track": asdict(self._track),
            "controller": self._controller_state,
            "generator": self._generator.get_state(),
            "random": random_state(self.model),
            "first_metric": self.history[0].metric if self.history else nan,
            "losses": [*self._losses],
            "flags": [self._used_loss, self._skipped_training, self._moved],
            "compute": [self._batches, self._compute],
            "by_hand": sorted(self._slots_by_hand()),
            "history": PLAIN.dump_python([*self.history, pending], mode="json"),
            "settings": dict(self._settings),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where another process stopped; all of it, or nothing changes."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            raise InvalidInputError(
                "this is no saved Grower, or one of another version; pass what "
                "state_dict() returned."
            )
        self._refuse_given_up()
        self._refuse_damaged(state)
        before = tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, self.state_dict()
        )
        with uninterrupted():
            put_back = (
                self.model.seeds.restore_point(),
                self.topology.surgery.restore_point(),
            )
            try:
                self._put(state)
            except BaseException as error:
                for undo in put_back:
                    undo()
                self._put(before)
                if isinstance(error, InvalidInputError) or not isinstance(
                    error, Exception
                ):
                    raise
                raise InvalidInputError(
                    f"this saved Grower cannot be loaded: {first_line(error)}"
                ) from error

    def _refuse_damaged(self, state: Mapping[str, Any]) -> None:
        """Refuse what would be taken as it is, but is none of a Grower's states."""
        missing = [*_SAVED.keys() - state.keys()]
        odd = [name for name, kind in _SAVED.items() if not kind(state.get(name))]
        if missing or odd:
            raise InvalidInputError(
                f"this saved Grower is damaged: its {(missing or odd)[0]!r} is "
                f"{'missing' if missing else 'none'}."
            )
        self._refuse_other_settings(state.get("settings", {}))
        self.model.seeds.validated(state["model"], "host.")
        own = {f"host.{name}" for name in host_parameters(self.model.host)}
        for name in own & state["model"].keys():
            value = state["model"][name]
            if not isinstance(value, Tensor) or not value.isfinite().all():
                raise InvalidInputError(f"{name} of the saved Grower is not finite.")

    def _refuse_other_settings(self, saved: Mapping[str, Any]) -> None:
        """Refuse a run that was begun otherwise; older states do not say how."""
        if not isinstance(saved, Mapping):
            raise InvalidInputError(
                "this saved Grower is damaged: its 'settings' is none."
            )
        for name, own in self._settings.items():
            was = saved.get(name, own)
            unnamed = name == "controller" and "" in (was, own)
            if was != own and not unnamed:
                raise InvalidInputError(
                    f"the saved Grower's {name} was {was!r} and this one's is {own!r}; "
                    "build it as at the first time."
                )

    def _put(self, state: Mapping[str, Any]) -> None:
        """Be as a state says."""
        self.topology.after_load = None
        try:
            self.model.load_state_dict(state["model"])
        finally:
            self.topology.after_load = self._after_load
        named = dict(self.model.host.named_parameters())
        self.topology.surgery.restore(state["groups"], named)
        # Torch's optimisers go on in the very tensors that they are given.
        self._optimizer.load_state_dict(deepcopy(state["optimizer"]))
        self.topology.surgery.refuse_damaged_state()
        if self.safety.monitor is not None and state["governor"] is not None:
            self.safety.monitor.load_state_dict(state["governor"])
        self._track = Track.restored(state["track"])
        self._controller_state = state["controller"]
        self._generator.set_state(state["generator"])
        self._losses = [*state["losses"]]
        self._used_loss, self._skipped_training, self._moved = state["flags"]
        self._batches, self._compute = state["compute"]
        self._by_hand = {*state["by_hand"]}
        *self.history, unfinished = PLAIN.validate_python(state["history"])
        self.topology.step = len(self.history)
        self.topology.receipts = [*unfinished.receipts]
        self.topology.events = [*unfinished.events]
        self.safety.incidents = [*unfinished.incidents]
        set_random_state(state["random"])
        if not self.safety.take_snapshot():
            self.safety.topology_changed()

    # Inside.

    def _warn_of_tiny(self, budget: int) -> None:
        """Warn of a number of parameters that was meant as a multiple of the host."""
        places, kinds = len(self.model.analysis.places), self.model.spec.blueprints
        prices = [self.model.price(p, kind) for p in range(places) for kind in kinds]
        cheapest = min((price.parameters for price in prices if price), default=0)
        if 0 < budget < cheapest:
            warnings.warn(
                f"budget={budget} is a number of parameters, and the smallest seed "
                f"takes {cheapest}; write {budget}.0 for {budget} times the host's.",
                EsperWarning,
                stacklevel=3,
            )

    def _warn_of_average(self) -> None:
        """Warn once of a copy of the host that is updated and does not grow with it."""
        for copy in () if self._has_warned else self.topology.lagging_copies():
            own = [*host_parameters(copy.host).values()]
            sums = [float(p.detach().sum()) for p in (own[0], own[-1])]
            if self._lagging.setdefault(copy, sums) != sums:
                self._has_warned = True
                warnings.warn(
                    "a copy of the host is updated but does not grow with it. Call "
                    "grower.follow(copy) when it is made, or copy the host again.",
                    EsperWarning,
                    stacklevel=3,
                )
                return

    def _scored_track(self, metric: float, earlier: Sequence[float]) -> Track:
        """The track so far, from the start if a metric has changed the scale."""
        scores = self._scorer.scores([*earlier, metric])[:-1]
        if not earlier or scores == self._scorer.scores(earlier):
            return self._track
        track = Track.fresh(1)
        for score, decision in zip(scores, self.history, strict=True):
            track = track.after(torch.tensor([score]), torch.tensor([decision.loss]))
        return track

    def _planted_kinds(self) -> list[bool]:
        """Whether the controller ever plants each blueprint; true where unknown."""
        names = getattr(self.controller, "plants", None)
        kinds = self.model.spec.blueprints
        return [names is None or kind.name in names for kind in kinds]

    def _why_barren(self) -> str:
        """Why the controller can plant nothing in these slots; empty if it can."""
        places, kinds = self.model.analysis.places, self.model.spec.blueprints
        wanted = [k for k, planted in zip(kinds, self._plants, strict=True) if planted]
        slots = range(len(places))
        if any(self.model.price(slot, kind) for slot in slots for kind in wanted):
            return ""
        names = ", ".join(kind.name for kind in wanted[:4])
        why = misfit(wanted[0], places[0].geometry) or "it would not merge"
        return (
            f"nothing will grow: the controller plants {names}, which fits no slot "
            f"({places[0].site.name}: {why})"
        )

    def _why_not(self, observation: Observation, masks: ActionMasks) -> str:
        """Why nothing was planted, by what the controller ever plants."""
        if self._barren:
            return self._barren
        kinds = masks.blueprint & self._plants
        slot, op = masks.slot.clone(), masks.op.clone()
        slot[:, Op.GERMINATE] &= kinds.any(dim=2)
        op[:, Op.GERMINATE] = slot[:, Op.GERMINATE].any(dim=1)
        masks = replace(masks, op=op, slot=slot, blueprint=kinds)
        offers = observation.offers
        offers = replace(offers, fits=offers.fits & self._plants)
        return explain_no_planting(replace(observation, offers=offers), masks)

    def _passed(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of a closure, which has no part in what was called before it."""
        if len(self.model.seeds):
            for hooks in self.model.hooks:
                hooks.begin()
        return _one_number(closure())

    def _op(self, op: Op, slot: str, **choices: str) -> Receipt:
        self._refuse_given_up()
        with uninterrupted():
            receipt = self.topology.act(self.model.encode(op, slot, **choices))
            if op is Op.GERMINATE:
                self._by_hand.add(self.model.index(slot))
            self.safety.topology_changed()
        return receipt

    def _slots_by_hand(self) -> set[int]:
        """Slots whose seeds were planted by hand and are still there."""
        stages = self.model.states.stage[0]
        self._by_hand = {s for s in self._by_hand if int(stages[s]) != Stage.DORMANT}
        return self._by_hand

    def _mean_loss(self) -> float:
        """Of the batches since the last decision that gave a number."""
        none = [torch.zeros(0)]
        losses = torch.cat([x.float().reshape(1) for x in self._losses] or none)
        known = losses[losses.isfinite()]
        if self._ranks.many:
            return self._ranks.mean(float(known.double().sum()), len(known))
        return float(known.mean())

    def _after_load(self) -> None:
        """The user has loaded a state into the host."""
        self._own = [id(p) for p in host_parameters(self.model.host).values()]
        if not self.safety.take_snapshot():
            self.safety.topology_changed()

    def _after_step(self) -> None:
        """One batch more: seeds train, blend and fade by their tempos."""
        self._batches += 1
        if self.model.seeds.count_batch():
            return
        before = self.model.states
        self.topology.tick(1, decision=False)
        after = self.model.states
        self._moved |= not torch.equal(before.alpha, after.alpha)
        moved_on = before.stage != after.stage
        if bool(moved_on.any()):
            trained = moved_on & (before.stage == Stage.TRAINING)
            self._skipped_training |= bool(trained.any()) and not self._used_loss
            self.safety.topology_changed()

    def _pass_training(self) -> None:
        """Without `grower.loss` a seed cannot train beside the host."""
        for slot, name in enumerate(self.model.slots):
            grown = int(self.model.states.age[0, slot]) >= self.model.spec.slots.min_age
            if self.model.stage(name) is Stage.TRAINING and grown:
                self._skipped_training = True
                self.advance(name)

    def _refuse_replaced(self) -> None:
        own = host_parameters(self.model.host).values()
        if self._own != [id(parameter) for parameter in own]:
            raise InvalidStateError(
                "the host's parameters are other objects than when the Grower was "
                "built; load weights into them in place (without assign=True)."
            )

    def _refuse_unseen(self) -> None:
        """Refuse a loss that passes the seeds by, as some compiled graphs do."""
        self._unseen = 0 if self.model.flow.ran else self._unseen + 1
        if self._unseen >= UNSEEN:
            self._unseen = 0
            raise InvalidStateError(
                f"no seed took part in the last {UNSEEN} batches: the loss calls a "
                "copy of the host, or a compiled graph that leaves its hooks out; call "
                "the host itself, and compile what export() returns."
            )

    def _refuse_given_up(self) -> None:
        if self.topology.is_replaced:
            raise InvalidStateError(
                "a newer Grower has taken this host over; use that one."
            )

    def _refuse_moved(self) -> None:
        self._refuse_given_up()
        like = self._like
        if (like.device, like.dtype) != self._home:
            raise InvalidStateError(
                f"the host was {self._home[1]} on {self._home[0]} and is {like.dtype} "
                f"on {like.device} now; move it before building the Grower."
            )


@contextmanager
def _without_listener(host: nn.Module) -> Iterator[TopologyListener]:
    """Gives what follows a host, which it does not in the block.

    It does again if the block fails.
    """
    before = grown_part(host)
    if before is None:
        yield TopologyListener()
        return
    former, link = before.flow.following, before.flow.listener
    before.flow.listener = None
    try:
        yield former
    except BaseException:
        before.flow.listener = link
        raise


def _one_number(loss: Tensor) -> Tensor:
    """What a closure has returned, if that is a loss."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise InvalidInputError("the closure must return one number, as a tensor.")
    return loss


def _refuse_unless_whole(name: str, value: object, least: int) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least:  # type: ignore[operator]
        raise InvalidInputError(
            f"{name} must be a whole number of at least {least}, got {value!r}."
        )


def _refuse_unless_number(name: str, value: object, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= most:  # type: ignore[operator]
        raise InvalidInputError(
            f"{name} must be a number of at least 0, got {value!r}."
        )
