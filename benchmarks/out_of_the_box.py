"""Does the shipped Tamiyo ever end worse than not growing, without any setting?

Two ordinary training loops with a `Grower` in them, all its settings at their defaults:
an MLP on rows of letters, and a BERT made from a config that predicts which kind of
character comes next. Ten random seeds each, which decide data, first weights and order
of batches; every one is trained twice, with controller "never" and with "tamiyo".

What counts as noise was fixed before anything was run: two standard errors of a test
score of that many rows, 2 sqrt(p (1 - p) / rows) where p is the score without growing.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import sqrt
from multiprocessing import get_context
from statistics import mean
from typing import Final

import torch
from rich.console import Console
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.timing import Report
from esper import Grower
from esper.contracts.errors import BadInput
from esper.experiment.progress import Progress
from esper.growth.tracing import Example
from esper.tasks.catalogue import task
from esper.tasks.text import ALPHABET, text, windows

SEEDS: Final = 10
PROCESSES: Final = 2
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


@dataclass(frozen=True)
class Pair:
    """What came of one random seed."""

    never: float
    """Share of test rows that are right without growing."""
    grown: float
    """The same with Tamiyo."""
    rows: int
    planted: int
    times: float
    """Parameters in the end, as a multiple of those at the start."""

    @property
    def noise(self) -> float:
        """How much worse is still noise."""
        return 2.0 * sqrt(self.never * (1.0 - self.never) / self.rows)

    @property
    def worse(self) -> bool:
        """Whether growing ended worse by more than noise."""
        return self.grown < self.never - self.noise


class Letters(nn.Module):
    """16 -> 12 -> 12 -> 26."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 26)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the letters."""
        return self.out(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def run(repeats: int = SEEDS) -> list[Report]:
    """Train everything, two at a time."""
    console = Console(stderr=True)
    names, jobs = [*LOOPS], [(name, seed) for seed in range(repeats) for name in LOOPS]
    found: dict[str, dict[int, Pair]] = {name: {} for name in names}
    with (
        ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool,
        Progress(names, console, unit="random seed") as progress,
    ):
        running = {pool.submit(compare, *job): job for job in jobs}
        for future in as_completed(running):
            name, seed = running[future]
            pair = found[name][seed] = future.result()
            scores = f"never {pair.never:.3f}, tamiyo {pair.grown:.3f}"
            progress.update(name, len(found[name]), repeats, scores)
    return [as_report(name, pairs) for name, pairs in found.items()]


def compare(name: str, seed: int) -> Pair:
    """One random seed without growing and with it."""
    torch.set_num_threads(1)
    never, _ = train(LOOPS[name](seed), "never", seed)
    loop = LOOPS[name](seed)
    grown, grower = train(loop, "tamiyo", seed)
    host = grower.model.survey.parameters
    return Pair(
        never=never,
        grown=grown,
        rows=len(loop.test[1]),
        planted=sum(each.action.startswith("plant ") for each in grower.history),
        times=1.0 + grower.model.parameters_added / host,
    )


def train(loop: Loop, controller: str, seed: int) -> tuple[float, Grower]:
    """An ordinary training loop; the share of test rows that are right in the end."""
    chance = Generator().manual_seed(seed)
    torch.manual_seed(seed)  # of dropout
    model, (x, y) = loop.model, loop.train
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

    for _ in range(loop.epochs):
        for rows in batches(len(y), loop.batch, chance):
            learn(rows)
        grower.step(metric=lambda: right(loop.decisions))
    return right(loop.test), grower


def batches(count: int, batch: int, chance: Generator) -> Iterator[Tensor]:
    """Rows of one epoch in whole batches."""
    order = torch.randperm(count, generator=chance)
    return iter(order[: count - count % batch].split(batch))


def letters(seed: int) -> Loop:
    """A user's own MLP."""
    splits = task("letter").splits(seed)
    torch.manual_seed(seed)
    model = Letters()
    train, decisions, test = (
        (part.features, part.labels)
        for part in (splits.train, splits.decisions, splits.test)
    )
    return Loop(
        model=model,
        answer=model,
        slots=("fc1->fc2", "fc2->out"),
        example=train[0][:8],
        train=train,
        decisions=decisions,
        test=test,
        batch=128,
        epochs=16,
        learning_rate=1e-2,
    )


def bert(seed: int) -> Loop:
    """A Hugging Face model, as it comes."""
    try:
        from transformers import BertConfig, BertForSequenceClassification
    except ImportError:
        raise BadInput("the BERT needs transformers; pip install it.") from None
    torch.manual_seed(seed)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(ALPHABET),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=4,
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
        decisions=cut(parts.decisions, 512),
        test=cut(parts.test, 2048),
        batch=64,
        epochs=16,
        learning_rate=4e-3,
    )


LOOPS: Final[Mapping[str, Callable[[int], Loop]]] = {"letters": letters, "bert": bert}
TITLES: Final = {
    "letters": "A user's own MLP on letters",
    "bert": "A Hugging Face BERT on characters",
}


def as_report(name: str, pairs: Mapping[int, Pair]) -> Report:
    """One row for each random seed, and who ended worse."""
    report = Report(
        f"{TITLES[name]}: share of test rows that are right",
        ("random seed", "never", "tamiyo", "difference", "noise", "planted", "size"),
    )
    for seed, pair in sorted(pairs.items()):
        report.add(
            str(seed),
            pair.never,
            pair.grown,
            f"{pair.grown - pair.never:+.4f}",
            f"{pair.noise:.4f}",
            pair.planted,
            f"{pair.times:.2f}x",
        )
    differences = [pair.grown - pair.never for pair in pairs.values()]
    worse = [str(seed) for seed, pair in sorted(pairs.items()) if pair.worse]
    rest = f"; worse: random seed {', '.join(worse)}" if worse else ""
    report.notes += [
        f"Not worse than never-growing by more than noise: {len(pairs) - len(worse)} "
        f"of {len(pairs)}{rest}.",
        f"Mean difference {mean(differences):+.4f}.",
        "Noise: two standard errors of a test score of "
        f"{next(iter(pairs.values())).rows:,} rows.",
    ]
    return report
