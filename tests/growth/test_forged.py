"""A saved network of anyone runs no code, takes no memory by its word, never hangs."""

import copy
import io
import json
import os
import pickle
import tracemalloc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import esper
from esper.contracts.errors import InvalidInputError
from esper.files import FORMAT, pack
from esper.grower import Grower
from esper.growth.analysis.interlayer import FUNCTIONS, GROWING, JOINS, FunctionModule
from esper.growth.blueprints.registry import blueprint, forget
from tests.growth import exploits
from tests.growth.exploits import TOPOLOGY, read, step, with_steps, written
from tests.growth.hosts import everything, make_batch, make_host
from tests.test_grown import grown

MOST = 64 * 2**20


@pytest.fixture(scope="module")
def state():
    """Of a grown host."""
    return {n: t.clone() for n, t in grown().model.host.state_dict().items()}


def refused(state, match=None):
    """The line in which a state is refused; the host has not changed."""
    host = make_host("vector")
    before = everything(host)
    with (
        exploits.Allocated() as allocated,
        pytest.raises(InvalidInputError, match=match) as one,
    ):
        esper.rebuild(host, state)
    assert "\n" not in str(one.value)
    assert len(str(one.value)) < 600
    assert before == everything(host)
    assert "esper_seeds" not in dict(host.named_modules())
    assert allocated.bytes < 2**20
    return str(one.value)


# No code.


@pytest.mark.parametrize("form", [1, 2])
@pytest.mark.parametrize("how", ["rebuild", "load"])
def test_a_chain_of_functions_to_exec_writes_no_file(how, form, state, tmp_path):
    marker, file = tmp_path / "marker", tmp_path / "net.safetensors"
    forged = exploits.forged_state(state, marker, form)
    host, x = make_host("vector").eval(), make_batch("vector", 4)[0]
    saved = io.BytesIO()
    torch.save(forged, saved)
    saved.seek(0)
    file.write_bytes(pack(forged))
    grow = {
        "rebuild": lambda: esper.rebuild(host, torch.load(saved, weights_only=True)),
        "load": lambda: esper.load(file, host),
    }
    with pytest.raises(InvalidInputError):
        grow[how]()(x)
    assert not marker.exists()


@pytest.mark.parametrize("every", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_no_function_of_torch_can_be_named(every, state, tmp_path, monkeypatch):
    names = [*exploits.every_callable(), "builtins.exec", "exec", "", "relu.x"]
    assert len(names) > 2000
    assert "torch.Tensor.__getattribute__" in names
    bare = {name.rpartition(".")[2] for name in names} - {*FUNCTIONS}
    forged = with_steps(state, [step("THE NAME")])
    text = bytes(forged[TOPOLOGY].tolist())
    host, file = make_host("vector"), tmp_path / "net.safetensors"
    built = []
    monkeypatch.setattr("esper.growth.saving.serialization.SeedModules", built.append)
    for index, name in enumerate([*names, *sorted(bare)]):
        made = written(state, text.replace(b"THE NAME", name.encode()))
        with pytest.raises(InvalidInputError, match="which no file may call"):
            esper.rebuild(host, made)
        if index % every == 0:
            file.write_bytes(pack(made))
            with pytest.raises(InvalidInputError, match="which no file may call"):
                esper.load(file, host)
    assert not built


BRANCH = {"kind": "join", "name": "mul", "layer": ""}


def test_a_join_names_only_what_joins(state):
    for name in {*FUNCTIONS, "torch.add", "exec"} - {*JOINS}:
        one = {"kind": "join", "name": name, "layer": "first", "branch": []}
        assert "no file may call" in refused(with_steps(state, [one]))
    inner = {"kind": "join", "name": "mul", "layer": "first", "branch": []}
    outer = {**inner, "branch": [inner]}
    assert "more than two layers" in refused(with_steps(state, [outer]))


@pytest.mark.parametrize(
    "one",
    [
        step("relu") | {"kwargs": {"out": 1}},
        step("leaky_relu") | {"kwargs": {"negative_slope": "0.1"}},
        step("leaky_relu") | {"kwargs": {"negative_slope": True}},
        step("mul") | {"kwargs": {}},
        step("mul") | {"kwargs": {"other": [1.0]}},
        step("gelu") | {"kwargs": {"approximate": "exec"}},
        step("interpolate") | {"kwargs": {"scale_factor": 10.0**9}},
        step("interpolate") | {"kwargs": {"size": [10**6, 10**6]}},
        step("adaptive_avg_pool1d") | {"kwargs": {"output_size": 10**9}},
        step("pad") | {"kwargs": {"pad": [10**9, 10**9]}},
        step("dropout") | {"kwargs": {"p": 2.0}},
        step("reshape") | {"kwargs": {"shape": ["rows", "columns"]}},
        {"kind": "module", "name": "second"},
        {"kind": "module", "name": ""},
        {"kind": "parameter", "name": "first.bias"},
        BRANCH | {"branch": [{"kind": "parameter", "name": "first.gamma"}]},
        BRANCH | {"branch": [{"kind": "parameter", "name": "nowhere.bias"}]},
        BRANCH | {"branch": [{"kind": "module", "name": "second"}]},
        BRANCH | {"branch": [], "squeeze": 0},
        {"kind": "module", "name": "__class__"},
        {"kind": "unsaved", "name": "relu"},
        {"kind": "code", "name": "relu"},
    ],
)
def test_steps_and_their_arguments_have_types_and_limits(one, state):
    refused(with_steps(state, [one]))


def test_steps_cannot_add_up_to_a_large_tensor(state):
    double = step("interpolate") | {"kwargs": {"scale_factor": 8.0}}
    assert "make tensors larger" in refused(with_steps(state, [double] * 3))
    refused(with_steps(state, [step("relu") | {"kwargs": {}}] * 65))
    outer = FUNCTIONS["reshape"].call(torch.ones(64, 8), [-1, 1])
    with pytest.raises(ValueError, match="larger than both"):
        FunctionModule("mul", {})(outer, outer.T)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_entry_of_the_table_is_what_a_host_calls_by_that_name(name):
    """Each can be called with arguments of its types, and only some grow tensors."""
    whole = {"dim": 2, "shape": ["rows", -1], "kernel_size": 2, "output_size": 1}
    keys = ("other", "exponent", "min", "max", "threshold", "value")
    wanted = {**whole, "pad": [1, 1], **dict.fromkeys(keys, 0.5)}
    entry = FUNCTIONS[name]
    names = [*entry.arguments][: entry.required]
    kwargs = {key: wanted[key] for key in names}
    kwargs |= {"scale_factor": 2.0} if name == "interpolate" else {}
    kwargs |= {"min": 0.5} if name == "clamp" else {}
    x = torch.rand(2, 3, 4)
    if name.endswith("2d"):
        x = torch.rand(2, 3, 4, 4)
    result = entry.call(x, **entry.checked(kwargs))
    assert result.numel() <= x.numel() or name in GROWING


# What hosts call.


class Calls(nn.Module):
    """A function of torch between two layers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 5)
        self.function = function

    def forward(self, x):
        return self.second(self.function(self.first(x)))


def widened(function):
    torch.manual_seed(0)
    host = Calls(function)
    optimizer, x = torch.optim.SGD(host.parameters(), 0.1), torch.randn(4, 8)
    grower = Grower(host, optimizer, ["first->second"], example=x, controller="never")
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    with torch.no_grad():
        for parameter in grower.model.seeds.parameters():
            parameter.add_(0.1)
    return grower, host.eval(), x


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (torch.relu, "relu"),
        (F.relu, "relu"),
        (torch.relu_, "relu"),
        (torch.Tensor.relu, "relu"),
        (lambda h: F.relu(h, inplace=True), "relu"),
        (lambda h: h.clone().relu_(), "relu"),
        (lambda h: 1 - h, "rsub"),
        (lambda h: h * 2, "mul"),
        (lambda h: 2 / (3 + h.abs()), "rdiv"),
        (lambda h: h**2, "pow"),
        (lambda h: F.gelu(h, approximate="tanh"), "gelu"),
        (lambda h: F.leaky_relu(h, 0.3), "leaky_relu"),
        (lambda h: F.threshold(h, 0.1, 0.2), "threshold"),
        (torch.special.expit, "sigmoid"),
        (lambda h: h.clamp(min=0).clip(max=1), "clamp"),
    ],
)
def test_all_names_of_a_function_are_saved_as_one(function, name, tmp_path):
    _, host, x = widened(function)
    (place,) = read(host.state_dict())["places"]
    assert name in [one["name"] for one in place["interlayer"]]
    esper.save(host, tmp_path / "net")
    loaded = esper.load(tmp_path / "net", Calls(function)).eval()
    assert torch.equal(loaded(x), host(x))


def test_what_the_table_does_not_hold_grows_in_memory_and_cannot_be_saved(tmp_path):
    def function(h):
        return torch.special.log_ndtr(h).to(torch.float32)

    grower, host, x = widened(function)
    wanted = host(x)
    assert torch.equal(copy.deepcopy(host)(x), wanted)
    middle = host.esper_seeds["slot_0"].interlayer
    assert torch.equal(pickle.loads(pickle.dumps(middle))(wanted), middle(wanted))
    assert torch.allclose(grower.export()(x), wanted, atol=1e-5)
    line = "slot 'first->second#0' has a seed where the host calls 'torch.special.log"
    with pytest.raises(InvalidInputError, match=line) as one:
        esper.save(host, tmp_path / "net")
    assert "Put the call into an nn.Module" in str(one.value)
    assert not [*tmp_path.iterdir()]
    state, whole = host.state_dict(), grower.state_dict()
    with pytest.raises(InvalidInputError, match="'first->second' calls 'torch"):
        esper.rebuild(Calls(function), state)
    other, same, _ = widened(function)
    other.load_state_dict(whole)
    assert torch.equal(same(x), wanted)
    same.load_state_dict(state)


def test_a_place_without_seeds_keeps_nobody_from_saving(tmp_path):
    host, x = Calls(torch.special.log_ndtr), torch.randn(4, 8)
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    slots = ["first->second", "second->second"]
    grower = Grower(host, optimizer, slots, example=x, controller="never")
    grower.plant("second->second#0", "low_rank_4", tempo="AT_ONCE")
    esper.save(host, tmp_path / "net")
    loaded = esper.load(tmp_path / "net", Calls(torch.special.log_ndtr))
    assert torch.equal(loaded(x), host(x))


# No memory, no raw errors.


def test_another_format_is_refused_by_its_number(state):
    topology = read(state)
    for form, which in ((2, "Esper 0.1.0"), (FORMAT + 1, "an unknown version")):
        line = f"the saved network was written by {which}"
        refused(written(state, {**topology, "format": form}), line)
    del topology["format"]
    refused(written(state, topology), "was written by an unknown version")


def test_a_size_that_no_tensor_has_takes_no_memory(state):
    topology = read(state)
    for size in (9, 10**9, 2**31, 10**30, -1, 0, 8.5, "8", None):
        made = copy.deepcopy(topology)
        made["seeds"][0]["size"] = size
        refused(written(state, made))
    for name in topology["places"][0]["geometry"]:
        for other in (10**9, [10**9] * 2, [1] * 10**4, {}, -1):
            made = copy.deepcopy(topology)
            made["places"][0]["geometry"][name] = other
            if (name, other) != ("hidden_shape", [10**9] * 2):  # nothing depends on it
                refused(written(state, made))


def test_tensors_that_look_larger_than_they_are_explain_nothing(state):
    name = "esper_seeds.slot_0.weights.first"
    topology = read(state)
    topology["seeds"][0]["size"] = 10**8
    large = {**state, name: torch.zeros(1).expand(8, 10**8)}
    refused(written(large, topology), "fewer numbers than its shape")
    refused({**state, name: torch.empty(8, 8, device="meta")}, "fewer numbers")
    refused({**state, name: state[name].to_sparse()}, "is no tensor")
    seeds = {n: t for n, t in state.items() if ".weights." in n}
    shared = torch.zeros(max(t.numel() for t in seeds.values()))
    alike = {n: shared[: t.numel()].view(t.shape) for n, t in seeds.items()}
    refused({**state, **alike}, "the saved seeds share their numbers")
    refused({**state, TOPOLOGY: torch.zeros(2**20 + 1, dtype=torch.uint8)}, "bytes")
    refused({**state, TOPOLOGY: torch.zeros(1, dtype=torch.uint8).expand(2**40)})
    refused({**state, TOPOLOGY: torch.zeros(9)}, "bytes")
    refused({**state, TOPOLOGY: "{}"}, "is no tensor")
    for name in (3, "a\nb"):
        refused({**state, name: torch.zeros(1)}, "must be printable strings")


def many(one, count=29_000):
    """A list's inside, of just fewer values than are refused for their number."""
    return b",".join(one.replace(b"N", b"%d" % n) for n in range(count))


BOMBS = {
    "depth": b"[" * 2**20,
    "objects": b'{"a":' * 2**17,
    "names": b'{"format":20,%s}' % many(b'"N":0'),
    "slots": b'{"format":20,"places":{},"slots":[%s]}' % many(b"[]"),
    "places": b'{"format":20,"places":[%s]}' % many(b"{}"),
    "seeds": b'{"format":20,"seeds":[%s]}' % many(b"{}"),
    "more seeds": b'{"format":20,"seeds":[%s]}' % many(b"{}", 2**18),
    "state": b'{"format":20,"seeds":[{"slot":"x","state":{%s}}]}' % many(b'"N":[]'),
    "digits": b'{"format":%s}' % (b"9" * 2**19),
    "zeros": b"\0" * 2**20,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_topology_that_grows_when_it_is_read_does_not(kind, state):
    forged = written(state, BOMBS[kind][: 2**20])
    assert len(forged[TOPOLOGY]) <= 2**20
    tracemalloc.start()
    try:
        with pytest.raises(InvalidInputError) as one:
            esper.rebuild(make_host("vector"), forged)
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert "\n" not in str(one.value)
    assert len(str(one.value)) < 600


def test_many_places_slots_and_parts_are_refused(state):
    topology = read(state)
    places = topology["places"]
    many = {**topology, "places": [places[0]] * 1100}
    refused(written(state, many), "at most 1024")
    slots = [f"{p['name']}#{n}" for n in range(2000) for p in places]
    refused(written(state, {**topology, "slots": slots}), "at most 4096")
    refused(written(state, {**topology, "slots": topology["slots"][:-1]}), "slots")
    text = json.dumps(topology).replace("first->second", "first ->second")
    refused(written(state, text.encode()), "names modules that the host does not have")
    parts = {f"{n}.{TOPOLOGY}": state[TOPOLOGY] for n in range(20)}
    refused({**state, **parts}, "21 topologies")
    refused({**state, f"no.{TOPOLOGY}": state[TOPOLOGY]}, "has no module 'no'")


@pytest.mark.parametrize("rounds", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_damage_is_refused_in_one_line(rounds, state):
    x = make_batch("vector", 4)[0]
    found = exploits.fuzz(state, lambda: make_host("vector"), x, rounds)
    assert found > rounds / 2


def test_a_module_of_a_user_is_not_built_at_the_size_that_a_file_says():
    made = []

    def factory(at):
        made.append(at.inlet_width)
        return nn.Sequential(
            nn.Linear(at.inlet_width, at.inlet_width),
            nn.Linear(at.inlet_width, at.outlet_width),
        )

    blueprint("forged_mlp")(factory)
    try:
        host, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
        optimizer = torch.optim.SGD(host.parameters(), 0.1)
        options = {"blueprints": ["forged_mlp"], "controller": "never"}
        grower = Grower(host, optimizer, ["1"], example=x, **options)
        grower.plant("1#0", "forged_mlp", tempo="AT_ONCE")
        with torch.no_grad():
            host.esper_seeds["slot_0"].gate.add_(1.0)
        state = {n: t.clone() for n, t in host.state_dict().items()}

        def plain():
            return nn.Sequential(nn.Linear(8, 8), nn.ReLU())

        assert torch.equal(esper.rebuild(plain(), state)(x), host(x))
        topology = read(state)
        geometry = topology["places"][0]["geometry"]
        geometry["inlet_shape"] = geometry["outlet_shape"] = [2**20]
        with exploits.Allocated() as allocated, pytest.raises(InvalidInputError):
            esper.rebuild(plain(), written(state, topology))
        assert made[-1] == 2**20
        assert allocated.bytes < 2**20
    finally:
        forget("forged_mlp")


# Files.


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "device", "cut", "text"])
def test_what_is_no_saved_network_is_refused_in_one_line(kind, tmp_path):
    good, path = tmp_path / "good", tmp_path / "net"
    esper.save(make_host("vector"), good)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(good)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = "/dev/zero"
    elif kind == "cut":
        path.write_bytes(good.read_bytes()[:-9])
    else:
        path.write_text("no network")
    host = make_host("vector", rng_seed=3)
    before = everything(host)
    with pytest.raises(InvalidInputError) as one:
        esper.load(path, host)
    assert "\n" not in str(one.value)
    assert before == everything(host)


def test_nan_in_a_buffer_of_the_host_is_saved_and_nan_in_a_seed_refused(tmp_path):
    grower = grown()
    host = grower.model.host
    host.norm.running_mean[0] = torch.nan
    esper.save(host, tmp_path / "net")
    loaded = esper.load(tmp_path / "net", make_host("vector"))
    assert bool(loaded.norm.running_mean[0].isnan())
    state = host.state_dict()
    state["esper_seeds.slot_0.weights.first"][0, 0] = torch.inf
    refused(state, "is not finite")


def test_a_state_that_does_not_fit_a_plain_host_changes_nothing():
    state = make_host("vector", rng_seed=3).state_dict()
    refused({**state, "last.bias": torch.zeros(3)})
    refused({n: t for n, t in state.items() if n != "last.bias"}, "was absent")
    refused({**state, "other": torch.zeros(3)}, "other was there and is absent")
