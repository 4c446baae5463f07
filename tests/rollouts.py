"""Rollouts in which every head, every mask and every way to end occurs."""

from dataclasses import dataclass, field, fields

import torch
from torch import Generator, Tensor

from esper.contracts.actions import HEAD, HEADS, ActionSpec, Op
from esper.contracts.blueprints import BLUEPRINTS
from esper.contracts.slots import SlotConfig, SlotStates
from esper.contracts.stages import Stage
from esper.contracts.world import BlueprintOffers, HostStates, Observation, StepResult
from esper.simic.agent.distribution import Evaluation, evaluate_choices
from esper.simic.agent.rollout_buffer import SequenceBatch, TamiyoRolloutBuffer
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import compute_features
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from tests.worlds import PlainWorld

SPEC = ActionSpec(slots=SlotConfig(max_slots=3), blueprints=BLUEPRINTS[:7])
TINY = PolicyConfig(width=16, slot_width=8, offer_width=4)


def random_observation(
    envs: int,
    spec: ActionSpec,
    generator: Generator,
    *,
    density: float = 0.7,
    episode_start: Tensor | None = None,
) -> Observation:
    """Hosts in any state; `density` is how much of what masks ask for is true."""
    slots, kinds = spec.slots.max_slots, len(spec.blueprints)

    def shares(record: type, *axes: int) -> dict[str, Tensor]:
        return {
            each.name: torch.rand(envs, *axes, generator=generator)
            for each in fields(record)
        }

    def whole(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (envs, slots), generator=generator)

    def flag(chance: float, *axes: int) -> Tensor:
        return torch.rand(envs, *axes, generator=generator) < chance

    host, state = shares(HostStates), shares(SlotStates, slots)
    offers = shares(BlueprintOffers, slots, kinds)
    host["budget_left"][flag(0.5)] = torch.inf
    host["end_known"] = flag(0.5)
    for signed in (host["score_slope"], host["loss_slope"], state["contribution"]):
        signed -= 0.5
    state |= {
        "stage": whole(0, len(Stage)),
        "age": torch.where(flag(density, slots), whole(1, 9), 0),
        "alpha_settled": flag(density, slots),
        "blueprint": whole(0, kinds),
        "style": whole(0, 2),
        "contribution_measured": flag(0.5, slots),
    }
    offers |= {
        "fits": flag(density, slots, kinds),
        "parameters": offers["parameters"] * 0.5,
        "promise": offers["promise"] - 0.5,
        "promise_known": flag(0.5, slots, kinds),
    }
    return Observation(
        episode_start=torch.zeros(envs, dtype=torch.bool)
        if episode_start is None
        else episode_start,
        host=HostStates(**host),
        slots=SlotStates(**state),
        offers=BlueprintOffers(**offers),
    )


@dataclass
class HashWorld(PlainWorld):
    """Anything may happen at any step; what was shown and said is kept."""

    num_envs: int
    spec: ActionSpec = SPEC
    density: float = 0.7
    ends: float = 0.2
    reward_scale: float = 1.0
    rng_seed: int = 0
    shown: list[Observation] = field(default_factory=list)
    finals: list[Observation] = field(default_factory=list)
    said: list[Tensor] = field(default_factory=list)
    results: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._generator = Generator().manual_seed(self.rng_seed)

    def reset(self) -> Observation:
        return self._show(torch.ones(self.num_envs, dtype=torch.bool))

    def step(self, actions: Tensor) -> StepResult:
        require_legal(self.shown[-1], self.spec, actions)
        self.said.append(actions)
        terminated, truncated = random_ends(self.num_envs, self.ends, self._generator)
        noise = torch.randn(self.num_envs, generator=self._generator)
        final = random_observation(self.num_envs, self.spec, self._generator)
        self.finals.append(final)
        result = StepResult(
            observation=self._show(terminated | truncated),
            reward=self.reward_scale * (actions[:, 0] + noise),
            terminated=terminated,
            truncated=truncated,
            final=final if bool(truncated.any()) else None,
        )
        self.results.append(result)
        return result

    def _show(self, first: Tensor) -> Observation:
        seen = random_observation(
            self.num_envs,
            self.spec,
            self._generator,
            density=self.density,
            episode_start=first,
        )
        self.shown.append(seen)
        return seen


def random_ends(
    envs: int, chance: float, generator: Generator
) -> tuple[Tensor, Tensor]:
    """Who terminated and who was truncated; never both."""
    ended = torch.rand(envs, generator=generator) < chance
    coin = torch.rand(envs, generator=generator) < 0.5
    return ended & coin, ended & ~coin


def require_legal(observation: Observation, spec: ActionSpec, actions: Tensor) -> None:
    """Look at one environment and one head at a time."""
    masks = compute_masks(observation, spec)
    for env, chosen in enumerate(actions.tolist()):
        op, slot, blueprint = chosen[:3]
        assert masks.op[env, op]
        for index, (head, choice) in enumerate(zip(HEADS, chosen, strict=True)):
            if Op(op) not in head.used_by:
                assert choice == 0, f"{head.name} is not used by {Op(op).name}"
            elif index == HEAD["slot"]:
                assert masks.slot[env, op, slot]
            elif index == HEAD["blueprint"]:
                assert masks.blueprint[env, slot, blueprint]
            elif index > HEAD["blueprint"]:
                assert spec.allowed[index, choice]


def make_policy(
    spec: ActionSpec = SPEC,
    config: PolicyConfig = TINY,
    *,
    strength: float = 1.0,
    rng_seed: int = 0,
) -> TamiyoPolicy:
    """A policy whose heads and value differ strongly between situations."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(rng_seed)
        policy = TamiyoPolicy(spec, config)
        policy.op_out.weight.normal_(std=0.05 * strength)  # every op must happen
        for last in (policy.slot_score, policy.offer_score):
            last.weight.normal_(std=0.25 * strength)
        policy.rest_out.weight.normal_(std=0.25 * strength)
        policy.value_out.weight.normal_(std=strength)
        policy.value_out.bias.normal_(std=strength)
    return policy


def make_buffer(policy: TamiyoPolicy, envs: int, steps: int, **settings: float):
    """An empty buffer for that policy."""
    return TamiyoRolloutBuffer(
        envs, steps, policy.spec, state_shape=policy.state_shape, **settings
    )


@torch.inference_mode()
def fill_ragged(
    policy: TamiyoPolicy,
    buffer: TamiyoRolloutBuffer,
    *,
    acted: float = 1.0,
    ends: float = 0.2,
    density: float = 0.7,
    standing: tuple[Tensor, Tensor] | None = None,
    policy_version: int = 0,
    rng_seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Fill rows of different lengths; return where memory stands afterwards.

    Args:
        acted: Chance that an environment acts at a step.
        ends: Chance that an episode ends at a step.
        density: How much is legal.
        standing: What the call before returned; None starts anew.
    """
    envs, generator = buffer.num_envs, Generator().manual_seed(rng_seed)
    if standing is None:
        standing = torch.ones(envs, dtype=torch.bool), policy.initial_state(envs)
    first, state = standing
    buffer.begin(state, policy_version)
    for _ in range(buffer.max_steps):
        observation = random_observation(
            envs, policy.spec, generator, density=density, episode_start=first
        )
        features = compute_features(observation, policy.spec)
        masks = compute_masks(observation, policy.spec)
        decision = policy.act(features, masks, first, state, generator)
        who = torch.rand(envs, generator=generator) < acted
        terminated, truncated = random_ends(envs, ends, generator)
        buffer.add(
            features=features,
            episode_start=first,
            masks=decision.masks,
            actions=decision.actions,
            log_probs=decision.log_probs,
            distribution=decision.distribution,
            values=decision.values,
            rewards=torch.randn(envs, generator=generator),
            terminated=terminated,
            truncated=truncated,
            final_values=torch.randn(envs, generator=generator),
            acted=who if acted < 1.0 else None,
        )
        first = torch.where(who, terminated | truncated, first)
        state = torch.where(who[:, None, None], decision.state, state)
    buffer.finish(torch.randn(envs, generator=generator))
    return first, state


def take(buffer: TamiyoRolloutBuffer) -> SequenceBatch:
    """What an update would see of a filled buffer."""
    buffer.compute_advantages_and_returns()
    return buffer.get_batched_sequences("cpu")


def evaluate(policy, features, rows, actions, first, state) -> Evaluation:
    """The current policy's view of choices made before."""
    logits, values = policy.evaluate_actions(features, actions, first, state)
    return evaluate_choices(logits, values, rows, actions)


def evaluate_batch(policy: TamiyoPolicy, batch: SequenceBatch) -> Evaluation:
    """The same of a whole batch."""
    return evaluate(
        policy,
        batch.features,
        batch.masks,
        batch.actions,
        batch.episode_start,
        batch.state,
    )


class GreedyPolicy:
    """A controller that takes the likeliest choice of every head of a policy."""

    def __init__(self, policy: TamiyoPolicy) -> None:
        self.policy = policy

    def decide(self, observation, masks, state, generator):
        return self.policy.decide(observation, masks, state, None)
