import pytest
import torch
from torch import Generator
from torch.testing import assert_close

from esper.simic.agent.rollout_buffer import SequenceBatch
from tests.simic.steps import Steps, fields, make_buffer


def make_batch(envs: int = 5, steps: int = 3) -> SequenceBatch:
    """Values of environment `e` are 10 e + t."""
    buffer, source = make_buffer(envs, steps), Steps(envs)
    for t in range(steps):
        buffer.add(**source(values=10.0 * torch.arange(envs) + t))
    buffer.finish(torch.zeros(envs))
    buffer.compute_advantages_and_returns()
    return buffer.get_batched_sequences()


def names(batch: SequenceBatch) -> list[int]:
    return [int(value) // 10 for value in batch.values[:, 0]]


def test_fields_are_found_by_name():
    batch = make_batch()
    assert batch["valid_mask"] is batch.valid_mask
    assert batch["features"] is batch.features
    with pytest.raises(
        KeyError, match="no field 'valid'; there are features, episode_start"
    ):
        batch["valid"]


def test_a_batch_is_contiguous_though_storage_is_time_major():
    assert all(field.is_contiguous() for field in fields(make_batch()).values())


def test_rows_of_minibatches_are_whole_and_contiguous():
    batch = make_batch()
    chosen = [*batch.minibatches(2, Generator().manual_seed(1))][1]
    assert chosen.num_envs == 2
    whole = fields(batch)
    for name, part in fields(chosen).items():
        assert_close(part, whole[name][names(chosen)], rtol=0, atol=0)
        assert part.is_contiguous()


def test_single_steps_are_rows_of_their_own_without_memory():
    batch = make_batch()
    steps = batch.single_steps()
    whole = fields(batch)
    for name, rows in fields(steps).items():
        if name != "state":
            assert rows.shape[:2] == (15, 1)
            assert_close(rows.squeeze(1), whole[name].flatten(0, 1), rtol=0, atol=0)
    assert steps.state.shape == (15, *batch.state.shape[1:])
    parts = steps.minibatches(7, Generator().manual_seed(1))
    values = torch.cat([part.values.flatten() for part in parts])
    assert sorted(values.tolist()) == sorted(batch.values.flatten().tolist())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_minibatches_hold_every_environment_once_in_even_parts(count):
    parts = [*make_batch().minibatches(count, Generator().manual_seed(1))]
    sizes = [part.num_envs for part in parts]
    assert len(parts) == count
    assert max(sizes) - min(sizes) <= 1
    assert sorted(env for part in parts for env in names(part)) == [0, 1, 2, 3, 4]


def test_minibatches_depend_on_the_generator_alone():
    batch = make_batch(envs=20)

    def orders(rng_seed: int) -> list[list[int]]:
        generator = Generator().manual_seed(rng_seed)
        return [
            [env for part in batch.minibatches(4, generator) for env in names(part)]
            for _ in range(2)
        ]

    torch.manual_seed(1)
    first = orders(1)
    torch.manual_seed(2)
    assert first == orders(1)
    assert first != orders(2)
    assert first[0] != first[1]
    assert first[0] != sorted(first[0])
