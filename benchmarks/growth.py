"""What does growing cost a training step: an idle Grower, a seed that trains, one held?

One process, alternating, CPU seconds of its one thread: the user's own step beside the
same step through a Grower without seeds, with a seed that trains in shadow passes and
with one that is blended in, for a narrow and a wide host. Beside them stands what a
training seed cannot do without: one forward pass of what lies behind its inlet, and the
way back from the loss to its outlet.
"""

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks import timing
from benchmarks.timing import Report
from esper.grower import Grower

ROWS, INPUTS, CLASSES = 256, 64, 10
WIDTHS = {8: 15.0, 256: 3.0}
"""Hidden units, and percent of a step that an idle Grower may take."""
SLOT, BLUEPRINT = "0->2", "widen_8"
TURNS, WARM_UP = 400, 20
ALONE, IDLE = "the host's own step", "an idle Grower"
TRAINING, HELD = "a seed that trains", "a seed that is blended in"
FORWARD, BACKWARD = "one forward pass", "the way back to the outlet"


def run() -> list[Report]:
    """A table per width."""
    return [measure(width, most) for width, most in WIDTHS.items()]


def measure(width: int, most: float) -> Report:
    """One host with its steps in turn."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    plain = host(width)
    held, grower = grower_step(width, x, y, "AT_ONCE")
    took = in_turn(
        {
            ALONE: step_of(plain, x, y),
            IDLE: grower_step(width, x, y, "")[0],
            TRAINING: grower_step(width, x, y, "SLOW")[0],
            HELD: held,
            FORWARD: forward_of(plain, x),
            BACKWARD: backward_of(plain, x, y),
        }
    )
    alone, idle, training = took[ALONE], took[IDLE], took[TRAINING]
    share = grower.model.macs / grower.model.survey.macs - 1
    needed = share * alone + took[FORWARD]
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
        f"A training seed takes {1e3 * (training - idle):.3f} ms more than that; its "
        f"share of the step and one forward pass are {1e3 * needed:.3f} ms, with the "
        f"way back to its outlet {1e3 * (needed + took[BACKWARD]):.3f} ms.",
        f"Medians of {TURNS} turns, one call of every side in each.",
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


def in_turn(sides: Mapping[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of one call of every side, all sides in every turn.

    What is compared is less than the noise of a machine between two measurements, so
    each turn calls every side once, and the order changes from turn to turn.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = [*sides]
    warm_up, turns = (0, 1) if timing.QUICK else (WARM_UP, TURNS)
    for turn in range(turns + warm_up):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.thread_time()
            sides[name]()
            if turn >= warm_up:
                times[name].append(time.thread_time() - began)
    return {name: statistics.median(values) for name, values in times.items()}


def step_of(model: nn.Module, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The user's own step."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)

    def step() -> None:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def grower_step(
    width: int, x: Tensor, y: Tensor, tempo: str
) -> tuple[Callable[[], None], Grower]:
    """The same step through a Grower, with a seed of this tempo or without one."""
    model = host(width)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    options = {"controller": "never", "tick": 10**6}  # stages last
    grower = Grower(model, optimizer, [SLOT], example=x[:8], **options)
    if tempo:
        grower.plant(f"{SLOT}#0", BLUEPRINT, tempo=tempo)

    def step() -> None:
        loss = grower.loss(lambda: cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower._losses.clear()

    return step, grower


def forward_of(model: nn.Module, x: Tensor) -> Callable[[], None]:
    """One forward pass of a frozen host."""

    def forward() -> None:
        with torch.no_grad():
            model(x)

    return forward


def backward_of(model: nn.Sequential, x: Tensor, y: Tensor) -> Callable[[], None]:
    """The way back from the loss to the outlet, for activations alone."""
    with torch.no_grad():
        outlet = model[:3](x)
    frozen = host(model[0].out_features)[3:].requires_grad_(False)
    outlet.requires_grad_(True)
    loss = cross_entropy(frozen(outlet), y)

    def backward() -> None:
        torch.autograd.grad(loss, outlet, retain_graph=True)

    return backward
