"""Memory: one recurrence, whether run at once, step by step or in pieces."""

import math
from functools import partial
from typing import get_args

import pytest
import torch
from torch.testing import assert_close

from esper.contracts.errors import InvalidInputError
from esper.simic.agent import memory as memory_module
from esper.simic.agent.memory import (
    LSTM,
    MEMORIES,
    MemoryName,
    MinGRU,
    make_memory,
)
from tests.references.memory import attention, cells, conv_mingru

KINDS = [
    (n, layers)
    for n in ("mingru", "conv-mingru", "attention", "gru", "lstm")
    for layers in (1, 2, 3)
]
ALL = [*KINDS, ("none", 1)]
WIDTH, ENVS, TIME = 6, 4, 11
TWINS = {"gru": cells, "lstm": cells, "conv-mingru": conv_mingru}
TWINS |= {"attention": attention}
WINDOW, BLOCK = 5, 4  # of attention; less than a row
WEIGHTS = (
    torch.linspace(-1.0, 1.0, ENVS * TIME * WIDTH).view(ENVS, TIME, WIDTH).double()
)


@pytest.fixture(autouse=True)
def _short_window(monkeypatch):
    monkeypatch.setattr(memory_module, "WINDOW", WINDOW)
    monkeypatch.setattr(memory_module, "BLOCK", BLOCK)


def setting(name, layers, *, resets=0.3, rng_seed=0):
    torch.manual_seed(rng_seed)
    memory = make_memory(name, WIDTH, layers)
    inputs = torch.randn(ENVS, TIME, WIDTH)
    first = torch.rand(ENVS, TIME) < resets
    state = torch.randn(ENVS, *memory.state_shape)
    return memory, inputs, first, state


def mingru_by_hand(memory, inputs, first, state):
    """One number at a time in float64."""
    sequence = inputs.double().tolist()
    hidden = state.double().tolist()
    for layer, gates in enumerate(memory.gates):
        weight, bias = gates.weight.double().tolist(), gates.bias.double().tolist()
        for env in range(ENVS):
            for time in range(TIME):
                x = list(sequence[env][time])
                if first[env, time]:
                    hidden[env][layer] = [0.0] * WIDTH
                for unit in range(WIDTH):
                    gate, candidate = (
                        bias[row]
                        + math.fsum(w * v for w, v in zip(weight[row], x, strict=True))
                        for row in (unit, unit + WIDTH)
                    )
                    z = 1.0 / (1.0 + math.exp(-gate))
                    before = hidden[env][layer][unit]
                    write = math.sqrt(z * (2.0 - z)) * candidate
                    hidden[env][layer][unit] = (1.0 - z) * before + write
                    sequence[env][time][unit] = x[unit] + hidden[env][layer][unit]
    return torch.tensor(sequence), torch.tensor(hidden)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_t22_mingru_equals_the_formula_with_resets(layers):
    memory, inputs, first, state = setting("mingru", layers)
    outputs, last = memory(inputs, first, state)
    by_hand = mingru_by_hand(memory, inputs, first, state)
    assert_close((outputs, last), by_hand, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("resets", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("name", "layers"), [k for k in KINDS if k[0] in TWINS])
def test_whole_rows_equal_the_loop_over_steps(name, layers, resets):
    """Values, last state and every gradient."""
    memory, inputs, first, state = setting(name, layers, resets=resets)
    memory, inputs, state = memory.double(), inputs.double(), state.double()
    found = []
    for run in (memory, partial(TWINS[name], memory)):
        given = inputs.clone().requires_grad_(), state.clone().requires_grad_()
        outputs, last = run(given[0], first, given[1])
        loss = (outputs * WEIGHTS).sum() + (last.cos() * 3.0).sum()
        over = (*given, *memory.parameters())
        slopes = torch.autograd.grad(loss, over, materialize_grads=True)
        found.append((outputs, last, slopes))
    assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "layers"), ALL)
def test_t21_step_by_step_and_in_halves_equals_the_whole_sequence(name, layers):
    memory, inputs, first, state = setting(name, layers)
    memory, inputs, state = memory.double(), inputs.double(), state.double()
    outputs, last = memory(inputs, first, state)
    for cuts in (range(TIME), (0, 5)):
        here, parts = state, []
        for begin, end in zip(cuts, [*cuts[1:], TIME], strict=True):
            with torch.no_grad():
                one, here = memory(inputs[:, begin:end], first[:, begin:end], here)
            parts.append(one)
        assert_close(torch.cat(parts, dim=1), outputs, rtol=1e-9, atol=1e-9)
        assert_close(here, last, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("sentinel", [1e6, -1e30, math.inf, math.nan])
@pytest.mark.parametrize(("name", "layers"), ALL)
def test_t18_the_last_step_of_an_episode_leaves_no_bit_in_the_next(
    name, layers, sentinel
):
    largest = {"attention": 1e6, "gru": 1e30, "lstm": 1e30}.get(name, math.inf)
    if not (abs(sentinel) <= largest or largest == math.inf):
        pytest.skip("these are rows of torch, in which NaN passes; buffers refuse it")
    memory, inputs, first, state = setting(name, layers, resets=0.0)
    first[:, 4] = True
    clean, last = memory(inputs, first, state)
    inputs[:, 3] = sentinel
    dirty, dirty_last = memory(inputs, first, state)
    assert torch.equal(dirty[:, 4:], clean[:, 4:])
    assert torch.equal(dirty_last, last)
    assert torch.equal(dirty[:, :3], clean[:, :3])
    if name != "none":
        early = first.roll(-1, dims=1)
        assert not torch.equal(memory(inputs, early, state)[0][:, 4:], clean[:, 4:])


@pytest.mark.parametrize(("name", "layers"), ALL)
def test_a_stale_state_is_dropped_whatever_it_holds(name, layers):
    memory, inputs, first, state = setting(name, layers)
    first[:, 0] = True
    fresh, _ = memory(inputs, first, torch.zeros_like(state))
    stale, _ = memory(inputs, first, torch.full_like(state, math.nan))
    assert torch.equal(stale, fresh)


@pytest.mark.parametrize(("name", "layers"), KINDS)
def test_gradients_stop_at_an_episodes_start(name, layers):
    memory, inputs, first, state = setting(name, layers, resets=0.0)
    first[:, 4] = True
    inputs.requires_grad_()
    outputs, _ = memory(inputs, first, state)
    outputs[:, 4:].sum().backward()
    assert (inputs.grad[:, :4] == 0).all()
    assert (inputs.grad[:, 4:] != 0).any(dim=-1).all()


@pytest.mark.parametrize("gate", [-1e4, -200.0, 200.0, 1e4])
def test_gates_shut_or_open_for_good_have_finite_gradients(gate):
    memory, inputs, first, state = setting("mingru", 2)
    with torch.no_grad():
        for linear in memory.gates:
            linear.bias[:WIDTH] = gate
    memory(inputs, first, state)[0].sum().backward()
    for parameter in memory.parameters():
        assert parameter.grad.isfinite().all()


def test_every_name_that_editors_complete_is_a_memory():
    assert get_args(MemoryName) == (*MEMORIES,)


def test_an_unknown_memory_is_refused_by_name():
    with pytest.raises(
        InvalidInputError, match=r"no memory 'gruu'. Choose one of mingru, conv-mingru"
    ):
        make_memory("gruu", 4, 1)
    assert isinstance(make_memory("lstm", 4, 2), LSTM)
    assert make_memory("mingru", 4, 2).state_shape == (2, 4)
    assert isinstance(make_memory("mingru", 4, 2), MinGRU)
