"""How good a policy is while it learns: on the same few hosts every time.

These hosts choose the best checkpoint, so at the end everybody is judged on others.
"""

from typing import Final

from esper.experiment.config import TrainConfig
from esper.experiment.judging import Judged, judge
from esper.experiment.worlds import tasks_of
from esper.tamiyo.policy.likeliest import Likeliest
from esper.tamiyo.policy.network import TamiyoPolicy

WATCHED: Final = "watched"
"""What these hosts are called; those of the end have another name."""


def watch(policy: TamiyoPolicy, config: TrainConfig) -> dict[str, Judged]:
    """One episode of the policy's likeliest choices on every host of every task."""
    hosts, settings = config.judging.hosts, config.world
    return {
        task.name: judge(Likeliest(policy), task, hosts, 0, settings, stage=WATCHED)
        for task in tasks_of(config, WATCHED)
    }
