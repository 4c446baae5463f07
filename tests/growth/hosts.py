"""Small hosts of every layout, with dropout and batch norm in them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from esper.growth.blueprints.registry import misfit
from esper.growth.model import GrowingModel


class Vectors(nn.Module):
    """[B, 8] -> [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.norm = nn.BatchNorm1d(12)
        self.second = nn.Linear(12, 12)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        return self.last(self.drop(torch.tanh(self.second(x))))


class Sequences(nn.Module):
    """[B, 6, 8] -> [B, 5]; a little transformer block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.up = nn.Linear(12, 16)
        self.act = nn.GELU()
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(16, 12)
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.norm(x + self.down(self.drop(self.act(self.up(x)))))
        return self.last(x.mean(dim=1))


class Signals(nn.Module):
    """[B, 3, 10] -> [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Conv1d(8, 8, 3, stride=2, padding=1)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.last(self.drop(torch.relu(x).mean(dim=2)))


class Images(nn.Module):
    """[B, 2, 8, 8] -> [B, 5]; pooled, then flattened into a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        x = self.pool(torch.relu(x))
        return self.last(self.drop(x.flatten(1)))


class Net(nn.Sequential):
    """Named layers one after the other."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)


class Scale(nn.Module):
    """One weight per channel, in a module or in the code of the host."""

    def __init__(self, width: int, *axes: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, width).view(-1, *axes))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class OwnScale(nn.Module):
    """A module with children, whose code multiplies with parameters of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.gamma = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.beta = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.gamma.view(1, -1, 1, 1) * self.act(self.beta * x)


class SqueezeExcite(nn.Module):
    """A gate from the means of all channels, with layers of convolutions or not."""

    def __init__(self, width: int, hidden: int, *, linear: bool = False) -> None:
        super().__init__()
        self.pool, self.linear = nn.AdaptiveAvgPool2d(1), linear
        kinds = (nn.Linear, {}) if linear else (nn.Conv2d, {"kernel_size": 1})
        self.fc1 = kinds[0](width, hidden, **kinds[1])
        self.fc2 = kinds[0](hidden, width, **kinds[1])

    def forward(self, x: Tensor) -> Tensor:
        h = self.pool(x)
        h = h.view(x.shape[0], x.shape[1]) if self.linear else h
        h = torch.sigmoid(self.fc2(torch.relu(self.fc1(h))))
        return x * (h.view(x.shape[0], x.shape[1], 1, 1) if self.linear else h)


@dataclass(frozen=True)
class Kind:
    """A host, what it is called with, and its places."""

    build: type[nn.Module]
    shape: tuple[int, ...]
    slots: tuple[str, ...]


HOSTS = {
    "vector": Kind(
        Vectors, (8,), ("first->second", "second->last", "second->second", "second")
    ),
    "sequence": Kind(Sequences, (6, 8), ("up->down", "down->down", "norm")),
    "signal": Kind(Signals, (3, 10), ("first->second", "second->second", "first")),
    "image": Kind(
        Images,
        (2, 8, 8),
        ("first->second", "second->last", "second->second", "second"),
    ),
}


def make_host(kind: str, rng_seed: int = 0) -> nn.Module:
    """A host, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(rng_seed)
        return HOSTS[kind].build()


def make_batch(kind: str, rows: int = 16, rng_seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs and labels that can be learnt: where the largest feature is."""
    generator = torch.Generator().manual_seed(rng_seed)
    x = torch.randn(rows, *HOSTS[kind].shape, generator=generator)
    return x, x.flatten(1)[:, :5].argmax(dim=1)


def grow(kind: str, host: nn.Module | None = None, **options) -> GrowingModel:
    """A growing model over a host of this kind, with all its places."""
    host = make_host(kind) if host is None else host
    like = next(host.parameters())
    example = make_batch(kind, rows=4, rng_seed=1)[0].to(like)
    return GrowingModel(
        host, HOSTS[kind].slots, example, **{"seeds_per_slot": 2, **options}
    )


def every_planting() -> list[tuple[str, str, str]]:
    """Every (kind, slot, blueprint) that fits."""
    found = []
    for kind in HOSTS:
        model = grow(kind)
        for slot in range(len(model.seeds.places)):
            geometry = model.seeds.place(slot).geometry
            found += [
                (kind, model.slots[slot], blueprint.name)
                for blueprint in model.spec.blueprints
                if not misfit(blueprint, geometry)
            ]
    return found


def move_to(
    model: GrowingModel, slot: str, blueprint: str, stage: str, **manner
) -> None:
    """Plant and bring a seed to a stage."""
    tempo = {"TRAINING": "SLOW", "BLENDING": "SLOW"}.get(stage, "FAST")
    model.plant(slot, blueprint, tempo=tempo, **manner)
    model.tick({"TRAINING": 1, "BLENDING": 6}.get(stage, 2))
    if stage == "FOSSILIZED":
        model.keep(slot)
        model.tick()
    if stage == "COOLING":
        model.prune(slot, speed="SLOW")
        model.tick()


def shake(model: GrowingModel, rng_seed: int = 0, size: float = 0.3) -> None:
    """Give all seeds weights that are not zero."""
    generator = torch.Generator().manual_seed(rng_seed)
    with torch.no_grad():
        for parameter in model.seeds.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(size * noise.to(parameter))


def bits(value):
    """A comparable, bit-exact picture of any state."""
    if isinstance(value, Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    return value.hex() if isinstance(value, float) else value  # NaN equals NaN


def everything(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    seeds: bool = True,
):
    """All tensors of a module and of its optimiser by name, as bits."""

    def kept(named):
        return {n: t for n, t in named if seeds or not n.startswith("esper_seeds.")}

    named = kept(module.named_parameters())
    state = {} if optimizer is None else optimizer.state
    moments = {name: state.get(p, {}) for name, p in named.items()}
    return bits([named, kept(module.named_buffers()), moments])
