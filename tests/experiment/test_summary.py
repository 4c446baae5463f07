"""A summary is made of rows alone, agrees with SciPy, and names its limits."""

import json
from math import isnan, nan

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from esper.contracts.errors import BadInput
from esper.experiment.summary import headline, print_summary, summarise
from tests.references import statistics as reference

RESAMPLES = 300

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
            "round": round,
            "stage": stage,
            "controller": name,
            "task": task,
            "host": host,
            "return": returns[host],
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


def summary_of(*args, **options):
    return summarise(rows_of(*args, **options), resamples=RESAMPLES)


def by_name(table):
    return {arm.name: arm for arm in table.arms}


def wilcoxon(name, other, column=0):
    gaps = np.subtract(RECORDED[name][column], RECORDED[other][column])
    return stats.wilcoxon(np.round(gaps, 6)).pvalue


@pytest.fixture(scope="module")
def two_tasks():
    return summarise([*rows_of(), *rows_of(task="digits")], resamples=RESAMPLES)


def test_figures_are_those_of_scipy_and_of_the_reference():
    (table,) = summary_of().tasks
    arms = by_name(table)
    others = [name for name in RECORDED if name != "never"]
    for column, figure in ((0, "above_never"), (1, "test_above_never")):
        base = RECORDED["never"][column]
        p_values = [wilcoxon(name, "never", column) for name in others]
        found = [getattr(arms[name], figure) for name in others]
        assert [row.p for row in found] == pytest.approx(p_values, rel=1e-9)
        assert [row.adjusted for row in found] == pytest.approx(
            reference.holm(p_values), rel=1e-9
        )
        for name, row in zip(others, found, strict=True):
            x = RECORDED[name][column]
            gap = stats.trim_mean(x, 0.25) - stats.trim_mean(base, 0.25)
            assert row.difference.estimate == pytest.approx(gap, abs=1e-12)
            wins = [reference.points_of(*pair) for pair in zip(x, base, strict=True)]
            assert row.improvement.estimate == pytest.approx(np.mean(wins))
    for name, (returns, test) in RECORDED.items():
        arm = arms[name]
        assert arm.returns.estimate == pytest.approx(stats.trim_mean(returns, 0.25))
        assert arm.test.estimate == pytest.approx(stats.trim_mean(test, 0.25))
        assert arm.returns.low < arm.returns.estimate < arm.returns.high
    assert arms["never"].above_never is None
    early = arms["early"]
    assert early.parameters == pytest.approx(1 + 0.5 * 4.5)
    costs = (early.macs, early.training_macs, early.seconds, early.panics)
    assert costs == (2, 1e9, 0.25, 1)
    assert (table.task, table.tasks, table.hosts) == ("letter", 1, 10)
    values = [arm.returns.estimate for arm in table.arms]
    assert values == sorted(values)


def test_a_learned_arm_is_compared_with_all_others():
    (table,) = summary_of().tasks
    never, *others = table.pairwise
    fern = by_name(table)["fern"]
    # One family with the baseline, and one of pairs that no other table has.
    assert (never.name, never.other) == ("fern", "never")
    assert (never.returns, never.test) == (fern.above_never, fern.test_above_never)
    assert [(pair.name, pair.other) for pair in others] == [
        ("fern", "early"),
        ("fern", "random"),
    ]
    p_values = [wilcoxon("fern", other) for other in ("early", "random")]
    assert [pair.returns.adjusted for pair in others] == pytest.approx(
        reference.holm(p_values)
    )
    assert all(pair.returns.shown for pair in table.pairwise)
    assert others[0].returns.improvement.estimate == 1.0


def test_all_tasks_together_hold_every_pair(two_tasks):
    whole = two_tasks.aggregate
    assert (whole.task, whole.tasks, whole.hosts) == ("digits, letter", 2, 10)
    row = by_name(whole)["early"].above_never
    twice = np.tile(np.subtract(RECORDED["early"][0], RECORDED["never"][0]), 2)
    assert row.p == pytest.approx(stats.wilcoxon(np.round(twice, 6)).pvalue)
    # One task, or tasks with other arms, are not added up.
    assert summary_of().aggregate is None
    fewer = {name: RECORDED[name] for name in ("never", "early")}
    uneven = summarise([*rows_of(), *rows_of(fewer, "digits")], resamples=RESAMPLES)
    assert uneven.aggregate is None
    assert len(uneven.tasks) == 2


def test_the_last_judgement_counts_in_whatever_order_its_rows_come():
    worse = {name: ([0.1] * 10, [0.1] * 10) for name in RECORDED}
    mixed = [
        *rows_of(worse, round=3),
        *rows_of(worse, round=9, stage="watched"),
        *rows_of(round=7)[::-1],
    ]
    assert summarise(mixed, resamples=RESAMPLES) == summary_of()
    empty = summarise([])
    assert (empty.tasks, empty.aggregate, empty.conclusions) == ((), None, ())


def test_conclusions_say_what_is_shown_and_what_is_not():
    summary = summary_of()
    lines = summary.conclusions
    (returns,) = [line for line in lines if line.startswith("Return on 10 unseen")]
    assert "shown above 'never': 'early' (+0.0183), 'fern' (+0.0700);" in returns
    # No difference beside what is not shown: it would be read as one.
    assert returns.endswith("not shown to differ from 'never': 'random' (p = 1).")
    (learned,) = [line for line in lines if line.startswith("Test score of 'fern'")]
    assert "shown above 'never' (+0.0" in learned
    assert "not shown to differ from 'early' (p = " in learned
    (line,) = headline(summary)
    assert line.startswith("Return of 'fern' on 10 unseen hosts of letter: 0.410 [")
    assert "shown above 'never' (+0.0700), 'early' (+0.0" in line
    without = {name: RECORDED[name] for name in ("never", "early", "random")}
    (line,) = headline(summary_of(without))
    assert line.startswith("Return on 10 unseen hosts of letter: shown above 'never'")


def test_conclusions_name_their_limits():
    text = " ".join(summary_of().conclusions)
    assert "10 hosts of each task; it says nothing about other tasks" in text
    assert "narrower than they should be" not in text
    assert "'fern': one training each" in text
    assert "learning rate" not in text
    few = " ".join(summary_of(hosts=4).conclusions)
    assert "intervals of so few are narrower than they should be" in few
    assert "4 hosts and 3 comparisons no adjusted p can be below 0.38" in few
    arms = {"never": RECORDED["never"], "early": RECORDED["early"]}
    arms["static"] = RECORDED["fern"]
    text = " ".join(summary_of(arms).conclusions)
    assert "'static': matched to what 'early' ended with" in text
    assert "the task's own learning rate, which was tuned for the plain host" in text


def test_arms_without_a_partner_have_figures_but_no_comparison():
    arms = {"early": RECORDED["early"], "random": RECORDED["random"]}
    without = summary_of(arms)
    assert all(arm.above_never is None for arm in without.tasks[0].arms)
    assert not any("never" in line for line in without.conclusions)
    # An evaluation that was interrupted: one arm has fewer hosts.
    rows = [row for row in rows_of() if row["controller"] != "early" or row["host"] < 7]
    (table,) = summarise(rows, resamples=RESAMPLES).tasks
    assert by_name(table)["early"].above_never is None
    assert by_name(table)["random"].above_never is not None


def test_one_host_has_no_interval_and_shows_nothing():
    found = summary_of(hosts=1)
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
    first, *others = rows_of()
    with pytest.raises(BadInput, match="finite"):
        summarise([{**first, "return": nan}, *others])


def test_tables_and_data_hold_the_figures_of_the_summary(two_tasks):
    console = Console(record=True, width=160)
    print_summary(console, two_tasks)
    text = console.export_text()
    assert "letter: 10 unseen hosts" in text
    assert ": 10 unseen hosts of each" in text
    early = by_name(two_tasks.tasks[1])["early"]
    assert f"{early.returns:.3f}" in text
    assert f"{early.above_never.difference:+.3f}" in text
    assert f"{early.above_never.adjusted:.2g}" in text
    assert f"{early.above_never.improvement:.2f}" in text
    assert "3.25 x" in text
    for line in two_tasks.conclusions:
        assert line in text.replace("\n", " ").replace("  ", " ") or line in text
    data = json.loads(json.dumps(two_tasks.as_data(), allow_nan=False))
    arm, same = data["tasks"][0]["arms"][-1], two_tasks.tasks[0].arms[-1]
    assert arm["name"] == same.name
    assert arm["above_never"]["adjusted"] == same.above_never.adjusted
    assert data["conclusions"] == list(two_tasks.conclusions)
