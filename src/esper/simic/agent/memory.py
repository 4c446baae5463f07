r"""Recurrent memory of a policy, with episode resets inside a sequence.

MinGRU (Feng et al. 2024, https://arxiv.org/abs/2410.01201):

    z_t = sigmoid(W_z x_t)        h_t = (1 - z_t) h_{t-1} + (z_t (2 - z_t))^½ (W_h x_t)

The paper writes z_t W_h x_t, which becomes small for long time spans. The gates do not
depend on h, so a sequence is two matrix products and one `scan`. They do not depend on
earlier inputs either, so MinGRU cannot copy what it saw k steps ago. ConvMinGRU can:
its gates read a causal convolution over the last inputs, as in Mamba and Griffin.
Attention sees each of the last 64 inputs by itself. GRU and LSTM run whole sequences
through torch.

Every memory maps `inputs [env, time, width]`, `episode_start [env, time]` and
`state [env, layer, state]` to outputs and the next state. Where `episode_start` is set,
the state is reset before use.
"""

import math
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import silu

from esper.contracts.errors import InvalidInputError
from esper.scan import causal_conv, gated_scan

Rows = Float[Tensor, "env time width"]
Starts = Bool[Tensor, "env time"]
State = Float[Tensor, "env layer state"]
Outputs = tuple[Rows, State]
LONGEST_SPAN: Final = 32.0  # about the steps of one episode
LONGEST_CONV_SPAN: Final = 128.0  # the same for ConvMinGRU, whose taps see short spans
WINDOW: Final = 64  # inputs that attention sees
BLOCK: Final = 32  # queries that are scored together
HEADS: Final = 8  # of attention, if they divide the width
SHARPNESS: Final = 4.0  # of attention before learning; see `Attention`
TAPS: Final = 8  # inputs that a short convolution reads
SHUT: Final = -1e9  # a sigmoid of this is exactly 0
MAX_WIDTH: Final = 65_536
MAX_LAYERS: Final = 64


class MinGRU(nn.Module):
    """Minimal gated recurrent units; each layer adds to its input."""

    def __init__(
        self, width: int, layers: int = 1, longest: float = LONGEST_SPAN
    ) -> None:
        super().__init__()
        self.state_shape = (layers, width)
        gates = [nn.Linear(width, 2 * width) for _ in range(layers)]
        with torch.no_grad():
            for linear in gates:
                linear.bias[:width] = -_log_spans(width, longest)
        self.gates = nn.ModuleList(gates)

    def forward(self, inputs: Rows, episode_start: Starts, state: State) -> Outputs:
        """Run over `inputs` from `state`."""
        last = []
        for layer, gates in enumerate(self.gates):
            hidden = gated_scan(gates(inputs), episode_start, state[:, layer])
            inputs = inputs + hidden
            last.append(hidden[:, -1])
        return inputs, torch.stack(last, dim=1)


class ConvMinGRU(MinGRU):
    """MinGRU whose gates read the last inputs of the episode.

    The state of a layer is the hidden state and the last inputs, newest first.
    """

    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__(width, layers, LONGEST_CONV_SPAN)
        self.state_shape = (layers, TAPS * width)
        self.taps = nn.Parameter(torch.empty(layers, TAPS, width))
        self.bias = nn.Parameter(torch.zeros(layers, width))
        nn.init.uniform_(self.taps, -(TAPS**-0.5), TAPS**-0.5)

    def forward(self, inputs: Rows, episode_start: Starts, state: State) -> Outputs:
        """Run over `inputs` from `state`."""
        last = []
        for layer, gates in enumerate(self.gates):
            before = state[:, layer].unflatten(-1, (TAPS, -1))
            rows = torch.cat((before[:, 1:].flip(1), inputs), dim=1)
            mixed, kept = causal_conv(
                rows, episode_start, self.taps[layer], self.bias[layer]
            )
            hidden = gated_scan(gates(silu(mixed)), episode_start, before[:, 0])
            inputs = inputs + hidden
            last.append(torch.cat((hidden[:, -1:], kept), dim=1).flatten(1))
        return inputs, torch.stack(last, dim=1)


class Attention(nn.Module):
    """Attention to the last inputs of the episode; each layer adds to its input.

    The state of a layer is the last inputs, each with a 1 if it is of this episode.
    How much a head attends to an input also depends on its distance. Queries and keys
    start larger than usual, because an average over all inputs hides a single one.
    """

    def __init__(self, width: int, layers: int = 1) -> None:
        super().__init__()
        self.heads = math.gcd(HEADS, width)
        self.state_shape = (layers, (WINDOW - 1) * (width + 1))
        maps = [nn.Linear(width, 3 * width) for _ in range(layers)]
        with torch.no_grad():
            for linear in maps:
                linear.weight[: 2 * width] *= SHARPNESS
                linear.weight[2 * width :] *= SHARPNESS**0.5
        self.maps = nn.ModuleList(maps)  # to queries, keys and values
        self.outputs = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.by_distance = nn.Parameter(0.1 * torch.randn(layers, self.heads, WINDOW))

    def forward(self, inputs: Rows, episode_start: Starts, state: State) -> Outputs:
        """Run over `inputs` from `state`."""
        time, width = inputs.shape[1:]
        # Select, do not multiply: a stale state may hold anything.
        state = torch.where(episode_start[:, :1, None], 0.0, state)
        before = state.unflatten(2, (WINDOW - 1, -1))
        # Queries are in blocks, so that few keys are scored in vain.
        block = min(BLOCK, time)
        missing = -time % block
        was_empty = before[:, 0, :, -1] < 0.5
        episode = F.pad(episode_start.cumsum(1), (0, missing), value=-2)
        episode = torch.cat((-was_empty.to(episode.dtype), episode), dim=1)
        distance, is_seen = _seen(episode, block)
        end = slice(time, time + WINDOW - 1)
        is_kept = (episode[:, end] == episode[:, end.stop - 1, None]).unsqueeze(2)
        last = []
        for layer, (maps, output) in enumerate(
            zip(self.maps, self.outputs, strict=True)
        ):
            rows = torch.cat((before[:, layer, :, :-1], inputs), dim=1)
            kept = torch.where(is_kept, rows[:, end], 0.0)
            last.append(torch.cat((kept, is_kept.to(rows.dtype)), dim=2).flatten(1))
            rows = F.pad(rows, (0, 0, 0, missing))
            query, keys = self._heads(maps, rows, block)
            key, value = keys.chunk(2, dim=2)  # [env, block, head, number, key]
            scores = query @ key + self.by_distance[layer][:, distance]
            weights = torch.where(is_seen, scores, -torch.inf).softmax(-1)
            found = (weights @ value.transpose(3, 4)).transpose(2, 3)
            found = found.reshape(len(rows), -1, width)[:, :time]
            inputs = inputs + output(found)
        return inputs, torch.stack(last, dim=1)

    def _heads(self, maps: nn.Module, rows: Rows, block: int) -> tuple[Tensor, Tensor]:
        """Queries of each block, and the keys and values that they can see."""
        assert isinstance(maps, nn.Linear)
        width, weight, bias = rows.shape[2], maps.weight, maps.bias
        size = width // self.heads
        query = F.linear(rows[:, WINDOW - 1 :], weight[:width], bias[:width])
        query = query.view(len(rows), -1, block, self.heads, size).transpose(2, 3)
        keys = F.linear(rows, weight[width:], bias[width:])
        keys = keys.unfold(1, WINDOW - 1 + block, block)
        return query * size**-0.5, keys.unflatten(2, (2 * self.heads, size))


def _seen(episode: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Distances `[query, key]` in a block, and what is seen `[env, block, 1, ...]`.

    `episode` numbers that of each key; the first ones are before all queries.
    """
    keys = WINDOW - 1 + block
    steps = torch.arange(keys, device=episode.device)
    distance = steps[WINDOW - 1 :, None] - steps
    is_near = (distance >= 0) & (distance < WINDOW)
    of_query = episode[:, WINDOW - 1 :].unflatten(1, (-1, block)).unsqueeze(3)
    of_key = episode.unfold(1, keys, block).unsqueeze(2)
    is_seen = (of_query == of_key) & is_near
    return distance.clamp(0, WINDOW - 1), is_seen.unsqueeze(2)


class Cells(nn.Module):
    """Recurrent cells of torch, run over whole rows; each layer adds to its input.

    A row has several episodes, but torch cannot reset a state inside a row. So a step
    is inserted before each episode whose gates set the state to exactly 0, and rows
    with fewer episodes are filled up with steps whose gates keep the state. These
    steps are selected by two more input columns; a third one holds the bias of all
    other steps.
    """

    controls: Tensor

    def __init__(self, cells: list[nn.GRUCell] | list[nn.LSTMCell], parts: int) -> None:
        super().__init__()
        width = cells[0].hidden_size
        self.state_shape = (len(cells), parts * width)
        self.parts = parts
        """Tensors in the state of a cell: 1 for GRU, 2 for LSTM."""
        self.cells = nn.ModuleList(cells)
        # Gates of a GRU: reset, update (1 keeps the state), candidate. Of an LSTM:
        # input, forget, candidate, output.
        clear_and_keep: Any = ((SHUT, SHUT, 0.0), (0.0, -SHUT, 0.0))
        if parts == 2:
            clear_and_keep = ((SHUT, SHUT, 0.0, SHUT), (SHUT, -SHUT, 0.0, 0.0))
        controls = torch.tensor(clear_and_keep).repeat_interleave(width, 1).T
        self.register_buffer("controls", controls.contiguous(), persistent=False)

    def forward(self, inputs: Rows, episode_start: Starts, state: State) -> Outputs:
        """Run over `inputs` from `state`."""
        # Select, do not multiply: a stale state may hold anything.
        state = torch.where(episode_start[:, :1, None], 0.0, state)
        longer = self._longer(episode_start)
        # Rows are time-major inside, as torch wants them.
        steps, last = inputs.transpose(0, 1), []
        for layer, cell in enumerate(self.cells):
            assert isinstance(cell, nn.RNNCellBase)
            outputs, held = self._run(cell, steps, longer, state[:, layer])
            steps = steps + outputs
            last.append(torch.cat((outputs[-1], *held[1:]), dim=-1))
        return steps.transpose(0, 1), torch.stack(last, dim=1)

    def _longer(self, episode_start: Starts) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return how to insert steps; None if there are none to insert.

        That is where each step goes in the longer rows, which step each of their steps
        is (or a last one, of zeros), and their columns: one of a usual step, one that
        clears the state and one that keeps it. All are time-major.
        """
        envs, time = episode_start.shape
        device = episode_start.device
        resets = episode_start[:, 1:].T.cumsum(0)
        # Only the CPU is asked how many there are; elsewhere there is room for all.
        on_cpu = device.type == "cpu" and not torch.compiler.is_compiling()
        extra = int(resets[-1].max()) if on_cpu and time > 1 else time - 1
        if not extra:
            return None
        steps = torch.arange(time, device=device).unsqueeze(1).expand(time, envs)
        steps = steps + torch.cat((resets.new_zeros(1, envs), resets))
        places = (steps * envs + torch.arange(envs, device=device)).flatten()
        rows = (time + extra) * envs
        sources = places.new_full((rows,), time * envs)
        sources[places] = torch.arange(time * envs, device=device)
        usual = (sources < time * envs).view(-1, envs)
        beyond = torch.arange(time + extra, device=device).unsqueeze(1) > steps[-1]
        columns = torch.stack((usual, ~(usual | beyond), beyond), dim=-1)
        return places, sources, columns.to(self.controls.dtype)

    def _run(
        self,
        cell: nn.RNNCellBase,
        steps: Float[Tensor, "time env width"],
        longer: tuple[Tensor, Tensor, Tensor] | None,
        state: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Outputs `[time, env, width]` and the last state of one layer."""
        weights = [cell.weight_ih, cell.weight_hh, cell.bias_ih, cell.bias_hh]
        rows = steps
        if longer is not None:
            places, sources, columns = longer
            rows = F.pad(rows.flatten(0, 1), (0, 0, 0, 1)).index_select(0, sources)
            rows = torch.cat((rows.view(*columns.shape[:2], -1), columns), dim=-1)
            first = (cell.weight_ih, cell.bias_ih[:, None], self.controls)
            weights[0] = torch.cat(first, dim=1)
            weights[2] = torch.zeros_like(cell.bias_ih)
        held = [part[None].contiguous() for part in state.chunk(self.parts, dim=-1)]
        options = (weights, True, 1, 0.0, self.training, False, False)
        if self.parts == 1:
            outputs, *after = torch.gru(rows, held[0], *options)
        else:
            outputs, *after = torch.lstm(rows, held, *options)
        if longer is not None:
            outputs = outputs.flatten(0, 1).index_select(0, places).view_as(steps)
        return outputs, tuple(part[0] for part in after)


class LSTM(Cells):
    """A long short-term memory."""

    def __init__(self, width: int, layers: int = 1) -> None:
        cells = [nn.LSTMCell(width, width) for _ in range(layers)]
        with torch.no_grad():
            for cell in cells:
                cell.bias_ih[:width] = -_log_spans(width)  # input gate
                cell.bias_ih[width : 2 * width] = _log_spans(width)  # forget gate
        super().__init__(cells, 2)


class GRU(Cells):
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

    def forward(self, inputs: Rows, episode_start: Starts, state: State) -> Outputs:
        """Return the inputs."""
        return inputs, torch.zeros_like(state)


def _log_spans(width: int, longest: float = LONGEST_SPAN) -> Float[Tensor, " width"]:
    """Return gate biases for initial time spans of 1 to `longest` steps.

    With zero biases the state halves at every step, and gradients vanish
    (Tallec & Ollivier 2018, arXiv:1804.11188).
    """
    return torch.linspace(0.0, math.log(longest), width)


AnyMemory = MinGRU | ConvMinGRU | Attention | GRU | LSTM | NoMemory
MemoryName = Literal["mingru", "conv-mingru", "attention", "gru", "lstm", "none"]
MEMORIES: Final[dict[str, type[AnyMemory]]] = {
    "mingru": MinGRU,
    "conv-mingru": ConvMinGRU,
    "attention": Attention,
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
