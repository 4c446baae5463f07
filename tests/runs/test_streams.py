"""Random streams are the same for the same words and unrelated otherwise."""

import torch

from esper.runs.records import TEST, VALIDATION
from esper.runs.streams import STAGE_KEYS, stream, stream_seed


def draws(rng_seed, purpose):
    return torch.rand(8, generator=stream(rng_seed, purpose))


def test_the_same_words_give_the_same_stream():
    assert torch.equal(draws(3, "world"), draws(3, "world"))


def test_other_purposes_and_other_runs_give_other_streams():
    seeds = {
        stream_seed(rng_seed, purpose)
        for rng_seed in (0, 1, 2, 2**32 - 1)
        for purpose in ("world", "weights", "choices", "order")
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_large_run_numbers_are_not_cut_to_their_low_bits():
    assert not torch.equal(draws(0, "world"), draws(2**32, "world"))


def test_the_stages_keep_the_keys_of_published_results():
    assert (STAGE_KEYS[VALIDATION], STAGE_KEYS[TEST]) == ("watched", "judged")
