"""Each row is a window of its own stretch, and its class the character that follows."""

from collections import Counter

import pytest
import torch

from esper.contracts.errors import BadInput
from esper.tasks.characters import CLASSES, CONTEXT, characters, codes, common
from esper.tasks.text import ALPHABET, Text, decode, encode, text


@pytest.fixture(scope="module")
def english():
    return text()


def shown(features):
    """The windows that rows of bits stand for."""
    bits = features.view(len(features), CONTEXT, 7) > 0
    numbers = (bits * 2 ** torch.arange(7)).sum(-1).tolist()
    return ["".join(map(chr, row)) for row in numbers]


def test_sizes_are_bounded(english):
    splits = characters(0, source=english)
    assert [len(part) for part in splits] == [40_000, 8_000, 8_000]
    assert all(part.features.shape[1:] == (84,) for part in splits)
    assert all(part.classes == 32 for part in splits)
    assert splits.train.features.abs().unique().tolist() == [1.0]


def test_rows_are_windows_of_their_stretch_with_the_character_after(english):
    splits = characters(3, (500, 200, 200), source=english)
    count = Counter(decode(english.train))
    often = sorted(count, key=lambda letter: (-count[letter], letter))[: CLASSES - 1]
    stretches = (english.train, english.decisions, english.test)
    for part, stretch in zip(splits, map(decode, stretches), strict=True):
        windows = {}
        for place in range(len(stretch) - CONTEXT):
            window = stretch[place : place + CONTEXT]
            windows.setdefault(window, set()).add(stretch[place + CONTEXT])
        for window, label in zip(
            shown(part.features), part.labels.tolist(), strict=True
        ):
            after = windows[window]
            known = {often.index(a) if a in often else CLASSES - 1 for a in after}
            assert label in known


def test_every_window_of_a_stretch_can_come_and_comes_once():
    ids = encode("".join(ALPHABET[1:60]))
    stretches = Text("alphabet", ALPHABET, ids, ids, ids)
    places = len(ids) - CONTEXT
    splits = characters(0, (places, places, places), source=stretches)
    whole = decode(ids)
    expected = {whole[place : place + CONTEXT] for place in range(places)}
    for part in splits:
        assert len(part) == places
        assert set(shown(part.features)) == expected


def test_the_commonest_character_is_class_0_and_rare_ones_share_the_last():
    classes = common(encode("aaab" + "c" * 9))
    assert classes[encode("c")] == 0
    assert classes[encode("ab")].tolist() == [1, 2]
    assert classes.bincount(minlength=CLASSES).tolist() == [1] * 31 + [96 - 31]


def test_every_character_has_a_code_of_its_own():
    assert codes().shape == (96, 7)
    assert len(codes().unique(dim=0)) == 96


def test_the_number_alone_decides_the_windows(english):
    state = torch.get_rng_state()
    first, again, other = (
        characters(seed, (50, 50, 50), source=english).test.features
        for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)
    assert state.equal(torch.get_rng_state())


@pytest.mark.parametrize("count", [0, 48])
def test_a_stretch_must_have_that_many_windows(count):
    ids = encode("".join(ALPHABET[1:60]))
    stretches = Text("alphabet", ALPHABET, ids, ids, ids)
    with pytest.raises(BadInput, match=rf"in 1\.\.47, .* 59 characters; got {count}"):
        characters(0, (40, count, 40), source=stretches)
