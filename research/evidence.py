"""Does the controller pay? The third protocol, docs/evidence/third.md.

Every part, one arm on the hosts of one task at one rent, is one small file, so a count
that was stopped goes on where it was. Arms that do not read the rent are trained once
for all rents, since scores and sizes are kept apart. The ledger holds the figures of
all parts, and tables are made of it alone; `--verify` trains a sample of it again.
"""

import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.errors import InvalidInputError
from esper.environment.settings import WorldSettings
from esper.evaluation.evaluation import (
    evaluate_controller,
    evaluate_plain,
    times_as_wide,
    widened,
)
from esper.files import Disk, publish, storage
from esper.runs.controllers import load_controller
from esper.runs.progress import Progress
from esper.runs.records import LADDER, EvalResult
from esper.tamiyo.registry import SHIPPED, Maker
from esper.tamiyo.shipped import shipped
from esper.tasks.catalogue import task as find_task
from esper.tasks.family import drawn_task
from esper.tasks.task import Task
from esper.training.recordings import read_recordings
from esper.workers.jobs import Workers, workers
from research.evidence_tables import (
    FIRST_CONTROLLER,
    RENTS,
    Row,
    draw,
    reports,
)
from research.regression import Regression, fitted

Floats = NDArray[np.float64]
ROOT: Final = Path(__file__).parents[1]
PROTOCOL: Final = ROOT / "docs/evidence/third.md"
LEDGER: Final = ROOT / "docs/evidence/third.npz"
COUNTED, TUNED, FAMILY = 9410, 9411, 9412
"""Random seeds: hosts that count, hosts that learning rates are chosen on, and drawn
tasks."""
TASKS: Final = "letter,mnist1d,penbased,satimage,optdigits,texture,text"
RATES: Final = (0.5, 1.0, 2.0, 4.0)
TUNED_HOSTS: Final = 2
DRAWN_HOSTS: Final = 3
BLIND: Final = ("never", "random", "early", "doubling", "large-then-cut", *LADDER)
"""Arms that do not read the rent."""
RULES: Final = ("by-rent", "timetable-by-rent")
KNOWN: Final = WorldSettings(at_once=True, slots=6, budget=15.0)
UNKNOWN: Final = replace(KNOWN, stop="anytime", clock="compute")
WORLDS: Final = {"known": KNOWN, "unknown": UNKNOWN, "scale": UNKNOWN}
DIGITS: Final = 16
LONGEST: Final = 3600.0
"""Seconds that a part may take."""
TOLERANCE: Final = 0.01
"""Mean difference of test scores between a part and the same trained again, at most:
another processor rounds differently, and training amplifies it."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One arm on the hosts of one task at one rent."""

    question: str
    task: str
    arm: str
    rent: float | None
    """None: the arm does not read it."""
    hosts: int
    rates: tuple[float, ...] = RATES
    """Among which the learning rate is chosen; one is not tried."""
    parameters: int | None = None
    """Of a plain network of a given size."""
    maker: Maker | None = field(default=None, repr=False)
    looks: bool = False
    """Whether decision rows are looked at, which is charged."""

    @property
    def file(self) -> str:
        """The name of its file."""
        rent = "any" if self.rent is None else f"{self.rent:g}"
        return f"{self.question}.{self.task}.{self.arm}.{rent}.json".replace(" ", "-")

    def source(self) -> str:
        """Digest of what the protocol, its settings and a learned arm are."""
        own = json.dumps([self.hosts, self.rates, self.parameters]).encode()
        return sha256(
            own + protocol().encode() + digest(self.maker).encode()
        ).hexdigest()


def run(
    known: str = SHIPPED,
    unknown: str = SHIPPED,
    recordings_known: str = "",
    recordings_unknown: str = "",
    tasks: str = TASKS,
    hosts: int = 10,
    drawn: int = 24,
    mnist5k: bool = False,
    parts: str = "runs/evidence",
    ledger: str = str(LEDGER),
    plot: str = "",
    processes: int = 2,
    ray: str = "",
    verify: bool = False,
    sample: int = 12,
) -> list[Report]:
    """Count what is missing, write the ledger, and print its tables.

    Args:
        known: Controllers for a known end: folders of runs, or `tamiyo`; none: that
            question is left out.
        unknown: The same for an unknown end.
        recordings_known: Folder of recordings that regressions are fitted to; none:
            without them.
        recordings_unknown: The same for an unknown end.
        tasks: Data sets.
        hosts: Hosts of each.
        drawn: Drawn tasks of the question `scale`.
        mnist5k: Whether that slow task is among them.
        parts: Folder of the parts.
        ledger: File of the ledger. The published one is replaced only by rows that
            hold all of its own; others go to `ledger.npz` beside the parts.
        plot: File to draw the differences into, as SVG.
        processes: Parts at the same time.
        ray: The address of a Ray cluster that counts them, or `local` to start one.
        verify: Whether to train a sample of the ledger again, and nothing else.
        sample: Parts in that sample.
    """
    names = [*tasks.split(","), *(["mnist5k"] if mnist5k else [])]
    if timing.QUICK:
        names, hosts, drawn, processes = names[1:2], 2, 1, 1
    learned = {"known": makers(known, recordings_known, KNOWN.stop)}
    without_end = makers(unknown, recordings_unknown, UNKNOWN.stop)
    learned |= dict.fromkeys(("unknown", "scale"), without_end)
    if verify:
        return [verified(read_ledger(Path(ledger)), learned, sample, processes)]
    plans = {
        "known": (names, hosts),
        "unknown": (names, hosts),
        "scale": ([f"drawn {number}" for number in range(drawn)], DRAWN_HOSTS),
    }
    with TemporaryDirectory() as temporary:
        folder = Path(temporary if timing.QUICK else parts)
        rows = []
        for question, (own, count) in plans.items():
            if not learned[question]:
                continue
            planned = planned_parts(question, own, count, learned[question])
            who = (folder, processes)
            done = counted(planned, *who, question, ray or None)
            rows += done
            static = static_parts(planned, done)
            rows += counted(static, *who, f"{question}, static", ray or None)
        if not timing.QUICK:
            file = ledger_for(rows, Path(ledger), folder)
            write_ledger(rows, file)
            Console(stderr=True).print(f"The ledger is in {file}.", soft_wrap=True)
    if plot:
        publish(Disk(), Path(plot), draw(rows))
    return reports(rows)


def makers(controllers: str, recordings: str, stop: str) -> dict[str, Maker]:
    """Learned arms by name: controllers, and regressions on recordings.

    Args:
        controllers: Folders of runs, or `tamiyo`.
        recordings: A folder, if regressions are fitted to it.
        stop: The end that recordings must have, known or not.
    """
    found: dict[str, Maker] = {}
    named = filter(None, controllers.split(","))
    for number, given in enumerate(named, start=1):
        made = shipped() if given == SHIPPED else load_controller(given)
        found[f"{FIRST_CONTROLLER}{number}"] = made
    if found and recordings:
        recorded = read_recordings(Path(recordings), stop=stop)
        for name in ("ridge", "boosting"):
            model = fitted(name, recorded, np.random.default_rng(0))
            found[name] = Regression(name, model)
    return found


def planned_parts(
    question: str, tasks: Sequence[str], hosts: int, learned: Mapping[str, Maker]
) -> list[Part]:
    """All parts of a question but plain networks of a controller's size."""
    rates = RATES[1:2] if timing.QUICK else RATES
    common: dict[str, Any] = {"question": question, "hosts": hosts, "rates": rates}
    plans = []
    for task in tasks:
        plans += [Part(task=task, arm=arm, rent=None, **common) for arm in BLIND]
        for rent in RENTS:
            plans += [Part(task=task, arm=arm, rent=rent, **common) for arm in RULES]
            plans += [
                Part(task=task, arm=arm, rent=rent, maker=made, looks=True, **common)
                for arm, made in learned.items()
            ]
    return plans


def static_parts(parts: Sequence[Part], rows: Sequence[Row]) -> list[Part]:
    """A plain network of the final size of every controller, task and rent."""
    sizes = {row.key: float(row.added[-1].mean()) for row in rows}
    return [
        replace(
            part,
            arm=f"static of {part.arm}",
            parameters=round(task_of(part.task).host.parameters * (1 + added)),
            maker=None,
            looks=False,
        )
        for part in parts
        if part.arm.startswith(FIRST_CONTROLLER)
        for added in [sizes[part.question, part.task, part.arm, part.rent]]
    ]


def counted(
    parts: Sequence[Part],
    folder: Path,
    processes: int,
    title: str,
    ray: str | None = None,
) -> list[Row]:
    """The figures of all parts, of which those that are missing are trained."""
    with storage(folder, "write"):
        folder.mkdir(parents=True, exist_ok=True)
    rows = {part.file: _read_part(folder / part.file, part) for part in parts}
    missing = [part for part in parts if rows[part.file] is None]
    with (
        pool_of(processes, ray) as pool,
        Progress([title], Console(stderr=True), unit="part") as progress,
    ):
        for part, row in results(missing, pool):
            document = json.dumps({"part": part.source(), **row.as_data()})
            publish(Disk(), folder / part.file, document.encode())
            rows[part.file] = row
            done = sum(found is not None for found in rows.values())
            text = f"{part.task}: {part.arm}"
            progress.update(title, done, len(rows), text, pool.active_jobs)
    return [row for row in rows.values() if row is not None]


def pool_of(processes: int, ray: str | None = None) -> Workers:
    """Who counts; one process: this one."""
    count = 0 if processes == 1 and ray is None else processes
    return workers(count, ray=ray, deadline=LONGEST)


def results(parts: Sequence[Part], pool: Workers) -> Iterator[tuple[Part, Row]]:
    """Parts and their figures, in order."""
    rows = pool.run(_measured, parts, None, about=lambda part: part.file)
    return zip(parts, rows, strict=True)


def _measured(shared: None, part: Part) -> Row:
    return measured(part)


def _read_part(file: Path, part: Part) -> Row | None:
    with storage(file.parent, "read"):
        if not file.exists():
            return None
        text = file.read_text(encoding="utf-8")
    try:
        data = json.loads(text)
        source = data.pop("part")
        row = Row.from_data(data)
    except (ValueError, KeyError, TypeError):
        raise InvalidInputError(
            f"{file} is damaged; delete it to count it again."
        ) from None
    if source != part.source():
        raise InvalidInputError(
            f"{file} is of another protocol, controller or number of hosts; name "
            "another folder for the parts."
        )
    return row


def measured(part: Part) -> Row:
    """Choose the learning rate of a part, then count."""
    rate = part.rates[0]
    if len(part.rates) > 1:
        tried = {
            rate: float(evaluated(part, rate, TUNED_HOSTS, TUNED).returns.mean())
            for rate in part.rates
        }
        rate = max(tried, key=lambda rate: tried[rate])
    return trained(part, rate)


def trained(part: Part, rate: float) -> Row:
    """The figures of a part at a learning rate."""
    found = evaluated(part, rate, part.hosts, COUNTED)
    stops = found.stops
    assert stops is not None
    broken = found.panicked
    added = (stops.score - stops.worth) / _charged(part)
    return Row(
        question=part.question,
        task=part.task,
        arm=part.arm,
        rent=part.rent,
        rate=rate,
        parameters=part.parameters,
        source=digest(part.maker),
        test=np.where(broken, -1.0, stops.test).round(7),
        added=np.where(broken, 0.0, added).round(7),
    )


def _charged(part: Part) -> float:
    # Whoever does not read the rent is charged 1, so that worth tells the size.
    return 1.0 if part.rent is None or part.parameters else part.rent


def evaluated(part: Part, rate: float, hosts: int, rng_seed: int) -> EvalResult:
    """Some hosts of a part's task at a learning rate."""
    settings = replace(
        WORLDS[part.question],
        rent=_charged(part),
        rate=rate,
        charge_eval=part.looks,
    )
    task = task_of(part.task)
    where = (task, hosts, rng_seed, settings)
    if part.parameters is not None:
        return evaluate_plain(widened(task.host, part.parameters), *where)
    if part.arm in LADDER:
        return evaluate_plain(times_as_wide(task.host, LADDER[part.arm]), *where)
    return evaluate_controller(part.maker or part.arm, *where)


def task_of(name: str) -> Task:
    """A task of the catalogue, or a drawn one, such as `drawn 3`."""
    if name.startswith("drawn "):
        return drawn_task(FAMILY, int(name.split()[1]))
    return find_task(name)


def protocol() -> str:
    """Digest of the page that says what is counted."""
    return sha256(PROTOCOL.read_bytes()).hexdigest()


def digest(maker: Maker | None) -> str:
    """Digest of a learned arm; empty if it is not learned."""
    if maker is None:
        return ""
    if isinstance(maker, Regression):
        return sha256(pickle.dumps(maker.model)).hexdigest()[:DIGITS]
    total = sha256()
    weights: Mapping[str, torch.Tensor] = maker.weights  # type: ignore[attr-defined]
    for name in sorted(weights):
        total.update(name.encode() + weights[name].contiguous().numpy().tobytes())
    return total.hexdigest()[:DIGITS]


# The ledger.


def write_ledger(rows: Sequence[Row], file: Path) -> None:
    """All figures as one compressed file."""
    arrays: dict[str, Any] = {}
    facts = []
    for number, row in enumerate(rows):
        data = asdict(row)
        for name in ("test", "added"):
            arrays[f"{name}{number}"] = data.pop(name).astype(np.float32)
        facts.append(data)
    flat = {
        name: np.concatenate([arrays[f"{name}{n}"].ravel() for n in range(len(rows))])
        for name in ("test", "added")
    }
    shapes = [arrays[f"test{n}"].shape for n in range(len(rows))]
    about = json.dumps({"protocol": protocol(), "rows": facts, "shapes": shapes})
    stream = BytesIO()
    np.savez_compressed(
        stream, about=np.frombuffer(about.encode(), dtype=np.uint8), **flat
    )
    publish(Disk(), file, stream.getvalue())


def ledger_for(rows: Sequence[Row], file: Path, parts: Path) -> Path:
    """Where rows are written: the published ledger is not replaced by a part of it.

    Args:
        rows: What was counted.
        file: Where they should go.
        parts: Folder of the parts, to which they go otherwise.
    """
    if file != LEDGER or not file.exists():
        return file
    published, mine = (
        {(*row.key, row.test.shape) for row in each}
        for each in (_ledger(file)[0], rows)
    )
    return file if published <= mine else parts / file.with_stem("ledger").name


def read_ledger(file: Path) -> list[Row]:
    """The rows of a ledger; refuses one of another protocol."""
    rows, made_under = _ledger(file)
    if made_under != protocol():
        raise InvalidInputError(
            f"{file} was counted under another wording of {PROTOCOL.name}."
        )
    return rows


def _ledger(file: Path) -> tuple[list[Row], str]:
    """The rows of a ledger, and the digest of its protocol."""
    try:
        with np.load(BytesIO(file.read_bytes()), allow_pickle=False) as data:
            about = json.loads(data["about"].tobytes())
            flat = {name: data[name].astype(np.float64) for name in ("test", "added")}
        rows, begin = [], 0
        for facts, shape in zip(about["rows"], about["shapes"], strict=True):
            end = begin + shape[0] * shape[1]
            own = {name: flat[name][begin:end].reshape(shape) for name in flat}
            rows.append(Row(**facts, **own))
            begin = end
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise InvalidInputError(f"{file} is no ledger, or damaged.") from error
    return rows, str(about["protocol"])


def verified(
    rows: Sequence[Row],
    learned: Mapping[str, Mapping[str, Maker]],
    sample: int,
    processes: int,
) -> Report:
    """Train some rows of the ledger again; refuses figures that are not theirs.

    Args:
        rows: Of the ledger.
        learned: Learned arms that are there, by question.
        sample: Rows that are trained.
        processes: At the same time.
    """
    order = np.random.default_rng(0).permutation(len(rows))
    chosen: dict[str, tuple[Part, Row]] = {}
    for row in (rows[index] for index in order):
        maker = learned[row.question].get(row.arm)
        # Another arm may have the name, or the arm is not there.
        if len(chosen) == sample or digest(maker) != row.source:
            continue
        part = Part(
            question=row.question,
            task=row.task,
            arm=row.arm,
            rent=row.rent,
            hosts=row.test.shape[1],
            rates=(row.rate,),
            parameters=row.parameters,
            maker=maker,
            looks=maker is not None,
        )
        chosen[part.file] = part, row
    report = Report(
        f"{len(chosen)} of {len(rows)} rows of the ledger, trained again",
        ("row", "test score in the ledger, %", "again, %", "equal hosts"),
    )
    differences = []
    parts = [part for part, _ in chosen.values()]
    with pool_of(processes) as pool:
        found = [*results(parts, pool)]
    for part, again in found:
        row = chosen[part.file][1]
        same = np.abs(row.test - again.test).max(axis=0) < 1e-6
        differences.append(float(again.test.mean() - row.test.mean()))
        report.add(
            part.file.removesuffix(".json"),
            100 * float(row.test.mean()),
            100 * float(again.test.mean()),
            f"{same.sum()} of {len(same)}",
        )
    mean = float(np.mean(np.abs(differences))) if differences else 0.0
    if mean > TOLERANCE:
        raise InvalidInputError(
            f"the ledger differs from what is trained here by {100 * mean:.2f} points "
            f"of the test score in the mean, more than {100 * TOLERANCE:g}."
        )
    report.notes.append(f"mean difference {100 * mean:.3f} points of the test score")
    return report
