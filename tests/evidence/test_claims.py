"""Goals are reached, missed or open as the known truth has it."""

import pytest

from evidence.claims import best_schedule, claims, compare
from evidence.readout import Readout, Terms
from tests.evidence.drawn import RENTS, SETTINGS, SHARES, TASKS, rows

TERMS = {name: Terms(rent=r, budget=b) for name, (r, b) in SETTINGS.items()}
RESAMPLES = 300


def cells_of(found):
    return Readout(found, TERMS, RENTS).normalised()


def verdicts(found, tasks=TASKS):
    cells = cells_of(found)
    against = compare(cells, tasks, resamples=RESAMPLES)
    return {claim.short: claim.verdict for claim in claims(cells, tasks, against)}


def test_an_arm_that_is_better_by_far_reaches_every_goal():
    found = verdicts(rows({**SHARES, "static": 0.2, "static-macs": 0.2}))
    assert set(found.values()) == {"reached"}
    assert list(found) == [
        "above never",
        "above random",
        "above plateau",
        "above the best schedule",
        "above its replay",
        "not below static",
        "not below static-macs",
    ]


def test_an_arm_that_equals_all_others_is_above_none():
    found = verdicts(rows({arm: 0.0 for arm in SHARES}, noise=0.05))
    assert found.pop("not below static") == "reached"
    assert found.pop("not below static-macs") == "reached"
    assert set(found.values()) == {"not reached"}


def test_an_arm_that_is_worse_reaches_no_goal():
    found = verdicts(rows({**SHARES, "tamiyo": -0.2}))
    assert set(found.values()) == {"not reached"}


def test_one_task_on_which_it_is_not_ahead_misses_the_goal():
    found = rows({**SHARES, "plateau": 0.28})
    assert verdicts(found)["above plateau"] == "reached"
    for row in found:
        if row["arm"] == "plateau" and row["task"] == "text":
            row["test"] += 0.05
    assert verdicts(found)["above plateau"] == "not reached"
    assert verdicts(found)["above never"] == "reached"


def test_a_probability_of_improvement_just_above_a_half_is_not_enough():
    close = {**SHARES, "searched": 0.2995}
    assert verdicts(rows(close, noise=0.01))["above the best schedule"] != "reached"


def test_a_task_that_is_not_done_leaves_goals_open():
    found = rows(tasks=TASKS[:2])
    cells = cells_of(found)
    against = compare(cells, TASKS, resamples=RESAMPLES)
    rows_found = claims(cells, TASKS, against)
    assert {claim.verdict for claim in rows_found} == {"undecided"}
    assert all("2 of 3 tasks so far" in claim.figures for claim in rows_found)


def test_one_seed_leaves_goals_open():
    assert set(verdicts(rows(seeds=1)).values()) == {"undecided"}


def test_an_arm_that_was_not_run_leaves_its_goal_open():
    found = verdicts([row for row in rows() if row["arm"] != "replay"])
    assert found["above its replay"] == "undecided"
    assert found["above never"] == "reached"


def test_without_any_rows_every_goal_is_open():
    assert set(verdicts([]).values()) == {"undecided"}


def test_the_best_schedule_is_the_highest_on_the_tasks_that_all_have():
    assert best_schedule(cells_of(rows()), TASKS) == "searched"
    # early is high where nobody else was judged; that proves nothing.
    found = rows({**SHARES, "early": 0.19})
    partly = [row for row in found if row["arm"] == "early" or row["task"] != "text"]
    for row in partly:
        if row["arm"] == "early" and row["task"] == "text":
            row["test"] = 1.0
    assert best_schedule(cells_of(partly), TASKS) == "searched"
    assert best_schedule(cells_of([]), TASKS) is None


def test_differences_are_the_known_ones():
    against = compare(cells_of(rows()), TASKS, resamples=RESAMPLES)
    for arm, share in SHARES.items():
        if arm != "tamiyo":
            gap = against[arm].difference
            assert gap.estimate == pytest.approx(0.30 - share, abs=0.01)
            assert gap.low < gap.estimate < gap.high
    assert against["never"].improvement.estimate == 1.0
    assert against["never"].seeds == 24


def test_p_values_are_corrected_for_the_claims_about_a_task_only():
    against = compare(cells_of(rows()), TASKS, resamples=RESAMPLES)
    plain = 2.0 / 2**8  # eight pairs of one sign
    never = against["never"].tasks["letter"]
    assert never.p == pytest.approx(plain)
    # never, random, plateau, searched and replay are that far, and so is static
    assert 5 * plain <= never.adjusted <= 7 * plain
    assert against["early"].tasks["letter"].adjusted is None
    assert against["early"].tasks["letter"].p == pytest.approx(plain)


def test_a_replay_is_compared_with_the_member_that_it_follows():
    found = [r for r in rows() if (r["arm"], r["member"]) != ("tamiyo", 1)]
    found = [r for r in found if (r["arm"], r["member"]) != ("replay", 0)]
    for row in found:  # the only member in common
        if row["member"] == 2 and row["arm"] in ("tamiyo", "replay"):
            row["test"] = 0.5
    gap = compare(cells_of(found), TASKS, resamples=RESAMPLES)["replay"].difference
    assert (gap.estimate, gap.low, gap.high) == pytest.approx((0, 0, 0), abs=1e-12)
