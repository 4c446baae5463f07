"""A cohort is N separate trainings, to rounding; and each is itself, to the bit."""

from itertools import product

import pytest
import torch
from torch import Generator

from esper.contracts.errors import InvalidInputError
from esper.contracts.state import load, save
from esper.environment.cohort import Cohort
from esper.environment.engine import adamw
from esper.tasks.hosts import CnnHost, MlpHost
from tests.references.cohort import PlainNetwork
from tests.references.torch_engine import TorchCohort, layer

MLP, CNN = MlpHost((5, 7, 6, 4)), CnnHost((2, 9, 7), (3, 4), 4)
"""The images have odd sides: pooling leaves a line and a column unread."""
HOSTS = {
    "mlp": MLP,
    "cnn": CNN,
    "one hidden layer": MlpHost((5, 3, 4)),
    "regression": MlpHost((5, 7, 6, 1)),
}
ROWS, EXAMPLES, RATE = 16, 90, 1e-2


class Garden:
    """A cohort, with or without the same networks one by one."""

    def __init__(self, envs=3, host=MLP, *, plain=False, cohort=Cohort, **options):
        self.envs, self.host = envs, host
        options = {"dtype": torch.float64} | options
        self.cohort = cohort(
            envs,
            host,
            slots_per_place=3,
            capacity=30 * host.parameters,
            batch=ROWS,
            **options,
        )
        self.plain = []
        for env in range(envs):
            network = host.build(Generator().manual_seed(env)).to(options["dtype"])
            self.cohort.set_host(env, network)
            if plain:
                decay = self.cohort.decay
                self.plain.append(PlainNetwork(network, rate=RATE, decay=decay))
        chance = Generator().manual_seed(77)
        shape = (1, EXAMPLES, torch.Size(host.shape).numel())
        self.x = torch.randn(shape, generator=chance).to(options["dtype"])
        self.y = torch.randint(0, host.num_outputs, (1, EXAMPLES), generator=chance)
        if host.num_outputs == 1:
            self.y = self.x[..., 0].sin() + self.x[..., 1]
        self.alpha = torch.zeros(envs, self.cohort.slots)
        self.training = torch.zeros_like(self.alpha, dtype=torch.bool)

    def plant(self, env, slot, units, *, alpha=1.0, training=False):
        inputs, taps = self.cohort.inputs(env, slot % self.cohort.places)
        chance = Generator().manual_seed(100 * env + slot)
        weight = 0.4 * torch.randn(units, inputs, taps, generator=chance)
        bias = 0.1 * torch.randn(units, generator=chance)
        self.cohort.plant(env, slot, weight, bias)
        if self.plain:
            self.plain[env].plant(slot, weight, bias)
        self.live(env, slot, alpha, training=training)

    def live(self, env, slot, alpha, *, training=False):
        self.alpha[env, slot] = 0.0 if training else alpha
        self.training[env, slot] = training

    def remove(self, env, slot):
        self.cohort.remove(env, slot)
        self.live(env, slot, 0.0)
        if self.plain:
            self.plain[env].remove(slot)

    def picked(self, steps, start=0):
        return torch.stack(
            [
                torch.randint(
                    0,
                    EXAMPLES,
                    (steps, ROWS),
                    generator=Generator().manual_seed(1000 * env + start),
                )
                for env in range(self.envs)
            ]
        )

    def train(self, steps=4, start=0, counts=None):
        picked = self.picked(steps, start)
        shape = (self.envs, steps, self.cohort.slots)
        schedule = (
            self.alpha[:, None].expand(shape).contiguous(),
            self.training[:, None].expand(shape).contiguous(),
        )
        rates = torch.full((self.envs, steps), RATE, dtype=torch.float64)
        trained = self.cohort.train(self.x, self.y, picked, *schedule, rates, counts)
        for env, network in enumerate(self.plain):
            losses = [
                network.train_step(
                    self.x[0, rows].view(-1, *self.host.shape),
                    self.y[0, rows],
                    self.alpha[env].tolist(),
                    self.training[env].tolist(),
                )
                for rows in picked[env, : steps if counts is None else counts[env]]
            ]
            if losses:
                near(trained[0][env], torch.stack(losses).mean())
        return trained

    def numbers(self, env):
        """All that an environment consists of, as one vector."""
        cohort = self.cohort
        size = cohort.layouts[env].parameters
        held = (cohort.values, cohort.mean, cohort.square)
        return torch.cat([rows[env, :size] for rows in held])

    def assert_like_plain(self):
        for env, network in enumerate(self.plain):
            for n in range(len(self.host.layers)):
                found, expected = layer(self.cohort, env, n), network.layer(n)
                near(found[0], expected[0])
                near(found[1], expected[1])


def near(found, expected, rtol=1e-9):
    """Equal relative to the largest number of the tensor."""
    scale = float(expected.abs().max()) or 1.0
    torch.testing.assert_close(found, expected, rtol=0, atol=rtol * scale)


@pytest.mark.parametrize("kind", HOSTS)
@pytest.mark.parametrize("cohort", [Cohort, TorchCohort])
def test_a_cohort_is_separate_trainings(kind, cohort):
    """Seeds of both places, older and younger, blended, training and removed."""
    garden = Garden(host=HOSTS[kind], plain=True, cohort=cohort)
    last = garden.cohort.places - 1
    garden.plant(1, 0, 3)
    garden.plant(1, last or 1, 2, alpha=0.5)
    garden.plant(2, last, 4, training=True)
    garden.train(3)
    garden.assert_like_plain()
    if last:
        garden.plant(1, 2, 5, alpha=0.25)
        garden.plant(2, 0, 2, training=True)
        garden.plant(2, 3, 2)
    garden.train(3, start=1, counts=torch.tensor([0, 2, 3]))
    garden.assert_like_plain()
    garden.remove(1, 0)
    garden.live(2, last, 0.7)
    garden.train(3, start=2)
    garden.assert_like_plain()


@pytest.mark.parametrize("kind", HOSTS)
def test_both_engines_score_the_same(kind):
    gardens = [Garden(host=HOSTS[kind], cohort=each) for each in (Cohort, TorchCohort)]
    for garden in gardens:
        garden.plant(0, 0, 3, alpha=0.5)
        garden.train(40)
    wanted = torch.tensor([gardens[0].y.shape[1], 0, 5])
    found = [g.cohort.score(g.x, g.y, g.alpha, wanted) for g in gardens]
    near(*found, rtol=1e-6)
    assert found[0][1] == 0
    (garden, _), few = gardens, slice(None, 5)
    alone = garden.cohort.score(garden.x[:, few], garden.y[:, few], garden.alpha)
    assert found[0][2] == alone[2]
    plain = Garden(host=HOSTS[kind], plain=True)
    plain.plant(0, 0, 3, alpha=0.5)
    plain.train(40)
    outputs = plain.plain[0].forward(
        plain.x[0].view(-1, *plain.host.shape), plain.alpha[0].tolist()
    )
    share = float((outputs.argmax(dim=1) == plain.y[0]).double().mean())
    if kind == "regression":
        share = 1 - float(
            (outputs.detach().flatten() - plain.y[0]).square().mean() / variance(plain)
        )
    assert 0 < share < 1
    score = plain.cohort.score(plain.x, plain.y, plain.alpha)
    assert float(score[0]) == pytest.approx(share, abs=1e-6)


def variance(garden):
    return garden.y.var(correction=0)


@pytest.mark.parametrize("cohort", [Cohort, TorchCohort])
def test_a_target_that_is_missed_by_more_than_its_variance_scores_zero(cohort):
    garden = Garden(host=HOSTS["regression"], cohort=cohort)
    far = garden.y + 100 * variance(garden)
    assert garden.cohort.score(garden.x, far, garden.alpha).tolist() == [0, 0, 0]
    still = torch.ones_like(garden.y)
    assert garden.cohort.score(garden.x, still, garden.alpha).tolist() == [0, 0, 0]
    garden.cohort.values[1] = torch.nan
    assert garden.cohort.score(garden.x, garden.y, garden.alpha)[1] == 0


def split(garden, env):
    """A network's numbers of the host, and those of its seeds."""
    size = garden.host.parameters
    held = (garden.cohort.values, garden.cohort.mean, garden.cohort.square)
    return torch.cat([rows[env, :size] for rows in held])


@pytest.mark.parametrize(
    ("kind", "dtype"), [*product(HOSTS, (torch.float32, torch.float64))]
)
def test_a_host_with_training_seeds_equals_the_host_alone_to_the_bit(kind, dtype):
    alone, shadowed = (Garden(1, HOSTS[kind], dtype=dtype) for _ in range(2))
    shadowed.plant(0, 0, 3, training=True)
    shadowed.plant(0, garden_last(shadowed), 2, training=True)
    for start in range(10):
        alone.train(5, start), shadowed.train(5, start)
    assert torch.equal(split(alone, 0), split(shadowed, 0))
    for slot in (0, garden_last(shadowed)):
        assert shadowed.cohort.units[0, slot] > 0
        shadowed.remove(0, slot)
    assert torch.equal(alone.cohort.values, shadowed.cohort.values)
    assert torch.equal(alone.cohort.square, shadowed.cohort.square)
    assert torch.equal(alone.cohort.clocks, shadowed.cohort.clocks)


def garden_last(garden):
    """A slot of the last place that is not slot 0."""
    return garden.cohort.places - 1 or garden.cohort.places


@pytest.mark.parametrize("kind", HOSTS)
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_planting_changes_no_output_by_a_bit(kind, order):
    """Whichever of two neighbouring places is widened last."""
    garden = Garden(1, HOSTS[kind], dtype=torch.float32)
    garden.train(6)
    for slot in order:
        copy = Garden(1, HOSTS[kind], dtype=torch.float32)
        load(copy.cohort, save(garden.cohort))
        copy.alpha, copy.training = garden.alpha.clone(), garden.training.clone()
        garden.plant(0, slot, 4)
        assert torch.equal(garden.train(1, start=6)[0], copy.train(1, start=6)[0])
        garden.train(4, start=7)


def test_new_units_of_neighbouring_places_feed_each_other():
    """Random if the reader is younger, zero if the units that are read are."""
    garden = Garden(1)
    garden.plant(0, 0, 3)  # between layers 0 and 1
    garden.plant(0, 1, 2)  # between layers 1 and 2: reads the units of slot 0
    weight, _ = layer(garden.cohort, 0, 1)
    assert (weight[-2:, -3:] != 0).all()
    garden.plant(0, 2, 4)  # younger units of the first axis
    weight, _ = layer(garden.cohort, 0, 1)
    assert (weight[:, -4:] == 0).all()
    garden.train(5)
    weight, _ = layer(garden.cohort, 0, 1)
    assert (weight[-2:, -4:] != 0).any()


def test_a_cohort_of_any_size_gives_the_same_bits():
    small, large = Garden(1, dtype=torch.float32), Garden(3, dtype=torch.float32)
    for garden in (small, large):
        garden.plant(0, 0, 3, alpha=0.5)
        garden.plant(0, 1, 2, training=True)
    large.plant(1, 1, 6)
    for start in range(3):
        small.train(4, start), large.train(4, start)
    assert torch.equal(small.numbers(0), large.numbers(0))


def test_parameters_and_multiply_adds_are_those_of_the_whole_layers():
    for host in HOSTS.values():
        garden = Garden(1, host)
        parameters, macs = garden.cohort.unit_costs()
        before = garden.cohort.parameters()[0], garden.cohort.macs()[0]
        garden.plant(0, 0, 3)
        after = garden.cohort.parameters()[0], garden.cohort.macs()[0]
        assert after[0] - before[0] == 3 * parameters[0, 0]
        assert after[1] - before[1] == 3 * macs[0, 0]
        garden.plant(0, garden_last(garden), 5)
        shapes = [layer(garden.cohort, 0, n) for n in range(len(host.layers))]
        assert garden.cohort.parameters()[0] == sum(
            weight.numel() + bias.numel() for weight, bias in shapes
        )
        assert garden.cohort.macs()[0] == sum(
            weight.numel() * own.positions
            for (weight, _), own in zip(shapes, host.layers, strict=True)
        )
        seeds = garden.cohort.seed_parameters()[0].sum()
        assert seeds + host.parameters == garden.cohort.parameters()[0]


def test_a_saved_cohort_goes_on_to_the_bit():
    garden, other = Garden(dtype=torch.float32), Garden(dtype=torch.float32)
    garden.plant(1, 0, 3)
    garden.plant(1, 2, 2)
    garden.train()
    garden.remove(1, 0)
    garden.plant(1, 1, 4)
    garden.train(start=1)
    load(other.cohort, save(garden.cohort))
    other.alpha, other.training = garden.alpha, garden.training
    garden.train(start=2), other.train(start=2)
    for env in range(3):
        assert torch.equal(garden.numbers(env), other.numbers(env))


def test_no_float64_hides_in_a_step_of_the_optimiser():
    """In float32 the step is AdamW's, to float32's rounding."""
    chance = Generator().manual_seed(0)
    gradients = torch.randn(50, 40, generator=chance)
    exact = torch.randn(40, generator=chance).double().requires_grad_()
    weights = exact.detach().float().numpy().copy()
    mean, square = torch.zeros(40).numpy(), torch.zeros(40).numpy()
    optimizer = torch.optim.AdamW([exact], lr=1e-2, weight_decay=0.1)
    for clock, gradient in enumerate(gradients):
        exact.grad = gradient.double()
        optimizer.step()
        adamw(weights, gradient.numpy(), mean, square, 0, 40, 1e-2, clock + 1, 0.1)
    near(torch.from_numpy(weights).double(), exact.detach(), rtol=1e-6)


def test_a_seed_beyond_the_capacity_is_refused():
    garden = Garden(1)
    garden.plant(0, 0, 3)
    with pytest.raises(InvalidInputError, match="capacity"):
        garden.cohort.plant(0, 1, torch.zeros(9999, 10, 1), torch.zeros(9999))
