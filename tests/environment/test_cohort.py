from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch

from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.contracts.stages import Stage
from esper.environment.bank import FORMS
from esper.environment.cohort import Cohort, Plan
from esper.growth.lifecycle import Lives
from tests.references.cohort import PlainHost

KNOWN = {b.name: b for b in BLUEPRINTS}
CHOSEN = [KNOWN[name] for name in ("widen_8", "low_rank_4", "residual_mlp")]
WIDTHS = (5, 7, 6, 4)
PLACES, PER_PLACE, ROWS = 2, 2, 16
SLOTS = PLACES * PER_PLACE
FELT = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.COOLING)
ALPHA = {
    Stage.DORMANT: 0.0,
    Stage.TRAINING: 0.0,
    Stage.BLENDING: 0.5,
    Stage.HOLDING: 0.7,
    Stage.FOSSILIZED: 1.0,
    Stage.COOLING: 0.25,
}
RATE = 1e-2


class Garden:
    """A cohort, with or without the same hosts one by one."""

    def __init__(self, envs, dtype=torch.float64, *, plain=True, places=WIDTHS):
        self.envs, self.dtype = envs, dtype
        self.cohort = Cohort(
            envs, places, CHOSEN, seeds_per_slot=PER_PLACE, dtype=dtype
        )
        self.lives = Lives.empty(envs, self.cohort.places * PER_PLACE)
        for index, leaf in enumerate([*self.cohort.weights, *self.cohort.biases]):
            for env in range(envs):
                leaf.data[env] = noise(leaf[env].shape, env, index, dtype=dtype)
        self.hosts = [self._alone(env) for env in range(envs)] if plain else []

    def _alone(self, env):
        return PlainHost(
            [weight[env] for weight in self.cohort.weights],
            [bias[env, 0] for bias in self.cohort.biases],
            rate=RATE,
            decay=self.cohort.decay,
        )

    def plant(self, env, slot, blueprint):
        inputs = self.cohort.widths[slot % self.cohort.places]
        first = noise((inputs, blueprint.size), env, slot, 7, dtype=self.dtype)
        bias = noise((blueprint.size,), env, slot, 8, dtype=self.dtype)
        if blueprint.form is Form.LOW_RANK:
            bias = torch.zeros_like(bias)
        self.cohort.plant(env, slot, blueprint, first, bias)
        if self.hosts:
            self.hosts[env].plant(slot, blueprint, first, bias)
        self.live(env, slot, Stage.TRAINING)

    def live(self, env, slot, stage, alpha=None):
        alpha = ALPHA[stage] if alpha is None else alpha
        stages, alphas = self.lives.stage.clone(), self.lives.alpha.clone()
        stages[env, slot], alphas[env, slot] = int(stage), alpha
        self.lives = replace(self.lives, stage=stages, alpha=alphas)
        if self.hosts:
            self.hosts[env].live(slot, stage, float(alphas[env, slot]))

    def train(self, steps, start=0):
        plan = Plan.of(self.cohort, self.lives)
        rate = torch.full((self.envs,), RATE, dtype=self.dtype)
        for time in range(start, start + steps):
            batches = [rows(env, time, self.dtype, WIDTHS) for env in range(self.envs)]
            x, y = (torch.stack(part) for part in zip(*batches, strict=True))
            passed = self.cohort.train_step(x, y, plan, rate)
            for env, host in enumerate(self.hosts):
                loss = host.train_step(*batches[env])
                torch.testing.assert_close(
                    passed.losses[env], loss, rtol=1e-6, atol=1e-9
                )

    def of(self, env):
        """All weights of one environment, by name."""
        held = {
            f"{kind} {index}": leaf[env].detach().clone()
            for kind in ("weights", "biases")
            for index, leaf in enumerate(getattr(self.cohort, kind))
        }
        for place, bank in enumerate(self.cohort.banks):
            for name, moments in bank.moments.items():
                held[f"{name} at {place}"] = moments.value[env].clone()
        return held

    def assert_like_plain(self, rtol=1e-6):
        for env, host in enumerate(self.hosts):
            for index in range(len(host.weights)):
                near(self.cohort.weights[index][env], host.weights[index], rtol)
                near(self.cohort.biases[index][env, 0], host.biases[index], rtol)
            for slot, seed in host.seeds.items():
                place, own = int(slot) % PLACES, int(slot) // PLACES
                size, outputs = seed.last.shape
                values = {
                    name: moments.value[env, :, own]
                    for name, moments in self.cohort.banks[place].moments.items()
                }
                near(values["first"][:, :size], seed.first, rtol)
                near(values["last"][0].view(-1, outputs)[:size], seed.last, rtol)
                if seed.bias is not None:
                    near(values["first_bias"][0, :size], seed.bias, rtol)
                if seed.last_bias is not None:
                    near(values["last_bias"][0], seed.last_bias, rtol)


def near(found, expected, rtol):
    """Equal relative to the largest weight of the tensor."""
    scale = float(expected.detach().abs().max())
    torch.testing.assert_close(
        found.detach(), expected.detach(), rtol=rtol, atol=rtol * scale
    )


def noise(shape, *numbers, dtype):
    seed = sum((number + 1) * 101**index for index, number in enumerate(numbers))
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=chance, dtype=torch.float64)
    return (0.4 * drawn).to(dtype)


def rows(env, time, dtype, widths):
    chance = torch.Generator().manual_seed(1000 * env + time)
    x = torch.randn(ROWS, widths[0], generator=chance, dtype=torch.float64)
    y = torch.randint(0, widths[-1], (ROWS,), generator=chance)
    return x.to(dtype), y


@pytest.mark.parametrize("blueprint", CHOSEN, ids=lambda b: b.name)
def test_a_cohort_is_n_hosts_trained_one_by_one_in_every_stage_of_every_form(blueprint):
    garden = Garden(envs=6)
    garden.train(4)
    for env, slot in product(range(1, 6), range(SLOTS)):
        garden.plant(env, slot, CHOSEN[(CHOSEN.index(blueprint) + slot) % len(CHOSEN)])
    garden.train(14, start=4)
    for env, stage in enumerate((Stage.TRAINING, *FELT), start=1):
        garden.live(env, 0, stage)
        garden.live(env, 3, stage)
    garden.train(14, start=18)
    garden.assert_like_plain()


def test_every_seed_has_moved_once_it_was_planted():
    garden = Garden(envs=1)
    for slot, blueprint in enumerate(CHOSEN):
        garden.plant(0, slot, blueprint)
    garden.train(3)
    for slot in range(len(CHOSEN)):
        last = garden.cohort.banks[slot % PLACES].moments["last"].value
        assert last[0, 0, slot // PLACES].abs().max() > 1e-3


def test_seeds_may_come_and_go_while_their_neighbours_train():
    garden = Garden(envs=3)
    garden.plant(0, 1, CHOSEN[0])
    garden.plant(1, 0, CHOSEN[1])
    garden.plant(2, 3, CHOSEN[2])
    garden.train(10)
    garden.live(0, 1, Stage.BLENDING)
    garden.plant(0, 3, CHOSEN[1])
    garden.live(1, 0, Stage.COOLING)
    garden.train(10, start=10)
    garden.cohort.uproot(1, 0)
    garden.hosts[1].uproot(0)
    stages, alphas = garden.lives.stage.clone(), garden.lives.alpha.clone()
    stages[1, 0], alphas[1, 0] = int(Stage.DORMANT), 0.0
    garden.lives = replace(garden.lives, stage=stages, alpha=alphas)
    garden.train(5, start=20)
    garden.plant(1, 0, CHOSEN[2])
    garden.live(0, 1, Stage.HOLDING)
    garden.train(10, start=25)
    garden.assert_like_plain()


def test_a_pruned_newborn_stands_still_while_it_waits_to_leave():
    garden = Garden(envs=1)
    garden.plant(0, 1, CHOSEN[0])
    garden.plant(0, 3, CHOSEN[0])
    garden.train(5)
    garden.live(0, 1, Stage.COOLING, alpha=0.0)
    garden.live(0, 3, Stage.HOLDING)
    garden.train(5, start=5)
    garden.assert_like_plain()


def grown(neighbours):
    """What becomes of environment 0 beside such neighbours."""
    garden = Garden(envs=4, dtype=torch.float32, plain=False)
    garden.plant(0, 0, CHOSEN[0])
    garden.plant(0, 1, CHOSEN[1])
    garden.plant(0, 3, CHOSEN[0])
    garden.live(0, 1, Stage.HOLDING)
    for env, (slot, blueprint, stage) in product(range(1, 4), neighbours):
        garden.plant(env, slot, CHOSEN[blueprint])
        garden.live(env, slot, stage)
    garden.train(10)
    garden.live(0, 0, Stage.COOLING, alpha=0.0)
    garden.train(10, start=10)
    return garden.of(0)


NEIGHBOURS = {
    "in training before": [(0, 2, Stage.TRAINING), (2, 1, Stage.TRAINING)],
    "in training behind": [(1, 2, Stage.TRAINING)],
    "felt everywhere": [(slot, slot % 3, FELT[slot]) for slot in range(SLOTS)],
    "everything": [(0, 1, Stage.TRAINING), (1, 2, FELT[0]), (2, 2, FELT[1])],
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_an_environment_is_equal_to_the_bit_whatever_its_neighbours_planted(kind):
    alone, beside = grown([]), grown(NEIGHBOURS[kind])
    for name, value in alone.items():
        assert torch.equal(value, beside[name]), name


def test_a_host_with_only_newborns_is_equal_to_the_bit_to_one_without():
    bare, planted = (Garden(2, torch.float32, plain=False) for _ in range(2))
    for slot in range(SLOTS):
        planted.plant(0, slot, CHOSEN[slot % 3])
    bare.train(12)
    planted.train(12)
    for name, value in bare.of(0).items():
        if name.startswith(("weights", "biases")):
            assert torch.equal(value, planted.of(0)[name]), name


def test_a_broken_newborn_breaks_no_bit_of_its_host():
    sound, broken = (Garden(2, torch.float32, plain=False) for _ in range(2))
    for garden in (sound, broken):
        garden.plant(0, 1, CHOSEN[0])
        garden.live(0, 1, Stage.HOLDING)
        garden.plant(0, 3, CHOSEN[0])
    for moments in broken.cohort.banks[1].moments.values():
        moments.value[0, :, 1] = torch.nan
    sound.train(6)
    broken.train(6)
    for name, value in sound.of(0).items():
        if name.startswith(("weights", "biases")):
            assert torch.equal(value, broken.of(0)[name]), name
    held = broken.cohort.banks[1].moments["first"].value[0, :, 0]
    assert torch.equal(held, sound.cohort.banks[1].moments["first"].value[0, :, 0])


def test_a_new_host_leaves_nothing_of_the_old():
    garden = Garden(2, torch.float32, plain=False)
    for slot in range(SLOTS):
        garden.plant(1, slot, CHOSEN[slot % 3])
    garden.train(4)
    kept = garden.of(0)
    layers = [torch.nn.Linear(a, b) for a, b in pairwise(WIDTHS)]
    garden.cohort.plant_host(1, layers)
    for index, layer in enumerate(layers):
        assert torch.equal(garden.cohort.weights[index][1], layer.weight.T)
        assert torch.equal(garden.cohort.biases[index][1, 0], layer.bias)
    for moments in garden.cohort.moments:
        assert not moments.mean[1].any()
        assert not moments.square[1].any()
        assert moments.mean[0].any()
    for bank in garden.cohort.banks:
        assert not bank.used[1].any()
        assert not any(m.value[1].any() for m in bank.moments.values())
    assert garden.cohort.host_clock.flatten().tolist() == [4, 0]
    assert all(torch.equal(value, garden.of(0)[name]) for name, value in kept.items())


def test_the_gradients_that_are_kept_are_those_of_the_loss_at_each_outlet():
    garden = Garden(envs=2)
    garden.plant(0, 0, CHOSEN[0])
    garden.live(0, 0, Stage.HOLDING)
    weights = [w.detach().clone() for w in garden.cohort.weights]
    biases = [b.detach().clone() for b in garden.cohort.biases]
    batches = [rows(env, 0, torch.float64, WIDTHS) for env in range(2)]
    x, y = (torch.stack(part) for part in zip(*batches, strict=True))
    plan = Plan.of(garden.cohort, garden.lives)
    rate = torch.full((2,), RATE, dtype=torch.float64)
    passed = garden.cohort.train_step(x, y, plan, rate, keep=True)
    for env in range(2):
        z = passed.outputs[1][env].detach().requires_grad_()
        answer = torch.relu(z) @ weights[2][env] + biases[2][env]
        loss = torch.nn.functional.cross_entropy(answer, y[env])
        (expected,) = torch.autograd.grad(loss, z)
        torch.testing.assert_close(
            passed.gradients[0][env], expected, rtol=1e-10, atol=1e-14
        )


def test_every_form_a_bank_can_hold_was_planted_here():
    assert {blueprint.form for blueprint in CHOSEN} == set(FORMS)
