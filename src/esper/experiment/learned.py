"""A policy that a run has learnt, as a controller of any world.

    controller = load_controller("runs/quiet-fern")
    esper.Grower(model, optimizer, controller=controller, ...)

No weight of a policy knows how many slots or blueprints there are, so what is loaded
fits every action space. Numbers are read from a checkpoint that verifies; nothing is
executed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

from esper.contracts.actions import ActionSpec
from esper.contracts.controller import Controller
from esper.contracts.errors import BadInput
from esper.contracts.state import Tensors, load
from esper.experiment.checkpoint import MANIFEST, CheckpointFolder, Loaded
from esper.experiment.config import from_toml
from esper.experiment.lookup import find_run
from esper.experiment.run import CHECKPOINTS, Run
from esper.experiment.storage.disk import short
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tamiyo.policy.sampling import with_temperature

POLICY: Final = "agent/policy/"
"""What the names of a policy's numbers begin with in a checkpoint."""
MAY_BE_NAN: Final = ("*first_loss",)
"""Unknown before the first loss of an episode."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A trained policy, which becomes a controller once it is told what it may say."""

    name: str
    config: PolicyConfig
    weights: Tensors = field(repr=False)
    round: int = 0
    """Of the run, in which it was as it is."""
    actions: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """What it could say when it learnt; see `ActionSpec.describe`."""

    def __call__(self, spec: ActionSpec) -> Controller:
        """A controller of this action space, surer of itself than in training."""
        return with_temperature(self.policy(spec))

    def policy(self, spec: ActionSpec) -> TamiyoPolicy:
        """The policy itself."""
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and lost
            policy = TamiyoPolicy(spec, self.config)
        load(policy, self.weights)
        return policy


def find_controller(text: str, root: Path) -> Learned:
    """What a run has learnt.

    Args:
        text: The name of a run in `root`, its folder, or that of a checkpoint.
        root: Where runs are.
    """
    if os.path.isfile(Path(text) / MANIFEST):  # False of what cannot be looked at
        return load_controller(text)
    return load_controller(find_run(text, root))


def load_controller(path: Path | str) -> Learned:
    """What a run has learnt: its best checkpoint, or the one that is named.

    Args:
        path: A run's folder, or the folder of one of its checkpoints.
    """
    folder = Path(path)
    one = folder.parent.name == CHECKPOINTS and folder.parent.is_dir()
    run = Run.read(folder.parent.parent if one else folder)
    checkpoints = run.checkpoints(may_be_nan=MAY_BE_NAN)
    found = checkpoints.load(folder) if one else _best(checkpoints, folder)
    config = from_toml(run.config_toml).learner.policy
    weights = {
        name.removeprefix(POLICY): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(POLICY)
    }
    name = f"{run.name}@{folder.name}" if one else run.name
    actions = found.manifest.facts.get("actions", {})
    return Learned(name, config, weights, found.manifest.step, actions)


def _best(checkpoints: CheckpointFolder, folder: Path) -> Loaded:
    found = checkpoints.best() or checkpoints.latest()
    if found is None:
        raise BadInput(f"{short(folder)} has no checkpoint yet; let it train first.")
    return found


def newest_controller(root: Path) -> Learned:
    """What the last run of a folder that was completed has learnt."""
    paths = [root / each.name for each in Run.list(root) if each.state == "finished"]
    ended = [
        (str(Run.read(path).versions.get("began", "")), path)
        for path in paths
        if (path / CHECKPOINTS).is_dir() and any((path / CHECKPOINTS).iterdir())
    ]
    if not ended:
        raise BadInput(f"no finished training in {short(root)}; run esper train first.")
    return load_controller(max(ended)[1])
