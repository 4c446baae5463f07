"""Recordings of growing hosts: many scripts per host, with common random numbers.

Rent, budget and the weights of the stops change reward and observation, never the
dynamics. So hosts are recorded once, without rent and with the largest budget;
`Recording.observed` and `Recording.objective` apply other terms later.

A folder holds one sealed file per task (see `esper.files`), `[env, decision, ...]`, as
float16 and small integers. The same settings give the same files with any number of
workers. `record` completes a folder and replaces damaged files; readers refuse them.
"""

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter
from pydantic.dataclasses import dataclass as validated
from torch import Generator, Tensor

from esper.contracts.actions import HEADS, ActionSpec
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.contracts.messages import short
from esper.contracts.slots import SlotStates
from esper.contracts.stages import Stage
from esper.contracts.state import Tensors
from esper.contracts.world import BlueprintOffers, HostStates, Observation, StepResult
from esper.environment.clock import Clock, ClockKind, Stop
from esper.environment.settings import LEAST_ERROR, WorldSettings
from esper.files import (
    Disk,
    Manifest,
    manifest_of,
    publish,
    read_safetensors,
    read_text,
    storage,
)
from esper.files import pack as pack_tensors
from esper.runs.run import Lock
from esper.runs.settings import (
    NONE,
    RngSeed,
    as_toml,
    construct,
    settings,
    table_of,
)
from esper.runs.streams import stream_seed
from esper.runs.train_config import RECORDINGS, WARM
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.scripts import Scripted, draw_scripts
from esper.tasks.task import Task
from esper.workers.jobs import Workers

SUFFIX: Final = ".safetensors"
SETTINGS_FILE: Final = "recording.toml"
PARTS: Final[Mapping[str, type]] = {
    "host": HostStates,
    "slots": SlotStates,
    "offers": BlueprintOffers,
}
UNRECORDED: Final = ("host.rent", "host.budget_left")
"""Fields of the observation that depend on the terms."""
FIELDS: Final = tuple(
    (part, field)
    for part, kind in PARTS.items()
    for field in fields(kind)
    if f"{part}.{field.name}" not in UNRECORDED
)
ARRAY_KINDS: Final[Mapping[str, str]] = {
    f"{part}.{field.name}": getattr(field.type, "dtypes", ["float32"])[0][0]
    for part, field in FIELDS
} | {"score": "f", "added": "f", "actions": "i"}
"""Arrays of a recording: b, i or f, NumPy's letter for the kind of dtype."""
DTYPE_PREFIXES: Final = {"b": "bool", "i": "int", "f": "float16"}
MAX_GROWTH: Final = 31.0
"""Budget while recording, in multiples of the host's size."""
RATE_RANGE: Final = (0.5, 2.0)
"""Learning rates of recorded hosts, in multiples of the task's own."""
RESERVED_NAMES: Final = (WARM, RECORDINGS, NONE)
"""Values of `start_from` that are not folders."""
FLOAT16_LIMIT: Final = 60_000.0
"""Larger numbers are clipped to this, which is about the maximum of float16."""


@dataclass(frozen=True, slots=True)
class Recording:
    """All decisions and scores of the hosts of one task."""

    arrays: Mapping[str, NDArray[Any]]
    """Fields of the observation before every decision, such as `host.score`; then
    `actions`, and `score` and `added` after it. `[env, decision, ...]`."""
    clock: Clock
    scripts: int
    """Environments in a row that share random numbers; the first never grows."""
    facts: Mapping[str, Any]

    @property
    def envs(self) -> int:
        """Number of hosts times scripts."""
        return len(self.arrays["score"])

    @property
    def steps(self) -> int:
        """Number of decisions over all hosts and scripts."""
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
        found: dict[str, dict[str, Tensor]] = {part: {} for part in PARTS}
        for part, field in FIELDS:
            found[part][field.name] = self.tensor(f"{part}.{field.name}")
        found["host"]["rent"] = rent[:, None].expand(-1, decisions)
        found["host"]["budget_left"] = budget[:, None] - found["host"]["added"]
        parts = {
            part: kind(**{k: v.flatten(0, 1) for k, v in found[part].items()})
            for part, kind in PARTS.items()
        }
        first = torch.zeros(self.envs, decisions, dtype=torch.bool)
        first[:, 0] = True
        return Observation(episode_start=first.flatten(), **parts)

    def objective(
        self,
        rent: Float[Tensor, " env"],
        weights: Float[Tensor, " decision"] | None = None,
    ) -> Float[Tensor, "env moment"]:
        """Phi before the first decision and after each; the last is the objective.

        The unit is the error, over the stops, of the same host if it never grows. The
        weights of the moments are those of the clock if they are None.
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
    """Settings of the world that `record` uses: "end" or "anytime"."""
    clock: ClockKind = "batches" if stop == "end" else "compute"
    return recorded_settings(
        WorldSettings(stop=stop, clock=clock, slots=6, rate=RATE_RANGE, at_once=True)
    )


def recorded_settings(world: WorldSettings) -> WorldSettings:
    """The same world, without rent and with the largest budget."""
    return replace(world, rent=0.0, budget=MAX_GROWTH, relative=False)


@torch.no_grad()
def record_task(
    task: Task, world: WorldSettings, hosts: int, scripts: int, rng_seed: int
) -> Recording:
    """Train some hosts of a task, each under a tree of scripts."""
    # The engine is compiled, so it is imported only where hosts are trained.
    from esper.environment.growing import GrowingWorld

    settings = replace(world, group_size=scripts)
    growing = GrowingWorld(task, hosts * scripts, rng_seed, settings=settings)
    rng = np.random.default_rng(np.random.SeedSequence((rng_seed, 1)))
    spec, places = growing.spec, growing.cohort.places
    per_place = spec.slots.max_slots // places
    horizon, kinds = growing.task.horizon, len(spec.blueprints)
    codes = [
        draw_scripts(scripts, horizon, places, kinds, per_place, rng)
        for _ in range(hosts)
    ]
    controller = Scripted(spec, np.concatenate(codes), places)
    observation, state = growing.reset(), None
    columns = defaultdict[str, list[Tensor]](list)
    alive = torch.ones(growing.num_envs, dtype=torch.bool)
    for _ in range(horizon):
        masks = compute_masks(observation, spec)
        actions, state = controller.decide(observation, masks, state, Generator())
        for part, field in FIELDS:
            value = getattr(getattr(observation, part), field.name)
            columns[f"{part}.{field.name}"].append(value)
        result = growing.step(actions)
        score, added = _after(result)
        if result.report is not None:
            alive[result.report.env[result.report.panicked]] = False
        # A host whose weights are not finite gets the lowest score.
        columns["score"].append(torch.where(alive, score, -1.0))
        columns["added"].append(added)
        columns["actions"].append(actions)
        observation = result.observation
    arrays = {
        name: _compact(torch.stack(values, dim=1).numpy())
        for name, values in columns.items()
    }
    facts = {
        "task": task.name,
        "kind": task.description,
        "host": str(task.host),
        "actions": spec.describe(),
        "rng_seed": rng_seed,
    }
    return Recording(arrays, growing.clock, scripts, facts)


def _after(result: StepResult[Observation]) -> tuple[Tensor, Tensor]:
    """Score and size of every host after a step, also if its episode ended."""
    host, report = result.observation.host, result.report
    score, added = host.score.clone(), host.added.clone()
    if report is not None:
        score[report.env], added[report.env] = report.score, report.added
    return score, added


def _compact(array: NDArray[Any]) -> NDArray[Any]:
    """The array as float16, as the smallest integer type that holds it, or as bool."""
    if array.dtype.kind == "f":
        clipped: NDArray[Any] = np.clip(array, -FLOAT16_LIMIT, FLOAT16_LIMIT)
        return clipped.astype(np.float16)
    if array.dtype.kind != "i":
        return array
    low, high = array.min(initial=0), array.max(initial=0)
    for dtype in (np.int8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return array.astype(dtype)
    return array


# Files.


Amount = Annotated[int, Field(ge=1, le=1_000_000)]


@settings
class RecordConfig:
    """Settings of `record`."""

    stop: Stop = "anytime"
    """When to score episodes: end or anytime."""
    tasks: Amount = 100
    """Number of tasks to draw."""
    hosts: Amount = 1
    """Number of hosts per task."""
    scripts: Annotated[int, Field(ge=2, le=1_000)] = 20
    """Number of growth schedules per host."""
    rng_seed: RngSeed = 0
    """Random seed of the tasks."""


class RecordJob(NamedTuple):
    """All that one file depends on; the worker that records it draws the task."""

    number: int
    draw: Callable[[], Task]
    world: WorldSettings
    hosts: int
    scripts: int
    rng_seed: int


def record(
    config: RecordConfig,
    folder: Path,
    workers: Workers | None = None,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> None:
    """Record drawn tasks whose files are missing or damaged in a folder.

    Args:
        config: What to record.
        folder: Output folder; only one process can record in it at a time.
        workers: Processes that record; None: this process.
        report: Called with the number of finished tasks and the number of all tasks.
    """
    from esper.tasks.family import drawn_task

    if str(folder) in RESERVED_NAMES:
        raise InvalidInputError(
            f"{str(folder)!r} is a reserved name of --start_from. Use another folder, "
            f"such as {folder}/{config.stop}."
        )
    file = folder / SETTINGS_FILE
    text = as_toml(config)
    with storage(folder, "write"):
        folder.mkdir(parents=True, exist_ok=True)
    with closing(Lock(folder)):
        if os.path.lexists(file) and read_text(file) != text:
            raise InvalidInputError(
                f"{short(folder)} holds recordings with other settings. Use another "
                "folder, or the same settings to continue it."
            )
        publish(Disk(), file, text.encode())
        seed, world = config.rng_seed, world_settings(config.stop)
        jobs = [
            RecordJob(
                number,
                partial(drawn_task, seed, number),
                world,
                config.hosts,
                config.scripts,
                stream_seed(seed, f"recording, {config.stop}, {number}"),
            )
            for number in range(config.tasks)
        ]
        for done in record_missing(folder, jobs, workers=workers):
            report(done, config.tasks)


def record_missing(
    folder: Path,
    jobs: Sequence[RecordJob],
    spec: ActionSpec | None = None,
    workers: Workers | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Record the jobs whose files are missing or damaged.

    Yields:
        The number of finished files: before the first recording and after each. The
        last one is smaller than the number of jobs if `stop` returned True.
    """
    left = [job for job in jobs if not _is_recorded(_file(folder, job), job, spec)]
    done = len(jobs) - len(left)
    yield done
    made = (workers or Workers()).run(
        _packed_recording,
        left,
        None,
        about=lambda job: f"recording task {job.number}",
        stop=stop,
    )
    for job, data in zip(left, made, strict=False):  # fewer if it was stopped
        publish(Disk(), _file(folder, job), data)
        done += 1
        yield done


def _file(folder: Path, job: RecordJob) -> Path:
    return folder / f"{job.number:06}{SUFFIX}"


def _is_recorded(file: Path, job: RecordJob, spec: ActionSpec | None) -> bool:
    """Whether a file holds the recording of a job; warns if it is damaged."""
    if not os.path.lexists(file):
        return False
    try:
        return bool(read_recording(file, spec).facts["rng_seed"] == job.rng_seed)
    except InvalidInputError as error:
        warnings.warn(f"{error} It is recorded again.", EsperWarning, stacklevel=2)
        return False


def _packed_recording(shared: None, job: RecordJob) -> bytes:
    task = job.draw()
    return pack(record_task(task, job.world, job.hosts, job.scripts, job.rng_seed))


def pack(recording: Recording) -> bytes:
    """The bytes of the file of a recording."""
    clock = recording.clock
    facts = {
        **recording.facts,
        "scripts": recording.scripts,
        "clock": [clock.kind, clock.horizon, clock.first, clock.ratio, clock.stop],
    }
    tensors = {n: torch.from_numpy(array) for n, array in recording.arrays.items()}
    return pack_tensors(tensors, manifest_of(facts))


@validated(frozen=True, config=ConfigDict(strict=True))
class Facts:
    """Required entries of the manifest of a recording."""

    scripts: Annotated[int, Field(ge=1)]
    clock: tuple[ClockKind, int, float, float, Stop]
    actions: dict[str, Any]
    """Result of `ActionSpec.describe`."""
    rng_seed: int

    def __post_init__(self) -> None:
        """Refuse an action space without a list of blueprints."""
        if not isinstance(self.actions.get("blueprints"), list):
            raise ValueError("actions has no list of blueprints.")


_FACTS: Final = TypeAdapter(Facts)


def _facts(manifest: Manifest) -> Facts:
    """The manifest of a recording; refuses other files."""
    try:
        return _FACTS.validate_json(json.dumps(manifest.facts))
    except ValueError:
        raise InvalidInputError("it is not a recording. Record it again.") from None


def _fit(spec: ActionSpec | None, tensors: Tensors, manifest: Manifest) -> None:
    """Refuse a file that does not hold a recording of this action space."""
    facts = _facts(manifest)
    if tensors.keys() != ARRAY_KINDS.keys():
        raise InvalidInputError("it was recorded with other inputs. Record it again.")
    if spec is not None and facts.actions != spec.describe():
        raise InvalidInputError(
            "its action space differs from that of the policy. Use the same world."
        )
    envs, decisions = (*tensors["score"].shape, 0, 0)[:2]
    offers = tensors["offers.fits"].shape[2:]
    tails = {"actions": (len(HEADS),), "slots": offers[:1], "offers": offers}
    for name, tensor in tensors.items():
        tail = tails.get(name.split(".")[0], ())
        dtype = str(tensor.dtype).removeprefix("torch.")
        expected = DTYPE_PREFIXES[ARRAY_KINDS[name]]
        if tensor.shape != (envs, decisions, *tail) or not dtype.startswith(expected):
            raise InvalidInputError(
                f"{name} is {dtype}{[*tensor.shape]}, which does not fit the other "
                "arrays. Record it again."
            )
    complete = envs > 0 and envs % facts.scripts == 0 and len(offers) == 2
    if not complete or facts.clock[1] != decisions:
        raise InvalidInputError("its sizes contradict each other. Record it again.")
    Clock(*facts.clock)


def read_recording(file: Path, spec: ActionSpec | None = None) -> Recording:
    """The recording in a file; refuses damaged files and, if given, another `spec`."""
    tensors, manifest = read_safetensors(file, partial(_fit, spec))
    facts = _facts(manifest)
    limits = {
        "slots.stage": torch.tensor(max(Stage)),
        "slots.blueprint": torch.tensor(len(facts.actions["blueprints"]) - 1),
        "slots.style": torch.tensor(1),
        "actions": torch.tensor(spec.sizes if spec else 1 << 30) - 1,
    }
    for name, limit in limits.items():
        least = -1 if name == "slots.blueprint" else 0
        found = tensors[name].long()
        if bool(((found < least) | (found > limit)).any()):
            raise InvalidInputError(
                f"{short(file)}: {name} has choices that do not exist. Record it again."
            )
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return Recording(arrays, Clock(*facts.clock), facts.scripts, manifest.facts)


def holds_recordings(folder: Path) -> bool:
    """Whether `record` made a folder."""
    # Path.is_file raises an error for names that are too long.
    return os.path.isfile(folder / SETTINGS_FILE)


def read_recordings(
    folder: Path,
    spec: ActionSpec | None = None,
    stop: str | None = None,
    clock: str | None = None,
) -> list[Recording]:
    """All recordings of a folder, in order; None accepts any spec, stop or clock."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files:
        raise InvalidInputError(
            f"{short(folder)} has no recordings. Make some with esper record."
        )
    wanted = 0
    if holds_recordings(folder):
        about = folder / SETTINGS_FILE
        table = table_of(read_text(about), RecordConfig, f"{short(about)}: ")
        wanted = construct(RecordConfig, table).tasks
    if len(files) < wanted:
        raise InvalidInputError(
            f"{short(folder)} has {len(files)} of {wanted} recordings. Continue with "
            "esper record."
        )
    found = []
    for file in files:
        recording = read_recording(file, spec)
        for name, own, other in (
            ("stop", recording.clock.stop, stop),
            ("clock", recording.clock.kind, clock),
        ):
            if other is not None and own != other:
                raise InvalidInputError(
                    f"{folder} was recorded with {name} {own!r}, but world.{name} is "
                    f"{other!r}. Set world.{name} to {own}, or use other recordings."
                )
        found.append(recording)
    return found
