"""Controllers that a run has learned: loading them, and exporting them for a package.

    controller = load_controller("runs/quiet-fern")
    esper.Grower(model, optimizer, controller=controller, ...)

No weight of a policy depends on the number of slots or blueprints, so a loaded one fits
every action space. Numbers are read from a checkpoint that verifies; nothing is
executed. An exported controller is two files:

    tamiyo.safetensors   the policy of the best checkpoint
    manifest.json        its sizes, the blueprints it knows, how it was trained

The manifest comes last and holds the digest of the numbers, so two that do not belong
together are refused when read.
"""

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.contracts.messages import quoted, short
from esper.contracts.state import Tensors, leaves, load
from esper.contracts.world import Controller
from esper.files import Disk, pack, publish, storage
from esper.runs.checkpoint import CheckpointFolder, Loaded
from esper.runs.database import open_store
from esper.runs.records import TEST
from esper.runs.run import CHECKPOINTS, CONFIG, STORE, TRAINING, Run, find_run
from esper.runs.settings import as_toml
from esper.runs.train_config import from_toml
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tamiyo.policy.sampling import with_temperature
from esper.tamiyo.restricted import Restricted
from esper.tamiyo.shipped import (
    FORMAT,
    MANIFEST,
    WEIGHTS,
    read,
    weightless_policy,
)

POLICY: Final = "agent/policy/"
"""What the names of a policy's numbers begin with in a checkpoint."""
RECORDED: Final = (
    *("began", "commit", "esper", "python", "torch", "numpy", "numba", "machine"),
)
"""Versions that an exported manifest repeats, if the run has them."""


@dataclass(frozen=True, slots=True)
class Learned:
    """A trained policy, which becomes a controller of an action space."""

    name: str
    config: PolicyConfig
    weights: Tensors = field(repr=False)
    round: int = 0
    """Of the run, in which it was as it is."""
    actions: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Its action space in training; see `ActionSpec.describe`."""

    def __call__(self, spec: ActionSpec) -> Controller:
        """A controller of this action space, of lower temperature than in training.

        It chooses among the actions that it was trained with, if they are known.
        """

        def make(known: ActionSpec) -> Controller:
            return with_temperature(self.policy(known))

        if not self.actions:
            return make(spec)
        names, choices = self.actions["blueprints"], self.actions["heads"]
        return Restricted(make, spec, names, choices)

    def policy(self, spec: ActionSpec) -> TamiyoPolicy:
        """The policy itself."""
        with torch.random.fork_rng(devices=[]):  # first weights are drawn, and lost
            policy = TamiyoPolicy(spec, self.config)
        load(policy, self.weights)
        return policy


def find_controller(text: str, root: Path) -> Learned:
    """The controller that a run has learned.

    Args:
        text: The name of a run in `root`, its folder, the file of a checkpoint, or
            the folder of an exported controller.
        root: Where runs are.
    """
    # False of what cannot be looked at.
    if os.path.isfile(text) or _is_exported(text):
        return load_controller(text)
    return load_controller(find_run(text, root))


def load_controller(path: Path | str) -> Learned:
    """The controller of a run: its best checkpoint, or the one that is named.

    Args:
        path: A run's folder, the file of one of its checkpoints, or a folder that
            `export_controller` wrote.
    """
    folder = Path(path)
    if _is_exported(folder):
        return _exported(folder)
    one = folder.parent.name == CHECKPOINTS and folder.is_file()
    run = Run.read(folder.parent.parent if one else folder)
    if run.kind != TRAINING:
        raise InvalidInputError(
            f"run {run.name} has no trained controller; see esper runs."
        )
    checkpoints = run.checkpoints()
    config = from_toml(run.config_toml).learner.policy
    like = policy_shapes(config)
    if one:
        found = checkpoints.load(folder, like, POLICY)
    else:
        found = _best(checkpoints, folder, like)
    weights = {
        name.removeprefix(POLICY): tensor
        for name, tensor in found.tensors.items()
        if name.startswith(POLICY)
    }
    name = f"{run.name}@{folder.stem}" if one else run.name
    actions = found.manifest.facts.get("actions", {})
    return Learned(name, config, weights, found.manifest.step, actions)


def _exported(folder: Path) -> Learned:
    found, name = read(folder), folder.resolve().name
    actions = {"blueprints": sorted(found.blueprints), "heads": found.choices}
    round_ = found.training.get("round")
    round_ = round_ if isinstance(round_, int) else 0
    return Learned(name, found.config, found.weights, round_, actions)


def _is_exported(path: Path | str) -> bool:
    """Whether a folder holds an exported controller, not a run."""
    there = [os.path.isfile(os.path.join(path, name)) for name in (MANIFEST, CONFIG)]
    return there == [True, False]


def policy_shapes(config: PolicyConfig) -> Tensors:
    """The tensors of such a policy, by their names in a checkpoint."""
    return leaves(weightless_policy(config), POLICY.rstrip("/"))


def _best(checkpoints: CheckpointFolder, folder: Path, like: Tensors) -> Loaded:
    found = checkpoints.best(like, POLICY)
    if found is None:
        raise InvalidInputError(
            f"{short(folder)} has no checkpoint yet; let it train first."
        )
    if found.rejected:
        text = f"{found.rejected[0]} Round {found.manifest.step} is used instead."
        warnings.warn(text, EsperWarning, stacklevel=3)
    return found


def newest_controller(root: Path) -> Learned:
    """The controller of the last completed run of a folder."""
    paths = [root / each.name for each in Run.list(root) if each.state == "finished"]
    ended = [
        (str(Run.read(path).versions.get("began", "")), path)
        for path in paths
        if Run.read(path).kind == TRAINING
        and (path / CHECKPOINTS).is_dir()
        and any((path / CHECKPOINTS).iterdir())
    ]
    if not ended:
        raise InvalidInputError(
            f"no finished training in {short(root)}; run esper train first."
        )
    return load_controller(max(ended)[1])


def export_controller(
    path: Path,
    folder: Path,
    *,
    figures: Mapping[str, Any] | None = None,
    disk: Disk | None = None,
) -> None:
    """Write the controller of a finished run, and read it again.

    Args:
        path: The folder of the run.
        folder: Where to; it is made if its parent is there.
        figures: Results of the controller, as JSON can hold it; None: what the run
            was judged by at its end.
        disk: What writes.
    """
    run, disk = Run.read(path), disk or Disk()
    if run.finished is None:
        raise InvalidInputError(f"run {run.name} is not finished; resume it first.")
    learned = load_controller(path)
    data = pack({name: part.float() for name, part in learned.weights.items()})
    manifest = {
        "format": FORMAT,
        "policy": asdict(learned.config),
        "sha256": sha256(data).hexdigest(),
        "blueprints": _blueprints(learned),
        "choices": dict(learned.actions["heads"]),
        "training": _training(run, learned),
        "figures": dict(_judged(run) if figures is None else figures),
    }
    text = json.dumps(manifest, allow_nan=False, indent=1, sort_keys=True) + "\n"
    with storage(folder, "make"):
        if not folder.is_dir():
            disk.mkdir(folder)
    publish(disk, folder / WEIGHTS, data)
    publish(disk, folder / MANIFEST, text.encode())
    read(folder)(ActionSpec())


def _blueprints(learned: Learned) -> list[str]:
    """Names of the blueprints of its action space."""
    table = {each.name for each in BLUEPRINTS}
    names = learned.actions.get("blueprints", ())
    if not names:
        raise InvalidInputError(
            f"{learned.name} has no list of blueprints; train it again."
        )
    if strange := [name for name in names if name not in table]:
        raise InvalidInputError(
            f"{learned.name} uses blueprint {quoted(strange[0])}, which is not built "
            "in. Train without it."
        )
    return [*names]


def _judged(run: Run) -> dict[str, Any]:
    """Means over the hosts that a run was judged on, by task and controller."""
    if not (run.path / STORE).exists():
        return {}
    query = (
        'SELECT task, controller, count(*), avg("return"), avg(test), avg(added) '
        "FROM live_evaluations WHERE stage = ? GROUP BY task, controller"
    )
    names = ("hosts", "return", "test", "added")
    found: dict[str, Any] = {}
    with closing(open_store(run.path / STORE, run.id)) as db:
        for task, controller, *figures in db.execute(query, [TEST]):
            own = dict(zip(names, figures, strict=True))
            found.setdefault(task, {})[controller] = own
    return found


def _training(run: Run, learned: Learned) -> dict[str, Any]:
    """How it was trained."""
    config, finished = from_toml(run.config_toml), run.finished or {}
    return {
        "run": short(Path(run.name)),
        "tasks": [*config.tasks],
        "rng_seed": config.rng_seed,
        "round": learned.round,
        "rounds": finished.get("rounds"),
        "env_steps": finished.get("env_steps"),
        "recorded_steps": finished.get("recorded_steps"),
        "hours": round(run.seconds / 3600, 3),
        # Paths of this machine mean nothing elsewhere.
        "config": as_toml(replace(config, name=None, runs="runs")),
        "versions": {
            name: run.versions[name] for name in RECORDED if name in run.versions
        },
    }
