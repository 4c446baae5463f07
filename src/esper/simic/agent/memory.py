r"""Recurrent memory of a policy, with episode resets inside a sequence.

MinGRU (Feng et al. 2024, https://arxiv.org/abs/2410.01201):

    z_t = sigmoid(W_z x_t)        h_t = (1 - z_t) h_{t-1} + (z_t (2 - z_t))^½ (W_h x_t)

The paper writes z_t W_h x_t, which becomes small for long time spans. The gates do not
depend on h, so a sequence is two matrix products and one `scan`. GRU and LSTM run step
by step. Every memory maps `inputs [env, time, width]`, `episode_start [env, time]` and
`state [env, layer, state]` to outputs and the next state. Where `episode_start` is set,
the state is reset before use.
"""

import math
from typing import Final, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.scan import gated_scan

LONGEST_SPAN: Final = 32.0  # about the steps of one episode
MAX_WIDTH: Final = 65_536
MAX_LAYERS: Final = 64


class MinGRU(nn.Module):
    """Minimal gated recurrent units; each layer adds to its input."""

    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.state_shape = (layers, width)
        gates = [nn.Linear(width, 2 * width) for _ in range(layers)]
        with torch.no_grad():
            for linear in gates:
                linear.bias[:width] = -_log_spans(width)
        self.gates = nn.ModuleList(gates)

    def forward(
        self,
        inputs: Float[Tensor, "env time width"],
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time width"], Float[Tensor, "env layer state"]]:
        """Run over `inputs` from `state`."""
        last = []
        for layer, gates in enumerate(self.gates):
            hidden = gated_scan(gates(inputs), episode_start, state[:, layer])
            inputs = inputs + hidden
            last.append(hidden[:, -1])
        return inputs, torch.stack(last, dim=1)


class Stepped(nn.Module):
    """Recurrent cells, run step by step; each layer adds to its input."""

    def __init__(self, cells: list[nn.GRUCell] | list[nn.LSTMCell], parts: int) -> None:
        super().__init__()
        self.state_shape = (len(cells), parts * cells[0].hidden_size)
        self.parts = parts
        """Tensors in the state of a cell: 1 for GRU, 2 for LSTM."""
        self.cells = nn.ModuleList(cells)

    def forward(
        self,
        inputs: Float[Tensor, "env time width"],
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time width"], Float[Tensor, "env layer state"]]:
        """Run over `inputs` from `state`."""
        last = []
        for layer, cell in enumerate(self.cells):
            held, outputs = state[:, layer].chunk(self.parts, dim=-1), []
            for time in range(inputs.shape[1]):
                # Select, do not multiply: a stale state may hold anything.
                fresh = episode_start[:, time, None]
                held = tuple(torch.where(fresh, 0.0, part) for part in held)
                after = cell(inputs[:, time], held if self.parts > 1 else held[0])
                held = after if self.parts > 1 else (after,)
                outputs.append(held[0])
            inputs = inputs + torch.stack(outputs, dim=1)
            last.append(torch.cat(held, dim=-1))
        return inputs, torch.stack(last, dim=1)


class LSTM(Stepped):
    """A long short-term memory."""

    def __init__(self, width: int, layers: int = 1) -> None:
        cells = [nn.LSTMCell(width, width) for _ in range(layers)]
        with torch.no_grad():
            for cell in cells:
                cell.bias_ih[:width] = -_log_spans(width)  # input gate
                cell.bias_ih[width : 2 * width] = _log_spans(width)  # forget gate
        super().__init__(cells, 2)


class GRU(Stepped):
    """A gated recurrent unit."""

    def __init__(self, width: int, layers: int = 1) -> None:
        cells = [nn.GRUCell(width, width) for _ in range(layers)]
        with torch.no_grad():
            for cell in cells:
                cell.bias_ih[width : 2 * width] = _log_spans(width)  # update gate
        super().__init__(cells, 1)


class NoMemory(nn.Module):
    """Returns its inputs: a policy without memory."""

    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.state_shape = (1, 1)

    def forward(
        self,
        inputs: Float[Tensor, "env time width"],
        episode_start: Bool[Tensor, "env time"],
        state: Float[Tensor, "env layer state"],
    ) -> tuple[Float[Tensor, "env time width"], Float[Tensor, "env layer state"]]:
        """Return the inputs."""
        return inputs, torch.zeros_like(state)


def _log_spans(width: int) -> Float[Tensor, " width"]:
    """Return gate biases for initial time spans of 1 to `LONGEST_SPAN` steps.

    With zero biases the state halves at every step, and gradients vanish
    (Tallec & Ollivier 2018, arXiv:1804.11188).
    """
    return torch.linspace(0.0, math.log(LONGEST_SPAN), width)


AnyMemory = MinGRU | GRU | LSTM | NoMemory
MemoryName = Literal["mingru", "gru", "lstm", "none"]
MEMORIES: Final[dict[str, type[AnyMemory]]] = {
    "mingru": MinGRU,
    "gru": GRU,
    "lstm": LSTM,
    "none": NoMemory,
}


def make_memory(name: str, width: int, layers: int) -> AnyMemory:
    """Create the memory of that name."""
    if name not in MEMORIES:
        raise InvalidInputError(
            f"no memory {name!r}. Choose one of {', '.join(MEMORIES)}."
        )
    return MEMORIES[name](width, layers)


def require_sizes(**sizes: int) -> None:
    """Check the widths and the number of layers of a policy."""
    for name, size in sizes.items():
        most = MAX_LAYERS if name == "layers" else MAX_WIDTH
        if not 1 <= size <= most:
            raise InvalidInputError(f"{name} must lie in 1..{most}, got {size}.")
