"""The example on the front page runs as it stands."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_example_of_the_readme_runs_and_learns(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    returns = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(returns) == 20
    assert sum(returns[-5:]) > sum(returns[:5])
