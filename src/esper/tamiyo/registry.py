"""Controllers by name.

`CONTROLLERS` are the rule-based ones. "tamiyo" is the trained controller of the
package, loaded on first use.
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
"""Creates a controller for an action space."""
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
"""A controller, its name, or a function that creates it."""


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

SHIPPED: Final = "tamiyo"
NAMES: Final = get_args(ControllerName)


def controller_for(given: ControllerChoice, spec: ActionSpec) -> Controller:
    """Return the controller of an action space from itself, its maker or its name."""
    if isinstance(given, str):
        return make_controller(given, spec)
    if isinstance(given, type) or not isinstance(given, Controller):
        return given(spec)  # a class also passes the isinstance check
    return given


def make_controller(name: str, spec: ActionSpec) -> Controller:
    """Create the controller of that name with default settings."""
    if name not in NAMES:
        raise unknown("no controller", name, NAMES)
    if name == SHIPPED:
        from esper.tamiyo.shipped import shipped

        return shipped()(spec)
    return CONTROLLERS[name](spec)
