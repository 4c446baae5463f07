"""The examples on the front page, and of the pages below, run as they stand."""

import re
import shlex
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import gymnasium
import lightning.pytorch as lightning
import numpy as np
import pytest
import torch
import transformers
from gymnasium import spaces
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import esper
from benchmarks import rl
from esper.cli import parser
from esper.contracts import actions, blueprints
from esper.growth.blueprints.registry import forget

pytestmark = pytest.mark.learns  # at their own size, as fast as for a user

ROOT = Path(__file__).resolve().parents[1]
EMPTY: Mapping[str, object] = {}


def examples(page: str = "README.md") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run(example: str, known: Mapping[str, object] = EMPTY) -> dict[str, object]:
    names: dict[str, object] = {**known}
    exec(compile(example, "snippet", "exec"), names)
    return names


def test_the_network_of_the_readme_grows_and_gets_better(capsys):
    names = run(examples()[1])
    grower = names["grower"]
    assert type(names["grown"]) is nn.Sequential
    assert f"out_features={names['grown'][0].out_features}" in capsys.readouterr().out
    assert sum(p.numel() for p in names["grown"].parameters()) > 2_000
    assert grower.history[-1].metric > 0.8


def test_the_agent_of_the_readme_learns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(examples()[0])
    assert float(capsys.readouterr().out) > 150
    assert (tmp_path / "agent.safetensors").exists()


def test_the_first_steps_run(capsys):
    slots, agent = examples("docs/start.md")
    assert [str(slot) for slot in run(slots)["slots"]] == ["0->2", "2->4"]
    run(agent.replace("10_000", "2_000"))
    assert float(capsys.readouterr().out.splitlines()[-1]) > 5


def test_the_script_that_starts_a_run_has_valid_settings():
    (text,) = examples("docs/running.md")
    names = run(text, {"__name__": "imported"})
    (made,) = re.findall(r"config = (TrainConfig\(.*\))$", text, flags=re.M)
    config = eval(made, names)
    assert config.tasks == ("letter", "digits")
    assert all(callable(names[name]) for name in ("begin_run", "write_report"))


class Counting(Dataset):
    """Sequences of successive numbers."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(8) + index) % 32
        return {"input_ids": ids, "labels": ids}


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 3))

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def forward(self, x):
        return self.net(x)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


@pytest.mark.filterwarnings("ignore")
def test_every_framework_grows_as_its_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=8
    )
    gpt, x = transformers.GPT2LMHeadModel(config), torch.randn(256, 8)
    loader = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=32)
    known = (
        {"model": gpt, "train_dataset": Counting(), "eval_dataset": Counting()},
        {"module": Classifier(), "loader": loader, "x": x},
        EMPTY,
    )
    hugging_face, lit, sklearn = map(run, examples("docs/frameworks.md"), known)
    assert hugging_face["grown"].config.n_inner > 64
    assert type(lit["grown"]) is Classifier
    assert lit["grown"].net[0].out_features > 4
    assert sklearn["model"].hidden_layer_sizes_[0] > 16


def test_the_snippets_about_growing_run_in_their_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {}
    try:
        for text in examples("docs/growing.md"):
            names = run(text, names)
            if "esper.datasets" in text:
                assert names["grown"][0].out_features > 12
                assert names["grower"].history[-1].metric > 0.8
    finally:
        forget("my_block")
    assert "Linear(in_features=16, out_features=28" in capsys.readouterr().out
    assert (tmp_path / "runs" / "mine" / "finished.json").exists()
    assert names["figure"].axes
    assert len(names["larger"].h) == 8
    assert names["larger"].h[0].up.out_features == 64


def test_the_snippets_about_the_shipped_controller_run(capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    names = {"esper": esper, "model": model, "optimizer": optimizer, "epochs": 3}
    names["x"] = torch.randn(8, 4)
    use, facts = examples("docs/tamiyo.md")
    grower = run(use, names)["grower"]
    assert grower.decisions == 3
    run(facts)
    assert "widen_x2" in capsys.readouterr().out


class MaskedCart(gymnasium.Wrapper):
    """CartPole in which pushing right is illegal far to the right."""

    def __init__(self, env=None):
        super().__init__(env or gymnasium.make("CartPole-v1"))

    def action_masks(self):
        return np.array([True, self.unwrapped.state[0] < 1.0])


@pytest.mark.filterwarnings("ignore")  # of Stable-Baselines3
@pytest.mark.parametrize("library", ["MaskablePPO", "RecurrentPPO"])
def test_both_sides_of_a_migration_run_as_they_stand(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = examples("docs/ppo.md")
    at = next(i for i, text in enumerate(page) if f"import {library}" in text)
    for text in page[at : at + 2]:
        assert text.count("learn(100_000)") == 1
        env = gymnasium.make("CartPole-v1")
        env = MaskedCart(env) if library == "MaskablePPO" else env
        known = {"make_env": MaskedCart, "env": env, "obs": env.reset(seed=0)[0]}
        known["mask"] = np.array([True, False])
        names = run(text.replace("100_000", "128"), known)  # one rollout
        assert env.action_space.contains(int(names["action"]))
        if library == "MaskablePPO":
            assert int(names["action"]) == 0
        else:
            assert names["state"] is not None
    assert type(names["model"]).__module__.startswith("esper")
    assert names["model"].settings.rollout_steps == 128


class Workbench(gymnasium.Env):
    """Two steps with actions of some space."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.time += 1
        return np.zeros(1, np.float32), 0.0, self.time == 2, False, {}


@pytest.mark.filterwarnings("ignore")  # of Stable-Baselines3
def test_the_snippets_about_agents_run_in_their_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = gymnasium.make("CartPole-v1")
    tools = spaces.MultiDiscrete([3, 2, 2])
    angles = spaces.Dict(tool=spaces.Discrete(3), angle=spaces.Box(0.0, 90.0, (1,)))
    known = {"make_env": MaskedCart, "env": env, "obs": env.reset(seed=0)[0]}
    known["mask"] = np.array([True, False])
    known["make_tools"] = partial(Workbench, tools)
    known["make_angles"] = partial(Workbench, angles)
    names = {}
    for text in examples("docs/ppo.md"):
        shorter = re.sub(r"learn\([0-9_]+", "learn(128", text)
        names = run(shorter, {**names, **known})
        if "def encoder" in text:
            assert names["agent"].env_steps == 2048
    assert names["action_space"] == angles
    assert np.isfinite(names["evaluate"].best)
    assert names["figure"].axes
    assert (tmp_path / "runs" / "mine" / "agent.safetensors").exists()


def test_every_command_of_the_pages_is_known():
    found = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md")):
        text = page.read_text(encoding="utf-8").replace("\\\n", "")
        for block in re.findall(r"^```\w*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found += re.findall(r"^esper (.*?)(?: +[#>].*)?$", block, re.MULTILINE)
    assert len(found) > 30
    for line in found:
        words = shlex.split(line)
        parser(words[:1]).parse_args(words)


def test_every_recipe_of_the_how_to_page_works(capsys):
    page = examples("docs/howto.md")
    blueprint, head, narrowed, controller, world, loop, *_ = page
    run(blueprint, vars(blueprints))  # lines for tables: they need names of those
    run(head, vars(actions))
    assert len(run(narrowed)["spec"].narrowed["style"]) == 1
    run(controller)
    assert "PlantFirst: " in capsys.readouterr().out
    names = run(world)
    said = capsys.readouterr().out
    assert float(said.split()[1].strip(",")) > 0.9
    run(loop, names)
    kl = [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert len(kl) == 3
    assert all(0 <= each < 0.1 for each in kl)


def ledger(name):
    """Mean final return and CPU seconds by task and side."""
    groups = {}
    for training in rl.read(ROOT / "benchmarks" / name):
        side = training.side.partition(",")[0]
        figures = (rl.filled(training.curve)[-1], training.cpu_seconds)
        groups.setdefault((training.task, training.side), (side, []))[1].append(figures)
    best = {}
    for (task, _), (side, figures) in groups.items():
        middle = tuple(np.mean(figures, axis=0))
        best[task, side] = max(middle, best.get((task, side), middle))
    return best


def numbers(cell):
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", cell.replace("−", "-"))]


def test_the_front_page_is_short_and_its_returns_are_those_of_the_ledgers():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 180
    assert "pip install esper-lite" not in page
    trained = ledger("rl.jsonl") | ledger("popgym.jsonl")
    rows = re.findall(
        r"^\| ([^|]+) \| ([^|]+) \| (\w+PPO: [^|]+) \| (.+) \|$", page, re.M
    )
    assert len(rows) > 5
    for name, ours, theirs, seconds in rows:
        task, (peer, _) = name.removeprefix("POPGym "), theirs.split(": ")
        figures = trained[task, "esper"], trained[task, peer]
        for cell, (figure, _) in zip((ours, theirs), figures, strict=True):
            assert numbers(cell)[0] == pytest.approx(figure, rel=0.01, abs=5e-3), name
        took = [took for _, took in figures]
        assert numbers(seconds) == pytest.approx(took, abs=0.51), name


def test_the_returns_of_the_guide_are_those_of_the_ledger():
    page, trained = (ROOT / "docs" / "ppo.md").read_text("utf-8"), ledger("rl.jsonl")
    rows = re.findall(r"^\| (.+), [\d,]+(?: steps)? \|[^|]+\|(.+)\|$", page, re.M)
    assert {name for name, _ in rows} == {task for task, _ in trained}
    for name, text in rows:
        ours, took, peer, theirs, other = (cell.strip() for cell in text.split("|"))
        told = {"esper": (ours, took)} | ({peer: (theirs, other)} if peer else {})
        assert {side for task, side in trained if task == name} == {*told}
        for side, cells in told.items():
            figures = [numbers(cell)[0] for cell in cells]
            assert figures[0] == pytest.approx(trained[name, side][0], rel=5e-3), name
            assert figures[1] == pytest.approx(trained[name, side][1], abs=0.51), name
