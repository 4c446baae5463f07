"""Devices that are available on this machine."""

import torch

from esper.contracts.errors import InvalidInputError


def usable_device(device: torch.device | str) -> torch.device:
    """Return the device; raise an error if this machine cannot use it."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(
            f"device '{device}' cannot be used here: {reason}"
        ) from None
