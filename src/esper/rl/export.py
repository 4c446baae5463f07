"""An agent as an ONNX file: one step, with memory and mask as inputs and outputs.

    vector, image0, ...   what is seen, as `SpaceSpec.vector` and `images` encode it
    state                 memory before the step, zeros at first
    first                 whether the observation is the first of an episode
    mask                  what is legal, all heads after each other (choices only)
 -> action                the likeliest choices, or the means of numbers
    distribution          log-probabilities of all choices, padded; of numbers, mean and
                          log standard deviation
    value, next_state     V(s), and memory after the step

The batch is free. Statistics that normalise observations are part of the file.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from esper.contracts.errors import InvalidInputError
from esper.rl.observations import CLIP

if TYPE_CHECKING:
    from esper.rl.ppo import PPO


class Step(nn.Module):
    """One step of an agent, greedily."""

    shift: Tensor
    scale: Tensor

    def __init__(self, agent: "PPO") -> None:
        super().__init__()
        self.policy, self.spec = agent.policy, agent.spec
        self.names = (*agent.spec.observation, "state", "episode_start")
        if not agent.spec.is_continuous:
            self.names = (*self.names, "mask")
        columns = len(agent.spec.normalised)
        shift, scale = np.zeros(columns, np.float32), np.ones(columns, np.float32)
        self.limit = float("inf")
        if agent.settings.normalize:
            shift, scale = agent.observations.moments.shift_and_scale()
            self.limit = CLIP
        self.register_buffer("shift", torch.from_numpy(shift))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Action, distribution, value and state."""
        named = dict(zip(self.names, given, strict=True))
        state, episode_start = named.pop("state"), named.pop("episode_start")
        mask, rows = named.pop("mask", None), None
        if mask is not None:
            blank = torch.zeros_like(mask[:, :1])
            heads, at = [], 0
            for size in self.spec.sizes:
                room = blank.expand(-1, self.spec.width - size)
                heads.append(torch.cat((mask[:, at : at + size], room), dim=1))
                at += size
            rows = torch.stack(heads, dim=1)
        if "vector" in named:
            vector = (named["vector"] - self.shift) * self.scale
            named["vector"] = vector.clamp(-self.limit, self.limit)
        decision = self.policy.act(named, rows, episode_start, state, None)
        return (
            decision.actions,
            decision.distribution,
            decision.values,
            decision.state,
        )


def export_onnx(agent: "PPO", path: str | Path) -> None:
    """Write an agent as an ONNX file; see the head of this file for its inputs."""
    file = Path(path)
    if file.suffix != ".onnx":
        raise InvalidInputError(f"path must end in .onnx, got {str(path)!r}.")
    step = Step(agent).eval()
    leaves = agent.spec.observation
    batch = 2
    example = [torch.zeros(batch, *x.shape, dtype=x.dtype) for x in leaves.values()]
    example += [agent.policy.initial_state(batch), torch.ones(batch, dtype=torch.bool)]
    if not agent.spec.is_continuous:
        example.append(torch.ones(batch, sum(agent.spec.sizes), dtype=torch.bool))
    try:
        program = torch.onnx.export(
            step,
            tuple(example),
            dynamo=True,
            verbose=False,
            input_names=step.names,
            output_names=("action", "distribution", "value", "next_state"),
            dynamic_shapes=(tuple({0: torch.export.Dim.DYNAMIC} for _ in example),),
        )
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"ONNX needs {error.name}; pip install 'esper-lite[onnx]'."
        ) from error
    assert program is not None
    program.save(str(file))
