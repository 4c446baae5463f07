"""Does a GPT that grows from two to four blocks match the better of both sizes?

`--task gpt`: a GPT on bytes of the Python standard library's sources. Four sides get
the same seconds: two blocks, four blocks, and two that become four after `GROW_AT`
seconds, by copies or by zero blocks. A second is so many steps, see `STEP_SECONDS`.
Three budgets lie around the one at which four blocks overtake two. The learning rate
falls linearly over the budget. A figure is the loss on files that no side trains on, in
nats per byte.

`--task enlarge`: a trained GPT-2 and a trained ResNet are enlarged by `esper.enlarge`:
loss before, right after, and after `FURTHER` more steps, against training on without
it; mean over random seeds.

Finished trainings are lines of `--ledger` and are not repeated, so the command can be
stopped at any time.
"""

import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from time import process_time
from typing import Any, Final

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from benchmarks import timing
from benchmarks.rl import Training, train_missing
from benchmarks.timing import Report
from esper.evaluation.statistics import mean_interval
from esper.grower import Grower
from esper.growth.enlarge import enlarge
from esper.tasks.data import split
from esper.tasks.datasets import mnist5k

SEEDS: Final = 5
SIDES: Final = ("2 blocks", "4 blocks", "copy", "zero")
BUDGETS: Final = (10, 20, 40)
"""Seconds of a training."""
GROW_AT: Final = 6
"""Seconds after which two blocks become four."""
STEP_SECONDS: Final = {2: 0.00354, 4: 0.00615}
"""CPU-seconds of one step, by blocks; `--task calibrate` measures them."""
WIDTH, HEADS, LENGTH, BATCH = 16, 2, 64, 8
RATE: Final = 1e-2
TRAIN_BYTES, EVAL_BATCHES = 4_000_000, 64
NEAR: Final = 0.01
"""Nats within which two sides are equally good."""
TRAINED, FURTHER = 1000, 200
"""Steps before and after a network is enlarged."""
Loss = Callable[[nn.Module, bool, Generator], Tensor]
"""Loss of a model on a random batch, held out or not."""


class Block(nn.Module):
    """Attention and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        """Add both to the input."""
        rows, length, _ = h.shape
        qkv = self.qkv(self.norm(h)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        update: Tensor = self.down(nn.functional.gelu(self.up(self.mlp_norm(h))))
        return h + update


class ByteGPT(nn.Module):
    """Logits of the next byte."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                last = name.endswith(("out.weight", "down.weight"))
                std = 0.02 / (2 * blocks) ** 0.5 if last else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [row, position, byte]."""
        h = self.bytes(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def run(
    task: str = "gpt",
    ledger: str = "benchmarks/depth.jsonl",
    minutes: float = 1e9,
    seeds: int = SEEDS,
) -> Report:
    """Train what the ledger does not have yet, then report what it has.

    Args:
        task: "gpt", "enlarge" or "calibrate".
        ledger: The finished trainings of "gpt".
        minutes: Start no further training after this time.
        seeds: Random seeds.
    """
    if task == "calibrate":
        return calibrate()
    if task == "enlarge":
        return report_enlarged(1 if timing.QUICK else seeds)
    if timing.QUICK:
        return report([train("1 s", "copy", 0, 1)])
    todo = [
        (f"{budget} s", side, seed, budget)
        for seed in range(seeds)
        for budget in BUDGETS
        for side in SIDES
    ]
    return report(train_missing(Path(ledger), todo, train, minutes))


@lru_cache
def sources() -> tuple[Tensor, Tensor]:
    """Bytes of the standard library: every tenth file is for evaluation."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in sorted(root.rglob("*.py")) if "site-packages" not in f.parts]
    parts: tuple[list[bytes], list[bytes]] = [], []
    for number, file in enumerate(files):
        parts[number % 10 == 0].append(file.read_bytes())
    both = [np.frombuffer(b"".join(part), np.uint8)[:TRAIN_BYTES] for part in parts]
    train, held_out = (torch.from_numpy(part.astype(np.int64)) for part in both)
    return train, held_out


def batches(text: Tensor, generator: Generator) -> Iterator[Tensor]:
    """Random windows, one byte longer than the model's context."""
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        yield text[starts + torch.arange(LENGTH + 1)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean loss per byte, in nats."""
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module) -> float:
    """Mean loss on the same windows of files that are not trained on."""
    drawn = batches(sources()[1], Generator().manual_seed(0))
    losses = [float(loss_of(model, next(drawn))) for _ in range(EVAL_BATCHES)]
    return float(np.mean(losses))


def train(task: str, side: str, seed: int, seconds: int) -> Training:
    """One training of so many seconds, from nothing."""
    torch.manual_seed(seed)
    text = sources()[0]
    began, drawn = process_time(), batches(text, Generator().manual_seed(seed))
    blocks = 4 if side == "4 blocks" else 2
    model = ByteGPT(blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    grower: Grower | None = None
    if side in ("copy", "zero"):
        grower = Grower(
            model,
            optimizer,
            ["blocks"],
            example=next(drawn)[:2, :-1],
            controller="never",
            governor=None,
        )
    passed, steps = 0.0, 0
    while passed < seconds:
        if grower is not None and blocks == 2 and passed >= min(GROW_AT, 0.6 * seconds):
            blocks += 2
            grower.deepen("blocks", by=2, how="zero" if side == "zero" else "copy")
        warm = min(1.0, (steps + 1) / 50)
        for group in optimizer.param_groups:
            group["lr"] = RATE * warm * (1 - 0.9 * passed / seconds)
        loss = loss_of(model, next(drawn))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        passed += STEP_SECONDS[blocks]
        steps += 1
    took = round(process_time() - began, 2)
    return Training(task, side, seed, steps, took, [round(held_out_loss(model), 5)])


def report(trainings: Sequence[Training]) -> Report:
    """Losses by budget, and their differences to the statics."""
    found = Report(
        "GPT on bytes of the standard library, loss in nats per byte",
        ("budget", "side", "seeds", "steps", "loss", "from", "to", "CPU-seconds"),
        notes=["95 % bootstrap intervals over random seeds"],
    )
    losses: dict[tuple[str, str], dict[int, float]] = {}
    for one in trainings:
        losses.setdefault((one.task, one.side), {})[one.seed] = one.curve[0] or 0.0
    for (task, side), by_seed in losses.items():
        group = [t for t in trainings if (t.task, t.side) == (task, side)]
        middle = mean_interval([np.array([*by_seed.values()])])
        bounds = (middle.low, middle.high) if len(group) > 1 else (None, None)
        took = float(np.mean([t.cpu_seconds for t in group]))
        row = (len(group), group[0].steps, middle.estimate, *bounds, took)
        found.add(task, side, *row)
    budgets = [f"{budget} s" for budget in BUDGETS]
    if any((task, side) not in losses for task in budgets for side in SIDES):
        return found
    means = {key: float(np.mean([*known.values()])) for key, known in losses.items()}
    for side in SIDES[2:]:
        gaps = [
            means[task, side] - min(means[task, other] for other in SIDES[:2])
            for task in budgets
        ]
        near = sum(gap <= NEAR for gap in gaps)
        shown = ", ".join(f"{gap:+.4f}" for gap in gaps)
        found.notes.append(
            f"{side}: {shown} nats against the better static of each budget; within "
            f"{NEAR} at {near} of {len(budgets)}"
        )
        for other in SIDES[:2]:
            common = [*losses[budgets[0], side].keys() & losses[budgets[0], other]]
            differences = np.array(
                [
                    np.mean([losses[t, side][s] - losses[t, other][s] for t in budgets])
                    for s in common
                ]
            )
            gap = mean_interval([differences])
            found.notes.append(
                f"{side} less {other}, mean over budgets: {gap.estimate:+.4f} "
                f"({gap.low:+.4f} to {gap.high:+.4f})"
            )
    return found


def calibrate() -> Report:
    """CPU-seconds of one step, the best of many."""
    found = Report("CPU-seconds of one step", ("blocks", "seconds"))
    drawn = batches(sources()[0], Generator().manual_seed(0))

    def step_of(blocks: int) -> Callable[[], object]:
        model = ByteGPT(blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

        def step() -> None:
            optimizer.zero_grad()
            loss_of(model, next(drawn)).backward()
            optimizer.step()

        return step

    steps = {blocks: step_of(blocks) for blocks in STEP_SECONDS}
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(1 if timing.QUICK else 20):
        for blocks, step in steps.items():
            began = process_time()
            for _ in range(20):
                step()
            best[blocks] = min(best[blocks], (process_time() - began) / 20)
    for blocks, seconds in best.items():
        found.add(blocks, round(seconds, 5))
    return found


def gpt2() -> tuple[nn.Module, Loss]:
    """A small GPT-2 on the same bytes, and its loss on a random batch."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": LENGTH}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(vocab_size=256, use_cache=False, **sizes, **drops)

    def loss(model: nn.Module, held_out: bool, generator: Generator) -> Tensor:
        batch = next(batches(sources()[held_out], generator))
        logits: Tensor = model(batch[:, :-1]).logits
        return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return GPT2LMHeadModel(config), loss


def resnet() -> tuple[nn.Module, Loss]:
    """A small ResNet on 5,000 digits of MNIST, and its loss on a random batch."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        num_channels=1,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[2, 2],
        layer_type="basic",
        num_labels=10,
    )
    train, val, _ = split(mnist5k(), rng_seed=0)

    def loss(model: nn.Module, held_out: bool, generator: Generator) -> Tensor:
        part = val if held_out else train
        rows = torch.randint(len(part.labels), (64,), generator=generator)
        logits: Tensor = model(part.features[rows]).logits
        return cross_entropy(logits, part.labels[rows])

    return ResNetForImageClassification(config), loss


ENLARGED: Final[Mapping[str, Mapping[str, Any]]] = {
    "train on": {"width": 1.0},
    "width x2": {"width": 2.0},
    "depth x2, zero": {"width": 1.0, "depth": 2},
    "depth x2, copy": {"width": 1.0, "depth": 2, "how": "copy"},
    "both x2, zero": {"width": 2.0, "depth": 2},
}


def report_enlarged(seeds: int) -> Report:
    """Train, enlarge and train on."""
    found = Report(
        f"Enlarging trained networks, held-out loss after {FURTHER} more steps",
        ("model", "side", "parameters", "before", "right after", "after", "gain"),
        notes=["mean over random seeds; gain: loss of training on, less this one"],
    )
    first, further = (20, 5) if timing.QUICK else (TRAINED, FURTHER)
    for make in (gpt2, resnet):
        rows: dict[str, list[list[float]]] = {side: [] for side in ENLARGED}
        for seed in range(seeds):
            torch.manual_seed(seed)
            model, loss = make()
            _steps(model, loss, first, seed)
            before = _held_out(model, loss)
            example = {
                "gpt2": torch.zeros(2, 8, dtype=torch.int64),
                "resnet": torch.zeros(2, 1, 28, 28),
            }[make.__name__]
            for side, options in ENLARGED.items():
                larger = enlarge(model, **options, example=example)
                right_after = _held_out(larger, loss)
                _steps(larger, loss, further, seed + 1000)
                size = float(sum(p.numel() for p in larger.parameters()))
                rows[side].append([size, before, right_after, _held_out(larger, loss)])
        means = {side: np.mean(row, axis=0) for side, row in rows.items()}
        for side, (size, *losses) in means.items():
            gain = means["train on"][-1] - losses[-1]
            found.add(make.__name__, side, int(size), *map(float, (*losses, gain)))
    return found


def _steps(model: nn.Module, loss: Loss, count: int, seed: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = Generator().manual_seed(seed)
    model.train()
    for _ in range(count):
        optimizer.zero_grad()
        loss(model, False, generator).backward()
        optimizer.step()


@torch.no_grad()
def _held_out(model: nn.Module, loss: Loss) -> float:
    generator = Generator().manual_seed(0)
    model.eval()
    return float(np.mean([float(loss(model, True, generator)) for _ in range(32)]))
