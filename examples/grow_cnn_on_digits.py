"""Grow a CNN with batch norm on scikit-learn's digits: 1,797 images of 8 by 8 pixels.

    python examples/grow_cnn_on_digits.py

New channels get a batch norm of their own. Later they merge into the network's layers.
"""

import torch
from _compare import compare
from torch import nn
from torch.nn.functional import cross_entropy

import esper

TRAIN, VAL, TEST = esper.datasets.load("digits")
EXAMPLE = TRAIN.features[:8]


def cnn() -> nn.Sequential:
    """Return two convolutions with four channels, and a linear layer."""
    first = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    second = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    head = nn.MaxPool2d(4), nn.Flatten(), nn.Linear(16, 10)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), *first, *second, *head)


def accuracy(model: nn.Module, data: esper.datasets.Data) -> float:
    """Return the fraction of images whose digit is predicted."""
    model.eval()
    with torch.no_grad():
        right = model(data.features).argmax(1) == data.labels
    model.train()
    return float(right.float().mean())


def train(controller: str, epochs: int) -> tuple[esper.Grower, float]:
    """Train one network; return its Grower and its test accuracy."""
    torch.manual_seed(0)
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
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


def main(epochs: int = 20) -> dict[str, float]:
    """Train without and with growth, and return what is printed."""
    return compare("accuracy", train, epochs, input=TEST.features)


if __name__ == "__main__":
    main()
