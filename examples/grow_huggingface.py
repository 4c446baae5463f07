"""Grow a Hugging Face model: a BERT made from a config, so nothing is downloaded.

    python examples/grow_huggingface.py

It reads 16 characters of Python's help texts, the latest one first, and says what kind
of character comes next. Its MLPs start with 4 hidden units. `Grower` takes the model as
it is: called by keyword, answering with a dataclass. The lines marked `esper` are all
it takes.
"""

import torch
import torch.nn.functional as F
from _export import compare, hand_over
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import esper
from esper.tasks.text import ALPHABET, text, windows

LENGTH = 16
BATCH = 64
KINDS = torch.tensor([0 if c.isspace() else 1 if c.islower() else 2 for c in ALPHABET])
"""A space or new line, a small letter, anything else: by the character's id."""

Rows = tuple[Tensor, Tensor]
"""Windows of characters, and the kind of the character after each."""


def tiny_bert() -> BertForSequenceClassification:
    """Two layers of width 32."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(ALPHABET),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=4,
            max_position_embeddings=LENGTH,
            num_labels=3,
        )
    )


def train(controller: str, data: Rows, held_out: Rows, epochs: int) -> esper.Grower:
    """An ordinary training loop; with the controller "never" nothing grows in it."""
    torch.manual_seed(0)
    model = tiny_bert()
    ids, labels = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    example = {"input_ids": ids[:8]}
    grower = esper.Grower(  # esper
        model,
        optimizer,
        slots=esper.suggest_slots(model, example),
        example=example,
        controller=controller,
        budget=1.0,  # it may add as many parameters as it has
        decisions=epochs,
    )

    def learn(x: Tensor, y: Tensor) -> None:
        loss = grower.loss(  # esper
            lambda: F.cross_entropy(model(input_ids=x).logits, y)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for epoch in range(epochs):
        for rows in torch.randperm(len(labels)).split(BATCH):
            learn(ids[rows], labels[rows])
        schedule.step()
        decision = grower.step(metric=accuracy(model, held_out))  # esper
        print(f"  {epoch:>3}  accuracy {decision.metric:.3f}  {decision.action}")
    return grower


def accuracy(model: nn.Module, data: Rows) -> float:
    """Share of the windows whose next kind is named first."""
    model.eval()
    with torch.no_grad():
        right = model(input_ids=data[0]).logits.argmax(1) == data[1]
    model.train()
    return float(right.float().mean())


def main(*, quick: bool = False) -> dict[str, float]:
    """Train without and with growth; returns the figures that are printed."""
    torch.set_num_threads(1)
    epochs, count = (6, 512) if quick else (10, 3072)
    parts = text()
    data = cut(parts.train, count)
    held_out, test = cut(parts.val, count // 3), cut(parts.test, count // 3)
    print("never grown:")
    never = train("never", data, held_out, epochs)
    print("grown early:")
    grower = train("early", data, held_out, epochs)
    print(f"\n{grower.summary()}")  # esper
    figures = compare(
        "accuracy",
        (never, accuracy(never.model, test)),
        (grower, accuracy(grower.model, test)),
    )
    return figures | hand_over(grower, {"input_ids": test[0][:100]})  # esper


def cut(ids: Tensor, count: int) -> Rows:
    """Windows at random places, always the same ones."""
    chance = torch.Generator().manual_seed(0)
    x, following = windows(ids, count=count, length=LENGTH, generator=chance)
    return x.flip(1), KINDS[following[:, -1]]


if __name__ == "__main__":
    main()
