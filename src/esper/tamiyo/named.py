"""Controllers by name, for people who do not want to import one.

`CONTROLLERS` are those that do not learn; "tamiyo" is the trained one that comes with
the package, and is read when it is first asked for.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Final

from esper.contracts.actions import ActionSpec
from esper.contracts.controller import Controller
from esper.contracts.errors import BadInput
from esper.tamiyo.controls import Early, Never, Periodic, Random
from esper.tamiyo.heuristic import Plateau, PromiseGreedy

Maker = Callable[[ActionSpec], Controller]
"""What makes a controller for an action space."""

CONTROLLERS: Final[Mapping[str, Maker]] = MappingProxyType(
    {
        "never": lambda spec: Never(),
        "random": lambda spec: Random(),
        "early": Early,
        "periodic": Periodic,
        "plateau": Plateau,
        "promise": PromiseGreedy,
    }
)
"""What makes each controller for an action space."""

SHIPPED: Final = "tamiyo"
"""The trained controller that comes with the package."""
NAMES: Final = (*CONTROLLERS, SHIPPED)
"""Everybody who can be had by name."""


def controller_for(who: Controller | Maker | str, spec: ActionSpec) -> Controller:
    """A controller of an action space.

    Args:
        who: It, what makes it, or its name.
        spec: What it may say.
    """
    if isinstance(who, str):
        return named(who, spec)
    if isinstance(who, type) or not isinstance(who, Controller):
        return who(spec)  # a class of controllers has their methods too
    return who


def named(name: str, spec: ActionSpec) -> Controller:
    """The controller of that name, with its default settings."""
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1, cutoff=0.0)
        raise BadInput(
            f"no controller {name!r}; did you mean {near[0]!r}? There are "
            f"{', '.join(NAMES)}."
        )
    if name == SHIPPED:
        from esper.tamiyo.shipped.files import shipped

        return shipped()(spec)
    return CONTROLLERS[name](spec)
