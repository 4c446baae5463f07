"""Shell completion scripts complete commands and options."""

import shutil
import subprocess

import pytest

from tests.cli.calls import call

TRY = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_shtab_esper "$1" "${COMP_WORDS[$COMP_CWORD]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")


@pytest.fixture
def script(capsys, tmp_path):
    result = call(capsys, "completion", "bash")
    assert (result.code, result.err) == (0, "")
    file = tmp_path / "esper.bash"
    file.write_text(result.out)
    return file


@bash
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("tr", {"train"}),
        ("e", {"evaluate", "export"}),
        ("train --bud", {"--budget.rounds", "--budget.minutes", "--budget.env_steps"}),
        ("train --res", {"--resume"}),
        ("config --res", {""}),
        ("config --pre", {"--preset"}),
        ("evaluate --contr", {"--controller", "--controllers"}),
        ("completion z", {"zsh"}),
    ],
)
def test_bash_finishes_words(script, typed, offered):
    found = subprocess.run(
        ["bash", "-c", TRY, "bash", script, "esper", *typed.split()],
        capture_output=True,
        text=True,
        check=True,
    )
    assert {*found.stdout.removesuffix("\n").split("\n")} == offered


def test_zsh_knows_commands_and_settings(capsys, tmp_path):
    result = call(capsys, "completion", "zsh")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("#compdef esper\n")
    assert "--budget.minutes" in result.out
    assert "evaluate" in result.out
    if shutil.which("zsh"):
        file = tmp_path / "_esper"
        file.write_text(result.out)
        subprocess.run(["zsh", "-n", file], check=True)
