"""Actions of choices and numbers together."""

from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Normal
from torch.testing import assert_close

from esper import PPO, PPOConfig
from esper.contracts.errors import IllegalActionError, InvalidInputError
from esper.rl.doctor import examine
from esper.rl.spaces import SpaceSpec, parts_of
from esper.simic.agent.distribution import evaluate_choices, family_of, sample
from esper.simic.agent.losses import Targets, loss_weights, ppo_terms
from tests.rl.environments import Probe
from tests.simic.test_distribution import random_rows

ONCE = {"epochs": 1, "minibatches": 1}
SMALL = {"width": 8, "rollout_steps": 12, "num_envs": 4}
ANGLE = spaces.Box(np.float32(0.0), np.float32(90.0), (1,))
TOOLS = spaces.Dict(
    tool=spaces.Discrete(3), angle=ANGLE, speed=spaces.Discrete(2), push=ANGLE
)
USED = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]
"""Heads of TOOLS that each tool uses."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.01, 0.0, 0.01, 0.0]),
        ({"entropy_coef": 0.1}, [0.1, 0.1, 0.1, 0.1]),
        ({"head_entropy": {"angle.0": 0.2}}, [0.01, 0.2, 0.01, 0.0]),
    ],
)
def test_numbers_have_no_entropy_bonus_unless_asked_for(options, expected):
    agent = PPO(lambda: Workshop(TOOLS), **SMALL, **options, exploration_coef=0.5)
    entropy, exploration = (-agent.agent._weights[-8:]).chunk(2)
    assert entropy.tolist() == pytest.approx(expected)
    assert exploration.tolist() == [0.5, 0.0, 0.5, 0.0]


class Workshop(gymnasium.Env):
    """Random observations; half of the choices are legal; checks every action."""

    observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, space, relevant=None, masked=True):
        self.action_space, self.relevant, self.masked = space, relevant, masked

    def _show(self):
        rows = []
        for part in parts_of(self.action_space):
            for size in part.sizes:
                rows.append(self.np_random.random(size) < 0.5)
                rows[-1][self.np_random.integers(size)] = True
        self.legal = np.concatenate(rows) if rows else None
        seen = self.np_random.standard_normal(3).astype(np.float32)
        is_masked = self.masked and rows
        return seen, {"action_mask": self.legal.copy()} if is_masked else {}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._show()

    def step(self, action):
        assert self.action_space.contains(action), action
        at, head = 0, 0
        for part in parts_of(self.action_space):
            for index, number in enumerate(np.reshape(part.of(action), -1)):
                used = self.relevant is None or self.relevant[action["tool"]][head]
                assert part.sizes or used or number == 45.0, "not forced"
                if part.sizes:
                    row = self.legal[at : (at := at + part.sizes[index])]
                    assert row[int(number)] or not self.masked, "illegal"
                    assert used or number == row.argmax(), "not forced"
                head += 1
        ends = map(bool, self.np_random.random(2) < 0.15)
        seen, info = self._show()
        return seen, float(self.np_random.random()), *ends, info


def random_space(chance):
    """Two to five parts of all kinds in any order, nested or not."""
    kinds = (
        lambda: spaces.Discrete(int(chance.integers(1, 5))),
        lambda: spaces.MultiDiscrete([3] * int(chance.integers(1, 3))),
        lambda: spaces.MultiBinary(2),
        lambda: spaces.Box(-2.0, 5.0, (int(chance.integers(1, 4)),), np.float32),
        lambda: spaces.Box(-np.inf, np.inf, (1, 1), np.float32),
    )
    parts = [
        kinds[i]() for i in chance.integers(len(kinds), size=chance.integers(2, 6))
    ]
    names = [f"{name}{i}" for i, name in enumerate(chance.permutation([*"abcdef"]))]
    pairs = [*zip(names, parts, strict=False)]
    if chance.random() < 0.5:
        return spaces.Dict(pairs)
    return spaces.Tuple([parts[0], spaces.Dict(pairs[1:])])


def strong(agent):
    """Choices and numbers that depend strongly on what is seen and chosen."""
    with torch.no_grad():
        agent.policy.head_out.weight.mul_(100)
        agent.policy.log_deviation.normal_(0.0, 0.5)
    return agent


def batch_of(agent):
    agent.collect()
    agent.agent.buffer.compute_advantages_and_returns()
    return agent.agent.buffer.get_batched_sequences()


def evaluated(agent, batch):
    logits, values = agent.policy.evaluate_actions(
        batch.features, batch.actions, batch.episode_start, batch.state
    )
    logits.retain_grad()
    return evaluate_choices(
        logits, values, batch.masks, batch.actions, agent.policy.family
    )


@pytest.mark.parametrize("case", range(24))
def test_the_update_sees_the_policy_that_acted(case):
    """Random spaces, masks, memories and orders; ratios are one, KL is zero."""
    chance = np.random.default_rng(case)
    space = random_space(chance)
    options = {
        "memory": ("none", "mingru", "gru", "lstm")[case % 4],
        "autoregressive": bool(case & 4),
        "separate_value": bool(case % 3),
    }
    masked = bool(case % 5)
    agent = PPO(lambda: Workshop(space, masked=masked), **ONCE, **options, **SMALL)
    strong(agent)
    for _ in range(2):
        batch = batch_of(agent)
        new = evaluated(agent, batch)
        kl = new.family.kl(batch.distribution, new.distribution, batch.masks)
        assert_close(new.log_probs, batch.log_probs, rtol=1e-5, atol=1e-5)
        assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-5)
        assert agent.update().clip_fraction == 0
    assert agent.evaluate(3, deterministic=False).lengths.min() >= 1


@pytest.mark.parametrize("autoregressive", [False, True])
def test_a_number_that_the_tool_does_not_use_has_no_part(autoregressive):
    agent = PPO(
        lambda: Workshop(TOOLS, USED),
        head_relevance=USED,
        autoregressive=autoregressive,
        **ONCE,
        **SMALL,
    )
    batch = batch_of(strong(agent))
    used = torch.tensor(USED, dtype=torch.bool)[batch.actions[..., 0].long()]
    numbers = torch.tensor(agent.spec.numeric)
    with torch.no_grad():  # a large step, so that every term has a gradient
        agent.policy.head_out.weight.mul_(1.3)
        agent.policy.log_deviation.add_(0.2)
    new = evaluated(agent, batch)
    config, values = PPOConfig(clip_range=9.0), torch.randn(batch.values.shape)
    targets = Targets.of(replace(batch, returns=values, values=values))
    weights = loss_weights(config, torch.full((4,), 0.01), torch.zeros(4))
    terms = ppo_terms(new, targets, config, weights)
    terms.loss.backward()
    slopes = new.logits.grad.abs().amax(dim=-1)
    assert (slopes[~used] == 0).all()
    assert (slopes[used & numbers] > 0).all()
    assert not used.all(dim=-1).any()
    assert (batch.actions[~used & numbers] == 0).all()
    for stored in (batch.log_probs, new.log_probs):
        assert (stored[~used] == 0).all()
    kl = new.family.kl(batch.distribution, new.distribution, batch.masks)
    assert (kl[~used] == 0).all()
    assert_close(terms.kl, torch.where(used, kl, 0.0).mean(dim=(0, 1)))
    opened = used.float().mean(dim=(0, 1))[numbers]
    assert_close(terms.openness[numbers], opened)


def heads(case):
    """Rows of random heads, old and new, and which of them are numbers and open."""
    generator = torch.Generator().manual_seed(case)
    numeric = (torch.rand(6, generator=generator) < 0.5).tolist()
    numeric[case % 6], numeric[(case + 1) % 6] = True, False
    rows = random_rows(50, 6, 5, generator=generator)
    unused = torch.rand(50, 6, generator=generator) < 0.3
    rows[:, numeric] = torch.arange(5) < 2
    rows[unused] = torch.arange(5) == 0
    old, new = torch.randn(2, 50, 6, 5, generator=generator, dtype=torch.float64)
    return tuple(numeric), rows, old, new, generator


@pytest.mark.parametrize("case", range(6))
def test_log_probabilities_and_kl_are_those_of_sums_and_integrals(case):
    numeric, rows, old, new, generator = heads(case)
    family = family_of(numeric)
    was, now = (family.distribution(x, rows) for x in (old, new))
    actions = sample(was, rows, generator).double()
    actions[:, numeric] = torch.randn(
        50, sum(numeric), generator=generator, dtype=torch.float64
    )
    unused = rows.sum(-1) == 1
    actions[unused & torch.tensor(numeric)] = 0.0
    found = family.log_probs(now, actions), family.kl(was, now, rows)
    nats = family.entropy(now)
    grid = torch.linspace(-12.0, 12.0, 20_001, dtype=torch.float64)
    for row, head in np.ndindex(50, 6):
        expected, kl, own = 0.0, 0.0, None
        if numeric[head] and not unused[row, head]:
            one, two = (
                Normal(x[row, head, 0], x[row, head, 1].exp()) for x in (old, new)
            )
            places = one.mean + one.stddev * grid
            density, other = one.log_prob(places), two.log_prob(places)
            kl = (density.exp() * (density - other)).sum() * one.stddev * 24 / 20_000
            expected, own = two.log_prob(actions[row, head]), two.entropy()
        elif not numeric[head]:
            legal = rows[row, head]
            one, two = (Categorical(logits=x[row, head, legal]) for x in (old, new))
            kl = (one.probs * (one.logits - two.logits)).sum()
            place = legal[: int(actions[row, head])].sum()
            expected, own = two.log_prob(place), two.entropy()
        double = torch.float64
        for value, exact in zip(found, (expected, kl), strict=True):
            exact = torch.as_tensor(exact, dtype=double)
            assert_close(value[row, head], exact, rtol=1e-6, atol=1e-6)
        if own is not None:
            assert_close(nats[row, head], own)


@pytest.mark.parametrize("case", range(6))
def test_draws_are_legal_and_numbers_have_their_mean_and_deviation(case):
    numeric, rows, _, logits, generator = heads(case)
    family, draws = family_of(numeric), 4_000
    noise = -torch.rand(draws, 50, 6, 5, generator=generator).log().neg().log()
    noise[..., numeric, 0] = torch.randn(draws, 50, sum(numeric), generator=generator)
    many = [x.expand(draws, -1, -1, -1) for x in (logits, rows)]
    found = family.draw(*many, noise)
    choices = ~torch.tensor(numeric)
    taken = found[..., choices].long().unsqueeze(-1)
    assert rows.expand(draws, -1, -1, -1)[:, :, choices].gather(-1, taken).all()
    is_open = (rows.sum(-1) > 1)[:, numeric]
    drawn = found[..., numeric]
    assert (drawn[:, ~is_open] == 0).all()
    mean, deviation = logits[:, numeric, 0], logits[:, numeric, 1].exp()
    far = (drawn.mean(0) - mean)[is_open] / deviation[is_open]
    assert far.abs().max() < 5 / draws**0.5
    assert_close(drawn.std(0)[is_open], deviation[is_open], rtol=0.06, atol=0)
    assert_close(family.draw(logits, rows, None)[:, numeric][is_open], mean[is_open])


def test_a_mask_has_the_entries_of_choices_alone():
    spec = SpaceSpec(Workshop.observation_space, TOOLS)
    expected = np.zeros((4, 3), bool)
    expected[0, [0, 2]] = expected[[1, 3], :2] = expected[2, 1] = True
    padded = np.array([[True, False, True], [False, True, False]])
    for mask in (
        np.array([1, 0, 1, 0, 1]),
        {"tool": [1, 0, 1], "speed": np.array([0, 1])},
        (np.array([1, 0, 1]), np.array([0, 1])),
        padded,
    ):
        rows = spec.head_masks(spec.mask_row(mask)[None], 1)
        assert (rows[0].numpy() == expected).all()
    table = np.array([[[1, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1, 0]]])
    rows = spec.head_masks(table, 1)[0].numpy()
    assert rows[:, [1, 3], :2].all()
    assert (rows[:, 0] == [True, False, True]).all()
    assert (rows[:, 2, :2] == table[0, :, 3:]).all()
    with pytest.raises(InvalidInputError, match=r"must have 5 entries.*got \[9\]"):
        spec.head_masks(np.ones((1, 9)), 1)


def test_numbers_are_clipped_for_the_environment_alone():
    class Far(Workshop):
        def step(self, action):
            given.append(action["angle"])
            return super().step(action)

    given = []
    agent = PPO(lambda: Far(TOOLS), **ONCE, **SMALL)
    with torch.no_grad():
        agent.policy.log_deviation.fill_(1.0)
    batch = batch_of(agent)
    actions, rows = batch.actions[..., [1, 3]], batch.distribution[..., [1, 3], :]
    assert (actions.abs() > 1).float().mean() > 0.5
    assert_close(rows[..., 1], torch.ones_like(actions))
    exact = Normal(rows[..., 0], rows[..., 1].exp()).log_prob(actions)
    assert_close(batch.log_probs[..., [1, 3]], exact)
    assert {0.0, 90.0} < {float(number) for (number,) in given}


def test_numbers_without_a_bound_begin_where_draws_differ():
    largest = np.finfo(np.float32).max
    low, high = np.array([[5, -np.inf, -largest, 0], [np.inf, -7, largest, np.inf]])
    spec = SpaceSpec(TOOLS, spaces.Box(low.astype("f"), high.astype("f")))
    drawn = spec.to_env(torch.tensor([[-1.0] * 4, [0.5] * 4, [2.0] * 4]))
    assert drawn.tolist() == [[5, -8, -1, 0], [5.5, -7, 0.5, 0.5], [7, -7, 2, 2]]


def test_what_is_no_choice_is_refused_by_the_buffer():
    agent = PPO(lambda: Workshop(TOOLS, masked=False), **SMALL)
    seen = agent.world.reset()
    made = agent.policy.act(
        seen.features, None, seen.episode_start, agent.policy.initial_state(4), None
    )
    made.actions[2, 0] = 1.5
    ends = torch.zeros(4, dtype=torch.bool)
    with pytest.raises(IllegalActionError, match="'tool' of environment 2"):
        agent.agent.buffer.add(
            made,
            features=seen.features,
            episode_start=seen.episode_start,
            rewards=torch.zeros(4),
            terminated=ends,
            truncated=ends,
        )


def test_the_doctor_plays_mixed_actions_and_names_heads_without_effect():
    class Deaf(Workshop):
        def step(self, action):
            seen, _, *rest = super().step(action)
            return seen, float(action["angle"][0] + action["tool"]), *rest

    for masked in (True, False):
        found = examine(lambda masked=masked: Deaf(TOOLS, masked=masked), steps=300)
        words = " ".join(map(str, found))
        assert not any(finding.is_fault for finding in found), words
        assert "the action has numbers and choices" in words
    assert "any choice of 'speed'" in words
    with_table = examine(lambda: Workshop(TOOLS, USED), 300, head_relevance=USED)
    assert not any(finding.is_fault for finding in with_table)


class Tool(Probe):
    """The mask leaves one good tool, which is not seen; each has its own angle."""

    action_space = spaces.Dict(tool=spaces.Discrete(4), angle=ANGLE)
    TARGETS = (15.0, 45.0, 75.0)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.tool = int(self.np_random.integers(3))
        self.goal = 0
        return self.show(), self.info()

    def info(self):
        return {"action_mask": np.isin(np.arange(4), (getattr(self, "tool", 0), 3))}

    def reward(self, action):
        tool, angle = int(action["tool"]), float(action["angle"][0])
        return 0.0 if tool == 3 else 1.0 - abs(angle - self.TARGETS[tool]) / 30.0


@pytest.mark.learns
@pytest.mark.parametrize(
    "options",
    [
        {"autoregressive": True},
        {"head_relevance": [[1, 1], [1, 1], [1, 1], [1, 0]]},
        {},
    ],
)
def test_an_angle_that_depends_on_the_tool_needs_causal_heads(options):
    agent = PPO(Tool, num_envs=16, rollout_steps=64, seed=0, **options)
    agent.learn(40_000)
    found = agent.evaluate(96).mean
    if options:
        assert found > 0.85
    else:
        assert found < 0.5


@pytest.mark.learns  # without shape checks, which tracing cannot pass
@pytest.mark.filterwarnings("ignore")  # of the exporter's own
@pytest.mark.parametrize(
    "options", [{"head_relevance": USED}, {"autoregressive": True}]
)
def test_an_exported_agent_acts_the_same(options, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    relevant = options.get("head_relevance")
    agent = PPO(lambda: Workshop(TOOLS, relevant), memory="mingru", **options, **SMALL)
    strong(agent).learn(96)
    agent.export(tmp_path / "agent.onnx")
    session = runtime.InferenceSession(tmp_path / "agent.onnx")
    chance = np.random.default_rng(0)
    memories, state = None, np.zeros((3, *agent.policy.state_shape), np.float32)
    for time in range(4):
        seen = chance.standard_normal((3, 3)).astype(np.float32)
        mask = np.ones((3, 5), bool)
        mask[range(3), chance.integers(3, size=3)] = False
        action, memories = agent.predict(seen, memories, action_masks=mask)
        given = {"vector": seen, "state": state, "mask": mask}
        given["episode_start"] = np.full(3, time == 0)
        chosen, _, _, state = session.run(None, given)
        assert (chosen[:, 0] == action["tool"]).all()
        assert (chosen[:, 2] == action["speed"]).all()
        angle = np.clip(45 + 45 * chosen[:, 1:2], 0, 90)
        np.testing.assert_allclose(angle, action["angle"], atol=1e-3)
        np.testing.assert_allclose(state, memories, atol=1e-5)
