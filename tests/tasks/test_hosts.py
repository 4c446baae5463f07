"""Declared hosts become the networks that PyTorch would make, from one generator."""

import pickle
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, nn

from esper.growth.analysis.slots import analyse_host
from esper.tasks.hosts import CnnHost, MlpHost

MLP = MlpHost((16, 12, 10, 26))
CNN = CnnHost((1, 28, 28), (4, 8), 10)


WRITTEN = {
    MLP: lambda: nn.Sequential(
        *(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10), nn.ReLU()),
        nn.Linear(10, 26),
    ),
    CNN: lambda: nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 7 * 7, 10)),
    ),
}
EACH = pytest.mark.parametrize("host", WRITTEN, ids=str)


@EACH
def test_a_host_is_the_network_that_pytorch_makes_from_the_same_number(host):
    torch.manual_seed(5)
    expected = WRITTEN[host]()
    state = torch.get_rng_state()
    built = host.build(Generator().manual_seed(5))
    assert state.equal(torch.get_rng_state())
    assert str(built) == str(expected)
    assert all(weight.requires_grad for weight in built.parameters())
    for key, value in expected.state_dict().items():
        assert built.state_dict()[key].equal(value), key
    images = torch.rand(3, *host.shape)
    assert built(images).equal(expected(images))


def test_slots_span_consecutive_layers():
    assert MLP.slots == ("0->2", "2->4")
    assert CNN.slots == ("0->3", "3->7")
    assert CnnHost((3, 8, 8), (4,), 2).slots == ("0->4",)


@EACH
def test_parameters_macs_and_spans_are_those_that_growing_sees(host):
    built = host.build(Generator())
    seen = analyse_host(built, host.slots, torch.rand(2, *host.shape))
    assert (host.parameters, host.macs) == (seen.parameters, seen.macs)
    assert all(place.geometry.spans for place in seen.places)


@settings(max_examples=30)
@given(
    image=st.tuples(st.integers(1, 3), st.integers(8, 21), st.integers(8, 21)),
    channels=st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple),
)
def test_sizes_are_right_for_every_image(image, channels):
    """A layer multiplies each weight once for each place of its output."""
    host = CnnHost(image, channels, 3)
    signal, macs = torch.rand(2, *image), 0
    built = host.build(Generator())
    for module in built:
        signal = module(signal)
        places = signal[0, 0].numel()
        macs += sum(w.numel() * places for w in module.parameters() if w.ndim > 1)
    assert signal.shape == (2, 3)
    assert host.macs == macs
    assert host.parameters == sum(weight.numel() for weight in built.parameters())
    assert host.layers[-1].inputs == built[-1].in_features


@EACH
def test_a_host_is_plain_data(host):
    copy = pickle.loads(pickle.dumps(host))
    assert (copy, hash(copy)) == (host, hash(host))
    assert asdict(host)["kind"] == str(host).split()[0]
    assert str(host) in ("mlp 16-12-10-26", "cnn 1x28x28-4-8-10")
