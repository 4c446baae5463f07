"""Whether a saved growing model can be loaded into one that was built anew."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from torch import Tensor, nn

from esper.contracts.errors import BadInput

FORMAT: Final = 1
"""Version of what a saved growing model holds besides weights."""


def topology(
    state: Mapping[str, Any],
    host: nn.Module,
    slots: Sequence[str],
    blueprints: Sequence[str],
) -> Mapping[str, Any]:
    """What was saved besides weights; refuses what is of another model."""
    saved = state.get("_extra_state")
    if not isinstance(saved, Mapping) or saved.get("format") != FORMAT:
        raise BadInput(
            "this is no saved GrowingModel, or one of another version; pass what "
            "state_dict() returned."
        )
    for what, here in (("slots", [*slots]), ("blueprints", [*blueprints])):
        if saved[what] != here:
            gone = [name for name in saved[what] if name not in here]
            raise BadInput(
                f"the saved model has other {what}: "
                f"{', '.join(gone) or ', '.join(saved[what])}; build this one "
                "with the same."
            )
    _refuse_other_host(state, host)
    return saved


def _refuse_other_host(state: Mapping[str, Any], host: nn.Module) -> None:
    """Name the first three tensors that differ."""
    here = {f"host.{name}": [*t.shape] for name, t in host.state_dict().items()}
    saved = {
        name: [*value.shape]
        for name, value in state.items()
        if name.startswith("host.") and isinstance(value, Tensor)
    }
    odd = [n for n in sorted({*here, *saved}) if here.get(n) != saved.get(n)]
    if odd:
        told = [
            f"{n.removeprefix('host.')} was {saved.get(n, 'absent')} and is "
            f"{here.get(n, 'absent')}"
            for n in odd[:3]
        ]
        raise BadInput(f"the saved host is another one: {', '.join(told)}.")
