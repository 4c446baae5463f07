"""Every bad step is refused at the call that got it, and leaves no trace."""

from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch
from torch.testing import assert_close

from esper.contracts.actions import HEAD
from esper.contracts.errors import BadInput, IllegalAction, NoLegalAction
from tests.simic.steps import (
    STATE,
    Steps,
    a_step,
    assert_same,
    flags,
    make_buffer,
    take,
)

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def _as_users_call():
    """Without the test run's own look at annotations, which would come first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def numbers(*axes: int, **kind: object) -> torch.Tensor:
    return torch.zeros(axes, **kind)


@pytest.mark.usefixtures("_as_users_call")
@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"rewards": numbers(3)},
            r"rewards must be torch.float32 of shape \(2,\), got",
        ),
        ({"rewards": numbers(2, 1)}, r"torch.float32 of shape \(2, 1\)"),
        ({"rewards": numbers()}, r"of shape \(\)"),
        ({"rewards": numbers(0)}, r"of shape \(0,\)"),
        ({"log_probs": numbers(8, 2)}, r"log_probs must be .* got .* \(8, 2\)"),
        ({"values": numbers(2, dtype=torch.float64)}, "values .* got torch.float64"),
        ({"rewards": numbers(2, dtype=torch.int64)}, "rewards .* got torch.int64"),
        ({"actions": numbers(2, 8, dtype=torch.bool)}, "actions .* got torch.bool"),
        ({"actions": numbers(2, 8, dtype=torch.int32)}, "actions .* got torch.int32"),
        ({"rows": numbers(2, 8, 6)}, "rows must be torch.bool .* got torch.float32"),
        ({"rows": numbers(1, 8, 6, dtype=torch.bool)}, r"rows .* \(1, 8, 6\)"),
        (
            {"terminated": numbers(2, dtype=torch.uint8)},
            "terminated must be torch.bool",
        ),
        ({"truncated": numbers(2)}, "truncated must be torch.bool"),
        ({"final_values": numbers(2, 1)}, "final_values must be"),
        ({"acted": numbers(2)}, "acted must be torch.bool"),
        ({"acted": numbers(3, dtype=torch.bool)}, r"acted must be .* \(3,\)"),
        ({"rewards": np.zeros(2, np.float32)}, "rewards must be a tensor, got ndarray"),
        ({"rewards": 1.0}, "rewards must be a tensor, got float"),
        ({"rewards": None}, "rewards must be a tensor, got NoneType"),
        ({"features": numbers(2, 3)}, "features must be Features, got Tensor"),
        ({"values": numbers(2, device="meta")}, "values must be on cpu, got meta"),
        ({"values": numbers(2).to_sparse()}, "values must be dense, got torch.sparse"),
        ({"values": numbers(2, requires_grad=True)}, "values requires grad; detach it"),
    ],
)
def test_the_wrong_kind_of_tensor_is_refused(change, match):
    refused(a_step(**change), BadInput, match)


def with_value(name: str, env: int, value: float, *, head: int | None = None):
    """The arguments of a second `add` in which one number is another."""

    def change(step: dict) -> None:
        if name.startswith("features."):
            part = name.removeprefix("features.")
            tensor = getattr(step["features"], part).clone()
            tensor[env].view(-1)[-1] = value
            step["features"] = replace(step["features"], **{part: tensor})
        else:
            tensor = step[name] = step[name].clone()
            if head is None:
                tensor[env].view(-1)[-1] = value
            else:
                tensor[env, head] = value

    return change


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "name",
    [
        "features.host",
        "features.slots",
        "features.offers",
        "rewards",
        "values",
        "log_probs",
        "distribution",
    ],
)
def test_numbers_that_are_not_finite_are_refused_with_field_env_and_step(name, value):
    refused_second(
        with_value(name, 1, value),
        BadInput,
        f"{name} of environment 1 at step 1 must be finite, got {value}",
    )


@pytest.mark.parametrize("value", [3e38, -3e38, 1e-45])
def test_finite_numbers_of_any_size_are_stored(value):
    buffer = make_buffer()
    rewards = torch.tensor([value, value])
    buffer.add(**a_step(rewards=rewards))
    assert_close(buffer.rewards[:, 0], rewards, rtol=0, atol=0)


@pytest.mark.parametrize("log_prob", [1e-3, -7.0])
def test_a_log_prob_that_contradicts_its_distribution_is_refused(log_prob):
    refused_second(
        with_value("log_probs", 1, log_prob, head=HEAD["tempo"]),
        BadInput,
        rf"log_probs has {log_prob}\d* for head 'tempo' of environment 1 at step 1, "
        "its distribution",
    )


@pytest.mark.parametrize("action", [-1, 2, 6, 2**40])
def test_an_action_outside_its_head_is_refused(action):
    refused_second(
        with_value("actions", 1, action, head=HEAD["style"]),
        IllegalAction,
        f"actions has {action} for head 'style' of environment 1 .*, which has 2",
    )


def test_an_action_its_stored_row_forbids_is_refused():
    def change(step: dict) -> None:
        step["rows"] = torch.ones_like(step["rows"]) & make_buffer().spec.allowed
        step["rows"][0, HEAD["op"], 4] = False
        step["actions"] = step["actions"].clone()
        step["actions"][0, HEAD["op"]] = 4

    refused_second(change, IllegalAction, "4 for head 'op' .* its row forbids")


@pytest.mark.parametrize("action", [0, 9])
def test_a_row_with_nothing_legal_is_refused(action):
    def change(step: dict) -> None:
        step["rows"] = step["rows"].clone()
        step["rows"][1, HEAD["slot"]] = False
        with_value("actions", 1, action, head=HEAD["slot"])(step)

    refused_second(
        change, NoLegalAction, "nothing for head 'slot' of environment 1 at step 1"
    )


def test_a_row_that_allows_padding_is_refused():
    def change(step: dict) -> None:
        step["rows"] = step["rows"].clone()
        step["rows"][0, HEAD["blueprint"], 3] = True

    refused_second(change, BadInput, "more than the 3 choices of head 'blueprint'")


@pytest.mark.parametrize("given", [None, [0.0, NAN], [0.0, INF]])
def test_a_truncation_without_a_final_value_is_refused(given):
    def change(step: dict) -> None:
        step["truncated"] = flags(2, 1)
        step["final_values"] = None if given is None else torch.tensor(given)

    refused_second(change, BadInput, "final_values of environment 1 at step 1 must be")


def test_the_step_after_an_end_is_a_first_one_and_no_other_is():
    def forget(step: dict) -> None:
        step["first"] = flags(2)

    def invent(step: dict) -> None:
        step["first"] = flags(2, 0, 1)

    ended = {"terminated": flags(2, 0)}
    refused_second(forget, BadInput, "first of environment 0 at step 1 .* True", ended)
    refused_second(invent, BadInput, "first of environment 1 at step 1 .* False", ended)


def test_what_did_not_act_is_not_looked_at():
    buffer = make_buffer()
    step = a_step(acted=flags(2, 0))
    for name in ("rewards", "values", "log_probs", "features.offers"):
        with_value(name, 1, NAN)(step)
    with_value("actions", 1, 99)(step)
    buffer.add(**step)
    assert buffer.step_counts.tolist() == [1, 0]


@pytest.mark.parametrize("value", [NAN, INF])
def test_last_values_and_memory_must_be_finite(value):
    buffer = make_buffer()
    state = torch.zeros(2, *STATE)
    state[1, 0, 2] = value
    with pytest.raises(BadInput, match="state of environment 1 must be finite, got"):
        buffer.begin(state, policy_version=3)
    assert buffer.policy_version == 0

    buffer.add(**a_step(terminated=flags(2, 0)))
    with pytest.raises(BadInput, match="last_values of environment 1 must be finite"):
        buffer.cut(torch.tensor([value, value]))
    buffer.cut(torch.tensor([value, 0.0]))


@pytest.mark.usefixtures("_as_users_call")
def test_last_values_and_memory_must_be_of_the_right_kind():
    buffer = make_buffer()
    with pytest.raises(BadInput, match=r"state must be .* shape \(2, 2, 3\)"):
        buffer.begin(torch.zeros(2, 3, 2))
    buffer.add(**a_step())
    with pytest.raises(BadInput, match=r"last_values must be .* got .* shape \(2, 1\)"):
        buffer.cut(torch.zeros(2, 1))


def refused_second(change, error, match, before=None):
    """Refused as the second step of rows of equal and of unequal length."""
    for acted in (None, flags(2, 0, 1)):
        steps = Steps()
        first = steps(**(before or {}))
        second = steps(acted=acted)
        good = dict(second)
        change(second)
        buffer = make_buffer()
        buffer.add(**first)
        with pytest.raises(error, match=match):
            buffer.add(**second)
        assert_untouched(buffer, [first, good])


def refused(step, error, match):
    buffer = make_buffer()
    with pytest.raises(error, match=match) as raised:
        buffer.add(**step)
    assert "\n" not in str(raised.value)
    assert_untouched(buffer, [a_step()])


def assert_untouched(buffer, steps):
    """The buffer goes on as if the refused call had never been made."""
    twin = make_buffer()
    for step in steps[:-1]:
        twin.add(**step)
    assert torch.equal(buffer.step_counts, twin.step_counts)
    for each in (buffer, twin):
        each.add(**steps[-1])
        each.cut(torch.zeros(2))
    assert_same(take(buffer), take(twin))
