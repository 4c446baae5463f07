"""Promises of many hosts at once are those of `growth.promise`, host by host."""

import pytest
import torch

from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.environment.looks import promises
from esper.growth.blueprints.geometry import Geometry, Layout
from esper.growth.hooks import Sample
from esper.growth.promise import promises as promises_of_one

FORMS = (Form.LOW_RANK, Form.WIDEN, Form.RESIDUAL_MLP)
KINDS = [
    blueprint for blueprint in BLUEPRINTS if blueprint.form in FORMS and blueprint.size
]
SIZES = [blueprint.size for blueprint in KINDS]
BIASED = [blueprint.form is not Form.LOW_RANK for blueprint in KINDS]
ENVS, ROWS = 4, 128
EXACT = {"rtol": 0.0, "atol": 1e-9, "equal_nan": True}
PLACES = {
    "wide to narrow": (12, 9, 5),
    "narrow to wide": (5, 9, 12),
    "wider than the rows": (70, 9, 6),
    "all but as wide as the rows": (63, 9, 6),
    "wider than the rows, to wider still": (70, 9, 80),
}


def span(inputs, hidden, outputs):
    """Two linear layers, one after the other."""
    return Geometry(
        inlet_layout=Layout.VECTOR,
        outlet_layout=Layout.VECTOR,
        inlet_shape=(inputs,),
        outlet_shape=(outputs,),
        residual=False,
        spans=True,
        hidden_shape=(hidden,),
    )


def passed(widths, noise=0.3, rows=ROWS):
    """Rows with gradients that partly follow what was given."""
    inputs, _, outputs = widths
    sizes = torch.tensor([0.1, 1, 10, 1])[:, None, None]
    given = (torch.randn(ENVS, rows, inputs).double() + 0.3) * sizes
    answer = torch.randn(ENVS, rows, outputs).double()
    follows = (given / given.std(dim=(1, 2), keepdim=True)) @ torch.randn(
        ENVS, inputs, outputs
    ).double()
    gradient = (follows / inputs**0.5 + noise * torch.randn_like(answer)) / rows
    return given, answer, 0.02 * gradient, torch.tensor([0.5, 1.0, 2.0, 4.0]).double()


def one_by_one(geometry, given, answer, gradient, loss):
    """What each host promises alone; NaN where that is unknown."""
    found = [
        promises_of_one(
            [Sample(given[env], answer[env], given.shape[1], gradient[env])],
            geometry,
            KINDS,
            float(loss[env]),
        )
        for env in range(len(given))
    ]
    known = [[torch.nan if p is None else p for p in host] for host in found]
    return torch.tensor(known, dtype=torch.float64)


def of_all(rows):
    return promises(*rows, SIZES, BIASED)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("noise", [0.3, 3.0])
@pytest.mark.parametrize("count", [ROWS, 127])
def test_promises_are_those_of_each_model_alone(place, noise, count):
    rows = passed(PLACES[place], noise, count)
    expected = one_by_one(span(*PLACES[place]), *rows)
    assert ((expected > 0) & (expected < 1)).float().mean() > 0.5
    torch.testing.assert_close(of_all(rows), expected, **EXACT)


def test_a_form_without_a_bias_promises_less_where_only_a_bias_helps():
    given, answer, gradient, loss = passed((12, 9, 5))
    shift = torch.full_like(gradient, 1e-5)
    bare, biased = promises(given, answer, shift, loss, (4, 4), (False, True)).unbind(1)
    assert (bare < 0.9 * biased).all()
    only = promises(given, answer, shift, loss, (4,), (False,))
    torch.testing.assert_close(only[:, 0], bare, **EXACT)
    torch.testing.assert_close(promises(given, answer, shift, loss, (4,))[:, 0], biased)


@pytest.mark.parametrize("rows", [63, 64])
def test_fewer_than_32_rows_to_judge_by_promise_nothing_known(rows):
    parts = passed((12, 9, 5), rows=rows)
    found, expected = of_all(parts), one_by_one(span(12, 9, 5), *parts)
    assert bool(expected.isnan().all()) is (rows == 63)
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("width", [12, 70])
@pytest.mark.parametrize("row", [2, 3], ids=["that fits", "that judges"])
def test_a_host_whose_numbers_broke_promises_nothing_and_breaks_nobody(width, row):
    given, answer, gradient, loss = passed((width, 9, 5))
    sound = of_all((given, answer, gradient, loss))
    assert sound.isfinite().all()
    for part, bad in ((given, torch.nan), (gradient, torch.inf), (answer, torch.nan)):
        broken = part.clone()
        broken[2, row, 1] = bad
        parts = [broken if p is part else p for p in (given, answer, gradient)]
        found = of_all((*parts, loss))
        assert found[2].isnan().all()
        for env in (0, 1, 3):
            assert torch.equal(found[env], sound[env])


@pytest.mark.parametrize("width", [12, 70])
@pytest.mark.parametrize("what", ["given", "answer", "gradient", "loss"])
def test_where_something_is_zero_as_much_is_known_as_of_each_alone(what, width):
    rows = dict(
        zip(
            ("given", "answer", "gradient", "loss"),
            passed((width, 9, 5)),
            strict=True,
        )
    )
    rows[what][1] = 0.0
    expected = one_by_one(span(width, 9, 5), *rows.values())
    assert bool(expected[1].isnan().any()) is (what in ("answer", "loss"))
    torch.testing.assert_close(of_all(rows.values()), expected, **EXACT)
