"""Error messages of one short, printable line, also for values from outside."""

from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from esper.contracts.errors import InvalidInputError

MAX_MESSAGE_LENGTH: Final = 200
SYNONYMS: Final = {
    "batch_size": "minibatches, their number",
    "clip_range_vf": "value_clip",
    "ent_coef": "entropy_coef",
    "env_kwargs": "a function: PPO(lambda: gymnasium.make(id, ...))",
    "n_envs": "num_envs",
    "n_epochs": "epochs",
    "n_steps": "rollout_steps",
    "policy": "memory, width or encoder; the first argument is env",
    "policy_kwargs": "width or encoder",
    "progress_bar": "progress",
    "tb_log_name": "logger",
    "tensorboard_log": "learn(logger='tensorboard')",
    "total_timesteps": "total_steps",
    "verbose": "learn(progress=True)",
    "vf_coef": "value_coef",
}
"""Names in Stable-Baselines3, and what to use instead."""


def printable(text: str) -> str:
    """The text with "?" in place of every character that is not printable."""
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def one_line(text: str, length: int = MAX_MESSAGE_LENGTH) -> str:
    """The text as one printable line, cut to a length."""
    line = printable(text)
    return line if len(line) <= length else f"{line[: length - 1]}…"


def refusal(text: str) -> InvalidInputError:
    """An `InvalidInputError` whose message is one line."""
    return InvalidInputError(one_line(text))


def quoted(value: object) -> str:
    """`repr` of any value, at most 48 characters."""
    try:
        text = repr(value)
    except Exception:  # huge integers, deep nesting, or a user's own __repr__
        text = f"a huge {type(value).__name__}"
    return one_line(text, 48)


def described(error: BaseException) -> str:
    """Type and message of a foreign error, in one line."""
    try:
        text = " ".join(str(error)[:1_000].split()).rstrip(".")
    except Exception:
        text = "no message"
    name = type(error).__name__
    return one_line(f"{name}: {text}" if text else name, 120)


def short(path: Path) -> str:
    """The last three parts of a path, printable, at most 72 characters."""
    text = printable("/".join(path.parts[-3:]).replace("//", "/"))
    return text if len(text) <= 72 else f"…{text[-71:]}"


def unknown(what: str, name: str, known: Collection[str]) -> InvalidInputError:
    """An error about an unknown name; `what` begins it: "there is no task"."""
    instead = SYNONYMS.get(name)
    if instead is not None and instead not in known:
        return refusal(f"{what} {quoted(name)}. Use {instead}.")
    return refusal(
        f"{what} {quoted(name)}; did you mean {nearest(name, known)!r}? There are "
        f"{', '.join(known)}."
    )


def nearest(name: str, names: Collection[str]) -> str:
    """The known name that means the same, ends in the name or is most similar."""
    exact = {known.lower(): known for known in names}
    word = name.lower().lstrip("-")
    same = (word, SYNONYMS.get(word.replace("-", "_")))
    ends = {known: known.rpartition(".")[2].lstrip("-") for known in names}
    same_end = [known for known, end in ends.items() if end in same]
    found = same_end or get_close_matches(name[:99].lower(), exact, n=1, cutoff=0.0)
    return exact[found[0].lower()]
