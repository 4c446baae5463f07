"""A first policy: what can be learnt of growing from the simulated world, in seconds.

The simulated world is a formula, a thousand times as fast as real networks. What a
policy learns there (that seeds must be blended to count, that rent is charged, that
what is no use is pruned) is where a run on real networks starts from.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from torch import Tensor

from esper.experiment.config import SIMULATED, TrainConfig
from esper.experiment.loop import Training
from esper.experiment.news import Progressed
from esper.experiment.settings.presets import preset
from esper.experiment.worlds import loop_of, worlds_of

ROUNDS: Final = 70
"""Rounds of 256 simulated environments: about half a minute."""


def warm_policy(
    config: TrainConfig,
    hear: Callable[[Progressed], None],
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Tensor] | None:
    """Weights of a policy that was trained in the simulated world.

    Args:
        config: Of the run that starts from it: its policy and its random seed.
        hear: Told of every round.
        stop: Whether to give up, in which case there is no policy.
    """
    own = preset(SIMULATED)
    simulated = replace(
        own,
        rng_seed=config.rng_seed,
        budget=replace(own.budget, rounds=ROUNDS),
        learner=replace(own.learner, policy=config.learner.policy),
    )
    (world,) = worlds_of(simulated)
    training = Training(world, loop_of(simulated, world))
    while training.round < ROUNDS:
        if stop():
            return None
        record = training.play_round()
        news = f"return {record.mean_return:+.3f}"
        hear(Progressed("simulated world", record.round, ROUNDS, news))
    return dict(training.policy.state_dict())
