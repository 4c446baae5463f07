"""Collects the returns of trainings and draws them."""

import sys
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure


class Curves:
    """Mean return of the last 100 episodes against steps, one line per agent."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.lines: dict[str, list[tuple[int, float]]] = {}

    def add(self, name: str) -> Callable[[Any], None]:
        """A callback for `PPO.learn` that collects the line of one agent."""
        points = self.lines[name] = []
        return lambda record: points.append((record.env_steps, record.recent_return))

    def finish(self) -> dict[str, float]:
        """Print the last returns; `FILE.svg` on the command line gets the plot."""
        last = {name: points[-1][1] for name, points in self.lines.items()}
        for name, value in last.items():
            print(f"{name:24} return {value:.3g}")
        if len(sys.argv) > 1 and sys.argv[1].endswith(".svg"):
            figure = Figure(figsize=(5, 3), layout="constrained")
            axes = figure.add_subplot(
                title=self.title, xlabel="steps", ylabel="return (last 100 episodes)"
            )
            for name, points in self.lines.items():
                axes.plot(*zip(*points, strict=True), label=name)
            axes.legend(frameon=False)
            figure.savefig(sys.argv[1], metadata={"Date": None})
        return last
