"""Memories step by step: one cell call or one sum per step, reset by selection."""

import torch
from torch.nn.functional import silu


def cells(memory, inputs, episode_start, state):
    """GRU and LSTM as a loop over steps."""
    last = []
    for layer, cell in enumerate(memory.cells):
        held, outputs = state[:, layer].chunk(memory.parts, dim=-1), []
        for time in range(inputs.shape[1]):
            fresh = episode_start[:, time, None]
            held = tuple(torch.where(fresh, 0.0, part) for part in held)
            after = cell(inputs[:, time], held if memory.parts > 1 else held[0])
            held = after if memory.parts > 1 else (after,)
            outputs.append(held[0])
        inputs = inputs + torch.stack(outputs, dim=1)
        last.append(torch.cat(held, dim=-1))
    return inputs, torch.stack(last, dim=1)


def conv_mingru(memory, inputs, episode_start, state):
    """ConvMinGRU as a loop over environments and steps."""
    envs, _, width = inputs.shape
    last = []
    for layer, gates in enumerate(memory.gates):
        rows, ends = [], []
        for env in range(envs):
            hidden, *seen = state[env, layer].split(width)  # the newest input first
            outputs = []
            for x, fresh in zip(inputs[env], episode_start[env], strict=True):
                if fresh:
                    hidden, seen = torch.zeros_like(hidden), []
                taps = memory.taps[layer][: 1 + len(seen)]
                mixed = memory.bias[layer] + (taps * torch.stack([x, *seen])).sum(0)
                gate, candidate = gates(silu(mixed)).chunk(2)
                z = torch.sigmoid(gate)
                hidden = (1 - z) * hidden + (z * (2 - z)).sqrt() * candidate
                outputs.append(x + hidden)
                seen = [x, *seen][: len(memory.taps[layer]) - 1]
            missing = [torch.zeros_like(x)] * (len(memory.taps[layer]) - 1 - len(seen))
            rows.append(torch.stack(outputs))
            ends.append(torch.cat([hidden, *seen, *missing]))
        inputs = torch.stack(rows)
        last.append(torch.stack(ends))
    return inputs, torch.stack(last, dim=1)


def attention(memory, inputs, episode_start, state):
    """Attention as a loop over environments, steps and heads."""
    envs, _, width = inputs.shape
    heads, window = memory.by_distance.shape[1:]
    size = width // heads
    held = state.unflatten(2, (window - 1, width + 1))
    known = [[bool(flag > 0.5) for flag in held[env, 0, :, -1]] for env in range(envs)]
    last = []
    for layer, (maps, output) in enumerate(
        zip(memory.maps, memory.outputs, strict=True)
    ):
        rows, ends = [], []
        for env in range(envs):
            pairs = zip(known[env], held[env, layer, :, :-1], strict=True)
            seen = [x if is_known else None for is_known, x in pairs]
            outputs = []
            for x, fresh in zip(inputs[env], episode_start[env], strict=True):
                seen = [*([None] * len(seen) if fresh else seen), x]
                found = []
                for head in range(heads):
                    part = slice(head * size, (head + 1) * size)
                    scores, values = [], []
                    for distance, other in enumerate(reversed(seen)):
                        if other is None:
                            continue
                        query = maps(x).split(width)[0][part]
                        _, key, value = (y[part] for y in maps(other).split(width))
                        bias = memory.by_distance[layer, head, distance]
                        scores.append((query * key).sum() / size**0.5 + bias)
                        values.append(value)
                    weights = torch.stack(scores).softmax(0)
                    found.append((weights[:, None] * torch.stack(values)).sum(0))
                outputs.append(x + output(torch.cat(found)))
                seen = seen[1:]
            rows.append(torch.stack(outputs))
            none = x.new_zeros(width + 1)
            with_flag = [
                none if x is None else torch.cat((x, x.new_ones(1))) for x in seen
            ]
            ends.append(torch.cat(with_flag))
        inputs = torch.stack(rows)
        last.append(torch.stack(ends))
    return inputs, torch.stack(last, dim=1)
