"""Read-only queries about runs, also while they train.

    with open_run(find_by_id(Path("runs"), id)) as run:
        run.overview(), run.rounds(), run.hosts(), run.lanes("letter", 0, 0)

The `id` of a run is made from the name of its folder, so no path comes from outside.
Nothing here locks, writes or imports torch. In every record None is a value that was
not measured, and NaN is a value that was measured and is NaN.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any, Final, TypeVar

from esper.contracts.errors import EsperError, InvalidInputError
from esper.contracts.messages import one_line, printable, short
from esper.runs.database import open_store
from esper.runs.run import STORE, Run, is_locked
from esper.runs.settings import parse_toml

MAX_RUNS: Final = 1_000
"""Maximum number of runs that are listed, the newest names first."""
MAX_POINTS: Final = 400
"""Maximum number of points of a curve."""
TAIL: Final = 20_000
"""Number of newest rows that hosts, widths and lanes are read from."""
ROWS: Final = 4_000
"""Maximum number of rows of each kind from one episode."""
MAX_VALUE: Final = 1 << 18
"""Maximum size of one row in bytes; the writer cuts texts at 10,000 characters."""
SECONDS: Final = 5.0
"""Time limit of one query."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunEntry:
    """One line of the list of runs."""

    id: str
    name: str
    state: str
    """running, finished, stopped or damaged."""
    kind: str
    """training, ppo, learn, evaluation or grower."""
    began: str
    trouble: str
    """Why it is damaged; empty if it is not."""


@dataclass(frozen=True, slots=True)
class RoundRow:
    """One round of training: a row of `live_rounds`, or the mean of several."""

    attempt: int
    seq: int
    round: int
    env_steps: int
    seconds: float | None
    mean_return: float | None
    mean_score: float | None
    added: float | None
    learning_rate: float | None
    policy_loss: float | None
    value_loss: float | None
    clip_fraction: float | None
    grad_norm: float | None
    kl: float | None
    explained_variance: float | None
    steps_planned: int | None
    steps_taken: int | None
    refused: int | None


@dataclass(frozen=True, slots=True)
class HeadRow:
    """One head in one round, or the mean of several rounds."""

    round: int
    head: str
    entropy: float | None
    kl: float | None
    openness: float | None


@dataclass(frozen=True, slots=True)
class EvaluationPoint:
    """Means over the hosts of one evaluation of one controller."""

    stage: str
    """validation or test."""
    round: int
    task: str
    controller: str
    hosts: int
    mean_return: float | None
    mean_score: float | None


@dataclass(frozen=True, slots=True)
class ArmInterval:
    """The mean test return of a controller, with its 95 % confidence interval."""

    task: str
    controller: str
    hosts: int
    mean: float
    low: float
    high: float
    added: float | None


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that happened to a seed."""

    attempt: int
    seq: int
    round: int
    step: int
    env: int
    task: str
    episode: int
    slot: int
    what: str
    stage_from: str
    stage_to: str
    blueprint: str | None
    alpha: float | None


@dataclass(frozen=True, slots=True)
class NoteRow:
    """A remark in words."""

    round: int
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class LayerWidth:
    """Width of a layer, from one decision on."""

    layer: int
    name: str
    width: int
    step: int


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a slot holds now."""

    slot: int
    stage: str
    blueprint: str | None
    alpha: float | None


@dataclass(frozen=True, slots=True)
class HostState:
    """One environment in its newest episode."""

    task: str
    env: int
    episode: int
    began: int
    """The first of its decisions that is known."""
    step: int
    """The newest of them."""
    score: float | None
    loss: float | None
    added: float | None
    budget_left: float | None
    ended: bool
    """Whether the episode is over."""
    returns: float | None
    """Its return, once it is over."""
    slots: tuple[SlotState, ...]
    """Slots in which something happened in this episode; others are empty."""
    lanes: tuple["LaneSpan", ...]
    """Stages of all seeds of this episode, in order of slot and time."""
    layers: tuple[LayerWidth, ...]
    """Present widths; empty if they are not recorded."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """One decision of a host: the state before it and its reward."""

    step: int
    reward: float | None
    score: float | None
    loss: float | None
    added: float | None
    budget_left: float | None


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """One stage of one seed, in decisions since the start of the run."""

    slot: int
    blueprint: str | None
    stage: str
    start: int
    end: int | None
    """None: it lasts."""


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One decision that is recorded in detail."""

    step: int
    action: str
    value: float | None
    features: Any
    """What the controller saw, as parsed JSON; None if it is not recorded."""
    heads: Any
    """Probabilities of each head, as parsed JSON; None if they are not recorded."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The state of a run in a few figures."""

    attempts: int
    """Number of processes that have written the run."""
    position: tuple[int, int]
    """Attempt and number of rows: changes with every write."""
    last: RoundRow | None
    """The newest round."""
    rounds_planned: int | None
    """None: the budget has no number of rounds."""
    minutes_planned: float | None
    env_steps_planned: int | None
    seconds_left: float | None
    """At the speed so far; None if unknown or if the run does not train."""
    tasks: tuple[str, ...]


def run_id(name: str) -> str:
    """The id of the run in a folder of this name."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()[:12]


def list_runs(root: Path) -> list[RunEntry]:
    """All runs in a folder, the newest names first; links are no runs."""
    return [
        _entry(path) for _, path in sorted(_folders(root).items(), key=_name)[:MAX_RUNS]
    ]


def find_by_id(root: Path, id: str) -> Path:
    """The folder of a run in `root`; only ids of `list_runs` are known."""
    found = _folders(root).get(id)
    if found is None:
        raise InvalidInputError("there is no run with this id. Reload the list.")
    return found


def _folders(root: Path) -> dict[str, Path]:
    try:
        with os.scandir(root) as found:
            return {
                run_id(each.name): root / each.name
                for each in found
                if each.name[0] != "." and each.is_dir(follow_symlinks=False)
            }
    except OSError:
        return {}


def _name(pair: tuple[str, Path]) -> tuple[int, ...]:
    """Sorts from the last name to the first."""
    return tuple(-byte for byte in os.fsencode(pair[1].name))


def run_state(path: Path) -> str:
    """running, finished or stopped."""
    if is_locked(path):
        return "running"
    return "stopped" if Run.read(path).finished is None else "finished"


def _entry(path: Path) -> RunEntry:
    kind = began = trouble = ""
    try:
        run = Run.read(path)
        about = run.versions
        kind, began = str(about.get("kind", run.kind)), str(about.get("began", ""))
        state = run_state(path)
    except (OSError, ValueError) as error:
        state, trouble = "damaged", one_line(str(error))
    name = printable(os.fsencode(path.name).decode(errors="replace"))
    return RunEntry(run_id(path.name), name, state, kind[:32], began[:32], trouble)


@contextmanager
def open_run(path: Path) -> Iterator["RunReader"]:
    """A reader of a run, closed at the end of the block."""
    reader = RunReader(path)
    try:
        yield reader
    finally:
        reader.close()


class RunReader:
    """Queries about one run; every call sees the newest state.

    Errors are `InvalidInputError` or `StorageError`, in one line.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._run = path, Run.read(path)
        self.name, self.kind = path.name, self._run.kind
        store = path / STORE
        self._db = open_store(store, self._run.id, seconds=SECONDS)
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        self._file = os.stat(store)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    @property
    def state(self) -> str:
        """running, finished or stopped."""
        return run_state(self.path)

    @property
    def replaced(self) -> bool:
        """Whether the store is another file by now; open the run again then."""
        try:
            return not os.path.samestat(os.stat(self.path / STORE), self._file)
        except OSError:
            return True

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All queries in the block see the same state of the store."""
        self._all("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._all("COMMIT")

    def version(self) -> int:
        """A number that changes when another process has written the store."""
        return int(self._all("PRAGMA data_version")[0][0])

    def overview(self) -> Overview:
        """Progress of the run."""
        found = self._all("SELECT attempt, rows FROM attempts ORDER BY attempt")
        rows = self._rows(RoundRow, "live_rounds", "1 ORDER BY round DESC LIMIT 1")
        last = rows[0] if rows else None
        rounds, minutes, steps = self._planned()
        left = None
        if last is not None and last.seconds and self.state == "running":
            limits = [
                rounds and last.seconds * (rounds / max(last.round, 1) - 1),
                steps and last.seconds * (steps / max(last.env_steps, 1) - 1),
                minutes and 60 * minutes - last.seconds,
            ]
            left = min((max(each, 0.0) for each in limits if each), default=None)
        return Overview(
            attempts=len(found),
            position=found[-1] if found else (0, 0),
            last=last,
            rounds_planned=rounds,
            minutes_planned=minutes,
            env_steps_planned=steps,
            seconds_left=left,
            tasks=self.tasks(),
        )

    def _planned(self) -> tuple[int | None, float | None, int | None]:
        """Rounds, minutes and environment steps of the budget."""
        try:
            settings = parse_toml(self._run.config_toml)
        except EsperError:
            return None, None, None
        budget = settings.get("budget")
        budget = budget if isinstance(budget, dict) else {}
        rounds, minutes = budget.get("rounds"), budget.get("minutes")
        rounds = rounds or settings.get("decisions")  # of a Grower
        steps = budget.get("env_steps", settings.get("total_steps"))
        return (
            rounds if isinstance(rounds, int) else None,
            float(minutes) if isinstance(minutes, int | float) else None,
            steps if isinstance(steps, int) else None,
        )

    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks or environments."""
        found = self._run.versions.get("tasks")
        if isinstance(found, list):
            return tuple(str(name) for name in found[:MAX_RUNS])
        tables = " UNION ".join(
            f"SELECT task FROM (SELECT task FROM live_{each} LIMIT {TAIL})"
            for each in ("episodes", "evaluations", "events")
        )
        return tuple(name for (name,) in self._all(tables))

    def rounds(self, after: tuple[int, int] | None = None) -> list[RoundRow]:
        """Rounds in order; at most `MAX_POINTS` rows, means of neighbours if more.

        With `after`, an attempt and seq: the rows behind it, at most `MAX_POINTS`.
        """
        if after is not None:
            behind = f"(attempt, seq) > (?, ?) ORDER BY attempt, seq LIMIT {MAX_POINTS}"
            return self._rows(RoundRow, "live_rounds", behind, *after)
        count, last = self._count("live_rounds")
        if count <= MAX_POINTS:
            return self._rows(RoundRow, "live_rounds", "1 ORDER BY round")
        kept = ("attempt", "seq", "round", "env_steps", "seconds")
        parts = [
            f"max({name})"
            if name in kept
            else f"sum({name})"
            if name == "refused"
            else f"avg({name})"
            for name in (each.name for each in fields(RoundRow))
        ]
        sql = f"SELECT {', '.join(parts)} FROM live_rounds GROUP BY {_bin(last)}"
        return [RoundRow(*row) for row in self._all(f"{sql} ORDER BY 3")]

    def heads(self, after: tuple[int, int] | None = None) -> list[HeadRow]:
        """Every head over the rounds, at most `MAX_POINTS` rows per head.

        With `after`, the rows behind it.
        """
        if after is not None:
            behind = f"(attempt, seq) > (?, ?) ORDER BY attempt, seq LIMIT {TAIL}"
            return self._rows(HeadRow, "live_heads", behind, *after)
        _, last = self._count("live_rounds")
        sql = (
            "SELECT max(round), head, avg(entropy), avg(kl), avg(openness) "
            f"FROM live_heads GROUP BY head, {_bin(last)} ORDER BY head, 1 LIMIT {TAIL}"
        )
        return [HeadRow(*row) for row in self._all(sql)]

    def evaluations(
        self, after: tuple[int, int] | None = None, stage: str = "validation"
    ) -> list[EvaluationPoint]:
        """Mean results by round, task and controller; with `after`, the newer ones."""
        sql = (
            'SELECT stage, round, task, controller, count(*), avg("return"), avg(score)'
            " FROM live_evaluations WHERE stage = ? AND (attempt, seq) > (?, ?) "
            "GROUP BY round, task, controller ORDER BY round, task, controller "
            f"LIMIT {TAIL}"
        )
        found = self._all(sql, stage, *(after or (0, 0)))
        return [EvaluationPoint(*row) for row in found]

    def comparison(self) -> list[ArmInterval]:
        """Controllers on the test hosts, or on the hosts that there are."""
        import numpy as np

        from esper.evaluation.statistics import mean_interval

        sql = (
            "SELECT task, controller, \"return\", added, nans, stage = 'test' "
            f"FROM live_evaluations WHERE stage <> 'validation' LIMIT {TAIL}"
        )
        arms: dict[tuple[str, str], list[tuple[float, float | None]]] = {}
        for task, arm, value, added, _, _ in self._all(sql):
            arms.setdefault((task, arm), []).append(
                (nan if value is None else value, added)
            )
        found = []
        for (task, arm), rows in sorted(arms.items()):
            values = np.array([value for value, _ in rows])
            sizes = [size for _, size in rows if size is not None]
            bounds = (nan, nan, nan)
            if np.isfinite(values).all():
                interval = mean_interval(values, resamples=2_000)
                bounds = interval.estimate, interval.low, interval.high
            mean = sum(sizes) / len(sizes) if sizes else None
            found.append(ArmInterval(task, arm, len(rows), *bounds, mean))
        return found

    def events(self, limit: int = 20) -> list[EventRow]:
        """The newest events, the newest first."""
        newest = f"1 ORDER BY attempt DESC, seq DESC LIMIT {min(limit, TAIL)}"
        return self._rows(EventRow, "live_events", newest)

    def notes(self, limit: int = 20) -> list[NoteRow]:
        """The newest remarks, the newest first."""
        newest = f"1 ORDER BY attempt DESC, seq DESC LIMIT {min(limit, TAIL)}"
        return self._rows(NoteRow, "live_notes", newest)

    def hosts(self) -> list[HostState]:
        """Every environment in its newest episode, by task and environment."""
        steps = self._newest(
            "task, env, episode, step, score, loss, added, budget_left, nans",
            "live_steps",
        )
        ends = self._newest('task, env, episode, step, "return", nans', "live_episodes")
        events: dict[tuple[str, int], list[EventRow]] = {}
        for event in reversed(self.events(TAIL)):
            events.setdefault((event.task, event.env), []).append(event)
        layers, found = self._newest_layers(), []
        for host in sorted({*steps, *ends, *events, *layers}):
            episode = max(
                [row[2] for row in (*steps.get(host, ()), *ends.get(host, ()))]
                + [event.episode for event in events.get(host, ())[-1:]]
                + [layers[host][0] for _ in range(host in layers)]
            )
            own = [each for each in events.get(host, ()) if each.episode == episode]
            seen = [row for row in steps.get(host, ()) if row[2] == episode]
            over = [row for row in ends.get(host, ()) if row[2] == episode]
            known = [row[3] for row in (*seen, *over)] + [each.step for each in own]
            names = ("score", "loss", "added", "budget_left")
            now = _marked(seen[0][8], names, seen[0][4:8]) if seen else (None,) * 4
            end = over[0] if over else None
            slots = {
                each.slot: SlotState(
                    each.slot, each.stage_to, each.blueprint, each.alpha
                )
                for each in own
            }
            shown = layers.get(host, (0, ()))
            found.append(
                HostState(
                    task=host[0],
                    env=host[1],
                    episode=episode,
                    began=min(known, default=0),
                    step=max(known, default=0),
                    **dict(zip(names, now, strict=True)),
                    ended=end is not None,
                    returns=_marked(end[5], ("return",), end[4:5])[0] if end else None,
                    slots=tuple(slots[slot] for slot in sorted(slots)),
                    lanes=tuple(_spans(own, end[3] if end else None)),
                    layers=shown[1] if shown[0] == episode else (),
                )
            )
        return found

    def _newest(
        self, columns: str, table: str
    ) -> dict[tuple[str, int], list[tuple[Any, ...]]]:
        """The newest rows of each environment, the newest first."""
        found: dict[tuple[str, int], list[tuple[Any, ...]]] = {}
        sql = f"SELECT {columns} FROM {table} ORDER BY attempt DESC, seq DESC"
        for row in self._all(f"{sql} LIMIT {TAIL}"):
            found.setdefault((row[0], row[1]), []).append(row)
        return found

    def _newest_layers(
        self,
    ) -> dict[tuple[str, int], tuple[int, tuple[LayerWidth, ...]]]:
        """Newest episode and present widths of each environment."""
        found: dict[tuple[str, int], tuple[int, dict[int, LayerWidth]]] = {}
        for task, env, episode, *layer in self._all(
            "SELECT task, env, episode, layer, name, width, step FROM live_layers "
            f"ORDER BY attempt DESC, seq DESC LIMIT {TAIL}"
        ):
            newest, layers = found.setdefault((task, env), (episode, {}))
            if newest == episode:
                layers.setdefault(layer[0], LayerWidth(*layer))
        return {
            host: (episode, tuple(layers[each] for each in sorted(layers)))
            for host, (episode, layers) in found.items()
        }

    def episodes(self, task: str, env: int) -> tuple[int, int]:
        """First and last known episode of an environment; (0, 0) if none is."""
        where = "WHERE task = ? AND env = ? ORDER BY attempt DESC, seq DESC"
        found = {
            episode
            for table in ("live_episodes", "live_events", "live_decisions")
            for (episode,) in self._all(
                f"SELECT episode FROM {table} {where} LIMIT {TAIL}", task, env
            )
        }
        return (min(found), max(found)) if found else (0, 0)

    def events_of(self, task: str, env: int, episode: int) -> list[EventRow]:
        """The events of one episode in order."""
        return self._of_episode(EventRow, "live_events", task, env, episode)

    def lanes(self, task: str, env: int, episode: int) -> list[LaneSpan]:
        """Stages of all seeds of one episode, in order of slot and time."""
        events = self.events_of(task, env, episode)
        ends = self._all(
            "SELECT step FROM live_episodes WHERE task = ? AND env = ? AND episode = ?",
            *(task, env, episode),
        )
        return _spans(events, ends[0][0] if ends else None)

    def steps(self, task: str, env: int, episode: int) -> list[StepRow]:
        """Score and loss of one episode, decision by decision."""
        return self._of_episode(StepRow, "live_steps", task, env, episode)

    def layers(self, task: str, env: int, episode: int) -> list[LayerWidth]:
        """Widths of the layers of one episode, whenever they changed."""
        return self._of_episode(LayerWidth, "live_layers", task, env, episode)

    def decisions(self, task: str, env: int, episode: int) -> list[DecisionRow]:
        """The decisions of one episode that are recorded in detail."""
        rows = self._of_episode(DecisionRow, "live_decisions", task, env, episode)
        return [
            DecisionRow(
                row.step, row.action, row.value, _json(row.features), _json(row.heads)
            )
            for row in rows
        ]

    def _of_episode(
        self, kind: type[T], table: str, task: str, env: int, episode: int
    ) -> list[T]:
        where = "task = ? AND env = ? AND episode = ? ORDER BY attempt, seq"
        return self._rows(kind, table, f"{where} LIMIT {ROWS}", task, env, episode)

    def _count(self, table: str) -> tuple[int, int]:
        """Number of rows and highest round."""
        return self._all(f"SELECT count(*), ifnull(max(round), 0) FROM {table}")[0]

    def _rows(self, kind: type[T], table: str, where: str, *values: object) -> list[T]:
        """Rows as records, with NaN where it was NaN."""
        names = [each.name for each in fields(kind)]  # type: ignore[arg-type]
        sql = f"SELECT {', '.join(names)}, nans FROM {table} WHERE {where}"
        return [kind(*_marked(row[-1], names, row)) for row in self._all(sql, *values)]

    def _all(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        until = monotonic() + SECONDS
        self._db.set_progress_handler(lambda: monotonic() > until, 100_000)
        try:
            return self._db.execute(sql, values).fetchall()
        except (sqlite3.Error, ValueError, OverflowError) as error:
            why = one_line(str(error), 80)
            raise InvalidInputError(
                f"{short(self.path)} cannot be read: {why}. Try again."
            ) from None


def _marked(
    nans: str | None, names: Sequence[str], values: Sequence[Any]
) -> tuple[Any, ...]:
    """The first values of a row, with NaN where its marks name the column."""
    if not nans:
        return tuple(values[: len(names)])
    marks = nans.split()
    pairs = zip(names, values, strict=False)
    return tuple(nan if name in marks else value for name, value in pairs)


def _spans(events: Sequence[EventRow], end: int | None) -> list[LaneSpan]:
    """Stages between events of one episode; `end` is its last decision."""
    slots: dict[int, list[EventRow]] = {}
    for event in events:
        if event.stage_from != event.stage_to:
            slots.setdefault(event.slot, []).append(event)
    return [
        LaneSpan(slot, each.blueprint, each.stage_to, each.step, stop)
        for slot, own in sorted(slots.items())
        for each, stop in zip(own, [*(x.step for x in own[1:]), end], strict=True)
        if each.stage_to != "DORMANT"
    ]


def _bin(last: int) -> str:
    return f"(round - 1) * {MAX_POINTS} / {max(last, MAX_POINTS)}"


def _json(text: str | None) -> Any:  # noqa: ANN401
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None
