"""Evidence: figures by hand, parts that survive a stop, a ledger that is checked."""

from dataclasses import replace

import numpy as np
import pytest

from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import Interval
from esper.training.recordings import RecordConfig, record
from research import evidence
from research.evidence import (
    Part,
    counted,
    measured,
    read_ledger,
    static_parts,
    task_of,
    verified,
    write_ledger,
)
from research.evidence_tables import RENTS, Row, arms_of, draw, reports, verdict

TASK = "drawn 1"


def row(arm, test, added=0.0, rent=None, task="letter", question="unknown"):
    """Two stops, three hosts; sizes are the same at all of them."""
    test = np.broadcast_to(np.array(test, float).reshape(-1, 1), (2, 3)).copy()
    return Row(
        question=question,
        task=task,
        arm=arm,
        rent=rent,
        rate=1.0,
        parameters=None,
        source="",
        test=test,
        added=np.full((2, 3), added),
    )


LADDER = (
    row("static-x1", [0.6, 0.7]),
    row("static-x2", [0.5, 0.9], added=1.0),
)
ROWS = (
    row("never", [0.5, 0.7]),
    row("early", [0.7, 0.9], added=2.0),
    *(row("tamiyo 1", [0.7, 0.9], added=1.0, rent=rent) for rent in RENTS),
    *(row("tamiyo 2", [0.6, 0.8], rent=rent) for rent in RENTS),
    *LADDER,
)


def test_shares_are_of_nevers_mean_error_net_of_rent_over_the_stops():
    arms = arms_of(ROWS, "unknown")
    assert [*arms] == ["Tamiyo", "early", "never", "best-size", "envelope"]
    # Never's error is 0.4 in the mean; 0.2 of the score more, less rent for the size.
    expected = [[(0.2 - rent * 2) / 0.4] for rent in RENTS]
    assert arms["early"].shares["letter"][:, 0] == pytest.approx(
        np.broadcast_to(expected, (3, 3))
    )
    rent = np.mean(RENTS)
    figures = arms["Tamiyo"].figures()[0]
    assert figures == pytest.approx(
        np.broadcast_to([[(0.2 - rent) / 0.4], [0.1 / 0.4]], (2, 3))
    )
    assert arms["Tamiyo"].added == 0.5


def test_sizes_are_chosen_in_hindsight_for_all_stops_or_for_each():
    arms = arms_of(ROWS, "unknown")
    best, envelope = (
        arms[name].shares["letter"][:, 0, 0] for name in ("best-size", "envelope")
    )
    # The wide one is better at the second stop by 0.2, and worse at the first by 0.1.
    wide = np.array([(0.1 - rent) / 0.4 for rent in RENTS])
    assert best == pytest.approx(np.maximum(wide, 0.05 / 0.4))
    assert envelope == pytest.approx([(0.15 - rent / 2) / 0.4 for rent in RENTS])


def test_a_claim_needs_both_intervals():
    up, down, open_ = (
        Interval(0.1, 0.05, 0.2),
        Interval(-0.1, -0.2, -0.05),
        Interval(0.1, -0.1, 0.2),
    )
    assert verdict(up, up) == "above"
    assert verdict(down, down) == "below"
    shown = {verdict(*both) for both in ((up, open_), (open_, down), (up, down))}
    assert shown == {"no difference shown"}


def test_tables_and_the_picture_are_made_of_rows():
    titles = [report.title for report in reports(ROWS)]
    assert len(titles) == 4
    assert all(title.startswith("end unknown") for title in titles)
    assert draw(ROWS).startswith(b"<?xml")


@pytest.fixture
def parts():
    common = {"question": "scale", "task": TASK, "hosts": 2, "rates": (1.0,)}
    return [
        Part(arm="never", rent=None, **common),
        Part(arm="by-rent", rent=0.002, **common),
    ]


def test_parts_that_are_there_are_not_counted_again(parts, tmp_path, monkeypatch):
    first = counted(parts[:1], tmp_path, 1, "some")
    trained = []

    def recorded(part):
        trained.append(part.arm)
        return measured(part)

    monkeypatch.setattr(evidence, "measured", recorded)
    rows = counted(parts, tmp_path, 1, "all")
    assert trained == ["by-rent"]
    assert np.array_equal(rows[0].test, first[0].test)
    assert (rows[1].added[-1] > 0).all()
    (static,) = static_parts([replace(parts[1], arm="tamiyo 1")], [ours(rows[1])])
    size = 1 + rows[1].added[-1].mean()
    assert static.parameters == round(task_of(TASK).host.parameters * size)

    other = replace(parts[0], hosts=3)
    with pytest.raises(
        InvalidInputError, match="another protocol, controller or number"
    ):
        counted([other], tmp_path, 1, "other")
    (tmp_path / parts[0].file).write_text("{")
    with pytest.raises(InvalidInputError, match="is damaged; delete it"):
        counted(parts, tmp_path, 1, "damaged")


def ours(row):
    return replace(row, arm="tamiyo 1")


def test_the_ledger_keeps_all_rows_and_a_sample_is_trained_again(parts, tmp_path):
    rows = [measured(part) for part in parts]
    file = tmp_path / "ledger.npz"
    write_ledger(rows, file)
    read = read_ledger(file)
    for before, after in zip(rows, read, strict=True):
        assert before.key == after.key
        assert np.allclose(before.added, after.added, atol=1e-5)
    arms = {"scale": {}}
    # An arm that is not there, or another one of its name, is left out.
    strange = replace(read[0], arm="ridge", source="of another machine")
    report = verified([*read, strange], arms, 9, 1)
    assert [line[-1] for line in report.rows] == ["2 of 2"] * 2
    wrong = [replace(each, test=each.test + 0.05) for each in read]
    with pytest.raises(
        InvalidInputError, match=r"differs from what is trained here by 5\.00"
    ):
        verified(wrong, arms, 9, 1)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(InvalidInputError, match="is no ledger, or damaged"):
        read_ledger(file)


def test_the_published_ledger_is_not_replaced_by_a_part_of_it(
    tmp_path, monkeypatch, capsys
):
    published, parts = tmp_path / "third.npz", tmp_path / "parts"
    monkeypatch.setattr(evidence, "LEDGER", published)
    monkeypatch.setattr(evidence.timing, "QUICK", False)  # others may have set it
    assert evidence.ledger_for(ROWS, published, parts) == published
    write_ledger(ROWS, published)
    part = [each for each in ROWS if each.arm != "tamiyo 2"]
    fewer = [replace(each, test=each.test[:, :2]) for each in ROWS]
    beside = parts / "ledger.npz"
    assert evidence.ledger_for(part, published, parts) == beside
    assert evidence.ledger_for(fewer, published, parts) == beside
    assert evidence.ledger_for([*ROWS, *part], published, parts) == published
    assert evidence.ledger_for(part, tmp_path / "mine.npz", parts).name == "mine.npz"

    def counts(planned, *given):
        return [] if "static" in given[2] else part

    monkeypatch.setattr(evidence, "counted", counts)
    monkeypatch.setattr(evidence, "static_parts", lambda *given: [])
    monkeypatch.setattr(evidence, "reports", lambda rows: [])
    parts.mkdir()
    before = published.read_bytes()
    options = {"unknown": "", "parts": str(parts), "ledger": str(published)}
    evidence.run(known="tamiyo", tasks="letter", **options)
    assert published.read_bytes() == before
    assert len(read_ledger(beside)) == len(part)
    assert f"The ledger is in {beside}." in capsys.readouterr().err


@pytest.mark.parametrize("question", ["known", "unknown"])
def test_recordings_of_another_end_than_the_question_s_are_refused(
    question, tmp_path, monkeypatch
):
    other = {"known": "anytime", "unknown": "end"}[question]
    record(RecordConfig(stop=other, tasks=1, scripts=2), tmp_path / "recorded")
    options = {"known": "", "unknown": "", question: "tamiyo"}
    options[f"recordings_{question}"] = str(tmp_path / "recorded")
    with pytest.raises(InvalidInputError, match=f"was recorded with stop '{other}'"):
        evidence.run(**options, tasks="letter", parts=str(tmp_path))


def test_a_ledger_of_another_wording_is_refused(parts, tmp_path, monkeypatch):
    write_ledger([row("never", [0.5, 0.7])], tmp_path / "ledger.npz")
    monkeypatch.setattr(evidence, "protocol", lambda: "another")
    with pytest.raises(InvalidInputError, match="another wording"):
        read_ledger(tmp_path / "ledger.npz")
