"""The controller that comes with the package: complete, or refused in one line."""

import json
import subprocess
import sys
import tomllib
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch import Generator, nn
from torch.testing import assert_close

import esper
from esper.contracts.actions import HEAD, ActionMasks, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.errors import InvalidInputError
from esper.contracts.features import Features
from esper.contracts.slots import SlotConfig
from esper.runs.settings import as_toml
from esper.runs.train_config import from_toml
from esper.tamiyo.registry import make_controller
from esper.tamiyo.shipped import MANIFEST, WEIGHTS, read, shipped
from tests.rollouts import random_observation
from tests.tamiyo.decisions import decide

HOME = files("esper.tamiyo.shipped")


@pytest.fixture
def copy(tmp_path):
    """The files in a folder of their own."""
    for name in (MANIFEST, WEIGHTS):
        (tmp_path / name).write_bytes((HOME / name).read_bytes())
    return tmp_path


def rewrite(folder, tensors=None, weights=None, **changes):
    """Change the files; the digest goes along."""
    body = json.loads((folder / MANIFEST).read_bytes())
    weights = save(tensors) if tensors is not None else weights
    if weights is not None:
        (folder / WEIGHTS).write_bytes(weights)
        body["sha256"] = sha256(weights).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**body, **changes}))


def refusal(folder):
    with pytest.raises(InvalidInputError) as error:
        read(folder)
    text = str(error.value)
    assert text.isprintable()
    assert len(text) <= 200
    return text


def test_it_is_small_read_once_and_says_how_it_was_trained():
    found = shipped()
    assert len((HOME / WEIGHTS).read_bytes()) < 4 << 20
    assert found.blueprints
    assert {"rng_seed", "rounds", "env_steps", "hours"} <= found.training.keys()
    assert {"config", "versions"} <= found.training.keys()
    # Settings that were added since have their defaults.
    config = found.training["config"]
    assert {*config.splitlines()} <= {*as_toml(from_toml(config)).splitlines()}
    assert shipped() is found


def test_it_decides_as_it_did_when_unmeasured_columns_were_inputs():
    """Recorded on hosts of two drawn tasks before the columns became biases."""
    with np.load(Path(__file__).parent / "shipped_decisions.npz") as file:
        kept = {name: torch.from_numpy(file[name]) for name in file.files}
    kinds = tuple(b for b in BLUEPRINTS if b.name in shipped().blueprints)
    policy = shipped().policy(ActionSpec(SlotConfig(max_slots=6), kinds))
    state = policy.initial_state(kept["start"].shape[1])
    for step, start in enumerate(kept["start"]):
        row = {name: values[step] for name, values in kept.items()}
        seen = Features(row["host"], row["slots"], row["offers"])
        masks = (row[name] for name in ("op", "slot", "blueprint", "fixed"))
        found = policy.act(seen, ActionMasks(*masks), start, state, None)
        state = found.state
        assert torch.equal(found.actions, row["actions"])
        distribution = found.distribution.clamp(min=-1e4)
        # Within 1e-6 on the CPU that recorded them; others round differently.
        assert_close(distribution, row["log_probs"], rtol=1e-5, atol=1e-5)
        assert_close(found.values, row["values"], rtol=0, atol=1e-5)
    assert (kept["actions"][..., HEAD["op"]] == Op.GERMINATE).sum() > 4


def test_the_package_carries_its_files():
    project = Path(esper.__file__).parents[2] / "pyproject.toml"
    data = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]
    assert {WEIGHTS, MANIFEST} <= {*data["esper.tamiyo.shipped"]}


def test_names_are_known_before_weights_are_read():
    script = (
        "import sys, esper.tamiyo.registry as it; assert 'tamiyo' in it.NAMES; "
        "assert 'safetensors' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("slots", [1, 3, 40])
@pytest.mark.parametrize("blueprints", [BLUEPRINTS, BLUEPRINTS[5:6], BLUEPRINTS[:5]])
def test_actions_are_legal_for_any_number_of_slots_and_blueprints(slots, blueprints):
    spec = ActionSpec(SlotConfig(max_slots=slots), blueprints)
    controller, state = make_controller("tamiyo", spec), None
    generator = Generator().manual_seed(0)
    for first in (True, False, False):
        begins = torch.full((16,), first)
        seen = random_observation(
            16, spec, generator, episode_start=begins, density=0.9
        )
        _, state = decide(controller, seen, spec, state, generator)


def test_only_what_it_was_trained_with_is_planted():
    spec, generator = ActionSpec(), Generator().manual_seed(0)
    controller = shipped()(spec)
    seen = random_observation(64, spec, generator, density=1.0)
    controller._controller.op_out.bias.data[Op.GERMINATE] += 1e3
    actions, _ = decide(controller, seen, spec, generator=generator)
    plants = actions[:, HEAD["op"]] == Op.GERMINATE
    assert plants.any()
    for choice in actions[plants, HEAD["blueprint"]].tolist():
        assert BLUEPRINTS[choice].name in shipped().blueprints
    assert (actions[plants, HEAD["style"]] == 0).all()  # ADD is all that it saw


def test_making_it_draws_no_random_number():
    torch.manual_seed(5)
    make_controller("tamiyo", ActionSpec())
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_it_grows_a_users_own_network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    x, y = torch.randn(64, 8), torch.randint(3, (64,))
    grower = esper.Grower(
        model, optimizer, ["0->2"], example=x, controller="tamiyo", decisions=4
    )
    for _ in range(4):
        loss = grower.loss(lambda: nn.functional.cross_entropy(model(x), y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grower.step(metric=0.5)
    assert len(grower.history) == 4
    assert grower.export()(x).shape == (64, 3)


def test_a_copy_is_the_same(copy):
    one, two = read(copy), shipped()
    assert (one.config, one.blueprints) == (two.config, two.blueprints)
    assert all(
        torch.equal(one.weights[name], two.weights[name]) for name in two.weights
    )


def test_tensors_of_another_shape_or_name_or_not_finite_are_refused(copy):
    tensors = load((copy / WEIGHTS).read_bytes())
    rewrite(copy, {**tensors, "op_out.bias": torch.zeros(2)})
    assert "op_out.bias is float32[2], expected float32[6]" in refusal(copy)
    rewrite(copy, {n: t for n, t in tensors.items() if n != "op_out.bias"})
    assert "op_out.bias is missing" in refusal(copy)
    rewrite(copy, {**tensors, "value_out.bias": torch.tensor([torch.nan])})
    assert "'value_out.bias' holds NaN" in refusal(copy)


def changed_byte(folder):
    data = bytearray((folder / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (folder / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / MANIFEST).unlink(), f"{MANIFEST} does not exist"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"{WEIGHTS} does not exist"),
        (changed_byte, f"{WEIGHTS} is not what was exported"),
        *[
            (lambda folder, bad=text: (folder / MANIFEST).write_bytes(bad), words)
            for text, words in (
                *((text, "is damaged") for text in (b"", b"{", b"[]", b"null")),
                (b"{}", "was written by an unknown version of Esper"),
                (b'{"format": 20}', "is damaged: sha256: Field required"),
                (b"\xff", "must be text"),
            )
        ],
        *[
            (lambda folder, bad=changes: rewrite(folder, **bad), words)
            for changes, words in (
                ({"format": 2}, "was written by Esper 0.1.0 and this is Esper"),
                ({"policy": {"width": 0}}, "width must lie in 1..65536, got 0"),
                ({"policy": {"girth": 1}}, "is damaged: policy.girth"),
                ({"blueprints": [{"form": "WIDER", "size": 8}]}, "blueprints.0"),
                ({"blueprints": ["widen_x2", 3]}, "is damaged: blueprints.1"),
                ({"choices": 3}, "is damaged: choices"),
                ({"choices": {"op": [["WAIT"]]}}, "is damaged: choices.op.0"),
                ({"policy": {"width": 4_000}}, "'width' is 4000, which no tensor"),
                ({"policy": {"width": 10**9}}, "policy.width: Input should be less"),
                ({"policy": {"layers": 10**5}}, "policy.layers: Input should be less"),
                ({"weights": b"PK\x03\x04 and so on"}, "is damaged, or not a file"),
            )
        ],
    ],
)
def test_files_that_are_missing_changed_or_of_another_kind_are_refused(
    copy, spoil, words
):
    spoil(copy)
    assert words in refusal(copy)
