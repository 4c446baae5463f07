"""Does the shipped Tamiyo help networks of other kinds, without any setting?

Three ordinary training loops with a `Grower` in them, all its settings at their
defaults: an MLP of 256 units on letters, a CNN on digits, and a Hugging Face BERT from
a config that predicts which kind of character comes next. Ten random seeds each, which
decide data, first weights and order of batches. Each is trained as it is, with
`doubling`, with Tamiyo, and as a plain network that has the size at which Tamiyo ended
from the start: the same layers, as wide as it takes.

Compute is what the multiply-adds of all training batches come to, as a multiple of
those without growing. What counts as noise was fixed before anything was run: two
standard errors of a test score of that many rows, 2 sqrt(p (1 - p) / rows) where p is
the score without growing.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import sqrt
from multiprocessing import get_context
from time import process_time
from typing import Final

import numpy as np
import torch
from rich.console import Console
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, max_pool2d

from benchmarks.timing import Report
from esper import Grower
from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import mean_interval
from esper.growth.analysis.tracing import Example
from esper.runs.progress import Progress
from esper.tasks.catalogue import task
from esper.tasks.data import Splits, split
from esper.tasks.datasets import digits
from esper.tasks.text import ALPHABET, text, windows

SEEDS: Final = 10
PROCESSES: Final = 2
NEVER: Final = "never"
GROWN: Final = ("doubling", "tamiyo")
PLAIN: Final = "plain, of her size"
ARMS: Final = (NEVER, *GROWN, PLAIN)
LARGEST: Final = 64
"""Times that a plain network may be as wide."""
LENGTH: Final = 16
"""Characters that the BERT reads."""
KINDS: Final = torch.tensor(
    [0 if c.isspace() else 1 if c.islower() else 2 for c in ALPHABET]
)
"""A space or new line, a small letter, anything else: by the character's id."""

Rows = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Loop:
    """What somebody wants to train, and how."""

    model: nn.Module
    answer: Callable[[Tensor], Tensor]
    """Logits of some rows."""
    slots: tuple[str, ...] | str
    example: Example
    train: Rows
    decisions: Rows
    test: Rows
    batch: int
    epochs: int
    learning_rate: float

    @property
    def parameters(self) -> int:
        """Of the network."""
        return sum(each.numel() for each in self.model.parameters())


Make = Callable[[int, int], Loop]
"""A loop from a random seed and a width."""


@dataclass(frozen=True)
class Trained:
    """What came of one arm with one random seed."""

    score: float
    """Share of test rows that are right."""
    rows: int
    """Of the test."""
    parameters: int
    compute: float
    """Multiply-adds of a batch, mean over all batches."""
    seconds: float
    """Of one processor."""


Arms = Mapping[str, Trained]


class Letters(nn.Module):
    """Two hidden layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, width), nn.Linear(width, width)
        self.out = nn.Linear(width, 26)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the letters."""
        return self.out(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


class Digits(nn.Module):
    """Two convolutions, a pooling and a linear layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.out = nn.Linear(4 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digits."""
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        return self.out(max_pool2d(x, 4).flatten(1))


def run(repeats: int = SEEDS) -> list[Report]:
    """Train everything, two at a time."""
    console = Console(stderr=True)
    names, jobs = [*LOOPS], [(name, seed) for seed in range(repeats) for name in LOOPS]
    found: dict[str, dict[int, Arms]] = {name: {} for name in names}
    with (
        ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool,
        Progress(names, console, unit="random seed") as progress,
    ):
        running = {pool.submit(compare, *job): job for job in jobs}
        for future in as_completed(running):
            name, seed = running[future]
            arms = found[name][seed] = future.result()
            scores = ", ".join(f"{arm} {arms[arm].score:.3f}" for arm in arms)
            progress.update(name, len(found[name]), repeats, scores)
    return [as_report(name, [*arms.values()]) for name, arms in found.items()]


def compare(name: str, seed: int) -> Arms:
    """Every arm with one random seed."""
    torch.set_num_threads(1)
    make, width = LOOPS[name]
    arms = {arm: train(make(seed, width), arm, seed) for arm in (NEVER, *GROWN)}
    size = arms["tamiyo"].parameters
    widths = range(width, LARGEST * width)
    nearest = bisect_left(widths, size, key=lambda each: make(seed, each).parameters)
    return {**arms, PLAIN: train(make(seed, widths[nearest]), NEVER, seed)}


def train(loop: Loop, controller: str, seed: int) -> Trained:
    """An ordinary training loop."""
    chance = Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of dropout
    model, (x, y), began = loop.model, loop.train, process_time()
    optimizer = torch.optim.AdamW(model.parameters(), lr=loop.learning_rate)
    steps = loop.epochs * (len(y) // loop.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, loop.learning_rate, total_steps=steps
    )
    grower = Grower(
        model,
        optimizer,
        loop.slots,
        example=loop.example,
        controller=controller,
        decisions=loop.epochs,
        rng_seed=seed,
    )

    def right(rows: Rows) -> float:
        model.eval()
        with torch.no_grad():
            share = (loop.answer(rows[0]).argmax(1) == rows[1]).float().mean()
        model.train()
        return float(share)

    def learn(rows: Tensor) -> None:
        loss = grower.loss(lambda: cross_entropy(loop.answer(x[rows]), y[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    compute = []
    for _ in range(loop.epochs):
        compute.append(grower.model.macs)
        for rows in batches(len(y), loop.batch, chance):
            learn(rows)
        grower.step(metric=lambda: right(loop.decisions))
    return Trained(
        score=right(loop.test),
        rows=len(loop.test[1]),
        parameters=sum(each.numel() for each in grower.export().parameters()),
        compute=sum(compute) / len(compute),
        seconds=process_time() - began,
    )


def batches(count: int, batch: int, chance: Generator) -> Iterator[Tensor]:
    """Rows of one epoch in whole batches."""
    order = torch.randperm(count, generator=chance)
    return iter(order[: count - count % batch].split(batch))


def _loop(
    model: nn.Module, slots: tuple[str, ...], splits: Splits, epochs: int
) -> Loop:
    """A network that takes its rows as they are."""
    train, decisions, test = (
        (part.features, part.labels) for part in (splits.train, splits.val, splits.test)
    )
    return Loop(
        model=model,
        answer=model,
        slots=slots,
        example=train[0][:8],
        train=train,
        decisions=decisions,
        test=test,
        batch=128,
        epochs=epochs,
        learning_rate=1e-2,
    )


def letters(seed: int, width: int) -> Loop:
    """A user's own MLP."""
    splits = task("letter").splits(seed)
    torch.manual_seed(seed)
    return _loop(Letters(width), ("fc1->fc2", "fc2->out"), splits, epochs=16)


def images(seed: int, width: int) -> Loop:
    """A user's own CNN."""
    splits = split(digits(), seed)
    torch.manual_seed(seed)
    return _loop(Digits(width), ("conv1->conv2", "conv2->out"), splits, epochs=24)


def bert(seed: int, width: int) -> Loop:
    """A Hugging Face model, as it comes."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError:
        raise InvalidInputError(
            "the BERT needs transformers; pip install it."
        ) from None
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(ALPHABET),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=width,
            max_position_embeddings=LENGTH,
            num_labels=len(KINDS.unique()),
        )
    )
    parts, chance = text(), Generator().manual_seed(seed)

    def cut(ids: Tensor, count: int) -> Rows:
        x, following = windows(ids, count=count, length=LENGTH, generator=chance)
        return x.flip(1), KINDS[following[:, -1]]

    train = cut(parts.train, 1024)
    return Loop(
        model=model,
        answer=lambda ids: model(input_ids=ids).logits,
        slots="auto",
        example={"input_ids": train[0][:8]},
        train=train,
        decisions=cut(parts.val, 512),
        test=cut(parts.test, 2048),
        batch=64,
        epochs=16,
        learning_rate=4e-3,
    )


LOOPS: Final[Mapping[str, tuple[Make, int]]] = {
    "letters": (letters, 256),
    "digits": (images, 8),
    "bert": (bert, 4),
}
"""Loops, and how wide their networks are."""
TITLES: Final = {
    "letters": "An MLP of 256 units on letters",
    "digits": "A CNN on digits",
    "bert": "A Hugging Face BERT on characters",
}


def as_report(name: str, seeds: Sequence[Arms]) -> Report:
    """One row for each arm, and how often it ended worse than without growing."""
    report = Report(
        f"{TITLES[name]}: share of test rows that are right, {len(seeds)} random seeds",
        ("", "score", "above never", "worse", "parameters", "compute", "CPU-seconds"),
    )
    never = [arms[NEVER] for arms in seeds]
    for arm in ARMS:
        own = [arms[arm] for arms in seeds]
        less = [a.score - b.score for a, b in zip(own, never, strict=True)]
        row = [f"{mean_interval([np.array(less)]):+.4f}" if arm != NEVER else None]
        ratios = [a.compute / b.compute for a, b in zip(own, never, strict=True)]
        report.add(
            arm,
            f"{np.mean([each.score for each in own]):.4f}",
            *row,
            f"{sum(map(worse, own, never))} of {len(seeds)}" if arm != NEVER else None,
            round(float(np.mean([each.parameters for each in own]))),
            f"{np.mean(ratios):.2f}x",
            f"{np.mean([each.seconds for each in own]):.1f}",
        )
    report.notes.append(
        "Worse: by more than two standard errors of a test score of "
        f"{never[0].rows:,} rows. Above never: mean, 95 % over random seeds."
    )
    return report


def worse(grown: Trained, never: Trained) -> bool:
    """Whether an arm ended worse than without growing by more than noise."""
    noise = 2.0 * sqrt(never.score * (1.0 - never.score) / never.rows)
    return grown.score < never.score - noise
