"""Small checkpoints of every kind of number that occurs."""

import torch

from esper.experiment.checkpoint import CheckpointFolder
from tests.experiment.disks import CountingDisk

FACTS = {"config_sha256": "ab", "spec": {"slots": 3}}


def state(number):
    """A small state of every kind that occurs."""
    chance = torch.Generator().manual_seed(number)
    return {
        "policy/weight": torch.randn(5, 3, generator=chance),
        "world/rent": torch.randn(4, generator=chance, dtype=torch.float64),
        "world/clock": torch.randint(0, 99, (4,), generator=chance),
        "world/alive": torch.rand(4, generator=chance) > 0.5,
        "round": torch.tensor(number),
        "none": torch.zeros(0, 3),
        "chance": chance.get_state()[:64].clone(),
    }


def same(one, other):
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
        for name in one
    )


def folder(path, disk=None, **options):
    return CheckpointFolder(path / "checkpoints", disk or CountingDisk(), **options)


def filled(path, *steps, **options):
    made = folder(path, **options)
    for step in steps:
        made.publish(step, state(step), FACTS)
    return made
