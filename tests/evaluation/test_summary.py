"""A summary is made of rows alone, agrees with SciPy, and names its limits."""

import json
from math import isnan, nan
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import paired_wilcoxon
from esper.evaluation.summary import (
    headline,
    print_summary,
    summarise,
    validation_trend,
)
from esper.runs.records import iqm_return, mean_return
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


def rows_of(arms=RECORDED, task="letter", *, hosts=10, round=0, stage="test"):
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
    for column, figure in ((0, "returns"), (1, "test")):
        base = RECORDED["never"][column]
        p_values = [wilcoxon(name, "never", column) for name in others]
        found = [getattr(table.above_never(name), figure) for name in others]
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
        assert arm.mean.estimate == pytest.approx(np.mean(returns))
    assert table.above_never("never") is None
    early = arms["early"]
    assert early.parameters == pytest.approx(1 + 0.5 * 4.5)
    costs = (early.macs, early.training_macs, early.seconds, early.panics)
    assert costs == (2, 1e9, 0.25, 1)
    assert (table.task, table.tasks, table.hosts) == ("letter", 1, 10)
    values = [arm.returns.estimate for arm in table.arms]
    assert values == sorted(values)


def test_a_learned_arm_is_compared_with_all_others():
    (table,) = summary_of().tasks
    never, *others = [pair for pair in table.pairwise if pair.name == "fern"]
    # One family with the baseline, and one of pairs that no other table has.
    assert never == table.above_never("fern")
    assert [(pair.name, pair.other) for pair in others] == [
        ("fern", "early"),
        ("fern", "random"),
    ]
    p_values = [wilcoxon("fern", other) for other in ("early", "random")]
    assert [pair.returns.adjusted for pair in others] == pytest.approx(
        reference.holm(p_values)
    )
    assert {pair.returns.outcome for pair in (never, *others)} == {"above"}
    assert others[0].returns.improvement.estimate == 1.0


def test_two_learned_arms_are_one_comparison_which_both_show():
    returns, test = RECORDED["fern"]
    second = tuple(np.asarray(returns) - 0.01 * np.arange(len(returns)))
    (table,) = summary_of({**RECORDED, "moss": (second, test)}).tasks
    pairs = {(pair.name, pair.other): pair.returns for pair in table.pairwise}
    one, other = pairs["fern", "moss"], pairs["moss", "fern"]
    assert (one.p, one.adjusted) == (other.p, other.adjusted)
    assert one.difference.low == -other.difference.high
    assert one.improvement.estimate == 1 - other.improvement.estimate
    tests = [(name, o) for name in ("fern", "moss") for o in ("early", "random")]
    tests.append(("fern", "moss"))
    corrected = reference.holm([pairs[pair].p for pair in tests])
    assert [pairs[pair].adjusted for pair in tests] == pytest.approx(corrected)


def test_all_tasks_together_hold_every_pair(two_tasks):
    whole = two_tasks.aggregate
    assert (whole.task, whole.tasks, whole.hosts) == ("digits, letter", 2, 10)
    row = whole.above_never("early").returns
    twice = (np.tile(RECORDED[name][0], 2) for name in ("early", "never"))
    assert row.p == paired_wilcoxon(*twice)
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
        *rows_of(worse, round=9, stage="validation"),
        *rows_of(round=7)[::-1],
    ]
    assert summarise(mixed, resamples=RESAMPLES) == summary_of()
    empty = summarise([])
    assert (empty.tasks, empty.aggregate, empty.conclusions) == ((), None, ())


def test_one_ruined_host_counts_as_one_host_in_the_mean():
    returns = np.array([-40.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 3.0])
    arms = {"never": (0 * returns, 0 * returns), "early": (returns, returns)}
    (table,) = summarise(rows_of(arms, hosts=8), resamples=RESAMPLES).tasks
    (arm,) = (arm for arm in table.arms if arm.name == "early")
    assert arm.mean.estimate == pytest.approx((-1 + 6 * 0.1 + 1) / 8)
    assert arm.returns.estimate == pytest.approx(0.1)
    results = {name: SimpleNamespace(returns=own) for name, (own, _) in arms.items()}
    assert mean_return(results) == pytest.approx(0.6 / 8 / 2)
    assert iqm_return({"early": results["early"]}) == pytest.approx(0.1)


def test_what_training_changed_is_told_of_the_last_round_not_the_best():
    def validation(round, more):
        arms = {"Tamiyo": (np.arange(10) / 10 + more, np.zeros(10))}
        tasks = ("letter", "tiny")
        found = [rows_of(arms, t, round=round, stage="validation") for t in tasks]
        return [*found[0], *found[1]]

    start, best, last = validation(0, 0.0), validation(20, 0.5), validation(40, 0.25)
    assert validation_trend(start) is None
    assert validation_trend([*last, *best, *start, *rows_of(round=40)]) == (
        "On the validation hosts: +0.450 at round 0, +0.680 at round 40, by +0.230 "
        "[+0.207, +0.247] (95 % over hosts). Interquartile means: +0.450 and "
        "+0.700."
    )


def test_conclusions_say_what_intervals_say_and_nothing_else():
    summary = summary_of()
    (table,) = summary.tasks
    lines = summary.conclusions
    (returns,) = [line for line in lines if line.startswith("Return on 10 unseen")]
    above, unclear = returns.split("; ")
    assert ": above 'never': 'early' (+0.018 [+0.0" in above
    assert unclear.startswith("no clear difference from 'never': 'random' (+0.002 [-0.")
    for pair in table.pairwise:
        gap = pair.returns.difference
        text = f"{pair.name!r} ({gap:+.3f}, p = {pair.returns.adjusted:.2g})"
        if pair.other == "never":
            assert text in (above if gap.low > 0.0 else unclear)
    (line,) = headline(summary)
    assert line == "On 10 unseen hosts of letter, 'fern' is above all 3 other arms."
    close = RECORDED | {"early": RECORDED["fern"], "halving": RECORDED["fern"]}
    assert headline(summary_of(close)) == [
        "On 10 unseen hosts of letter, 'fern' is above 'never' and 'random' and shows "
        "no clear difference from 'early' and 'halving'."
    ]
    without = {name: RECORDED[name] for name in ("never", "early", "random")}
    assert headline(summary_of(without)) == [
        "On 10 unseen hosts of letter, 'early' has the highest return; clearly above "
        "'never': 'early'."
    ]


def test_conclusions_name_their_limits():
    text = " ".join(summary_of().conclusions)
    assert "10 hosts per task. The results do not cover other tasks" in text
    assert "too few for reliable intervals" not in text
    assert "'fern': one training each" in text
    assert "learning rate" not in text
    few = " ".join(summary_of(hosts=4).conclusions)
    assert "too few for reliable intervals" in few
    arms = {"never": RECORDED["never"], "early": RECORDED["early"]}
    arms["static"] = RECORDED["fern"]
    text = " ".join(summary_of(arms).conclusions)
    assert "'static': matched to the final size or compute of 'early'" in text
    assert (
        "All arms use the task's learning rate, which was tuned for the plain host"
        in text
    )


def test_arms_without_a_partner_have_figures_but_no_comparison():
    arms = {"early": RECORDED["early"], "random": RECORDED["random"]}
    without = summary_of(arms)
    assert without.tasks[0].pairwise == ()
    assert not any("never" in line for line in without.conclusions)
    # An evaluation that was interrupted: one arm has fewer hosts.
    rows = [row for row in rows_of() if row["controller"] != "early" or row["host"] < 7]
    (table,) = summarise(rows, resamples=RESAMPLES).tasks
    assert table.above_never("early") is None
    assert table.above_never("random") is not None


def test_one_host_has_no_interval_and_shows_nothing():
    found = summary_of(hosts=1)
    arm = by_name(found.tasks[0])["early"]
    assert arm.returns.estimate == 0.35
    assert isnan(arm.returns.low)
    assert found.tasks[0].pairwise == ()
    data = json.loads(json.dumps(found.as_data(), allow_nan=False))
    assert data["tasks"][0]["arms"][0]["returns"]["low"] is None
    console = Console(record=True, width=160)
    print_summary(console, found)
    assert "0.350 [" not in console.export_text()


def test_figures_that_are_no_numbers_are_refused():
    first, *others = rows_of()
    with pytest.raises(InvalidInputError, match="finite"):
        summarise([{**first, "return": nan}, *others])


def test_tables_and_data_hold_the_figures_of_the_summary(two_tasks):
    console = Console(record=True, width=160)
    print_summary(console, two_tasks)
    text = console.export_text()
    assert "letter: 10 unseen hosts" in text
    assert ": 10 unseen hosts of each" in text
    assert f"{by_name(two_tasks.tasks[1])['early'].returns:.3f}" in text
    above = two_tasks.tasks[1].above_never("early").returns
    assert f"{above.difference:+.3f}" in text
    assert f"{above.adjusted:.2g}" in text
    assert f"{above.improvement:.2f}" in text
    assert "3.25 x" in text
    for line in two_tasks.conclusions:
        assert line in text.replace("\n", " ").replace("  ", " ") or line in text
    data = json.loads(json.dumps(two_tasks.as_data(), allow_nan=False))
    pair, same = data["tasks"][0]["pairwise"][-1], two_tasks.tasks[0].pairwise[-1]
    assert (pair["name"], pair["other"]) == (same.name, same.other)
    assert pair["returns"]["adjusted"] == same.returns.adjusted
    assert data["conclusions"] == list(two_tasks.conclusions)
