"""Every example runs as it stands, in a short version."""

import re
from importlib import import_module
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("grow_*.py"))
NEEDS = {"grow_cnn_on_digits": "sklearn", "grow_huggingface": "transformers"}
WIDENED = {
    "grow_cnn_on_digits": ["1->4", "4->9"],
    "grow_huggingface": [
        f"transformer.h.{layer}.mlp.c_fc->transformer.h.{layer}.mlp.c_proj"
        for layer in (0, 1)
    ],
    "grow_mlp_on_letters": ["0->2", "2->4"],
    "grow_transformer_on_text": [
        f"blocks.layers.{layer}.linear1->blocks.layers.{layer}.linear2"
        for layer in (0, 1)
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
    figures = import_module(name).main(6)
    printed = capsys.readouterr().out

    assert figures["parameters"] > figures["parameters before"]
    assert figures["gap as a module"] <= 1e-5
    assert figures["gap in ONNX Runtime"] <= 1e-5
    for place in WIDENED[name]:
        layer = re.escape(place.split("->")[0])
        grown = rf"^  {layer} +\d+ -> \d+ (units|channels)"
        assert re.search(grown, printed, flags=re.MULTILINE)


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.stem)
def test_it_is_short_and_imports_public_names_only(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    assert re.findall(r"(?:from|import) esper\.\S+", text) == []
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert file.name[0] == "_" or f"[{file.name}]({file.name})" in listed


AGENTS = sorted(path.stem for path in EXAMPLES.glob("ppo_*.py"))


@pytest.mark.parametrize("name", AGENTS)
def test_an_example_of_ppo_runs(name, monkeypatch, tmp_path, capsys):
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

    def train(controller, epochs):
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.zeros(8, 3)
        return esper.Grower(model, optimizer, example=x, controller=controller), 0.0

    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    compare = import_module("_compare").compare
    figures = compare("accuracy", train, 1, input=torch.ones(8, 3))
    assert "gap in ONNX Runtime" not in figures
    assert figures["gap as a module"] == 0.0
    printed = [line for line in capsys.readouterr().out.splitlines() if "ONNX" in line]
    assert len(printed) == 1
    assert "Install the extra `onnx`" in printed[0]
