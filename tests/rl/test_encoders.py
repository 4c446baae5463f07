"""Encoders for images by their size, and encoders of the user."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn
from torch.autograd import gradcheck
from torch.testing import assert_close

from esper import PPO
from esper.contracts.errors import InvalidInputError, NumericsError
from esper.contracts.state import save
from esper.rl.encoders import image_encoder
from esper.rl.policy import tanh
from tests.rl.environments import Chance, Seen
from tests.rl.test_ppo import assert_same_agents, chance, learnt

SMALL = {"width": 8, "rollout_steps": 12}
ONCE = {"epochs": 1, "minibatches": 1}


@pytest.mark.parametrize(
    ("shape", "flat"),
    [
        ((3, 1, 1), 32),
        ((3, 7, 7), 32 * 4 * 4),  # MiniGrid
        ((1, 16, 16), 32 * 8 * 8),
        ((1, 5, 40), 64 * 1 * 5),
        ((1, 28, 28), 64 * 7 * 7),
        ((3, 32, 32), 64 * 8 * 8),
        ((3, 63, 63), 64 * 8 * 8),
        ((3, 64, 64), 64 * 4 * 4),
        ((4, 84, 84), 64 * 7 * 7),  # Atari
        ((3, 210, 160), 64 * 22 * 16),
        ((1, 20, 90), 64 * 3 * 12),
    ],
)
def test_images_of_every_size_become_some_hundreds_or_thousands_of_numbers(shape, flat):
    encoder = image_encoder(shape, 8)
    assert encoder[-1].in_features == flat
    assert encoder(torch.zeros(2, *shape)).shape == (2, 8)


def test_the_layers_for_atari_are_those_of_the_nature_paper():
    layers = [m for m in image_encoder((4, 84, 84), 8) if isinstance(m, nn.Conv2d)]
    found = [(m.out_channels, m.kernel_size[0], m.stride[0]) for m in layers]
    assert found == [(32, 8, 4), (64, 4, 2), (64, 3, 1)]


class Side(gymnasium.Env):
    """Says on which side of an image a bright spot is."""

    action_space = spaces.Discrete(2)

    def __init__(self, shape):
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)

    def _show(self):
        image = self.np_random.integers(0, 60, self.observation_space.shape, np.uint8)
        self.right, size = int(self.np_random.integers(2)), max(image.shape)
        half = image.swapaxes(0, image.shape.index(size))
        at = int(self.np_random.integers(size // 2)) + self.right * (size // 2)
        half[at] = 255
        return image

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._show(), {}

    def step(self, action):
        reward = float(action == self.right)
        return self._show(), reward, True, False, {}


@pytest.mark.learns
@pytest.mark.parametrize("shape", [(8, 8, 1), (1, 24, 24), (84, 84, 1)])
def test_images_of_every_size_are_learnt(shape):
    agent = PPO(lambda: Side(shape), num_envs=8, rollout_steps=32, width=16)
    agent.learn(4_096)
    assert agent.evaluate(100).mean > 0.9


class Rows(nn.Module):
    """Takes observations of `Chance` with masks in them."""

    def __init__(self, space):
        super().__init__()
        self.space = space
        self.layers = nn.Sequential(nn.Linear(space["seen"].shape[0], 5), nn.GELU())

    def forward(self, observation):
        assert observation.keys() == {"seen"}
        return self.layers(observation["seen"])


@pytest.mark.parametrize("memory", ["none", "conv-mingru", "lstm"])
@pytest.mark.parametrize("separate_value", [False, True])
def test_the_first_minibatch_sees_the_encoder_that_acted(memory, separate_value):
    made = []

    def encoder(space):
        made.append(Rows(space))
        return made[-1]

    agent = PPO(
        chance("observation"),
        encoder=encoder,
        memory=memory,
        separate_value=separate_value,
        num_envs=4,
        **ONCE,
        **SMALL,
    )
    assert len(made) == 1 + separate_value
    before = [part.layers[0].weight.clone() for part in made]
    for record in learnt(agent, 96):
        assert abs(record.update.kl) < 1e-6
        assert record.update.clip_fraction == 0
    for part, old in zip(made, before, strict=True):
        assert not torch.equal(part.layers[0].weight, old)


PARTS = spaces.Dict(
    image=spaces.Box(0, 255, (6, 7, 3), np.uint8),
    table=spaces.Box(-1, 1, (2, 3), np.float32),
    inner=spaces.Tuple((spaces.Discrete(4), spaces.MultiBinary((2, 2)))),
    action_mask=spaces.MultiBinary(2),
    number=spaces.Box(-1, 1, (), np.float32),
    words=spaces.Text(5),
    pair=spaces.MultiDiscrete([2, 3]),
)


class Parts(gymnasium.Env):
    observation_space = PARTS
    action_space = spaces.Discrete(2)

    def _show(self):
        shown = PARTS.sample()
        shown["action_mask"][0] = 1
        return shown

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        PARTS.seed(seed)
        return self._show(), {}

    def step(self, action):
        return self._show(), 0.0, False, False, {}


class Whole(nn.Module):
    """Flattens all parts, and keeps the last observation."""

    def forward(self, observation):
        self.seen = observation
        inner = observation["inner"]
        each = [observation[n] for n in ("image", "table", "number", "pair")]
        return torch.cat([x.reshape(len(x), -1) for x in (*each, *inner)], dim=1)


@pytest.mark.filterwarnings("ignore:'words' of the observation is text")
def test_an_encoder_gets_the_parts_of_an_observation_in_their_shapes():
    spaces_seen = []

    def encoder(space):
        spaces_seen.append(space)
        return Whole()

    agent = PPO(Parts, encoder=encoder, num_envs=2, normalize=False, **SMALL).learn(24)
    shown, _ = Parts().reset(seed=5)
    agent.predict(shown)
    seen, space = agent.policy.trunks[0].encoder[0].seen, spaces_seen[0]
    assert [*space] == [*seen] == [name for name in PARTS if name in seen]
    assert {*PARTS} - {*seen} == {"action_mask", "words"}
    single = {
        k: tuple(x[0].numpy() for x in v) if k == "inner" else v[0].numpy()
        for k, v in seen.items()
    }
    assert space.contains(single)
    np.testing.assert_allclose(single["image"], shown["image"].transpose(2, 0, 1) / 255)
    np.testing.assert_array_equal(single["table"], shown["table"])
    np.testing.assert_array_equal(single["number"], shown["number"])
    assert single["inner"][0].argmax() == shown["inner"][0]
    np.testing.assert_array_equal(single["inner"][1], shown["inner"][1])
    first, second = shown["pair"]
    assert (single["pair"] == [*np.eye(2)[first], *np.eye(3)[second]]).all()


def test_a_module_is_copied_and_keeps_its_weights():
    given = nn.Linear(2, 3)
    agent = PPO(Seen, encoder=given, separate_value=True, num_envs=2, **SMALL)
    one, two = (trunk.encoder[0] for trunk in agent.policy.trunks)
    assert torch.equal(one.weight, given.weight)
    before = given.weight.clone()
    agent.learn(72)
    assert torch.equal(given.weight, before)
    assert not torch.equal(one.weight, two.weight)


def test_an_encoder_is_saved_by_its_weights_and_given_again(tmp_path):
    def encoder(space):
        return nn.Sequential(nn.Linear(space.shape[0], 3), nn.Tanh())

    agent = PPO(chance(), encoder=encoder, memory="gru", num_envs=2, **SMALL).learn(48)
    file = tmp_path / "agent"
    agent.save(file)
    with pytest.raises(
        InvalidInputError, match=r"an encoder, 'Sequential', .* again: P"
    ):
        PPO.load(file)
    with pytest.raises(InvalidInputError, match="does not fit"):
        PPO.load(file, encoder=nn.Linear(4, 3))
    with pytest.raises(InvalidInputError, match="does not fit"):
        PPO.load(file, encoder=lambda space: nn.Sequential(nn.Linear(4, 5), nn.Tanh()))
    agent.forget_episodes()
    loaded = PPO.load(file, env=chance(), encoder=encoder)
    assert_same_agents(agent, loaded)
    assert_same_agents(agent.learn(48), loaded.learn(48))
    plain = tmp_path / "plain"
    PPO(Seen, num_envs=2, **SMALL).save(plain)
    with pytest.raises(InvalidInputError, match="has no encoder of its own"):
        PPO.load(plain, encoder=nn.Linear(2, 2))


class Returns(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def forward(self, observation):
        return self.result(observation)


@pytest.mark.parametrize(
    ("encoder", "words"),
    [
        (nn.Identity(), None),
        (nn.LazyLinear(3), None),
        (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).eval(), None),
        (Returns(lambda x: x.unsqueeze(1)), r"\[3, n\], got \[3, 1, 2\]"),
        (Returns(lambda x: x.sum()), r"must return \[batch, features\].* got \[\]"),
        (Returns(lambda x: x[:, :0]), r"got \[3, 0\]"),
        (Returns(lambda x: x > 0), "must return float32 numbers, got torch.bool"),
        (Returns(lambda x: x.double()), "float32 numbers, got torch.float64"),
        (Returns(lambda x: (x, x)), "float32 numbers, got tuple"),
        (Returns(lambda x: x - x.mean(0)), "the same result alone and in a batch"),
        (Returns(lambda x: x + torch.rand_like(x)), "the same result alone and in"),
        (
            nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)),
            "has a BatchNorm1d in train",
        ),
        (nn.Dropout(0.1), "has a Dropout in training mode"),
        (nn.Linear(7, 3), "encoder failed: RuntimeError: mat1 and mat2"),
        (lambda space: 3, "encoder failed: TypeError: it makes a int"),
        (3, "encoder failed: TypeError: 'int' object is not callable"),
    ],
)
def test_an_encoder_that_cannot_be_used_is_refused_in_one_line(encoder, words):
    if words is None:
        assert PPO(Seen, encoder=encoder, num_envs=2, **SMALL).learn(24).rounds == 1
        return
    with pytest.raises(InvalidInputError, match=words) as caught:
        PPO(Seen, encoder=encoder, num_envs=2, **SMALL)
    assert "\n" not in str(caught.value)


class Layer(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.layer, self.result = nn.Linear(2, 3), result

    def forward(self, observation):
        return self.result(self.layer, observation)


def test_an_encoder_in_double_precision_learns():
    encoder = Layer(lambda layer, x: layer(x.double()).float()).double()
    agent = PPO(Seen, encoder=encoder, num_envs=2, **SMALL)
    weight = agent.policy.trunks[0].encoder[0].layer.weight
    before = weight.clone()
    agent.learn(24)
    assert weight.dtype == torch.float64
    assert not torch.equal(weight, before)


def test_learning_that_takes_no_step_ends_with_an_error():
    encoder = Layer(lambda layer, x: layer(x).abs().sqrt())  # its slope at 0 is NaN
    nn.init.zeros_(encoder.layer.weight)
    nn.init.zeros_(encoder.layer.bias)
    agent = PPO(Seen, encoder=encoder, num_envs=2, **SMALL)
    with pytest.raises(NumericsError, match="3 rounds in a row had no finite"):
        agent.learn(24 * 10)
    assert agent.rounds == 3


def test_an_encoder_that_is_one_layer_starts_with_its_own_weights():
    given = nn.Linear(2, 3)
    with torch.no_grad():
        given.weight.fill_(0.25)
    agent = PPO(Seen, encoder=given, num_envs=2, **SMALL)
    assert torch.equal(
        save(agent)["agent/policy/trunks.0.encoder.0.weight"], given.weight
    )


@pytest.mark.learns  # without shape checks, which tracing cannot pass
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
@pytest.mark.parametrize("memory", ["mingru", "attention"])
def test_an_agent_with_an_encoder_is_exported(tmp_path, memory):
    runtime = pytest.importorskip("onnxruntime")

    def make():
        return Chance("observation")

    agent = PPO(make, encoder=Rows, memory=memory, num_envs=2, **SMALL)
    learnt(agent, 48)
    agent.export(tmp_path / "agent.onnx")
    session = runtime.InferenceSession(tmp_path / "agent.onnx")
    seen = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    mask = np.ones((3, 10), bool)
    action, state = agent.predict({"seen": seen, "action_mask": mask})
    given = {"vector": seen, "mask": mask, "episode_start": np.ones(3, bool)}
    given["state"] = np.zeros((3, *agent.policy.state_shape), np.float32)
    chosen, _, _, after = session.run(None, given)
    assert (chosen == action).all()
    np.testing.assert_allclose(after, state, atol=1e-5)


def test_the_activation_is_the_hyperbolic_tangent_in_value_and_gradient():
    x = torch.cat((torch.linspace(-12.0, 12.0, 100_001), torch.tensor([200.0])))
    assert_close(tanh(x).double(), torch.tanh(x.double()), rtol=0.0, atol=3e-7)
    assert tanh(x).abs().max() <= 1.0
    odd = torch.tensor([torch.inf, -torch.inf, torch.nan])
    assert_close(tanh(odd), torch.tanh(odd), equal_nan=True)
    assert gradcheck(tanh, (x[::9_999].double().requires_grad_(),))
