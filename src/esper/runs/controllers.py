"""Load the controller that a run has trained, and export it as two files.

    controller = load_controller("runs/quiet-fern")
    esper.Grower(model, optimizer, controller=controller, ...)

No weight of a policy depends on the number of slots or blueprints, so a policy fits
every action space. Weights come from a checkpoint that verifies. An exported controller
is a folder of `esper.tamiyo.shipped`; its manifest, with the digest of the weights, is
written last.
"""

import json
import os
import warnings
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import EsperWarning, InvalidInputError
from esper.contracts.messages import quoted, short
from esper.contracts.state import Tensors, leaves
from esper.files import FORMAT, Disk, pack, publish, storage
from esper.runs.database import open_store
from esper.runs.records import TEST
from esper.runs.run import CHECKPOINTS, CONFIG, STORE, TRAINING, Run, find_run
from esper.runs.settings import as_toml
from esper.runs.train_config import TrainConfig, from_toml
from esper.tamiyo.policy.network import without_measurements
from esper.tamiyo.shipped import (
    MANIFEST,
    WEIGHTS,
    TrainedController,
    read,
    weightless_policy,
)

POLICY: Final = "algorithm/agent/policy/"
"""Prefix of the policy's tensors in a checkpoint."""
EXPORTED_VERSIONS: Final = (
    *("began", "commit", "esper", "python", "torch", "numpy", "numba", "machine"),
)
"""Versions of the run that an exported manifest repeats."""


def find_controller(text: str, root: Path) -> TrainedController:
    """The controller of a run in `root`, or the one at a path for `load_controller`."""
    if os.path.isfile(text) or _is_exported(text):
        return load_controller(text)
    return load_controller(find_run(text, root))


def load_controller(path: Path | str) -> TrainedController:
    """Load a trained controller; of a run, that of its best checkpoint.

    Args:
        path: A run's folder, the file of one of its checkpoints, or a folder that
            `export_controller` wrote.
    """
    folder = Path(path)
    if _is_exported(folder):
        return read(folder)
    is_checkpoint = folder.parent.name == CHECKPOINTS and folder.is_file()
    run = Run.read(folder.parent.parent if is_checkpoint else folder)
    if run.kind != TRAINING:
        raise InvalidInputError(
            f"run {run.name} has no trained controller; see esper runs."
        )
    settings = from_toml(run.config_toml)
    config, like = settings.learner.policy, policy_shapes(settings)
    name, checkpoints = run.name, run.checkpoints()
    if is_checkpoint:
        found = checkpoints.load(folder, like, POLICY)
        name += f"@{folder.stem}"
    elif (best := checkpoints.best(like, POLICY)) is not None:
        found = best
    else:
        raise InvalidInputError(
            f"{short(folder)} has no checkpoint yet; let it train first."
        )
    if found.rejected:
        text = f"{found.rejected[0]} Round {found.manifest.step} is used instead."
        warnings.warn(text, EsperWarning, stacklevel=2)
    weights = {n.removeprefix(POLICY): tensor for n, tensor in found.tensors.items()}
    actions = found.manifest.facts.get("actions", {})
    return TrainedController(
        name=name,
        config=config,
        weights=weights,
        round=found.manifest.step,
        blueprints=actions.get("blueprints"),
        choices=actions.get("heads", {}),
    )


def _is_exported(path: Path | str) -> bool:
    """Whether a folder holds an exported controller, not a run."""
    there = [os.path.isfile(os.path.join(path, name)) for name in (MANIFEST, CONFIG)]
    return there == [True, False]


def policy_shapes(config: TrainConfig) -> Tensors:
    """Tensors with the names and shapes of a policy in a checkpoint, without data."""
    policy = weightless_policy(config.learner.policy, measured=config.simulated)
    return leaves(policy, POLICY.rstrip("/"))


def newest_controller(root: Path) -> TrainedController:
    """The controller of the newest finished training in a folder of runs."""
    finished = [each.name for each in Run.list(root) if each.state == "finished"]
    ended = [
        (str(run.versions.get("began", "")), run.path)
        for run in (Run.read(root / name) for name in finished)
        if run.kind == TRAINING and run.checkpoints().steps()
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
    """Write the controller of a finished run to a folder, and verify it.

    The folder is created if its parent exists. `figures` are results as JSON values, by
    default those of the run's test hosts.
    """
    run, disk = Run.read(path), disk or Disk()
    if run.finished is None:
        raise InvalidInputError(f"run {run.name} is not finished; resume it first.")
    learned = load_controller(path)
    names = [*(learned.blueprints or ())]
    if strange := {*names} - {each.name for each in BLUEPRINTS}:
        raise InvalidInputError(
            f"{learned.name} uses blueprint {quoted(min(strange))}, which is not built "
            "in. Train without it."
        )
    weights = without_measurements(learned.weights)
    data = pack({name: part.float() for name, part in weights.items()})
    manifest = {
        "format": FORMAT,
        "policy": asdict(learned.config),
        "sha256": sha256(data).hexdigest(),
        "blueprints": names,
        "choices": dict(learned.choices),
        "training": _training(run, learned),
        "figures": dict(_test_results(run) if figures is None else figures),
    }
    text = json.dumps(manifest, allow_nan=False, indent=1, sort_keys=True) + "\n"
    with storage(folder, "make"):
        if not folder.is_dir():
            disk.mkdir(folder)
    publish(disk, folder / WEIGHTS, data)
    publish(disk, folder / MANIFEST, text.encode())
    read(folder)(ActionSpec())


def _test_results(run: Run) -> dict[str, Any]:
    """Means over the test hosts of a run, by task and controller."""
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


def _training(run: Run, learned: TrainedController) -> dict[str, Any]:
    """The entry `training` of a manifest."""
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
            name: run.versions[name]
            for name in EXPORTED_VERSIONS
            if name in run.versions
        },
    }
