r"""What one minibatch of a cohort costs on the CPU, before it is run.

    seconds = envs (fixed + rows (dense D + conv C + softmax S + gelu G) + parameter P)

D and C are the multiply-adds that `engine` does for a row, counted as it does them: a
map forward, again for the gradient of its weights, again for that of its inputs if
anybody asks. A seed in training adds a shadow pass, from the layer that it leads into
on. S numbers go through a softmax, G through a GELU, and AdamW moves P weights.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Final

from esper.contracts.blueprints import Blueprint
from esper.contracts.stages import Stage
from esper.environment.cohort import ACTIVATIONS
from esper.environment.engine import GELU
from esper.environment.memory_layout import inputs_per_unit, place_geometries
from esper.growth.blueprints.seed import cost
from esper.tasks.hosts import Host, LayerShape

Seed = tuple[int, Blueprint, Stage]
"""A seed: its place, what it is, and where in its life it is."""
KINDS: Final = ("dense", "conv")


@dataclass(frozen=True, slots=True)
class Work:
    """What is done for one host in one minibatch; or the seconds for one of each."""

    dense: float = 0.0
    """Multiply-adds of dense shapes."""
    conv: float = 0.0
    """Multiply-adds of convolutions."""
    softmax: float = 0.0
    """Answers that a loss is taken of."""
    gelu: float = 0.0
    """Numbers that go through a GELU, there and back."""
    parameter: float = 0.0
    """Weights that the optimiser moves."""
    fixed: float = 0.0
    """Once per minibatch."""


SECONDS: Final = Work(
    dense=2.37e-11, conv=5.11e-11, softmax=3.12e-9, gelu=7.91e-9, parameter=6.93e-9
)
"""Seconds for one of each, as `python -m benchmarks cohort` fitted them on one core
of an AMD EPYC with AVX2, one thread."""


def step_seconds(host: Host, batch: int, seeds: Sequence[Seed], envs: int) -> float:
    """Seconds for one minibatch of `envs` hosts that hold these seeds each."""
    counts = astuple(work(host, batch, seeds))
    pairs = zip(counts, astuple(SECONDS), strict=True)
    return envs * float(sum(count * seconds for count, seconds in pairs))


def work(host: Host, batch: int, seeds: Sequence[Seed]) -> Work:
    """What one host and its seeds have to do for a minibatch of `batch` rows."""
    shapes = host.layers
    blended = [s for s in seeds if s[2] not in (Stage.DORMANT, Stage.TRAINING)]
    training = [s for s in seeds if s[2] is Stage.TRAINING]
    done = Counter(softmax=host.classes * (2 if training else 1))
    _add_pass(done, shapes, blended, blended, 0)
    if training:
        start = min(place for place, _, _ in training) + 1
        _add_pass(done, shapes, blended + training, training, start)
    geometries = place_geometries(host)
    moved = sum(
        cost(b, geometries[place]).parameters for place, b, _ in blended + training
    )
    by_row = {kind: float(batch * count) for kind, count in done.items()}
    return Work(**by_row, parameter=float(host.parameters + moved), fixed=1.0)


def _add_pass(
    done: Counter[str],
    shapes: Sequence[LayerShape],
    active: Sequence[Seed],
    learning: Sequence[Seed],
    start: int,
) -> None:
    """Count one pass from layer `start` on; the host learns in that from layer 0."""
    for n in range(start, len(shapes)):
        own, times = shapes[n], 1 + (start == 0) + (n > start)
        done[KINDS[own.kind]] += own.weights * own.positions * times
        for seed in (s for s in active if s[0] == n - 1):
            place, blueprint, _ = seed
            before, units = shapes[place], blueprint.size
            first = units * before.inputs * before.taps * before.positions
            last = (
                units
                * inputs_per_unit(before, own)
                * own.outputs
                * own.taps
                * own.positions
            )
            learns, deeper = seed in learning, place > start
            done[KINDS[before.kind]] += first * (1 + learns + deeper)
            done[KINDS[own.kind]] += last * (1 + learns + (learns or deeper))
            if ACTIVATIONS[blueprint.form] == GELU:
                done["gelu"] += units * (1 + (learns or deeper))
