"""What a finished training learnt, as the two files that a package can carry.

    tamiyo.safetensors   the policy of the best checkpoint
    manifest.json        what it is, which blueprints it knows, how it was trained

Each file is there whole or as it was before. The manifest comes last and holds the
digest of the numbers, so two that do not belong together are refused when read.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import esper
from esper.contracts.actions import ActionSpec
from esper.contracts.blueprints import BLUEPRINTS, Blueprint
from esper.contracts.errors import BadInput
from esper.experiment.config import as_toml
from esper.experiment.learned import Learned, load_controller
from esper.experiment.run import Run
from esper.experiment.storage.disk import Disk, publish, said, short, storage
from esper.experiment.storage.tensor_file import pack
from esper.experiment.train import settings_of
from esper.tamiyo.shipped import FORMAT, MANIFEST, WEIGHTS, read

VERSIONS: Final = ("began", "esper", "python", "torch", "numpy", "numba", "machine")
"""What is told of those that a run was made with."""


def ship(
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
        figures: What the controller was worth, as JSON can hold it.
        disk: What writes.
    """
    run, disk = Run.read(path), disk or Disk()
    if run.finished is None:
        raise BadInput(f"run {run.name} is not finished; let it end first.")
    learned = load_controller(path)
    data = pack({name: part.float() for name, part in learned.weights.items()})
    manifest = {
        "format": FORMAT,
        "policy": asdict(learned.config),
        "sha256": sha256(data).hexdigest(),
        "blueprints": [
            {"name": each.name, "form": each.form.name, "size": each.size}
            for each in _blueprints(learned)
        ],
        "choices": dict(learned.actions["heads"]),
        "training": _training(run, learned),
        "figures": dict(figures or {}),
    }
    text = json.dumps(manifest, allow_nan=False, indent=1, sort_keys=True) + "\n"
    with storage(folder, "make"):
        if not folder.is_dir():
            disk.mkdir(folder)
    publish(disk, folder / WEIGHTS, data)
    publish(disk, folder / MANIFEST, text.encode())
    read(folder)(ActionSpec())


def _blueprints(learned: Learned) -> list[Blueprint]:
    """What it learnt to plant."""
    table = {each.name: each for each in BLUEPRINTS}
    names = learned.actions.get("blueprints", ())
    if not names:
        raise BadInput(f"{learned.name} does not say what it planted; train it anew.")
    if strange := [name for name in names if name not in table]:
        raise BadInput(
            f"{learned.name} knows {said(strange[0])}, which is not Esper's own; "
            "train without it."
        )
    return [table[name] for name in names]


def _training(run: Run, learned: Learned) -> dict[str, Any]:
    """How it was trained."""
    config, finished = settings_of(run), run.finished or {}
    return {
        "run": short(Path(run.name)),
        "tasks": [*config.tasks],
        "rng_seed": config.rng_seed,
        "round": learned.round,
        "rounds": finished.get("rounds"),
        "env_steps": finished.get("env_steps"),
        "imitation_steps": finished.get("imitation_steps"),
        "hours": round(run.seconds / 3600, 3),
        # Where it lay is nobody's business, and would not be there elsewhere.
        "config": as_toml(replace(config, name=None, runs="runs")),
        "versions": {name: run.versions.get(name) for name in VERSIONS},
        "shipped_from": commit_of(Path(esper.__file__).parents[2]),
    }


def commit_of(root: Path) -> str | None:
    """The commit of a source checkout; None if it is none, or cannot be told."""
    folder = root / ".git"
    try:
        head = (folder / "HEAD").read_text().strip()
        name = head.removeprefix("ref: ")
        if name == head:
            return head
        if (folder / name).is_file():
            return (folder / name).read_text().strip()
        lines = (folder / "packed-refs").read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return None
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
