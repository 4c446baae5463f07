"""Every example runs as it stands, in a short version."""

import re
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("grow_*.py"))
NEEDS = {"grow_cnn_on_digits": "sklearn", "grow_huggingface": "transformers"}
WIDENED = {
    "grow_cnn_on_digits": ["conv1->conv2", "conv2->fc"],
    "grow_huggingface": [
        f"bert.encoder.layer.{layer}.intermediate.dense->"
        f"bert.encoder.layer.{layer}.output.dense"
        for layer in (0, 1)
    ],
    "grow_mlp_on_letters": ["fc1->fc2", "fc2->out"],
    "grow_transformer_on_text": [
        f"blocks.{block}.up->blocks.{block}.down" for block in (0, 1)
    ],
}
"""Places that grow, by example."""


@pytest.mark.learns
@pytest.mark.parametrize("name", NAMES)
# Importing transformers warns of deprecated things in its own dependencies.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_it_grows_and_what_it_exports_agrees(name, monkeypatch, capsys):
    for needed in ("onnxruntime", "onnxscript", NEEDS.get(name, "torch")):
        pytest.importorskip(needed)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    figures = import_module(name).main(quick=True)
    printed = capsys.readouterr().out

    assert figures["parameters"] > figures["parameters before"]
    assert figures["multiply-adds"] > figures["multiply-adds before"]
    assert figures["exported parameters"] >= figures["parameters"]
    assert figures["gap as a module"] <= 1e-5
    assert figures["gap in ONNX Runtime"] <= 1e-5
    # The planting changed nothing, and the seeds were felt in the end.
    for place in WIDENED[name]:
        assert f"GERMINATE {place}#0" in printed
        stages = r"#0 +(BLENDING|HOLDING|FOSSILIZED)"
        layer = re.escape(place.partition("->")[0])
        felt = rf"^  ({re.escape(place)}{stages}|{layer} +\d+ -> \d+ units)"
        assert re.search(felt, printed, flags=re.MULTILINE)
    assert not re.search("GERMINATE .*: output changed by", printed)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_short_and_the_list_names_it(name):
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"[{name}.py]({name}.py)" in listed


AGENTS = sorted(path.stem for path in EXAMPLES.glob("ppo_*.py"))


@pytest.mark.parametrize("name", AGENTS)
def test_an_example_of_ppo_runs_and_is_short(name, monkeypatch, tmp_path, capsys):
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 60
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"[{name}.py]({name}.py)" in listed
    if name == "ppo_minigrid":
        pytest.importorskip("minigrid")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plot = tmp_path / "plot.svg"
    monkeypatch.setattr("sys.argv", [name, str(plot)])
    returns = import_module(name).main(4_096)
    assert len(returns) == 2
    assert plot.stat().st_size > 1_000
    assert capsys.readouterr().out.count("return") >= 2


def test_without_onnx_runtime_it_says_so_in_one_line(monkeypatch, capsys):
    import sys

    import torch
    from torch import nn

    import esper

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 3)
    grower = esper.Grower(model, optimizer, ["0->2"], example=x)
    figures = import_module("_export").hand_over(grower, {"input": x})
    assert "gap in ONNX Runtime" not in figures
    assert figures["gap as a module"] == 0.0
    said = [line for line in capsys.readouterr().out.splitlines() if "ONNX" in line]
    assert len(said) == 1
    assert "pip install 'esper-lite[onnx]'" in said[0]
