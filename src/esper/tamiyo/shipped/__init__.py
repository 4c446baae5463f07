"""The trained controller that comes with the package.

    tamiyo.safetensors   the policy's weights, float32
    manifest.json        format, policy, SHA-256 of the weights; which blueprints and
                         choices it was trained with, how, and its results

Nothing in the files is executed. Checked are the digest, the name, dtype and shape of
every tensor, and that all of them are finite.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import BadInput
from esper.contracts.state import Tensors, load
from esper.contracts.world import Controller
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tamiyo.policy.sampling import with_temperature
from esper.tamiyo.restricted import Restricted

FORMAT: Final = 2
"""Version of the manifest."""
WEIGHTS: Final = "tamiyo.safetensors"
MANIFEST: Final = "manifest.json"
MAX_BYTES: Final = 64 << 20
"""Limit of either file; ours are far smaller."""


@dataclass(frozen=True, slots=True)
class ShippedController:
    """A trained policy; called with an action space it gives a controller."""

    config: PolicyConfig
    blueprints: frozenset[str]
    """Blueprints that it was trained with."""
    choices: Mapping[str, tuple[str, ...]]
    """Of every head but slot and blueprint, what it was trained with."""
    training: Mapping[str, Any]
    """How it was trained."""
    figures: Mapping[str, Any]
    """Its results."""
    weights: Tensors = field(repr=False)
    name: str = "tamiyo"

    def __call__(self, spec: ActionSpec) -> Controller:
        """The controller for an action space, at `TEMPERATURE`."""
        return Restricted(
            lambda known: with_temperature(self.policy(known)),
            spec,
            self.blueprints,
            self.choices,
        )

    def policy(self, spec: ActionSpec) -> TamiyoPolicy:
        """The policy for an action space, as it was trained."""
        with torch.random.fork_rng(devices=[]):  # initial weights are unused
            policy = TamiyoPolicy(spec, self.config)
        load(policy, self.weights)
        return policy


@cache
def shipped() -> ShippedController:
    """The controller that comes with this package."""
    return read(files("esper.tamiyo.shipped"))


def read(folder: Traversable) -> ShippedController:
    """The controller in a folder, if its files are complete and unchanged."""
    manifest, weights = _content(folder, MANIFEST), _content(folder, WEIGHTS)
    try:
        body = json.loads(manifest)
        version = body["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _refusal(f"{MANIFEST} is damaged") from error
    if version != FORMAT:
        raise _refusal(f"{MANIFEST} has format {version!r:.20}, not {FORMAT}")
    try:
        digest = str(body["sha256"])
        found = ShippedController(
            config=PolicyConfig(**body["policy"]),
            blueprints=frozenset(body["blueprints"]),
            choices={name: tuple(known) for name, known in body["choices"].items()},
            training=dict(body["training"]),
            figures=dict(body["figures"]),
            weights={},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refusal(f"{MANIFEST} is damaged") from error
    if (actual := sha256(weights).hexdigest()) != digest:
        raise _refusal(
            f"{WEIGHTS} has SHA-256 {actual[:12]}… ({len(weights):,} bytes), not "
            f"{digest[:12]}…"
        )
    try:
        found.weights.update(load_bytes(weights))
        found.policy(ActionSpec())
    except (SafetensorError, BadInput) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise _refusal(f"{WEIGHTS} does not fit: {why:.99}") from error
    for name, values in found.weights.items():
        if not bool(values.isfinite().all()):
            raise _refusal(f"{name:.60} in {WEIGHTS} is not finite")
    return found


def _content(folder: Traversable, name: str) -> bytes:
    file = folder / name
    if not file.is_file():
        raise _refusal(f"{name} is missing")
    with file.open("rb") as stream:
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise _refusal(f"{name} has more than {MAX_BYTES:,} bytes")
    return data


def _refusal(why: str) -> BadInput:
    return BadInput(f"the shipped Tamiyo cannot be used: {why}; install esper again.")
