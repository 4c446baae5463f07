"""Every benchmark and study runs, at its smallest where it would take minutes."""

import json

import pytest

from benchmarks.__main__ import main, questions

SMALLEST = {
    "scaling": ["--count", "1"],
    "learning": ["--rounds", "1", "--envs", "8", "--processes", "1"],
}
OWN_TESTS = {"architectures", "evidence", "out_of_the_box", "resume"}
"""Benchmarks that take long, which have test files of their own."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of loggers' libraries
@pytest.mark.parametrize(
    ("package", "name"),
    [
        (package, name)
        for package in ("benchmarks", "research")
        for name in sorted({*questions(package)} - OWN_TESTS)
    ],
)
def test_it_runs(package, name, capsys):
    assert main([name, "--quick", *SMALLEST.get(name, ())], package=package) == 0
    assert capsys.readouterr().out


def test_tables_can_be_printed_as_data(capsys):
    assert main(["masks", "--quick", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["rows"]


def test_options_are_listed_and_other_names_refused(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["resume", "--help"])
    assert "--kills" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["gea"])
    assert "invalid choice: 'gea'" in capsys.readouterr().err
