"""Counted parameters and multiply-adds equal the real ones, also after an export."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import esper
from benchmarks.zoo import ARCHITECTURES, CLASSES, ROWS, Mlp
from esper.contracts.errors import InvalidInputError
from esper.grower import Grower
from esper.growth.analysis.tracing import count_macs
from esper.growth.model import GrowingModel
from esper.growth.saving.export import export

OWN = [name for name, one in ARCHITECTURES.items() if isinstance(one.build, type)]
HUGGING = [name for name in ARCHITECTURES if name not in OWN]


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def begin(name):
    if name in HUGGING:
        pytest.importorskip("transformers")
    architecture = ARCHITECTURES[name]
    model = architecture.make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    options = {"example": architecture.example(), "controller": "never"}
    with warnings.catch_warnings(action="ignore"):
        grower = Grower(model, optimizer, [architecture.slot], **options)
    return model, optimizer, grower


@pytest.mark.parametrize("name", ARCHITECTURES)
# DeBERTa-v2 is scripted when its module is imported.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_every_architecture_exports_what_was_counted(name):
    architecture = ARCHITECTURES[name]
    model, optimizer, grower = begin(name)
    first, second = grower.model.slots[0], grower.model.slots[-1]
    grower.plant(first, architecture.blueprint, tempo="AT_ONCE")
    for index in range(2):
        batch = architecture.batch(index)
        loss = grower.loss(lambda batch=batch: model(**batch)["loss"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    grower.plant(second, architecture.blueprint, tempo="SLOW")  # an export has it not
    assert grower.model.count().parameters == parameters(model)
    plain, told = grower.export().eval(), grower.model.count(exported=True)
    example = architecture.example()
    assert told.parameters == parameters(plain)
    assert told.macs == count_macs(lambda: plain(**example)) // ROWS
    assert f"an export has {told.parameters:,} parameters" in grower.summary()
    again = esper.rebuild(architecture.make(), plain.state_dict()).eval()
    with torch.no_grad():
        assert torch.equal(plain(**example)["logits"], again(**example)["logits"])
    assert type(plain) is type(again) is type(model)


def test_multiply_adds_are_half_of_what_torch_counts_as_operations():
    model, x = Mlp(), torch.randn(5, 6)
    with FlopCounterMode(display=False) as counter:
        model(x)
    by_hand = 5 * (6 * 16 + 16 * 16 + 16 * CLASSES)
    assert count_macs(lambda: model(x)) == by_hand == counter.get_total_flops() // 2


@pytest.mark.parametrize(
    ("slot", "blueprint"),
    [("fc2->fc2", "low_rank_4"), ("fc2", "low_rank_4"), ("fc2", "scale_shift")],
)
@pytest.mark.parametrize("style", ["ADD", "SCALE"])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_seeds_add_what_is_left_of_them_in_an_export(
    slot, blueprint, style, bias
):
    host = Mlp()
    if not bias:
        host.fc2.bias = None
    model = GrowingModel(host, [slot], {"x": torch.randn(4, 6)})
    model.plant(f"{slot}#0", blueprint, tempo="AT_ONCE", style=style)
    assert model.count().parameters == parameters(model.host)
    assert model.count(exported=True).parameters == parameters(export(model))


@pytest.mark.parametrize(
    ("sizes", "line"),
    [
        ((4, 8, 26), "'2' has 3 outputs here and 26 there"),
        ((7, 8, 3), "'0' has 4 inputs here and 7 there"),
        ((8, 8, 6), "'2' has 3 outputs here and 6 there"),  # nothing between them
        ((8, 16, 3), "'0' has 4 inputs here and 8 there"),
    ],
)
def test_the_state_of_another_host_is_refused_and_nothing_changes(
    sizes, line, tmp_path
):
    def make(first, hidden, last):
        layers = nn.Linear(first, hidden), nn.BatchNorm1d(hidden)
        return nn.Sequential(*layers, nn.Linear(hidden, last))

    host = make(4, 8, 3)
    shapes = {name: p.shape for name, p in host.named_parameters()}
    esper.save(make(*sizes), tmp_path / "other.safetensors")
    with pytest.raises(
        InvalidInputError, match=f"the state is from another host: {line}"
    ):
        esper.load(tmp_path / "other.safetensors", host)
    assert shapes == {name: p.shape for name, p in host.named_parameters()}
    assert esper.rebuild(host, make(4, 16, 3).state_dict())[0].out_features == 16


def test_a_norm_that_grew_alone_is_of_another_host():
    host, state = nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(6, affine=False)
    with pytest.raises(InvalidInputError, match="has 4 channels here and 6 there"):
        esper.rebuild(nn.Sequential(host), nn.Sequential(state).state_dict())


def test_the_state_of_an_export_that_does_not_fit_is_refused_and_nothing_changes():
    model = GrowingModel(Mlp(), ["fc1->fc2", "fc2"], {"x": torch.randn(4, 6)})
    model.plant("fc1->fc2#0", "widen_8", tempo="AT_ONCE")
    state = export(model).state_dict()
    host = Mlp()
    shapes = {name: p.shape for name, p in host.named_parameters()}
    spoilt = {**state, "fc3.weight": torch.zeros(CLASSES - 1, 16)}
    with pytest.raises(
        InvalidInputError, match=r"fc3\.weight was \[3, 16\] and is \[4, 16\]"
    ):
        esper.rebuild(host, spoilt)
    assert shapes == {name: p.shape for name, p in host.named_parameters()}
    assert (host.fc1.out_features, host.fc2.in_features) == (16, 16)
    esper.rebuild(host, state)
    assert (host.fc1.out_features, host.fc2.in_features) == (24, 24)
    model.plant("fc2#0", "squeeze_excite", tempo="AT_ONCE")
    with pytest.raises(InvalidInputError, match="not all seeds were merged"):
        esper.rebuild(Mlp(), export(model).state_dict())


def test_an_export_with_seeds_that_nothing_could_load_is_not_saved(tmp_path):
    model = GrowingModel(Mlp(), ["fc2"], {"x": torch.randn(4, 6)})
    model.plant("fc2#0", "squeeze_excite", tempo="AT_ONCE")
    with pytest.raises(
        InvalidInputError, match=r"not all seeds were merged. Save .* esper\.save"
    ):
        esper.save(export(model), tmp_path / "net.safetensors")
    assert not [*tmp_path.iterdir()]
    esper.save(model.host, tmp_path / "net.safetensors")
    esper.load(tmp_path / "net.safetensors", Mlp())
