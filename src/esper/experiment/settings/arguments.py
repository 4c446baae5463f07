"""The options of `esper train`: a preset, files on top of it, options on top of both.

    esper train --preset quick --config mine.toml --learner.ppo.learning_rate 1e-3

Every setting of the configuration is an option, by its dotted name. Its value is
written as in a file, but text needs no quotes and a list of words no brackets:
`--tasks letter,digits`. Whether options stand before or after files does not matter.
"""

import re
import secrets
import tomllib
from argparse import SUPPRESS, ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from math import isfinite, nan
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Union, get_args, get_origin

from jsonargparse import ArgumentParser

from esper.experiment.config import (
    MOST_DOTS,
    RULES,
    TrainConfig,
    as_table,
    from_toml,
    table_of,
)
from esper.experiment.settings.presets import DEFAULT, PRESETS, preset
from esper.experiment.settings.typed import (
    NONE,
    checked_table,
    construct,
    hints,
    meanings,
    nearest,
    refusal,
    shown,
    written,
)
from esper.experiment.storage.disk import short

LARGEST: Final = 1 << 16
"""Bytes of a file; what is larger is no configuration."""
METAVARS: Final = {int: "N", float: "X", str: "TEXT", bool: "true|false", tuple: "LIST"}
EXAMPLES: Final = """\
A value is written as in a TOML file; text needs no quotes and a list of words no
brackets. A range is [low, high]; the word none stands for nothing.

examples:
  esper train                          as it comes, about five minutes
  esper train --preset quick           about one
  esper train --tasks letter,digits --budget.minutes 10
  esper train --tasks letter --world.rent "[0.0, 0.05]"
  esper train --config mine.toml --learner.ppo.learning_rate 1e-3
"""


def parse_train(argv: Sequence[str], command: str = "esper train") -> TrainConfig:
    """The configuration that a command line asks for.

    Args:
        argv: What follows the command; `--help` prints the options and exits.
        command: What they follow.
    """
    return resolve(parse_options(train_parser(command), argv))


def resolve(options: Mapping[str, Any], *, draw: bool = False) -> TrainConfig:
    """Layer preset, files and options.

    Args:
        options: As `parse_options` returns them; names that are no settings, such as
            those of options that a caller added, must be taken out before.
        draw: Whether to draw a random seed if none is given.
    """
    rest = dict(options)
    table = as_table(preset(rest.pop("preset", DEFAULT)))
    layers = [read_table(Path(file)) for file in rest.pop("config", ())]
    layers.append(checked_table(TrainConfig, _valued(TrainConfig, rest), RULES, "--"))
    layers += _only_these(layers)
    if draw and not any("rng_seed" in layer for layer in layers):
        layers.append({"rng_seed": secrets.randbelow(2**32)})
    for layer in layers:
        table = _layered(TrainConfig, table, layer)
    made = construct(TrainConfig, table, RULES)
    assert isinstance(made, TrainConfig)
    return made


def _only_these(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whoever asks for minutes or steps does not mean the preset's rounds too."""
    asked = [layer.get("budget", {}) for layer in layers]
    other = any(
        budget.get(name) is not None
        for budget in asked
        for name in ("minutes", "env_steps")
    )
    if other and not any("rounds" in budget for budget in asked):
        return [{"budget": {"rounds": None}}]
    return []


def read_config(file: Path) -> TrainConfig:
    """The configuration in a file, without a preset below it."""
    return from_toml(_read(file), f"{short(file)}: ")


def read_table(file: Path) -> dict[str, Any]:
    """The settings that a file gives."""
    return table_of(_read(file), f"{short(file)}: ")


def parse_options(parser: ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """Options by name, as text; refuses in one line, with the nearest right name."""
    words = [*map(_spelt, argv)]
    known = parser._option_string_actions
    for word in words:
        name, _, value = word.partition("=")
        if value == "--":  # the parser itself would take it for a list
            raise refusal(f"{shown(name)} needs a value; got '--'.")
        # The parser itself would take --envs.more for --envs.
        if re.match("--[^-]", name) and name not in known:
            names = [option for option in known if option.startswith("--")]
            raise refusal(
                f"there is no option {shown(name)}; did you mean "
                f"{nearest(name, names)!r}?"
            )
    try:
        found: dict[str, Any] = parser.parse_args(words).as_dict()
    except ArgumentError as error:
        raise refusal(f"{error} (see {parser.prog} --help).") from None
    return found


def number(option: str, text: str) -> float:
    """A finite number, or a refusal that names the option."""
    try:
        value = float(text)
    except ValueError:
        value = nan
    if not isfinite(value):
        raise refusal(f"{option} must be a finite number; got {shown(text)}.")
    return value


def train_parser(command: str = "esper train") -> ArgumentParser:
    """A parser that knows every setting; what was not given is not in its answer."""
    parser = ArgumentParser(
        prog=command,
        usage=f"{command} [--help] [--preset NAME] [--config FILE] [--SETTING VALUE]",
        description="Train Tamiyo, watch her, and judge her beside those that do not "
        "learn.",
        epilog=EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--preset",
        default=SUPPRESS,
        metavar="NAME",
        help=f"where to start from: {', '.join(PRESETS)} (default: {DEFAULT})",
    )
    parser.add_argument(
        "--config",
        action="append",
        default=SUPPRESS,
        metavar="FILE",
        help="settings on top of the preset, in TOML; as often as wanted",
    )
    _add_settings(parser, TrainConfig, preset(DEFAULT), "")
    return parser


def _add_settings(parser: ArgumentParser, cls: type, made: object, where: str) -> None:
    title = where.removesuffix(".") or "the run"
    group = parser.add_argument_group(title, (cls.__doc__ or "").splitlines()[0])
    tables = []
    for field, hint in hints(cls, RULES):
        name, value = f"{where}{field.name}", getattr(made, field.name)
        if is_dataclass(hint) and isinstance(hint, type):
            tables.append((hint, value, f"{name}."))
            continue
        meaning = meanings(cls).get(field.name, "").removesuffix(".")
        kind, default = _kind(hint), written(value).strip('"')
        group.add_argument(
            f"--{name}",
            default=SUPPRESS,
            metavar=METAVARS.get(kind, "VALUE"),
            help=f"{meaning} (default: {default})".replace("%", "%%"),
            nargs="?" if kind is bool else None,
            const="true" if kind is bool else None,
        )
    for hint, value, name in tables:
        _add_settings(parser, hint, value, name)


def _valued(cls: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of options as values, where they can be read as what is wanted."""
    known = {field.name: hint for field, hint in hints(cls, RULES)}
    return {
        name: _valued(known[name], text)
        if isinstance(text, Mapping)
        else _value(known[name], text)
        for name, text in options.items()
    }


def _value(hint: Any, text: str) -> object:  # noqa: ANN401
    kind = _kind(hint)
    if kind is str:
        return text
    if kind is tuple and not text.startswith("[") and text != NONE:
        return [word.strip() for word in text.split(",")]
    if "\n" in text or text.count(".") > MOST_DOTS:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _kind(hint: Any) -> Any:  # noqa: ANN401
    """What an annotation is about: int, float, str, bool, tuple of words or Mapping."""
    if get_origin(hint) is Annotated:
        return _kind(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType):
        return _kind(next(kind for kind in get_args(hint) if kind is not NoneType))
    return get_origin(hint) or hint


def _layered(
    cls: type, below: Mapping[str, Any], above: Mapping[str, Any]
) -> dict[str, Any]:
    """Settings of `above`, and those of `below` that it leaves out."""
    known = {field.name: hint for field, hint in hints(cls, RULES)}
    return {
        **below,
        **{
            name: _layered(known[name], below[name], value)
            if is_dataclass(known[name])
            else value
            for name, value in above.items()
        },
    }


def _read(file: Path) -> str:
    """The text of a file that could be a configuration."""
    name = short(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(LARGEST + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refusal(f"{name} cannot be read: {reason}.") from None
    if len(data) > LARGEST:
        raise refusal(f"{name} is larger than {LARGEST:,} bytes; got no configuration.")
    if data.startswith((b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")):
        raise refusal(
            f"{name} begins with a byte order mark; save it as UTF-8 without one."
        )
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise refusal(
            f"{name} must be TOML in UTF-8; byte {error.start} is something else."
        ) from None
    if not text.strip():
        raise refusal(f"{name} is empty; write settings such as envs = 16.")
    return text


def _spelt(word: str) -> str:
    """An option with underscores, however it was spelt; anything else as it is."""
    option = re.match("--[a-zA-Z][^=]*", word)
    return (
        word
        if option is None
        else option[0].replace("-", "_").replace("__", "--", 1) + word[option.end() :]
    )
