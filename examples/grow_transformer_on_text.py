"""Grow a causal transformer on Python's help texts; the metric is a loss."""

from pydoc_data.topics import topics

import torch
from _compare import compare
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import esper

LENGTH, WIDTH = 32, 32
TEXT = torch.tensor(list("".join(topics.values()).encode("ascii", "replace")))
TRAIN, VAL, TEST = TEXT.tensor_split([len(TEXT) * 6 // 10, len(TEXT) * 8 // 10])
IDS = TRAIN[: 8 * LENGTH].view(8, LENGTH)


class Transformer(nn.Module):
    """Two of PyTorch's blocks over characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        block = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the character after each."""
        return self.head(self.blocks(self.embed(ids), self.mask, is_causal=True))


def loss_of(model: nn.Module, text: Tensor, count: int) -> Tensor:
    """Return the loss on random windows."""
    windows = text[torch.randint(len(text) - LENGTH, (count, 1)) + torch.arange(33)]
    return cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:])


def train(name: str, epochs: int) -> tuple[esper.Grower, float]:
    """Train one network; return its Grower and its test loss."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grower = esper.Grower(model, optimizer, example=IDS, controller=name, mode="min")
    for step in range(1, 40 * epochs + 1):
        optimizer.zero_grad()
        loss_of(model, TRAIN, 32).backward()
        optimizer.step()
        if step % 40 == 0:
            grower.step(loss_of(model, VAL, 256).item())
    return grower, loss_of(model, TEST, 2048).item()


def main(epochs: int = 20) -> dict[str, float]:
    """Train without and with growth, and return what is printed."""
    return compare("loss", train, epochs, ids=IDS)


if __name__ == "__main__":
    main()
