"""The letters in the package are the letters of the original."""

from esper.tasks.letter import letter


def test_the_values_are_those_of_the_original():
    assert letter().features.unique().tolist() == list(range(16))


def test_the_first_and_last_rows_are_those_of_the_original():
    data = letter()
    assert [chr(ord("A") + label) for label in data.labels[:3]] == ["T", "I", "D"]
    assert data.features[0].int().tolist() == [
        *(2, 8, 3, 5, 1, 8, 13, 0, 6, 6, 10, 8, 0, 8, 0, 8)
    ]
    assert chr(ord("A") + data.labels[-1]) == "A"
    assert data.features[-1].int().tolist() == [
        *(4, 9, 6, 6, 2, 9, 5, 3, 1, 8, 1, 8, 2, 7, 2, 8)
    ]


def test_every_letter_occurs_as_often_as_in_the_original():
    counts = letter().labels.bincount()
    assert counts.sum() == 20_000
    assert (counts.min(), counts.argmax(), counts.max()) == (734, ord("U") - 65, 813)
