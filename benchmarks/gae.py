"""What do advantages and returns of a whole rollout cost, and what do they allocate?

Ours is the method call `TamiyoRolloutBuffer.compute_advantages_and_returns()`, as a
user makes it. The first twin loops over environments and steps with scalar tensors,
the second over steps with all environments at once. Copying as many bytes as are read
and written is the limit.
"""

import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.timing import Report, alternate, micro, sizes
from esper.contracts.actions import NUM_HEADS, ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.tamiyo.policy.features import (
    HOST_COLUMNS,
    OFFER_COLUMNS,
    SLOT_COLUMNS,
    Features,
)
from tests.references.recurrence import naive_gae_loop, time_gae_loop

# The smallest action space: what else a step stores plays no part here.
SPEC = ActionSpec(slots=SlotConfig(max_slots=1), blueprints=BLUEPRINTS[:1])
SIZES = ((4, 25), (4, 150), (16, 150), (128, 150), (1024, 1024))
LARGEST_LOOP = 128 * 150  # Beyond, the loop per environment takes half a minute.
LENGTHS = (25, 100, 400)
FACTORS = {"gamma": 0.99, "lam": 0.95}
BYTES = 3 * 4 + 2 * 1 + 2 * 4  # Three floats and two flags in, two floats out.


def run() -> list[Report]:
    """Time all formulations by size, then count what they allocate by length."""
    times = Report(
        "Advantages and returns of one rollout, whole method call",
        (
            "environments x steps",
            "loop µs",
            "loop over time µs",
            "ours µs",
            "loop / ours",
            "over time / ours",
            "loop ns per element",
            "ours ns per element",
            "copy ns per element",
        ),
        notes=[f"Copy: as many bytes as read and written, {BYTES} per element."],
    )
    for envs, steps in sizes(SIZES):
        times.add(*_times(envs, steps))
    allocations = Report(
        "What one call allocates, 4 environments",
        ("steps", "loop tensors", "loop over time tensors", "ours tensors", "ours KiB"),
        notes=["Ours KiB: peak of Python's own memory during the call."],
    )
    for steps in sizes(LENGTHS):
        allocations.add(*_allocations(4, steps))
    return [times, allocations]


def _times(envs: int, steps: int) -> tuple[str | float | None, ...]:
    sides = _sides(envs, steps)
    if envs * steps > LARGEST_LOOP:
        del sides["loop"]
    source = torch.ones(envs * steps * BYTES // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    took = alternate({**sides, "copy": lambda: target.copy_(source)})
    nano = {name: seconds / (envs * steps) * 1e9 for name, seconds in took.items()}
    loop = took.get("loop")
    return (
        f"{envs} x {steps}",
        None if loop is None else micro(loop),
        micro(took["over time"]),
        micro(took["ours"]),
        None if loop is None else loop / took["ours"],
        took["over time"] / took["ours"],
        nano.get("loop"),
        nano["ours"],
        nano["copy"],
    )


def _allocations(envs: int, steps: int) -> tuple[int | float, ...]:
    counts = []
    sides = _sides(envs, steps)
    for side in sides.values():
        with CountNewTensors() as mode:
            side()
        counts.append(mode.count)
    tracemalloc.start()
    sides["ours"]()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return (steps, *counts, peak / 1024)


class CountNewTensors(TorchDispatchMode):
    """Counts results that share no storage with what they were made from."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run the operation and look at what it returns."""
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            known = [x.untyped_storage() for x in args if isinstance(x, Tensor)]
            place = result.untyped_storage().data_ptr()
            self.count += place not in [storage.data_ptr() for storage in known]
        return result


def _sides(envs: int, steps: int) -> dict[str, Callable[[], object]]:
    """The same rollout for each formulation, stored as each likes it best."""
    by_time = _rollout(envs, steps)
    buffer = _filled(by_time)
    by_env = [x.T.contiguous() if x.ndim == 2 else x for x in by_time.values()]
    by_env.insert(4, torch.full((envs,), steps))

    def ours() -> tuple[Tensor, Tensor]:
        buffer.compute_advantages_and_returns()
        return buffer.advantages.T, buffer.returns.T

    def over_time() -> tuple[Tensor, Tensor]:
        return time_gae_loop(**by_time, **FACTORS)

    assert_close(ours(), over_time(), rtol=1e-4, atol=1e-4)
    return {
        "loop": lambda: naive_gae_loop(*by_env, **FACTORS),
        "over time": over_time,
        "ours": ours,
    }


def _rollout(envs: int, steps: int) -> dict[str, Tensor]:
    """Full rows `[time, env]`; an episode ends every 50 steps, half of them cut."""
    generator = Generator().manual_seed(0)
    dones = torch.rand(steps, envs, generator=generator) < 0.02
    return {
        "rewards": torch.randn(steps, envs, generator=generator),
        "values": torch.randn(steps, envs, generator=generator),
        "dones": dones,
        "truncated": dones & (torch.rand(steps, envs, generator=generator) < 0.5),
        "final_values": torch.randn(steps, envs, generator=generator),
        "last_values": torch.randn(envs, generator=generator),
    }


def _filled(by_time: dict[str, Tensor]) -> TamiyoRolloutBuffer:
    """A buffer that holds this rollout, and nothing of interest besides."""
    steps, envs = by_time["rewards"].shape
    buffer = TamiyoRolloutBuffer(
        envs,
        steps,
        SPEC,
        state_shape=(1, 1),
        gamma=FACTORS["gamma"],
        gae_lambda=FACTORS["lam"],
    )
    blank = {
        "features": Features(
            host=torch.zeros(envs, len(HOST_COLUMNS)),
            slots=torch.zeros(envs, 1, len(SLOT_COLUMNS)),
            offers=torch.zeros(envs, 1, 1, len(OFFER_COLUMNS)),
        ),
        "masks": SPEC.allowed.expand(envs, -1, -1).clone(),
        "actions": torch.zeros(envs, NUM_HEADS, dtype=torch.int64),
        "log_probs": torch.zeros(envs, NUM_HEADS),
        "distribution": torch.zeros(envs, NUM_HEADS, SPEC.width),
    }
    first = torch.ones(envs, dtype=torch.bool)
    for t in range(steps):
        dones, truncated = by_time["dones"][t], by_time["truncated"][t]
        buffer.add(
            **blank,
            episode_start=first,
            rewards=by_time["rewards"][t],
            values=by_time["values"][t],
            terminated=dones & ~truncated,
            truncated=truncated,
            final_values=by_time["final_values"][t],
        )
        first = dones
    buffer.finish(by_time["last_values"])
    return buffer
