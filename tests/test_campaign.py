"""Small samples of what no other test has of the campaign."""

from collections import Counter

import pytest

from tests import campaign
from tests.mutants import MUTANTS, ROOT


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("stores", 0.1),
        ("hostile files", 0.06),
        ("agents", 0.1),
        ("flipped recordings", 0.05),
        ("forged recordings", 0.4),
        ("controllers", 0.2),
        ("topologies", 0.1),
    ],
)
@pytest.mark.filterwarnings("ignore::esper.contracts.errors.EsperWarning")
def test_a_small_sample_has_no_bad_trial(name, scale):
    outcome = campaign.play(name, 0, scale)
    assert outcome.trials > 10
    assert not outcome.bad, outcome.notes


def test_whatever_is_bad_is_counted():
    outcome = campaign.Outcome()
    with outcome.trial("a bug"):
        raise ZeroDivisionError
    with outcome.trial("many lines"):
        raise campaign.EsperError("one\ntwo")
    with outcome.trial("a refusal"):
        raise campaign.EsperError("no.")
    with outcome.trial("waits"):
        raise campaign.Hung
    counts = outcome.trials, outcome.tracebacks, outcome.lost, outcome.hung
    assert counts == (4, 1, 1, 1)
    assert outcome.bad == 3


def test_every_mutant_has_one_place_in_the_source():
    sources = {m.file: (ROOT / "src/esper" / m.file).read_text() for m in MUTANTS}
    found = Counter({m.what: sources[m.file].count(m.before) for m in MUTANTS})
    assert found == Counter([m.what for m in MUTANTS])
