"""The examples on the front page run as they stand."""

import re
from pathlib import Path

import pytest
from torch import nn

pytestmark = pytest.mark.learns  # at their own size, as fast as for a user

ROOT = Path(__file__).resolve().parents[1]


def examples() -> list[str]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run(example: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), names)
    return names


def test_the_network_of_the_readme_grows_and_gets_better(capsys):
    names = run(examples()[0])
    grower = names["grower"]
    assert "HOLDING" in capsys.readouterr().out
    assert type(names["grown"]) is nn.Sequential
    assert sum(p.numel() for p in names["grown"].parameters()) > 2_000
    assert grower.history[-1].metric > 0.8


def test_the_agent_of_the_readme_learns(capsys):
    run(examples()[1])
    returns = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(returns) == 20
    assert sum(returns[-5:]) > sum(returns[:5])
