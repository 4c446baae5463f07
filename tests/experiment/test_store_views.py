"""The views of the event store, and the page about it."""

import re
from contextlib import closing
from pathlib import Path

import pytest

from esper.contracts.stages import Stage
from esper.experiment.database import TABLES, VIEWS, columns_of, open_store
from esper.experiment.store import Store
from tests.experiment.stores import (
    add_event,
    ask,
    fill,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "store.md"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.sqlite"


def test_the_learning_curve_has_one_row_for_each_round(path):
    fill(path)
    query = "SELECT round, mean_return, learning_rate, episodes FROM learning_curve"
    assert ask(path, query) == [(1, 0.1, 1e-3, 0), (2, 0.2, 1e-3, 1)]


def test_the_lives_of_seeds_join_end_to_end_over_attempts(path):
    fill(path)
    query = "SELECT slot, seed, stage, from_step, to_step FROM seed_lives"
    assert ask(path, query) == [
        (0, 1, "TRAINING", 1, 2),
        (0, 1, "BLENDING", 2, 4),
        (0, 1, "HOLDING", 4, 5),
        (0, 1, "FOSSILIZED", 5, 6),
        (1, 1, "TRAINING", 2, 6),
    ]


def test_a_slot_that_is_planted_again_has_another_seed(path):
    with Store(path) as store:
        store.begin_attempt()
        add_event(store, 1, "planted", Stage.DORMANT, Stage.TRAINING)
        add_event(store, 2, "pruned", Stage.TRAINING, Stage.DORMANT)
        add_event(store, 5, "planted", Stage.DORMANT, Stage.TRAINING)
    lives = "SELECT seed, stage, from_step, to_step FROM seed_lives"
    assert ask(path, lives) == [(1, "TRAINING", 1, 2), (2, "TRAINING", 5, None)]
    choices = "SELECT seed, step, blueprint, became FROM choices"
    assert ask(path, choices) == [(1, 1, "large", "pruned"), (2, 5, "large", "neither")]


def test_choices_say_what_became_of_each_seed(path):
    fill(path)
    query = "SELECT round, step, slot, blueprint, became FROM choices"
    assert ask(path, query) == [
        (1, 1, 0, "large", "kept"),
        (2, 2, 1, "large", "neither"),
    ]


def test_head_entropy_and_episode_ends_show_what_counts(path):
    fill(path)
    heads = ask(path, "SELECT round, head, entropy FROM head_entropy")
    assert len(heads) == 16
    assert heads[0] == (1, "op", 0.5)
    ends = ask(path, 'SELECT round, step, env, "return", how FROM episode_ends')
    assert ends == [(2, 6, 0, 0.5, "in time")]


def test_every_view_and_every_query_of_the_page_runs(path):
    fill(path)
    for name in VIEWS:
        assert ask(path, f"SELECT * FROM {name}"), name
    queries = re.findall(r"```sql\n(.*?)```", DOCS.read_text(), flags=re.DOTALL)
    assert len(queries) >= 3
    for query in queries:
        assert ask(path, query), query


def test_the_page_names_every_table_column_and_view(path):
    fill(path)
    text = DOCS.read_text()
    with closing(open_store(path)) as db:
        for table in (*TABLES, "attempts"):
            assert f"`{table}`" in text
            for column in columns_of(db, table):
                assert f"`{column}`" in text, (table, column)
    for view in VIEWS:
        assert f"`{view}`" in text
