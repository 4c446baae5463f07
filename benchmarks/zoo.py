"""Small networks as people have them, each with data to train it on.

All are called with a dictionary; with labels they answer with their loss too, as the
models of `transformers` do, most of which are here, built from small configs. None has
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

    answer: Callable[..., Tensor]
    """The logits, or whatever is fitted to the labels."""

    def forward(
        self, x: Tensor, given: Tensor | None = None, labels: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Logits, and the loss if there are labels."""
        logits = self.answer(x) if given is None else self.answer(x, given)
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


class Diffusion(Answering):
    """The noise in an image at a time: a U-Net of two levels and an MLP of the time."""

    def __init__(self) -> None:
        super().__init__()
        self.time1, self.time2 = nn.Linear(1, 16), nn.Linear(16, 16)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.down1 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(16, 16, 3, stride=2, padding=1)
        self.across1 = nn.Conv2d(16, 16, 3, padding=1)
        self.across2 = nn.Conv2d(16, 16, 3, padding=1)
        self.up2 = nn.ConvTranspose2d(16, 16, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(32, 8, 2, stride=2)
        self.out1 = nn.Conv2d(16, 8, 3, padding=1)
        self.out2 = nn.Conv2d(8, 3, 3, padding=1)

    def answer(self, x: Tensor, time: Tensor) -> Tensor:
        """The noise."""
        when = self.time2(F.silu(self.time1(time)))[:, :, None, None]
        high = F.silu(self.stem(x))
        middle = F.silu(self.down1(high) + when)
        low = F.silu(self.down2(middle))
        low = low + self.across2(F.silu(self.across1(low) + when))
        middle = torch.cat([middle, F.silu(self.up2(low))], dim=1)
        high = torch.cat([high, F.silu(self.up1(middle))], dim=1)
        noise: Tensor = self.out2(F.silu(self.out1(high)))
        return noise


class Vae(nn.Module):
    """An image through a few random numbers, drawn in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.mean, self.logvar = nn.Linear(64, 4), nn.Linear(64, 4)
        self.fc = nn.Linear(4, 64)
        self.up1 = nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1)
        self.up2 = nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        """The image again, and the loss if there are labels."""
        hidden = F.relu(self.conv2(F.relu(self.conv1(x)))).flatten(1)
        mean, logvar = self.mean(hidden), self.logvar(hidden)
        z = mean
        if self.training:
            z = mean + torch.randn_like(mean) * (0.5 * logvar).exp()
        image = self.up2(F.relu(self.up1(F.relu(self.fc(z)).view(-1, 16, 2, 2))))
        if labels is None:
            return {"logits": image, "mean": mean, "logvar": logvar}
        prior = 0.5 * (logvar.exp() + mean.square() - 1 - logvar).mean()
        return {"loss": F.mse_loss(image, labels) + 0.1 * prior, "logits": image}


class Gcn(Answering):
    """Two graph convolutions, and classes of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Linear(6, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, CLASSES)

    def answer(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """Logits."""
        hidden = F.relu(adjacency @ self.conv1(x))
        hidden = F.relu(adjacency @ self.conv2(hidden))
        logits: Tensor = self.head(hidden.mean(1))
        return logits


class PointNet(Answering):
    """Every point through the same layers, and the largest of them all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(3, 16, 1), nn.BatchNorm1d(16)
        self.conv2, self.norm2 = nn.Conv1d(16, 32, 1), nn.BatchNorm1d(32)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, CLASSES)

    def answer(self, x: Tensor) -> Tensor:
        """Logits."""
        points = F.relu(self.norm1(self.conv1(x)))
        largest = self.norm2(self.conv2(points)).amax(2)
        logits: Tensor = self.fc2(F.relu(self.fc1(largest)))
        return logits


def _classes(generator: torch.Generator) -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,), generator=generator)


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(0, TOKENS, (ROWS, LENGTH), generator=generator)


def _vectors(g: torch.Generator) -> Batch:
    return {"x": torch.randn(ROWS, 6, generator=g), "labels": _classes(g)}


def _images(g: torch.Generator, name: str = "x", side: int = SIDE) -> Batch:
    x = torch.randn(ROWS, 3, side, side, generator=g)
    return {name: x, "labels": _classes(g)}


def _to_images(g: torch.Generator, noise: bool) -> Batch:
    labels = torch.randn(ROWS, 3, SIDE, SIDE, generator=g).tanh()
    x = torch.randn(ROWS, 6, generator=g) if noise else labels + 0.1
    return {"x": x, "labels": labels}


def _noisy(g: torch.Generator) -> Batch:
    time, labels = torch.rand(ROWS, 1, generator=g), _images(g)["x"]
    x = _images(g)["x"] + time[:, :, None, None] * labels
    return {"x": x, "given": time, "labels": labels}


def _graphs(g: torch.Generator) -> Batch:
    edges = torch.rand(ROWS, LENGTH, LENGTH, generator=g) < 0.3
    near = (edges | edges.mT | torch.eye(LENGTH, dtype=torch.bool)).float()
    x = torch.randn(ROWS, LENGTH, 6, generator=g)
    adjacency = near / near.sum(-1, keepdim=True)
    return {"x": x, "given": adjacency, "labels": _classes(g)}


def _points(g: torch.Generator) -> Batch:
    return {"x": torch.randn(ROWS, 3, 16, generator=g), "labels": _classes(g)}


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


def _speech(g: torch.Generator) -> Batch:
    sound = torch.randn(ROWS, 4, 2 * LENGTH, generator=g)
    tokens = {"decoder_input_ids": _tokens(g), "labels": _tokens(g)}
    return {"input_features": sound, **tokens}


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

_READING: Mapping[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
    "num_labels": CLASSES,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
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
            **_READING,
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
    "MobileNetV2": Architecture(
        _hugging(
            "MobileNetV2ForImageClassification",
            "MobileNetV2Config",
            depth_multiplier=0.1,
            classifier_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        lambda g: _images(g, "pixel_values"),
        "*layer.1.*",
        "widen_x2",  # one ratio sizes layers of several widths
    ),
    "EfficientNet": Architecture(
        _hugging(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            width_coefficient=0.25,
            depth_coefficient=0.1,
            hidden_dim=320,
            initializer_range=0.2,  # outputs would be too small otherwise
            dropout_rate=0.0,
            drop_connect_rate=0.0,
            num_labels=CLASSES,
        ),
        lambda g: _images(g, "pixel_values", 4 * SIDE),
        "*blocks.1.*",
    ),
    "MobileViT": Architecture(
        _hugging(
            "MobileViTForImageClassification",
            "MobileViTConfig",
            image_size=4 * SIDE,
            hidden_sizes=[8, 12, 16],
            neck_hidden_sizes=[8, 8, 8, 8, 12, 16, 32],
            num_attention_heads=2,
            initializer_range=0.2,
            hidden_dropout_prob=0.0,
            classifier_dropout_prob=0.0,
            num_labels=CLASSES,
        ),
        lambda g: _images(g, "pixel_values", 4 * SIDE),
        "*layer.4.downsampling*",
        "widen_x2",
    ),
    "DeBERTa-v2": Architecture(
        _hugging(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            **_READING,
        ),
        _texts,
        "*layer.1*",
    ),
    "RoBERTa": Architecture(
        _hugging("RobertaForSequenceClassification", "RobertaConfig", **_READING),
        _texts,
        "*layer.1*",
    ),
    "Whisper": Architecture(
        _hugging(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=4,
            max_source_positions=LENGTH,
            max_target_positions=16,
            pad_token_id=0,
            decoder_start_token_id=0,
            dropout=0.0,
            **_LANGUAGE,
        ),
        _speech,
        "*layers.0*",
    ),
    "Swin": Architecture(
        _hugging(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=SIDE,
            patch_size=2,
            embed_dim=8,
            depths=[1, 1],
            num_heads=[2, 2],
            window_size=2,
            drop_path_rate=0.0,
            num_labels=CLASSES,
        ),
        lambda g: _images(g, "pixel_values"),
        "*layers.*",
        "widen_x2",
    ),
    "Mixtral": Architecture(
        _hugging(
            "MixtralForCausalLM",
            "MixtralConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            intermediate_size=16,
            num_local_experts=2,
            **_LANGUAGE,
        ),
        _language,
        "*layers.1*",
        "low_rank_4",
    ),
    "Mamba": Architecture(
        _hugging(
            "MambaForCausalLM",
            "MambaConfig",
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
            **_LANGUAGE,
        ),
        _language,
        "*layers.1*",
        "low_rank_4",
    ),
    "Phi3": Architecture(
        _hugging(
            "Phi3ForCausalLM",
            "Phi3Config",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=16,
            pad_token_id=0,
            **_LANGUAGE,
        ),
        _language,
        "*layers.1*",
        "low_rank_4",
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
    "diffusion U-Net": Architecture(Diffusion, _noisy, "out1->out2"),
    "VAE": Architecture(Vae, lambda g: _to_images(g, noise=False), "conv1->conv2"),
    "GCN": Architecture(Gcn, _graphs, "conv2->conv2", "low_rank_4"),
    "PointNet": Architecture(PointNet, _points, "fc1->fc2"),
    "tied weights": Architecture(
        Tied,
        lambda g: {"x": (tokens := _tokens(g)), "labels": tokens},
        "fc1->fc2",
    ),
}
