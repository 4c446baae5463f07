"""Grow a small CNN on real images: 1,797 handwritten digits of 8 by 8 pixels.

    python examples/grow_cnn_on_digits.py

It starts with four channels in both convolutions. New channels come with a batch norm
of their own, go through the same activation and pooling as the others, and merge into
the layers that the network has. The lines marked `esper` are all it takes.
"""

import torch
import torch.nn.functional as F
from _export import compare, hand_over
from torch import Tensor, nn

import esper
from esper.tasks.data import Data, split
from esper.tasks.datasets import digits

BATCH = 64


class CNN(nn.Module):
    """Two convolutions, a pooling and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the digits."""
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        return self.fc(F.max_pool2d(x, 4).flatten(1))


def train(controller: str, data: Data, held_out: Data, epochs: int) -> esper.Grower:
    """An ordinary training loop; with the controller "never" nothing grows in it."""
    torch.manual_seed(0)
    model = CNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    grower = esper.Grower(  # esper
        model,
        optimizer,
        slots=["conv1->conv2", "conv2->fc"],
        example=data.features[:8],
        controller=controller,
        budget=4.0,  # it may add four times its own parameters
        blueprints=["widen_x1.5", "widen_x2"],  # half as many channels more, or twice
        decisions=epochs,
    )

    def learn(x: Tensor, y: Tensor) -> None:
        loss = grower.loss(lambda: F.cross_entropy(model(x), y))  # esper
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for epoch in range(epochs):
        for rows in torch.randperm(len(data)).split(BATCH):
            learn(data.features[rows], data.labels[rows])
        schedule.step()
        # A function instead of a number: what it changes of the model is put back.
        decision = grower.step(metric=lambda: accuracy(model, held_out))  # esper
        print(f"  {epoch:>3}  accuracy {decision.metric:.3f}  {decision.action}")
    return grower


def accuracy(model: nn.Module, data: Data) -> float:
    """Share of the images whose digit is named first."""
    model.eval()
    with torch.no_grad():
        right = model(data.features).argmax(1) == data.labels
    model.train()
    return float(right.float().mean())


def main(*, quick: bool = False) -> dict[str, float]:
    """Train without and with growth; returns the figures that are printed."""
    torch.set_num_threads(1)
    epochs, shares = (8, (0.2, 0.1, 0.7)) if quick else (20, (0.6, 0.2, 0.2))
    parts = split(digits(), rng_seed=0, shares=shares)
    print("never grown:")
    never = train("never", parts.train, parts.val, epochs)
    print("grown early:")
    grower = train("early", parts.train, parts.val, epochs)
    print(f"\n{grower.summary()}")  # esper
    figures = compare(
        "accuracy",
        (never, accuracy(never.model, parts.test)),
        (grower, accuracy(grower.model, parts.test)),
    )
    return figures | hand_over(grower, {"x": parts.test.features})  # esper


if __name__ == "__main__":
    main()
