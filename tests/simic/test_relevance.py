"""A head is relevant exactly where its op uses it."""

import torch
from torch.testing import assert_close

from esper.contracts.actions import HEAD_NAMES, NUM_HEADS, Op
from esper.simic.agent.distribution import relevant
from tests.device_reads import count_device_reads

USED_BY = {
    "WAIT": "op",
    "GERMINATE": "op slot blueprint style tempo alpha_target",
    "ADVANCE": "op slot",
    "SET_ALPHA": "op slot style alpha_target alpha_speed alpha_curve",
    "PRUNE": "op slot alpha_speed alpha_curve",
    "FOSSILIZE": "op slot",
}


def sentences(ops: torch.Tensor) -> torch.Tensor:
    """Sentences with given ops; the other choices are noise."""
    actions = torch.randint(0, 2, (*ops.shape, NUM_HEADS))
    actions[..., 0] = ops
    return actions


def test_each_op_hears_only_its_heads():
    actions = sentences(torch.arange(len(Op)))
    for op, row in zip(Op, relevant(actions).tolist(), strict=True):
        heard = {name for name, used in zip(HEAD_NAMES, row, strict=True) if used}
        assert heard == set(USED_BY[op.name].split())


def test_relevance_keeps_the_shape_of_a_rollout():
    ops = torch.randint(0, len(Op), (3, 5))
    used = relevant(sentences(ops))
    assert used.shape == (3, 5, NUM_HEADS)
    for env in range(3):
        for step in range(5):
            assert_close(used[env, step], relevant(sentences(ops[env, step])))


def test_relevance_stays_on_the_device_of_the_actions():
    actions = torch.zeros(2, NUM_HEADS, dtype=torch.int64, device="meta")
    assert relevant(actions).device.type == "meta"
    assert relevant(actions).shape == (2, NUM_HEADS)
    on_host = sentences(torch.arange(len(Op)))
    assert count_device_reads(lambda: relevant(on_host)) == 0


def test_writing_into_relevance_changes_no_later_answer():
    actions = sentences(torch.arange(len(Op)))
    expected = relevant(actions).clone()
    relevant(actions).fill_(True)
    assert_close(relevant(actions), expected)
