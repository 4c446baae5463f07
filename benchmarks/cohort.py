"""How much faster do N hosts train as one cohort than one after the other?

Every environment holds other blueprints in other stages, half of the seeds in TRAINING,
so that both sides make a shadow pass for them. One call is one minibatch of every host:
forward, backward, shadow pass, optimiser. The twin is plain PyTorch, host by host, with
one `AdamW(fused=True)` each; it is spared the learning rates of newborns, which ours
includes. Not included: drawing batches, planting.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Generator, Tensor

from benchmarks.timing import Report, alternate, micro
from esper.contracts.blueprints import BLUEPRINTS, Blueprint, Form
from esper.contracts.stages import Stage
from esper.environment.cohort import Cohort, Plan
from esper.growth.lifecycle import Lives
from tests.references.cohort import PlainHost

ENVS = (4, 16, 64)
WIDTHS = (12, 64)
INPUTS, CLASSES, BATCH, PER_PLACE = 16, 26, 64, 2
NAMES = ("low_rank_4", "widen_8", "residual_mlp", "widen_16", "widen_32")
ALPHA = {
    Stage.DORMANT: 0.0,
    Stage.TRAINING: 0.0,
    Stage.BLENDING: 0.5,
    Stage.HOLDING: 1.0,
}
STAGES = (Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.TRAINING, Stage.DORMANT)
"""By environment and slot in turn: two of four seeds are in training."""
RATE = 1e-3


def run() -> Report:
    """Time one minibatch of every host, for cohorts of growing size."""
    report = Report(
        f"One minibatch of {BATCH} rows for every host "
        f"({INPUTS}-width-width-{CLASSES}, up to {2 * PER_PLACE} seeds each)",
        ("envs", "width", "seeds", "training", "µs per env", "plain µs", "ratio"),
        notes=[
            "Included: forward, backward, shadow pass, AdamW.",
            "Not included: drawing batches, planting.",
        ],
    )
    for width in WIDTHS:
        for envs in ENVS:
            cohort, lives, hosts = grow(envs, width)
            x, y = batch(envs)
            plan, rate = Plan.of(cohort, lives), torch.full((envs,), RATE)
            best = alternate(
                {
                    "ours": partial(cohort.train_step, x, y, plan, rate),
                    "plain": partial(one_by_one, hosts, x, y),
                },
                seconds=0.8,
                rounds=8,
            )
            report.add(
                envs,
                width,
                int((lives.stage != Stage.DORMANT).sum()),
                int((lives.stage == Stage.TRAINING).sum()),
                micro(best["ours"] / envs),
                micro(best["plain"] / envs),
                best["plain"] / best["ours"],
            )
    return report


def one_by_one(hosts: list[PlainHost], x: Tensor, y: Tensor) -> None:
    """The same minibatches, host after host."""
    for env, host in enumerate(hosts):
        host.train_step(x[env], y[env])


def batch(envs: int) -> tuple[Tensor, Tensor]:
    """Rows of every environment."""
    chance = Generator().manual_seed(1)
    x = torch.randn(envs, BATCH, INPUTS, generator=chance)
    return x, torch.randint(0, CLASSES, (envs, BATCH), generator=chance)


def grow(envs: int, width: int) -> tuple[Cohort, Lives, list[PlainHost]]:
    """A cohort and the same hosts one by one, with seeds in all sorts of stages."""
    blueprints = [b for name in NAMES for b in BLUEPRINTS if b.name == name]
    widths = (INPUTS, width, width, CLASSES)
    cohort = Cohort(envs, widths, blueprints, seeds_per_slot=PER_PLACE)
    chance = Generator().manual_seed(0)
    for leaf in (*cohort.weights, *cohort.biases):
        leaf.data.uniform_(-0.3, 0.3, generator=chance)
    hosts = [
        PlainHost(
            [weight[env] for weight in cohort.weights],
            [bias[env, 0] for bias in cohort.biases],
            rate=RATE,
            decay=cohort.decay,
            newborn=(1.0, 1),
            fused=True,
        )
        for env in range(envs)
    ]
    lives = Lives.empty(envs, cohort.places * PER_PLACE)
    stages, alphas = lives.stage.clone(), lives.alpha.clone()
    for env in range(envs):
        for slot in range(cohort.places * PER_PLACE):
            stage = STAGES[(env + slot) % len(STAGES)]
            if stage is Stage.DORMANT:
                continue
            blueprint = blueprints[(3 * env + slot) % len(blueprints)]
            first, bias = newborn(blueprint, widths[slot % cohort.places], chance)
            cohort.plant(env, slot, blueprint, first, bias)
            hosts[env].plant(slot, blueprint, first, bias)
            hosts[env].live(slot, stage, ALPHA[stage])
            stages[env, slot], alphas[env, slot] = int(stage), ALPHA[stage]
    return cohort, replace(lives, stage=stages, alpha=alphas), hosts


def newborn(blueprint: Blueprint, inputs: int, chance: Generator) -> tuple[Tensor, ...]:
    """The first map of a seed, and its bias if it has one."""
    first = 0.3 * torch.randn(inputs, blueprint.size, generator=chance)
    bias = torch.zeros(blueprint.size)
    if blueprint.form is not Form.LOW_RANK:
        bias.uniform_(-0.3, 0.3, generator=chance)
    return first, bias
