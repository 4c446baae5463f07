"""What does a decision cost: masks, features, network, eight choices, for all at once?

Beside it the same network drawn in the usual way, one `Categorical` per head.
"""

import torch
from torch import Generator

from benchmarks.rollouts import SPEC, random_observation
from benchmarks.timing import Report, alternate, micro, sizes
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.policy.network import TamiyoPolicy
from tests.references.policy import act_with_categoricals


def run() -> Report:
    """One row per number of environments."""
    report = Report(
        "Acting, per step of all environments",
        (
            "envs",
            "ours µs",
            "Categoricals µs",
            "ratio to it",
            "masks + features µs",
            "decisions/s",
        ),
    )
    torch.manual_seed(0)
    policy = TamiyoPolicy(SPEC)
    for envs in sizes((4, 16, 128, 1024)):
        generator = Generator().manual_seed(0)
        observation = random_observation(envs, generator)
        features = compute_features(observation, SPEC)
        masks = compute_masks(observation, SPEC)
        state = policy.initial_state(envs)
        arguments = (features, masks, observation.episode_start, state, generator)
        sides = {
            "ours": lambda arguments=arguments: policy.act(*arguments),
            "naive": lambda arguments=arguments: act_with_categoricals(
                policy, *arguments
            ),
            "inputs": lambda observation=observation: (
                compute_features(observation, SPEC),
                compute_masks(observation, SPEC),
            ),
        }
        with torch.inference_mode():
            best = alternate(sides, seconds=0.6)
        report.add(
            envs,
            micro(best["ours"]),
            micro(best["naive"]),
            best["naive"] / best["ours"],
            micro(best["inputs"]),
            envs / (best["ours"] + best["inputs"]),
        )
    return report
