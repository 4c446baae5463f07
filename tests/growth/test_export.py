import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.contracts.errors import InvalidInputError
from esper.contracts.stages import Stage
from esper.growth.blueprints.registry import blueprint, misfit
from esper.growth.model import GrowingModel
from esper.growth.saving import folding
from esper.growth.saving.export import Branches, export
from tests.growth.hosts import Net, SqueezeExcite, everything

ORDERS = [
    ["fc2", "fc2->fc2", "fc1->fc2"],
    ["fc1->fc2", "fc2->fc2", "fc2"],
    ["fc2->fc2", "fc2", "fc1->fc2"],
]
SPANNING = tuple(b.name for b in BLUEPRINTS if b.form is Form.WIDEN)
LINEAR = ("low_rank_4", "low_rank_16", "scale_shift")


class Mlp(nn.Module):
    """Vectors."""

    def __init__(self, norm=nn.Identity, bias=True):
        super().__init__()
        self.fc1 = nn.Linear(8, 8, bias=bias)
        self.norm = norm()
        self.fc2 = nn.Linear(8, 8, bias=bias)
        self.fc3 = nn.Linear(8, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.fc1(x)))
        return self.fc3(F.dropout(F.gelu(self.fc2(x)), 0.2, self.training))


def tokens():
    return Net(
        fc1=nn.Linear(4, 8),
        act=nn.ReLU(),
        fc2=nn.Linear(8, 8, bias=False),
        norm=nn.LayerNorm(8, bias=False),
        head=nn.Linear(8, 3),
    )


def signals():
    return Net(
        conv1=nn.Conv1d(3, 8, 3, stride=2, padding=1, bias=False),
        norm=nn.BatchNorm1d(8),
        act=nn.ReLU(),
        conv2=nn.Conv1d(8, 8, 3, padding=2, dilation=2),
        pool=nn.AdaptiveAvgPool1d(1),
        flat=nn.Flatten(),
        head=nn.Linear(8, 3),
    )


def images(norm=nn.BatchNorm2d):
    return Net(
        conv1=nn.Conv2d(2, 8, 3, padding=1),
        norm=norm(8),
        act=nn.ReLU(),
        pool=nn.MaxPool2d(2),
        conv2=nn.Conv2d(8, 4, 3, padding=1, bias=False),
        last=nn.BatchNorm2d(4),
        flat=nn.Flatten(),
        head=nn.Linear(36, 3),
    )


def squeezed(linear=False):
    return Net(
        conv1=nn.Conv2d(2, 8, 1),
        depth=nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        norm=nn.BatchNorm2d(8),
        squeeze=SqueezeExcite(8, 2, linear=linear),
        conv2=nn.Conv2d(8, 4, 1),
        pool=nn.AdaptiveAvgPool2d(1),
        flat=nn.Flatten(),
        head=nn.Linear(4, 3),
    )


class ByHand(nn.Module):
    """A convolution whose size the forward writes out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.fc1 = nn.Linear(36, 8)
        self.fc2 = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc2(self.fc1(self.conv(x).relu().view(-1, 36)).relu())


HOSTS = {
    "mlp": (Mlp, (5, 8)),
    "mlp without bias": (lambda: Mlp(bias=False), (5, 8)),
    "tokens": (tokens, (5, 7, 4)),
    "signals": (signals, (5, 3, 12)),
    "images": (images, (5, 2, 6, 6)),
    "by hand": (ByHand, (5, 2, 5, 5)),
    "squeezed": (squeezed, (5, 2, 6, 6)),
    "squeezed, linear": (lambda: squeezed(linear=True), (5, 2, 6, 6)),
}
PLACES = {
    "mlp": ("fc1->fc2", "fc2->fc2", "fc2"),
    "mlp without bias": ("fc1->fc2", "fc2->fc2", "fc2"),
    "tokens": ("fc1->fc2", "fc2->fc2", "fc2", "norm"),
    "signals": ("conv1->conv2", "conv1->conv1", "conv2->conv2", "conv2", "norm"),
    "images": ("conv1->conv2", "conv1->conv1", "conv2->head", "conv2", "last"),
    "squeezed": ("conv1->conv2",),
    "squeezed, linear": ("conv1->conv2",),
}


def grow(make, shape, slots, **options):
    torch.manual_seed(1)
    host = make().double()
    for module in host.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            randomise(module)
    return GrowingModel(
        host, slots, torch.randn(shape, dtype=torch.float64), **options
    ).eval()


def host_of(name, slots, **options):
    return grow(*HOSTS[name], slots, **options)


def randomise(module):
    """Weights and running figures that are neither zero nor one."""
    for parameter in module.parameters():
        parameter.data.normal_(std=0.5)
    for key, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5) if "var" in key else buffer.normal_()


def hold(model, slot, name, style="ADD", target="MOST"):
    model.plant(slot, name, style=style, alpha_target=target, tempo="FAST")
    randomise(model.seeds[f"slot_{model.seeds.index(slot)}"])
    model.tick(2)
    assert model.stage(slot) is Stage.HOLDING


def picture(module):
    """All tensors and hooks of a module, by identity and by value."""
    tensors = [id(t) for t in (*module.parameters(), *module.buffers())]
    hooks = [
        [*m._forward_hooks.items(), *m._forward_pre_hooks.items(), m.training]
        for m in module.modules()
    ]
    return everything(module), tensors, hooks


def assert_agrees(model, plain, rtol=1e-6):
    """Both answer alike; says how much of the answer is the seeds' doing."""
    shape = (9, *model.example.shape[1:])
    x = torch.randn(shape, dtype=model.example.dtype)
    kept = [hooks.branches for hooks in model.seeds.hooks]
    with torch.no_grad():
        expected, found = model(x), plain(x)
        for hooks in model.seeds.hooks:
            hooks.branches = {}
        bare = model(x)
    for hooks, branches in zip(model.seeds.hooks, kept, strict=True):
        hooks.branches = branches
    assert (expected - found).abs().max() <= rtol * expected.abs().max()
    return (expected - bare).abs().max() / expected.abs().max()


def branches(plain):
    """Slots whose seeds are branches of an export."""
    return [line.split(":")[0] for line in reasons(plain)]


def reasons(plain):
    """Why seeds are branches of an export, slot by slot."""
    kept = getattr(plain, "esper_seeds", None)
    assert kept is None or isinstance(kept, Branches)
    return kept.reasons if kept is not None else []


def assert_plain(plain, host):
    assert type(plain) is type(host)
    ours = {id(p) for p in host.parameters()} | {id(b) for b in host.buffers()}
    stored = {t.untyped_storage().data_ptr() for t in host.state_dict().values()}
    for module in plain.modules():
        assert not type(module).__module__.startswith("esper")
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for tensor in plain.state_dict(keep_vars=True).values():
        assert id(tensor) not in ours
        assert tensor.untyped_storage().data_ptr() not in stored
    assert b"esper" not in pickle.dumps(plain)


def parameters(module):
    return sum(p.numel() for p in module.parameters())


def folds(name, place):
    """Whether this blueprint disappears at this place, by the form's own maths."""
    if name in SPANNING:
        return True
    if name not in LINEAR:
        return False
    if place.site.residual:
        norm = isinstance(place.outlet, nn.LayerNorm | nn.BatchNorm1d | nn.BatchNorm2d)
        return not norm or name == "scale_shift"
    linear = isinstance(place.outlet, nn.Linear)
    return place.geometry.beside and (linear or name != "scale_shift")


@pytest.mark.parametrize(
    ("host", "slot"), [(host, slot) for host in PLACES for slot in PLACES[host]]
)
def test_every_blueprint_is_exported_wherever_it_fits(host, slot):
    model = host_of(host, [slot])
    place = model.seeds.places[0]
    names = [one.name for one in BLUEPRINTS if not misfit(one, place.geometry)]
    assert names
    for name in names:
        hold(model, f"{slot}#0", name)
        before = picture(model)
        plain = export(model)
        apart = export(model, merge=False)
        assert before == picture(model)
        assert assert_agrees(model, plain) > 1e-3
        assert_agrees(model, apart)
        assert reasons(apart)
        assert parameters(apart) == parameters(model)
        if folds(name, place):
            assert_plain(plain, model.host)
            assert parameters(plain) == expected_parameters(model, place, name)
        else:
            assert reasons(plain)
            assert branches(plain) == [f"{slot}#0"]
            assert parameters(plain) == parameters(model)
        model.remove(0)


def expected_parameters(model, place, name):
    host = model.first_cost.parameters
    if name in SPANNING:
        assert parameters(model) == model.count().parameters
        return model.count(exported=True).parameters
    made = place.outlet.weight.shape[0] if place.outlet.bias is None else 0
    return host + (made if name == "scale_shift" else 0)


@pytest.mark.parametrize("order", [1, -1])
def test_places_that_share_a_layer_are_both_widened(order):
    model = host_of("mlp", ["fc1->fc2", "fc2->fc3"][::order])
    hold(model, "fc1->fc2#0", "widen_8")
    hold(model, "fc2->fc3#0", "widen_16")
    hold(model, "fc1->fc2#1", "widen_8", target="HALF")
    plain = export(model)
    assert_plain(plain, model.host)
    assert assert_agrees(model, plain) > 1e-3
    assert (plain.fc2.out_features, plain.fc2.in_features) == (24, 24)
    # The new units of fc2 do not read those of fc1: weights of zero.
    assert parameters(plain) == parameters(model)  # with the blocks between units


@pytest.mark.parametrize("slots", ORDERS)
def test_what_a_residual_seed_reads_depends_on_the_order_of_places(slots):
    model = host_of("mlp", slots)
    hold(model, "fc2#0", "low_rank_4")
    hold(model, "fc2#1", "scale_shift")
    hold(model, "fc2->fc2#0", "low_rank_4")
    hold(model, "fc2->fc2#1", "scale_shift")
    hold(model, "fc1->fc2#0", "widen_8")
    plain = export(model)
    assert_plain(plain, model.host)
    assert assert_agrees(model, plain) > 1e-3


@pytest.mark.parametrize("slots", ORDERS)
@pytest.mark.parametrize("branch", ["fc2", "fc2->fc2", "fc1->fc2"])
@pytest.mark.parametrize("style", ["ADD", "SCALE"])
def test_a_branch_goes_on_reading_and_scaling_what_it_did(
    slots, branch, style, monkeypatch
):
    # A wrong plan must show itself, so nothing that was merged is taken back.
    monkeypatch.setattr(folding, "TOLERANCE", 1e9)
    model = host_of("mlp", slots)
    forms = {"fc2": "low_rank_4", "fc2->fc2": "low_rank_4", "fc1->fc2": "widen_8"}
    for slot, name in forms.items():
        hold(model, f"{slot}#0", name, target="FULL")
    hold(model, f"{branch}#1", BRANCHES[branch][style], style=style)
    hold(model, f"{branch}#2", forms[branch])
    plain = export(model)
    assert assert_agrees(model, plain, rtol=1e-9) > 1e-3
    assert f"{branch}#1" in branches(plain)
    # What comes before a branch, or is not read by it, is still merged.
    first = f"{slots[0]}#0"
    assert first not in branches(plain) or slots[0] == branch == "fc2"


BRANCHES = {
    "fc2": {"ADD": "residual_mlp", "SCALE": "scale_shift"},
    "fc2->fc2": {"ADD": "residual_mlp", "SCALE": "residual_mlp"},
    "fc1->fc2": {"ADD": "scale_shift", "SCALE": "widen_8"},
}
"""What stays a branch at a place."""


def test_seeds_that_read_or_write_a_widened_layer_stay_where_they_were():
    model = host_of("images", ["conv1->conv2", "conv1", "norm", "conv2->conv2"])
    hold(model, "conv1->conv2#0", "widen_8")
    hold(model, "conv1#0", "squeeze_excite")
    hold(model, "norm#0", "conv", style="SCALE")
    hold(model, "conv2->conv2#0", "bottleneck")
    plain = export(model)
    assert branches(plain) == ["conv1#0", "norm#0", "conv2->conv2#0"]
    assert plain.conv1.out_channels == 16
    assert assert_agrees(model, plain) > 1e-3


def test_a_merged_norm_trains_as_the_branch_did():
    model = host_of("images", ["conv1->conv2"])
    hold(model, "conv1->conv2#0", "widen_8")
    model.train()
    plain = export(model)
    assert plain.training
    x = torch.randn(6, 2, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(plain(x), model(x), rtol=1e-9, atol=1e-9)
    seed = model.seeds["slot_0"].interlayer[0]
    merged = torch.cat([model.host.norm.running_var, seed.running_var])
    torch.testing.assert_close(plain.norm.running_var, merged, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("width", "norm", "problem"),
    [
        (8, lambda: nn.GroupNorm(1, 8), ""),
        (8, lambda: nn.GroupNorm(4, 8), ""),
        (8, lambda: nn.LayerNorm(8), "LayerNorm between the layers"),
        (12, lambda: nn.GroupNorm(2, 12), "GroupNorm between the layers"),
    ],
)
def test_whole_groups_are_appended_and_units_that_a_norm_mixes_stay_a_branch(
    width, norm, problem
):
    def make():
        host = Mlp(norm)
        host.fc1, host.fc2 = nn.Linear(8, width), nn.Linear(width, 8)
        return host

    model = grow(make, (5, 8), ["fc1->fc2"])
    hold(model, "fc1->fc2#0", "widen_8")
    plain = export(model)
    assert assert_agrees(model, plain) > 1e-3
    assert bool(reasons(plain)) is bool(problem)
    if problem:
        assert problem in reasons(plain)[0]
    else:
        assert plain.norm.num_groups == 2 * model.host.norm.num_groups


def test_a_host_that_writes_out_its_sizes_keeps_branches():
    model = host_of("by hand", ["conv->fc1", "fc1->fc2"])
    hold(model, "conv->fc1#0", "widen_8")
    hold(model, "fc1->fc2#0", "widen_8")
    plain = export(model)
    for slot, reason in zip(model.slots, reasons(plain), strict=False):
        assert reason.startswith(f"{slot}: it would fail, RuntimeError")
    assert assert_agrees(model, plain) > 1e-3


def test_only_active_seeds_are_exported():
    model = host_of("mlp", ["fc1->fc2"])
    hold(model, "fc1->fc2#0", "widen_8")
    model.keep("fc1->fc2#0")
    model.plant("fc1->fc2#1", "widen_8", tempo="SLOW")
    randomise(model.seeds["slot_1"])
    plain = export(model)
    assert plain.fc1.out_features == 16
    model.tick()
    model.advance("fc1->fc2#1")
    model.tick()
    assert 0 < model.seeds.states.alpha[0, 1] < 1
    plain = export(model)
    assert plain.fc1.out_features == 24
    assert assert_agrees(model, plain) > 1e-3
    for _ in range(4):
        model.tick()
    model.prune("fc1->fc2#1", speed="SLOW")
    model.tick()
    assert model.stage("fc1->fc2#1") is Stage.COOLING
    assert assert_agrees(model, export(model)) > 1e-3


def test_an_ungrown_model_is_exported_as_its_host():
    model = host_of("tokens", ["fc2"])
    for merge in (True, False):
        plain = export(model, merge=merge)
        assert_plain(plain, model.host)
        assert_agrees(model, plain, rtol=0)


class Named(Mlp):
    """A host that is called by keywords and answers with several tensors."""

    def forward(self, *, x, scale):
        answer = super().forward(x)
        return {"answer": scale * answer, "sizes": (answer.square().sum(-1), 3)}


def test_a_host_may_be_called_and_answer_in_any_way():
    x = torch.randn(5, 8, dtype=torch.float64)
    given = {"x": x, "scale": 2.0}
    model = GrowingModel(Named().double(), ["fc1->fc2", "fc2"], given).eval()
    hold(model, "fc1->fc2#0", "widen_8")
    hold(model, "fc2#0", "squeeze_excite")
    plain = export(model)
    assert branches(plain) == ["fc2#0"]
    found, expected = plain(**given), model(**given)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@blueprint("test_export_double")
def double(geometry):
    return nn.Linear(geometry.inlet_width, geometry.outlet_width)


def test_a_module_of_the_users_own_stays_a_branch():
    model = host_of("mlp", ["fc2"], blueprints=["test_export_double"])
    hold(model, "fc2#0", "test_export_double")
    plain = export(model)
    assert reasons(plain) == ["fc2#0: it is a module of its own"]
    assert assert_agrees(model, plain) > 1e-3


def mixed():
    model = host_of("mlp", ["fc1->fc2", "fc2"])
    hold(model, "fc1->fc2#0", "widen_8")
    hold(model, "fc2#0", "squeeze_excite")
    return model


@pytest.mark.parametrize("broken", ["host", "seed"])
def test_a_failed_call_is_raised_and_leaves_nothing_behind(broken):
    model = host_of("mlp", ["fc2->fc3"])
    hold(model, "fc2->fc3#0", "widen_8")
    plain = export(model, merge=False)
    if broken == "host":
        plain.fc3.weight = nn.Parameter(torch.ones(3, 3).double())
    else:
        plain.esper_seeds["slot_0"].interlayer = nn.Linear(3, 3).double()
    with pytest.raises(RuntimeError):
        plain(model.example)
    copy.deepcopy(plain)  # a tensor with a history could not be copied


def test_a_branched_export_is_copied_saved_moved_and_trained():
    model = mixed()
    plain = export(model)
    assert type(plain) is type(model.host)
    assert [*plain.esper_seeds] == ["slot_1"]
    file = io.BytesIO()
    torch.save(plain, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = copy.deepcopy(plain)
    x = model.example
    expected = plain(x)
    # They must answer by their own seeds, not by the first one's.
    for parameter in plain.parameters():
        parameter.data.zero_()
    for other in (loaded, copied):
        assert torch.equal(other(x), expected)
    single = copied.to(torch.float32)(x.float())
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-4)
    loaded.train()(x).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())


def test_a_loaded_export_leaves_room_for_further_hooks(monkeypatch):
    file = io.BytesIO()
    torch.save(export(mixed()), file)
    file.seek(0)
    monkeypatch.setattr(RemovableHandle, "next_id", 0)  # as in another process
    loaded = torch.load(file, weights_only=False)
    assert RemovableHandle.next_id > max(loaded.fc2._forward_hooks)


class Doubling:
    """A hook of the user's own."""

    def __init__(self):
        self.seen = 0

    def __call__(self, module, args, answer):
        self.seen += 1
        return 2 * answer


@pytest.mark.parametrize("when", ["before", "after", "first"])
@pytest.mark.parametrize("merge", [True, False])
def test_the_users_own_hooks_are_kept_in_their_order(when, merge):
    torch.manual_seed(1)
    host, x = Mlp().double(), torch.randn(5, 8, dtype=torch.float64)
    if when == "before":
        host.fc2.register_forward_hook(Doubling())
    model = GrowingModel(host, ["fc1->fc2", "fc2"], x).eval()
    if when == "after":  # the seeds' hooks come later, but their place is taken
        host.fc2.register_forward_hook(Doubling())
    hold(model, "fc1->fc2#0", "widen_8")
    if when == "first":
        host.fc2.register_forward_hook(Doubling(), prepend=True)
    hold(model, "fc2#0", "low_rank_4")
    plain = export(model, merge=merge)
    inputs = torch.randn(9, 8, dtype=torch.float64)
    torch.testing.assert_close(plain(inputs), model(inputs), rtol=1e-9, atol=1e-9)
    assert len(branches(plain)) == (0 if merge and when == "after" else 2)


class Outside(nn.Module):
    """A host that calls a module through a closure."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.call = lambda x: self.fc(x)

    def forward(self, x):
        return self.call(x)


def uncopyable():
    model = mixed()
    model.host.kept = model.host.fc1(model.example)
    return model


def outside():
    model = grow(Outside, (3, 4), ["fc"])
    hold(model, "fc#0", "low_rank_4")
    return model


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (outside, InvalidInputError, "does not answer like the host"),
        (uncopyable, InvalidInputError, "cannot be copied"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_unchanged(make, error, reason):
    model = make()
    before = picture(model)
    with pytest.raises(error, match=reason):
        export(model, merge=False)
    assert before == picture(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_less_precision_merges_too(dtype):
    model = mixed().to(dtype)
    plain = export(model)
    assert branches(plain) == ["fc2#0"]
    assert {p.dtype for p in plain.parameters()} == {dtype}


TRACED = [
    ("mlp", "fc1->fc2", "widen_8", True),
    ("mlp", "fc2", "squeeze_excite", True),
    ("tokens", "fc2", "attention", True),
    ("images", "conv1->conv2", "widen_8", False),
]


ANY_BATCH = {0: torch.export.Dim("batch", min=2, max=64)}


@pytest.mark.parametrize(("host", "slot", "name", "merge"), TRACED)
def test_torch_export_takes_it_with_any_batch(host, slot, name, merge):
    model = host_of(host, [slot])
    hold(model, f"{slot}#0", name)
    plain = export(model, merge=merge)
    names = inspect.signature(model.host.forward).parameters
    assert inspect.signature(plain.forward).parameters == names
    shapes = {name: ANY_BATCH for name in names}
    traced = torch.export.export(plain, (model.example,), dynamic_shapes=shapes)
    assert assert_agrees(model, traced.module(), rtol=1e-5) > 1e-3


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(("host", "slot", "name", "merge"), TRACED[::2])
def test_onnx_runtime_answers_alike(host, slot, name, merge, tmp_path):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model = host_of(host, [slot])
    hold(model, f"{slot}#0", name)
    model.float()
    plain = export(model, merge=merge)
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(
        plain,
        (model.example.float(),),
        file,
        dynamo=True,
        dynamic_shapes=(ANY_BATCH,),
        verbose=False,
    )
    session = runtime.InferenceSession(file)
    x = torch.randn(9, *model.example.shape[1:])
    given = {session.get_inputs()[0].name: x.numpy()}
    found = torch.from_numpy(session.run(None, given)[0])
    expected = model(x).detach()
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
