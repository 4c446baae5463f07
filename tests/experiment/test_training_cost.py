"""Multiply-adds of a training are those that the world asked for, call by call."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from esper.contracts.actions import HEAD, NUM_HEADS, Op
from esper.contracts.stages import Stage
from esper.environment.cohort import active_alpha
from esper.experiment.config import World
from esper.experiment.judging import (
    decision_macs,
    judge,
    judge_in,
    judged_world,
    training_macs,
)
from esper.growth.macs import promise_macs
from esper.tasks.hosts import MlpHost
from tests.experiment.test_judging import tiny

WIDTHS = (4, 6, 5, 7, 3)
HOSTS, HORIZON = 2, 9
LAYERS = [a * b for a, b in pairwise(WIDTHS)]


def deep():
    return replace(
        tiny(), host=MlpHost(WIDTHS), batch=64, decision_every=2, horizon=HORIZON
    )


class Tally:
    """A cohort whose calls are counted, host by host and layer by layer."""

    def __init__(self, world):
        self.cohort, self.spent, self.calls, self.looks = world.cohort, [], [], 0
        self.train, self.count = world.cohort.train, world.cohort.count
        world.cohort.train, world.cohort.count = self.on_train, self.on_count

    def seeds(self, env, alpha):
        """Place and multiply-adds of each seed with an alpha."""
        found = []
        for slot, size in enumerate(self.cohort.size[env].tolist()):
            place = slot % (len(WIDTHS) - 2)
            if size and alpha[env, slot] > 0:
                found.append((place, size * (WIDTHS[place] + WIDTHS[place + 2])))
        return found

    def forward(self, env, alpha):
        return sum(LAYERS) + sum(macs for _, macs in self.seeds(env, alpha))

    def on_count(self, x, y, alpha, wanted=None):
        rows = x.shape[1]
        self.calls.append(
            [
                rows * self.forward(env, alpha) if wanted is None or wanted[env] else 0
                for env in range(HOSTS)
            ]
        )
        return self.count(x, y, alpha, wanted)

    def on_train(self, features, labels, picked, states, rates, *, keep=False):
        spent, host = [], active_alpha(states)
        training = states.stage == Stage.TRAINING
        for env in range(HOSTS):
            each = 3 * self.forward(env, host)
            young = self.seeds(env, training)
            if young:
                outlet = min(place for place, _ in young) + 1
                each += self.forward(env, host) + sum(macs for _, macs in young)
                each += 2 * sum(macs for _, macs in young)
                each += sum(LAYERS[outlet + 1 :])
                everyone = self.seeds(env, host) + young
                each += sum(macs for place, macs in everyone if place > outlet)
            spent.append(each * picked.shape[1] * picked.shape[2])
        self.looks += keep
        self.calls.append(spent)
        return self.train(features, labels, picked, states, rates, keep=keep)


class Script:
    """Says what is written down for a decision, and adds up what each one cost."""

    def __init__(self, script, tally):
        self.script, self.tally, self.number, self.total = script, tally, 0, 0.0

    def decide(self, observation, masks, state, generator):
        self.add(self.tally.calls)
        self.number += 1
        actions = torch.zeros(HOSTS, NUM_HEADS, dtype=torch.int64)
        for head, value in self.script.get(self.number, {}).items():
            actions[:, HEAD[head]] = value
        return actions, state

    def add(self, calls):
        self.total += np.array(calls, dtype=np.float64).sum(axis=0)
        self.tally.calls.clear()


def played(script):
    """Multiply-adds that a world was asked for, and the recording."""
    world = judged_world(deep(), HOSTS, 0)
    tally = Tally(world)
    controller = Script(script, tally)
    recording = judge_in(world, controller, 0)
    # At the end come test rows, and the score of the next episode's host.
    controller.add(tally.calls[:2])
    promise = sum(
        2 * promise_macs(64, inputs + 1, outputs, 32)
        for inputs, outputs in zip(WIDTHS, WIDTHS[2:], strict=False)
    )
    return controller.total + tally.looks * promise, recording, world


GROWING = {
    1: {"op": Op.GERMINATE, "slot": 2, "blueprint": 1, "tempo": 3},
    2: {"op": Op.GERMINATE, "slot": 0, "blueprint": 0, "tempo": 3},
    4: {"op": Op.ADVANCE, "slot": 2},
    5: {"op": Op.ADVANCE, "slot": 0},
    6: {"op": Op.GERMINATE, "slot": 4, "blueprint": 4, "tempo": 3},
    7: {"op": Op.PRUNE, "slot": 4},
}


@pytest.mark.parametrize("script", [{}, GROWING], ids=["never", "growing"])
def test_counts_what_the_world_asked_for(script):
    expected, recording, _ = played(script)
    np.testing.assert_allclose(recording.judged.training_macs, expected, rtol=1e-12)
    if script:
        assert {Stage.TRAINING, Stage.BLENDING} <= {*recording.stage.flatten().tolist()}


def test_a_host_that_is_left_alone_counted_by_hand():
    task = replace(tiny(), batch=8, decision_every=2, horizon=3)  # 4-6-3: 42 per row
    judged = judge("never", task, HOSTS, 0)
    rows = len(task.splits(0).decisions)
    # Three decisions of two batches of eight rows, and four scores; nothing to look at:
    # so few rows promise nothing, and there is no seed to try.
    assert judged.training_macs.tolist() == [3 * 2 * 8 * 3 * 42 + 4 * rows * 42] * HOSTS


def test_what_grows_costs_more_and_so_does_looking_often():
    task = deep()
    never, early = (judge(name, task, HOSTS, 0) for name in ("never", "early"))
    assert (early.training_macs > 1.5 * never.training_macs).all()
    often = judge("never", task, HOSTS, 0, World(measure_every=1))
    assert (often.training_macs > never.training_macs).all()


def test_a_host_that_ended_costs_nothing_any_more():
    _, whole, world = played({})
    rows = len(world.task.splits(0).decisions)
    judged = replace(whole.judged, panicked=np.array([True, False]))
    short = replace(whole, lived=whole.lived.clone(), judged=judged)
    short.lived[4:, 0] = False
    found = training_macs(world, short, rows)
    empty = tuple((0, -1) for _ in range(whole.stage.shape[2]))
    # Four decisions; the fourth would be looked at, had it not ended in a panic.
    decision = decision_macs(world, rows, empty, look=False)
    assert found[0] == rows * world.task.host.macs + 4 * decision
    assert found[1] == whole.judged.training_macs[1]
