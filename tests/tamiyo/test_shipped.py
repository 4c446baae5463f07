"""The Tamiyo that comes with the package: whole, or refused in one line."""

import json
import subprocess
import sys
import tomllib
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save
from torch import Generator, nn

import esper
from esper.contracts.actions import HEAD, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.contracts.controller import Controller
from esper.contracts.errors import BadInput
from esper.contracts.slots import SlotConfig
from esper.tamiyo.named import named
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.shipped.files import MANIFEST, WEIGHTS, read, shipped
from tests.rollouts import random_observation, require_legal

HOME = files("esper.tamiyo.shipped")


@pytest.fixture
def copy(tmp_path):
    """Her files in a folder of their own."""
    for name in (MANIFEST, WEIGHTS):
        (tmp_path / name).write_bytes((HOME / name).read_bytes())
    return tmp_path


def rewrite(folder, tensors=None, **changes):
    """Change what is in her files; the digest goes along."""
    body = json.loads((folder / MANIFEST).read_bytes())
    if tensors is not None:
        (folder / WEIGHTS).write_bytes(save(tensors))
        body["sha256"] = sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**body, **changes}))


def refusal(folder):
    with pytest.raises(BadInput, match="the shipped Tamiyo cannot be used: ") as error:
        read(folder)
    said = str(error.value)
    assert said.endswith("; install esper again.")
    assert said.isprintable()
    assert len(said) <= 199
    return said


def test_she_is_a_few_megabytes_at_most_and_knows_how_she_was_trained():
    found = shipped()
    assert len((HOME / WEIGHTS).read_bytes()) < 4 << 20
    assert found.kinds
    assert {"rng_seed", "rounds", "env_steps", "hours"} <= found.training.keys()
    assert {"config", "versions", "shipped_from"} <= found.training.keys()
    assert shipped() is found


def test_the_package_carries_her_files():
    project = Path(esper.__file__).parents[2] / "pyproject.toml"
    data = tomllib.loads(project.read_text())["tool"]["setuptools"]["package-data"]
    assert {WEIGHTS, MANIFEST} <= {*data["esper.tamiyo.shipped"]}
    assert all((HOME / name).is_file() for name in (WEIGHTS, MANIFEST))


def test_names_are_known_before_her_numbers_are_read():
    script = (
        "import sys, esper.tamiyo.named as it; assert 'tamiyo' in it.NAMES; "
        "assert 'safetensors' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("slots", [1, 3, 40])
@pytest.mark.parametrize("blueprints", [BLUEPRINTS, BLUEPRINTS[5:6], BLUEPRINTS[:5]])
def test_she_speaks_legally_for_any_number_of_slots_and_blueprints(slots, blueprints):
    spec = ActionSpec(SlotConfig(max_slots=slots), blueprints)
    controller, state = named("tamiyo", spec), None
    assert isinstance(controller, Controller)
    generator = Generator().manual_seed(0)
    for first in (True, False, False):
        seen = random_observation(
            16, spec, generator, first=torch.full((16,), first), density=0.9
        )
        masks = compute_masks(seen, spec)
        actions, state = controller.decide(seen, masks, state, generator)
        require_legal(seen, spec, actions)


def test_she_plants_only_what_she_was_trained_with():
    spec, generator = ActionSpec(), Generator().manual_seed(0)
    controller = shipped()(spec)
    seen = random_observation(64, spec, generator, density=1.0)
    # Nothing but planting and waiting is possible, and planting is pressed on her.
    controller._controller.op_out.bias.data[Op.GERMINATE] += 1e3
    masks = compute_masks(seen, spec)
    actions, _ = controller.decide(seen, masks, None, generator)
    plants = actions[:, HEAD["op"]] == Op.GERMINATE
    assert plants.any()
    for choice in actions[plants, HEAD["blueprint"]].tolist():
        assert (BLUEPRINTS[choice].form, BLUEPRINTS[choice].size) in shipped().kinds
    style = actions[plants, HEAD["style"]]
    assert (style == 0).all()  # ADD is all that she saw


def test_making_her_draws_no_random_number():
    torch.manual_seed(5)
    named("tamiyo", ActionSpec())
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))


def test_she_grows_a_users_own_network():
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
    assert one.config == two.config
    assert one.kinds == two.kinds
    assert all(
        torch.equal(one.weights[name], two.weights[name]) for name in two.weights
    )


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS])
def test_a_missing_file_is_told_of(copy, name):
    (copy / name).unlink()
    assert f"{name} is missing" in refusal(copy)


def test_one_changed_byte_of_the_numbers_is_told_of(copy):
    data = bytearray((copy / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS).write_bytes(data)
    assert f"{WEIGHTS} has SHA-256 " in refusal(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "{}", '{"format": 1}', "\xff"])
def test_a_broken_manifest_is_told_of(copy, text):
    (copy / MANIFEST).write_bytes(text.encode("latin-1"))
    assert f"{MANIFEST} is damaged" in refusal(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format 2, not 1"),
        ({"policy": {"width": 0}}, "is damaged"),
        ({"policy": {"girth": 1}}, "is damaged"),
        ({"blueprints": [{"form": "WIDER", "size": 8}]}, "is damaged"),
        ({"choices": 3}, "is damaged"),
    ],
)
def test_a_manifest_that_cannot_be_meant_is_told_of(copy, changes, words):
    rewrite(copy, **changes)
    assert words in refusal(copy)


def test_numbers_of_another_shape_or_name_are_told_of(copy):
    tensors = load((copy / WEIGHTS).read_bytes())
    rewrite(copy, {**tensors, "op_out.bias": torch.zeros(2)})
    assert "op_out.bias is float32[2], expected float32[6]" in refusal(copy)
    rewrite(copy, {n: t for n, t in tensors.items() if n != "op_out.bias"})
    assert "op_out.bias is missing" in refusal(copy)


def test_numbers_that_are_not_finite_are_told_of(copy):
    tensors = load((copy / WEIGHTS).read_bytes())
    tensors["value_out.bias"] = torch.tensor([torch.nan])
    rewrite(copy, tensors)
    assert "value_out.bias in tamiyo.safetensors is not finite" in refusal(copy)


def test_what_is_no_safetensors_file_is_told_of(copy):
    (copy / WEIGHTS).write_bytes(b"PK\x03\x04 and so on")
    digest = sha256((copy / WEIGHTS).read_bytes()).hexdigest()
    rewrite(copy, sha256=digest)
    assert f"{WEIGHTS} does not fit: " in refusal(copy)


def test_her_blueprints_are_told_apart_by_form_and_size():
    kinds = shipped().kinds
    assert all(isinstance(form, Form) and size > 0 for form, size in kinds)
