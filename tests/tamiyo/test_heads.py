"""What Tamiyo's heads may choose, given the heads before them."""

import pytest
import torch
from torch import Generator

from esper.contracts.actions import HEAD, NUM_HEADS, RELEVANT, Op
from esper.contracts.errors import InvalidInputError
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.heads import legal_rows, relevant, require_masks
from tests.device_reads import count_device_reads
from tests.rollouts import SPEC, random_observation

TABLES = ("op", "slot", "blueprint", "fixed")
WRONG = (torch.int64, torch.float32)


def random_masks(envs=5, density=0.6, rng_seed=0):
    generator = Generator().manual_seed(rng_seed)
    return compute_masks(
        random_observation(envs, SPEC, generator, density=density), SPEC
    )


def test_rows_are_conditional_on_the_heads_before_and_irrelevant_heads_are_forced():
    masks = random_masks(envs=40)
    generator = Generator().manual_seed(0)
    actions = torch.stack(
        [torch.randint(size, (40,), generator=generator) for size in SPEC.sizes], dim=1
    )
    rows = legal_rows(masks, actions)
    for env in range(40):
        op, slot = Op(int(actions[env, 0])), int(actions[env, 1])
        expected = torch.zeros(8, SPEC.width, dtype=torch.bool)
        expected[0, :6] = masks.op[env]
        for name, head in list(HEAD.items())[1:]:
            if not RELEVANT[op, head]:
                expected[head, 0] = True
            elif name == "slot":
                expected[head, :3] = masks.slot[env, op]
            elif name == "blueprint":
                expected[head, :7] = masks.blueprint[env, slot]
            else:
                expected[head] = SPEC.allowed[head]
        assert torch.equal(rows[env], expected)


def test_without_causality_heads_that_the_op_does_not_use_are_open():
    masks = random_masks(envs=3)
    waits = torch.zeros(3, 8, dtype=torch.int64)
    rows = legal_rows(masks, waits, causal=False)
    assert torch.equal(rows[:, 1:], SPEC.allowed[1:].expand(3, -1, -1))


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        *[("op", lambda x, to=kind: x.to(to), f".*, got {kind}") for kind in WRONG],
        *[(n, lambda x: x.to(torch.uint8), ".*, got torch.uint8") for n in TABLES],
        ("op", lambda x: x[:4], r".* \(5, 6\) .*got .* \(4, 6\)"),
        ("op", lambda x: x[:1], r".* \(5, 6\)"),
        ("slot", lambda x: x.transpose(1, 2), r".* \(5, 6, 3\)"),
        ("blueprint", lambda x: x[..., :1], r".* \(5, 3, 7\)"),
        ("fixed", lambda x: x[:1], r".* \(5, 8, 7\)"),
    ],
)
def test_masks_of_another_kind_are_refused_even_if_they_would_broadcast(
    name, spoil, message
):
    masks = random_masks()
    require_masks(masks, 5, SPEC)
    # Past the type checks of the test run.
    object.__setattr__(masks, name, spoil(getattr(masks, name)))
    with pytest.raises(InvalidInputError, match=f"mask '{name}' must be {message}"):
        require_masks(masks, 5, SPEC)


def test_relevance_is_a_copy_on_the_device_of_the_actions():
    actions = torch.zeros(len(Op), NUM_HEADS, dtype=torch.int64)
    actions[:, 0] = torch.arange(len(Op))
    assert torch.equal(relevant(actions), RELEVANT)
    assert count_device_reads(lambda: relevant(actions)) == 0
    relevant(actions).fill_(True)
    assert torch.equal(relevant(actions), RELEVANT)
    there = relevant(actions.to("meta"))
    assert (there.device.type, there.shape) == ("meta", (len(Op), NUM_HEADS))
