"""The study pairs its arms, tunes on what it does not count, and can be continued."""

from dataclasses import asdict, replace

import numpy as np
import pytest
import torch

from benchmarks.macs import mlp_macs
from benchmarks.training import Outcome, Run
from benchmarks.widening import as_data, run
from benchmarks.widening_study import (
    EARLY,
    NEVER,
    NEVER_MACS,
    PLAIN,
    SHAPED,
    STATIC,
    STATIC_MACS,
    Protocol,
    carry_out,
    compare,
    in_words,
    project,
    study,
)
from esper.contracts.errors import BadInput

TINY = Protocol(
    tasks=("mnist1d",),
    rates=(1e-2, 3e-2),
    tuning=(100,),
    counted=(0, 1),
    epochs=12,
    batch=32,
    rows=200,
)
GROWING = Run(
    task="mnist1d",
    arm=EARLY,
    rng_seed=0,
    rows=200,
    width=12,
    batch=32,
    steps=36,
    rate=3e-2,
    budget=3.2,
    epochs=12,
    judged=True,
)


def _pretend(what: Run) -> Outcome:
    """An outcome without training: the host likes rate 0.01, and early newborn 1."""
    score = 0.5 + 0.1 * (what.rate == 1e-2) + 0.1 * (what.newborn == 1.0)
    score -= 0.01 * (what.decay == 0.1)
    return Outcome(
        decisions=score,
        test=0.25 if what.judged else None,
        parameters=3210,
        exported=4294,
        macs=3112,
        training_macs=10**8 + what.rng_seed * 10**7,
        seconds=1.0,
        cpu_seconds=1.0,
    )


@pytest.fixture(scope="module")
def grown():
    """One growing run."""
    return carry_out(GROWING)


@pytest.fixture
def pretended():
    runs = []

    def work(more):
        runs.extend(more)
        return [_pretend(what) for what in more]

    return study(TINY, work), runs


def test_the_test_rows_are_left_alone_in_tuning(pretended):
    _, runs = pretended
    judged = [what for what in runs if what.judged]
    assert {what.rng_seed for what in judged} == {0, 1}
    assert {what.rng_seed for what in runs if not what.judged} == {100}
    assert len(judged) == len(TINY.counted) * (1 + len(PLAIN))


def test_every_arm_is_tuned_equally_long(pretended):
    _, runs = pretended
    # The chosen setting of the growing arm is asked for again; a ledger knows it.
    tried = {str(asdict(what)): what.arm for what in runs if not what.judged}
    counts = [list(tried.values()).count(arm) for arm in (EARLY, *PLAIN)]
    assert counts == [5] * 6
    assert TINY.runs == sum(counts) + 2 * 6


def test_what_was_best_on_the_decision_rows_is_what_is_counted(pretended):
    found, runs = pretended
    chosen = found.settings["mnist1d"]
    assert chosen[EARLY].chosen == {"rate": 1e-2, "newborn": 1.0}
    assert chosen[NEVER].chosen == {"rate": 1e-2}
    for what in runs:
        if what.judged:
            assert what.rate == 1e-2
            assert what.newborn == (1.0 if what.arm == EARLY else 3.0)
            assert what.decay == 1e-2


def test_equal_means_equal(pretended):
    _, runs = pretended
    epoch = 120 // 32
    for what in (what for what in runs if what.judged):
        spent = 10**8 + what.rng_seed * 10**7
        step = 3 * mlp_macs(40, what.width, 10) * what.batch
        if what.arm in (NEVER_MACS, STATIC_MACS, SHAPED):
            assert abs(what.steps * step - spent) <= step / 2
        else:
            assert what.steps == 12 * epoch
        widths = {STATIC: 36, STATIC_MACS: 36, SHAPED: 44}
        assert what.width == widths.get(what.arm, 12)
        assert (what.budget is None) == (what.arm != EARLY)


def test_a_growing_run_grows_within_its_budget_and_pays_for_it(grown):
    never = carry_out(replace(GROWING, budget=None))
    assert never.parameters == never.exported == 778
    assert 2 * 778 < grown.parameters <= 4.2 * 778
    assert grown.macs > 2 * never.macs
    assert grown.training_macs > 1.5 * never.training_macs
    assert any("plant widen_32" in line for line in grown.story)
    assert grown.test is not None
    assert never.training_macs == 36 * 32 * 3 * mlp_macs(40, 12, 10)


def test_a_budget_of_nothing_trains_the_host_itself():
    """Same split, same first weights, same batches: the arms are paired to the bit."""
    nothing = carry_out(replace(GROWING, budget=0.0))
    never = carry_out(replace(GROWING, budget=None))
    assert (nothing.decisions, nothing.test) == (never.decisions, never.test)
    assert nothing.parameters == never.parameters


def test_a_run_depends_on_nothing_but_what_it_says(grown):
    torch.manual_seed(6)
    again = carry_out(GROWING)
    timeless = {"seconds": 0.0, "cpu_seconds": 0.0}
    assert replace(grown, **timeless) == replace(again, **timeless)


def test_random_seeds_are_runs_of_their_own():
    never = replace(GROWING, budget=None)
    assert carry_out(never).test != carry_out(replace(never, rng_seed=1)).test


def test_the_benchmark_continues_where_it_was_interrupted(tmp_path, capsys):
    tiny = replace(TINY, epochs=2, rates=(3e-2,), batch=60)
    file = tmp_path / "results.jsonl"
    tables = run(file, protocol=tiny, save=tmp_path / "all.json")
    lines = file.read_text().splitlines(keepends=True)
    assert len(lines) == tiny.runs
    file.write_text("".join(lines[:-2]))
    capsys.readouterr()
    again = run(file, protocol=tiny)
    said = capsys.readouterr().err
    assert f"{tiny.runs} of {tiny.runs}: mnist1d, {SHAPED}" in said
    assert said.count("on the decision rows") == 2
    assert [table.rows[0][:2] for table in again] == [t.rows[0][:2] for t in tables]
    arms, gaps = again
    assert [row[0] for row in arms.rows] == [EARLY, *PLAIN]
    assert len(gaps.rows) == len(gaps.notes) == len(PLAIN)
    assert (tmp_path / "all.json").is_file()


def test_all_that_was_found_is_in_the_document(pretended):
    found, _ = pretended
    document = as_data(found, [])
    assert len(document["outcomes"]["mnist1d"][EARLY]) == 2
    scores = document["settings"]["mnist1d"][STATIC]["scores"]
    assert scores["rate 0.01, decay 0.1"] == pytest.approx(0.59)


def test_a_projection_is_of_the_order_of_the_whole():
    tiny = replace(TINY, rates=(3e-2,))
    assert 0.1 < project(tiny) < 600


@pytest.mark.parametrize(
    "wrong",
    [{"tuning": (0, 100)}, {"counted": ()}, {"tasks": ("words",)}, {"rates": ()}],
)
def test_a_protocol_that_shows_nothing_is_refused(wrong):
    with pytest.raises(BadInput):
        replace(TINY, **wrong)


NOISE = np.random.default_rng(1).normal(0.0, 0.01, size=10)


@pytest.mark.parametrize(
    ("gap", "says"),
    [(0.02, "beats 'theirs' by 2."), (-0.02, "loses to 'theirs' by 1.")],
)
def test_a_clear_difference_is_said_in_points_and_with_its_sign(gap, says):
    ours = 0.5 + NOISE + gap + np.linspace(0.0, 0.002, 10)
    (found,) = compare(ours, {"theirs": 0.5 + NOISE})
    assert found.shown
    assert (found.won, found.lost) == ((10, 0) if gap > 0 else (0, 10))
    assert found.difference.estimate == pytest.approx(gap + 0.001)
    assert says in in_words(found, "Ours")


def test_what_may_be_luck_is_called_no_difference():
    (found,) = compare(0.5 + NOISE, {"theirs": 0.5 + NOISE[::-1]})
    assert not found.shown
    assert "no difference is shown" in in_words(found, "Ours")


def test_more_comparisons_need_more_evidence():
    ours = 0.5 + np.arange(1, 7) / 1000  # six wins of six: p = 2 / 64
    base = np.full(6, 0.5)
    (alone,) = compare(ours, {"a": base})
    both = compare(ours, {"a": base, "b": base})
    assert alone.p == pytest.approx(2 / 64)
    assert alone.shown
    assert not any(one.shown for one in both)
    assert "is ahead of 'a' by 0." in in_words(both[0], "Ours")
    assert "do not settle it" in in_words(both[0], "Ours")
