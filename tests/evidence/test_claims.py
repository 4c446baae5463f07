"""Goals are reached, missed or open as the known truth has it."""

import pytest

from evidence.claims import best_schedule, claims, compare
from evidence.readout import Readout, Terms
from tests.evidence.drawn import RENTS, SETTINGS, SHARES, TASKS, rows

TERMS = {name: Terms(rent=r, budget=b) for name, (r, b) in SETTINGS.items()}
RESAMPLES = 300


def cells_of(found):
    return Readout(found, TERMS, RENTS).normalised()


def judged(found):
    cells = cells_of(found)
    return claims(cells, TASKS, compare(cells, TASKS, resamples=RESAMPLES))


def verdicts(found):
    return {claim.short: claim.verdict for claim in judged(found)}


@pytest.mark.parametrize(
    ("found", "verdict", "others"),
    [
        (rows({**SHARES, "static": 0.2, "static-macs": 0.2}), "reached", {}),
        (rows({**SHARES, "tamiyo": -0.2}), "not reached", {}),
        (
            rows(dict.fromkeys(SHARES, 0.0), noise=0.05),
            "not reached",
            {"not below static": "reached", "not below static-macs": "reached"},
        ),
        (rows(seeds=1), "undecided", {}),
        ([], "undecided", {}),
    ],
    ids=["far above", "below", "equal to all", "one seed", "nothing"],
)
def test_verdicts_are_those_of_the_truth(found, verdict, others):
    names = ["never", "random", "plateau", "the best schedule", "its replay"]
    names = [f"above {name}" for name in names]
    names += ["not below static", "not below static-macs"]
    assert verdicts(found) == {**dict.fromkeys(names, verdict), **others}


def test_one_task_on_which_it_is_not_ahead_misses_the_goal():
    found = rows({**SHARES, "plateau": 0.28})
    assert verdicts(found)["above plateau"] == "reached"
    for row in found:
        if row["arm"] == "plateau" and row["task"] == "text":
            row["test"] += 0.05
    assert verdicts(found)["above plateau"] == "not reached"


def test_a_probability_of_improvement_just_above_a_half_is_not_enough():
    close = {**SHARES, "searched": 0.2995}
    assert verdicts(rows(close, noise=0.01))["above the best schedule"] != "reached"


def test_a_task_or_an_arm_that_is_not_done_leaves_goals_open():
    found = judged(rows(tasks=TASKS[:2]))
    assert {claim.verdict for claim in found} == {"undecided"}
    assert all("2 of 3 tasks so far" in claim.figures for claim in found)
    found = verdicts([row for row in rows() if row["arm"] != "replay"])
    assert found["above its replay"] == "undecided"
    assert found["above never"] == "reached"


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


def test_differences_are_the_known_ones_and_p_values_corrected_for_claims_only():
    against = compare(cells_of(rows()), TASKS, resamples=RESAMPLES)
    for arm, share in SHARES.items():
        if arm != "tamiyo":
            gap = against[arm].difference
            assert gap.estimate == pytest.approx(0.30 - share, abs=0.01)
            assert gap.low < gap.estimate < gap.high
    assert against["never"].improvement.estimate == 1.0
    assert against["never"].seeds == 24
    plain = 2.0 / 2**8  # eight pairs of one sign
    never, early = (against[arm].tasks["letter"] for arm in ("never", "early"))
    assert (never.p, early.p) == pytest.approx((plain, plain))
    # never, random, plateau, searched and replay are that far, and so is static
    assert 5 * plain <= never.adjusted <= 7 * plain
    assert early.adjusted is None


def test_a_replay_is_compared_with_the_member_that_it_follows():
    gone = (("tamiyo", 1), ("replay", 0))
    found = [row for row in rows() if (row["arm"], row["member"]) not in gone]
    for row in found:  # the only member in common
        if row["member"] == 2 and row["arm"] in ("tamiyo", "replay"):
            row["test"] = 0.5
    gap = compare(cells_of(found), TASKS, resamples=RESAMPLES)["replay"].difference
    assert (gap.estimate, gap.low, gap.high) == pytest.approx((0, 0, 0), abs=1e-12)
