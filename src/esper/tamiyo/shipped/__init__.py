"""Trained controllers, and the one that comes with the package.

    tamiyo.safetensors   the policy's weights, float32
    manifest.json        format, policy, SHA-256 of the weights; which blueprints and
                         choices it was trained with, how, and its results

`esper.files` reads them; the policy's sizes must be those of the tensors.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import InvalidInputError
from esper.contracts.messages import one_line, short
from esper.contracts.state import Tensors, check_fit, leaves, load
from esper.contracts.world import Controller
from esper.files import (
    read_bytes,
    read_json,
    read_safetensors,
    require_explained,
    require_readable,
)
from esper.tamiyo.policy.network import (
    PolicyConfig,
    TamiyoPolicy,
    without_measurements,
)
from esper.tamiyo.policy.sampling import with_temperature
from esper.tamiyo.restricted import Restricted

WEIGHTS: Final = "tamiyo.safetensors"
MANIFEST: Final = "manifest.json"
MAX_BYTES: Final = 64 << 20
"""Limit of the weights; ours are far smaller."""


@validated(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class ControllerManifest:
    """What `manifest.json` holds."""

    format: int
    sha256: str
    """Of the file of weights."""
    policy: PolicyConfig
    blueprints: list[str]
    choices: dict[str, list[str]]
    training: dict[str, Any]
    figures: dict[str, Any]


_MANIFEST: Final = TypeAdapter(ControllerManifest)


@dataclass(frozen=True, slots=True)
class TrainedController:
    """A trained policy. Call it with an action space to get a controller."""

    name: str
    config: PolicyConfig
    weights: Tensors = field(repr=False)
    round: int = 0
    """Training round of the weights; 0 if unknown."""
    blueprints: Collection[str] | None = None
    """Blueprints that it was trained with; None: it may choose any action."""
    choices: Mapping[str, Collection[str]] = field(default_factory=dict, repr=False)
    """Choices that it was trained with, for each head but slot and blueprint."""
    training: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """How it was trained."""
    figures: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Its results."""

    def __call__(self, spec: ActionSpec) -> Controller:
        """A controller for an action space, at `TEMPERATURE`.

        It chooses only among the actions that it was trained with.
        """
        if self.blueprints is None:
            return self._unrestricted(spec)
        return Restricted(self._unrestricted, spec, self.blueprints, self.choices)

    def _unrestricted(self, spec: ActionSpec) -> Controller:
        return with_temperature(self.policy(spec))

    def policy(self, spec: ActionSpec) -> TamiyoPolicy:
        """The policy for an action space, as it was trained."""
        with torch.random.fork_rng(devices=[]):  # initial weights are unused
            policy = TamiyoPolicy(spec, self.config)
        weights = self.weights if spec.measured else without_measurements(self.weights)
        load(policy, weights)
        return policy


@cache
def shipped() -> TrainedController:
    """The controller that comes with this package."""
    return replace(read(Path(__file__).parent), name="tamiyo")


def read(folder: Path) -> TrainedController:
    """The controller in a folder, if its files are complete and unchanged."""
    body, weights = read_json(folder / MANIFEST), folder / WEIGHTS
    name = short(folder)
    require_readable(name, body.get("format"), "Train and export it again.")
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
    tensors, _ = read_safetensors(weights, fit, sealed=False)
    round_ = about.training.get("round")
    return TrainedController(
        name=folder.resolve().name,
        config=config,
        weights=tensors,
        round=round_ if isinstance(round_, int) else 0,
        blueprints=about.blueprints,
        choices=about.choices,
        training=about.training,
        figures=about.figures,
    )


def _fit(config: PolicyConfig, tensors: Tensors, _: object) -> None:
    """Refuse tensors that are not those of a policy of these sizes."""
    sizes = {key: size for key, size in asdict(config).items() if type(size) is int}
    require_explained(sizes, tensors.values())
    check_fit(leaves(weightless_policy(config)), tensors)


def weightless_policy(config: PolicyConfig, *, measured: bool = False) -> TamiyoPolicy:
    """A policy whose tensors have shapes but take no memory; see `ActionSpec`."""
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        return TamiyoPolicy(ActionSpec(measured=measured), config)
