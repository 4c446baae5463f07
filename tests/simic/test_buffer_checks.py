"""Every bad step is refused at the call that got it, and leaves no trace."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from esper.contracts.actions import HEAD
from esper.contracts.errors import (
    IllegalActionError,
    InvalidInputError,
    NoLegalActionError,
)
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
HERE = "of environment 1 at step 1"


def zeros(*axes: int, **kind: object) -> torch.Tensor:
    return torch.zeros(axes, **kind)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("rewards", zeros(3), r"must be torch.float32 of shape \(2,\) on cpu, got"),
        ("rewards", zeros(2, 1), r"torch.float32 of shape \(2, 1\)"),
        ("rewards", zeros(), r"of shape \(\)"),
        ("log_probs", zeros(8, 2), r"must be .* got .* \(8, 2\)"),
        ("values", zeros(2, dtype=torch.float64), "got torch.float64"),
        ("actions", zeros(2, 8, dtype=torch.int32), "got torch.int32"),
        ("masks", zeros(2, 8, 6), "must be torch.bool .* got torch.float32"),
        ("masks", zeros(1, 8, 6, dtype=torch.bool), r"\(1, 8, 6\)"),
        ("terminated", zeros(2, dtype=torch.uint8), "must be torch.bool"),
        ("truncated", zeros(2), "must be torch.bool"),
        ("final_values", zeros(2, 1), "must be"),
        ("acted", zeros(2), "must be torch.bool"),
        ("acted", zeros(3, dtype=torch.bool), r"must be .* \(3,\)"),
        ("rewards", np.zeros(2, np.float32), "must be .* got ndarray"),
        ("rewards", None, "must be .* got NoneType"),
        ("features", zeros(2, 3), "must be Features, got Tensor"),
        ("values", zeros(2, device="meta"), "must be .* on cpu, got .* on meta"),
        ("values", zeros(2).to_sparse(), "must be dense"),
        ("values", zeros(2, requires_grad=True), "must be dense and detached"),
    ],
)
def test_the_wrong_kind_of_tensor_is_refused(name, value, match):
    buffer = make_buffer()
    with pytest.raises(InvalidInputError, match=f"^{name} .*{match}") as raised:
        buffer.add(**a_step(**{name: value}))
    assert "\n" not in str(raised.value)
    assert_untouched(buffer, [a_step()])


def with_value(name: str, value: float, head: int = -1, env: int = 1):
    """Changes one number of a step."""

    def change(step: dict) -> None:
        part = name.removeprefix("features.")
        holder = step["features"] if part != name else None
        tensor = (getattr(holder, part) if holder else step[name]).clone()
        if tensor.ndim > 1 and head >= 0:
            tensor[env, head] = value
        else:
            tensor[env].view(-1)[-1] = value
        if holder:
            step["features"] = replace(holder, **{part: tensor})
        else:
            step[name] = tensor

    return change


def forbid(step: dict) -> None:
    step["masks"] = torch.ones_like(step["masks"]) & make_buffer().spec.allowed
    step["masks"][1, HEAD["op"], 4] = False
    step["actions"] = step["actions"].clone()
    step["actions"][1, HEAD["op"]] = 4


def allow_padding(step: dict) -> None:
    step["masks"] = step["masks"].clone()
    step["masks"][1, HEAD["blueprint"], 3] = True


def truncate(final_values):
    return lambda step: step.update(
        truncated=flags(2, 1), final_values=final_values and torch.tensor(final_values)
    )


OUT_OF_RANGE = "actions are out of range. Head 'style'"
MISMATCH = "log_probs and distribution do not match. Head 'tempo'"
EMPTY = "masks allow no choice.*. Head 'slot'"
NO_FINAL_VALUE = "final_values must be finite where truncated"
BAD_START = "episode_start must be True exactly after the end of an episode"


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        *[
            (
                with_value(name, value),
                InvalidInputError,
                f"{name} {HERE} .*finite, got {value}",
            )
            for name in (
                *("features.host", "features.slots", "features.offers"),
                *("rewards", "values", "log_probs", "distribution"),
            )
            for value in (NAN, INF, -INF)
        ],
        *[
            (
                with_value("actions", x, HEAD["style"]),
                IllegalActionError,
                f"{OUT_OF_RANGE} {HERE}",
            )
            for x in (-1, 2, 6, 2**40)
        ],
        *[
            (
                with_value("log_probs", x, HEAD["tempo"]),
                InvalidInputError,
                f"{MISMATCH} {HERE}",
            )
            for x in (1e-3, -7.0)
        ],
        (
            with_value("masks", False, HEAD["slot"]),
            NoLegalActionError,
            f"{EMPTY} {HERE}",
        ),
        (forbid, IllegalActionError, f"are illegal.* Head 'op' {HERE}: action 4"),
        (
            allow_padding,
            InvalidInputError,
            f"more choices than .* Head 'blueprint' {HERE}",
        ),
        *[
            (truncate(given), InvalidInputError, f"{NO_FINAL_VALUE}.*{HERE}")
            for given in (None, [0.0, NAN], [0.0, INF])
        ],
        (
            lambda s: s.update(episode_start=flags(2)),
            InvalidInputError,
            f"{BAD_START}.*environment 0",
        ),
        (
            lambda s: s.update(episode_start=flags(2, 0, 1)),
            InvalidInputError,
            f"{BAD_START}.*{HERE}",
        ),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_with_its_place(change, error, match):
    """As the second step of rows of equal and of unequal length."""
    for acted in (None, flags(2, 0, 1)):
        steps, buffer = Steps(), make_buffer()
        first = steps(terminated=flags(2, 0))
        second = steps(acted=acted)
        good = dict(second)
        change(second)
        buffer.add(**first)
        with pytest.raises(error, match=match) as raised:
            buffer.add(**second)
        assert "\n" not in str(raised.value)
        assert_untouched(buffer, [first, good])


@pytest.mark.parametrize("value", [3e38, -3e38, 1e-45])
def test_finite_numbers_of_any_size_are_stored(value):
    buffer, rewards = make_buffer(), torch.tensor([value, value])
    buffer.add(**a_step(rewards=rewards))
    assert torch.equal(buffer.rewards[:, 0], rewards)


def test_what_did_not_act_is_not_looked_at():
    buffer = make_buffer()
    step = a_step(acted=flags(2, 0))
    for name in ("rewards", "values", "log_probs", "features.offers"):
        with_value(name, NAN)(step)
    with_value("actions", 99)(step)
    buffer.add(**step)
    assert buffer.step_counts.tolist() == [1, 0]


@pytest.mark.parametrize("value", [NAN, INF])
def test_last_values_and_memory_must_be_finite(value):
    buffer = make_buffer()
    state = torch.zeros(2, *STATE)
    state[1, 0, 2] = value
    with pytest.raises(
        InvalidInputError, match="state of environment 1 at step 0 must be fin"
    ):
        buffer.begin(state, policy_version=3)
    assert buffer.policy_version == 0

    buffer.add(**a_step(terminated=flags(2, 0)))
    with pytest.raises(InvalidInputError, match=f"last_values {HERE} must be finite"):
        buffer.finish(torch.tensor([value, value]))
    buffer.finish(torch.tensor([value, 0.0]))


@pytest.mark.usefixtures("unchecked")
def test_last_values_and_memory_must_be_of_the_right_kind():
    buffer = make_buffer()
    with pytest.raises(InvalidInputError, match=r"state must be .* shape \(2, 2, 3\)"):
        buffer.begin(torch.zeros(2, 3, 2))
    buffer.add(**a_step())
    with pytest.raises(
        InvalidInputError, match=r"last_values must be .* got .* shape \(2, 1\)"
    ):
        buffer.finish(torch.zeros(2, 1))


def assert_untouched(buffer, steps):
    """The buffer goes on as if the refused call had never been made."""
    twin = make_buffer()
    for step in steps[:-1]:
        twin.add(**step)
    assert torch.equal(buffer.step_counts, twin.step_counts)
    for each in (buffer, twin):
        each.add(**steps[-1])
        each.finish(torch.zeros(2))
    assert_same(take(buffer), take(twin))
