"""A summary is made of rows alone, agrees with SciPy, and names its limits."""

import json
from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from esper.contracts.errors import BadInput
from esper.experiment.statistics import iqm
from esper.experiment.summary import summarise
from esper.experiment.summary_tables import print_summary
from tests.references import statistics as reference

DRAWS = 300

# Returns and test scores of ten hosts, as a run stored them.
RECORDED = {
    "never": (
        [0.31, 0.36, 0.33, 0.35, 0.34, 0.33, 0.37, 0.32, 0.35, 0.34],
        [0.43, 0.45, 0.44, 0.46, 0.44, 0.43, 0.47, 0.42, 0.45, 0.44],
    ),
    "early": (
        [0.35, 0.38, 0.35, 0.34, 0.36, 0.36, 0.39, 0.33, 0.36, 0.37],
        [0.48, 0.49, 0.47, 0.49, 0.48, 0.46, 0.51, 0.45, 0.49, 0.47],
    ),
    "random": (
        [0.33, 0.32, 0.36, 0.34, 0.31, 0.36, 0.35, 0.33, 0.34, 0.36],
        [0.44, 0.43, 0.47, 0.45, 0.42, 0.46, 0.45, 0.43, 0.44, 0.46],
    ),
    "fern": (
        [0.40, 0.43, 0.39, 0.42, 0.41, 0.38, 0.44, 0.37, 0.41, 0.43],
        [0.48, 0.50, 0.47, 0.48, 0.49, 0.46, 0.50, 0.46, 0.48, 0.48],
    ),
}


def rows_of(arms=RECORDED, task="letter", *, hosts=10, round=0, stage="judged"):
    """Rows as the store gives them."""
    return [
        {
            "attempt": 1,
            "seq": 1,
            "round": round,
            "stage": stage,
            "controller": name,
            "task": task,
            "host": host,
            "return": returns[host],
            "score": 0.5,
            "test": test[host],
            "area": 0.4,
            "added": 0.5 * host,
            "macs": 2.0,
            "training_macs": 1e9,
            "seconds": 0.25,
            "panicked": int(host == 3),
        }
        for name, (returns, test) in arms.items()
        for host in range(hosts)
    ]


def by_name(table):
    return {arm.name: arm for arm in table.arms}


@pytest.fixture(scope="module")
def two_tasks():
    return summarise([*rows_of(), *rows_of(task="digits")], draws=DRAWS)


def test_figures_are_those_of_scipy_and_of_the_reference():
    (table,) = summarise(rows_of(), draws=DRAWS).tasks
    arms = by_name(table)
    others = [name for name in RECORDED if name != "never"]
    for column, figure in ((0, "above_never"), (1, "test_above_never")):
        base = RECORDED["never"][column]
        p_values = [
            stats.wilcoxon(
                np.round(np.subtract(RECORDED[name][column], base), 6)
            ).pvalue
            for name in others
        ]
        found = [getattr(arms[name], figure) for name in others]
        assert [row.p for row in found] == pytest.approx(p_values, rel=1e-9)
        assert [row.adjusted for row in found] == pytest.approx(
            reference.holm(p_values), rel=1e-9
        )
        for name, row in zip(others, found, strict=True):
            x = RECORDED[name][column]
            assert row.difference.estimate == pytest.approx(
                reference.interquartile_mean([x])
                - reference.interquartile_mean([base]),
                abs=1e-12,
            )
            assert row.improvement.estimate == pytest.approx(
                reference.probability_of_improvement([x], [base])
            )
    for name, (returns, test) in RECORDED.items():
        arm = arms[name]
        assert arm.returns.estimate == pytest.approx(
            stats.trim_mean(returns, 0.25), abs=1e-12
        )
        assert arm.test.estimate == pytest.approx(iqm(np.array(test)))
        assert arm.returns.low < arm.returns.estimate < arm.returns.high
    assert arms["never"].above_never is None
    assert arms["never"].test_above_never is None


def test_sizes_and_costs_are_means_over_hosts():
    (table,) = summarise(rows_of(), draws=DRAWS).tasks
    arm = by_name(table)["early"]
    assert arm.parameters == pytest.approx(1 + 0.5 * 4.5)
    assert (arm.macs, arm.training_macs, arm.seconds, arm.panics) == (2, 1e9, 0.25, 1)
    assert (table.task, table.tasks, table.hosts) == ("letter", 1, 10)


def test_the_lowest_return_comes_first():
    (table,) = summarise(rows_of(), draws=DRAWS).tasks
    assert [arm.name for arm in table.arms][-1] == "fern"
    values = [arm.returns.estimate for arm in table.arms]
    assert values == sorted(values)


def test_a_learned_arm_is_compared_with_everybody_else():
    (table,) = summarise(rows_of(), draws=DRAWS).tasks
    never, *others = table.duels
    assert (never.name, never.other) == ("fern", "never")
    assert [(duel.name, duel.other) for duel in others] == [
        ("fern", "early"),
        ("fern", "random"),
    ]
    p_values = [
        stats.wilcoxon(
            np.round(np.subtract(RECORDED["fern"][0], RECORDED[other][0]), 6)
        ).pvalue
        for other in ("early", "random")
    ]
    # A family of its own, of pairs that no other table has.
    assert [duel.returns.adjusted for duel in others] == pytest.approx(
        reference.holm(p_values)
    )
    assert all(duel.returns.shown for duel in table.duels)
    assert others[0].returns.ahead == 10


def test_what_is_said_against_never_is_said_once():
    (table,) = summarise(rows_of(), draws=DRAWS).tasks
    (duel,) = [duel for duel in table.duels if duel.other == "never"]
    fern = by_name(table)["fern"]
    assert duel.returns == fern.above_never
    assert duel.test == fern.test_above_never


def test_all_tasks_together_hold_every_pair(two_tasks):
    whole = two_tasks.aggregate
    assert (whole.task, whole.tasks, whole.hosts) == ("digits, letter", 2, 10)
    row = by_name(whole)["early"].above_never
    assert row.pairs == 20
    twice = np.tile(np.subtract(RECORDED["early"][0], RECORDED["never"][0]), 2)
    assert row.p == pytest.approx(stats.wilcoxon(np.round(twice, 6)).pvalue)


def test_one_task_or_tasks_with_other_arms_are_not_added_up():
    assert summarise(rows_of(), draws=DRAWS).aggregate is None
    fewer = {name: RECORDED[name] for name in ("never", "early")}
    uneven = [*rows_of(), *rows_of(fewer, "digits")]
    found = summarise(uneven, draws=DRAWS)
    assert found.aggregate is None
    assert len(found.tasks) == 2


def test_only_the_last_judgement_counts():
    worse = {name: ([0.1] * 10, [0.1] * 10) for name in RECORDED}
    mixed = [
        *rows_of(worse, round=3),
        *rows_of(worse, round=9, stage="watched"),
        *rows_of(round=7),
    ]
    assert summarise(mixed, draws=DRAWS) == summarise(rows_of(), draws=DRAWS)


def test_hosts_are_paired_by_number_in_whatever_order_they_come():
    assert summarise(rows_of()[::-1], draws=DRAWS) == summarise(rows_of(), draws=DRAWS)


def test_nothing_judged_is_nothing_said():
    found = summarise([])
    assert (found.tasks, found.aggregate, found.words) == ((), None, ())


def test_words_say_what_is_shown_and_what_is_not():
    words = summarise(rows_of()).words
    (returns,) = [line for line in words if line.startswith("letter, return: ")]
    assert "shown above 'never': 'early' (+0.0183), 'fern' (+0.0700)." in returns
    assert "This does not show a difference from 'never', nor that" in returns
    assert returns.index("This does not show") < returns.index("'random'")
    (learned,) = [line for line in words if "letter, test score of 'fern'" in line]
    assert "shown above 'never' (+0.0" in learned
    assert "This does not show that 'fern' differs from 'early'" in learned


def test_an_interval_that_holds_zero_is_never_called_shown():
    """Whatever the ranks say."""
    for name, row in by_name(summarise(rows_of()).tasks[0]).items():
        if name == "never":
            continue
        gap = row.above_never.difference
        if gap.low <= 0.0 <= gap.high:
            assert not row.above_never.shown
    small = {
        "never": ([0.5] * 10, [0.5] * 10),
        "early": ([0.5] * 6 + [0.51, 0.49, 0.51, 0.49], [0.5] * 10),
    }
    words = summarise(rows_of(small)).words
    assert not any("shown above" in line or "shown below" in line for line in words)
    assert sum("does not show" in line for line in words) == 2


def test_words_name_their_limits():
    said = " ".join(summarise(rows_of()).words)
    assert "10 hosts of each task; it says nothing about other tasks" in said
    assert "narrower than they should be" not in said
    assert "'fern': one training each" in said
    assert "learning rate" not in said
    few = " ".join(summarise(rows_of(hosts=4), draws=DRAWS).words)
    assert "intervals of so few are narrower than they should be" in few
    assert "4 hosts and 3 comparisons no adjusted p can be below 0.38" in few


def test_words_of_static_arms_name_the_reference_and_the_untuned_rate():
    arms = {"never": RECORDED["never"], "early": RECORDED["early"]}
    arms["static"] = RECORDED["fern"]
    said = " ".join(summarise(rows_of(arms), draws=DRAWS).words)
    assert "'static': measured by what 'early' ended with" in said
    assert "the task's own learning rate, which was tuned for the plain host" in said


def test_without_never_nobody_is_above_it():
    arms = {"early": RECORDED["early"], "random": RECORDED["random"]}
    found = summarise(rows_of(arms), draws=DRAWS)
    assert all(arm.above_never is None for arm in found.tasks[0].arms)
    assert not any("never" in line for line in found.words)


def test_arms_of_an_interrupted_evaluation_are_still_summarised():
    """One arm has fewer hosts: it has figures, but no pairs."""
    rows = [row for row in rows_of() if row["controller"] != "early" or row["host"] < 7]
    (table,) = summarise(rows, draws=DRAWS).tasks
    assert by_name(table)["early"].above_never is None
    assert by_name(table)["random"].above_never is not None


def test_one_host_has_no_interval_and_shows_nothing():
    found = summarise(rows_of(hosts=1))
    arm = by_name(found.tasks[0])["early"]
    assert arm.returns.estimate == 0.35
    assert isnan(arm.returns.low)
    assert arm.above_never is None
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert data["tasks"][0]["arms"][0]["returns"]["low"] is None
    console = Console(record=True, width=160)
    print_summary(console, found)
    assert "0.350 [" not in console.export_text()


def test_figures_that_are_no_numbers_are_refused():
    broken = replace_first(rows_of(), "return", nan)
    with pytest.raises(BadInput, match="finite"):
        summarise(broken)


def replace_first(rows, name, value):
    return [{**rows[0], name: value}, *rows[1:]]


def test_tables_hold_the_figures_of_the_summary(two_tasks):
    console = Console(record=True, width=160)
    print_summary(console, two_tasks)
    text = console.export_text()
    assert "letter: 10 unseen hosts" in text
    assert ": 10 unseen hosts of each" in text
    early = by_name(two_tasks.tasks[1])["early"]
    assert f"{early.returns:.3f}" in text
    assert f"{early.above_never.difference:+.3f}" in text
    assert f"{early.above_never.adjusted:.2g}" in text
    assert "3.25 x" in text
    assert "1.000" in text
    for line in two_tasks.words:
        assert line in text.replace("\n", " ").replace("  ", " ") or line in text


def test_data_are_the_summary(two_tasks):
    data = json.loads(json.dumps(two_tasks.as_data(), allow_nan=False))
    arm = data["tasks"][0]["arms"][-1]
    same = two_tasks.tasks[0].arms[-1]
    assert arm["name"] == same.name
    assert arm["above_never"]["adjusted"] == same.above_never.adjusted
    assert data["words"] == list(two_tasks.words)
    assert replace(same, name="x").learned
