"""Settings as trees of dataclasses that pydantic validates, and their TOML.

The text below a field is its help. Values from files, the command line and Python are
validated strictly when a tree is made: no text becomes a number. A tree is written as
TOML and read back equal; None is written as "none". Errors are one line.
"""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import nearest, quoted, refusal, unknown

T = TypeVar("T")

NONE: Final = "none"
"""None in a file or on the command line."""
MAX_DOTS: Final = 64
"""Maximum per line; Python's parser takes minutes for names of many parts."""
MAX_TOML: Final = 1 << 16
"""Maximum number of characters of a TOML text."""
MAX_TEXT: Final = 1_000


@dataclass_transform(kw_only_default=True, frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """A frozen dataclass with validated fields; errors are one line."""
    made = validated(
        frozen=True,
        kw_only=True,
        config=ConfigDict(
            strict=True,
            extra="forbid",
            use_attribute_docstrings=True,
            allow_inf_nan=False,
            revalidate_instances="always",  # parts that are plain dataclasses too
        ),
    )(cls)
    init = made.__init__

    def checked_init(self: object, **values: Any) -> None:  # noqa: ANN401
        try:
            init(self, **values)
        except ValidationError as error:
            raise _refusal(cls, error) from None

    made.__init__ = checked_init  # type: ignore[method-assign]
    return cast("type[T]", made)


def one_of(kind: str, names: Callable[[], Collection[str]]) -> AfterValidator:
    """Accept only some names, which are looked up on use."""

    def check(name: str) -> str:
        if name not in (known := names()):
            raise unknown(f"there is no {kind}", name, known)
        return name

    return AfterValidator(check)


def _printable(text: str) -> str:
    if not text.isprintable() or not 0 < len(text) <= MAX_TEXT:
        raise refusal(
            f"expected 1 to {MAX_TEXT} printable characters, got {quoted(text)}."
        )
    return text


Text = Annotated[str, AfterValidator(_printable)]
Count = Annotated[int, Field(ge=1, le=65_536)]
RngSeed = Annotated[int, Field(ge=0, le=2**32 - 1)]


@dataclass(frozen=True, slots=True)
class Setting:
    """Type and description of one setting."""

    type: str
    """JSON schema type: integer, number, string, boolean, array or object."""
    nullable: bool
    is_derived: bool
    """Whether its default depends on other settings."""
    description: str


@cache
def _adapter(cls: type) -> Any:  # noqa: ANN401
    return TypeAdapter(cls)


def known_settings(cls: type) -> dict[str, Setting]:
    """Every setting of a tree of dataclasses, by dotted name."""
    return _known(cls)  # `cache` hides the signature from type checkers


@cache
def _known(cls: type) -> dict[str, Setting]:
    # A list, because the config of a plain dataclass must come from outside of it.
    docs = ConfigDict(use_attribute_docstrings=True)
    schema = TypeAdapter(list[cls], config=docs).json_schema()  # type: ignore[valid-type]
    base = next(filter(is_dataclass, cls.__mro__[1:]), None)
    inherited = {} if base is None else known_settings(base)

    def walk(node: Mapping[str, Any], where: str) -> dict[str, Setting]:
        found: dict[str, Setting] = {}
        for name, entry in node.get("properties", {}).items():
            if "$ref" in entry:
                below = schema["$defs"][entry["$ref"].rpartition("/")[2]]
                found |= walk(below, f"{where}{name}.")
                continue
            kinds = [one.get("type") for one in entry.get("anyOf", [entry])]
            text = " ".join(entry.get("description", "").split())
            if not text and name in inherited:
                text = inherited[name].description
            nullable = "null" in kinds
            is_derived = not nullable and entry.get("default", "") is None
            found[where + name] = Setting(kinds[0], nullable, is_derived, text)
        return found

    return walk(schema["$defs"][cls.__name__], "")


def parse_toml(text: str, prefix: str = "") -> dict[str, Any]:
    """The tables of a TOML text; refuses what Python's parser is too slow for."""
    why = ""
    if len(text) > MAX_TOML:
        why = f"more than {MAX_TOML:,} characters"
    elif any(line.count(".") > MAX_DOTS for line in text.split("\n")):
        why = "a line of too many dots"
    else:
        try:
            return tomllib.loads(text)
        except RecursionError:
            why = "brackets too deep"
        except ValueError as error:
            why = str(error)
    raise refusal(f"{prefix}expected TOML; got {why}.")


def table_of(text: str, cls: type, prefix: str = "") -> dict[str, Any]:
    """The settings in a TOML text, by dotted name; refuses unknown names.

    `prefix`, such as the name of a file, starts every error message.
    """
    todo: list[tuple[str, Any]] = [("", parse_toml(text, prefix))]
    known, found = known_settings(cls), dict[str, Any]()
    while todo:
        where, value = todo.pop()
        if where in known:
            found[where] = value
        elif where and not any(name.startswith(f"{where}.") for name in known):
            near = nearest(where if "." in where else where.lower(), known)
            raise refusal(
                f"{prefix}there is no setting {quoted(where)}; did you mean {near!r}?"
            )
        elif not isinstance(value, Mapping):
            raise refusal(
                f"{prefix}{where} must be a table of settings; got {quoted(value)}."
            )
        else:
            dot = f"{where}." if where else ""
            todo += [(f"{dot}{name}", one) for name, one in value.items()][::-1]
    return found


def parsed_options(
    cls: type, options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Values and origins of command line options, for `construct`.

    `options` are texts by dotted name; for a list, one text or several.
    """
    known, found = known_settings(cls), dict[str, Any]()
    for name, given in options.items():
        if name not in known:
            near = "--" + nearest(name, known)
            raise refusal(
                f"there is no option {quoted(f'--{name}')}; did you mean {near!r}?"
            )
        text = given if isinstance(given, str) else ",".join(given)
        found[name] = _parsed(known[name].type, text)
    return found, dict.fromkeys(found, "--")


def _parsed(kind: str, text: str) -> object:
    """The value of a command line text, or the text itself."""
    if kind == "string":
        return text
    if kind == "array" and not text.startswith("[") and text != NONE:
        return [word.strip() for word in text.split(",")]
    if "\n" in text:
        return text
    try:
        return parse_toml(f"value = {text}")["value"]
    except InvalidInputError:
        return text


def construct(
    cls: type[T],
    values: Mapping[str, Any],
    origins: Mapping[str, str] = MappingProxyType({}),
) -> T:
    """The validated tree; absent settings have their defaults.

    `values` are by dotted name, as `table_of` returns them. `origins`, such as names of
    files, start the error messages about each.
    """
    known = known_settings(cls)
    flat, tree = as_flat(cls()), dict[str, Any]()
    defaults = {name: flat[name] for name in known if not known[name].is_derived}
    for dotted, value in (defaults | {**values}).items():
        *path, name = dotted.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[name] = None if value == NONE and known[dotted].nullable else value
    try:
        # pydantic's JSON mode is strict, but accepts tables and lists.
        text = json.dumps(tree, default=lambda other: {"date": str(other)})
        made: T = _adapter(cast(type, cls)).validate_json(text)
    except RecursionError:
        raise refusal("settings must be plain values; got brackets too deep.") from None
    except ValidationError as error:
        raise _refusal(cls, error, origins) from None
    return made


def as_toml(config: object, *, explain: bool = False) -> str:
    """All settings as TOML; with `explain`, each below its description."""
    known = known_settings(type(config))
    sections: dict[str, list[str]] = {"": []}
    for name, value in as_flat(config).items():
        where, _, last = name.rpartition(".")
        lines = sections.setdefault(where, ["", f"[{where}]"])
        if explain:
            lines.append(f"# {known[name].description}")
        lines.append(f"{last} = {toml_value(value)}")
    return "\n".join(line for lines in sections.values() for line in lines) + "\n"


def as_flat(config: object, where: str = "") -> dict[str, Any]:
    """All values of a tree of dataclasses, by dotted name."""
    found: dict[str, Any] = {}
    for item in fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, item.name), f"{where}{item.name}"
        found |= as_flat(value, f"{name}.") if is_dataclass(value) else {name: value}
    return found


def toml_value(value: object) -> str:
    """A plain value as TOML."""
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):  # TOML forbids DEL, JSON does not
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{toml_value(k)} = {toml_value(value[k])}" for k in sorted(value))
        return f"{{{', '.join(pairs)}}}"
    # -0.0 is written as 0.0, which equals it.
    return repr(value + 0.0) if isinstance(value, float) else repr(value)


def _refusal(
    cls: type, error: ValidationError, origins: Mapping[str, str] = MappingProxyType({})
) -> InvalidInputError:
    """The first error, in one line."""
    known = known_settings(cls)
    errors = error.errors(include_url=False)
    first = errors[0]
    if first["type"] == "json_invalid":  # a lone surrogate, or hundreds of brackets
        return refusal(f"settings must be plain values; {first['msg']}.")
    where = ""
    for depth, part in enumerate(first["loc"]):  # noqa: B007
        if where in known:
            break
        where = f"{where}.{part}".strip(".")
    else:
        depth = len(first["loc"])
    if first["type"] == "value_error":
        text = str(first["ctx"]["error"])
        # Checks of a whole class start with the name of the invalid setting.
        setting = f"{where}.{text.split()[0].strip(':')}".strip(".")
        if setting in known:
            dot = "." if where else ""
            return refusal(f"{origins.get(setting, '')}{where}{dot}{text}")
        return refusal(f"{origins.get(where, '')}{where}: {text}" if where else text)
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        known_names = re.findall("'(.*?)'", first["ctx"]["expected"])
        what = f"{origins.get(where, '')}{where}: there is no"
        return unknown(what, first["input"], known_names)
    # A union reports each of its members.
    expected = " or ".join(
        each["msg"].replace("Input should be", "must be")
        for each in errors
        if each["loc"][:depth] == first["loc"][:depth]
    )
    return refusal(
        f"{origins.get(where, '')}{where} {expected}; got {quoted(first['input'])}."
    )
