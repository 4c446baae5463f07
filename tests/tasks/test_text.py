"""Python's help texts become ids, and windows come from where they say."""

import sys
from collections import Counter, defaultdict
from pydoc_data.topics import topics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator

from esper.contracts.errors import InvalidInputError
from esper.tasks.text import (
    ALPHABET,
    CHARACTER_CLASSES,
    CONTEXT,
    Text,
    characters,
    codes,
    common,
    encode,
    text,
    windows,
)


def decode(ids):
    """The characters of ids."""
    return "".join(ALPHABET[number] for number in ids.tolist())


def paragraphs(ids):
    return [" ".join(part.split()) for part in decode(ids).split("\n\n")]


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(characters):
    ids = encode(characters)
    assert ids.dtype == torch.int64
    assert decode(ids) == characters


def test_typographic_signs_become_plain_and_others_a_question_mark():
    assert "\n" + bytes(range(32, 127)).decode("ascii") == ALPHABET
    assert decode(encode("“it’s” – 20°…")) == '"it\'s" - 20?...'


def test_the_stretches_follow_one_another_and_leave_nothing_out():
    whole = text()
    joined = torch.cat(whole)
    assert len(whole.train) == round(0.6 * len(joined))
    assert len(whole.val) == pytest.approx(0.2 * len(joined), abs=1)
    source = encode("".join(topics[name] for name in sorted(topics)))
    assert decode(joined[:1000]) == decode(source[:1000])
    assert paragraphs(joined) == list(dict.fromkeys(paragraphs(source)))


def test_each_target_is_the_character_after_its_input():
    ids = torch.arange(1000)
    inputs, targets = windows(ids, count=50, length=8, generator=Generator())
    assert inputs.shape == targets.shape == (50, 8)
    assert targets.equal(inputs + 1)
    assert inputs.equal(inputs[:, :1] + torch.arange(8))


ALPHABETICAL = encode("".join(ALPHABET[1:60]))
STRETCHES = Text(ALPHABETICAL, ALPHABETICAL, ALPHABETICAL)


def test_missing_help_texts_are_named_in_one_line(monkeypatch):
    for name in ("pydoc_data", "pydoc_data.topics"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInputError, match="full standard library") as caught:
        text()
    assert "\n" not in str(caught.value)


# Characters as a table.


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
    often = sorted(count, key=lambda c: (-count[c], c))[: CHARACTER_CLASSES - 1]
    for part, stretch in zip(splits, map(decode, english), strict=True):
        after = defaultdict(set)
        for place in range(len(stretch) - CONTEXT):
            letter = stretch[place + CONTEXT]
            known = often.index(letter) if letter in often else CHARACTER_CLASSES - 1
            after[stretch[place : place + CONTEXT]].add(known)
        rows = zip(shown(part.features), part.labels.tolist(), strict=True)
        assert all(label in after[window] for window, label in rows)


def test_every_window_of_a_stretch_can_come_and_comes_once():
    places = len(ALPHABETICAL) - CONTEXT
    whole = decode(ALPHABETICAL)
    expected = {whole[place : place + CONTEXT] for place in range(places)}
    for part in characters(0, (places, places, places), source=STRETCHES):
        assert len(part) == places
        assert set(shown(part.features)) == expected


def test_the_commonest_character_is_class_0_and_rare_ones_share_the_last():
    classes = common(encode("aaab" + "c" * 9))
    assert classes[encode("c")] == 0
    assert classes[encode("ab")].tolist() == [1, 2]
    assert classes.bincount(minlength=32).tolist() == [1] * 31 + [96 - 31]


def test_every_character_has_a_code_of_its_own():
    assert codes().shape == (96, 7)
    assert len(codes().unique(dim=0)) == 96


def test_the_number_alone_decides_the_windows(english):
    def drawn(seed):
        chance = Generator().manual_seed(seed)
        cut, _ = windows(english.train, count=4, length=9, generator=chance)
        return [cut, characters(seed, (50, 50, 50), source=english).test.features]

    state = torch.get_rng_state()
    for first, again, other in zip(drawn(1), drawn(1), drawn(2), strict=True):
        assert first.equal(again)
        assert not first.equal(other)
    assert state.equal(torch.get_rng_state())
