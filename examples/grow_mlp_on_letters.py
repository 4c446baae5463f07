"""Grow an MLP on a table: 20,000 letters, described by sixteen numbers each.

    python examples/grow_mlp_on_letters.py

It starts with 12 units in both hidden layers.
Two lines about `grower` are all that the training loop needs. The controller "never"
trains the same network without growth.
"""

import torch
from _compare import compare
from torch import nn
from torch.nn.functional import cross_entropy

import esper

TRAIN, VAL, TEST = esper.datasets.load("letter")
EXAMPLE = TRAIN.features[:8]


def accuracy(model: nn.Module, data: esper.datasets.Data) -> float:
    """Return the fraction of rows whose letter is predicted."""
    with torch.no_grad():
        return float((model(data.features).argmax(1) == data.labels).float().mean())


def train(controller: str, epochs: int) -> tuple[esper.Grower, float]:
    """Train one network; return its Grower and its test accuracy."""
    torch.manual_seed(0)
    fc1, fc2, out = nn.Linear(16, 12), nn.Linear(12, 12), nn.Linear(12, 26)
    model = nn.Sequential(fc1, nn.ReLU(), fc2, nn.ReLU(), out)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    grower = esper.Grower(model, optimizer, example=EXAMPLE, controller=controller)
    for _ in range(epochs):
        for rows in torch.randperm(len(TRAIN)).split(64):
            loss = cross_entropy(model(TRAIN.features[rows]), TRAIN.labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        grower.step(accuracy(model, VAL))
    return grower, accuracy(model, TEST)


def main(epochs: int = 16) -> dict[str, float]:
    """Train without and with growth, and return what is printed."""
    return compare("accuracy", train, epochs, input=TEST.features)


if __name__ == "__main__":
    main()
