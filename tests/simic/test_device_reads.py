"""An update asks the device once, at its end, however many steps it takes."""

import traceback
from dataclasses import replace

import pytest
import torch

from esper.contracts.devices import map_tensors
from esper.simic.agent import metrics
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from tests.device_reads import ReadCounter
from tests.rollouts import TINY, fill_ragged, make_buffer, make_policy, take


def reads_of(update):
    """What `update` reads from the device."""
    with ReadCounter() as counter:
        update()
    return counter.reads


@pytest.mark.parametrize(("epochs", "minibatches"), [(1, 1), (3, 2), (5, 4)])
@pytest.mark.parametrize("acted", [1.0, 0.6])
def test_an_update_reads_the_device_once_whatever_its_length(
    epochs, minibatches, acted
):
    policy = make_policy()
    buffer = make_buffer(policy, 4, 6)
    config = PPOConfig(epochs=epochs, minibatches=minibatches, learning_rate=1e-4)
    agent = PPOAgent(policy, buffer, config)
    fill_ragged(policy, buffer, acted=acted)
    record = []
    reads = reads_of(lambda: record.append(agent.update()))
    assert record[0].steps_taken == epochs * minibatches
    assert reads == ["_to_copy"]


def test_the_counter_notices_what_it_is_there_for():
    x = torch.ones(3)
    assert reads_of(lambda: x.sum().item()) == ["_local_scalar_dense"]
    assert reads_of(lambda: bool(x.any())) == ["_local_scalar_dense"]
    assert reads_of(lambda: x.nonzero()) == ["nonzero"]
    assert reads_of(lambda: torch.equal(x, x)) == ["equal"]
    assert reads_of(lambda: x.to("cpu", copy=True)) == ["_to_copy"]


def agent_without_data(memory: str, *, ragged: bool):
    """An agent on a device from which nothing can be read."""
    config = replace(TINY, memory=memory)
    policy = make_policy(config=config)
    here = make_buffer(policy, 4, 6)
    fill_ragged(policy, here)
    batch = take(here)
    policy = policy.to("meta")
    buffer = TamiyoRolloutBuffer(
        4, 6, policy.spec, state_shape=policy.state_shape, device="meta"
    )
    agent = PPOAgent(policy, buffer, PPOConfig(epochs=2, minibatches=2))
    acted = torch.ones(4, dtype=torch.bool, device="meta") if ragged else None
    for time in range(6):
        names = [
            "episode_start",
            "masks",
            "actions",
            "log_probs",
            "distribution",
            "values",
        ]
        step = {name: batch[name][:, time].to("meta") for name in names}
        seen = map_tensors(lambda x, at=time: x[:, at].to("meta"), batch.features)
        ended = torch.zeros(4, dtype=torch.bool, device="meta")
        buffer.add(
            features=seen,
            **step,
            rewards=step["values"],
            terminated=ended,
            truncated=ended,
            acted=acted,
        )
    buffer.finish(torch.zeros(4, device="meta"))
    return agent


@pytest.mark.parametrize(
    ("memory", "ragged"), [("mingru", False), ("mingru", True), ("lstm", False)]
)
def test_on_a_device_without_data_only_the_record_cannot_be_read(memory, ragged):
    """The meta device holds shapes and nothing else: any earlier read would raise.

    Filling the buffer, advantages, statistics, every step and the decisions of the
    guard all go through; what raises is the one copy that brings the record home.
    """
    agent = agent_without_data(memory, ragged=ragged)
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta") as caught:
        agent.update()
    frames = [
        frame
        for frame in traceback.extract_tb(caught.tb)
        if frame.filename.endswith(metrics.__file__.rsplit("/", 1)[-1])
    ]
    assert frames[-1].name == "read_record"
    assert "the one read of an update" in frames[-1].line
    assert agent.version == 0
