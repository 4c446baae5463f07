r"""Weights to start from: the simulated world, and imitation of timetables.

The simulated world is a formula, a thousand times as fast as real networks: a policy
learns there in half a minute that seeds must be blended to count and that rent is
charged. Imitation goes on from there. Environments of a group (same host, data, batches
and terms) follow different random timetables:

    w_i  = n softmax(R_i / temperature)        over the n environments of a group
    loss = - mean of w_i log pi(actions of i | observations of i)

It is advantage-weighted regression (Peng et al. 2019, https://arxiv.org/abs/1910.00177)
with the group as its baseline; PPO goes on from there. Without it, a random policy
plants badly before it has learnt to plant well, so that waiting looks best and stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Generator, Tensor, nn

from esper.contracts.state import load
from esper.contracts.world import VectorWorld
from esper.experiment.config import IMITATION, SIMULATED, TrainConfig, preset
from esper.experiment.streams import stream, stream_seed
from esper.experiment.trainer import Trainer
from esper.simic.agent.distribution import evaluate_choices
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import Features, compute_features
from esper.tamiyo.policy.heads import legal_rows
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tamiyo.schedule import Schedule, Scheduled, draw_schedules

DRAWN_BEFORE: Final = 1_000_000
"""Number of the first family that timetables are tried on."""
ROUNDS: Final = 70
"""Rounds of 256 simulated environments: about half a minute."""
LEARNING_RATE: Final = 2e-3
TEMPERATURE: Final = 0.01
"""Difference of returns that makes a timetable e times as well worth following."""
PASSES: Final = 6
"""Over everything that was tried."""
TRIALS: Final = 24
"""Episodes of every environment that are tried."""
POOL: Final = 400
"""Timetables to choose from."""

Report = Callable[[str, int, int, str], None]
"""Called with a name, how much is done, of how much, and a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One episode of every environment under timetables."""

    features: Features
    rows: Bool[Tensor, "env time head choice"]
    actions: Int64[Tensor, "env time head"]
    first: Bool[Tensor, "env time"]
    valid: Bool[Tensor, "env time"]
    """Steps of the first episode."""
    returns: Float[Tensor, " env"]


def warm_policy(
    config: TrainConfig,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor] | None:
    """Weights of a policy that was trained in the simulated world.

    Args:
        config: Of the run that starts from it: its policy and its random seed.
        report: Called after every round.
        stop: Whether to give up; there is no policy then.
    """
    from esper.experiment.worlds import steps_of, worlds_of

    own = preset(SIMULATED)
    simulated = replace(
        own,
        rng_seed=config.rng_seed,
        budget=replace(own.budget, rounds=ROUNDS),
        learner=replace(own.learner, policy=config.learner.policy),
    )
    (world,) = worlds_of(simulated)
    trainer = Trainer(world, simulated, steps_of(simulated))
    while not trainer.over:
        if stop():
            return None
        record = trainer.play_round()
        text = f"return {record.mean_return:+.3f}"
        report("simulated world", record.round, ROUNDS, text)
    return dict(trainer.policy.state_dict())


def imitated_policy(
    config: TrainConfig,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor] | None:
    """Weights of a policy that has learnt from timetables, and before in a formula.

    Args:
        config: Of the run that starts from it.
        report: Called after every trial.
        stop: Whether to give up; there is no policy then.
    """
    from esper.environment.mixture import Mixture
    from esper.experiment.worlds import steps_of, worlds_of

    weights = warm_policy(config, report, stop)
    grouped = replace(config, world=replace(config.world, group_size=config.envs))
    steps, trials = steps_of(config), []
    for drawing in range(TRIALS):
        if weights is None or stop():
            return None
        # The policy's own worlds come later, and are others.
        world = Mixture(worlds_of(grouped, DRAWN_BEFORE + drawing))
        plans = _plans(world, config.envs, config.rng_seed)
        causal = config.learner.policy.causal
        trials.append(tried(world, plans, steps, causal))
        text = f"mean return {float(trials[-1].returns.mean()):.3f}"
        report("timetables", drawing + 1, TRIALS, text)
    with torch.random.fork_rng(devices=[]):  # first weights are drawn, and lost
        policy = TamiyoPolicy(world.spec, config.learner.policy)
    own = {"value_mean": policy.value_mean, "value_scale": policy.value_scale}
    load(policy, {**(weights or {}), **own})
    imitate(policy, trials, config.envs, config.rng_seed)
    return dict(policy.state_dict())


def imitation_steps(config: TrainConfig) -> int:
    """Decisions on real hosts that a run's start takes, over all environments."""
    from esper.experiment.worlds import steps_of, tasks_of

    if config.start_from != IMITATION:
        return 0
    return TRIALS * steps_of(config) * config.envs * len(tasks_of(config))


def _plans(world: VectorWorld, twins: int, rng_seed: int) -> list[Schedule]:
    """For every group one that never plants, and others at random."""
    chance = np.random.default_rng(stream_seed(rng_seed, "schedules"))
    never, *pool = draw_schedules(POOL, [world.spec], chance)
    plans: list[Schedule] = []
    for _ in range(world.num_envs // twins):
        others = chance.choice(len(pool), twins - 1, replace=False)
        plans += [never, *(pool[each] for each in others)]
    return plans


@torch.no_grad()
def tried(
    world: VectorWorld, schedules: Sequence[Schedule], steps: int, causal: bool
) -> Trial:
    """Let every environment follow a timetable of its own for one episode.

    Args:
        world: Where; it is reset.
        schedules: One for each environment.
        steps: Decisions; episodes that are not over by then count as far as they went.
        causal: As in `legal_rows`.
    """
    controller, spec = Scheduled(world.spec, schedules), world.spec
    observation, state = world.reset(), None
    running = torch.ones_like(observation.first)
    returns = torch.zeros(world.num_envs, device=running.device)
    unused = Generator()
    told: list[tuple[Tensor, ...]] = []
    for _ in range(steps):
        features = compute_features(observation, spec)
        masks = compute_masks(observation, spec)
        actions, state = controller.decide(observation, masks, state, unused)
        rows = legal_rows(masks, actions, causal=causal)
        seen = (features.host, features.slots, features.offers)
        told.append((*seen, rows, actions, observation.first, running))
        result = world.step(actions)
        returns = returns + torch.where(running, result.reward, 0.0)
        running = running & ~(result.terminated | result.truncated)
        observation = result.observation
    columns = [torch.stack(parts, dim=1) for parts in zip(*told, strict=True)]
    host, slots, offers, rows, actions, first, valid = columns
    return Trial(
        features=Features(host, slots, offers),
        rows=rows,
        actions=actions,
        first=first,
        valid=valid,
        returns=returns,
    )


def preferred(
    returns: Float[Tensor, " env"], twins: int, temperature: float = TEMPERATURE
) -> Float[Tensor, " env"]:
    """How much each environment is to be followed; 1 on average over its twins."""
    groups = returns.unflatten(0, (-1, twins)) / temperature
    weights: Tensor = twins * groups.softmax(dim=1)
    return weights.flatten()


def imitate(
    policy: TamiyoPolicy,
    trials: Sequence[Trial],
    twins: int,
    rng_seed: int,
) -> None:
    """Teach a policy what the better of its twins said.

    Args:
        policy: Changed in place.
        trials: What was tried.
        twins: Environments in a row that had the same chances.
        rng_seed: Decides in which order trials are read.
    """
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=1e-5)
    orders = stream(rng_seed, "imitation")
    done, whole = 0, PASSES * len(trials)
    for _ in range(PASSES):
        for index in torch.randperm(len(trials), generator=orders).tolist():
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * (1.0 - done / whole)
            loss = regression(policy, trials[index], twins)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            done += 1


def regression(policy: TamiyoPolicy, trial: Trial, twins: int) -> Float[Tensor, ""]:
    """Weighted negative log-likelihood of what was said, per step."""
    state = policy.initial_state(len(trial.returns))
    logits, values = policy.scores(trial.features, trial.actions, trial.first, state)
    new = evaluate_choices(logits, values, trial.rows, trial.actions)
    said = new.log_probs.sum(dim=-1)
    weight = preferred(trial.returns, twins).unsqueeze(1)
    heard = torch.where(trial.valid, weight * said, 0.0)
    return -heard.sum() / trial.valid.sum()
