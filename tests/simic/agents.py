"""Agents with something to learn from, and how to see whether anything changed."""

import torch

from esper.simic.agent.metrics import UpdateRecord
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from tests.rollouts import fill_ragged, make_buffer, make_policy


def agent_with_rollout(policy=None, *, envs=6, steps=12, acted=1.0, rng_seed=0, **ppo):
    """An agent whose buffer is full and ready for its first update."""
    policy = policy or make_policy(strength=0.5)
    agent = PPOAgent(
        policy,
        make_buffer(policy, envs, steps),
        PPOConfig(**({"minibatches": 2, "learning_rate": 1e-3} | ppo)),
    )
    fill_ragged(policy, agent.buffer, acted=acted, rng_seed=rng_seed)
    return agent


def snapshot(agent):
    """Everything a refused update must leave alone, copied."""
    optimizer = {
        f"{name}.{index}": value.clone()
        for index, p in enumerate(agent.parameters)
        for name, value in agent.optimizer.state[p].items()
    }
    statistics = {
        name: getattr(agent.moments, name) for name in ("weight", "mean", "variance")
    }
    weights = {name: x.clone() for name, x in agent.policy.state_dict().items()}
    return weights | optimizer | statistics


def unequal(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


def flat(record: UpdateRecord):
    """Every number of a record by its name."""
    numbers = {
        name: getattr(record, name) for name in record.__slots__ if name != "heads"
    }
    for head, one in record.heads.items():
        numbers |= {f"{head}.{name}": getattr(one, name) for name in one.__slots__}
    return numbers


def changed(before: UpdateRecord, after: UpdateRecord):
    """The numbers in which two records differ; a whole diff takes minutes."""
    old, new = flat(before), flat(after)
    return [name for name in old if repr(old[name]) != repr(new[name])]
