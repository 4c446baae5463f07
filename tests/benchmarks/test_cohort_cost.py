import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.cohort_cost import step_seconds, work
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.stages import Stage
from esper.environment.memory_layout import place_geometries
from esper.growth.blueprints.forms import FORMS
from esper.tasks.hosts import CnnHost, MlpHost
from tests.references.cohort import PlainHost

KNOWN = {b.name: b for b in BLUEPRINTS}
WIDEN, RANK, MLP = (KNOWN[n] for n in ("widen_8", "low_rank_4", "residual_mlp"))
SMALL = MlpHost((3, 2, 4, 5))
DEEP = MlpHost((6, 5, 7, 4, 3))
IMAGES = CnnHost((2, 10, 8), (3, 4), 5)
ROWS = 4
CASES = {
    "no seed": (SMALL, []),
    "active everywhere": (SMALL, [(0, WIDEN, Stage.HOLDING), (1, MLP, Stage.BLENDING)]),
    "training below": (DEEP, [(0, RANK, Stage.TRAINING), (2, WIDEN, Stage.COOLING)]),
    "training above": (DEEP, [(2, WIDEN, Stage.TRAINING), (0, MLP, Stage.FOSSILIZED)]),
    "training twice": (DEEP, [(1, MLP, Stage.TRAINING), (2, WIDEN, Stage.TRAINING)]),
    "images": (IMAGES, []),
    "images, active": (IMAGES, [(0, WIDEN, Stage.HOLDING), (1, WIDEN, Stage.HOLDING)]),
    "images, below": (IMAGES, [(0, WIDEN, Stage.TRAINING), (1, WIDEN, Stage.HOLDING)]),
    "images, above": (IMAGES, [(1, WIDEN, Stage.TRAINING)]),
}


def planted(host, seeds):
    """A plain host with the seeds in the slots of their places."""
    chance = torch.Generator().manual_seed(0)
    plain = PlainHost(host.build(chance), rate=1e-3, decay=0.01)
    for place, blueprint, stage in seeds:
        geometry = place_geometries(host)[place]
        made = FORMS[blueprint.form].init(geometry, blueprint.size, chance)
        plain.plant(place, blueprint, made)
        plain.live(place, stage, 0.0 if stage is Stage.TRAINING else 0.5)
    return plain


def known_already(host, seeds):
    """Multiply-adds of a whole shadow pass that a cohort need not repeat."""
    young = [place for place, _, stage in seeds if stage is Stage.TRAINING]
    if not young:
        return 0
    below = [seed for seed in seeds if seed[0] < min(young)]
    maps = host.layers
    total = sum(own.weights * own.positions for own in maps[: min(young) + 1])
    for place, blueprint, _ in below:
        geometry = place_geometries(host)[place]
        total += FORMS[blueprint.form].macs(geometry, blueprint.size)
    return total


@pytest.mark.parametrize(("host", "seeds"), CASES.values(), ids=CASES)
def test_counts_what_pytorch_counts_less_what_the_own_pass_left_behind(host, seeds):
    plain = planted(host, seeds)
    x = torch.randn(ROWS, *host.shape, generator=torch.Generator().manual_seed(1))
    y = torch.arange(ROWS) % host.classes
    with FlopCounterMode(display=False) as counter:
        plain.train_step(x, y)
    found = work(host, ROWS, seeds)
    expected = counter.get_total_flops() / 2 - ROWS * known_already(host, seeds)
    assert found.dense + found.conv == expected
    held = plain.optimizer.param_groups[0]["params"]
    assert found.parameter == sum(p.numel() for p in held)


def test_a_host_without_seeds_counted_by_hand():
    # Forward 6 + 8 + 20, the same for weights, and 8 + 20 for what layers read.
    found = work(SMALL, 1, [])
    assert (found.dense, found.conv, found.gelu) == (96, 0, 0)
    assert found.parameter == 6 + 2 + 8 + 4 + 20 + 5


def test_an_active_seed_counted_by_hand():
    # At place 1 it maps 2 to 8 to 5: both maps three times, 3 * (16 + 40).
    found = work(SMALL, 1, [(1, WIDEN, Stage.HOLDING)])
    assert found.dense == 96 + 168
    # At place 0, 3 to 8 to 4, nobody asks for the gradient of the rows.
    found = work(SMALL, 1, [(0, WIDEN, Stage.HOLDING)])
    assert found.dense == 96 + 2 * 24 + 3 * 32


def test_a_seed_in_training_counted_by_hand():
    # Forward through layers 1 and 2, back through 2; the seed as if it were active.
    found = work(SMALL, 1, [(0, WIDEN, Stage.TRAINING)])
    assert found.dense == 96 + (8 + 20) + 20 + 2 * 24 + 3 * 32
    # Forward through layer 2 alone; its inputs need no gradient.
    found = work(SMALL, 1, [(1, WIDEN, Stage.TRAINING)])
    assert found.dense == 96 + 20 + 2 * 16 + 3 * 40


def test_only_a_gelu_counts_as_one_and_an_empty_slot_costs_nothing():
    active = work(SMALL, 1, [(0, MLP, Stage.HOLDING), (1, WIDEN, Stage.HOLDING)])
    assert active.gelu == 2 * 16
    assert work(SMALL, 64, [(0, WIDEN, Stage.DORMANT)]) == work(SMALL, 64, [])


@pytest.mark.parametrize("host", [SMALL, IMAGES], ids=str)
def test_seconds_grow_linearly_in_hosts_and_rows(host):
    seeds = [(0, WIDEN, Stage.TRAINING), (1, WIDEN, Stage.HOLDING)]
    one = step_seconds(host, 64, seeds, 1)
    assert one > 0
    assert step_seconds(host, 64, seeds, 6) == pytest.approx(6 * one)
    more, most = (step_seconds(host, rows, seeds, 1) for rows in (96, 128))
    assert more > one
    assert most - one == pytest.approx(2 * (more - one))
