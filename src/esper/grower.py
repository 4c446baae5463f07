"""Grow a network in your own training loop.

    grower = esper.Grower(model, optimizer, example=x)
    for epoch in range(epochs):
        for x, y in loader:
            loss = criterion(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        grower.step(metric=accuracy())
    grown = grower.export()

Seeds that are kept become a part of the host's own layers. Only seeds that train in a
shadow pass need `loss = grower.loss(lambda: criterion(model(x), y))`.

`Grower` combines a `GrowingModel`, a controller and your optimizer. It updates the
optimizer state when the topology changes and keeps non-finite values out of the
weights. The history records every decision and why nothing was planted.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from math import isfinite, nan
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, finalize

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from esper.contracts.actions import HEAD, NUM_HEADS, ActionMasks, Op
from esper.contracts.checks import require_int, require_number
from esper.contracts.errors import EsperWarning, InvalidInputError, InvalidStateError
from esper.contracts.messages import described
from esper.contracts.stages import Stage
from esper.contracts.world import Controller, ControllerState, Observation
from esper.environment.clock import ENDS, Stop
from esper.files import FORMAT, require_readable
from esper.growth.actions import (
    DepthBlueprint,
    NamedOps,
    Receipt,
    action_text,
    refuse_illegal,
    without_slots,
)
from esper.growth.analysis.tracing import Example, random_state, set_random_state
from esper.growth.blueprints.registry import Cost, misfit
from esper.growth.depth import match_depths
from esper.growth.distributed import unwrapped
from esper.growth.history import (
    PLAIN,
    GrowthDecision,
    changed_widths,
    changes_of,
    first_widths,
    layer_widths,
    summary,
)
from esper.growth.hooks import Change, attach_gradients, shadow_gradients
from esper.growth.measurements import MetricScorer, Mode, Track, observe
from esper.growth.model import GrowingModel
from esper.growth.optimiser import Optimizers
from esper.growth.safety import GovernorConfig, Safety
from esper.growth.saving.export import export
from esper.growth.seed_modules import all_or_nothing, host_parameters, uninterrupted
from esper.runs.growth_log import GrowthLog, GrowthSettings
from esper.runs.sinks import Loggers, require_loggers
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.registry import ControllerChoice, controller_for
from esper.tamiyo.rule_based import explain_no_planting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_BATCHES_WITHOUT_SEEDS: Final = 20
"""Consecutive batches that bypass all seeds before `loss` raises an error."""
DEFAULT_DECISIONS: Final = 30
Keeps = Callable[[Observation], Tensor]
_STATE_CHECKS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "controller": lambda x: (
        x is None or isinstance(x, Tensor | tuple | list | dict | int | float)
    ),
    "random": lambda x: "cpu" in x,
    "losses": lambda x: all(isinstance(y, Tensor) and y.numel() == 1 for y in x or ()),
    "flags": lambda x: isinstance(x, list) and [*map(type, x)] == [bool] * 3,
    "compute": lambda x: isinstance(x, list) and len(x) == 2 and min(x) >= 0,
    "host": lambda x: (
        isinstance(x, list) and [*map(type, x)] == [int] * 2 and min(x) > 0
    ),
    "by_hand": lambda x: isinstance(x, list),
    "start": lambda x: (
        isinstance(x, dict) and all(type(n) is int and n >= 0 for n in x.values())
    ),
}
"""Entries of a saved state that loading would accept with invalid values."""


class Grower(NamedOps):
    """Grows a host while you train it.

    Args:
        model: The host, not compiled. For several ranks, pass the
            `DistributedDataParallel` model. A new Grower takes over existing seeds.
        optimizer: Optimizer of the host, or a list of several, such as Muon and AdamW;
            parameters of seeds join and leave their groups. With several, a batch
            counts when the last one of the list steps.
        slots: Module names: "fc1->fc2" for new hidden units between two layers,
            "fc2->fc2" for a parallel branch of one layer, "block" for residual seeds;
            patterns such as "*.mlp"; or "auto" for the result of `suggest_slots`.
        example: Input of the model: a tensor, a tuple or a dictionary.
        controller: "never", "random", "early", "periodic", "plateau", "tamiyo" (the
            trained controller of Esper), a `Controller` or a factory of one, such as
            `load_controller(run)`.
        budget: Limit of added parameters: a float is a multiple of the host's
            parameters, an int a parameter count.
        decisions: Planned number of calls of `step`; unused with stop="anytime".
        stop: "end" if only the final model counts; "anytime" if training can end at
            any time. Observations then do not depend on a horizon.
        rent: Score charged per added multiple of the host's parameters.
        blueprints: Names of the blueprints to use; all built-in ones if None.
        seeds_per_slot: Maximum number of seeds per place.
        governor: Limits of the safety checks; None disables them.
        mode: "max" if a larger metric is better, "min" for a loss. Controllers are
            trained on accuracies in [0, 1] and positive losses.
        min_age: Decisions that a seed must spend in a stage before you can move it.
        tick: Batches per tick. Seeds train for 0 (AT_ONCE) to 4 (SLOW) ticks and
            blend for as many.
        rng_seed: Random seed of the seeds' weights and of the controller.
        merge_only: Whether to plant only seeds that `export` can merge into the
            host's own layers.
        tie_widths: Whether layers that one field of the model's config sizes, such as
            `intermediate_size` of a transformer, grow together; the config follows.
        wrapper: The `DistributedDataParallel` model, if `model` is a part of it.
        logger: Where metrics, growth and decisions go: the folder of a run; a name such
            as "tensorboard" or "csv:FOLDER"; an object with `log(values, step)`; or a
            list of them. With several ranks, the first one writes.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        slots: Sequence[str] | str = "auto",
        *,
        example: Example,
        controller: ControllerChoice = "early",
        budget: float | int = 16.0,
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
        tie_widths: bool = True,
        wrapper: DistributedDataParallel | None = None,
        logger: Loggers = None,
    ) -> None:
        if stop not in ENDS:
            raise InvalidInputError(f"stop must be 'end' or 'anytime', got {stop!r}.")
        require_int("decisions", 1 if decisions is None else decisions)
        require_number("rent", rent, high=1e30)
        require_number("budget", budget)
        if not isinstance(governor, GovernorConfig | None):
            raise InvalidInputError(
                f"governor must be a GovernorConfig or None, got {governor!r}."
            )
        if not (isinstance(controller, str | Controller) or callable(controller)):
            raise InvalidInputError(
                f"controller must be a name, a Controller or a factory, got "
                f"{controller!r}. Use 'never' to plant by hand."
            )
        loggers = require_loggers(logger)
        model, ranks = unwrapped(model, wrapper)
        several = isinstance(optimizer, list | tuple)
        given: list[Any] = [*optimizer] if several else [optimizer]  # type: ignore[misc]
        inner = [getattr(one, "optimizer", None) for one in given]
        wrapped = [one for one in inner if isinstance(one, Optimizer)]  # by accelerate
        if wrapped and len(wrapped) < len(given):
            raise InvalidInputError(
                "accelerate has prepared some optimizers only. Prepare all or none."
            )
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
            tie_widths=tie_widths,
            take_over=True,
        )
        with all_or_nothing(self.model.undo_steps):
            self._scorer = MetricScorer(self.model, mode)
            self.controller = controller_for(controller, self.model.spec)
            self._surgery = self.model.train_with(wrapped or given, ranks)
            if ranks.many:
                self._surgery.reduce = partial(ranks.before_step, self.model.seeds)
            self.safety = Safety(self.model, governor)
            self._surgery.after_step = self._after_step
            self.model.after_load = self._after_load
            members = self._surgery.optimizer.members
            self._log: GrowthLog | None = None
            settings = GrowthSettings(
                model=type(model).__name__,
                optimizer=", ".join(type(one).__name__ for one in members),
                controller=(
                    controller
                    if isinstance(controller, str)
                    else type(self.controller).__name__
                ),
                slots=self.model.slots,
                mode=mode,
                budget=budget,
                decisions=None if stop == "anytime" else decisions or DEFAULT_DECISIONS,
                rent=rent,
                rng_seed=rng_seed,
            )

            def opened() -> float:
                if loggers and ranks.is_first:
                    self._log = GrowthLog(loggers, settings)
                    finalize(self, self._log.close)
                return float(self._log is not None)

            self._is_logged = ranks.value_of_first(opened, "the logger") > 0
            self._log_begins = self._is_logged
            """Whether the log begins with the next batch or decision."""
        self.model.undo_steps.clear()
        if self.model.former is not None:
            self.model.former.give_up(self.model)
            self.model.former = None
            warnings.warn(
                "the host had a Grower already. This one has taken over its seeds "
                "with its own settings and an empty history. Do not use the old one.",
                EsperWarning,
                stacklevel=2,
            )
        self._budget = budget
        self.decisions = settings.decisions
        self.rent = rent
        if isinstance(budget, int):
            self._warn_if_too_small(budget)
        self._choice = controller
        self._set_controller(self.controller)
        if self._never_grows:
            warnings.warn(
                f"{self._never_grows}. esper.suggest_slots(model, example) prints what "
                "was skipped and why. controller='plateau' plants whatever fits.",
                EsperWarning,
                stacklevel=2,
            )
        self._settings = {
            "controller": controller if isinstance(controller, str) else "",
            "kind of controller": type(self.controller).__name__,
            "mode": mode,
            "optimizer": settings.optimizer,
        }
        self._ranks = ranks
        self.history: list[GrowthDecision] = []
        self.optimizer: Optimizer | Optimizers = members[0]
        if several:
            self.optimizer = self._surgery.optimizer
        self._generator = torch.Generator().manual_seed(rng_seed)
        self._controller_state: ControllerState = None
        self._track = Track.fresh(1)
        self._losses: list[Tensor] = []
        self._used_loss = False
        self._skipped_training = False
        self._moved = False
        """Whether an alpha has changed since the last decision."""
        self._batches = 0
        """Since the last decision."""
        self._batches_without_seeds = 0
        """Consecutive batches that bypassed all seeds."""
        self._compute = 0.0
        """Compute so far in batches of the initial host."""
        self._first_parameter = next(model.parameters())
        self._home = (self._first_parameter.device, self._first_parameter.dtype)
        self._own = [id(p) for p in host_parameters(model).values()]
        self._lagging: WeakKeyDictionary[nn.Module, list[float]] = WeakKeyDictionary()
        """Checksums of copies of the host that have not grown with it."""
        self._has_warned = False
        self._start = self._widths = layer_widths(self.model)
        """Widths of the layers when the history begins, and after the last decision."""
        self._by_hand: set[int] = set()
        """Slots with seeds planted by hand, which the controller must not change."""

    def _set_controller(self, controller: Controller) -> None:
        self.controller, kinds = controller, self.model.spec.blueprints
        names = getattr(controller, "plants", None)
        self._plants = torch.tensor([names is None or k.name in names for k in kinds])
        """Whether the controller uses each blueprint."""
        self._never_grows = self._why_never()

    @property
    def budget(self) -> float:
        """Limit of added parameters as a multiple of the host's."""
        given = self._budget
        host = self.model.first_cost.parameters
        return given if isinstance(given, float) else given / host

    @property
    def batches(self) -> int:
        """Batches since the Grower was built, also before a resume."""
        return (self.history[-1].batches if self.history else 0) + self._batches

    def loss(self, closure: Callable[[], Tensor]) -> Tensor:
        """Return the loss of one batch; call `backward` on it as usual.

        While seeds train, the closure is called twice, first with the seeds in place.
        The loss gives seeds their gradients; gradients of the host are bitwise the
        same as without seeds. The closure must use no random numbers but torch's.
        """
        if not callable(closure):
            raise InvalidInputError(
                "grower.loss takes a function, because it can call it twice. Write "
                "grower.loss(lambda: criterion(model(x), y))."
            )
        self._check_home()
        self.safety.before_batch()
        learning: Sequence[nn.Parameter] = ()
        gradients: Sequence[Tensor] = ()
        if len(self.model.seeds) and torch.is_grad_enabled():
            learning = self.model.training_parameters()
        if learning:
            # First, so that only one graph is in memory and the closure's last call
            # is the host's own pass.
            with self._ranks.no_sync():
                _, gradients = shadow_gradients(
                    lambda: self._call(closure),
                    self.model.seeds.flow,
                    self.model,
                    learning,
                    self.model.parts()[1],
                )
            self.safety.remove_failed_seeds()
        has_seeds = len(self.model.seeds) > 0
        if has_seeds:
            self.model.seeds.flow.ran = False
        loss = self._call(closure)
        if has_seeds:
            self._check_seeds_ran()
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
        """Parameters of the host and of all active seeds.

        Use them for gradient clipping: seeds in training do not change the norm.
        """
        skip = {id(p) for p in self.model.training_parameters()}
        return (p for p in self.model.parameters() if id(p) not in skip)

    def step(self, metric: float | Callable[[], float]) -> GrowthDecision:
        """Take one decision and return it; it is true if the network changed.

        `metric` is a validation metric of the host, or a function that measures it and
        whose changes to the host are undone. With several ranks, the first one's is
        used.
        """
        self._check_home()
        self._check_attached()
        own = host_parameters(self.model.host).values()
        if self._own != [id(parameter) for parameter in own]:
            raise InvalidStateError(
                "the host's parameters are other objects than when the Grower was "
                "built. Load weights into them in place (without assign=True)."
            )
        self.safety.refuse_untrained()
        if self._log_begins:
            self._begin_log()
        self._warn_of_outdated_copy()
        healed = self.safety.check_decision()
        measured = self._ranks.value_of_first(lambda: self._scorer.measure(metric))
        if healed and not callable(metric) and not isfinite(measured) and self.history:
            measured = self.history[-1].metric  # measured before the rollback
        earlier = [decision.metric for decision in self.history]
        score = self._scorer.score(measured, earlier)
        self.safety.remove_failed_seeds(together=True)
        loss = self._mean_loss()
        track = self._scored_track(measured, earlier).after(
            torch.tensor([score]), torch.tensor([loss], dtype=torch.float32)
        )
        self.safety.remove_broken_seeds()
        macs = self.model.macs / max(self.model.first_cost.macs, 1)
        self._compute += self._batches * macs
        batches, self._batches = self.batches, 0
        if not self._used_loss:
            self._skip_training()
        actions, state, why_not = self._decide(track)
        op = Op(int(actions[0, HEAD["op"]]))
        action = action_text(actions, self.model.slots, self.model.spec)
        with uninterrupted():
            if op is not Op.WAIT:
                self.model.act(actions)
            self._track, self._controller_state = track, state
            self.model.tick(0)
            receipts, events = self.model.collect()
            widths = layer_widths(self.model)
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
                batches=batches,
                widths=changes_of(self._widths, widths),
            )
            self.history.append(decision)
            self._widths = widths
            self.model.step = len(self.history)
            if self._log is not None:
                self._log.add(self.history, self._losses, self.model, self.budget)
            self._ranks.from_first(self.model.buffers())
            self._ranks.refuse_different(self.model)
            self._losses, self._used_loss, self._moved = [], False, False
            self.safety.incidents = []
            self._snapshot() if op is Op.FOSSILIZE else self.safety.topology_changed()
            return decision

    def _decide(
        self, track: Track
    ) -> tuple[Int64[Tensor, "1 head"], ControllerState, str]:
        """The controller's action and state, and why it plants nothing."""
        if not self.model.slots:
            wait = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
            return wait, self._controller_state, "lists of blocks grow by deepen() only"
        observation = self._observe(track)
        if self._keep_held(observation):
            observation = self._observe(track)
        masks = compute_masks(observation, self.model.spec)
        decided = self.model.decided.tolist()
        by_hand = [n for n, s in enumerate(decided) if s in self._slots_by_hand()]
        masks = without_slots(masks, by_hand)
        actions, state = self.controller.decide(
            observation, masks, self._controller_state, self._generator
        )
        self._ranks.from_first([actions])
        refuse_illegal(actions, masks)
        if self._log is not None:
            self._log.decide(observation, masks, actions, self.controller, self.model)
        actions = actions.clone()
        actions[0, HEAD["slot"]] = decided[int(actions[0, HEAD["slot"]])]
        waits = int(actions[0, HEAD["op"]]) == Op.WAIT
        return actions, state, self._why_not(observation, masks) if waits else ""

    def _observe(self, track: Track) -> Observation:
        return observe(
            self.model,
            track,
            horizon=self.decisions,
            compute=self._compute,
            budget=self.budget,
            rent=self.rent,
        )

    def _keep_held(self, observation: Observation) -> bool:
        """Keep seeds if the controller never prunes them; returns whether it did.

        A seed has trained since the last decision, so that its moments are known.
        """
        keeps: Keeps | None = getattr(self.controller, "keeps", None)
        if keeps is None or not bool(keeps(observation)[0]):
            return False
        states, by_hand = self.model.seeds.states, self._slots_by_hand()
        held = (states.stage == Stage.HOLDING) & (states.age > 0)
        slots = [s for s in held[0].nonzero().flatten().tolist() if s not in by_hand]
        with uninterrupted():
            if slots:
                self.model.keep_seeds(slots)
                self._snapshot()
        return bool(slots)

    @contextmanager
    def _depth_change(self) -> Iterator[None]:
        """Follow a change of the host's depth in the block."""
        by_hand = [self.model.slots[slot] for slot in self._slots_by_hand()]
        decided = len(self.model.decided)
        yield
        self._by_hand = {*map(self.model.seeds.index, by_hand)}
        self._own = [id(p) for p in host_parameters(self.model.host).values()]
        if len(self.model.decided) != decided:  # a state may count slots
            self._set_controller(controller_for(self._choice, self.model.spec))
            self._controller_state = None
        self.safety.host_changed()

    def finish(self) -> None:
        """End growth: fold active seeds at their alphas, and remove the others.

        The network is then a plain one, apart from seeds that do not fold.
        """
        self._check_current()
        with uninterrupted():
            self.model.finish()
            self._snapshot()

    def export(self, *, merge: bool = True) -> nn.Module:
        """Return a plain copy with the same outputs as the grown host."""
        return export(self.model, merge=merge)

    def follow(self, average: nn.Module) -> None:
        """Grow an average of the host, such as an `AveragedModel`, with the host.

        Create it after the Grower and update it as usual.
        """
        self.model.add_copy(average)

    def summary(self) -> str:
        """A one-page report: what grew, what it cost and why nothing grew."""
        notes: list[str] = [*getattr(self.controller, "notes", ())]
        if self._never_grows:
            notes.append(f"{self._never_grows}.")
        if self._skipped_training:
            notes.append(
                "grower.loss was not used, so seeds were not trained before they were "
                "blended in."
            )
        if not self.history:
            notes.append("grower.step was not called yet, so nothing was decided.")
        return summary(self.model, self.history, notes)

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def plot(self) -> "Figure":
        """A matplotlib figure: metric, loss and the width of every layer over batches.

        Markers are where seeds were planted, kept and pruned. Of more than
        600 decisions, 600 are drawn.
        """
        from esper.report.figures import growth_figure

        first = first_widths(self.model)
        missing = any(first.get(n, wide) != wide for n, wide in self._start.items())
        history = [*self.history, self._unfinished()]
        return growth_figure(history, self._start, missing=missing)

    def _repr_html_(self) -> str:
        """A small table for notebooks."""
        from esper.report.figures import growth_table

        return growth_table(
            [*self.history, self._unfinished()],
            first_widths(self.model),
            layer_widths(self.model),
            (self.model.first_cost.parameters, self.model.count().parameters),
        )

    def detach(self) -> None:
        """Finish growth and leave the host and the optimizer, which keep what grew.

        Wrap the host in a new `DistributedDataParallel` afterwards.
        """
        self.close()
        if self.model.is_replaced:
            return
        with uninterrupted():
            self.model.detach()
            self._surgery.detach()

    def close(self, *, finished: bool = True) -> None:
        """Write what is left to the loggers and release the folder of the run.

        `finished` marks the run as complete. Further training is not logged.
        """
        log, self._log = self._log, None
        self._is_logged = self._log_begins = False
        if log is not None:
            log.close(self.model, finished=finished)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to resume bitwise, as plain data and tensors.

        To resume, build the same model, optimizer and Grower, then call
        `load_state_dict`. Save schedulers and data loaders yourself.
        """
        monitor = self.safety.monitor
        if self._log is not None:
            self._log.flush()
        unfinished = self._unfinished()
        return {
            "format": FORMAT,
            "model": self.model.state_dict(),
            "host": [self.model.first_cost.parameters, self.model.first_cost.macs],
            "sizes": {n: [*shape] for n, shape in self.model.seeds.sizes.items()},
            "groups": self._surgery.names(),
            "optimizer": self.optimizer.state_dict(),
            "governor": monitor.state_dict() if monitor else None,
            "track": asdict(self._track),
            "controller": self._controller_state,
            "generator": self._generator.get_state(),
            "random": random_state(self.model),
            "losses": [*self._losses],
            "flags": [self._used_loss, self._skipped_training, self._moved],
            "compute": [self._batches, self._compute],
            "start": self._start,
            "by_hand": sorted(self._slots_by_hand()),
            "depths": [*self.model.depths],
            "history": PLAIN.dump_python([*self.history, unfinished], mode="json"),
            "settings": dict(self._settings),
            "runs": self._log.ids if self._log is not None else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`; an error changes nothing."""
        if not isinstance(state, Mapping) or "format" not in state:
            raise InvalidInputError(
                "this is no saved Grower. Pass the result of state_dict()."
            )
        require_readable("the saved Grower", state["format"], "Train it again.")
        self._check_current()
        try:
            with uninterrupted(), all_or_nothing(undo := list[Change]()):
                self._match_depths(state, undo)
                self._check_state(state)
                before = tree_map(
                    lambda x: x.clone() if isinstance(x, Tensor) else x,
                    self.state_dict(),
                )
                undo += [
                    partial(self._restore, before),
                    self._surgery.restore_point(),
                    self.model.seeds.restore_point(),
                ]
                self._restore(state)
        except InvalidInputError:
            raise
        except Exception as error:
            raise InvalidInputError(
                f"this saved Grower cannot be loaded: {described(error)}"
            ) from error
        self._log_begins = self._is_logged
        if self._log is not None:
            self._log.known = [str(one) for one in state.get("runs", ())]

    def _unfinished(self) -> GrowthDecision:
        """What has happened since the last decision."""
        return GrowthDecision(
            step=-1,
            metric=nan,
            loss=nan,
            receipts=tuple(self.model.receipts),
            events=tuple(self.model.events),
            incidents=tuple(self.safety.incidents),
            batches=self.batches,
            widths=changes_of(self._widths, layer_widths(self.model)),
        )

    def _match_depths(self, state: Mapping[str, Any], undo: list[Change]) -> None:
        """Give the host the depths of a saved state."""
        depths = state.get("depths", [])
        if depths != self.model.depths:
            held = dict(vars(self))
            undo += [self.safety.host_changed, lambda: vars(self).update(held)]
            with self._depth_change():
                match_depths(self.model, depths, state["model"], undo)

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error if a saved state is damaged or has other settings."""
        for key, is_valid in _STATE_CHECKS.items():
            if not is_valid(state[key]):
                raise InvalidInputError(f"{key!r} of this saved Grower is damaged.")
        for name, own in self._settings.items():
            was = state["settings"].get(name)
            unnamed = name == "controller" and "" in (was, own)
            if was != own and not unnamed:
                raise InvalidInputError(
                    f"the saved Grower's {name} was {was!r} and this one's is {own!r}. "
                    "Build it with the same settings."
                )
        self.model.seeds.validated(state["model"], "host.")
        names = {f"host.{name}" for name in host_parameters(self.model.host)}
        for name in names & state["model"].keys():
            value = state["model"][name]
            if not isinstance(value, Tensor) or not value.isfinite().all():
                raise InvalidInputError(f"{name} of the saved Grower is not finite.")

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.model.after_load = None
        try:
            self.model.load_state_dict(state["model"])
        finally:
            self.model.after_load = self._after_load
        parameters, macs = state["host"]
        self.model.first_cost = Cost(parameters, macs)
        sizes = {name: torch.Size(shape) for name, shape in state["sizes"].items()}
        for name, now in self.model.seeds.shapes().items():
            first = sizes.get(name, torch.Size())
            if len(first) != len(now) or any(map(int.__gt__, first, now)):
                raise InvalidInputError(f"'sizes' of {name!r} as saved is damaged.")
        self.model.seeds.sizes = sizes
        named = dict(self.model.host.named_parameters())
        self._surgery.restore(state["groups"], named)
        # Optimizers keep and change the tensors that they are given.
        self.optimizer.load_state_dict(deepcopy(state["optimizer"]))
        self._surgery.refuse_damaged_state()
        if self.safety.monitor is not None and state["governor"] is not None:
            self.safety.monitor.load_state_dict(state["governor"])
        self._track = Track.restored(state["track"])
        self._controller_state = state["controller"]
        self._generator.set_state(state["generator"])
        self._losses = [*state["losses"]]
        self._used_loss, self._skipped_training, self._moved = state["flags"]
        self._batches, self._compute = state["compute"]
        self._by_hand = {*state["by_hand"]}
        self._start = {**state["start"]}
        *self.history, unfinished = PLAIN.validate_python(state["history"])
        self._widths = self._start
        for decision in self.history:
            self._widths = changed_widths(self._widths, decision)
        self.model.step = len(self.history)
        self.model.receipts = [*unfinished.receipts]
        self.model.events = [*unfinished.events]
        self.safety.incidents = [*unfinished.incidents]
        set_random_state(state["random"])
        self._snapshot()

    def _snapshot(self) -> None:
        if not self.safety.take_snapshot():
            self.safety.topology_changed()

    def _warn_if_too_small(self, budget: int) -> None:
        """Warn if a budget in parameters is too small for any seed."""
        places, kinds = len(self.model.seeds.places), self.model.spec.blueprints
        prices = [self.model.price(p, kind) for p in range(places) for kind in kinds]
        cheapest = min((price.parameters for price in prices if price), default=0)
        if 0 < budget < cheapest:
            warnings.warn(
                f"budget={budget} is a number of parameters, but the smallest seed "
                f"has {cheapest}. Use {budget}.0 for {budget} times the host's.",
                EsperWarning,
                stacklevel=3,
            )

    def _warn_of_outdated_copy(self) -> None:
        """Warn once if a copy of the host is updated but does not grow with it."""
        for copy in (
            () if self._has_warned else self.model.seeds.living_copies(following=False)
        ):
            own = [*host_parameters(copy.host).values()]
            sums = [float(p.detach().sum()) for p in (own[0], own[-1])]
            if self._lagging.setdefault(copy, sums) != sums:
                self._has_warned = True
                warnings.warn(
                    "a copy of the host is updated but does not grow with it. Call "
                    "grower.follow(copy) when you make it, or copy the host again.",
                    EsperWarning,
                    stacklevel=3,
                )
                return

    def _scored_track(self, metric: float, earlier: Sequence[float]) -> Track:
        """The track so far, computed again if the metric has changed the scale."""
        scores = self._scorer.scores([*earlier, metric])[:-1]
        if not earlier or scores == self._scorer.scores(earlier):
            return self._track
        track = Track.fresh(1)
        for score, decision in zip(scores, self.history, strict=True):
            track = track.after(torch.tensor([score]), torch.tensor([decision.loss]))
        return track

    def _why_never(self) -> str:
        """Why the controller can plant nothing in these slots; empty if it can."""
        places, kinds = self.model.seeds.places, self.model.spec.blueprints
        wanted = [k for k, planted in zip(kinds, self._plants, strict=True) if planted]
        slots = range(len(places))
        if not places or any(
            self.model.price(slot, kind) for slot in slots for kind in wanted
        ):
            return ""
        names = ", ".join(kind.name for kind in wanted[:4])
        why = self.model.skipped.get(places[0].site.inlet)
        why = why or misfit(wanted[0], places[0].geometry) or "it would not merge"
        return (
            f"nothing will grow: the controller plants {names}, which fits no slot "
            f"({places[0].site.name}: {why})"
        )

    def _why_not(self, observation: Observation, masks: ActionMasks) -> str:
        """Why nothing was planted, considering the controller's blueprints only."""
        if self._never_grows:
            return self._never_grows
        kinds = masks.blueprint & self._plants
        slot, op = masks.slot.clone(), masks.op.clone()
        slot[:, Op.GERMINATE] &= kinds.any(dim=2)
        op[:, Op.GERMINATE] = slot[:, Op.GERMINATE].any(dim=1)
        masks = replace(masks, op=op, slot=slot, blueprint=kinds)
        offers = observation.offers
        offers = replace(offers, fits=offers.fits & self._plants)
        return explain_no_planting(replace(observation, offers=offers), masks)

    def _call(self, closure: Callable[[], Tensor]) -> Tensor:
        """The loss of a closure, after resetting the hooks."""
        if len(self.model.seeds):
            for hooks in self.model.seeds.hooks:
                hooks.begin()
        loss = closure()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise InvalidInputError("the closure must return one number, as a tensor.")
        return loss

    def _op(self, op: Op, slot: str, **choices: str) -> Receipt:
        self._check_current()
        self._check_attached()
        with uninterrupted():
            receipt = self.model.act(self.model.encode(op, slot, **choices))
            if op is Op.GERMINATE:
                self._by_hand.update(
                    self.model.tied_slots(self.model.seeds.index(slot))
                )
            self._snapshot() if op is Op.FOSSILIZE else self.safety.topology_changed()
        return receipt

    def _deepen(self, name: str, by: int, how: DepthBlueprint) -> Receipt:
        self._check_home()
        self._check_attached()
        with uninterrupted(), self._depth_change():
            return self.model.deepen(name, by, how)

    def _slots_by_hand(self) -> set[int]:
        """Slots whose seeds were planted by hand and still exist."""
        stages = self.model.seeds.states.stage[0]
        self._by_hand = {s for s in self._by_hand if int(stages[s]) != Stage.DORMANT}
        return self._by_hand

    def _mean_loss(self) -> float:
        """Mean of the finite losses since the last decision."""
        none = [torch.zeros(0)]
        losses = torch.cat([x.float().reshape(1) for x in self._losses] or none)
        known = losses[losses.isfinite()]
        if self._ranks.many:
            return self._ranks.mean(float(known.double().sum()), len(known))
        return float(known.mean())

    def _after_load(self) -> None:
        """Called after a state was loaded into the host."""
        self._own = [id(p) for p in host_parameters(self.model.host).values()]
        if not self.history:
            self._start = self._widths = layer_widths(self.model)
        self._snapshot()

    def _begin_log(self) -> None:
        """Begin to log; raises on all ranks if the run is of another training."""

        def begin() -> float:
            if self._log is not None:
                self._log.begin(self.history, self.model)
            return 0.0

        self._ranks.value_of_first(begin, "the logger")
        self._log_begins = False

    def _after_step(self) -> None:
        """Called after each optimizer step: advance seeds by their tempos."""
        if self._log_begins:
            self._begin_log()
        self._batches += 1
        if self.model.seeds.count_batch():
            return
        before = self.model.seeds.states
        self.model.tick(1, decision=False)
        after = self.model.seeds.states
        self._moved |= not torch.equal(before.alpha, after.alpha)
        moved_on = before.stage != after.stage
        if bool(moved_on.any()):
            trained = moved_on & (before.stage == Stage.TRAINING)
            self._skipped_training |= bool(trained.any()) and not self._used_loss
            self.safety.topology_changed()

    def _skip_training(self) -> None:
        """Advance seeds in training, which cannot train without `grower.loss`."""
        for slot, name in enumerate(self.model.slots):
            age = int(self.model.seeds.states.age[0, slot])
            old_enough = age >= self.model.spec.slots.min_age
            if self.model.stage(name) is Stage.TRAINING and old_enough:
                self._skipped_training = True
                self.advance(name)

    def _check_seeds_ran(self) -> None:
        """Raise an error if the loss bypasses the seeds, as some compiled graphs do."""
        missed = 0 if self.model.seeds.flow.ran else self._batches_without_seeds + 1
        self._batches_without_seeds = missed % MAX_BATCHES_WITHOUT_SEEDS
        if missed >= MAX_BATCHES_WITHOUT_SEEDS:
            raise InvalidStateError(
                f"no seed took part in the last {missed} batches: the loss calls a "
                "copy of the host or a compiled graph without its hooks. Call the host "
                "itself, and compile the result of export()."
            )

    def _check_current(self) -> None:
        if self.model.is_replaced:
            raise InvalidStateError(
                "a newer Grower has taken this host over. Use that one."
            )

    def _check_attached(self) -> None:
        if self.model.seeds.flow.owner is None:
            raise InvalidStateError(
                "detach() was called: this Grower has left its host. Build a new one."
            )

    def _check_home(self) -> None:
        self._check_current()
        now = self._first_parameter
        if (now.device, now.dtype) != self._home:
            raise InvalidStateError(
                f"the host was {self._home[1]} on {self._home[0]} and is {now.dtype} "
                f"on {now.device} now. Move it before you build the Grower."
            )
