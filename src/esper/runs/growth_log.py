"""What a `Grower` writes to its loggers: decisions, widths of layers, events, metrics.

A folder becomes a run with an event store, as of `esper train`. A round is one decision
of the controller, and `env_steps` counts batches. Rows that follow the decision that a
Grower resumes from stop to count, so none counts twice. Between two decisions, means of
the training loss go to the other loggers.
"""

import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from math import isfinite, isnan
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Int64
from torch import Tensor

from esper.contracts.actions import ActionMasks, ActionSpec
from esper.contracts.errors import RunLockedError
from esper.contracts.messages import short
from esper.contracts.stages import STAGE_EVENTS, Stage, StageChanged
from esper.contracts.world import Controller, Observation
from esper.growth.history import GrowthDecision, layer_widths, outcome
from esper.growth.model import GrowingModel
from esper.runs.decisions import features_json, heads_json
from esper.runs.run import STORE, Run, versions_now
from esper.runs.settings import as_flat, as_toml
from esper.runs.sinks import Logger, RunInfo, Sinks, split_loggers, warned
from esper.runs.store import Store
from esper.simic.agent.distribution import Decision
from esper.tamiyo.policy.heads import legal_rows

KIND: Final = "grower"
"""Kind of the run in `versions.json`."""
LOSSES: Final = 8
"""Means of the training loss that are logged for one decision."""
LOSS: Final = "batch/loss"
"""Name of the training loss in logs."""
SECONDS_BETWEEN: Final = 1.0
"""Minimum time between two writes of the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSettings:
    """Settings of a run: arguments of its `Grower`."""

    model: str
    optimizer: str
    controller: str
    slots: tuple[str, ...]
    mode: str
    budget: float
    decisions: int | None
    rent: float
    rng_seed: int


class GrowthFolder:
    """The folder of a run: it is locked, and its store gets rows."""

    def __init__(self, path: Path, settings: GrowthSettings) -> None:
        self.path, self.task = path, settings.model
        facts = {"kind": KIND, "rng_seed": settings.rng_seed, "tasks": [self.task]}
        with ExitStack() as opened:
            self.run = opened.enter_context(
                Run.create_or_open(path, as_toml(settings), facts)
            )
            self.store = opened.enter_context(Store(path / STORE, self.run.id))
            self._opened = opened.pop_all()
        self._widths: dict[str, int] = {}
        self._blueprints: dict[int, str] = {}
        self._began = self._flushed = time.monotonic()

    def begin(self, rounds: int, ours: bool, model: GrowingModel) -> None:
        """Start an attempt after some decisions.

        A store that has decisions is refused unless it is `ours`: the one that a
        loaded state was saved with.
        """
        store = self.store
        store.flush()  # rows that wait belong to the attempt before
        if not ours and store.fetch("SELECT 1 FROM live_rounds LIMIT 1"):
            raise RunLockedError(
                f"{short(self.path)} has another training. Give another folder, or "
                "load the state of its Grower before the first batch."
            )
        self.run.go_on()
        store.begin_attempt(rounds or None, versions_now(self.run.config_toml))
        ((seconds,),) = store.fetch("SELECT ifnull(max(seconds), 0) FROM live_rounds")
        self._began = time.monotonic() - seconds
        by_time = "ORDER BY attempt, seq"
        self._widths = dict(
            store.fetch(f"SELECT name, width FROM live_layers {by_time}")
        )
        self._blueprints = dict(
            store.fetch(
                "SELECT slot, blueprint FROM live_events WHERE what = 'planted' "
                f"AND blueprint IS NOT NULL {by_time}"
            )
        )
        if not self._widths:
            self._add_layers(rounds, layer_widths(model))
        self.store.flush()

    def add(
        self,
        decision: GrowthDecision,
        model: GrowingModel,
        seen: Mapping[str, Any],
        budget: float,
    ) -> None:
        """Add the rows of a decision; `seen` are columns of `decisions`."""
        number, store = decision.step + 1, self.store
        added = model.parameters_added / model.first_cost.parameters
        store.add(
            "steps",
            **self._at(number),
            score=decision.metric,
            loss=None if isnan(decision.loss) else decision.loss,
            added=added,
            budget_left=budget - added,
        )
        store.add("decisions", **self._at(number), action=decision.action, **seen)
        self.add_events(number, decision.events, model)
        self._add_layers(number, layer_widths(model))
        for text in decision.incidents:
            store.add_note(number, "refused", text)
        store.add(
            "rounds",
            round=number,
            env_steps=decision.batches,
            seconds=time.monotonic() - self._began,
            mean_score=decision.metric,
            added=added,
        )
        if time.monotonic() - self._flushed > SECONDS_BETWEEN:
            store.flush(durable=False)
            self._flushed = time.monotonic()

    def add_events(
        self, number: int, events: Sequence[StageChanged], model: GrowingModel
    ) -> None:
        """Add the rows of events."""
        states = model.seeds.states
        for event in events:
            slot = event.slot
            if int(states.blueprint[0, slot]) >= 0:
                self._blueprints[slot] = model.seeds.blueprint_of(slot).name
            self.store.add(
                "events",
                **self._at(number),
                slot=slot,
                what=outcome(event) or event_name(event.before, event.after),
                stage_from=event.before.name,
                stage_to=event.after.name,
                blueprint=self._blueprints.get(slot),
                alpha=float(states.alpha[0, slot]),
            )

    def close(self) -> None:
        """Write all rows, close the store and release the folder."""
        self._opened.close()

    def _add_layers(self, number: int, widths: Mapping[str, int]) -> None:
        """Add a row for each layer whose width is new."""
        moved = [*widths] != [*self._widths]
        for layer, (name, width) in enumerate(widths.items()):
            if moved or self._widths[name] != width:
                where = self._at(number) | {"step": number + 1}
                self.store.add("layers", **where, layer=layer, name=name, width=width)
        self._widths = dict(widths)

    def _at(self, number: int) -> dict[str, Any]:
        one = {"round": number, "step": number, "env": 0, "episode": 1}
        return {**one, "task": self.task}


class GrowthLog:
    """All loggers of a `Grower`. A logger that fails is not used any more.

    Args:
        loggers: Result of `require_loggers`.
        settings: Of the Grower.
    """

    def __init__(self, loggers: Sequence[Logger], settings: GrowthSettings) -> None:
        paths, folder, self._others = split_loggers(loggers)
        self._settings, self._process = settings, os.getpid()
        self._info = RunInfo(
            name=folder.name, folder=folder, settings=as_flat(settings)
        )
        self._sinks = Sinks((), self._info)
        self._seen: dict[str, Any] = {}
        self.known: Collection[str] = ()
        """Ids of the runs that a loaded state was saved with."""
        self._planned, self._done = settings.decisions or 0, 0
        self._begun = False
        self._refused: RunLockedError | None = None
        with ExitStack() as opened:
            self._folders = []
            for path in paths:
                self._folders.append(GrowthFolder(path, settings))
                opened.callback(self._folders[-1].close)
            opened.pop_all()

    @property
    def ids(self) -> list[str]:
        """Ids of the runs in the folders."""
        return [folder.run.id for folder in self._folders]

    def begin(self, history: Sequence[GrowthDecision], model: GrowingModel) -> None:
        """Start to write after some decisions; releases folders that are refused."""
        rounds = len(history)
        if self._refused is not None:
            raise self._refused
        try:
            for folder in self._folders:
                folder.begin(rounds, folder.run.id in self.known, model)
        except RunLockedError as error:
            self._refused = error
            self.close(finished=False)
            raise
        self._done, self._begun = rounds, True
        self._sinks.close()
        resumed = rounds > 0 or bool(self.known)
        # Batches since that decision are logged with the next one.
        step = history[-1].batches if history else 0
        info = replace(self._info, step=step, resumed=resumed)
        self._sinks = Sinks(self._others, info)

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        actions: Int64[Tensor, "1 head"],
        controller: Controller,
        model: GrowingModel,
    ) -> None:
        """Keep what a controller saw and chose for the next decision.

        Args:
            observation: What it saw.
            masks: What was legal.
            actions: What it chose.
            controller: The controller, whose policy may know probabilities.
            model: The network.
        """
        if not self._folders:
            return
        slots = model.decided.tolist()
        seen = features_json(observation, model.spec, slots)
        made = getattr(controller, "decided", None)
        value = None
        if isinstance(made, Decision):
            own: ActionSpec = controller.spec  # type: ignore[attr-defined]
            value = float(made.values[0])
            heads = heads_json(made.actions, made.masks, made.distribution, own, slots)
        else:
            legal = legal_rows(masks, actions)
            heads = heads_json(actions, legal, None, model.spec, slots)
        self._seen = {"value": value, "features": seen[0], "heads": heads[0]}

    def add(
        self,
        history: Sequence[GrowthDecision],
        losses: Sequence[Tensor],
        model: GrowingModel,
        budget: float,
    ) -> None:
        """Write the last decision.

        Args:
            history: All decisions.
            losses: Training losses since the one before.
            model: The network.
            budget: Limit of added parameters as a multiple of the host's.
        """
        decision, self._done = history[-1], len(history)
        since = history[-2].batches if len(history) > 1 else 0
        seen, self._seen = self._seen, {}
        for folder in self._folders:
            with warned(short(folder.path)):
                folder.add(decision, model, seen, budget)
        values = metrics(decision, model)
        if losses:
            means = torch.stack([x.detach().float().reshape(()) for x in losses])
            parts = means.tensor_split(min(LOSSES, len(losses)))
            for number, part in enumerate(parts, start=1):
                step = since + (decision.batches - since) * number // len(parts)
                mean = {LOSS: float(part[part.isfinite()].mean())}
                mean = mean if isfinite(mean[LOSS]) else {}
                if number == len(parts):
                    values |= mean
                elif mean:
                    self._sinks.log(mean, step)
        self._sinks.log(values, decision.batches)

    def flush(self) -> None:
        """Make all rows durable, before a state is saved; warns if that fails."""
        for folder in self._folders:
            with warned(short(folder.path)):
                folder.store.flush()

    def close(
        self, model: GrowingModel | None = None, *, finished: bool | None = None
    ) -> None:
        """Write what is left, close all loggers and release the folders.

        Args:
            model: The network, to write its events since the last decision.
            finished: Whether the run is complete; None: if all planned decisions were
                taken.
        """
        if os.getpid() != self._process:  # what a fork holds is its parent's
            return
        if finished is None:
            finished = self._done >= self._planned > 0
        for folder in self._folders:
            with warned(short(folder.path)), closing(folder):
                if model is not None and self._begun:
                    folder.add_events(self._done + 1, model.events, model)
                if finished:
                    folder.run.finish({"rounds": self._done})
        self._folders = []
        self._sinks.close()


def metrics(decision: GrowthDecision, model: GrowingModel) -> dict[str, float]:
    """Metrics of a decision by name; a loss that was not measured is left out."""
    words = Counter(outcome(event) for event in decision.events)
    values = {
        "decision/metric": decision.metric,
        "decision/loss": decision.loss,
        "decision/parameters": decision.parameters,
        "decision/macs": decision.macs,
        **{f"decision/{word}": words[word] for word in ("planted", "kept", "pruned")},
        **{f"width/{name}": width for name, width in layer_widths(model).items()},
    }
    return {name: float(value) for name, value in values.items() if isfinite(value)}


def event_name(before: Stage, after: Stage) -> str:
    """Name of a change of stage that is no outcome."""
    if after is Stage.DORMANT:
        return "cleared"
    return STAGE_EVENTS.get((before, after), "jumped")
