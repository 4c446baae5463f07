"""What does `esper.PPO` learn with its default settings, and its peers with theirs?

Eight environments, five random seeds each; one set of defaults for all, apart from
memory where something must be remembered, the table of causal heads, and Pendulum's
discount. Peers, three random seeds each, on four of them: PPO of Stable-Baselines3,
RecurrentPPO and MaskablePPO of sb3-contrib, with their own defaults but for layers of
64 and as many environments and steps between updates as ours with memory (16 x 128).

A return is that of the episodes that ended in one of twenty parts of the training,
choices drawn, the last part being the final return. Everything is counted by a wrapper
that is the same for all sides. CPU-seconds are those of the whole training. `greedy` is
the mean return of 100 episodes after the training with the likeliest choices.

A training that is done is one line of `--ledger` and is not done again: the command can
be stopped at any time. `--minutes` ends it after the training that is under way.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic, process_time
from typing import Any, Final

import gymnasium
import numpy as np
from gymnasium import Env
from numpy.typing import NDArray

from benchmarks import timing
from benchmarks.rl_tasks import HiddenVelocity, Repeat, Scheduling, TMaze, Tools
from benchmarks.timing import Report
from esper.evaluation.statistics import mean_interval
from esper.rl.ppo import PPO

PARTS: Final = 20
SEEDS: Final = 5
PEER_SEEDS: Final = 3
OURS: Final = "esper"
MEMORY: Final = "conv-mingru"
ENVS, STEPS = 16, 128
Make = Callable[[], Env[Any, Any]]


def _id(name: str) -> Make:
    return lambda: gymnasium.make(name, disable_env_checker=True)


@dataclass(frozen=True)
class Task:
    """An environment, and who learns in it for how long."""

    make: Make
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    peer: str | None = None


TASKS: Final[Mapping[str, Task]] = {
    "CartPole": Task(_id("CartPole-v1"), 60_000, peer="PPO"),
    "CartPole, velocities hidden": Task(
        HiddenVelocity, 100_000, {"memory": MEMORY}, "RecurrentPPO"
    ),
    "Acrobot": Task(_id("Acrobot-v1"), 60_000),
    "T-maze of length 50": Task(TMaze, 160_000, {"memory": MEMORY}, "RecurrentPPO"),
    "repeat, 2 steps ago": Task(Repeat, 100_000, {"memory": MEMORY}),
    "scheduling, masked": Task(Scheduling, 60_000, peer="MaskablePPO"),
    "tools, causal heads": Task(Tools, 40_000, {"head_relevance": Tools.RELEVANT}),
    "Pendulum": Task(_id("Pendulum-v1"), 100_000, {"gamma": 0.9}),
}


@dataclass(frozen=True)
class Training:
    """One training, as the ledger has it."""

    task: str
    side: str
    seed: int
    steps: int
    cpu_seconds: float
    curve: list[float | None]
    """Mean return of the episodes that ended in each part."""
    greedy: float | None = None
    """Mean return of 100 episodes with the likeliest choices."""


class Counter:
    """Steps and returns of all environments of one training."""

    def __init__(self) -> None:
        self.steps = 0
        self.ended: list[tuple[int, float]] = []

    def curve(self, steps: int) -> list[float | None]:
        """Mean returns in equal parts of the training."""
        parts: list[list[float]] = [[] for _ in range(PARTS)]
        for at, total in self.ended:
            parts[min(PARTS * at // steps, PARTS - 1)].append(total)
        return [round(float(np.mean(p)), 4) if p else None for p in parts]


class Counted(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Writes down when an episode ended, and its return."""

    def __init__(self, env: Env[Any, Any], counter: Counter) -> None:
        super().__init__(env)
        self._counter, self._total = counter, 0.0

    def reset(self, **options: Any) -> tuple[Any, dict[str, Any]]:  # noqa: ANN401
        """Begin."""
        self._total = 0.0
        return self.env.reset(**options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:  # noqa: ANN401
        """Count."""
        found = self.env.step(action)
        self._counter.steps += 1
        self._total += float(found[1])
        if found[2] or found[3]:
            self._counter.ended.append((self._counter.steps, self._total))
        return found


def run(
    ledger: str = "benchmarks/rl.jsonl",
    plot: str = "docs/images/rl.svg",
    minutes: float = 1e9,
    only: str = "",
    seeds: int = SEEDS,
) -> Report:
    """Train what the ledger does not have yet, then say and draw what it has.

    Args:
        ledger: The finished trainings.
        plot: Where to draw.
        minutes: Start no further training after this time.
        only: One task, on which peers are not trained.
        seeds: Random seeds of ours.
    """
    file = Path(ledger)
    if timing.QUICK:
        return report([train("CartPole", OURS, 0, 4_096)])
    todo = [(*one, TASKS[one[0]].steps) for one in wanted(only, seeds)]
    trainings = train_missing(file, todo, train, minutes)
    draw(trainings, Path(plot))
    return report(trainings)


def train_missing(
    file: Path,
    todo: Iterable[tuple[str, str, int, int]],
    train: Callable[[str, str, int, int], Training],
    minutes: float,
) -> list[Training]:
    """Train what a ledger lacks, line by line, and return all that it has.

    Args:
        file: The ledger.
        todo: Task, side, random seed and steps of each training.
        train: Makes one training from these.
        minutes: Start no further training after this time.
    """
    began = monotonic()
    for task, side, seed, steps in todo:
        done = {(t.task, t.side, t.seed) for t in read(file)}
        if (task, side, seed) in done or monotonic() - began > 60.0 * minutes:
            continue
        training = train(task, side, seed, steps)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(asdict(training)) + "\n")
    return read(file)


def wanted(only: str, seeds: int) -> list[tuple[str, str, int]]:
    """Tasks, sides and random seeds, so that all have some seeds before any has all."""
    names = [only] if only else [*TASKS]
    ours = [(name, OURS, seed) for seed in range(seeds) for name in names]
    peers = [
        (name, task.peer, seed)
        for seed in range(PEER_SEEDS)
        for name, task in TASKS.items()
        if task.peer is not None and not only
    ]
    # The sides take turns by random seed: ours, theirs, ours, ...
    return sorted(ours + peers, key=lambda each: (each[2], each[1] != OURS))


def read(file: Path) -> list[Training]:
    """What was trained so far."""
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Training(**json.loads(line)) for line in lines]


def train(name: str, side: str, seed: int, steps: int) -> Training:
    """One training, from nothing."""
    task, counter = TASKS[name], Counter()

    def make() -> Env[Any, Any]:
        return Counted(task.make(), counter)

    began, greedy = process_time(), None
    if side == OURS:
        agent = PPO(make, seed=seed, **task.options).learn(steps)
    else:
        _peer(side, make, seed).learn(steps)
    took = round(process_time() - began, 2)
    curve = counter.curve(steps)
    if side == OURS:
        greedy = round(agent.evaluate(100, env=task.make).mean, 4)
    return Training(name, side, seed, steps, took, curve, greedy)


def _peer(side: str, make: Make, seed: int) -> Any:  # noqa: ANN401
    """An agent of another library, with its own defaults but for sizes."""
    import sb3_contrib
    import stable_baselines3
    from stable_baselines3.common.vec_env import DummyVecEnv

    kind = getattr(sb3_contrib, side, None) or getattr(stable_baselines3, side)
    policy, layers = "MlpPolicy", {"net_arch": [64, 64]}
    if side == "RecurrentPPO":
        policy = "MlpLstmPolicy"
        layers = {"net_arch": [64], "lstm_hidden_size": 64}
    vector = DummyVecEnv([make] * ENVS)
    return kind(
        policy, vector, n_steps=STEPS, seed=seed, device="cpu", policy_kwargs=layers
    )


def report(trainings: Sequence[Training]) -> Report:
    """Final returns and CPU-seconds."""
    found = Report(
        "Learning with default settings",
        (
            *("task", "side", "seeds", "steps", "final return", "from", "to"),
            *("lowest", "greedy", "CPU-seconds"),
        ),
        notes=[
            "final return: mean of the last twentieth; 95 % bootstrap intervals; "
            "lowest: of the random seeds; greedy: after training, likeliest choices"
        ],
    )
    for task in TASKS:
        for side, group in _sides(trainings, task).items():
            finals = np.array([filled(t.curve)[-1] for t in group])
            middle = mean_interval([finals])
            bounds = (middle.low, middle.high) if len(group) > 1 else (None, None)
            seconds = float(np.mean([t.cpu_seconds for t in group]))
            after = [t.greedy for t in group if t.greedy is not None]
            greedy = float(np.mean(after)) if after else None
            figures = (middle.estimate, *bounds, finals.min(), greedy, seconds)
            found.add(task, side, len(group), f"{group[0].steps:,}", *figures)
    return found


def _sides(trainings: Sequence[Training], task: str) -> dict[str, list[Training]]:
    """Trainings in one task, ours first."""
    here = [t for t in trainings if t.task == task]
    sides = dict.fromkeys([OURS, *(t.side for t in here)])
    groups = {side: [t for t in here if t.side == side] for side in sides}
    return {side: group for side, group in groups.items() if group}


def filled(curve: Sequence[float | None]) -> NDArray[np.float64]:
    """A curve in which parts without the end of an episode repeat the one before."""
    known: list[float] = []
    for value in curve:
        known.append(value if value is not None else known[-1] if known else np.nan)
    return np.array(known)


def draw(trainings: Sequence[Training], file: Path) -> None:
    """Mean returns with bootstrap intervals, one panel per task."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from esper.report.style import LIGHT, STYLE

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.6, 5), layout="constrained")
        panels = figure.subplots(2, 4).flat
        for panel, (name, task) in zip(panels, TASKS.items(), strict=False):
            for side, group in _sides(trainings, name).items():
                curves = np.array([filled(t.curve) for t in group])
                at = (np.arange(PARTS) + 0.5) / PARTS * task.steps / 1000
                known = np.isfinite(curves).all(axis=0)
                at, curves = at[known], curves[:, known]
                colour = LIGHT["orange" if side == OURS else "grey"]
                panel.plot(at, curves.mean(axis=0), label=side, color=colour)
                if len(group) > 1:
                    bands = [
                        mean_interval([column], resamples=500) for column in curves.T
                    ]
                    low, high = zip(*((b.low, b.high) for b in bands), strict=True)
                    panel.fill_between(at, low, high, color=colour, alpha=0.2)
            panel.set_title(name)
            panel.set_xlabel("thousand steps")
            panel.legend(frameon=False)
        figure.savefig(file, format="svg", metadata={"Date": None})
