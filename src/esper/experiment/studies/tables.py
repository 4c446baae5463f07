"""The tables at the end of a study, and what they say in words."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from esper.experiment.statistics import Floats
from esper.experiment.studies.optimum_share import MEMORYLESS, scores, share_of_optimum

if TYPE_CHECKING:
    from esper.experiment.studies.study import Outcome

TITLES = {
    "visible": "Visible instances, never trained on: everything needed is seen",
    "hidden": "Hidden instances, never trained on: what was seen must be remembered",
}


def print_study(
    outcomes: "Sequence[Outcome]", controls: Mapping[str, Mapping[str, Floats]]
) -> None:
    """Print one table per kind of instance, then each training's figure."""
    console = Console()
    for kind, arms in controls.items():
        variants = sorted({outcome.variant for outcome in outcomes})
        means = {
            variant: np.mean(
                [getattr(o, kind) for o in outcomes if o.variant == variant], axis=0
            )
            for variant in variants
        }
        _print_table(console, kind, {**arms, **means})
        _print_repeats(console, kind, outcomes, arms)


def _print_table(console: Console, kind: str, arms: Mapping[str, Floats]) -> None:
    table = Table(title=TITLES[kind], title_justify="left")
    table.add_column("controller")
    table.add_column("return [95 % interval]", justify="right")
    table.add_column("% of optimum [95 % interval]", justify="right")
    for score in sorted(scores(arms), key=lambda score: score.mean_return.estimate):
        style = "bold" if score.name == "Tamiyo" else ""
        table.add_row(
            score.name,
            f"{score.mean_return:.4f}",
            f"{score.share:.1f}",
            style=style,
        )
    console.print(table)


def _print_repeats(
    console: Console,
    kind: str,
    outcomes: "Sequence[Outcome]",
    arms: Mapping[str, Floats],
) -> None:
    """Each training on its own, so that a lucky one cannot hide an unlucky one."""
    for variant in sorted({outcome.variant for outcome in outcomes}):
        shares = [
            share_of_optimum({**arms, "it": getattr(outcome, kind)}, "it")
            for outcome in outcomes
            if outcome.variant == variant
        ]
        line = ", ".join(f"{share:.1f} %" for share in shares)
        console.print(f"{variant}, each training: {line}", highlight=False)
    if kind == "hidden":
        bound = share_of_optimum(arms, MEMORYLESS)
        console.print(
            f"the best policy without memory reaches {bound:.1f} %", highlight=False
        )
