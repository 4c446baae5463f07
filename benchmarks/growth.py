"""What does growing cost a training step: an idle Grower, a seed that trains, one held?

One process, alternating, CPU seconds of its one thread: the user's own step beside the
same step through a Grower without seeds, on the same network and optimiser, since two
networks of one kind differ by more than is asked for here, by where they lie in memory.
Then with a seed that trains in shadow passes and with one that is blended in, for a
narrow and a wide host, and after seeds were kept. What a training seed cannot do
without is its own share, which is what a seed that is blended in costs, and one forward
pass of what lies behind its inlet; the way back from the loss to its outlet comes on
top.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from benchmarks import timing
from benchmarks.timing import Report
from esper.grower import Grower
from esper.growth.safety import GovernorConfig

ROWS, INPUTS, CLASSES = 256, 64, 10
WIDTHS = {8: 15.0, 256: 3.0}
"""Hidden units, and percent of a step that an idle Grower may take."""
SLOT, BLUEPRINT = "0->2", "widen_8"
TURNS, WARM_UP = 80, 5
STEPS, UNTIMED = 10, 3
"""Steps in a row in every turn, and those before them."""
ALONE, IDLE = "the host's own step", "an idle Grower"
KEPT, UNGUARDED = "seeds are kept", "seeds are kept, without governor"
KEPT_WIDTHS = (64, 256, 1024)
TRAINING, HELD = "a seed that trains", "a seed that is blended in"
FORWARD, BACKWARD = "one forward pass", "the way back to the outlet"
Side = Callable[[], Callable[[], None]]
"""Gets ready for a turn; returns a step."""


def run() -> list[Report]:
    """A table per width, and one of networks whose seeds were kept."""
    reports = [measure(width, most) for width, most in WIDTHS.items()]
    return [*reports, measure_kept()]


def measure_kept() -> Report:
    """Steps of networks that `early` has grown, and of plain ones of that size."""
    report = Report(
        "One step after growing fourfold, all seeds kept",
        ("width", "plain, ms", "grown, ms", "ratio", "ratio, governor=None"),
    )
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    for width in KEPT_WIDTHS:
        sides: dict[str, Side] = {}
        for name, governor in (
            (ALONE, None),
            (KEPT, GovernorConfig()),
            (UNGUARDED, None),
        ):
            model = host(width if name == ALONE else width // 4)
            optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
            step = own_step(model, optimizer, x, y)
            if name != ALONE:
                grower = Grower(
                    model, optimizer, example=x[:8], decisions=8, governor=governor
                )
                for _ in range(6):
                    step()
                    grower.step(metric=0.1)
                assert model[0].out_features == model[2].out_features == width
            sides[name] = lambda step=step: step
        took = in_turn(sides)
        plain = took[ALONE]
        ratios = took[KEPT] / plain, took[UNGUARDED] / plain
        report.add(width, 1e3 * plain, 1e3 * took[KEPT], *ratios)
    return report


def own_step(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> Callable[[], None]:
    """The user's own step."""

    def step() -> None:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def measure(width: int, most: float) -> Report:
    """One host with its steps in turn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    plain = host(width)
    took = in_turn(
        {
            **with_and_without(width, x, y),
            TRAINING: with_seed(width, x, y, "SLOW"),
            HELD: with_seed(width, x, y, "AT_ONCE"),
            FORWARD: forward_of(plain, x),
            BACKWARD: backward_of(plain, x, y),
        }
    )
    alone, idle = took[ALONE], took[IDLE]
    needed = took[HELD] - idle + took[FORWARD]
    report = Report(
        f"One step of {INPUTS}-{width}-{width}-{CLASSES}, {ROWS} rows, {BLUEPRINT} in "
        f"{SLOT}",
        ("what", "ms", "of the host's step"),
    )
    for name, seconds in took.items():
        report.add(name, 1e3 * seconds, seconds / alone)
    report.notes += [
        f"An idle Grower takes {100 * (idle / alone - 1):+.1f} % of the step "
        f"(allowed: {most:g} %).",
        f"A training seed takes {1e3 * (took[TRAINING] - idle):.3f} ms more than that; "
        f"its own share and one forward pass are {1e3 * needed:.3f} ms, with the way "
        f"back to its outlet {1e3 * (needed + took[BACKWARD]):.3f} ms.",
        f"Medians of {TURNS} turns, {STEPS} steps of every side in each.",
    ]
    return report


def host(width: int) -> nn.Sequential:
    """A plain network of three layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CLASSES),
    )


def in_turn(sides: Mapping[str, Side]) -> dict[str, float]:
    """Median seconds of one step of every side, all sides in every turn.

    The order changes from turn to turn. A side takes several steps in a row, since a
    training loop too finds its own data in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = [*sides]
    warm_up, turns = (0, 1) if timing.QUICK else (WARM_UP, TURNS)
    for turn in range(turns + warm_up):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            step = sides[name]()
            for _ in range(UNTIMED):
                step()
            began = time.thread_time()
            for _ in range(STEPS):
                step()
            if turn >= warm_up:
                times[name].append((time.thread_time() - began) / STEPS)
    return {name: statistics.median(values) for name, values in times.items()}


def with_and_without(width: int, x: Tensor, y: Tensor) -> dict[str, Side]:
    """Steps of one network, alone and with an idle Grower that comes and goes."""
    model = host(width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    growers: list[Grower] = []

    plain = own_step(model, optimizer, x, y)

    def alone() -> Callable[[], None]:
        for grower in growers:
            grower.detach()
        growers.clear()
        return plain

    def idle() -> Callable[[], None]:
        alone()
        growers.append(grower_of(model, optimizer, x))
        return step_of(growers[0], x, y)

    return {ALONE: alone, IDLE: idle}


def with_seed(width: int, x: Tensor, y: Tensor, tempo: str) -> Side:
    """Steps with a seed of this tempo."""
    model = host(width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    grower = grower_of(model, optimizer, x)
    grower.plant(f"{SLOT}#0", BLUEPRINT, tempo=tempo)
    return lambda: step_of(grower, x, y)


def grower_of(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Grower:
    """A Grower in which stages last."""
    options = {"controller": "never", "tick": 10**6}
    return Grower(model, optimizer, [SLOT], example=x[:8], **options)


def step_of(grower: Grower, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The user's step through a Grower."""
    model, optimizer = grower.model.host, grower.optimizer

    def step() -> None:
        loss = grower.loss(lambda: cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower._losses.clear()

    return step


def forward_of(model: nn.Module, x: Tensor) -> Side:
    """One forward pass of a frozen host."""

    def forward() -> None:
        with torch.no_grad():
            model(x)

    return lambda: forward


def backward_of(model: nn.Sequential, x: Tensor, y: Tensor) -> Side:
    """The way back from the loss to the outlet, for activations alone."""
    with torch.no_grad():
        outlet = model[:3](x)
    frozen = host(model[0].out_features)[3:].requires_grad_(False)
    outlet.requires_grad_(True)
    loss = cross_entropy(frozen(outlet), y)

    def backward() -> None:
        torch.autograd.grad(loss, outlet, retain_graph=True)

    return lambda: backward
