r"""Weights to start from: the simulated world, or recordings of real networks.

The simulated world is a formula, a thousand times faster than real networks.

Recordings (see `record`) are better. The scripts of one host form a tree, and all its
branches share random numbers. So the objective of every recorded choice is known. For a
policy pi restricted to the recorded choices,

    V(leaf)         = objective of the episode
    Q(node, choice) = V(next node),    V(node) = sum over choices of pi Q

    loss = mean over nodes of  sum over choices of pi (tau log pi - Q)
         - MASS_COEF * log(total probability of the recorded choices)
         + VALUE_COEF * (value - (V(node) - Phi))^2

V and Q are those of the present policy. The best leaf would be too optimistic, because
a policy cannot foresee random numbers. The minimum of the first term is
pi ~ exp(E[Q] / tau), with the expectation over hosts with equal observations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from esper.contracts.actions import ActionSpec
from esper.contracts.errors import InvalidInputError
from esper.environment.clock import stop_weights
from esper.environment.settings import WorldSettings
from esper.files import storage
from esper.runs.streams import stream_seed
from esper.runs.train_config import SIMULATED, TrainConfig, preset
from esper.simic.agent.distribution import evaluate_choices
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import Features, compute_features
from esper.tamiyo.policy.heads import legal_rows
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.training.controller_ppo import controller_loop
from esper.training.recordings import (
    MAX_GROWTH,
    Recording,
    RecordJob,
    read_recordings,
    record_missing,
    recorded_settings,
)
from esper.workers.jobs import Workers

FIRST_RECORDED_DRAWING: Final = 1_000_000
"""Families from this number on are recorded; training uses those before it."""
SIMULATED_ROUNDS: Final = 70
"""Rounds of 256 simulated environments; they take about half a minute."""
SCRIPTS_PER_HOST: Final = 20
PASSES: Final = 16
"""Passes over all recordings."""
LEARNING_RATE: Final = 2e-3
WEIGHT_DECAY: Final = 1e-3
TEMPERATURES: Final = (0.1, 0.01)
"""First and last tau."""
MIN_GAIN: Final = -1.0
"""Smaller gains over the host that never grows are clipped, in units of its error."""
MASS_COEF: Final = 0.02
VALUE_COEF: Final = 0.1

Report = Callable[[str, int, int, str], None]
"""Called with a name, the number of finished parts, of all parts, and a text."""


def warm_policy(
    config: TrainConfig, report: Report, stop: Callable[[], bool] = lambda: False
) -> dict[str, Tensor] | None:
    """Weights of a policy that was trained in the simulated world; None if stopped."""
    from esper.training.worlds import mixture_for, steps_of

    own = preset(SIMULATED)
    simulated = replace(
        own,
        rng_seed=config.rng_seed,
        budget=replace(own.budget, rounds=SIMULATED_ROUNDS),
        learner=replace(own.learner, policy=config.learner.policy),
    )
    loop = controller_loop(mixture_for(simulated), simulated, steps_of(simulated))
    while not loop.over:
        if stop():
            return None
        record = loop.play_round()
        text = f"return {record.mean_return:+.3f}"
        report("simulated world", record.round, SIMULATED_ROUNDS, text)
    return dict(loop.algorithm.policy.state_dict())


def recorded_policy(
    config: TrainConfig,
    spec: ActionSpec,
    recordings: Sequence[Recording],
    report: Report,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor] | None:
    """Weights of a policy that was fitted to recordings; None if stopped."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.rng_seed, "first weights"))
        policy = TamiyoPolicy(spec, config.learner.policy)
    fit(policy, recordings, config.world, config.rng_seed, report, stop)
    return None if stop() else dict(policy.state_dict())


def require_recorded_terms(world: WorldSettings) -> None:
    """Refuse budgets that are larger than that of the recordings."""
    most = world.range_of("budget")[1]
    if most > MAX_GROWTH:
        raise InvalidInputError(
            f"world.budget is up to {most:g}, but recordings only cover "
            f"{MAX_GROWTH:g} times the host's size. Lower it."
        )


def given_recordings(config: TrainConfig, spec: ActionSpec) -> list[Recording]:
    """The recordings in the folder `start_from`; refuses those of another world."""
    world = config.world
    if not world.at_once:
        raise InvalidInputError("recordings require world.at_once. Set it to true.")
    folder = Path(str(config.start_from))
    return read_recordings(folder, spec, world.stop, world.clock)


def own_recordings(
    config: TrainConfig,
    spec: ActionSpec,
    folder: Path,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
    workers: Workers | None = None,
) -> list[Recording] | None:
    """Recordings of a run's own tasks; None if stopped.

    Files that are in the folder already are kept. Drawn tasks differ from those that
    the run trains on.
    """
    from esper.training.worlds import task_count, task_of

    with storage(folder, "write"):
        folder.mkdir(exist_ok=True)
    world, count = recorded_settings(config.world), task_count(config)
    jobs = []
    for number in range(config.recordings):
        drawing = FIRST_RECORDED_DRAWING + number - number % count
        draw = partial(task_of, config, number % count, drawing=drawing)
        seed = stream_seed(config.rng_seed, f"recording, {number}")
        jobs.append(RecordJob(number, draw, world, 1, SCRIPTS_PER_HOST, seed))
    finished = record_missing(folder, jobs, spec, workers, stop)
    done = next(finished)
    for done in finished:
        text = f"{SCRIPTS_PER_HOST} scripts per host"
        report("recording", done, len(jobs), text)
    return read_recordings(folder, spec) if done == len(jobs) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The trees of scripts of some hosts, with sampled rents, budgets and ends."""

    features: Features
    rows: Bool[Tensor, "env time head choice"]
    actions: Int64[Tensor, "env time head"]
    episode_start: Bool[Tensor, "env time"]
    gain: Float[Tensor, "env moment"]
    """Phi before every decision and at the end, minus that of the never-grown host."""
    same: Bool[Tensor, "tree script other moment"]
    """Whether two scripts took the same actions up to each moment."""
    used: Bool[Tensor, "tree script"]
    """Whether the script stays within the budget."""


def draw_trees(
    recording: Recording,
    policy: TamiyoPolicy,
    world: WorldSettings,
    rng: np.random.Generator,
) -> Trees:
    """The trees of a recording, with rents and budgets from the ranges of a world."""
    scripts = recording.scripts
    trees = recording.envs // scripts
    rent, budget = (
        torch.tensor([world.term(name, quantile) for quantile in rng.random(trees)])
        .float()
        .repeat_interleave(scripts)
        for name in ("rent", "budget")
    )
    last = recording.clock.horizon
    if recording.clock.stop == "anytime":
        last = int(rng.integers(last // 2, last, endpoint=True))
    observation = recording.observed(rent, budget)
    features = compute_features(observation, policy.spec)
    masks = compute_masks(observation, policy.spec)
    actions = recording.tensor("actions")
    rows = legal_rows(masks, actions.flatten(0, 1), causal=policy.config.causal)
    shape = (recording.envs, recording.clock.horizon)

    def cut(tensor: Tensor) -> Tensor:
        whole: Tensor = tensor.unflatten(0, shape)
        return whole[:, :last]

    agree = actions[:, :last].unflatten(0, (trees, scripts))
    agree = (agree[:, :, None] == agree[:, None]).all(dim=-1)
    begin = torch.ones_like(agree[..., :1])
    same = torch.cat((begin, agree), dim=-1).cumprod(dim=-1).bool()
    within = (recording.tensor("added")[:, :last] <= budget[:, None]).all(dim=1)
    clock = recording.clock
    weights = torch.zeros(clock.horizon + 1)
    weights[: last + 1] = stop_weights(clock.times()[: last + 1], clock.stop)
    phi = recording.objective(rent, weights)[:, : last + 1]
    phi = phi.unflatten(0, (trees, scripts))
    gain = (phi - phi[:, :1]).clamp(min=MIN_GAIN)  # the first script never grows
    return Trees(
        features=Features(*map(cut, (features.host, features.slots, features.offers))),
        rows=cut(rows),
        actions=actions[:, :last],
        episode_start=cut(observation.episode_start),
        gain=gain.flatten(0, 1),
        same=same,
        used=within.unflatten(0, (trees, scripts)),
    )


def tree_loss(
    policy: TamiyoPolicy, trees: Trees, temperature: float
) -> Mapping[str, Tensor]:
    """The loss over all nodes of some trees, and the mean value of their roots."""
    count, scripts = trees.used.shape
    state = policy.initial_state(count * scripts)
    logits, values = policy.evaluate_actions(
        trees.features, trees.actions, trees.episode_start, state
    )
    chosen = evaluate_choices(logits, values, trees.rows, trees.actions).log_probs
    own = chosen.sum(dim=-1).unflatten(0, (count, scripts))  # [tree, script, time]
    used = trees.used[:, :, None]
    here = trees.same[..., :-1] & trees.used[:, None, :, None]  # other in the node
    # The first used script of a branch stands for the branch.
    earlier = torch.ones(scripts, scripts, dtype=torch.bool).tril(-1)
    taken = trees.same[..., 1:] & trees.used[:, None, :, None] & earlier[:, :, None]
    stands = used & ~taken.any(dim=2)  # [tree, script, time]
    counted = here & stands[:, None]  # [tree, script, other, time]
    # Nodes without a used script are left out: logsumexp of -inf alone gives NaN.
    reached = counted.any(dim=2, keepdim=True)
    others = torch.where(counted, own[:, None], -torch.inf)
    mass = torch.where(reached, others, 0.0).logsumexp(dim=2)  # [tree, script, time]
    log_pi = own - mass
    gain = trees.gain.unflatten(0, (count, scripts))
    with torch.no_grad():
        pi = torch.where(counted, (own[:, None] - mass[:, :, None]).exp(), 0.0)
        value, after, nodes = gain[:, :, -1], [], []
        for time in range(own.shape[2] - 1, -1, -1):
            after.append(value)
            value = (pi[..., time] @ value[..., None])[..., 0]
            nodes.append(value)
        q, v = (torch.stack(x[::-1], dim=2) for x in (after, nodes))
    branches = counted.sum(dim=2) > 1
    # Every node has the same weight, however many scripts share it.
    weight = (used & branches) / here.sum(dim=2).clamp(min=1)
    node_count = weight.sum().clamp(min=1)
    objective = log_pi.exp() * (temperature * log_pi - (q - v))
    improvement = torch.where(stands & branches, objective, 0.0).sum() / node_count
    spread = -(weight * torch.where(branches, mass, 0.0)).sum() / node_count
    errors = (values.unflatten(0, (count, scripts)) - (v - gain[:, :, :-1])) ** 2
    error = torch.where(used, errors, 0.0).sum() / (used.sum() * own.shape[2])
    return {
        "loss": improvement + MASS_COEF * spread + VALUE_COEF * error,
        "root": v[:, 0, 0].mean(),
    }


def fit(
    policy: TamiyoPolicy,
    recordings: Sequence[Recording],
    world: WorldSettings,
    rng_seed: int,
    report: Report = lambda name, done, total, text: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fit a policy, in place, to recordings in random order and with sampled terms."""
    rng = np.random.default_rng(stream_seed(rng_seed, "fitting"))
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=WEIGHT_DECAY)
    total, done = PASSES * len(recordings), 0
    high, low = TEMPERATURES
    for number in range(PASSES):
        roots = []
        for index in rng.permutation(len(recordings)).tolist():
            if stop():
                return
            fraction = done / total
            for group in optimizer.param_groups:
                warm_up = min(1.0, done / 20 + 0.05)
                group["lr"] = LEARNING_RATE * warm_up * (1 - fraction)
            trees = draw_trees(recordings[index], policy, world, rng)
            terms = tree_loss(policy, trees, high * (low / high) ** fraction)
            optimizer.zero_grad(set_to_none=True)
            terms["loss"].backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            done += 1
            roots.append(float(terms["root"]))
        text = f"{np.mean(roots):+.3f} of the errors removed"
        report("fitting", number + 1, PASSES, text)
