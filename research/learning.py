"""How much of the exact optimum does the controller reach on the simulated world?

It is trained from as many random seeds as asked and evaluated on instances that no
training saw, beside controllers that do not learn. 0 % is the better of never and
random, 100 % the exact optimum of the very instances that were played; intervals are
over instances, drawn anew for all arms together. About three minutes for each training.
"""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64
from rich.console import Console
from torch import Generator, Tensor

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.actions import ActionMasks
from esper.contracts.world import Controller, ControllerState, Observation
from esper.evaluation.statistics import Floats, Interval, bootstrap, mean_interval
from esper.runs.progress import Progress
from esper.runs.streams import stream
from esper.runs.train_config import SIMULATED, Budget, TrainConfig, preset
from esper.tamiyo.policy.network import PolicyConfig
from esper.tamiyo.rollout import play
from esper.tamiyo.rule_based import (
    Never,
    Random,
    blend_distances,
    next_actions,
    size_scores,
)
from esper.testing.simulated import draw_instances
from esper.training.controller_ppo import controller_loop
from esper.training.worlds import mixture_for, steps_of
from research.optimum import GivenWorld, best_memoryless_returns, optimal_returns
from tests.rollouts import GreedyPolicy

SLOW_BLEND: Final = blend_distances("ADD", "SLOW", "FULL", "SLOW", "SIGMOID")
"""As slowly as the world allows, and fully."""


class PromiseGreedy:
    """Plants the offer of the largest promised gain per parameter; blends slowly.

    Only the simulated world knows what offers promise. Those that promise less than
    their rent are left out; where it is not known, the largest are tried when nothing
    else pays.
    """

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """Follow the rules, and plant what promises most per parameter."""
        offers, rent = observation.offers, observation.host.rent[:, None, None]
        pays = offers.promise - rent * offers.parameters > 0.0
        # An offer without parameters costs next to nothing.
        gain = offers.promise / offers.parameters.clamp_min(1e-12)
        known = torch.where(pays, gain, -torch.inf)
        trial = size_scores(offers) - 3.0  # below every gain that pays
        scores = torch.where(offers.promise_known, known, trial)
        return next_actions(observation, masks, scores, blending=SLOW_BLEND), None


OPTIMUM, MEMORYLESS = "optimum", "best without memory"
BASELINES: Mapping[str, Controller] = {
    "never": Never(),
    "random": Random(),
    "heuristic": PromiseGreedy(),
}
VARIANTS: Final = {
    "Tamiyo": PolicyConfig(),
    "without memory": PolicyConfig(memory="none"),
    "without relevance": PolicyConfig(causal=False),
}
HELD_OUT: Final = 1024
"""Instances of each kind on which every arm is evaluated."""
TITLES = {
    "visible": "Visible instances, never trained on: everything needed is seen",
    "hidden": "Hidden instances, never trained on: what was seen must be remembered",
}
Returns = dict[str, Floats]
"""By kind of instance, visible or hidden."""


def run(
    rounds: int = 420,
    repeats: int = 1,
    ablations: bool = False,
    rng_seed: int = 0,
    envs: int = 256,
    processes: int = 2,
) -> list[Report]:
    """Train and judge.

    Args:
        rounds: Rounds per training.
        repeats: Trainings of each variant.
        ablations: Whether to train without memory and without relevance masks too.
        rng_seed: Random seed of the first training; the others count up.
        envs: Environments that step together.
        processes: Trainings at the same time.
    """
    own = replace(preset(SIMULATED), num_envs=envs, budget=Budget(rounds=rounds))
    variants = list(VARIANTS) if ablations else ["Tamiyo"]
    jobs = [(name, rng_seed + n) for n in range(repeats) for name in variants]
    configs = []
    for name, number in jobs:
        learner = replace(own.learner, policy=VARIANTS[name])
        configs.append(replace(own, rng_seed=number, learner=learner))
    trained: dict[str, list[Returns]] = {name: [] for name in variants}
    with Progress([*trained], Console(stderr=True), unit="training") as progress:
        for (name, _), returns in zip(jobs, _train(configs, processes), strict=True):
            trained[name].append(returns)
            progress.update(name, len(trained[name]), repeats, "trained")
    return [_report(kind, trained) for kind in TITLES]


def _train(configs: Sequence[TrainConfig], processes: int) -> Iterable[Returns]:
    if processes == 1 or len(configs) == 1:
        yield from map(trained_returns, configs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(trained_returns, configs)


def trained_returns(config: TrainConfig) -> Returns:
    """Train one policy; its returns on instances that no training saw."""
    torch.set_num_threads(1)
    trainer = controller_loop(mixture_for(config), config, steps_of(config))
    trainer.run()
    policy = GreedyPolicy(trainer.algorithm.policy)
    return {kind: _arms(kind, {"it": policy})["it"] for kind in TITLES}


def _arms(kind: str, controllers: Mapping[str, Controller]) -> dict[str, Floats]:
    """Returns on held-out instances, from a stream that no training draws from."""
    num, hidden = 16 if timing.QUICK else HELD_OUT, kind == "hidden"
    generator = stream(0, f"held out, hidden {hidden}")
    instances = draw_instances(num, generator, torch.full((num,), hidden))
    found = {}
    for name, controller in controllers.items():
        world = GivenWorld(instances)
        found[name] = play(world, controller, stream(0, "judging")).double().numpy()
    if "never" in controllers:
        found[OPTIMUM] = optimal_returns(instances).numpy()
        if hidden:
            found[MEMORYLESS] = best_memoryless_returns(instances).numpy()
    return found


def _report(kind: str, trained: Mapping[str, Sequence[Returns]]) -> Report:
    """Every arm, and each training on its own: no lucky one hides an unlucky one."""
    arms = _arms(kind, BASELINES)
    bounds = (arms["never"], arms["random"], arms[OPTIMUM])
    report = Report(
        TITLES[kind],
        ("controller", "return [95 % interval]", "% of optimum [95 % interval]"),
    )
    for name, each in trained.items():
        arms[name] = np.mean([returns[kind] for returns in each], axis=0)
        shares = [share_of_optimum(returns[kind], *bounds) for returns in each]
        line = ", ".join(f"{share.estimate:.1f} %" for share in shares)
        report.notes.append(f"{name}, each training: {line}")
    for name, returns in sorted(arms.items(), key=lambda arm: arm[1].mean()):
        share = share_of_optimum(returns, *bounds)
        report.add(name, f"{mean_interval(returns):.4f}", f"{share:.1f}")
    return report


def share_of_optimum(
    arm: Floats, never: Floats, random: Floats, optimum: Floats
) -> Interval:
    """Percent of the way from the better of never and random to the optimum."""
    returns, count = np.stack([arm, never, random, optimum]), len(arm)

    def share(drawn: Floats) -> Floats:
        arm, never, random, optimum = returns @ drawn.T / count
        base = np.maximum(never, random)
        percent: Floats = 100.0 * (arm - base) / (optimum - base)
        return percent

    return bootstrap([count], share, student=True)
