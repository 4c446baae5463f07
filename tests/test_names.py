"""scripts/names.py finds old names where they are wrong, and only there."""

import pytest

from scripts.names import main


def found(tmp_path, capsys, text, file="src/esper/planted.py"):
    """Lines and names that are found in one file."""
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(text, "utf-8")
    count = main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == count
    assert all(line.startswith(f"{file}:") for line in lines)
    return [line.removeprefix(f"{file}:").split(" -> ")[0] for line in lines]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("class Grown: ...", "1: Grown"),
        ("\nraise FileTrouble", "2: FileTrouble"),
        ("def scale(final_share): ...", "1: final_share"),
        ("from esper.growth.middle import fold", "1: middle"),
        ("class PPOConfig:\n    clip: float = 0.2", "2: clip"),
        ("PPO('CartPole-v1', envs=4)", "1: envs"),
        ("class TinyPolicy:\n    def scores(self): ...", "2: scores"),
        ("buffer.add(decision, first=True)", "1: first"),
        ("agent.buffer.cut()", "1: cut"),
        ("# hosts of the same\n# luck", "1: same # luck"),
    ],
)
def test_a_planted_name_is_found(tmp_path, capsys, text, name):
    assert found(tmp_path, capsys, text) == [name]


def test_a_module_with_an_old_name_is_found(tmp_path, capsys):
    assert found(tmp_path, capsys, "", "src/esper/judging.py") == ["1: judging.py"]


def test_ordinary_words_elsewhere_are_accepted(tmp_path, capsys):
    text = "def mean(rows, first, value):\n    return rows.cut(first, steps=value)\n"
    assert found(tmp_path, capsys, text) == []
