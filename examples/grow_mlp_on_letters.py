"""Grow a small MLP on 20,000 real rows: which capital letter is it?

    python examples/grow_mlp_on_letters.py

The network starts with two hidden layers of 12 units. In the first third of training
`Grower` puts new units into both; the lines marked `esper` are all it takes.
"""

import torch
import torch.nn.functional as F
from _export import compare, hand_over
from torch import Tensor, nn

import esper
from esper.tasks.data import Data, split
from esper.tasks.datasets import letter

BATCH = 128


class MLP(nn.Module):
    """16 -> 12 -> 12 -> 26."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, 12)
        self.fc2 = nn.Linear(12, 12)
        self.out = nn.Linear(12, 26)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the letters."""
        return self.out(torch.relu(self.fc2(torch.relu(self.fc1(x)))))


def train(controller: str, data: Data, held_out: Data, epochs: int) -> esper.Grower:
    """An ordinary training loop; with the controller "never" nothing grows in it."""
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = len(data) // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-2, total_steps=epochs * batches
    )
    grower = esper.Grower(  # esper
        model,
        optimizer,
        slots=["fc1->fc2", "fc2->out"],
        example=data.features[:8],
        controller=controller,
        budget=4.0,  # it may add four times its own parameters
        decisions=epochs,
    )

    def learn(x: Tensor, y: Tensor) -> None:
        loss = grower.loss(lambda: F.cross_entropy(model(x), y))  # esper
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    for epoch in range(epochs):
        for rows in torch.randperm(len(data)).split(BATCH)[:batches]:
            learn(data.features[rows], data.labels[rows])
        decision = grower.step(metric=accuracy(model, held_out))  # esper
        print(f"  {epoch:>3}  accuracy {decision.metric:.3f}  {decision.action}")
    return grower


def accuracy(model: nn.Module, data: Data) -> float:
    """Share of the rows whose letter is named first."""
    with torch.no_grad():
        return float((model(data.features).argmax(1) == data.labels).float().mean())


def main(*, quick: bool = False) -> dict[str, float]:
    """Train without and with growth; returns the figures that are printed."""
    torch.set_num_threads(1)
    epochs, shares = (8, (0.1, 0.1, 0.8)) if quick else (16, (0.6, 0.2, 0.2))
    parts = split(letter(), rng_seed=0, shares=shares)
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
