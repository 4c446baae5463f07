"""Analysis of a host: layouts, paths between layers and suggested slots."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from esper.contracts.errors import InvalidInputError
from esper.growth.analysis import slots
from esper.growth.analysis.interlayer import (
    SavedSteps,
    new_interlayer,
    restore_interlayer,
)
from esper.growth.analysis.slots import analyse_host, choose_slots, suggest_slots
from esper.growth.blueprints.geometry import Layout
from esper.growth.model import GrowingModel
from tests.growth.hosts import HOSTS, Scale, make_batch, make_host

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class TwoLayers(nn.Module):
    """Two layers with something between them."""

    def __init__(self, between, width=12):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(width, 5)
        self.between = between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class Cut(nn.Module):
    """Weights that look like one per unit, in code that mixes units."""

    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.gamma.sum()


class Fork(TwoLayers):
    """The hidden tensor has two readers."""

    def forward(self, x):
        hidden = torch.relu(self.first(x))
        return self.second(hidden) + hidden[:, :5]


def analyse(host, *slots, example=X):
    return analyse_host(host, slots, example)


def place(host, slot="first->second", example=X):
    return analyse(host, slot, example=example).places[0]


@pytest.mark.parametrize(
    "between",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.GELU(), nn.Dropout(0.3)),
        nn.BatchNorm1d(12),
        nn.LayerNorm(12),
        nn.RMSNorm(12),
        nn.PReLU(),
        nn.PReLU(12),
        Scale(12),
        Scale(1),
        lambda h: h * torch.sigmoid(1.7 * h),
        lambda h: F.dropout(torch.tanh(h), 0.2, training=False),
        lambda h: F.leaky_relu(h, 0.2),
        lambda h: h.clamp(min=0).mul(2.0),
    ],
)
def test_channel_wise_work_between_two_layers_lets_units_in(between):
    found = place(TwoLayers(between))
    assert found.geometry.why_no_span == ""
    assert found.geometry.spans
    assert found.geometry.hidden_shape == (12,)
    units = new_interlayer(found.interlayer, 3, 12)
    assert units(torch.randn(4, 3)).shape == (4, 3)


@pytest.mark.parametrize(
    ("between", "reason"),
    [
        (lambda h: torch.softmax(h, dim=1), "mixes channels"),
        (lambda h: h + h.mean(dim=1, keepdim=True), "mean between the layers"),
        (Cut(12), "'between' (Cut) between the layers mixes channels"),
        (lambda h: h + X.sum(), "mixes the hidden tensor with another"),
        (nn.Linear(12, 12), "'between' reads the first layer's output"),
        (lambda h: h.chunk(2, dim=1)[0].repeat(1, 2), "chunk splits the hidden tensor"),
        (lambda h: h.flip(1), "mixes channels"),
        (lambda h: h.cumsum(1), "mixes channels"),
        (lambda h: h.unsqueeze(-1).squeeze(-1), "unsqueeze between the layers"),
        (None, "also used elsewhere"),
    ],
)
def test_work_that_mixes_channels_does_not(between, reason):
    found = place(TwoLayers(between) if between else Fork(nn.ReLU()))
    assert not found.geometry.spans
    assert reason in found.geometry.why_no_span


def test_a_norm_over_neighbours_does_not_though_it_hardly_changes_the_example():
    norm = nn.LocalResponseNorm(3)
    host = nn.Sequential(nn.Conv1d(2, 6, 1), norm, nn.Conv1d(6, 3, 1))
    found = place(host, "0->2", torch.randn(2, 2, 5))
    assert "mixes channels" in found.geometry.why_no_span


class Modes(TwoLayers):
    """The steps between the layers depend on the mode."""

    def forward(self, x):
        return self.second(self.between(torch.relu(self.first(x)), self.training))


@pytest.mark.parametrize(
    ("between", "how"),
    [
        (lambda h, t: h + torch.randn_like(h) if t else h, "the steps are different"),
        (lambda h, t: h + torch.randn(12) if t else h, "add mixes the hidden tensor"),
        (lambda h, t: torch.tanh(h) if t else h, "the steps are different"),
        (lambda h, t: h if t else torch.tanh(h), "the steps are different"),
        (lambda h, t: h * 1.0 if t else h * 2.0, "the steps are different"),
    ],
)
def test_a_pair_is_refused_if_its_way_differs_in_training_mode(between, how):
    host = Modes(between)
    with pytest.raises(
        InvalidInputError, match="'first->second' works in eval mode only"
    ) as e:
        place(host)
    assert f"in training mode {how}" in str(e.value).replace("the hidden tensor f", "f")
    assert "\n" not in str(e.value)
    found = suggest_slots(host, X)
    assert found == ("first->first", "second->second")
    assert how in found.skipped["first"]


def test_a_layer_that_training_leaves_out_at_random_is_found_and_others_are_not():
    class Dropped(TwoLayers):
        share = 0.3

        def forward(self, x):
            if self.training and torch.rand(()) < self.share:
                return x[:, :5]
            return super().forward(x)

    host = Dropped(nn.ReLU())
    for seed in range(8):
        torch.manual_seed(seed)
        streams = torch.get_rng_state()
        assert suggest_slots(host, X) == ("first->second",)
        assert torch.equal(streams, torch.get_rng_state())
    host.share = 1.0
    with pytest.raises(
        InvalidInputError, match="in training mode 'first' is never called"
    ):
        place(host)


@pytest.mark.parametrize(
    "between",
    [
        lambda h, t: F.dropout(h, 0.5) if t else h,
        lambda h, t: F.dropout(h, 0.5, t),
        lambda h, t: torch.relu(F.dropout(h, 0.5)) if t else torch.relu(h),
    ],
)
def test_dropout_that_only_training_calls_is_in_new_units_too(between):
    host = Modes(between)
    found = place(host)
    for interlayer in (found.interlayer, saved_and_read(found.recipe, host)):
        units, ones = new_interlayer(interlayer, 6, 12), torch.ones(4, 6)
        assert {*units.train()(ones).flatten().tolist()} == {0.0, 2.0}
        assert torch.equal(units.eval()(ones), ones)


def test_a_hidden_tensor_that_is_part_of_the_answer_takes_no_units():
    class Returned(TwoLayers):
        def forward(self, x):
            hidden = torch.relu(self.first(x))
            return self.second(hidden), {"hidden": hidden}

    why = place(Returned(None)).geometry.why_no_span
    assert why == "the hidden tensor is part of the host's output"


def saved_and_read(steps, host):
    adapter = TypeAdapter(SavedSteps)
    read = adapter.validate_json(adapter.dump_json(steps), strict=True)
    return restore_interlayer(read, dict(host.named_modules()))


class Image(nn.Module):
    """A convolution and what reads it, with something between them."""

    def __init__(self, between, second):
        super().__init__()
        self.first, self.second, self.between = nn.Conv2d(3, 8, 3), second, between

    def forward(self, x):
        return self.second(self.between(torch.relu(self.first(x)), self.training))


@pytest.mark.parametrize(
    "between",
    [
        lambda h, training: h.mean((2, 3)),
        lambda h, training: h.amax((2, 3)),
        lambda h, training: F.adaptive_avg_pool2d(h, 1).view(h.shape[0], 8),
        lambda h, training: F.adaptive_avg_pool2d(h, 1).reshape((len(h), -1)),
    ],
)
def test_pooling_and_flattening_let_units_in_however_they_are_written(between):
    x = torch.randn(4, 3, 6, 6)
    found = place(Image(between, nn.Linear(8, 5)), example=x)
    assert found.geometry.why_no_span == ""
    assert found.geometry.unit_inputs == 1
    units = new_interlayer(found.interlayer, 3, 8)
    assert units(torch.randn(2, 3, 4, 4)).shape == (2, 3)


def test_a_number_of_rows_is_not_taken_for_a_constant():
    def windows(h, training):
        return h.view(h.shape[0], -1, h.shape[2], h.shape[3])

    host = Image(windows, nn.Conv2d(8, 4, 1))
    found = place(host, example=torch.randn(4, 3, 6, 6))
    assert found.geometry.spans
    again = saved_and_read(found.recipe, host)
    for interlayer in (found.interlayer, again):
        given = torch.randn(2, 3, 4, 4)
        assert torch.equal(new_interlayer(interlayer, 3, 8)(given), torch.relu(given))


@pytest.mark.parametrize(
    ("shape", "between", "why"),
    [
        ((4, 8), lambda h: h / len(h), "div: the batch size"),
        ((1, 8), lambda h: h / h.shape[0], "div: the batch size"),
        ((4, 8), lambda h: h.view(4, 12) / len(h), ""),  # takes one batch size
        ((4, 6, 8), lambda h: h.sum(1) / h.shape[1], "div: the length of axis 1"),
        ((4, 8, 8), lambda h: h.sum(1) / h.shape[1], "div: the length of axis 1"),
        ((4, 6, 8), lambda h: h[:, h.shape[1] - 1], "__getitem__: the length of axis"),
        ((4, 6, 8), lambda h: h.view(len(h), h.shape[1] // 2, 2, -1).mean(2), ""),
        ((4, 6, 8), lambda h: F.dropout(h.mean(1), training=False), ""),
    ],
)
def test_numbers_may_not_depend_on_the_size_of_the_example(shape, between, why):
    class Cached(TwoLayers):
        def forward(self, x):
            self.rows = min(len(x), getattr(self, "rows", 9))
            return super().forward(x)

    host, x = Cached(between), torch.randn(shape)
    operation, _, what = why.partition(": ")
    found = place(host, example=x).geometry.why_no_span
    assert host.rows == len(x)
    if why:
        expected = f"a number of {operation} between the layers depends on {what}"
        assert found.startswith(expected)
    else:
        assert found == ""


def test_functional_dropouts_are_dropouts_in_new_units_too():
    host = Image(lambda h, training: F.dropout2d(h, 0.5, training), nn.Conv2d(8, 4, 1))
    found = place(host, example=torch.randn(4, 3, 6, 6))
    again = saved_and_read(found.recipe, host)
    for interlayer in (found.interlayer, again):
        units, ones = new_interlayer(interlayer, 6, 8), torch.ones(4, 6, 4, 4)
        assert {*units.train()(ones).flatten().tolist()} == {0.0, 2.0}
        assert torch.equal(units.eval()(ones), ones)


def test_layouts_are_distinguished_and_a_flattened_unit_has_all_its_inputs():
    for kind, slot, layout in (
        ("vector", "second", Layout.VECTOR),
        ("sequence", "norm", Layout.SEQUENCE),
        ("signal", "first", Layout.SIGNAL),
        ("image", "second", Layout.IMAGE),
    ):
        found = place(make_host(kind), slot, make_batch(kind, 4)[0])
        assert found.geometry.outlet_layout is layout
    found = place(make_host("image"), "second->last", make_batch("image", 4)[0])
    assert found.geometry.spans
    assert found.geometry.unit_inputs == 16


def test_analysis_has_no_side_effects():
    host = make_host("vector")
    host.train()
    host.norm.eval()
    before = {name: t.clone() for name, t in host.state_dict().items()}
    streams = torch.get_rng_state()
    analyse(host, *HOSTS["vector"].slots, example=make_batch("vector", 4)[0])
    assert all(torch.equal(before[n], t) for n, t in host.state_dict().items())
    assert torch.equal(streams, torch.get_rng_state())
    assert host.training
    assert not host.norm.training
    assert all(p.grad is None for p in host.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in host.modules())


def test_depths_rise_and_parameters_and_macs_are_counted():
    names, example = ("first", "second", "last"), make_batch("vector")[0]
    seen = analyse(make_host("vector"), *names, example=example)
    depths = [found.depth for found in seen.places]
    assert depths == sorted(depths)
    assert 0 < depths[0] < depths[-1] <= 1
    assert seen.parameters == 8 * 12 + 12 + 24 + 12 * 12 + 12 + 12 * 5 + 5
    assert seen.macs == 8 * 12 + 12 * 12 + 12 * 5


@pytest.mark.parametrize(
    ("kind", "slots"),
    [
        ("vector", ("first->second", "second->last")),
        ("sequence", ("up->down",)),
        ("signal", ("first->second", "second->last")),
        ("image", ("first->second", "second->last")),
    ],
)
def test_places_between_layers_are_suggested_from_input_to_output(kind, slots):
    assert suggest_slots(make_host(kind), make_batch(kind, 4)[0]) == slots


def test_a_host_without_such_places_is_offered_those_beside_its_layers():
    host = TwoLayers(lambda h: torch.softmax(h, dim=1))
    assert suggest_slots(host, X) == ("first->first", "second->second")
    with pytest.raises(InvalidInputError, match="name slots by hand"):
        suggest_slots(nn.Sequential(nn.Embedding(4, 3)), torch.zeros(2, 3).long())


def test_the_operation_in_the_way_is_named_where_no_pair_of_layers_can_grow():
    host = TwoLayers(lambda h: torch.softmax(h, dim=1))
    in_the_way = "softmax between the layers"
    assert in_the_way in suggest_slots(host, X).skipped["first"]
    with pytest.raises(InvalidInputError, match=f"can grow.*first: .*{in_the_way}"):
        GrowingModel(host, "auto", X, blueprints=["widen_8"])
    assert GrowingModel(host, "auto", X, blueprints=["low_rank_4"]).slots


def test_what_is_skipped_is_named_with_its_reason():
    host = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.Conv2d(8, 6, 1, padding_mode="circular"),
        nn.Conv2d(6, 6, 1),
        nn.ReLU(),
        nn.Conv2d(6, 3, 1),
    )
    found = suggest_slots(host, torch.randn(2, 4, 5, 5))
    assert found == ("4->6",)
    groups = "is a grouped convolution with 2 groups"
    assert found.skipped["2"] == groups
    assert found.skipped["0"] == f"'2' {groups}"
    assert found.skipped["3"] == "has padding 'circular'; use zeros"
    assert found.skipped["6"] == "no other layer reads its output"
    assert str(found).splitlines()[:2] == ["4->6", "skipped:"]


def test_a_layer_that_cannot_be_analysed_is_skipped_with_a_reason(monkeypatch):
    host = nn.Sequential(
        nn.Conv2d(3, 16, 1),
        nn.PixelShuffle(2),
        nn.Conv2d(4, 8, 1),
        nn.ReLU(),
        nn.Conv2d(8, 4, 1),
    )
    found = suggest_slots(host, torch.randn(2, 3, 4, 4))
    assert found == ("2->4",)
    assert found.skipped["0"].startswith("'1' (PixelShuffle) between the layers")

    def broken(host, name, module):
        if name == "0":
            raise RuntimeError("odd module")

    monkeypatch.setattr(slots, "check_not_shared", broken)
    host = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
    found = suggest_slots(host, X)
    assert found == ("1->2",)
    assert found.skipped["0"] == "analysing it failed, RuntimeError: odd module"


def test_a_module_may_be_given_a_view_of_a_parameter():
    class Relative(nn.Module):
        def __init__(self):
            super().__init__()
            self.rel, self.norm = nn.Embedding(6, 8), nn.LayerNorm(8)
            self.first, self.last = nn.Linear(8, 12), nn.Linear(12, 3)

        def forward(self, x):
            return self.last(self.first(x + self.norm(self.rel.weight[0:4])).relu())

    assert analyse(Relative(), "first->last").macs == 8 * 12 + 12 * 3


class Blocks(nn.Module):
    """Two named MLPs one after the other, and a head."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(8, 12), nn.ReLU(), last)})
            for last in (nn.Linear(12, 8), nn.Linear(12, 8))
        )
        self.head = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["mlp"](x)
        return self.head(x)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (
            ["*.mlp"],
            ["blocks.0.mlp.0->blocks.0.mlp.2", "blocks.1.mlp.0->blocks.1.mlp.2"],
        ),
        (["blocks.1.*"], ["blocks.1.mlp.0->blocks.1.mlp.2"]),
        (["head", "blocks.0.mlp.0->*"], ["head", "blocks.0.mlp.0->blocks.0.mlp.2"]),
        (["hea?"], ["head.0->head.2"]),
    ],
)
def test_patterns_name_slots_and_modules_that_hold_them(patterns, found):
    assert [*choose_slots(Blocks(), patterns, X)] == found


def test_recurrent_layers_count_their_products():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(5, 7, num_layers=2, bidirectional=True, batch_first=True)
            self.first, self.last = nn.Linear(14, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.first(self.rnn(x)[0][:, -1]).relu())

    example = torch.randn(2, 6, 5)
    host = Recurrent()
    seen = analyse_host(host, ["first->last"], example)
    cells = 6 * 2 * 4 * 7 * ((5 + 7) + (14 + 7))
    assert seen.macs == cells + 14 * 6 + 6 * 3


def test_fused_attention_is_neither_random_nor_switched_off_for_good():
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    host = nn.TransformerEncoder(layer, 1).eval()
    example = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    slots = suggest_slots(host, example)
    assert slots == ("layers.0.linear1->layers.0.linear2",)
    assert analyse(host, *slots, example=example).places[0].geometry.spans
    assert torch.backends.mha.get_fastpath_enabled()
