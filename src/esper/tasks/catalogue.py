"""Every task by name, and how to add one.

    @register_task("rings")
    def rings() -> Task:
        return Task(name="rings", description="...", data=draw, host=MlpHost((2, 8, 3)))

A learning rate is the smallest out of 1, 2, 4, 8, 16 and 32 thousandths at which the
host, never grown, came within 0.3 points of its best score on the rows that decide:
AdamW, 480 batches of 64, mean of three splits.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from esper.contracts.errors import BadInput
from esper.tasks.characters import CLASSES, characters
from esper.tasks.data import LEAST_DEVIATION, Data, Splits, split
from esper.tasks.digits import digits
from esper.tasks.hosts import CnnHost, MlpHost
from esper.tasks.mnist1d import mnist1d
from esper.tasks.mnist5k import mnist5k
from esper.tasks.tables import TABLES, stored
from esper.tasks.task import Task
from esper.tasks.teacher import teacher
from esper.tasks.text import Text, text

Builder = Callable[[], Task]

_BUILDERS: Final[dict[str, Builder]] = {}
TASKS: Final[Mapping[str, Builder]] = MappingProxyType(_BUILDERS)
"""What makes each task, by the task's name."""


def task(name: str) -> Task:
    """The task of this name."""
    if name not in _BUILDERS:
        near = get_close_matches(str(name), _BUILDERS, n=1, cutoff=0.0)[0]
        raise BadInput(
            f"expected one of {', '.join(_BUILDERS)}; got {name!r}; did you mean "
            f"{near!r}?"
        )
    made = _BUILDERS[name]()
    if not isinstance(made, Task) or made.name != name:
        found = f"named {made.name!r}" if isinstance(made, Task) else ""
        raise BadInput(
            f"expected the function registered as {name!r} to return a Task of that "
            f"name; got {type(made).__name__} {found}".rstrip()
        )
    return made


def register_task(name: str) -> Callable[[Builder], Builder]:
    """Add a task: above a function without arguments that returns it.

    The data are looked at when they are first asked for, by `Task.splits`.
    """

    def register(builder: Builder) -> Builder:
        known = _BUILDERS.get(name)
        if known is not None and _place(known) != _place(builder):
            raise BadInput(
                f"expected a name that is not taken; got {name!r}, which is that of "
                f"{'.'.join(_place(known))}; choose another"
            )
        _BUILDERS[name] = builder
        return builder

    if not isinstance(name, str) or not name:
        raise BadInput(f"expected a task's name; got {name!r}")
    return register


def table() -> list[dict[str, Any]]:
    """One row for each task; what is missing to load its data, if anything."""
    return [_row(task(name)) for name in TASKS]


def _row(made: Task) -> dict[str, Any]:
    """A task's summary with the number of its rows."""
    row = made.summary()
    try:
        rows = sum(map(len, made.splits(0)))
    except BadInput as error:
        return {**row, "rows": None, "missing": str(error)}
    return {**row, "rows": rows, "missing": ""}


def _place(builder: Builder) -> tuple[str, str]:
    """Where a function was written; a reloaded module registers it once more."""
    return builder.__module__, builder.__qualname__


@cache
def _loaded(load: Callable[[], Data]) -> Data:
    """Rows as they come, read or computed once."""
    return load()


@cache
def _stored(name: str) -> Data:
    """Rows of a table of the package, read once."""
    return stored(name)


def _images(load: Callable[[], Data], rng_seed: int) -> Splits:
    """Rows, dealt out."""
    return split(_loaded(load), rng_seed)


def _flat(load: Callable[[], Data], rng_seed: int) -> Splits:
    """Rows as flat lists of numbers, dealt out."""
    return Splits(*(part.flat() for part in _images(load, rng_seed)))


def _table(name: str, rng_seed: int) -> Splits:
    """Rows of a table of the package, dealt out."""
    least = LEAST_DEVIATION if TABLES[name].one_unit else 0.0
    return split(_stored(name), rng_seed, least_deviation=least)


def _table_task(name: str, width: int, learning_rate: float) -> Task:
    """A table of the package, for a host of two hidden layers of equal width."""
    known = TABLES[name]
    return Task(
        name=name,
        description=known.description,
        data=partial(_table, name),
        host=MlpHost((known.inputs, width, width, known.classes)),
        learning_rate=learning_rate,
    )


@cache
def _english() -> Text:
    """The text, read once."""
    return text()


def _windows(rng_seed: int) -> Splits:
    """Windows of the text."""
    return characters(rng_seed, source=_english())


@register_task("digits")
def _digits() -> Task:
    return Task(
        name="digits",
        description="handwritten digits of 8 by 8 pixels",
        data=partial(_flat, digits),
        host=MlpHost((64, 8, 8, 10)),
        learning_rate=8e-3,
    )


@register_task("mnist1d")
def _mnist1d() -> Task:
    return Task(
        name="mnist1d",
        description="distorted curves of ten shapes",
        data=partial(_flat, mnist1d),
        host=MlpHost((40, 12, 12, 10)),
        learning_rate=16e-3,
    )


@register_task("letter")
def _letter() -> Task:
    return _table_task("letter", 12, 16e-3)


@register_task("satimage")
def _satimage() -> Task:
    return _table_task("satimage", 8, 16e-3)


@register_task("penbased")
def _penbased() -> Task:
    return _table_task("penbased", 4, 32e-3)


@register_task("optdigits")
def _optdigits() -> Task:
    return _table_task("optdigits", 5, 32e-3)


@register_task("texture")
def _texture() -> Task:
    return _table_task("texture", 5, 32e-3)


@register_task("vowel")
def _vowel() -> Task:
    return _table_task("vowel", 6, 32e-3)


@register_task("segment")
def _segment() -> Task:
    return _table_task("segment", 5, 32e-3)


@register_task("phoneme")
def _phoneme() -> Task:
    return _table_task("phoneme", 6, 16e-3)


@register_task("spambase")
def _spambase() -> Task:
    return _table_task("spambase", 4, 4e-3)


@register_task("mnist5k")
def _mnist5k() -> Task:
    return Task(
        name="mnist5k",
        description="handwritten digits of 28 by 28 pixels",
        data=partial(_images, mnist5k),
        host=CnnHost((1, 28, 28), (4, 8), 10),
        learning_rate=4e-3,
    )


@register_task("text")
def _text() -> Task:
    return Task(
        name="text",
        description="the next character of English",
        data=_windows,
        host=MlpHost((84, 16, 16, CLASSES)),
        learning_rate=8e-3,
    )


@register_task("teacher")
def _teacher() -> Task:
    return Task(
        name="teacher",
        description="labels of a random network, another one each time",
        data=teacher,
        host=MlpHost((16, 8, 8, 8)),
        learning_rate=16e-3,
        varied=True,
    )
