"""Every benchmark can be imported and says what it answers."""

from importlib import import_module

import pytest

from benchmarks.__main__ import benchmarks, main


@pytest.mark.parametrize("name", benchmarks())
def test_it_has_a_question_and_a_way_to_answer_it(name):
    module = import_module(f"benchmarks.{name}")
    assert module.__doc__
    assert callable(module.run)


def test_names_and_options_are_listed(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["resume", "--help"])
    assert "--kills" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["gea"])
    assert "invalid choice: 'gea'" in capsys.readouterr().err
