"""Grow a tiny transformer on English: the next character of Python's help texts.

    python examples/grow_transformer_on_text.py

The MLP of each block starts with 16 hidden units, half its width, and is widened while
the model trains. The metric is a loss here, bits per character: mode="min". The lines
marked `esper` are all it takes.
"""

from math import log

import torch
import torch.nn.functional as F
from _export import compare, hand_over
from torch import Tensor, nn

from esper import Grower
from esper.tasks.text import ALPHABET, text, windows

LENGTH = 32
WIDTH = 32


class Block(nn.Module):
    """Causal attention with two heads, then an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, 2, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Two blocks over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the character after each."""
        return self.head(self.norm(self.blocks(self.embed(ids) + self.place)))


def train(who: str, ids: Tensor, held_out: Tensor, epochs: int, steps: int) -> Grower:
    """An ordinary training loop; with the controller "never" nothing grows in it."""
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    grower = Grower(  # esper
        model,
        optimizer,
        slots=["blocks.0.up->blocks.0.down", "blocks.1.up->blocks.1.down"],
        example=ids[None, :LENGTH],
        controller=who,
        budget=1.0,  # it may add as many parameters as it has
        decisions=epochs,
        mode="min",
    )

    def learn(x: Tensor, y: Tensor) -> None:
        loss = grower.loss(lambda: F.cross_entropy(model(x).mT, y))  # esper
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(grower.parameters(), 1.0)  # esper
        optimizer.step()

    for epoch in range(epochs):
        for _ in range(steps):
            learn(*windows(ids, count=32, length=LENGTH, generator=chance))
        schedule.step()
        decision = grower.step(metric=bits(model, held_out))  # esper
        print(f"  {epoch:>3}  {decision.metric:.3f} bits  {decision.action}")
    return grower


def bits(model: nn.Module, ids: Tensor) -> float:
    """Bits per character on 256 windows, the same ones every time."""
    chance = torch.Generator().manual_seed(1)
    x, y = windows(ids, count=256, length=LENGTH, generator=chance)
    with torch.no_grad():
        return float(F.cross_entropy(model(x).mT, y)) / log(2)


def main(*, quick: bool = False) -> dict[str, float]:
    """Train without and with growth; returns the figures that are printed."""
    torch.set_num_threads(1)
    often = (6, 8) if quick else (20, 40)  # epochs, and steps of each
    parts = text()
    print("never grown:")
    never = train("never", parts.train, parts.val, *often)
    print("grown early:")
    grower = train("early", parts.train, parts.val, *often)
    print(f"\n{grower.summary()}")  # esper
    figures = compare(
        "bits per character",
        (never, bits(never.model, parts.test)),
        (grower, bits(grower.model, parts.test)),
    )
    rows = {"ids": parts.test[: 32 * LENGTH].unflatten(0, (32, LENGTH))}
    return figures | hand_over(grower, rows)  # esper


if __name__ == "__main__":
    main()
