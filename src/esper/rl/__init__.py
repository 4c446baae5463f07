"""Recurrent, masked, factored PPO on any Gymnasium environment."""

from esper.contracts.errors import InvalidInputError

try:
    import gymnasium as _gymnasium  # noqa: F401
except ModuleNotFoundError as error:
    raise InvalidInputError(
        "PPO needs gymnasium, which is not installed; pip install '.[rl]'."
    ) from error
