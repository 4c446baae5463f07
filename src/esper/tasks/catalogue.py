"""Catalogue of tasks by name, and a decorator that adds one.

    @register_task("rings")
    def rings() -> Task:
        return Task(name="rings", description="...", data=draw, host=MlpHost((2, 8, 3)))

The learning rate of a task is the smallest of 0.001, 0.002, ... 0.032 at which the host
without growth comes within 0.3 points of its best validation score (AdamW, 480 batches
of 64, mean of three splits).
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from esper.contracts.errors import InvalidInputError, unknown
from esper.tasks.data import LEAST_DEVIATION, Data, Splits, split
from esper.tasks.datasets import MIXED_UNITS, digits, mnist5k, stored
from esper.tasks.hosts import CnnHost, MlpHost
from esper.tasks.mnist1d import mnist1d
from esper.tasks.task import Task
from esper.tasks.teacher import teacher
from esper.tasks.text import CHARACTER_CLASSES, characters, text

Builder = Callable[[], Task]

_BUILDERS: Final[dict[str, Builder]] = {}
TASKS: Final[Mapping[str, Builder]] = MappingProxyType(_BUILDERS)
"""Function that builds each task, by task name."""


def task(name: str) -> Task:
    """Return the task with this name."""
    if name not in _BUILDERS:
        what = f"expected one of {', '.join(_BUILDERS)}; got"
        raise unknown(what, str(name), _BUILDERS)
    made = _BUILDERS[name]()
    if not isinstance(made, Task) or made.name != name:
        found = f"named {made.name!r}" if isinstance(made, Task) else ""
        raise InvalidInputError(
            f"the function registered as {name!r} must return a Task of that name; "
            f"got {type(made).__name__} {found}".rstrip()
        )
    return made


def register_task(name: str) -> Callable[[Builder], Builder]:
    """Decorate a function without arguments that returns a task, to register it."""

    def register(builder: Builder) -> Builder:
        known = _BUILDERS.get(name)
        if known is not None and _place(known) != _place(builder):
            raise InvalidInputError(
                f"the task name {name!r} is taken by {'.'.join(_place(known))}; "
                "choose another."
            )
        _BUILDERS[name] = builder
        return builder

    if not isinstance(name, str) or not name:
        raise InvalidInputError(
            f"a task name must be a non-empty string; got {name!r}."
        )
    return register


def table() -> list[dict[str, Any]]:
    """Return one row per task; `missing` tells why its data cannot be loaded."""
    found = []
    for made in map(task, TASKS):
        rows, missing = None, ""
        try:
            rows = sum(map(len, made.splits(0)))
        except InvalidInputError as error:
            missing = str(error)
        found.append({**made.summary(), "rows": rows, "missing": missing})
    return found


def _place(builder: Builder) -> tuple[str, str]:
    """Module and name of a function; a reloaded module may register it again."""
    function = builder.func if isinstance(builder, partial) else builder
    return function.__module__, function.__qualname__


_once = cache(lambda load, *given: load(*given))
"""Cached result of a loader."""


def _images(load: Callable[[], Data], rng_seed: int) -> Splits:
    return split(_once(load), rng_seed)


def _flat(load: Callable[[], Data], rng_seed: int) -> Splits:
    return Splits(*(part.flat() for part in _images(load, rng_seed)))


def _table(name: str, rng_seed: int) -> Splits:
    least = 0.0 if name in MIXED_UNITS else LEAST_DEVIATION
    return split(_once(stored, name), rng_seed, least_deviation=least)


def _windows(rng_seed: int) -> Splits:
    return characters(rng_seed, source=_once(text))


_OTHER: Final[Mapping[str, Callable[[int], Splits]]] = {
    "digits": partial(_flat, digits),
    "mnist1d": partial(_flat, mnist1d),
    "mnist5k": partial(_images, mnist5k),
    "text": _windows,
    "teacher": teacher,
}
"""Data of tasks that are not stored tables."""
_IMAGES: Final = CnnHost((1, 28, 28), (4, 8), 10)

for _name, _description, _host, _rate in (
    ("digits", "handwritten digits of 8 by 8 pixels", (64, 8, 8, 10), 8e-3),
    ("mnist1d", "distorted curves of ten shapes", (40, 12, 12, 10), 16e-3),
    ("letter", "capital letters as sixteen measurements", (16, 12, 12, 26), 16e-3),
    ("satimage", "soils in a satellite image", (36, 8, 8, 6), 16e-3),
    ("penbased", "digits as the way of the pen", (16, 4, 4, 10), 32e-3),
    ("optdigits", "handwritten digits, other writers", (64, 5, 5, 10), 32e-3),
    ("texture", "surfaces in photographs", (40, 5, 5, 11), 32e-3),
    ("vowel", "spoken English vowels", (10, 6, 6, 11), 32e-3),
    ("segment", "what a patch of a photograph shows", (19, 5, 5, 7), 32e-3),
    ("phoneme", "nasal or oral sounds", (5, 6, 6, 2), 16e-3),
    ("spambase", "wanted and unwanted e-mail", (57, 4, 4, 2), 4e-3),
    ("mnist5k", "handwritten digits of 28 by 28 pixels", _IMAGES, 4e-3),
    ("text", "the next character of English", (84, 16, 16, CHARACTER_CLASSES), 8e-3),
    ("teacher", "labels of a random network, another each time", (16, 8, 8, 8), 16e-3),
):
    _BUILDERS[_name] = partial(
        Task,
        name=_name,
        description=_description,
        data=_OTHER.get(_name, partial(_table, _name)),
        host=MlpHost(_host) if isinstance(_host, tuple) else _host,
        learning_rate=_rate,
        varied=_name == "teacher",
    )
