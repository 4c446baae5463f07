"""The objective, its normal form, and what is missing."""

import numpy as np
import pytest

from esper.contracts.errors import BadInput
from evidence.readout import Readout, Terms
from tests.evidence.drawn import RENTS, SETTINGS, SHARES, TASKS, rows

TERMS = {name: Terms(rent=r, budget=b) for name, (r, b) in SETTINGS.items()}


def readout(found):
    return Readout(found, TERMS, RENTS)


def one(arm, test, *, setting="rent-low", seed=0, **more):
    base = {"stage": "counted", "member": -1, "task": "letter", "rate": 1.0}
    figures = {"score": 0.0, "added": 0.0, "macs": 1.0, "panicked": 0}
    row = {"arm": arm, "test": test, "setting": setting, "seed": seed}
    return {**base, **figures, **row, **more}


def test_a_cell_is_the_share_of_errors_that_growing_removes_net_of_rent():
    found = [
        one(arm, test, setting=setting, seed=seed, added=added)
        for setting in RENTS
        for arm, test, seed, added in (
            ("never", 0.5, 0, 0.0),
            ("never", 0.7, 1, 0.0),
            ("early", 0.8, 0, 2.0),
            ("early", 0.6, 1, 1.0),
        )
    ]
    rent = np.mean([SETTINGS[name][0] for name in RENTS])
    # never is wrong on 0.4 of the rows on average
    first, second = (0.3 - 2 * rent) / 0.4, (-0.1 - rent) / 0.4
    cells = readout(found).normalised()
    np.testing.assert_allclose(
        cells.at("early", "letter"), [[first, second]], atol=1e-12
    )
    np.testing.assert_allclose(cells.at("never", "letter"), [[0, 0]], atol=1e-12)


def test_known_shares_come_back_whatever_the_rent():
    cells = readout(rows(noise=0.0)).normalised()
    for arm, share in SHARES.items():
        for task in TASKS:
            figures = cells.at(arm, task)
            assert figures.shape == (len(cells.members[arm]), 8)
            np.testing.assert_allclose(figures, share, atol=1e-12)


def test_a_cell_without_one_of_its_rents_or_its_never_is_missing():
    found = [
        row
        for row in rows()
        if (row["arm"], row["task"], row["seed"], row["setting"])
        != ("early", "letter", 3, "rent-mid")
    ]
    cells = readout(found).normalised()
    missing = np.isnan(cells.at("early", "letter"))
    assert missing.sum() == 1
    assert missing[0, 3]
    assert cells.count("early", TASKS) == 23
    found = [row for row in rows() if (row["arm"], row["seed"]) != ("never", 2)]
    cells = readout(found).normalised()
    assert np.isnan(cells.at("tamiyo", "text")).sum(axis=1).tolist() == [1, 1, 1]
    cells = readout([]).normalised()
    assert cells.at("tamiyo", "letter").size == 0
    assert cells.done("tamiyo", TASKS) == []
    assert readout([]).budgets == ["budget-1", "budget-2", "rent-low"]


def test_rows_of_tuning_do_not_count():
    found = rows() + [{**row, "stage": "tuning", "test": 0.0} for row in rows()]
    both = (readout(given).normalised() for given in (found, rows()))
    first, second = (each.at("tamiyo", "letter") for each in both)
    np.testing.assert_array_equal(first, second)


def test_a_panicked_network_guesses_nothing_right_and_no_errors_have_no_share():
    found = [one("never", None, setting=s, panicked=1) for s in RENTS]
    found += [one("early", 0.5, setting=s) for s in RENTS]
    np.testing.assert_allclose(readout(found).normalised().at("early", "letter"), 0.5)
    found = [one(arm, 1.0, setting=s) for s in RENTS for arm in ("never", "early")]
    assert readout(found).normalised().count("early", ["letter"]) == 0


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rate": 2.0}, r"never on letter, got 1\.0 and 2\.0"),
        ({"setting": "rent-odd"}, "rent-odd"),
    ],
)
def test_rows_that_the_protocol_does_not_ask_for_are_refused(changes, why):
    with pytest.raises(BadInput, match=why):
        readout([one("never", 0.5), one("never", 0.6, **changes)])
