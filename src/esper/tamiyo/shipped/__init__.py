"""The trained controller of the package.

tamiyo.safetensors   weights of the policy, float32
manifest.json        format, policy, SHA-256 of the weights, blueprints and choices
                     of the training, training settings and results
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import one_line, quoted, short
from esper.contracts.state import Tensors, check_fit, leaves, load
from esper.contracts.world import Controller
from esper.files import read_bytes, read_json, read_tensors, require_explained
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tamiyo.policy.sampling import with_temperature
from esper.tamiyo.restricted import Restricted

FORMAT: Final = 2
"""Version of the manifest."""
WEIGHTS: Final = "tamiyo.safetensors"
MANIFEST: Final = "manifest.json"
MAX_BYTES: Final = 64 << 20
"""Maximum size of the weights."""


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class ControllerManifest:
    """Content of `manifest.json`."""

    format: int
    sha256: str
    """SHA-256 of the weights."""
    policy: PolicyConfig
    blueprints: list[str]
    choices: dict[str, list[str]]
    training: dict[str, Any]
    figures: dict[str, Any]


_MANIFEST: Final = TypeAdapter(ControllerManifest)


@dataclass(frozen=True, slots=True)
class ShippedController:
    """A trained policy; called with an action space, it returns a controller."""

    config: PolicyConfig
    blueprints: frozenset[str]
    """Blueprints it was trained with."""
    choices: Mapping[str, tuple[str, ...]]
    """Choices it was trained with, for every head but slot and blueprint."""
    training: Mapping[str, Any]
    """Settings of the training."""
    figures: Mapping[str, Any]
    """Results of the evaluation."""
    weights: Tensors = field(repr=False)
    name: str = "tamiyo"

    def __call__(self, spec: ActionSpec) -> Controller:
        """Return the controller for an action space, at `TEMPERATURE`."""
        return Restricted(
            lambda known: with_temperature(self.policy(known)),
            spec,
            self.blueprints,
            self.choices,
        )

    def policy(self, spec: ActionSpec) -> TamiyoPolicy:
        """Return the policy for an action space."""
        with torch.random.fork_rng(devices=[]):  # initial weights are unused
            policy = TamiyoPolicy(spec, self.config)
        load(policy, self.weights)
        return policy


@cache
def shipped() -> ShippedController:
    """Return the trained controller of the package."""
    return read(Path(__file__).parent)


def read(folder: Path) -> ShippedController:
    """Load the controller in a folder; its files must be complete and unchanged."""
    body, weights = read_json(folder / MANIFEST), folder / WEIGHTS
    name = short(folder)
    if body.get("format") != FORMAT:
        raise InvalidInputError(
            f"{name} is a controller of format {quoted(body.get('format'))}, this "
            f"Esper reads {FORMAT}. Export it again."
        )
    try:
        about = _MANIFEST.validate_json(json.dumps(body), extra="forbid")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise InvalidInputError(
            one_line(f"{name}/{MANIFEST} is damaged: {where}: {first['msg']}.")
        ) from None
    data = read_bytes(weights, MAX_BYTES)
    if sha256(data).hexdigest() != about.sha256:
        raise InvalidInputError(
            f"{name} is damaged: {WEIGHTS} is not what was exported."
        )
    config = about.policy
    fit = partial(_fit, config)
    tensors, _ = read_tensors(short(weights), BytesIO(data), fit, sealed=False)
    return ShippedController(
        config=config,
        blueprints=frozenset(about.blueprints),
        choices={name: tuple(known) for name, known in about.choices.items()},
        training=about.training,
        figures=about.figures,
        weights=tensors,
    )


def _fit(config: PolicyConfig, tensors: Tensors, _: object) -> None:
    """Check that the tensors are those of a policy of these sizes."""
    sizes = {key: size for key, size in asdict(config).items() if type(size) is int}
    require_explained(sizes, tensors.values())
    check_fit(leaves(weightless_policy(config)), tensors)


def weightless_policy(config: PolicyConfig) -> TamiyoPolicy:
    """Return a policy on the meta device, which takes no memory."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return TamiyoPolicy(ActionSpec(), config)
