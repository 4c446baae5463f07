"""Recordings: many drawn hosts, each lived through under many scripts with equal luck.

Rent, budget and the weights of the stops enter reward and observation only, never the
dynamics. So one recording is scored under all of them: hosts are recorded without rent
and with all the budget there is, and `Recording.observed` and `Recording.returns` put
other terms in.

A recording is one file per drawn task, `[host x script, decision, ...]`, in a folder:

    000012.safetensors      integers as int8 if that holds them, others as float16;
                            sealed, see `esper.files`

Files are published whole, so an interrupted recording goes on with the first that is
missing, and the same settings give the same files with any number of workers. Files
that do not verify are recorded again. One process records in a folder at a time.
"""

import json
import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated
from torch import Generator, Tensor

from esper.contracts.actions import HEADS, ActionSpec
from esper.contracts.errors import EsperWarning, InvalidInputError, unknown
from esper.contracts.messages import quoted, short
from esper.contracts.slots import SlotStates
from esper.contracts.stages import Stage
from esper.contracts.state import Tensors
from esper.contracts.world import (
    BlueprintOffers,
    HostStates,
    Observation,
    StepResult,
)
from esper.environment.clock import ENDS, Clock, ClockKind, Stop
from esper.environment.settings import LEAST_ERROR, WorldSettings
from esper.files import (
    Disk,
    Manifest,
    manifest_of,
    publish,
    read_json,
    read_safetensors,
    read_text,
    storage,
)
from esper.files import pack as pack_tensors
from esper.runs.lock import Lock
from esper.runs.settings import NONE
from esper.runs.streams import stream_seed
from esper.runs.train_config import RECORDINGS, WARM
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.scripts import Scripted, draw_scripts
from esper.tasks.task import Task
from esper.workers.jobs import Workers

VERSION: Final = 3
SUFFIX: Final = ".safetensors"
ABOUT: Final = "recording.json"
"""File that says what a folder holds."""
PARTS: Final[Mapping[str, type]] = {
    "host": HostStates,
    "slots": SlotStates,
    "offers": BlueprintOffers,
}
TERMS: Final = ("rent", "budget_left")
"""What a reader fills in."""
MOST: Final = 31.0
"""Multiples of the host that may be added while recording."""
RATES: Final = (0.5, 2.0)
"""Learning rates of recorded hosts, against the task's own."""
RESERVED: Final = (WARM, RECORDINGS, NONE)
"""What `start_from` of a training does not take for a folder."""
LARGEST: Final = 60_000.0
"""About the largest number of float16; whatever exceeds it is simply large."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What became of the hosts of one task."""

    arrays: Mapping[str, NDArray[Any]]
    """Fields of the observation before every decision, such as `host.score`, and
    `actions`, `score`, `added` after it, `[env, decision, ...]`."""
    clock: Clock
    scripts: int
    """Environments in a row that have the same luck; the first never grows."""
    facts: Mapping[str, Any]

    @property
    def envs(self) -> int:
        """Hosts times scripts."""
        return len(self.arrays["score"])

    @property
    def steps(self) -> int:
        """Decisions over all hosts and scripts."""
        return int(self.arrays["score"].size)

    def tensor(self, name: str) -> Tensor:
        """An array as float32, int64 or bool."""
        array = self.arrays[name]
        kind = {"f": np.float32, "i": np.int64}.get(array.dtype.kind, np.bool_)
        return torch.from_numpy(array.astype(kind))

    def observed(
        self, rent: Float[Tensor, " env"], budget: Float[Tensor, " env"]
    ) -> Observation:
        """All observations under these terms; the batch is environments x decisions."""
        decisions = self.arrays["score"].shape[1]
        host = {
            "rent": rent[:, None].expand(-1, decisions),
            "budget_left": budget[:, None] - self.tensor("host.added"),
        }
        parts = {}
        for part, kind in PARTS.items():
            read = {
                field.name: self.tensor(f"{part}.{field.name}")
                for field in fields(kind)
                if not (part == "host" and field.name in TERMS)
            }
            given = read | (host if part == "host" else {})
            parts[part] = kind(**{k: v.flatten(0, 1) for k, v in given.items()})
        first = torch.zeros(self.envs, decisions, dtype=torch.bool)
        first[:, 0] = True
        return Observation(episode_start=first.flatten(), **parts)

    def objective(
        self,
        rent: Float[Tensor, " env"],
        weights: Float[Tensor, " decision"] | None = None,
    ) -> Float[Tensor, "env moment"]:
        """Phi before the first decision and after each, in shares of errors.

        Shares of the errors that the never-grown host of the same luck makes, over
        the stops. The last column is what an episode is worth.

        Args:
            rent: Score charged per added multiple of the host.
            weights: Of the moments from the first decision on; none: the clock's.
        """
        if weights is None:
            weights = self.clock.weights().float()
        score = torch.cat((self.tensor("host.score")[:, :1], self.tensor("score")), 1)
        added = torch.cat((self.tensor("host.added")[:, :1], self.tensor("added")), 1)
        net = score - rent[:, None] * added
        banked = (weights * net).cumsum(dim=1)
        left = 1 - weights.cumsum(dim=0)
        never = score.view(-1, self.scripts, score.shape[1])[:, 0]
        error = (1 - never @ weights).clamp(min=LEAST_ERROR)
        error = error.repeat_interleave(self.scripts)
        return (banked + left * net) / error[:, None]


def world_settings(stop: Stop) -> WorldSettings:
    """The world in which hosts are recorded: with a known end, or without one."""
    clock: ClockKind = "batches" if stop == "end" else "compute"
    own = WorldSettings(stop=stop, clock=clock, slots=6, rate=RATES, at_once=True)
    return recorded_settings(own)


def recorded_settings(world: WorldSettings) -> WorldSettings:
    """A world without terms that do not change what becomes of hosts."""
    return replace(world, rent=0.0, budget=MOST, relative=False)


@torch.no_grad()
def record_task(
    task: Task, settings: WorldSettings, hosts: int, scripts: int, rng_seed: int
) -> Recording:
    """Let some hosts of a task live under a tree of scripts each."""
    # The engine is compiled; only what trains hosts waits for it.
    from esper.environment.growing import GrowingWorld

    settings = replace(settings, group_size=scripts)
    world = GrowingWorld(task, hosts * scripts, rng_seed, settings=settings)
    chance = np.random.default_rng(np.random.SeedSequence((rng_seed, 1)))
    spec, places = world.spec, world.cohort.places
    per_place = spec.slots.max_slots // places
    horizon, kinds = world.task.horizon, len(spec.blueprints)
    codes = [
        draw_scripts(scripts, horizon, places, kinds, per_place, chance)
        for _ in range(hosts)
    ]
    controller = Scripted(spec, np.concatenate(codes), places)
    observation, state = world.reset(), None
    found: dict[str, list[Tensor]] = {}
    alive = torch.ones(world.num_envs, dtype=torch.bool)
    for _ in range(horizon):
        masks = compute_masks(observation, spec)
        actions, state = controller.decide(observation, masks, state, Generator())
        for part, kind in PARTS.items():
            for field in fields(kind):
                own = getattr(getattr(observation, part), field.name)
                found.setdefault(f"{part}.{field.name}", []).append(own)
        result = world.step(actions)
        score, added = _after(result)
        if result.report is not None:
            alive[result.report.env[result.report.panicked]] = False
        # A host whose numbers broke is worth as little as one that knows nothing.
        found.setdefault("score", []).append(torch.where(alive, score, -1.0))
        found.setdefault("added", []).append(added)
        found.setdefault("actions", []).append(actions)
        observation = result.observation
    arrays = {
        name: _compact(torch.stack(parts, dim=1).numpy())
        for name, parts in found.items()
        if name not in {f"host.{term}" for term in TERMS}
    }
    facts = {
        "version": VERSION,
        "task": task.name,
        "kind": task.description,
        "host": str(task.host),
        "actions": spec.describe(),
        "rng_seed": rng_seed,
    }
    return Recording(arrays, world.clock, scripts, facts)


def _after(result: StepResult) -> tuple[Tensor, Tensor]:
    """Score and size of every host after a step, also where an episode has ended."""
    host, report = result.observation.host, result.report
    score, added = host.score.clone(), host.added.clone()
    if report is not None:
        score[report.env], added[report.env] = report.score, report.added
    return score, added


def _compact(array: NDArray[Any]) -> NDArray[Any]:
    if array.dtype.kind == "f":
        clipped: NDArray[Any] = np.clip(array, -LARGEST, LARGEST)
        return clipped.astype(np.float16)
    if array.dtype.kind != "i":
        return array
    low, high = array.min(initial=0), array.max(initial=0)
    limits = ((kind, np.iinfo(kind)) for kind in (np.int8, np.int16, np.int32))
    for kind, limit in limits:
        if limit.min <= low and high <= limit.max:
            return array.astype(kind)
    return array


# Files.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig:
    """What is recorded."""

    stop: Stop = "anytime"
    """Whether the end of an episode is known: "end" or "anytime"."""
    tasks: int = 100
    """Tasks that are drawn."""
    hosts: int = 1
    """Hosts of each task."""
    scripts: int = 20
    """Scripts that every host lives under."""
    rng_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse an end that is neither known nor unknown."""
        if self.stop not in ENDS:
            raise unknown("stop must be end or anytime; got", self.stop, ENDS)


def record(
    config: RecordConfig,
    folder: Path,
    workers: Workers | None = None,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Record the tasks that are missing in a folder.

    Args:
        config: What is recorded.
        folder: Where to.
        workers: Who records; none: this process. Files are the same.
        report: Called with how many tasks are done, of how many.
    """
    if str(folder) in RESERVED:
        raise InvalidInputError(
            f"{str(folder)!r} is a reserved name of --start_from. Use another folder, "
            f"such as {folder}/{config.stop}."
        )
    about = folder / ABOUT
    mine = json.dumps({"version": VERSION, **asdict(config)}, indent=1)
    with storage(folder, "write"):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(Lock(folder)):
        if os.path.lexists(about) and read_text(about) != mine:
            raise InvalidInputError(
                f"{short(folder)} holds recordings with other settings. Use another "
                "folder, or the same settings to continue it."
            )
        publish(Disk(), about, mine.encode())
        wanted = [folder / file_name(number) for number in range(config.tasks)]
        left = [
            number
            for number, file in enumerate(wanted)
            if not _is_done(file, _stream_seed(config, number))
        ]
        done = config.tasks - len(left)
        report(done, config.tasks)
        made = (workers or Workers()).run(
            _packed, left, config, about=lambda number: f"recording task {number}"
        )
        for number, data in zip(left, made, strict=True):
            publish(Disk(), wanted[number], data)
            done += 1
            report(done, config.tasks)


def file_name(number: int) -> str:
    """The name of the recording of a task."""
    return f"{number:06}{SUFFIX}"


def _stream_seed(config: RecordConfig, number: int) -> int:
    return stream_seed(config.rng_seed, f"recording, {config.stop}, {number}")


def _is_done(file: Path, rng_seed: int) -> bool:
    """Whether a recording is there and verifies; warns of one that does not."""
    found = kept_recording(file)
    return found is not None and found.facts.get("rng_seed") == rng_seed


def _packed(config: RecordConfig, number: int) -> bytes:
    """The file of one drawn task."""
    from esper.tasks.family import drawn_task

    task = drawn_task(config.rng_seed, number)
    seed = _stream_seed(config, number)
    world = world_settings(config.stop)
    found = record_task(task, world, config.hosts, config.scripts, seed)
    return pack(found)


def pack(recording: Recording) -> bytes:
    """A recording as the bytes of a file."""
    clock = recording.clock
    facts = {
        **recording.facts,
        "scripts": recording.scripts,
        "clock": [clock.kind, clock.horizon, clock.first, clock.ratio, clock.stop],
    }
    tensors = {n: torch.from_numpy(array) for n, array in recording.arrays.items()}
    return pack_tensors(tensors, manifest_of(facts))


def _field_kinds() -> dict[str, str]:
    """Every array of a recording: b, i or f, as NumPy calls its kind of dtype."""
    found = {"score": "f", "added": "f", "actions": "i"}
    for part, kind in PARTS.items():
        for each in fields(kind):
            dtypes = getattr(each.type, "dtypes", ["float32"])
            found[f"{part}.{each.name}"] = dtypes[0][0]
    return {name: found[name] for name in found if name not in LEFT_OUT}


LEFT_OUT: Final = frozenset(f"host.{term}" for term in TERMS)
KINDS: Final = _field_kinds()
PREFIXES: Final = {"b": ("bool",), "i": ("int",), "f": ("float16",)}
"""Names of the dtypes of each kind."""


@validated(frozen=True, config=ConfigDict(strict=True))
class Facts:
    """What the manifest of a recording must say; it says more."""

    version: int
    scripts: Annotated[int, Field(ge=1)]
    clock: tuple[ClockKind, int, float, float, Stop]
    actions: dict[str, Any]
    """See `ActionSpec.describe`."""
    rng_seed: int

    def __post_init__(self) -> None:
        """Refuse an action space without a list of blueprints."""
        if not isinstance(self.actions.get("blueprints"), list):
            raise ValueError("actions has no list of blueprints.")


_FACTS: Final = TypeAdapter(Facts)


def _facts(manifest: Manifest | None) -> Facts:
    """What a recording says of itself; refuses what is none, or of another version."""
    facts = manifest.facts if manifest is not None else {}
    version = facts.get("version")
    if "clock" not in facts or "scripts" not in facts:
        raise InvalidInputError("this is no recording; record it again.")
    if version != VERSION:
        raise InvalidInputError(
            f"this is a recording of version {quoted(version)}, this Esper reads "
            f"{VERSION}; record it again."
        )
    try:
        return _FACTS.validate_json(json.dumps(facts))
    except ValueError:
        raise InvalidInputError("the recording is damaged; record it again.") from None


def _fit(spec: ActionSpec | None, tensors: Tensors, manifest: Manifest | None) -> None:
    """Refuse a file that does not hold a recording of this action space."""
    facts = _facts(manifest)
    if tensors.keys() != KINDS.keys():
        raise InvalidInputError("it was recorded with other inputs; record it again.")
    if spec is not None and facts.actions != spec.describe():
        raise InvalidInputError("it has another action space than the policy.")
    envs, decisions = (*tensors["score"].shape, 0, 0)[:2]
    offers = tensors["offers.fits"].shape[2:]
    tails = {"host": (), "slots": offers[:1], "offers": offers}
    for name, tensor in tensors.items():
        tail = (len(HEADS),) if name == "actions" else tails.get(name.split(".")[0], ())
        kind = str(tensor.dtype).removeprefix("torch.")
        right = kind.startswith(PREFIXES[KINDS[name]])
        if tensor.shape != (envs, decisions, *tail) or not right:
            raise InvalidInputError(
                f"{name} is {kind}{[*tensor.shape]}; record it again."
            )
    whole = envs > 0 and envs % facts.scripts == 0 and len(offers) == 2
    if not whole or facts.clock[1] != decisions:
        raise InvalidInputError("its sizes contradict each other; record it again.")
    Clock(*facts.clock)


def read_recording(file: Path, spec: ActionSpec | None = None) -> Recording:
    """The recording in a file; refuses what is damaged or of another kind.

    Args:
        file: That `record` wrote.
        spec: The action space that it must have, if any.
    """
    tensors, manifest = read_safetensors(file, partial(_fit, spec))
    assert manifest is not None  # sealed files have one
    facts = _facts(manifest)
    names = facts.actions["blueprints"]
    most = {
        "slots.stage": torch.tensor(max(Stage)),
        "slots.blueprint": torch.tensor(len(names) - 1 if names else -1),
        "slots.style": torch.tensor(1),
        "actions": torch.tensor(spec.sizes if spec else 1 << 30) - 1,
    }
    for name, limit in most.items():
        least = -1 if name == "slots.blueprint" else 0
        found = tensors[name].long()
        if bool(((found < least) | (found > limit)).any()):
            raise InvalidInputError(
                f"{short(file)}: {name} has choices that do not exist."
            )
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return Recording(arrays, Clock(*facts.clock), facts.scripts, manifest.facts)


def kept_recording(file: Path, spec: ActionSpec | None = None) -> Recording | None:
    """A recording that is in a file already; None, with a warning, if it is no use."""
    if not os.path.lexists(file):
        return None
    try:
        return read_recording(file, spec)
    except InvalidInputError as error:
        warnings.warn(f"{error} It is recorded again.", EsperWarning, stacklevel=2)
        return None


def holds_recordings(folder: Path) -> bool:
    """Whether a folder is one that `record` made."""
    return os.path.isfile(folder / ABOUT)  # Path.is_file raises for too long names


def read_recordings(
    folder: Path,
    spec: ActionSpec | None = None,
    stop: str | None = None,
    clock: str | None = None,
) -> list[Recording]:
    """All recordings of a folder, in order.

    Args:
        folder: That `record` made.
        spec: The action space that they must have, if any.
        stop: The end that they must have, known or not, if any.
        clock: The kind of clock that they must have, if any.
    """
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise InvalidInputError(
            f"{short(folder)} has no recordings; make some with esper record."
        )
    about = read_json(folder / ABOUT) if holds_recordings(folder) else {}
    wanted = about.get("tasks", 0)
    if not isinstance(wanted, int):
        raise InvalidInputError(f"{short(folder / ABOUT)} is damaged; record again.")
    if len(files) < wanted:
        raise InvalidInputError(
            f"{short(folder)} has {len(files)} of {wanted} recordings; go on with "
            "esper record."
        )
    found = []
    for file in files:
        found.append(read_recording(file, spec))
        own = found[-1].clock
        if stop is not None and own.stop != stop:
            raise InvalidInputError(
                f"{folder} was recorded with stop {own.stop!r}, but world.stop is "
                f"{stop!r}; make others with esper record --stop {stop}."
            )
        if clock is not None and own.kind != clock:
            raise InvalidInputError(
                f"{folder} was recorded with clock {own.kind!r}, but world.clock is "
                f"{clock!r}; set world.clock {own.kind}."
            )
    return found
