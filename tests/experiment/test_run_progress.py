"""A run can be watched in a terminal and read in a log."""

import io

import numpy as np
import pytest
from rich.console import Console

from esper.experiment.config import TrainConfig
from esper.experiment.judging import Judged
from esper.experiment.news import Progressed, Said, Watched
from esper.experiment.run_progress import RunProgress, headline, time_left
from tests.experiment.stores import record


def watched():
    figures = np.array([0.25, 0.75])
    names = [
        "returns",
        "score",
        "test",
        "area",
        "added",
        "macs",
        "training_macs",
        "seconds",
    ]
    judged = Judged(**dict.fromkeys(names, figures), panicked=figures > 1)
    return Watched(3, {"letter": judged})


def said(terminal, width=120):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width)
    with RunProgress(console) as progress:
        progress.begin(TrainConfig(rng_seed=7))
        progress.hear(Progressed("simulated world", 1, 2, "return +0.1"))
        progress.hear(watched())
        for number in range(1, 4):
            progress.show(record(number, mean_score=0.5, added=1.5))
        progress.hear(Said("the disk is slow", warning=True))
    return file.getvalue()


def test_a_log_has_plain_lines():
    text = said(terminal=False)
    assert "\x1b" not in text
    for words in (
        "Training on teacher, mnist1d, 16 environments each, rng_seed 7.",
        "simulated world 1/2  return +0.1",
        "round 3  watched: letter +0.5000 (score 0.500)",
        "round 1/10  return +0.1000  score 0.500  grown 1.50x  kl 0.0100",
        "warning: the disk is slow",
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [1, 40, 120])
def test_a_terminal_of_any_width_shows_it(width):
    text = said(terminal=True, width=width)
    if width == 120:
        for words in ("return", "score", "KL", "entropy", "watched", "left"):
            assert words in text, words


def test_the_headline_names_every_head_that_has_a_choice():
    line = headline(record(2))
    assert "entropy op 0.50 slot 0.50" in line
    assert "score" not in line


@pytest.mark.parametrize(
    ("minutes", "words"), [(None, "8 s"), (0.1, "4 s"), (1_000.0, "8 s")]
)
def test_the_time_left_is_that_of_what_ends_first(minutes, words):
    assert time_left(record(2), minutes) == words
