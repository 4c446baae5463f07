"""Every task by name, and how to add one.

    @register_task("rings")
    def rings() -> Task:
        return Task(name="rings", description="...", data=draw, host=MlpHost((2, 8, 3)))

A learning rate is the smallest out of 1, 2, 4, 8, 16 and 32 thousandths at which the
host, never grown, came within 0.3 points of its best score on the rows that decide:
AdamW, 480 batches of 64, mean of three splits.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

from esper.contracts.errors import BadInput, unknown
from esper.tasks.data import LEAST_DEVIATION, Data, Splits, split
from esper.tasks.datasets import TABLES, digits, mnist5k, stored
from esper.tasks.hosts import CnnHost, Host, MlpHost
from esper.tasks.mnist1d import mnist1d
from esper.tasks.task import Task
from esper.tasks.teacher import teacher
from esper.tasks.text import CHARACTER_CLASSES, characters, text

Builder = Callable[[], Task]

_BUILDERS: Final[dict[str, Builder]] = {}
TASKS: Final[Mapping[str, Builder]] = MappingProxyType(_BUILDERS)
"""What makes each task, by the task's name."""


def task(name: str) -> Task:
    """The task of this name."""
    if name not in _BUILDERS:
        what = f"expected one of {', '.join(_BUILDERS)}; got"
        raise unknown(what, str(name), _BUILDERS)
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
    function = builder.func if isinstance(builder, partial) else builder
    return function.__module__, function.__qualname__


_once = cache(lambda load, *given: load(*given))
"""What a loader returns, read or computed once."""


def _images(load: Callable[[], Data], rng_seed: int) -> Splits:
    return split(_once(load), rng_seed)


def _flat(load: Callable[[], Data], rng_seed: int) -> Splits:
    return Splits(*(part.flat() for part in _images(load, rng_seed)))


def _table(name: str, rng_seed: int) -> Splits:
    least = LEAST_DEVIATION if TABLES[name].one_unit else 0.0
    return split(_once(stored, name), rng_seed, least_deviation=least)


def _windows(rng_seed: int) -> Splits:
    return characters(rng_seed, source=_once(text))


def _built_in(
    name: str,
    description: str,
    data: Callable[[int], Splits],
    host: Host,
    learning_rate: float,
    *,
    varied: bool = False,
) -> None:
    """Register a task that comes with the package."""
    _BUILDERS[name] = partial(
        Task,
        name=name,
        description=description,
        data=data,
        host=host,
        learning_rate=learning_rate,
        varied=varied,
    )


_built_in(
    "digits",
    "handwritten digits of 8 by 8 pixels",
    partial(_flat, digits),
    MlpHost((64, 8, 8, 10)),
    8e-3,
)
_built_in(
    "mnist1d",
    "distorted curves of ten shapes",
    partial(_flat, mnist1d),
    MlpHost((40, 12, 12, 10)),
    16e-3,
)
for _name, _width, _rate in (
    ("letter", 12, 16e-3),
    ("satimage", 8, 16e-3),
    ("penbased", 4, 32e-3),
    ("optdigits", 5, 32e-3),
    ("texture", 5, 32e-3),
    ("vowel", 6, 32e-3),
    ("segment", 5, 32e-3),
    ("phoneme", 6, 16e-3),
    ("spambase", 4, 4e-3),
):
    _known = TABLES[_name]
    _built_in(
        _name,
        _known.description,
        partial(_table, _name),
        MlpHost((_known.inputs, _width, _width, _known.classes)),
        _rate,
    )
_built_in(
    "mnist5k",
    "handwritten digits of 28 by 28 pixels",
    partial(_images, mnist5k),
    CnnHost((1, 28, 28), (4, 8), 10),
    4e-3,
)
_built_in(
    "text",
    "the next character of English",
    _windows,
    MlpHost((84, 16, 16, CHARACTER_CLASSES)),
    8e-3,
)
_built_in(
    "teacher",
    "labels of a random network, another one each time",
    teacher,
    MlpHost((16, 8, 8, 8)),
    16e-3,
    varied=True,
)
