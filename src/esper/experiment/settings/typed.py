"""Plain values against the annotations of dataclasses, without guessing.

    envs: Annotated[int, Between(1, 65_536)]

A whole number may stand for a number, a list for a tuple and the word "none" for None;
nothing else is converted. What does not fit is refused in one line that names the
setting, what was expected and what came.
"""

import ast
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import pairwise
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

from esper.contracts.errors import BadInput

LONGEST: Final = 200
"""Characters of a refusal."""
NONE: Final = "none"
"""How a file or the command line says None."""
MAX_TEXT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Between:
    """The range of a number, with its ends."""

    low: int | float = -math.inf
    high: int | float = math.inf
    above: bool = False
    """Whether `low` itself is too low."""
    endless: bool = False
    """Whether infinity is allowed."""

    def __contains__(self, number: int | float) -> bool:
        """Whether a number lies in the range."""
        if math.isinf(number) and not self.endless:
            return False
        return self.low <= number <= self.high and not (
            self.above and number == self.low
        )

    def __str__(self) -> str:
        """The range as it follows "a number"."""
        low = "" if math.isinf(self.low) else f"{self.low:g}"
        least = low and f" {'above' if self.above else 'from'} {low}"
        return least + ("" if math.isinf(self.high) else f" to {self.high:.12g}")


@dataclass(frozen=True, slots=True)
class OneOf:
    """The names that a word can be, looked up when they are needed."""

    kind: str
    names: Callable[[], Collection[str]]


Rule = Between | OneOf
Rules = Mapping[type, Mapping[str, Rule]]
"""For classes whose annotations say less than they should: a rule for some fields."""


def conform(hint: Any, value: Any, where: str) -> Any:  # noqa: ANN401
    """The value as its annotation wants it; refuses what cannot be meant.

    Args:
        hint: A number, text, truth value, tuple, mapping, or one of them or None.
        value: What came.
        where: What to call it.
    """
    rule: Rule | None = None
    if get_origin(hint) is Annotated:
        hint, rule = get_args(hint)[:2]
    if get_origin(hint) in (Union, UnionType):
        kinds = get_args(hint)
        if NoneType in kinds and (value is None or value == NONE):
            return None
        fits = [kind for kind in kinds if kind is not NoneType]
        several = isinstance(value, list | tuple)
        fits = [k for k in fits if several == (get_origin(k) is tuple)] or fits
        return conform(_ruled(fits[0], rule), value, where)
    if get_origin(hint) is tuple:
        return _items(get_args(hint), value, where, rule)
    if get_origin(hint) is not None:
        return _mapping(get_args(hint)[1], value, where, rule)
    return _plain(hint, value, where, rule)


def settings(cls: type, rules: Rules, where: str = "") -> Iterator[str]:
    """The dotted name of every setting of a tree of dataclasses."""
    for field, hint in hints(cls, rules):
        name = f"{where}{field.name}"
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings(hint, rules, f"{name}.")
        else:
            yield name


def checked_table(
    cls: type, table: object, rules: Rules, where: str = "", prefix: str = ""
) -> dict[str, Any]:
    """A nested table with every value as the tree's annotations want it.

    Args:
        cls: The dataclass at the top.
        table: Settings by name; those that are left out are left out again.
        rules: For classes that were not annotated for this.
        where: Dotted name of the table.
        prefix: What every refusal begins with, such as the name of a file.
    """
    if not isinstance(table, Mapping):
        at = where.removesuffix(".") or "a configuration"
        raise refusal(f"{prefix}{at} must be a table of settings; got {shown(table)}.")
    known = {field.name: hint for field, hint in hints(cls, rules)}
    made = {}
    for name, value in table.items():
        if name not in known:
            near = nearest(str(name), [*known, *settings(cls, rules)])
            raise refusal(
                f"{prefix}there is no setting {shown(f'{where}{name}')}; did you mean "
                f"{where + near!r}?"
            )
        at, hint = f"{where}{name}", known[name]
        made[name] = (
            checked_table(hint, value, rules, f"{at}.", prefix)
            if is_dataclass(hint) and isinstance(hint, type)
            else conform(hint, value, f"{prefix}{at}")
        )
    return made


def construct(
    cls: type, table: Mapping[str, Any], rules: Rules, where: str = ""
) -> Any:  # noqa: ANN401
    """The tree that a checked table describes."""
    types = {field.name: hint for field, hint in hints(cls, rules)}
    values = {
        name: construct(types[name], value, rules, f"{where}{name}.")
        if is_dataclass(types[name])
        else value
        for name, value in table.items()
    }
    try:
        return cls(**values)
    except BadInput as error:
        at = where.removesuffix(".")
        raise refusal(f"{at}: {error}" if at else str(error)) from None


def conform_fields(made: Any, rules: Rules) -> None:  # noqa: ANN401
    """Check and put right every field of a dataclass that was just made."""
    for field, hint in hints(type(made), rules):
        value = getattr(made, field.name)
        if not is_dataclass(hint):
            object.__setattr__(made, field.name, conform(hint, value, field.name))
            continue
        assert isinstance(hint, type)
        if not isinstance(value, hint):
            raise refusal(
                f"{field.name} must be a {hint.__name__}; got {shown(value)}."
            )
        if hint in rules:  # it did not do so itself
            conform_fields(value, rules)


def hints(cls: type, rules: Rules) -> list[tuple["Field[Any]", Any]]:
    """Fields of a dataclass with their annotations and rules."""
    found = _hints(cls)
    own = rules.get(cls, {})
    return [
        (field, _ruled(found[field.name], own.get(field.name))) for field in fields(cls)
    ]


@lru_cache
def meanings(cls: type) -> Mapping[str, str]:
    """The text below every field of a dataclass, by the field's name."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except OSError:  # no source was installed
        return {}
    body = getattr(tree.body[0], "body", [])
    return {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


def written(value: object) -> str:
    """A plain value as TOML."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, str):  # DEL is the one sign that JSON leaves and TOML forbids
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(written, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{written(key)} = {written(value[key])}" for key in sorted(value))
        return f"{{{', '.join(pairs)}}}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def refusal(text: str) -> BadInput:
    """An error of one line that fits on a screen."""
    line = "".join(sign if sign.isprintable() else "?" for sign in text)
    return BadInput(line if len(line) <= LONGEST else f"{line[: LONGEST - 1]}…")


def shown(value: object) -> str:
    """A value of others, fit for one line."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # thousands of digits or of brackets
        text = f"a huge {type(value).__name__}"
    return text if len(text) <= 48 else f"{text[:47]}…"


def nearest(name: str, names: Collection[str]) -> str:
    """The known name most like an unknown one."""
    exact = {known.lower(): known for known in names}
    word = name.lower().lstrip("-")
    tail = [known for known in names if known.rpartition(".")[2] == word]
    found = tail or get_close_matches(name[:99].lower(), exact, n=1, cutoff=0.0)
    return exact[found[0].lower()]


@lru_cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls, include_extras=True)


def _ruled(hint: Any, rule: Rule | None) -> Any:  # noqa: ANN401
    return hint if rule is None else Annotated[hint, rule]


def _items(kinds: Any, value: Any, where: str, rule: Rule | None) -> Any:  # noqa: ANN401
    if not isinstance(value, list | tuple):
        raise refusal(f"{where} must be a list in brackets; got {shown(value)}.")
    if kinds[-1] is not Ellipsis and len(value) != len(kinds):
        raise refusal(f"{where} must be {len(kinds)} numbers; got {shown(value)}.")
    return tuple(conform(_ruled(kinds[0], rule), item, where) for item in value)


def _mapping(kind: Any, value: Any, where: str, rule: Rule | None) -> dict[str, Any]:  # noqa: ANN401
    if not isinstance(value, Mapping):
        raise refusal(f"{where} must be a table of numbers; got {shown(value)}.")
    if isinstance(rule, OneOf):
        for name in value:
            _named(name, where, rule)
    return {
        name: conform(kind, item, f"{where}.{name}") for name, item in value.items()
    }


def _plain(kind: type, value: Any, where: str, rule: Rule | None) -> Any:  # noqa: ANN401
    if kind is bool:
        if isinstance(value, bool):
            return value
        raise refusal(f"{where} must be true or false; got {shown(value)}.")
    if kind is str:
        return _text(value, where, rule)
    span = rule if isinstance(rule, Between) else Between()
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (kind is float or isinstance(value, int)):
        try:
            if value in span:
                return kind(value) + 0  # -0.0 is written as the 0.0 that it equals
        except OverflowError:
            pass
    word = "whole number" if kind is int else "number"
    raise refusal(f"{where} must be a {word}{span}; got {shown(value)}.")


def _text(value: Any, where: str, rule: Rule | None) -> str:  # noqa: ANN401
    if not isinstance(value, str):
        raise refusal(f"{where} must be text; got {shown(value)}.")
    if isinstance(rule, OneOf):
        return _named(value, where, rule)
    if not value.isprintable() or not 0 < len(value) <= MAX_TEXT:
        raise refusal(
            f"{where} must be 1 to {MAX_TEXT} printable characters; got {shown(value)}."
        )
    return value


def _named(name: Any, where: str, rule: OneOf) -> str:  # noqa: ANN401
    names = rule.names()
    if not isinstance(name, str) or name not in names:
        near = nearest(str(name), names)
        raise refusal(
            f"{where}: there is no {rule.kind} {shown(name)}; did you mean {near!r}? "
            f"There are {', '.join(names)}."
        )
    return name
