r"""Weights to start from: the simulated world, or recordings of real networks.

The simulated world is a formula, a thousand times as fast as real networks.

Recordings (see `record`) are better. Scripts of one host form a tree whose branches had
the same luck, so at every node the worth of all recorded choices is known. With a
policy pi restricted to them,

    V(leaf)         = what the episode was worth
    Q(node, choice) = V(node that it leads to),    V(node) = sum over choices of pi Q

    loss = mean over nodes of  sum over choices of pi (tau log pi - Q)
         - MASS * log(probability of all recorded choices together)
         + VALUE * (value - (V(node) - Phi))^2

V and Q are those of the present policy, not of the best leaf: a policy cannot see luck,
so the best of many leaves would promise too much. The first term is smallest where
pi ~ exp(E[Q] / tau), the expectation being over hosts that look alike. Rents, budgets
and ends are drawn anew for every host in every pass.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from esper.files import Disk, publish, storage
from esper.runs.streams import stream_seed
from esper.runs.train_config import SIMULATED, TrainConfig, preset
from esper.simic.agent.distribution import evaluate_choices
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.features import Features, compute_features
from esper.tamiyo.policy.heads import legal_rows
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tasks.task import Task
from esper.training.controller_ppo import controller_loop
from esper.training.recordings import (
    MOST,
    Recording,
    file_name,
    kept_recording,
    pack,
    read_recordings,
    record_task,
    recorded_settings,
)
from esper.workers.jobs import Workers

DRAWN_BEFORE: Final = 1_000_000
"""Number of the first family that is recorded."""
ROUNDS: Final = 70
"""Rounds of 256 simulated environments: about half a minute."""
SCRIPTS: Final = 20
"""Scripts that each recorded host lives under."""
PASSES: Final = 16
"""Over all recordings."""
LEARNING_RATE: Final = 2e-3
DECAY: Final = 1e-3
TEMPERATURES: Final = (0.1, 0.01)
"""Worth that makes a choice e times as likely: at first and at last."""
WORST: Final = -1.0
"""Worth, as a share of errors, below which all outcomes are equally bad."""
MASS: Final = 0.02
VALUE: Final = 0.1

Report = Callable[[str, int, int, str], None]
"""Called with a name, how much is done, of how much, and a text."""


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
    from esper.training.worlds import mixture_for, steps_of

    own = preset(SIMULATED)
    simulated = replace(
        own,
        rng_seed=config.rng_seed,
        budget=replace(own.budget, rounds=ROUNDS),
        learner=replace(own.learner, policy=config.learner.policy),
    )
    trainer = controller_loop(mixture_for(simulated), simulated, steps_of(simulated))
    while not trainer.over:
        if stop():
            return None
        record = trainer.play_round()
        text = f"return {record.mean_return:+.3f}"
        report("simulated world", record.round, ROUNDS, text)
    return dict(trainer.algorithm.policy.state_dict())


def recorded_policy(
    config: TrainConfig,
    spec: ActionSpec,
    recordings: Sequence[Recording],
    report: Report,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor] | None:
    """Weights of a policy that was fitted to recordings.

    Args:
        config: Of the run that starts from it.
        spec: The action space of its world.
        recordings: Given, or its own.
        report: Called after every pass over them.
        stop: Whether to give up; there is no policy then.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stream_seed(config.rng_seed, "first weights"))
        policy = TamiyoPolicy(spec, config.learner.policy)
    fit(policy, recordings, config.world, config.rng_seed, report, stop)
    return None if stop() else dict(policy.state_dict())


def require_recorded_terms(world: WorldSettings) -> None:
    """Refuse budgets beyond what hosts may grow to while they are recorded."""
    most = world.range_of("budget")[1]
    if most > MOST:
        raise InvalidInputError(
            f"world.budget is up to {most:g}, but recordings only cover {MOST:g} times "
            "the host's size. Lower it."
        )


def given_recordings(config: TrainConfig, spec: ActionSpec) -> list[Recording]:
    """Recordings of the folder that a run starts from; refuses what does not fit it."""
    world = config.world
    if not world.at_once:
        raise InvalidInputError("recordings require world.at_once; set it to true.")
    folder = Path(str(config.start_from))
    return read_recordings(folder, spec, world.stop, world.clock)


def _recorded_tasks(config: TrainConfig) -> list[Task]:
    """The run's own tasks; where they are drawn, others than it trains on."""
    from esper.training.worlds import tasks_of

    tasks: list[Task] = []
    while len(tasks) < config.recordings:
        tasks += tasks_of(config, drawing=DRAWN_BEFORE + len(tasks))
    return tasks[: config.recordings]


def own_recordings(
    config: TrainConfig,
    spec: ActionSpec,
    folder: Path,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
    workers: Workers | None = None,
) -> list[Recording] | None:
    """Recordings of a run's own tasks; those that a folder already holds are read.

    Args:
        config: Of the run.
        spec: The action space of its world.
        folder: Where they are kept; it is made.
        report: Called after every recording.
        stop: Whether to give up; what was recorded is kept, and nothing returned.
        workers: Who records; none: this process.
    """
    tasks = _recorded_tasks(config)
    files = [folder / file_name(number) for number in range(len(tasks))]
    with storage(folder, "write"):
        folder.mkdir(exist_ok=True)
    found = {
        number: recording
        for number, file in enumerate(files)
        if (recording := kept_recording(file, spec)) is not None
    }
    left = [number for number in range(len(tasks)) if number not in found]
    jobs = [
        (tasks[number], stream_seed(config.rng_seed, f"recording, {number}"))
        for number in left
    ]
    made = (workers or Workers()).run(
        _record_one,
        jobs,
        recorded_settings(config.world),
        about=lambda job: f"recording {job[0].name}",
        stop=stop,
    )
    for number, recording in zip(left, made, strict=False):  # fewer if it gave up
        publish(Disk(), files[number], pack(recording))
        found[number] = recording
        report("recording", len(found), len(tasks), f"{SCRIPTS} scripts per host")
    if len(found) < len(tasks):
        return None
    return [found[number] for number in range(len(tasks))]


def _record_one(settings: WorldSettings, job: tuple[Task, int]) -> Recording:
    task, rng_seed = job
    return record_task(task, settings, 1, SCRIPTS, rng_seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trees:
    """The recorded trees of some hosts under drawn terms."""

    features: Features
    rows: Bool[Tensor, "env time head choice"]
    actions: Int64[Tensor, "env time head"]
    episode_start: Bool[Tensor, "env time"]
    worth: Float[Tensor, "env moment"]
    """Phi before every decision and at the end, less that of the host never grown."""
    same: Bool[Tensor, "tree script other moment"]
    """Whether two scripts have done the same before each decision, and to the end."""
    used: Bool[Tensor, "tree script"]
    """Scripts that stay within the budget."""


def draw_trees(
    recording: Recording,
    policy: TamiyoPolicy,
    world: WorldSettings,
    chance: np.random.Generator,
) -> Trees:
    """The trees of a recording under rents, budgets and ends that are drawn.

    Args:
        recording: Of some hosts.
        policy: Whose features and masks are computed.
        world: The ranges of rent and budget.
        chance: What is drawn from.
    """
    scripts = recording.scripts
    trees = recording.envs // scripts
    rent, budget = (
        torch.tensor([world.term(name, share) for share in chance.random(trees)])
        .float()
        .repeat_interleave(scripts)
        for name in ("rent", "budget")
    )
    last = recording.clock.horizon
    if recording.clock.stop == "anytime":
        last = int(chance.integers(last // 2, last, endpoint=True))
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
    worth = recording.objective(rent, weights)[:, : last + 1]
    worth = worth.unflatten(0, (trees, scripts))
    worth = (worth - worth[:, :1]).clamp(min=WORST)  # the first script never grows
    return Trees(
        features=Features(*map(cut, (features.host, features.slots, features.offers))),
        rows=cut(rows),
        actions=actions[:, :last],
        episode_start=cut(observation.episode_start),
        worth=worth.flatten(0, 1),
        same=same,
        used=within.unflatten(0, (trees, scripts)),
    )


def tree_loss(
    policy: TamiyoPolicy, trees: Trees, temperature: float
) -> Mapping[str, Tensor]:
    """The loss over all nodes of some trees, and the mean worth of their roots."""
    count, scripts = trees.used.shape
    state = policy.initial_state(count * scripts)
    logits, values = policy.evaluate_actions(
        trees.features, trees.actions, trees.episode_start, state
    )
    chosen = evaluate_choices(logits, values, trees.rows, trees.actions).log_probs
    own = chosen.sum(dim=-1).unflatten(0, (count, scripts))  # [tree, script, time]
    used = trees.used[:, :, None]
    here = trees.same[..., :-1] & trees.used[:, None, :, None]  # other in the node
    # A script stands for its branch if none before it in use does the same.
    earlier = torch.ones(scripts, scripts, dtype=torch.bool).tril(-1)
    taken = trees.same[..., 1:] & trees.used[:, None, :, None] & earlier[:, :, None]
    stands = used & ~taken.any(dim=2)  # [tree, script, time]
    counted = here & stands[:, None]  # [tree, script, other, time]
    # A node that no script in use reaches counts nothing: -inf alone gives NaN.
    reached = counted.any(dim=2, keepdim=True)
    others = torch.where(counted, own[:, None], -torch.inf)
    mass = torch.where(reached, others, 0.0).logsumexp(dim=2)  # [tree, script, time]
    log_pi = own - mass
    worth = trees.worth.unflatten(0, (count, scripts))
    with torch.no_grad():
        pi = torch.where(counted, (own[:, None] - mass[:, :, None]).exp(), 0.0)
        value, after, nodes = worth[:, :, -1], [], []
        for time in range(own.shape[2] - 1, -1, -1):
            after.append(value)
            value = (pi[..., time] @ value[..., None])[..., 0]
            nodes.append(value)
        q, v = (torch.stack(x[::-1], dim=2) for x in (after, nodes))
    branches = counted.sum(dim=2) > 1
    # Every node once, however many scripts are in it.
    weight = (used & branches) / here.sum(dim=2).clamp(min=1)
    node_count = weight.sum().clamp(min=1)
    gain = log_pi.exp() * (temperature * log_pi - (q - v))
    improvement = torch.where(stands & branches, gain, 0.0).sum() / node_count
    spread = -(weight * torch.where(branches, mass, 0.0)).sum() / node_count
    errors = (values.unflatten(0, (count, scripts)) - (v - worth[:, :, :-1])) ** 2
    error = torch.where(used, errors, 0.0).sum() / (used.sum() * own.shape[2])
    return {
        "loss": improvement + MASS * spread + VALUE * error,
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
    """Fit a policy, in place, to recordings in random order and under random terms."""
    chance = np.random.default_rng(stream_seed(rng_seed, "fitting"))
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, weight_decay=DECAY)
    total, done = PASSES * len(recordings), 0
    high, low = TEMPERATURES
    for number in range(PASSES):
        roots = []
        for index in chance.permutation(len(recordings)).tolist():
            if stop():
                return
            share = done / total
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, done / 20 + 0.05) * (1 - share)
            trees = draw_trees(recordings[index], policy, world, chance)
            terms = tree_loss(policy, trees, high * (low / high) ** share)
            optimizer.zero_grad(set_to_none=True)
            terms["loss"].backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            done += 1
            roots.append(float(terms["root"]))
        text = f"{np.mean(roots):+.3f} of the errors removed"
        report("fitting", number + 1, PASSES, text)
