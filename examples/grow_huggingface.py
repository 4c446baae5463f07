"""Grow a Hugging Face model: a BERT made from a config, so nothing is downloaded.

    python examples/grow_huggingface.py

It is shown 64 characters of Python's help texts and says from which quarter of the text
they are. Its MLPs start with 8 hidden units. `Grower` takes the model as it is: it is
called by keyword and answers with a dataclass. The lines marked `esper` are all it
takes.
"""

import torch
import torch.nn.functional as F
from _export import compare, hand_over
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

import esper
from esper.tasks.text import ALPHABET, text

LENGTH = 64
BATCH = 64
CLASSES = 4

Rows = tuple[Tensor, Tensor]
"""Windows of characters, and the quarter each is from."""


def tiny_bert() -> BertForSequenceClassification:
    """Two layers of width 32."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(ALPHABET),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=8,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
        )
    )


def train(controller: str, data: Rows, held_out: Rows, epochs: int) -> esper.Grower:
    """An ordinary training loop; with the controller "never" nothing grows in it."""
    torch.manual_seed(0)
    model = tiny_bert()
    ids, labels = data
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
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
    print("  slots:", ", ".join(grower.model.slots))

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
        print(f"  {epoch:>3}  accuracy {decision.metric:.3f}  {decision.said}")
    return grower


def accuracy(model: nn.Module, data: Rows) -> float:
    """Share of the windows whose quarter is named first."""
    model.eval()
    with torch.no_grad():
        right = model(input_ids=data[0]).logits.argmax(1) == data[1]
    model.train()
    return float(right.float().mean())


def main(*, quick: bool = False) -> dict[str, float]:
    """Train without and with growth; returns the figures that are printed."""
    torch.set_num_threads(1)
    epochs = 6 if quick else 16
    train_rows, held_out, test = quarters(1200 if quick else None)
    print("never grown:")
    never = train("never", train_rows, held_out, epochs)
    print("grown early:")
    grower = train("early", train_rows, held_out, epochs)
    print(f"\n{grower.summary()}")  # esper
    figures = compare(
        "accuracy",
        (never, accuracy(never.model, test)),
        (grower, accuracy(grower.model, test)),
    )
    return figures | hand_over(grower, {"input_ids": test[0][:100]})  # esper


def quarters(count: int | None) -> tuple[Rows, Rows, Rows]:
    """Windows that do not overlap, in three parts: three fifths, a fifth, a fifth."""
    parts = text()
    ids = torch.cat([parts.train, parts.decisions, parts.test])
    ids = ids[: len(ids) // LENGTH * LENGTH].unflatten(0, (-1, LENGTH))
    labels = torch.arange(len(ids)) * CLASSES // len(ids)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))[:count]
    fifth = len(order) // 5
    first, second, third = order.split([len(order) - 2 * fifth, fifth, fifth])
    return (
        (ids[first], labels[first]),
        (ids[second], labels[second]),
        (ids[third], labels[third]),
    )


if __name__ == "__main__":
    main()
