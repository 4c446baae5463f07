"""Export of one step of an agent as an ONNX file.

    vector, image0, ...   observation, as `SpaceSpec.vector` and `images` encode it
    state                 memory before the step, initially zeros
    episode_start         whether the observation is the first of an episode
    mask                  legal choices of all heads, concatenated (not for a Box)
 -> action                most likely choices; of a Box, means in [-1, 1] of its range
    distribution          padded log-probabilities; of a Box, mean and log std
    value, next_state     V(s), and memory after the step

The batch size is free. The file contains the normalisation of observations.
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
    """One greedy step of an agent."""

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
            moments = agent.observations.moments
            shift, scale, self.limit = moments.shift, moments.scale, CLIP
        self.register_buffer("shift", torch.from_numpy(shift))
        self.register_buffer("scale", torch.from_numpy(scale))

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Action, distribution, value and state."""
        named = dict(zip(self.names, given, strict=True))
        state, episode_start = named.pop("state"), named.pop("episode_start")
        mask, masks = named.pop("mask", None), None
        if mask is not None:
            blank = torch.zeros_like(mask[:, :1])
            heads, at = [], 0
            for size, is_number in zip(self.spec.sizes, self.spec.numeric, strict=True):
                padding = blank.expand(-1, self.spec.width - size)
                row = (~blank).expand(-1, size)
                if not is_number:
                    row = mask[:, at : at + size]
                    at += size
                heads.append(torch.cat((row, padding), dim=1))
            masks = torch.stack(heads, dim=1)
        if "vector" in named:
            vector = (named["vector"] - self.shift) * self.scale
            named["vector"] = vector.clamp(-self.limit, self.limit)
        made = self.policy.act(named, masks, episode_start, state, None)
        return made.actions, made.distribution, made.values, made.state


def export_onnx(agent: "PPO", path: str | Path) -> None:
    """Write an agent as an ONNX file with the inputs that this module describes."""
    file = Path(path)
    if file.suffix != ".onnx":
        raise InvalidInputError(f"path must end in .onnx, got {str(path)!r}.")
    step = Step(agent).eval()
    leaves = agent.spec.observation.values()
    example = [torch.zeros(2, *leaf.shape, dtype=leaf.dtype) for leaf in leaves]
    example += [agent.policy.initial_state(2), torch.ones(2, dtype=torch.bool)]
    if not agent.spec.is_continuous:
        example.append(torch.ones(2, agent.spec.mask_entries, dtype=torch.bool))
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
            f"ONNX needs {error.name}. Run pip install '.[onnx]'."
        ) from error
    assert program is not None
    program.save(str(file))
