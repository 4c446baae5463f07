"""Grow a Hugging Face model: a GPT-2 made from a config, so nothing is downloaded.

    python examples/grow_huggingface.py

It predicts the next character of Python's help texts. Its MLPs start with 8 hidden
units. The field `n_inner` of the config follows.
"""

from pydoc_data.topics import topics

import torch
from _compare import compare
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import esper

LENGTH = 32
SIZES = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_inner": 8}
TOKENS = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
TEXT = torch.tensor(list("".join(topics.values()).encode("ascii", "replace")))
TRAIN, VAL, TEST = TEXT.tensor_split([len(TEXT) * 6 // 10, len(TEXT) * 8 // 10])
EXAMPLE = {"input_ids": TRAIN[: 8 * LENGTH].view(8, LENGTH)}


def loss_of(model: GPT2LMHeadModel, text: Tensor, count: int) -> Tensor:
    """Return the loss on random windows."""
    ids = text[torch.randint(len(text) - LENGTH, (count, 1)) + torch.arange(LENGTH)]
    return model(input_ids=ids, labels=ids).loss


def train(name: str, epochs: int) -> tuple[esper.Grower, float]:
    """Train one network; return its Grower and its test loss."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=LENGTH, **SIZES, **TOKENS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"example": EXAMPLE, "controller": name, "mode": "min"}
    grower = esper.Grower(model, optimizer, **options)
    for step in range(1, 40 * epochs + 1):
        optimizer.zero_grad()
        loss_of(model, TRAIN, 32).backward()
        optimizer.step()
        if step % 40 == 0:
            with torch.no_grad():
                grower.step(loss_of(model.eval(), VAL, 256).item())
            model.train()
    print(f"{name}: n_inner {model.config.n_inner}")
    return grower, loss_of(model.eval(), TEST, 1024).item()


def main(epochs: int = 20) -> dict[str, float]:
    """Train without and with growth, and return what is printed."""
    return compare("loss", train, epochs, **EXAMPLE)


if __name__ == "__main__":
    main()
