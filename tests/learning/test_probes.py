"""A ladder of tiny worlds: the lowest rung that fails names the broken part."""

from dataclasses import replace

import pytest
import torch
from torch import Generator

from esper.contracts.actions import HEAD, Op
from esper.runs.train_config import Budget, Learner, TrainConfig
from esper.simic.agent.ppo import PPOConfig
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.rollout import play
from esper.training.controller_ppo import controller_loop
from esper.training.loop import OnRoundEnd
from tests.rollouts import GreedyPolicy
from tests.worlds import ProbeWorld

pytestmark = pytest.mark.learns

SMALL = PolicyConfig(width=32, slot_width=16, offer_width=8)


def learn(world, *, rounds=15, steps=8, on_round=None, ppo=None, **config):
    """Few but large rounds: small ones cost as much and teach less."""
    settings = {"learning_rate": 1e-2, "minibatches": 1} | (ppo or {})
    learner = Learner(ppo=PPOConfig(**settings), **({"policy": SMALL} | config))
    config = TrainConfig(budget=Budget(rounds=rounds), learner=learner)
    callbacks = [OnRoundEnd(on_round)] if on_round else []
    trainer = controller_loop(world, config, steps, callbacks)
    trainer.run()
    assert not trainer.diverged
    return trainer.algorithm.policy


def values(world, policy):
    observation = world.reset()
    with torch.inference_mode():
        return policy.value(
            compute_features(observation, world.spec),
            observation.episode_start,
            policy.initial_state(world.num_envs),
        )


def mean_return(world, policy):
    return float(play(world, GreedyPolicy(policy), Generator().manual_seed(5)).mean())


def plants(actions):
    return actions[:, HEAD["op"]] == Op.GERMINATE


def test_the_value_of_a_constant_reward_is_that_reward():
    world = ProbeWorld(16, pay=lambda time, bit, actions: torch.ones(16))
    assert (values(world, learn(world)) - 1).abs().max() < 0.05


def test_the_value_depends_on_what_is_seen():
    world = ProbeWorld(32, pay=lambda time, bit, actions: 2.0 * bit - 1.0)
    predicted = values(world, learn(world))
    assert (predicted - (2.0 * world.bit - 1.0)).abs().max() < 0.1


def test_the_value_of_a_later_reward_is_discounted():
    world = ProbeWorld(
        64, pay=lambda time, bit, actions: (time == 1).float() * bit, length=2
    )
    predicted = values(world, learn(world, gamma=0.5, rounds=25))
    assert (predicted - 0.5 * world.bit).abs().max() < 0.08


def test_a_choice_is_learnt():
    world = ProbeWorld(32, pay=lambda time, bit, actions: plants(actions))
    assert mean_return(world, learn(world)) == 1.0


def test_a_choice_that_depends_on_what_is_seen_is_learnt():
    world = ProbeWorld(64, pay=lambda time, bit, actions: plants(actions) == bit.bool())
    assert mean_return(world, learn(world)) == 1.0


def recall_world():
    """The bit is shown at the first of three steps and asked for at the last."""
    return ProbeWorld(
        128,
        show=lambda time, bit: torch.where(time == 0, bit.float(), 0.5),
        pay=lambda time, bit, actions: (time == 2) & (plants(actions) == bit.bool()),
        length=3,
    )


def test_a_choice_that_needs_memory_is_learnt():
    world = recall_world()
    gently = {"learning_rate": 3e-3, "minibatches": 4}  # faster, one in five gets stuck
    trained = learn(world, rounds=30, steps=9, ppo=gently)
    assert mean_return(world, trained) > 0.98


def test_a_choice_that_needs_memory_is_not_learnt_without():
    policy = PolicyConfig(width=32, slot_width=16, offer_width=8, memory="none")
    world = recall_world()
    assert mean_return(world, learn(world, rounds=25, steps=9, policy=policy)) < 0.75


def test_the_best_legal_arm_is_learnt_where_the_best_arm_is_illegal():
    worth = torch.tensor([0.0, 0.5, 1.0])
    world = ProbeWorld(
        64,
        pay=lambda time, bit, actions: (
            plants(actions) * worth[actions[:, HEAD["blueprint"]]]
        ),
        fits=torch.tensor([True, True, False]),
    )
    assert mean_return(world, learn(world)) == 0.5


class RareWorld(ProbeWorld):
    """Planting is possible at one step in a hundred."""

    def _renew(self, where):
        super()._renew(where)
        self.rare = torch.rand(self.num_envs, generator=self._generator) < 0.01

    def _observe(self):
        seen = super()._observe()
        fits = seen.offers.fits & self.rare[:, None, None]
        return replace(seen, offers=replace(seen.offers, fits=fits))


def test_t12_a_head_that_matters_on_one_step_in_a_hundred_stays_open_and_is_learnt():
    """Only planting in the second style is paid; how fast it blends does not matter.

    Its reward is noise to the tempo: what keeps that head open is its entropy weight,
    which must count no less for being asked for so seldom.
    """
    noise = Generator().manual_seed(9)

    def right(actions):
        return plants(actions) & (actions[:, HEAD["style"]] == 1)

    world = RareWorld(
        512,
        pay=lambda time, bit, actions: (
            right(actions) + 0.5 * torch.randn(512, generator=noise)
        ),
    )
    heads = []
    trained = learn(
        world,
        rounds=20,
        ppo={"learning_rate": 3e-3, "head_entropy": {"tempo": 0.3}},
        on_round=lambda record: heads.append(record.update.heads),
    )
    assert max(head["style"].openness for head in heads) < 0.02
    assert min(head["style"].entropy for head in heads[:3]) > 0.5
    assert min(head["tempo"].entropy for head in heads) > 0.5  # 0.18 without the weight
    world.reset()
    world.rare[:] = True
    observation = world._observe()
    masks = compute_masks(observation, world.spec)
    actions, _ = GreedyPolicy(trained).decide(observation, masks, None, Generator())
    assert right(actions).all()


@pytest.mark.parametrize("limit", [4, 16])
def test_t27_the_value_of_an_endless_reward_does_not_depend_on_the_time_limit(limit):
    """Truncation bootstraps: V = 1 / (1 - gamma) whatever the limit."""
    world = ProbeWorld(
        16,
        pay=lambda time, bit, actions: torch.ones(16),
        show=lambda time, bit: torch.zeros(16),
        limit=limit,
    )
    trained = learn(world, gamma=0.8, rounds=20, steps=16)
    assert (values(world, trained) - 5.0).abs().max() < 0.35
