"""What do the features of all environments cost, against a loop over slots?

The twin visits every environment, slot and blueprint in plain Python, as reports of
single environments suggest, makes a small tensor of every row and stacks them; beside
it the same loop with lists that become tensors once. Ours is one pass over arrays.
"""

import torch

from benchmarks.rollouts import random_observation
from benchmarks.timing import Report, alternate, micro, sizes
from esper.contracts.actions import ActionSpec
from esper.tamiyo.policy.features import compute_features
from tests.references.features import listed_features, naive_features, reports_of

ENVS = (4, 16, 128, 1024)
SPEC = ActionSpec(measured=True)


def run() -> Report:
    """Time the features of growing batches."""
    report = Report(
        f"Features, {SPEC.slots.max_slots} slots, {len(SPEC.blueprints)} blueprints",
        ("envs", "naive µs", "lists µs", "ours µs", "ratio", "to lists", "growth"),
        notes=["Growth: our time against that of the smallest batch."],
    )
    smallest = None
    for envs in sizes(ENVS):
        generator = torch.Generator().manual_seed(envs)
        observation = random_observation(envs, generator, SPEC)
        reports = reports_of(observation)
        best = alternate(
            {
                "naive": lambda reports=reports: naive_features(reports),
                "lists": lambda reports=reports: listed_features(reports),
                "ours": lambda seen=observation: compute_features(seen, SPEC),
            },
            rounds=15,
        )
        smallest = smallest or best["ours"]
        report.add(
            envs,
            *(micro(best[side]) for side in ("naive", "lists", "ours")),
            best["naive"] / best["ours"],
            best["lists"] / best["ours"],
            best["ours"] / smallest,
        )
    return report
