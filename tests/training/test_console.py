"""A run can be followed in a terminal and read in a log."""

import io
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from esper.runs.progress import Progress
from esper.runs.records import EvalResult
from esper.runs.train_config import TrainConfig, World
from esper.training.callbacks import ConsoleProgress, time_left
from tests.runs.stores import record


def evaluation():
    figures = np.array([0.25, 0.75])
    names = [each.name for each in fields(EvalResult) if each.name != "panicked"]
    return EvalResult(**dict.fromkeys(names, figures), panicked=figures > 1)


def printed(terminal, width=120, *, relative=False, **given):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=width)
    progress = ConsoleProgress(console, **given)
    config = TrainConfig(world=World(relative=relative))
    loop = SimpleNamespace(round=3, config=config, minutes=None)
    loop.algorithm = SimpleNamespace(relative=relative)
    progress.on_message("Training.")
    progress.on_progress("simulated world", 1, 2, "return +0.1")
    progress.on_evaluation(loop, {"letter": evaluation()})
    for number in range(1, 4):
        progress.on_round_end(loop, record(number, mean_score=0.5, added=1.5))
    progress.on_message("the disk is slow", warning=True)
    progress.on_close()
    return file.getvalue()


def test_a_log_has_plain_lines():
    text = printed(terminal=False)
    assert "\x1b" not in text
    for words in (
        "Training.",
        "simulated world: round 1/2, return +0.1",
        "round 3  validation hosts: return +0.5000",
        "round 1/10  return +0.1000  score 0.500  2.50 times as large",
        "warning: the disk is slow",
    ):
        assert words in text, words
    assert "entropy" not in text


def test_details_are_shown_to_who_asks_for_them():
    text = printed(terminal=False, width=200, details=True)
    for words in ("letter +0.5000 (score 0.500)", "kl 0.0100  entropy op", "steps/s"):
        assert words in text, words


def test_relative_returns_are_called_what_they_are():
    text = printed(terminal=False, relative=True)
    for words in (
        "validation hosts: +50.0% (IQM +50.0%) of the errors removed, net of rent",
        "round 1/10  +10.0% (IQM +nan%) of the errors removed, net of rent",
    ):
        assert words in text, words


@pytest.mark.parametrize("width", [1, 40, 120])
def test_a_terminal_of_any_width_shows_it(width):
    text = printed(terminal=True, width=width)
    if width == 120:
        for words in ("training", "3/10", "return", "validation", "left"):
            assert words in text, words


def test_the_headline_names_every_head_that_has_a_choice():
    line = record(2).headline(details=True)
    assert "entropy op 0.50 slot 0.50" in line
    assert "score" not in line


@pytest.mark.parametrize(
    ("minutes", "words"), [(None, "8 s"), (0.1, "4 s"), (1_000.0, "8 s")]
)
def test_the_time_left_is_that_of_what_ends_first(minutes, words):
    assert time_left(record(2), minutes) == words


def test_names_in_a_bar_are_shown_as_they_are_without_escapes():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Progress(console=console) as progress:
        progress.update("[/a]\x1b[2J", 1, 2, "[/b]\x07")
    assert "[/a]?[2J" in file.getvalue()
    assert "[/b]?" in file.getvalue()
