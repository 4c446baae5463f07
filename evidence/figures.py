"""Which figures the page gets; what there are no numbers for is not drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from esper.experiment.statistics import Interval, iqm_interval, mean_interval
from esper.report.ink import Drawing, house_style
from evidence.claims import Versus
from evidence.plots import (
    STYLES,
    Episode,
    Spot,
    forest,
    pareto,
    swimlane,
)
from evidence.readout import Cells, Readout


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a score is held against."""

    name: str
    column: str
    title: str
    label: str
    shift: float = 0.0
    scale: float = 1.0
    log: bool = False


PRICES: Final = (
    Price(
        name="pareto-parameters",
        column="added",
        title="Test score, %, against parameters",
        label="parameters, in multiples of the host's",
        shift=1.0,
    ),
    Price(
        name="pareto-training",
        column="training_macs",
        title="Test score, %, against the work of training",
        label="multiply-adds of training, in billions",
        scale=1e-9,
        log=True,
    ),
    Price(
        name="pareto-inference",
        column="macs",
        title="Test score, %, against the work of a guess",
        label="multiply-adds per row, in multiples of the host's",
    ),
)


def draw(
    readout: Readout,
    tasks: Sequence[str],
    against: Mapping[str, Versus],
    arms: Sequence[str],
    episode: Episode | None,
    chance: Mapping[str, Any],
) -> list[Drawing]:
    """All figures, in the order of the page.

    Args:
        readout: What was counted.
        tasks: Those of the protocol.
        against: Tamiyo beside everybody else.
        arms: Who has figures.
        episode: The one to show.
        chance: Draws and random seed of every interval.
    """
    ordered = [against[arm] for arm in STYLES if arm in against]
    ordered += [versus for arm, versus in against.items() if arm not in STYLES]
    tests = readout.figure("test")
    scores = {
        (task, arm): iqm_interval(tests.of(arm, [task]), **chance)
        for task in tasks
        for arm in arms
        if tests.count(arm, [task])
    }
    found = []
    with house_style():
        if any(isfinite(versus.difference.estimate) for versus in ordered):
            found.append(forest("forest", ordered))
        for price in PRICES:
            spots = _spots(readout.figure(price.column), scores, price, chance)
            if spots:
                found.append(
                    pareto(price.name, price.title, price.label, spots, log=price.log)
                )
        if episode is not None:
            found.append(swimlane("episode", episode))
    return found


def _spots(
    prices: Cells,
    scores: Mapping[tuple[str, str], Interval],
    price: Price,
    chance: Mapping[str, Any],
) -> dict[str, list[Spot]]:
    """Places of arms, by task."""
    found: dict[str, list[Spot]] = {}
    for (task, arm), score in scores.items():
        paid = mean_interval(prices.of(arm, [task]), **chance)
        if isfinite(paid.estimate):
            ends = (paid.estimate, paid.low, paid.high)
            cost = Interval(*(price.shift + price.scale * end for end in ends))
            found.setdefault(task, []).append(Spot(arm=arm, cost=cost, score=score))
    return found
