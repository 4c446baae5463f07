"""How many steps per second does the simulated world alone make on one core?

One call makes a world, resets it and plays two episodes of recorded, uniformly random
legal actions. Included: the check that actions are legal, dynamics, reward, the whole
observation, and drawing the instances of three episodes; not included: choosing
actions. The twin is one plain Python object per host, which checks, steps and shows
the same; its instances are drawn beforehand.
"""

import torch
from torch import Generator, Tensor

from benchmarks.timing import Report, alternate, micro, sizes
from esper.contracts.actions import HEAD_NAMES, RELEVANT
from esper.contracts.world import Observation
from esper.tamiyo.policy.action_masks import compute_masks
from esper.testing.simulated import HORIZON, SimulatedWorld
from esper.testing.slot_tables import LIVES, SPEC
from tests.references.simulated import PlainHost, plain_instances

ENVS = (16, 128, 1024, 4096)
EPISODES = 2


def run() -> Report:
    """Time two episodes of growing batches."""
    report = Report(
        f"Simulated world, {EPISODES} episodes of {HORIZON} steps",
        ("envs", "µs per step", "env-steps/s", "plain env-steps/s", "ratio"),
        notes=[
            "Included: legality, dynamics, reward, observation, drawing instances.",
            "Not included: choosing the actions, which were recorded.",
        ],
    )
    for envs in sizes(ENVS):
        actions, rows = record(envs)
        plain = [step.tolist() for step in actions]
        best = alternate(
            {
                "ours": lambda envs=envs, actions=actions: play(envs, actions),
                "plain": lambda rows=rows, plain=plain: play_plain(rows, plain),
            }
        )
        steps = envs * len(actions)
        report.add(
            envs,
            micro(best["ours"] / len(actions)),
            steps / best["ours"],
            steps / best["plain"],
            best["plain"] / best["ours"],
        )
    return report


def play(envs: int, actions: list[Tensor]) -> None:
    """Two episodes of all environments at once."""
    world = make_world(envs)
    world.reset()
    for action in actions:
        world.step(action)


def play_plain(rows: list[list[dict]], actions: list[list[list[int]]]) -> None:
    """The same, host by host."""
    for time, step in enumerate(actions):
        if time % HORIZON == 0:
            hosts = [PlainHost(row) for row in rows[time // HORIZON]]
        for host, action in zip(hosts, step, strict=True):
            assert host.is_legal(action)
            host.step(action)
            host.seen()
            for slot in host.slots:
                slot.seen()


def record(envs: int) -> tuple[list[Tensor], list[list[dict]]]:
    """Legal actions for every step, and the instances of both episodes."""
    world, generator = make_world(envs), Generator().manual_seed(1)
    observation, actions, rows = world.reset(), [], []
    for time in range(EPISODES * HORIZON):
        if time % HORIZON == 0:
            rows.append(plain_instances(world.instances, LIVES))
        actions.append(some_legal(observation, generator))
        observation = world.step(actions[-1]).observation
    return actions, rows


def make_world(envs: int) -> SimulatedWorld:
    """The same world every time: recorded actions stay legal."""
    return SimulatedWorld(envs, rng_seed=0, hidden_share=0.25)


def some_legal(observation: Observation, generator: Generator) -> Tensor:
    """Uniformly random legal actions, head by head."""
    masks = compute_masks(observation, SPEC)
    rows = torch.arange(observation.episode_start.shape[0])
    actions = torch.zeros(len(rows), len(HEAD_NAMES), dtype=torch.int64)
    for head, name in enumerate(HEAD_NAMES):
        legal = {
            "slot": masks.slot[rows, actions[:, 0]],
            "blueprint": masks.blueprint[rows, actions[:, 1]],
        }.get(name, masks[name])
        relevant = RELEVANT[actions[:, 0], head] if head else rows >= 0
        weight = torch.where(relevant.unsqueeze(1), legal, True).float()
        choice = torch.multinomial(weight, 1, generator=generator)[:, 0]
        actions[:, head] = torch.where(relevant, choice, 0)
    return actions
