"""How does the time of a cohort's minibatch grow, and can it be told beforehand?

One thing is changed at a time: hosts, their size, seeds that are felt, seeds in
training, rows of a minibatch. `cohort_cost` is fitted to two thirds of the
points and judged by the others. `python -m benchmarks
cohort` runs this after the comparison.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Generator, Tensor

from benchmarks.cohort_cost import SECONDS, Seed, Work, work
from benchmarks.timing import Report, alternate, micro
from esper.contracts.blueprints import BLUEPRINTS, Blueprint
from esper.contracts.stages import Stage
from esper.environment.cohort import Alphas, Cohort
from esper.environment.memory_layout import place_geometries
from esper.growth.blueprints.forms import FORMS
from esper.growth.lifecycle import SeedStates
from esper.tasks.hosts import CnnHost, Host, MlpHost
from tests.references.cohort import PlainHost

ALPHA = {Stage.TRAINING: 0.0, Stage.BLENDING: 0.5, Stage.HOLDING: 1.0}
KNOWN = {blueprint.name: blueprint for blueprint in BLUEPRINTS}
MIXED = {
    "mlp": ("low_rank_4", "widen_8", "residual_mlp", "widen_16", "widen_32"),
    "cnn": ("widen_8", "widen_16"),
}
PER_PLACE, RATE, EXAMPLES = 2, 1e-3, 1024
STEPS = 16
"""Minibatches until the next decision."""


@dataclass(frozen=True)
class Case:
    """Hosts to train, and the seeds in the slots of each."""

    host: Host
    envs: int
    seeds: Sequence[Mapping[int, tuple[Blueprint, Stage]]]
    """By slot; one after the other for the environments, then again."""
    batch: int = 64
    steps: int = STEPS

    def of(self, env: int) -> Mapping[int, tuple[Blueprint, Stage]]:
        """Seeds of an environment."""
        return self.seeds[env % len(self.seeds)]

    def listed(self, env: int) -> list[Seed]:
        """The same as a cost is asked for."""
        places = self.host.layers - 1
        return [(slot % places, b, stage) for slot, (b, stage) in self.of(env).items()]


class Cohorts:
    """The hosts of a case, as a cohort and one by one."""

    def __init__(self, case: Case, engine: str = "auto", *, plain: bool) -> None:
        self.case, chance = case, Generator().manual_seed(0)
        names = MIXED[case.host.kind]
        self.cohort = Cohort(
            case.envs,
            case.host,
            [KNOWN[name] for name in names],
            seeds_per_slot=PER_PLACE,
            batch=case.batch,
            engine=engine,
        )
        self.hosts: list[PlainHost] = []
        lives = SeedStates.empty(case.envs, self.cohort.layout.slots)
        stages, alphas = lives.stage.clone(), lives.alpha.clone()
        geometry = place_geometries(case.host)
        for env in range(case.envs):
            network = case.host.build(chance)
            self.cohort.set_host(env, network)
            if plain:
                alone = PlainHost(
                    network,
                    rate=RATE,
                    decay=self.cohort.decay,
                    newborn=(1.0, 1),
                    fused=True,
                )
                self.hosts.append(alone)
            for slot, (blueprint, stage) in case.of(env).items():
                place = geometry[slot % len(geometry)]
                made = FORMS[blueprint.form].init(place, blueprint.size, chance)
                self.cohort.plant(env, slot, blueprint, made)
                stages[env, slot], alphas[env, slot] = int(stage), ALPHA[stage]
                if plain:
                    self.hosts[env].plant(slot, blueprint, made)
                    self.hosts[env].live(slot, stage, ALPHA[stage])
        self.plan = Alphas.of(replace(lives, stage=stages, alpha=alphas))
        self._give_rows(chance)

    def _give_rows(self, chance: Generator) -> None:
        case, host = self.case, self.case.host
        self.features = torch.randn(EXAMPLES, *host.shape, generator=chance)
        self.labels = torch.randint(0, host.classes, (EXAMPLES,), generator=chance)
        self.picked = torch.randint(
            0, EXAMPLES, (case.envs, case.steps, case.batch), generator=chance
        )
        self.rates = torch.full((case.envs, case.steps), RATE)
        self.x = self.features[self.picked[:, 0]]
        self.y = self.labels[self.picked[:, 0]]

    def train(self) -> Tensor:
        """All minibatches until the next decision, as a cohort."""
        flat = self.features.flatten(1).unsqueeze(0)
        return self.cohort.train(
            flat, self.labels.unsqueeze(0), self.picked, self.plan, self.rates
        ).losses

    def one_by_one(self) -> None:
        """One minibatch of every host, prepared beforehand."""
        for env, host in enumerate(self.hosts):
            host.train_step(self.x[env], self.y[env])


MLP, CNN = MlpHost((16, 32, 32, 26)), CnnHost((1, 28, 28), (4, 8), 10)
WIDEN, RESIDUAL = KNOWN["widen_8"], KNOWN["residual_mlp"]


@dataclass(frozen=True)
class Point:
    """One measurement."""

    axis: str
    value: int
    """Where on the axis; for a width, the host's parameters."""
    case: Case
    seconds: float
    """Per environment and minibatch."""

    @property
    def counts(self) -> list[float]:
        """What the model counts, the mean over environments, as `Work` lists it."""
        case, envs = self.case, range(len(self.case.seeds))
        each = [astuple(work(case.host, case.batch, case.listed(e))) for e in envs]
        return list(np.mean(each, axis=0))

    def told(self, each: Work) -> float:
        """What the model says."""
        return float(np.dot(self.counts, astuple(each)))


def grow(sweeps: int = 5) -> Iterator[Point]:
    """Measure all cases in turn, again and again: a slow minute spoils one sweep."""
    known = list(cases())
    best = [float("inf")] * len(known)
    sides = [Cohorts(case, plain=False).train for _, _, case in known]
    for _ in range(sweeps):
        for index, side in enumerate(sides):
            took = alternate({"ours": side}, seconds=0.1, rounds=5, budget=1.0)
            best[index] = min(best[index], took["ours"])
    for (axis, value, case), seconds in zip(known, best, strict=True):
        yield Point(axis, value, case, seconds / case.steps / case.envs)


def cases() -> Iterator[tuple[str, int, Case]]:
    """What is measured: along each axis, for both kinds of host."""
    pair = [{0: (WIDEN, Stage.HOLDING), 1: (WIDEN, Stage.TRAINING)}]
    wider: dict[str, list[Host]] = {
        "mlp": [MlpHost((16, w, w, 26)) for w in (8, 12, 16, 24, 32, 48, 64, 96, 128)],
        "cnn": [CnnHost(CNN.image, (c, 2 * c), 10) for c in (2, 4, 6, 8, 12, 16)],
    }
    for base in (Case(MLP, 16, pair), Case(CNN, 4, pair, steps=2)):
        for envs in (1, 2, 4, 8, 16, 32, 64, 128):
            yield "envs", envs, replace(base, envs=envs)
        for host in wider[base.host.kind]:
            yield "width", host.parameters, replace(base, host=host)
        kinds = [("felt", WIDEN, Stage.HOLDING), ("training", WIDEN, Stage.TRAINING)]
        if base.host.kind == "mlp":
            kinds.append(("GELU felt", RESIDUAL, Stage.HOLDING))
        for axis, blueprint, stage in kinds:
            for seeds in range(5):
                held = {slot: (blueprint, stage) for slot in range(seeds)}
                yield axis, seeds, replace(base, seeds=[held])
        for batch in (16, 32, 64, 128, 256):
            yield "batch", batch, replace(base, batch=batch)


def curves(points: Sequence[Point], each: Work) -> Report:
    """All points, with what the model says of them."""
    report = Report(
        "How the time of a host's minibatch grows; one thing is changed at a time",
        ("host", "axis", "value", "envs", "rows", "µs per env", "model µs"),
        notes=[
            "A host has one seed that is felt and one in training, widen_8 both, "
            "except where seeds are counted. The value of a width: parameters."
        ],
    )
    for point in points:
        case = point.case
        report.add(
            str(case.host),
            point.axis,
            point.value,
            case.envs,
            case.batch,
            micro(point.seconds),
            micro(point.told(each)),
        )
    return report


def fit(points: Sequence[Point], checks: Sequence[Point]) -> tuple[Work, Report]:
    """Seconds for one of each thing that the model counts, and how far it is off.

    Least squares of the relative error, no coefficient below zero; every third point is
    held out.
    """
    seen = [point for index, point in enumerate(points) if index % 3 != 1]
    took = np.array([point.seconds for point in seen])
    counts = np.array([point.counts for point in seen]) / took[:, None]
    scale = np.linalg.norm(counts, axis=0)
    found, _ = nnls(counts / scale, np.ones(len(seen)))
    fitted = Work(*(found / scale).tolist())
    report = Report(
        "The model of `cohort_cost` beside what was measured",
        ("points", "number", "median error", "worst error"),
    )
    held = [point for index, point in enumerate(points) if index % 3 == 1]
    for name, those, each in (
        ("fitted to", seen, fitted),
        ("held out", held, fitted),
        ("cohorts of mixed seeds", checks, fitted),
        ("held out, with the constants of the source", held, SECONDS),
    ):
        off = [abs(point.told(each) / point.seconds - 1) for point in those]
        report.add(name, len(off), float(np.median(off)), max(off))
    report.notes.append(
        "Seconds for one: "
        + ", ".join(f"{f.name} {getattr(fitted, f.name):.3g}" for f in fields(Work))
    )
    return fitted, report


def draw(rows: Sequence[Mapping[str, Any]], path: str | Path) -> None:
    """Four panels: hosts, size of the host, seeds, rows."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"svg.hashsalt": "cohort", "svg.fonttype": "none"})
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    panels = {
        "hosts": ("envs",),
        "parameters of the host": ("width",),
        "seeds of a host": ("felt", "training", "GELU felt"),
        "rows of a minibatch": ("batch",),
    }
    colours = {"mlp": "tab:blue", "cnn": "tab:orange"}
    marks = {"felt": "o", "training": "s", "GELU felt": "^"}
    for axes, (title, names) in zip(
        figure.subplots(2, 2, sharey=True).flat, panels.items(), strict=True
    ):
        for kind, colour in colours.items():
            for name in names:
                line = [
                    row
                    for row in rows
                    if row["axis"] == name and row["host"].startswith(kind)
                ]
                if not line:
                    continue
                x = [row["value"] for row in line]
                label = kind.upper() + (f", {name}" if len(names) > 1 else "")
                mark = marks.get(name, "o")
                took = [row["µs per env"] for row in line]
                axes.plot(x, took, mark, color=colour, ms=4, label=label)
                told = [row["model µs"] for row in line]
                axes.plot(x, told, "-", color=colour, lw=1, alpha=0.6)
        if title == "seeds of a host":
            axes.set_xticks(range(5))
        else:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set(xlabel=title, yscale="log")
        axes.grid(alpha=0.2)
        axes.legend(fontsize=8, frameon=False)
    figure.supylabel("µs per host and minibatch; lines: the model", fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
