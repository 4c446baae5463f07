"""Does a small network with a `Grower` at its defaults match the best of three sizes?

Three ordinary problems: a table of 20,000 rows (letter), a regression (Friedman's first
function, 10,000 rows) and images (mnist5k, a CNN). Every side takes the same batches.
The static networks have the widths of the host, twice and four times as many units.
The score is accuracy, or R2 of the regression, on test rows that no decision sees, in
percent: mean, lowest and highest over random seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from benchmarks import timing
from benchmarks.timing import Report
from esper.evaluation.statistics import mean_interval
from esper.grower import Grower
from esper.tasks.data import split
from esper.tasks.datasets import letter, mnist5k

SEEDS: Final = 3
EPOCHS: Final = 12
BATCH: Final = 128
WIDTHS: Final = (1, 2, 4)
Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Problem:
    """Training, validation and test rows, and a network of some width."""

    parts: tuple[Rows, Rows, Rows]
    make: Callable[[int], nn.Module]
    classes: bool = True

    def loss(self, answer: Tensor, y: Tensor) -> Tensor:
        """Training loss."""
        return cross_entropy(answer, y) if self.classes else mse_loss(answer[:, 0], y)

    def score(self, model: nn.Module, part: int) -> float:
        """Accuracy, or R2."""
        x, y = self.parts[part]
        with torch.no_grad():
            answer = model.eval()(x)
        model.train()
        if self.classes:
            return float((answer.argmax(dim=1) == y).float().mean())
        return float(1 - mse_loss(answer[:, 0], y) / y.var())


def mlp(inputs: int, width: int, outputs: int) -> nn.Module:
    """Two hidden layers."""
    return nn.Sequential(
        *(nn.Linear(inputs, width), nn.ReLU()),
        *(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)),
    )


def cnn(width: int) -> nn.Module:
    """Two convolutions and a hidden layer."""
    return nn.Sequential(
        *(nn.Conv2d(1, width, 3, 2, 1), nn.ReLU()),
        *(nn.Conv2d(width, 2 * width, 3, 2, 1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(98 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10)),
    )


def friedman(rng_seed: int) -> tuple[Rows, Rows, Rows]:
    """Friedman's first function with noise."""
    chance = np.random.default_rng(rng_seed)
    x = chance.uniform(size=(10_000, 10))
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y += 10 * x[:, 3] + 5 * x[:, 4] + chance.normal(size=len(x))
    inputs, target = torch.tensor(2 * x - 1), torch.tensor((y - y.mean()) / y.std())
    parts = [t.float().split([8000, 1000, 1000]) for t in (inputs, target)]
    train, val, test = zip(*parts, strict=True)
    return train, val, test


def problems(rng_seed: int) -> dict[str, Problem]:
    """The three problems."""
    tables = {}
    for name, data in (("letter", letter()), ("mnist5k", mnist5k())):
        parts = split(data, rng_seed=rng_seed)
        train, val, test = ((part.features, part.labels) for part in parts)
        tables[name] = (train, val, test)
    return {
        "table (letter)": Problem(tables["letter"], lambda by: mlp(16, 16 * by, 26)),
        "regression": Problem(friedman(rng_seed), lambda by: mlp(10, 8 * by, 1), False),
        "images (mnist5k)": Problem(tables["mnist5k"], lambda by: cnn(2 * by)),
    }


def train(problem: Problem, by: int, seed: int, controller: str = "") -> list[float]:
    """Test score in percent, parameters and CPU-seconds of one training."""
    torch.manual_seed(seed)
    model = problem.make(by)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    (x, y), epochs = problem.parts[0], 1 if timing.QUICK else EPOCHS
    began = process_time()
    grower = None
    if controller:
        grower = Grower(
            model, optimizer, example=x[:8], decisions=epochs, controller=controller
        )
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(BATCH):
            loss = problem.loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if grower is not None:
            grower.step(metric=problem.score(model, 1))
    took = process_time() - began
    grown = model if grower is None else grower.export()
    size = sum(p.numel() for p in grown.parameters())
    return [100 * problem.score(grown, 2), size, took]


def run(seeds: int = SEEDS, controllers: str = "early") -> Report:
    """Train all sides.

    Args:
        seeds: Random seeds of each side.
        controllers: Of the `Grower`, with commas.
    """
    report = Report(
        f"A Grower at its defaults and three static sizes, {EPOCHS} epochs",
        ("problem", "side", "score", "from", "to", "parameters", "CPU-s"),
    )
    seeds = 1 if timing.QUICK else seeds
    for name in problems(0):
        sides = {f"static x{by}": (by, "") for by in WIDTHS}
        grown = {f"grown, {name}": (1, name) for name in controllers.split(",")}
        means, scores = {}, {}
        for side, (by, controller) in (sides | grown).items():
            found = np.array(
                [
                    train(problems(seed)[name], by, seed, controller)
                    for seed in range(seeds)
                ]
            )
            score, size, took = means[side] = found.mean(axis=0)
            scores[side] = found[:, 0]
            low, high = found[:, 0].min(), found[:, 0].max()
            report.add(
                name, side, *map(float, (score, low, high)), int(size), float(took)
            )
        best = max(means[side][0] for side in sides)
        for side in grown:
            gap = means[side][0] - best
            report.notes.append(f"{name}: {side}, less the best static {gap:+.2f}")
        first, *others = grown
        for side in others:
            gain = mean_interval(scores[side] - scores[first])
            report.notes.append(f"{name}: {side}, less {first} {gain:+.2f}")
    return report
