"""`python -m evidence` says what there is to do, and what could not be done."""

import pytest

from evidence.__main__ import main
from tests.cli.calls import Outcome, assert_one_line
from tests.evidence.protocols import TINY, text_of


def call(capsys, *words):
    """Run a command here."""
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return Outcome(code, captured.out, captured.err)


def refused(capsys, *words):
    """The one line that refuses a command."""
    outcome = call(capsys, *words)
    assert outcome.code == 2, outcome
    assert_one_line(outcome.err)
    return outcome.err


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_dry_run_lists_jobs_and_makes_nothing(capsys, tmp_path):
    outcome = call(capsys, "run", str(TINY), "--dry", "--only", "training")
    assert outcome.code == 0
    lines = outcome.out.splitlines()
    assert lines[0].startswith("3 jobs are to be done: about 0.0 hours with 2 proc")
    assert lines[1:] == [
        f"training/{arm}  4 s" for arm in ("tamiyo/0", "tamiyo/1", "without-looking/0")
    ]
    assert not [*tmp_path.iterdir()]


def test_a_job_that_fails_is_reported_with_exit_code_6(capsys, tmp_path):
    controllers = tmp_path / "it" / "controllers"
    controllers.mkdir(parents=True)
    for member in (0, 1):
        (controllers / f"tamiyo-{member}").touch()
    words = ("--folder", "it", "--only", "training", "--processes", "1")
    (tmp_path / "few.toml").write_text(
        text_of(('[ablations.without.without-looking]\n"world.measure_every" =', "#"))
    )
    outcome = call(capsys, "run", "few.toml", *words)
    assert outcome.code == 6
    assert "0 jobs are done, 0 are left." in outcome.out
    assert outcome.err.startswith(
        "esper: 2 jobs failed and will be tried again next time"
    )
    assert "training/tamiyo/0: " in outcome.err
    assert outcome.err.count("\n") == 1


def test_what_is_finished_ends_well(capsys):
    words = ("--only", "search", "--processes", "1")
    for _ in range(2):
        outcome = call(capsys, "run", str(TINY), "--folder", "it", *words)
        assert (outcome.code, outcome.err) == (0, "")
        assert outcome.out.endswith("1 jobs are done, 0 are left.\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "required: step"),
        (("rum",), "did you mean 'run'"),
        (("run",), "required: PROTOCOL"),
        (("run", "no.toml"), "no.toml cannot be read: No such file"),
        (("run", "."), "expected a file"),
        (("run", str(TINY), "--only", "tunning"), "did you mean 'tuning'"),
        (("run", str(TINY), "--minutes", "0"), "expected a finite number above 0"),
        (("run", str(TINY), "--dri"), "did you mean '--dry'"),
        (("page", "--folder", "nothing"), "nothing"),
    ],
)
def test_what_cannot_be_meant_is_refused(capsys, tmp_path, words, why):
    assert why in refused(capsys, *words)
    assert not [*tmp_path.iterdir()]
