"""Controllers by name.

`CONTROLLERS` are the rule-based ones; "tamiyo" is the trained one that comes with the
package, read from its files on first use.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, Literal, get_args

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import unknown
from esper.contracts.world import Controller
from esper.tamiyo.rule_based import ByRent, Never, Plateau, Random
from esper.tamiyo.schedule import (
    DOUBLING,
    EARLY,
    LARGE_THEN_CUT,
    PERIODIC,
    Schedule,
    Scheduled,
    ScheduledByRent,
    playable,
)

Maker = Callable[[ActionSpec], Controller]
"""Makes a controller for an action space."""
ControllerName = Literal[
    "never",
    "random",
    "early",
    "periodic",
    "doubling",
    "large-then-cut",
    "plateau",
    "by-rent",
    "timetable-by-rent",
    "tamiyo",
]
ControllerChoice = ControllerName | str | Controller | Maker
"""A controller, or what `controller_for` makes one of."""


def _follow(schedule: Schedule) -> Maker:
    return lambda spec: Scheduled(spec, playable(spec, schedule))


CONTROLLERS: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "never": lambda spec: Never(),
        "random": lambda spec: Random(),
        "early": _follow(EARLY),
        "periodic": _follow(PERIODIC),
        "doubling": _follow(DOUBLING),
        "large-then-cut": _follow(LARGE_THEN_CUT),
        "plateau": Plateau,
        "by-rent": ByRent,
        "timetable-by-rent": ScheduledByRent,
    }
)
"""Makers of the rule-based controllers."""

SHIPPED: Final = "tamiyo"
"""The trained controller that comes with the package."""
NAMES: Final = get_args(ControllerName)
"""All names of controllers."""


def controller_for(given: ControllerChoice, spec: ActionSpec) -> Controller:
    """The controller of an action space, given itself, its maker or its name."""
    if isinstance(given, str):
        return make_controller(given, spec)
    if isinstance(given, type) or not isinstance(given, Controller):
        return given(spec)  # a class of controllers has their methods too
    return given


def make_controller(name: str, spec: ActionSpec) -> Controller:
    """The controller of that name, with its default settings."""
    if name not in NAMES:
        raise unknown("no controller", name, NAMES)
    if name == SHIPPED:
        from esper.tamiyo.shipped import shipped

        return shipped()(spec)
    return CONTROLLERS[name](spec)
