"""A surer policy: the same scores, divided; the original is left alone."""

import torch
from torch.testing import assert_close

from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tamiyo.policy.sampling import with_temperature
from esper.testing.simulated import SimulatedWorld


def test_every_head_is_as_much_surer_as_its_temperature_says():
    world = SimulatedWorld(32, 0)
    torch.manual_seed(0)
    policy = TamiyoPolicy(world.spec)
    with torch.no_grad():  # a new policy is even, which no temperature changes
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    seen = world.reset()
    features = compute_features(seen, world.spec)
    masks = compute_masks(seen, world.spec)
    state = policy.initial_state(32)
    plain = policy.act(features, masks, seen.episode_start, state, None)
    sure = with_temperature(policy, 0.5).act(
        features, masks, seen.episode_start, state, None
    )
    assert torch.equal(plain.actions, sure.actions)
    rows = plain.masks & (plain.masks.sum(dim=-1, keepdim=True) > 1)
    expected = torch.where(rows, 2.0 * plain.distribution, -torch.inf).log_softmax(-1)
    assert rows.any()
    assert_close(sure.distribution[rows], expected[rows], rtol=1e-4, atol=1e-5)
    for name, value in policy.state_dict().items():
        assert torch.equal(value, before[name]), name
