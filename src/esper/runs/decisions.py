"""Single decisions as JSON of the event store: what was seen, and what could be chosen.

    features  {"host": {"score": 0.81, ...}, "seeds": [{"slot": 0, "stage": "HOLDING",
              ...}], "offers": {"1": {"widen_x2": [0.25, 0.2]}}}
    heads     {"op": {"chosen": "WAIT", "legal": {"WAIT": 0.9, "GERMINATE": 0.1}}}

`docs/store.md` describes the entries. Numbers have three significant digits; what is
unknown or infinite is null.
"""

import json
from collections.abc import Sequence
from dataclasses import fields
from math import isfinite
from typing import Any, Final

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from esper.contracts.actions import HEADS, RELEVANT, ActionSpec
from esper.contracts.stages import Stage
from esper.contracts.world import HostStates, Observation
from esper.runs.store import MAX_TEXT

HOST_FIELDS: Final = tuple(field.name for field in fields(HostStates))
SEED_FIELDS: Final = ("age", "alpha", "alpha_target", "parameters", "units")
PRICES: Final = ("parameters", "macs")
USED: Final = RELEVANT.tolist()


def features_json(
    seen: Observation, spec: ActionSpec, slots: Sequence[int]
) -> list[str]:
    """What a controller sees in each environment; `slots` numbers the columns."""
    host = _columns(seen.host, HOST_FIELDS)
    seeds = _columns(seen.slots, (*SEED_FIELDS, "stage", "blueprint"))
    offers = _columns(seen.offers, ("fits", "parameters", "macs"))
    names = [blueprint.name for blueprint in spec.blueprints]
    texts = []
    for env in range(len(host["score"])):
        found: dict[str, Any] = {
            "host": {name: _short(host[name][env]) for name in HOST_FIELDS},
            "seeds": [
                {
                    "slot": slots[at],
                    "stage": Stage(stage).name,
                    "blueprint": names[seeds["blueprint"][env][at]],
                    **{name: _short(seeds[name][env][at]) for name in SEED_FIELDS},
                }
                for at, stage in enumerate(seeds["stage"][env])
                if stage != Stage.DORMANT
            ],
            "offers": {
                slots[at]: {
                    name: [_short(offers[kind][env][at][n]) for kind in PRICES]
                    for n, name in enumerate(names)
                    if fits[n]
                }
                for at, fits in enumerate(offers["fits"][env])
                if any(fits)
            },
        }
        text = _json(found)
        for name in ("offers", "seeds"):  # of very large hosts
            if len(text) > MAX_TEXT:
                text = _json(found := found | {name: None})
        texts.append(text)
    return texts


def heads_json(
    actions: Int64[Tensor, "env head"],
    legal: Bool[Tensor, "env head choice"],
    log_probs: Float[Tensor, "env head choice"] | None,
    spec: ActionSpec,
    slots: Sequence[int],
) -> list[str]:
    """Choices and probabilities of the heads that each action uses.

    Args:
        actions: What was chosen.
        legal: Legal choices of each head, given the choices of the heads before it.
        log_probs: Of all choices; None if the controller has none.
        spec: The action space.
        slots: Numbers of the slots.
    """
    names: dict[str, Sequence[Any]] = {head.name: [*head.choices] for head in HEADS}
    names |= {
        "slot": [*map(str, slots)],
        "blueprint": [each.name for each in spec.blueprints],
    }
    rows = legal.tolist()
    chances = None if log_probs is None else log_probs.exp().tolist()
    texts = []
    for env, action in enumerate(actions.tolist()):
        texts.append(
            _json(
                {
                    head.name: {
                        "chosen": names[head.name][action[n]],
                        "legal": {
                            name: None
                            if chances is None
                            else _short(chances[env][n][c])
                            for c, name in enumerate(names[head.name])
                            if rows[env][n][c]
                        },
                    }
                    for n, head in enumerate(HEADS)
                    if USED[action[0]][n]
                }
            )
        )
    return texts


def _columns(record: object, names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: getattr(record, name).tolist() for name in names}


def _short(number: float) -> float | None:
    """Three significant digits."""
    if isinstance(number, int):
        return number
    return float(f"{number:.3g}") if isfinite(number) else None


def _json(found: object) -> str:
    return json.dumps(found, separators=(",", ":"), allow_nan=False)
