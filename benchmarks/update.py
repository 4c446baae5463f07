"""What does one PPO epoch cost, what does memory add to it, and how often is it read?

Memory: our MinGRU against `nn.LSTM` in its best case (fused, no resets inside a row),
forward and backward, same width. Epoch: the whole policy with memory against the same
policy without. Reads: copies from device to host in one whole `PPOAgent.update()`.
"""

import torch
from torch import nn

from benchmarks.rollouts import SPEC, filled_buffer
from benchmarks.timing import Report, alternate, sizes
from esper.simic.agent.memory import MinGRU
from esper.simic.agent.ppo import Guard, PPOAgent, PPOConfig
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from tests.device_reads import count_device_reads


def run() -> Report:
    """Three questions, one table."""
    report = Report(
        "PPO update",
        ("what", "size", "ours", "beside it", "ratio", "unit"),
    )
    for envs, time, width in sizes(((16, 150, 128), (64, 128, 128), (4, 150, 512))):
        _memory_row(report, envs, time, width)
    for envs, steps in sizes(((8, 30), (4, 150), (16, 150))):
        _epoch_row(report, envs, steps)
        agent = _agent(envs, steps, "mingru")
        reads = count_device_reads(agent.update)
        size = f"{envs}×{steps}"
        report.add("device reads per update", size, reads, None, None, "reads")
    parameters = sum(p.numel() for p in TamiyoPolicy(SPEC).parameters())
    report.notes.append(
        f"policy: {parameters:,} parameters, 3 slots, 12 blueprints, 8 heads; an epoch "
        "is one pass over all sequences in one minibatch (forward, backward, Adam)"
    )
    return report


def _memory_row(report: Report, envs: int, time: int, width: int) -> None:
    inputs = torch.randn(envs, time, width, requires_grad=True)
    first = torch.rand(envs, time) < 0.05
    state = torch.zeros(envs, 1, width)
    ours, lstm = MinGRU(width), nn.LSTM(width, width, batch_first=True)

    def memory() -> None:
        ours(inputs, first, state)[0].sum().backward()

    def rival() -> None:
        lstm(inputs)[0].sum().backward()

    best = alternate({"ours": memory, "lstm": rival}, seconds=1.0)
    report.add(
        "memory: MinGRU | nn.LSTM",
        f"{envs}×{time}×{width}",
        best["ours"] * 1e3,
        best["lstm"] * 1e3,
        f"{best['lstm'] / best['ours']:.2f}× faster",
        "ms",
    )


def _agent(envs: int, steps: int, memory: str) -> PPOAgent:
    torch.manual_seed(0)
    policy = TamiyoPolicy(SPEC, PolicyConfig(memory=memory))
    config = PPOConfig(epochs=1, minibatches=1, target_kl=float("inf"))
    return PPOAgent(policy, filled_buffer(policy, envs, steps), config)


def _epoch_row(report: Report, envs: int, steps: int) -> None:
    sides = {}
    for name, memory in (("ours", "mingru"), ("without", "none")):
        agent = _agent(envs, steps, memory)
        sides[name] = _one_epoch(agent)
    best = alternate(sides, seconds=2.0)
    report.add(
        "epoch: with memory | without",
        f"{envs}×{steps}",
        best["ours"] * 1e3,
        best["without"] * 1e3,
        f"{best['ours'] / best['without']:.2f}× the time",
        "ms",
    )


def _one_epoch(agent: PPOAgent):  # noqa: ANN202
    agent.buffer.compute_advantages_and_returns()
    targets = agent._targets(agent.buffer.get_batched_sequences())
    guard = Guard(float("inf"), agent.device)
    return lambda: agent.step(targets, guard)
