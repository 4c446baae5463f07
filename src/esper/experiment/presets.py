"""Settings in layers: a preset, files on top of it, options on top of both.

    resolve({"preset": "quick", "learner.ppo.learning_rate": "1e-3"})

Times of presets are those of two cores.
"""

import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from esper.experiment.config import (
    FAMILY,
    IMITATION,
    SIMULATED,
    Budget,
    Judging,
    Keeping,
    Learner,
    TrainConfig,
    World,
)
from esper.experiment.messages import nearest, quoted, refusal, short, unknown
from esper.experiment.settings import (
    MAX_DOTS,
    NONE,
    as_flat,
    construct,
    known_settings,
    table_of,
)
from esper.simic.agent.ppo import PPOConfig

DEFAULT: Final = "default"
MAX_BYTES: Final = 1 << 16
"""Of a file of settings."""

PRESETS: Final[Mapping[str, TrainConfig]] = MappingProxyType(
    {
        "quick": TrainConfig(
            budget=Budget(rounds=16),
            start_from=None,
            judging=Judging(every=8, hosts=8, controllers=("never", "random", "early")),
            keeping=Keeping(every=8),
        ),
        DEFAULT: TrainConfig(),
        "thorough": TrainConfig(
            tasks=("teacher", "mnist1d", "letter"),
            budget=Budget(rounds=400),
            judging=Judging(every=50, hosts=64),
            keeping=Keeping(every=25),
        ),
        FAMILY: TrainConfig(
            tasks=(FAMILY,),
            envs=8,
            start_from=IMITATION,
            budget=Budget(rounds=100),
            # The right answer differs from episode to episode, and can be seen.
            world=World(
                slots=6,
                rent=(0.001, 0.1),
                budget=(0.5, 15.0),
                rate=(0.5, 2.0),
                group_size=4,
            ),
            judging=Judging(every=25, hosts=16),
            keeping=Keeping(every=25),
        ),
        SIMULATED: TrainConfig(
            tasks=(SIMULATED,),
            start_from=None,
            envs=256,
            budget=Budget(rounds=280),
            learner=Learner(
                gae_lambda=0.85,
                final_share=0.03,
                ppo=PPOConfig(
                    learning_rate=3e-3,
                    max_grad_norm=1.0,
                    entropy=0.02,
                    # Most random sentences do harm, so waiting looks best before the
                    # others are learned: op and blueprint must be tried for longer.
                    head_entropy={"op": 0.15, "blueprint": 0.1},
                ),
            ),
            keeping=Keeping(every=70),
        ),
    }
)
"""About a minute; five; half an hour; ten on a family of drawn tasks; two on the
simulated world."""


def preset(name: str) -> TrainConfig:
    """The configuration of this name."""
    if name not in PRESETS:
        raise unknown("there is no preset", name, PRESETS)
    return PRESETS[name]


def resolve(options: Mapping[str, Any], *, draw_seed: bool = False) -> TrainConfig:
    """Layer preset, files and options.

    Args:
        options: Texts by dotted names of settings; "preset" is the name of one and
            "config" a list of files.
        draw_seed: Whether to draw a random seed if none is given.
    """
    texts = dict(options)
    below = as_flat(preset(texts.pop("preset", DEFAULT)))
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for file in texts.pop("config", ()):
        prefix = f"{short(Path(file))}: "
        table = table_of(read_text(Path(file)), TrainConfig, prefix)
        given |= table
        origins |= dict.fromkeys(table, prefix)
    known = known_settings(TrainConfig)
    for name, text in texts.items():
        if name not in known:
            raise refusal(
                f"there is no option {quoted(f'--{name}')}; did you mean "
                f"{'--' + nearest(name, known)!r}?"
            )
        given[name] = _parsed(known[name].type, text)
        origins[name] = "--"
    # Whoever asks for minutes or steps does not mean the preset's rounds too.
    others = (given.get("budget.minutes"), given.get("budget.env_steps"))
    if "budget.rounds" not in given and any(o not in (None, NONE) for o in others):
        given["budget.rounds"] = None
    if draw_seed and "rng_seed" not in given:
        given["rng_seed"] = secrets.randbelow(2**32)
    return construct(TrainConfig, {**below, **given}, origins)


def read_text(file: Path) -> str:
    """The text of a small file in UTF-8."""
    name = short(file)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise refusal(f"{name} cannot be read: {reason}.") from None
    if len(data) > MAX_BYTES:
        raise refusal(f"{name} is larger than {MAX_BYTES:,} bytes; name another file.")
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


def _parsed(kind: str, text: str) -> object:
    """The value that a text of the command line stands for, or the text itself."""
    if kind == "string":
        return text
    if kind == "array" and not text.startswith("[") and text != NONE:
        return [word.strip() for word in text.split(",")]
    if "\n" in text or text.count(".") > MAX_DOTS:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
