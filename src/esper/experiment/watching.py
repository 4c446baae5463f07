"""How good a policy is while it learns: on the same few hosts every time.

These hosts choose the best checkpoint, so at the end everybody is judged on others.
"""

from typing import Final

from esper.experiment.config import TrainConfig
from esper.experiment.judging import Judged, judge
from esper.experiment.worlds import tasks_of
from esper.tamiyo.policy.network import TamiyoPolicy
from esper.tamiyo.policy.sampling import with_temperature

WATCHED: Final = "watched"
"""What these hosts are called; those of the end have another name."""


def watch(policy: TamiyoPolicy, config: TrainConfig) -> dict[str, Judged]:
    """One episode of the policy, as it would be used, on every host of every task."""
    hosts, settings, sure = config.judging.hosts, config.world, with_temperature(policy)
    return {
        task.name: judge(sure, task, hosts, 0, settings, stage=WATCHED)
        for task in tasks_of(config, WATCHED)
    }
