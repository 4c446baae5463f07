"""Configurations that people would want, by name.

    preset("quick")

Times are those of two cores. A preset is the bottom layer: files and options go on top.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from esper.experiment.config import (
    FAMILY,
    IMITATION,
    SIMULATED,
    Budget,
    Judging,
    Keeping,
    Learner,
    TrainConfig,
    World,
)
from esper.experiment.settings.typed import nearest, refusal, shown
from esper.simic.agent.ppo import PPOConfig

DEFAULT: Final = "default"

PRESETS: Final[Mapping[str, TrainConfig]] = MappingProxyType(
    {
        "quick": TrainConfig(
            budget=Budget(rounds=16),
            start_from=None,
            judging=Judging(every=8, hosts=8, controllers=("never", "random", "early")),
            keeping=Keeping(every=8),
        ),
        DEFAULT: TrainConfig(),
        "thorough": TrainConfig(
            tasks=("teacher", "mnist1d", "letter"),
            budget=Budget(rounds=400),
            judging=Judging(every=50, hosts=64),
            keeping=Keeping(every=25),
        ),
        FAMILY: TrainConfig(
            tasks=(FAMILY,),
            envs=8,
            start_from=IMITATION,
            budget=Budget(rounds=100),
            # The right answer differs from episode to episode, and can be seen.
            world=World(
                slots=6,
                blueprints=("widen_8",),
                rent=(0.001, 0.1),
                budget=(0.5, 5.0),
                rate=(0.5, 2.0),
                group_size=4,
            ),
            judging=Judging(every=25, hosts=16),
            keeping=Keeping(every=25),
        ),
        SIMULATED: TrainConfig(
            tasks=(SIMULATED,),
            start_from=None,
            envs=256,
            budget=Budget(rounds=280),
            learner=Learner(
                gae_lambda=0.85,
                final_share=0.03,
                ppo=PPOConfig(
                    learning_rate=3e-3,
                    max_grad_norm=1.0,
                    entropy=0.02,
                    # Most random sentences do harm, so waiting looks best before the
                    # others are learnt: op and blueprint must be tried for longer.
                    head_entropy={"op": 0.15, "blueprint": 0.1},
                ),
            ),
            keeping=Keeping(every=70),
        ),
    }
)
"""About a minute; five; half an hour; ten on a family of drawn tasks; two on the
simulated world."""


def preset(name: str) -> TrainConfig:
    """The configuration of this name."""
    if name not in PRESETS:
        raise refusal(
            f"there is no preset {shown(name)}; did you mean "
            f"{nearest(name, PRESETS)!r}? There are {', '.join(PRESETS)}."
        )
    return PRESETS[name]
