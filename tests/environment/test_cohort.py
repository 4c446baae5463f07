from dataclasses import replace
from itertools import accumulate, product

import pytest
import torch
import torch.nn.functional as F

from esper.contracts.blueprints import BLUEPRINTS, Form
from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.contracts.state import save
from esper.environment.cohort import ACTIVATIONS, Cohort, active_alpha
from esper.environment.engine import adamw
from esper.growth.lifecycle import SeedStates
from esper.tasks.hosts import CnnHost, MlpHost
from tests.references.cohort import PlainHost

KNOWN = {b.name: b for b in BLUEPRINTS}
CHOSEN = {
    "mlp": [KNOWN[name] for name in ("widen_8", "low_rank_4", "residual_mlp")],
    "cnn": [KNOWN["widen_8"], replace(KNOWN["widen_8"], name="small", size=3)],
}
MLP, CNN = MlpHost((5, 7, 6, 4)), CnnHost((2, 9, 7), (3, 4), 4)
"""The images have odd sides: pooling leaves a line and a column unread."""
HOSTS = {"mlp": MLP, "cnn": CNN}
PER_PLACE, ROWS, EXAMPLES = 2, 16, 90
SLOTS = 2 * PER_PLACE
ACTIVE = (Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED, Stage.COOLING)
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

    def __init__(
        self, envs, dtype=torch.float64, host=MLP, *, plain=True, engine="auto"
    ):
        self.envs, self.dtype, self.kind = envs, dtype, host
        self.chosen = CHOSEN[host.kind]
        self.cohort = Cohort(
            envs,
            host,
            self.chosen,
            seeds_per_slot=PER_PLACE,
            batch=ROWS,
            dtype=dtype,
            engine=engine,
        )
        self.lives = SeedStates.empty(envs, self.cohort.layout.slots)
        self.hosts = []
        for env in range(envs):
            network = host.build(torch.Generator().manual_seed(env)).to(dtype)
            self.cohort.set_host(env, network)
            if plain:
                decay = self.cohort.decay
                self.hosts.append(PlainHost(network, rate=RATE, decay=decay))
        chance = torch.Generator().manual_seed(77)
        shape = (1, EXAMPLES, torch.Size(host.shape).numel())
        self.x = torch.randn(shape, generator=chance, dtype=torch.float64).to(dtype)
        self.y = torch.randint(0, host.classes, (1, EXAMPLES), generator=chance)

    def plant(self, env, slot, blueprint):
        own = self.cohort.layout.shapes[slot % self.cohort.places]
        shape = (own.inputs, blueprint.size)
        if own.taps > 1:
            shape = (blueprint.size, own.inputs, 3, 3)
        params = {"first": noise(shape, env, slot, 7, dtype=self.dtype)}
        if blueprint.form is not Form.LOW_RANK:
            params["first_bias"] = noise(
                (blueprint.size,), env, slot, 8, dtype=self.dtype
            )
        self.cohort.plant(env, slot, blueprint, params)
        if self.hosts:
            self.hosts[env].plant(slot, blueprint, params)
        self.live(env, slot, Stage.TRAINING)

    def live(self, env, slot, stage, alpha=None):
        alpha = ALPHA[stage] if alpha is None else alpha
        stages, alphas = self.lives.stage.clone(), self.lives.alpha.clone()
        stages[env, slot], alphas[env, slot] = int(stage), alpha
        self.lives = replace(self.lives, stage=stages, alpha=alphas)
        if self.hosts and stage is not Stage.DORMANT:
            self.hosts[env].live(slot, stage, float(alphas[env, slot]))

    def train(self, steps, start=0, *, keep=False):
        picked = torch.stack(
            [
                torch.stack([rows(env, time) for time in range(start, start + steps)])
                for env in range(self.envs)
            ]
        )
        trained = self.cohort.train(
            self.x,
            self.y,
            picked,
            self.lives,
            torch.full((self.envs, steps), RATE, dtype=torch.float64),
            keep=keep,
        )
        for env, host in enumerate(self.hosts):
            losses = []
            for step in range(steps):
                x, y = self.x[0, picked[env, step]], self.y[0, picked[env, step]]
                losses.append(host.train_step(x.view(-1, *self.kind.shape), y))
            loss = torch.stack(losses).mean()
            torch.testing.assert_close(trained.losses[env], loss, rtol=1e-6, atol=1e-9)
        return trained

    def part(self, env, what, slot=None):
        """All weights of a host, or one part of a seed."""
        layout, values = self.cohort.layout, self.cohort.values[env]
        if slot is None:
            return values[: layout.host_parameters]
        ends = accumulate(layout.lengths, initial=0)
        part = 2 * len(layout.shapes) + 4 * slot + PARTS.index(what)
        begin = [*ends][part]
        return values[begin : begin + layout.lengths[part]]

    def assert_like_plain(self, rtol=1e-6):
        for env, host in enumerate(self.hosts):
            expected = torch.nn.utils.parameters_to_vector(host.layers.parameters())
            near(self.part(env, "host"), expected, rtol)
            for name, seed in host.seeds.items():
                slot = int(name)
                first, last = seed.first.weight, seed.last.weight
                near(self.part(env, "first", slot)[: first.numel()], first, rtol)
                # Unit by unit.
                turned = last.transpose(0, 1)
                near(self.part(env, "last", slot)[: last.numel()], turned, rtol)
                for what, layer in (("first", seed.first), ("last", seed.last)):
                    if layer.bias is not None:
                        held = self.part(env, f"{what}_bias", slot)
                        near(held[: layer.bias.numel()], layer.bias, rtol)


PARTS = ("first", "first_bias", "last", "last_bias")


def near(found, expected, rtol):
    """Equal relative to the largest weight of the tensor."""
    expected = expected.detach().reshape(-1)
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * scale)


def noise(shape, *numbers, dtype):
    seed = sum((number + 1) * 101**index for index, number in enumerate(numbers))
    chance = torch.Generator().manual_seed(seed)
    drawn = torch.randn(*shape, generator=chance, dtype=torch.float64)
    return (0.4 * drawn).to(dtype)


def rows(env, time):
    chance = torch.Generator().manual_seed(1000 * env + time)
    return torch.randint(0, EXAMPLES, (ROWS,), generator=chance)


@pytest.fixture(params=HOSTS)
def host(request):
    return HOSTS[request.param]


ENGINES = pytest.mark.parametrize("engine", ["kernels", "tensors"])


@ENGINES
@pytest.mark.parametrize("turn", range(3))
def test_a_cohort_is_n_hosts_trained_one_by_one_in_every_stage_of_every_form(
    host, turn, engine
):
    garden = Garden(envs=6, host=host, engine=engine)
    chosen = garden.chosen
    garden.train(4)
    for env, slot in product(range(1, 6), range(SLOTS)):
        garden.plant(env, slot, chosen[(turn + slot) % len(chosen)])
    garden.train(9, start=4)
    for env, stage in enumerate((Stage.TRAINING, *ACTIVE), start=1):
        garden.live(env, 0, stage)
        garden.live(env, 3, stage)
    garden.train(9, start=13)
    garden.assert_like_plain()


@ENGINES
def test_the_rows_that_are_counted_are_those_that_the_host_guesses_right(host, engine):
    garden = Garden(3, host=host, engine=engine)
    for slot in range(SLOTS):
        garden.plant(1, slot, garden.chosen[slot % len(garden.chosen)])
    garden.train(6)
    for slot in range(SLOTS):
        garden.live(1, slot, ACTIVE[slot])
    garden.train(14, start=6)
    wanted = torch.tensor([True, True, False])
    alpha = active_alpha(garden.lives)
    found = garden.cohort.count(garden.x, garden.y, alpha, wanted)
    assert found[2] == 0
    for env, plain in enumerate(garden.hosts[:2]):
        answer = plain(garden.x[0].view(-1, *host.shape))
        assert int((answer.argmax(1) == garden.y[0]).sum()) == int(found[env])
        assert int(found[env]) > EXAMPLES // host.classes


def test_seeds_may_come_and_go_while_their_neighbours_train(host):
    garden = Garden(envs=3, host=host)
    one, other = garden.chosen[:2]
    garden.plant(0, 1, one)
    garden.plant(1, 0, other)
    garden.plant(2, 3, one)
    garden.train(10)
    garden.live(0, 1, Stage.BLENDING)
    garden.plant(0, 3, other)
    garden.live(1, 0, Stage.COOLING)
    garden.train(10, start=10)
    garden.cohort.remove(1, 0)
    garden.hosts[1].uproot(0)
    garden.live(1, 0, Stage.DORMANT)
    garden.train(5, start=20)
    garden.plant(1, 0, garden.chosen[-1])
    garden.live(0, 1, Stage.HOLDING)
    garden.train(10, start=25)
    garden.assert_like_plain()


def test_in_single_precision_an_episode_ends_near_the_hosts_trained_alone(host):
    garden = Garden(envs=3, host=host, dtype=torch.float32)
    exact = Garden(envs=3, host=host)
    for each in (garden, exact):
        each.hosts = []
        each.train(10)
        for env, slot in product(range(3), range(SLOTS)):
            if (env + slot) % 3:
                each.plant(env, slot, each.chosen[slot % len(each.chosen)])
        each.train(10, start=10)
        each.live(1, 0, Stage.BLENDING)
        each.live(2, 2, Stage.HOLDING)
        each.train(10, start=20)
    for env in range(3):
        found, expected = garden.cohort.values[env].double(), exact.cohort.values[env]
        off = (found - expected).norm() / expected.norm()
        assert off < 1e-4


def test_a_pruned_newborn_stands_still_while_it_waits_to_leave(host):
    garden = Garden(envs=1, host=host)
    garden.plant(0, 1, garden.chosen[0])
    garden.plant(0, 3, garden.chosen[0])
    garden.train(5)
    garden.live(0, 1, Stage.COOLING, alpha=0.0)
    garden.live(0, 3, Stage.HOLDING)
    kept = garden.cohort.values[0, slice(*garden.cohort.layout.extent(1))].clone()
    garden.train(5, start=5)
    garden.assert_like_plain()
    now = garden.cohort.values[0, slice(*garden.cohort.layout.extent(1))]
    assert torch.equal(kept, now)


def grown(neighbours, envs, host):
    """What becomes of environment 0 beside such neighbours."""
    garden = Garden(envs=envs, dtype=torch.float32, host=host, plain=False)
    one, other = garden.chosen[:2]
    garden.plant(0, 0, one)
    garden.plant(0, 1, other)
    garden.plant(0, 3, one)
    garden.live(0, 1, Stage.HOLDING)
    for env, (slot, blueprint, stage) in product(range(1, envs), neighbours):
        garden.plant(env, slot, garden.chosen[blueprint % len(garden.chosen)])
        garden.live(env, slot, stage)
    garden.train(10)
    garden.live(0, 0, Stage.COOLING, alpha=0.0)
    trained = garden.train(10, start=10)
    state = (garden.cohort.values, garden.cohort.mean, garden.cohort.square)
    return [*(part[0].clone() for part in state), trained.losses[0]]


NEIGHBOURS = {
    "in training before": (4, [(0, 2, Stage.TRAINING), (2, 1, Stage.TRAINING)]),
    "in training behind": (4, [(1, 2, Stage.TRAINING)]),
    "active everywhere": (4, [(slot, slot % 3, ACTIVE[slot]) for slot in range(SLOTS)]),
    "many": (7, [(0, 1, Stage.TRAINING), (1, 2, ACTIVE[0]), (2, 2, ACTIVE[1])]),
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_an_environment_is_equal_to_the_bit_whatever_its_neighbours_are(kind, host):
    envs, neighbours = NEIGHBOURS[kind]
    alone, beside = grown([], 1, host), grown(neighbours, envs, host)
    assert all(map(torch.equal, alone, beside))


@ENGINES
def test_newborns_change_no_bit_of_their_host_even_broken(host, engine):
    bare, sound, broken = (
        Garden(2, torch.float32, host, plain=False, engine=engine) for _ in range(3)
    )
    for garden in (bare, sound, broken):
        garden.plant(0, 1, garden.chosen[0])
        garden.live(0, 1, Stage.HOLDING)
    for garden in (sound, broken):
        garden.plant(0, 0, garden.chosen[-1])
        garden.plant(0, 3, garden.chosen[0])
    broken.cohort.values[0, slice(*broken.cohort.layout.extent(3))] = torch.nan
    first, *ends = [garden.train(6) for garden in (bare, sound, broken)]
    for garden, end in zip((sound, broken), ends, strict=True):
        assert torch.equal(bare.part(0, "host"), garden.part(0, "host"))
        assert torch.equal(bare.part(0, "first", 1), garden.part(0, "first", 1))
        assert torch.equal(bare.cohort.values[1], garden.cohort.values[1])
        assert torch.equal(first.losses, end.losses)
    assert ends[1].shadow_losses.isnan().tolist() == [True, False]


def test_a_broken_host_breaks_no_bit_of_its_neighbours(host):
    sound, broken = (Garden(3, torch.float32, host, plain=False) for _ in range(2))
    broken.cohort.values[1] = torch.inf
    sound.train(6)
    assert broken.train(6).losses.isfinite().tolist() == [True, False, True]
    for env in (0, 2):
        assert torch.equal(sound.cohort.values[env], broken.cohort.values[env])


def test_a_new_host_leaves_nothing_of_the_old(host):
    garden, fresh = (Garden(2, torch.float32, host, plain=False) for _ in range(2))
    for slot in range(SLOTS):
        garden.plant(1, slot, garden.chosen[slot % len(garden.chosen)])
    garden.train(4)
    before = save(garden.cohort)
    garden.cohort.set_host(1, host.build(torch.Generator().manual_seed(1)))
    after, expected = save(garden.cohort), save(fresh.cohort)
    del after["act"]  # read only where there is a seed
    for name, state in after.items():
        assert torch.equal(state[0], before[name][0]), name
        assert torch.equal(state[1], expected[name][1]), name


@ENGINES
def test_samples_of_a_place_are_its_activations_and_gradients(host, engine):
    garden = Garden(2, host=host, engine=engine)
    garden.plant(0, 0, garden.chosen[0])
    garden.train(4)
    garden.live(0, 0, Stage.BLENDING)
    held = []
    for env, plain in enumerate(garden.hosts):
        x = garden.x[0, rows(env, 4)].view(-1, *host.shape)
        inputs, outputs = [x], []
        for n, layer in enumerate(plain.layers):
            z = layer(inputs[n])
            if env == 0 and n == 1:
                z = z + ALPHA[Stage.BLENDING] * plain.seeds["0"](inputs[0])
            z.retain_grad()
            outputs.append(z)
            inputs.append(plain.between[n](z))
        F.cross_entropy(outputs[-1], garden.y[0, rows(env, 4)]).backward()
        held.append((inputs, outputs))
    garden.hosts = []
    places = garden.train(1, start=4, keep=True).places
    for env, (inputs, outputs) in enumerate(held):
        for p, place in enumerate(places):
            close(place.inputs[env], inputs[p].flatten(1))
            close(place.outputs[env].flatten(1), outputs[p + 1].flatten(1))
            close(place.gradient[env].flatten(1), outputs[p + 1].grad.flatten(1))


def close(found, expected):
    torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-12)


def test_every_form_that_can_be_planted_was_planted_here():
    assert {blueprint.form for blueprint in CHOSEN["mlp"]} == set(ACTIVATIONS)


def test_rows_of_each_environments_own_are_read_by_their_owner(host):
    garden = Garden(2, host=host)
    garden.x = torch.cat([garden.x, -garden.x])
    garden.y = garden.y.repeat(2, 1)
    garden.hosts = []
    apart = garden.cohort
    picked = torch.stack([rows(0, 0)[None]] * 2)
    rates = torch.full((2, 1), RATE, dtype=torch.float64)
    losses = apart.train(garden.x, garden.y, picked, garden.lives, rates).losses
    for env in range(2):
        network = host.build(torch.Generator().manual_seed(env)).double()
        x = garden.x[env, picked[env, 0]].view(-1, *host.shape)
        expected = F.cross_entropy(network(x), garden.y[env, picked[env, 0]])
        close(losses[env], expected)


def test_kernels_run_on_the_cpu_only():
    with pytest.raises(BadInput, match="'kernels' runs on the CPU, the device is meta"):
        Cohort(2, MLP, CHOSEN["mlp"], device="meta", engine="kernels")


def test_elsewhere_than_on_the_cpu_tensors_are_used(host):
    cohort = Cohort(3, host, CHOSEN[host.kind], batch=ROWS, device="meta")
    numbers = {"dtype": torch.int64, "device": "meta"}
    trained = cohort.train(
        torch.empty(1, EXAMPLES, torch.Size(host.shape).numel(), device="meta"),
        torch.empty(1, EXAMPLES, **numbers),
        torch.empty(3, 2, ROWS, **numbers),
        SeedStates.empty(3, SLOTS, "meta"),
        torch.empty(3, 2, device="meta"),
        keep=True,
    )
    assert trained.losses.device.type == "meta"
    assert [place.outputs.shape[2] for place in trained.places] == [
        own.outputs for own in cohort.layout.shapes[1:]
    ]


WRONG = [
    ("picked", torch.zeros(2, 1, 8).long(), r"picked must be \[2, 1, 16\]"),
    ("picked", torch.full((2, 1, ROWS), EXAMPLES), r"picked must lie in 0\.\.89"),
    ("picked", torch.full((2, 1, ROWS), -1), r"picked must lie in 0\.\.89, got -1"),
    ("rates", torch.ones(2, 2), r"rates must be \[2, 1\]"),
    ("labels", torch.full((1, EXAMPLES), 4), r"labels must lie in 0\.\.3, got 4"),
    ("labels", torch.zeros(3, EXAMPLES).long(), r"labels must be \[1 or 2, example\]"),
    (
        "features",
        torch.zeros(1, EXAMPLES, 4).double(),
        r"features must be \[1, 90, 5\]",
    ),
    ("features", torch.zeros(1, EXAMPLES, 5), "features must be .* torch.float32"),
    ("lives", SeedStates.empty(2, 3), r"alpha must be \[2, 4\]"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("name", "wrong", "words"), WRONG)
def test_arrays_that_a_kernel_would_misread_are_refused(name, wrong, words):
    garden = Garden(2, plain=False)
    given = {
        "features": garden.x,
        "labels": garden.y,
        "picked": torch.zeros(2, 1, ROWS, dtype=torch.int64),
        "lives": garden.lives,
        "rates": torch.ones(2, 1, dtype=torch.float64),
        name: wrong,
    }
    kept = garden.cohort.values.clone()
    with pytest.raises(BadInput, match=words):
        garden.cohort.train(**given)
    assert torch.equal(garden.cohort.values, kept)
    if name in ("features", "labels", "lives"):
        with pytest.raises(BadInput, match=words):
            garden.cohort.count(
                given["features"], given["labels"], given["lives"].alpha
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stretch_moves_as_in_an_optimiser_of_its_own(dtype):
    """And what lies outside does not move by a bit."""
    near = 1e-6 if dtype is torch.float32 else 1e-12
    start, length, decay = 5, 37, 0.03
    chance = torch.Generator().manual_seed(3)
    inside, size = slice(start, start + length), length + 2 * start
    values = torch.randn(size, generator=chance, dtype=torch.float64).to(dtype)
    held = [values, torch.zeros_like(values), torch.zeros_like(values)]
    kept = [part.clone() for part in held]
    alone = values[inside].clone().requires_grad_()
    optimizer = torch.optim.AdamW([alone], lr=1.0, weight_decay=decay)
    for time in range(1, 13):
        found = torch.full_like(values, torch.nan)
        found[inside] = torch.randn(length, generator=chance).to(dtype)
        rate = 0.01 * time
        weights, *moments = (part.numpy() for part in held)
        adamw(weights, found.numpy(), *moments, start, length, rate, time, decay)
        optimizer.param_groups[0]["lr"] = rate
        alone.grad = found[inside].clone()
        optimizer.step()
    torch.testing.assert_close(held[0][inside], alone.detach(), rtol=near, atol=near)
    for before, after in zip(kept, held, strict=True):
        assert torch.equal(before[:start], after[:start])
        assert torch.equal(before[start + length :], after[start + length :])
