"""The page says what the ledger holds, whichever way it fell and however little."""

import pytest

from esper.contracts.errors import BadInput
from evidence.page import compare_arms, page, write_page
from evidence.readout import read_campaign
from tests.evidence.drawn import (
    SHARES,
    TASKS,
    job,
    rows,
    training,
    write_ledger,
)


def page_text(folder, results, **more):
    """The page of a campaign, as text, without figures."""
    campaign = read_campaign(write_ledger(folder, results, **more))
    return "\n".join(page(compare_arms(campaign)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A page of a campaign in which Tamiyo is ahead, and its folder."""
    folder = tmp_path_factory.mktemp("evidence")
    write_ledger(
        folder / "campaign",
        rows(),
        jobs=[job("a", "done"), job("b", "failed", "the disk\nis full")],
        trainings=[training("tamiyo-0"), training("searched", arm="searched")],
    )
    file = write_page(folder / "campaign", folder / "page")
    return folder / "page", file.read_text()


def line(text, start):
    """The only line that begins so."""
    (found,) = [each for each in text.splitlines() if each.startswith(start)]
    return found


def test_the_headline_tells_the_share_of_errors_and_the_goals(whole):
    _, text = whole
    found = line(text, "**On 3 held-out tasks")
    assert "Tamiyo (3 controllers) removes 29.9 % [29." in found
    assert "of a network that is never grown, net of rent. Of 7 goals 6 are" in found
    assert "6 are reached (above never, above random, above plateau, above" in found
    assert found.endswith("; 1 is not reached (not below static).**")


def test_a_controller_that_loses_or_changes_nothing_is_reported_so(tmp_path):
    text = page_text(tmp_path / "loses", rows({**SHARES, "tamiyo": -0.2}))
    found = line(text, "**On 3 held-out tasks")
    assert "adds 20.1 % [19." in found
    assert "7 are not reached" in found
    assert " reached (" not in found.replace("not reached (", "")
    text = page_text(tmp_path / "none", rows({**SHARES, "tamiyo": 0.0}, noise=0.2))
    assert "not distinguished from 0" in line(text, "**On 3 held-out tasks")


def test_every_section_is_there(whole):
    _, text = whole
    titles = [each[3:] for each in text.splitlines() if each.startswith("## ")]
    assert titles == [
        "Goals that were set beforehand",
        "All tasks together",
        "Score against cost",
        "Task by task",
        "At each rent",
        "At each budget",
        "With something taken away",
        "Learning rates that tuning chose",
        "Training",
        "What failed",
        "Reproduce",
    ]
    assert [f"### {task}" in text for task in TASKS] == [True] * 3
    widths = []
    for each in text.splitlines():
        if each.startswith("|"):
            widths.append(each.count("|"))
        elif widths:
            assert len(set(widths)) == 1
            assert len(widths) > 2
            widths = []


def test_tables_of_arms_ablations_and_budgets(whole):
    _, text = whole
    section = text.split("## All tasks together")[1].split("##")[0]
    names = [r.split("|")[1].strip() for r in section.splitlines() if r[:1] == "|"]
    assert names[2:4] == ["static", "**tamiyo**"]
    assert names[-1] == "never"
    tamiyo = line(section, "| **tamiyo**")
    assert "3.00 ×" in tamiyo  # parameters and training work
    assert tamiyo.endswith("| 72 | 3 |")  # three controllers, three tasks, eight seeds
    assert line(section, "| never").endswith("| 1.00 × | 1.00 × | 24 | 3 |")
    section = text.split("## At each budget")[1].split("##")[0]
    assert "| 1 × host | 2 × host | 4 × host |" in section
    assert "(72)" in line(section, "| **tamiyo**")
    section = text.split("## With something taken away")[1].split("##")[0]
    found = line(section, "| without-memory")
    assert "letter, satimage, text" in found
    assert "| 2 | 48 |" in found


def test_what_failed_is_listed_in_one_line_each(whole, tmp_path):
    _, text = whole
    assert "- The job `b` failed: the disk is full" in text
    assert "- No network of " in text
    assert "- 1 of 2 jobs are done; figures may still change." in text
    found = rows()
    for row in found:
        if (row["arm"], row["seed"], row["setting"]) == ("early", 1, "rent-low"):
            row.update(panicked=1, test=None)
    assert "3 of 120 networks of `early` panicked" in page_text(tmp_path, found)


def test_what_training_took_and_every_figure_are_shown(whole):
    folder, text = whole
    assert "each took 2.0 hours of one core and 50,000 decisions" in text
    files = {each.name for each in (folder / "figures").iterdir()}
    assert files == {"forest.svg", "pareto-parameters.svg", "pareto-training.svg"}
    for name in files:
        (shown,) = [r for r in text.splitlines() if r.endswith(f"(figures/{name})")]
        assert len(shown) > 60 + len(name)


def test_the_same_ledger_gives_the_same_bytes_around_the_findings(tmp_path):
    found = rows({"never": 0.0, "tamiyo": 0.1}, tasks=TASKS[:1], seeds=3)
    write_ledger(tmp_path, found)
    first, second = (tmp_path / name for name in ("first", "second"))
    findings = "## What was tried\n\nA *longer* horizon: +0.01.\n"
    for folder in (first, second):
        folder.mkdir()
        (folder / "findings.md").write_text(findings)
        text = write_page(tmp_path, folder).read_text()
    assert findings in text
    assert text.index("What was tried") < text.index("## Reproduce")
    files = [first / "README.md", *(first / "figures").iterdir()]
    assert len(files) == 4
    for file in files:
        assert (second / file.relative_to(first)).read_bytes() == file.read_bytes()


def test_an_empty_ledger_and_one_without_never_have_a_page_that_says_so(tmp_path):
    text = write_page(write_ledger(tmp_path, []), tmp_path / "page").read_text()
    assert list((tmp_path / "page" / "figures").iterdir()) == []
    assert "there is no result" in text
    assert "undecided" in text
    assert "All tasks together" not in text
    found = [row for row in rows() if row["arm"] != "never"]
    assert "there is no result" in page_text(tmp_path / "no-baseline", found)


def test_part_of_a_campaign_has_a_page(tmp_path):
    found = [
        row
        for row in rows()
        if row["arm"] in ("never", "tamiyo")
        and (row["task"], row["seed"]) < ("satimage", 3)
        and (row["arm"], row["setting"]) != ("tamiyo", "budget-1")
    ]
    text = page_text(tmp_path, found)
    assert "2 of 3 tasks so far" in text
    assert "7 are undecided" in text
    section = text.split("### satimage")[1].split("##")[0]
    assert line(section, "| **tamiyo**").endswith("| 9 |")


def test_a_page_written_by_hand_is_left_alone_and_no_ledger_is_refused(tmp_path):
    write_ledger(tmp_path, [])
    (tmp_path / "README.md").write_text("# Mine\n")
    with pytest.raises(BadInput, match="was not made by"):
        write_page(tmp_path, tmp_path)
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    ledger = tmp_path / "campaign.sqlite"
    for data, why in ((b"no database" * 99, "is no ledger"), (b"", "is no ledger")):
        ledger.write_bytes(data)
        with pytest.raises(BadInput, match=why):
            write_page(tmp_path, tmp_path / "page")
    ledger.unlink()
    with pytest.raises(BadInput, match=r"holds no campaign\.sqlite"):
        write_page(tmp_path, tmp_path / "page")
    assert not (tmp_path / "page").exists()
