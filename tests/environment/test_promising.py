import pytest
import torch

from esper.contracts.blueprints import Blueprint, Form
from esper.environment.offers import span
from esper.environment.promising import promises
from esper.growth.junction import Sample
from esper.growth.promise import promises as promises_of_one
from esper.tasks.hosts import MlpHost

SIZES = (1, 4, 8, 32)
KINDS = [Blueprint(f"widen_{size}", Form.WIDEN, size, merges=True) for size in SIZES]
ENVS, ROWS = 4, 128
PLACES = {"wide to narrow": (12, 9, 5), "narrow to wide": (5, 9, 12)}


def passed(widths, noise=0.3):
    """Rows with gradients that partly follow what was given."""
    inputs, _, outputs = widths
    given = (
        torch.randn(ENVS, ROWS, inputs) * torch.tensor([0.1, 1, 10, 1])[:, None, None]
    )
    answer = torch.randn(ENVS, ROWS, outputs)
    follows = (given / given.std(dim=(1, 2), keepdim=True)) @ torch.randn(
        ENVS, inputs, outputs
    )
    gradient = (follows + noise * torch.randn_like(answer)) / ROWS
    return given, answer, 0.02 * gradient, torch.tensor([0.5, 1.0, 2.0, 4.0])


def one_by_one(widths, given, answer, gradient, loss):
    geometry = span(MlpHost(widths), 0)
    return torch.tensor(
        [
            promises_of_one(
                [Sample(given[env], answer[env], ROWS, gradient[env])],
                geometry,
                KINDS,
                float(loss[env]),
            )
            for env in range(ENVS)
        ]
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("noise", [0.3, 30.0])
def test_promises_are_those_of_each_model_alone(place, noise):
    rows = passed(PLACES[place], noise)
    found = promises(*rows, SIZES)
    expected = one_by_one(PLACES[place], *rows)
    assert ((expected > 0) & (expected < 1)).float().mean() > 0.5
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_host_whose_numbers_broke_promises_nothing_and_breaks_nobody():
    given, answer, gradient, loss = passed((12, 9, 5))
    sound = promises(given, answer, gradient, loss, SIZES)
    for part, bad in ((given, torch.nan), (gradient, torch.inf), (answer, torch.nan)):
        broken = part.clone()
        broken[2, 3, 1] = bad
        parts = [broken if p is part else p for p in (given, answer, gradient)]
        found = promises(*parts, loss, SIZES)
        assert found[2].isnan().all()
        for env in (0, 1, 3):
            assert torch.equal(found[env], sound[env])


def test_a_gradient_of_zero_promises_zero():
    given, answer, gradient, loss = passed((12, 9, 5))
    found = promises(given, answer, torch.zeros_like(gradient), loss, SIZES)
    assert torch.equal(found, torch.zeros(ENVS, len(SIZES)))
