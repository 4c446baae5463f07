"""What does a slot cost a host's training step, empty, training and blended in?

One process, alternating: the host's own step beside the same step with hooks, with the
guard, with a seed that is blended in, and with one that trains in a shadow pass. The
host is large enough for a step of ten milliseconds and more.
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
from esper.growth.model import GrowingModel

ROWS, INPUTS, HIDDEN, CLASSES = 256, 256, 768, 10
SLOT, BLUEPRINT = "0->2", "widen_32"
TURNS, WARM_UP = 200, 10


def host() -> nn.Sequential:
    """A plain network of three layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, CLASSES),
    )


def run() -> Report:
    x, y = torch.randn(ROWS, INPUTS), torch.randint(0, CLASSES, (ROWS,))
    plain = host()
    model, step = GrowingModel(plain, [SLOT], x[:8]), step_of(plain, x, y)
    model.detach()
    # Less than one per cent is to be seen, so these two have turns of their own.
    alike: dict[str, Callable[[], None]] = {
        "host alone": step,
        "an empty slot": hooked(model, step),
        "host again": lambda: step(),
    }
    few = in_turn(alike, turns=2 * TURNS)
    slot, noise = (
        few[name] / few["host alone"] - 1 for name in ("an empty slot", "host again")
    )
    sides = {"host alone": step}
    sides["an empty slot and the guard"] = grower_step(x, y, "DORMANT")[0]
    blended_step, grower = grower_step(x, y, "HOLDING")
    sides["a seed blended in, and the guard"] = blended_step
    sides["a seed training, and the guard"] = grower_step(x, y, "TRAINING")[0]
    sides["forward of the host"] = forward_of(plain, x)
    sides["backward to the outlet"] = backward_of(plain, x, y)
    took = in_turn(sides)
    alone = took["host alone"]
    report = Report(
        f"One training step, {plain[0].in_features}-{HIDDEN}-{HIDDEN}-{CLASSES}, "
        f"batch {ROWS}, {BLUEPRINT}",
        ("step", "ms", "of the host's"),
    )
    for name, seconds in took.items():
        report.add(name, seconds * 1e3, seconds / alone)
    guard = took["an empty slot and the guard"] - alone
    own = grower.model.macs / grower.model.survey.macs - 1
    blended = took["a seed blended in, and the guard"] - alone - guard
    shadow = took["a seed training, and the guard"] - alone - guard
    passes = took["forward of the host"] + took["backward to the outlet"]
    report.notes += [
        f"An empty slot: {100 * slot:+.2f} % of the step (the same step against "
        f"itself: {100 * noise:+.2f} %); with the guard: {100 * guard / alone:+.2f} %.",
        f"A blended seed has {100 * own:.1f} % of the host's multiply-adds and takes "
        f"{100 * blended / alone:.1f} % of its step (allowed: its own and 15 %).",
        f"A training seed takes {shadow * 1e3:.2f} ms. Allowed are its own "
        f"multiply-adds and 15 % of the step ({(own + 0.15) * alone * 1e3:.2f} ms), "
        "one forward and one backward of the activations downstream "
        f"({passes * 1e3:.2f} ms).",
        f"Medians of {TURNS} turns and more, one step of every side in each.",
    ]
    return report


def in_turn(
    sides: Mapping[str, Callable[[], None]], turns: int = TURNS
) -> dict[str, float]:
    """Median seconds of one call of every side, all sides in every turn.

    The cost of a slot is less than the noise of a machine between two measurements, so
    each turn calls every side once, and the order changes from turn to turn.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    names = [*sides]
    warm_up, turns = (0, 1) if timing.QUICK else (WARM_UP, turns)
    for turn in range(turns + warm_up):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            sides[name]()
            if turn >= warm_up:
                times[name].append(time.perf_counter() - began)
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


def hooked(model: GrowingModel, step: Callable[[], None]) -> Callable[[], None]:
    """The same step of the same host, with hooks on it for as long as it lasts."""
    (hooks,) = model.hooks

    def with_hooks() -> None:
        hooks.attach()
        step()
        hooks.detach()

    return with_hooks


def grower_step(x: Tensor, y: Tensor, stage: str) -> tuple[Callable[[], None], Grower]:
    """The same step through a Grower with one seed in a stage."""
    model = host()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    options = {"controller": "never", "tick": 10**6}  # stages last
    grower = Grower(model, optimizer, [SLOT], example=x[:8], **options)
    name = f"{SLOT}#0"
    if stage != "DORMANT":
        tempo = "AT_ONCE" if stage == "HOLDING" else "SLOW"
        grower.plant(name, BLUEPRINT, tempo=tempo)

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
    frozen = host()[3:].requires_grad_(False)
    outlet.requires_grad_(True)
    loss = cross_entropy(frozen(outlet), y)

    def backward() -> None:
        torch.autograd.grad(loss, outlet, retain_graph=True)

    return backward
