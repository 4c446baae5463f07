"""Every benchmark runs: each side once, at its smallest where it would take minutes."""

import json

import pytest

from benchmarks.__main__ import benchmarks, main

SMALLEST = {
    "scaling": ["--count", "1"],
    "learning": ["--rounds", "1", "--envs", "8", "--processes", "1"],
}
OWN_TESTS = {"architectures", "evidence", "out_of_the_box", "resume"}
"""Benchmarks that take long, which have test files of their own."""


@pytest.mark.parametrize("name", sorted({*benchmarks()} - OWN_TESTS))
def test_it_runs(name, capsys):
    assert main([name, "--quick", *SMALLEST.get(name, ())]) == 0
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
