"""Twelve small networks as people have them, each with data to train it on.

All are called with a dictionary; with labels they answer with their loss too, as the
models of `transformers` do, six of which are here, built from small configs. None has
dropout, since Lightning does not put random streams back when it resumes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Tensor]
ROWS, CLASSES, TOKENS, LENGTH, SIDE = 8, 4, 32, 6, 8


@dataclass(frozen=True)
class Architecture:
    """How to build a network and what it is trained on."""

    build: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    """One batch, labels included."""
    slot: str
    """A place to grow; a name or a pattern."""
    blueprint: str = "widen_8"

    def make(self) -> nn.Module:
        """The network, the same every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()

    def batch(self, index: int) -> Batch:
        """A batch by its number."""
        return self.draw(torch.Generator().manual_seed(index))

    def example(self) -> Batch:
        """What the network is called with."""
        return {name: t for name, t in self.batch(0).items() if name != "labels"}


class Answering(nn.Module):
    """A network of its own kind that answers with logits, and with a loss if asked."""

    def answer(self, x: Tensor) -> Tensor:
        """The logits, or whatever is fitted to the labels."""
        raise NotImplementedError

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """Logits, and the loss if there are labels."""
        logits = self.answer(x)
        if labels is None:
            return {"logits": logits}
        if labels.is_floating_point():
            return {"loss": F.mse_loss(logits, labels), "logits": logits}
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Mlp(Answering):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 16)
        self.fc3 = nn.Linear(16, CLASSES)

    def answer(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden: Tensor = self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))
        return hidden


class Block(nn.Module):
    """Two convolutions with batch norm, and the way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, h: Tensor) -> Tensor:
        """As in a ResNet."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(h)))))
        return F.relu(h + inner)


class ResNet(Answering):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block1, self.block2 = Block(8), Block(8)
        self.head = nn.Linear(8, CLASSES)

    def answer(self, x: Tensor) -> Tensor:
        """Logits."""
        hidden = self.block2(self.block1(self.stem(x)))
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


class LstmClassifier(Answering):
    """Tokens through an LSTM, and two layers on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, CLASSES)

    def answer(self, x: Tensor) -> Tensor:
        """Logits."""
        outputs, _ = self.lstm(self.embed(x))
        logits: Tensor = self.fc2(torch.tanh(self.fc1(outputs[:, -1])))
        return logits


class UNet(Answering):
    """Down, across and up again, with a way around."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(3, 8, 3, padding=1)
        self.down2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.across = nn.Conv2d(16, 16, 3, padding=1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 3, 3, padding=1)

    def answer(self, x: Tensor) -> Tensor:
        """An image."""
        high = F.relu(self.down1(x))
        low = F.relu(self.across(F.relu(self.down2(high))))
        image: Tensor = self.out(torch.cat([high, F.relu(self.up(low))], dim=1))
        return image


class Generator(Answering):
    """From noise to an image, as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 16), nn.Linear(16, 8 * 4 * 4)
        self.up = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)

    def answer(self, x: Tensor) -> Tensor:
        """An image."""
        hidden = self.fc2(F.leaky_relu(self.fc1(x), 0.2))
        return torch.tanh(self.up(F.relu(hidden.view(-1, 8, 4, 4))))


class Tied(Answering):
    """A language model whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 8)
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def answer(self, x: Tensor) -> Tensor:
        """Logits of every token, tokens before positions."""
        hidden = self.embed(x)
        hidden = hidden + self.fc2(F.gelu(self.fc1(hidden)))
        logits: Tensor = self.head(hidden)
        return logits.transpose(1, 2)


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,), generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)


def _vectors(g: torch.Generator) -> Batch:
    return {"x": torch.randn(ROWS, 6, generator=g), "labels": _classes(g)}


def _images(g: torch.Generator, name: str = "x") -> Batch:
    x = torch.randn(ROWS, 3, SIDE, SIDE, generator=g)
    return {name: x, "labels": _classes(g)}


def _to_images(g: torch.Generator, noise: bool) -> Batch:
    labels = torch.randn(ROWS, 3, SIDE, SIDE, generator=g).tanh()
    x = torch.randn(ROWS, 6, generator=g) if noise else labels + 0.1
    return {"x": x, "labels": labels}


def _texts(g: torch.Generator) -> Batch:
    return {"input_ids": _tokens(g), "labels": _classes(g)}


def _language(g: torch.Generator) -> Batch:
    tokens = _tokens(g)
    return {"input_ids": tokens, "labels": tokens}


def _translation(g: torch.Generator) -> Batch:
    return {
        "input_ids": _tokens(g),
        "decoder_input_ids": _tokens(g),
        "labels": _tokens(g),
    }


def _hugging(model: str, config: str, **sizes: Any) -> Callable[[], nn.Module]:  # noqa: ANN401
    def build() -> nn.Module:
        import transformers

        kind: Any = getattr(transformers, model)
        built: nn.Module = kind(getattr(transformers, config)(**sizes))
        return built

    return build


_LANGUAGE: Mapping[str, Any] = {
    "vocab_size": TOKENS,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": False,  # what generation keeps has no place in a graph of ONNX
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "MLP": Architecture(Mlp, _vectors, "fc1->fc2"),
    "BatchNorm ResNet": Architecture(ResNet, _images, "block2.conv1->block2.conv2"),
    "ConvNeXt": Architecture(
        _hugging(
            "ConvNextForImageClassification",
            "ConvNextConfig",
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_stages=2,
            patch_size=2,
            num_labels=CLASSES,
        ),
        lambda g: _images(g, "pixel_values"),
        "*stages.0.layers.0*",
    ),
    "ViT": Architecture(
        _hugging(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            image_size=SIDE,
            patch_size=4,
            num_labels=CLASSES,
        ),
        lambda g: _images(g, "pixel_values"),
        "*layer*1*",
    ),
    "BERT": Architecture(
        _hugging(
            "BertForSequenceClassification",
            "BertConfig",
            vocab_size=TOKENS,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            max_position_embeddings=16,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        ),
        _texts,
        "*layer.1*",
    ),
    "GPT-2": Architecture(
        _hugging(
            "GPT2LMHeadModel",
            "GPT2Config",
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            **_LANGUAGE,
        ),
        _language,
        "*h.1.mlp*",
    ),
    "Llama": Architecture(
        _hugging(
            "LlamaForCausalLM",
            "LlamaConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            **_LANGUAGE,
        ),
        _language,
        "*layers.1.mlp*",
    ),
    "T5": Architecture(
        _hugging(
            "T5ForConditionalGeneration",
            "T5Config",
            d_model=16,
            d_kv=8,
            d_ff=16,
            num_layers=1,
            num_heads=2,
            decoder_start_token_id=0,
            dropout_rate=0.0,
            **_LANGUAGE,
        ),
        _translation,
        "encoder.*",
    ),
    "LSTM classifier": Architecture(
        LstmClassifier,
        lambda g: {"x": _tokens(g), "labels": _classes(g)},
        "fc1->fc2",
    ),
    "U-Net": Architecture(UNet, lambda g: _to_images(g, noise=False), "down2->across"),
    "GAN generator": Architecture(
        Generator, lambda g: _to_images(g, noise=True), "fc1->fc2"
    ),
    "tied weights": Architecture(
        Tied,
        lambda g: {"x": (tokens := _tokens(g)), "labels": tokens},
        "fc1->fc2",
    ),
}
