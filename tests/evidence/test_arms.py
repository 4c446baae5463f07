"""What every arm does with its hosts, and that it is what its name says."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import BadInput
from esper.contracts.stages import Stage
from esper.experiment.judging import judge, judge_plain
from esper.tasks.hosts import CnnHost, MlpHost
from evidence.arms import Batch, Supplies, carry_out, topology
from evidence.protocol import evidence_task, evidence_world
from tests.evidence.protocols import tiny
from tests.evidence.test_ledger import recorded

HOSTS, BLOCK = 3, 2


def batch(arm="early", *, settings=("low",), record="", **changes):
    protocol = tiny()
    task = evidence_task("vowel", protocol)
    world = evidence_world(task, settings[0], 1.0, protocol)
    return Batch(
        stage="counted",
        arm=arm,
        member=-1,
        task=task,
        settings=settings,
        world=replace(world, **changes),
        rate=1.0,
        block=BLOCK,
        hosts=HOSTS,
        record=record,
    )


@pytest.fixture(scope="module")
def early():
    return carry_out(batch(record="tamiyo"), Supplies())


def figures(results, *names):
    return np.array([[getattr(row, name) for name in names] for row in results])


def test_there_is_a_result_for_every_host(early):
    results, _ = early
    same = batch()
    judged = judge("early", same.task, HOSTS, BLOCK, same.world, stage="evidence")
    assert [row.seed for row in results] == [20, 21, 22]
    assert {(row.arm, row.task, row.setting, row.rate) for row in results} == {
        ("early", "vowel", "low", 1.0)
    }
    for name in ("score", "test", "added", "macs", "training_macs", "area"):
        assert_array_equal(figures(results, name)[:, 0], getattr(judged, name))
    assert len({row.test for row in results}) > 1  # every host has a split of its own


def test_what_was_done_is_kept_host_by_host(early):
    results, kept = early
    for row, one in zip(results, kept, strict=True):
        assert (one.arm, one.seed, one.setting) == ("tamiyo", row.seed, "low")
        assert one.actions.shape == (5, 8)
        assert one.stages.shape == one.alphas.shape == one.blueprints.shape == (5, 4)
        assert one.scores[-1] == np.float32(row.score)
        assert_allclose(one.scores.mean(), row.area, rtol=1e-6)
        planted = (one.actions[:, HEAD["op"]] == Op.GERMINATE).sum()
        assert planted == row.planted > 0
        assert len(one.slots) == 4
        assert one.names == ("widen_8", "widen_16", "widen_32")
        assert (one.blueprints >= -1).all()
        assert_array_equal(one.blueprints >= 0, one.stages != Stage.DORMANT)


def test_own_actions_on_the_same_hosts_have_the_same_end(early):
    results, kept = early
    again, _ = carry_out(batch("replay"), Supplies(recordings=kept))
    names = ("score", "test", "added", "training_macs", "planted")
    assert_array_equal(figures(again, *names), figures(results, *names))


def test_never_is_the_same_at_every_setting():
    rows, _ = carry_out(batch("never", settings=("low", "small")), Supplies())
    low, small = rows[:HOSTS], rows[HOSTS:]
    assert [row.setting for row in rows] == ["low"] * HOSTS + ["small"] * HOSTS
    assert low == [replace(row, setting="low") for row in small]
    other, _ = carry_out(batch("never", settings=("small",)), Supplies())
    names = ("score", "test", "added", "macs", "training_macs", "area", "planted")
    assert_array_equal(figures(other, *names), figures(low, *names))


def test_chance_plants_as_often_as_was_recorded(early):
    _, kept = early
    actions = np.zeros_like(kept[0].actions)
    actions[1, HEAD["op"]] = Op.GERMINATE.value
    once = replace(kept[0], actions=actions)
    none = replace(once, actions=np.zeros_like(actions))
    rows, _ = carry_out(batch("random"), Supplies(recordings=(once, none, once)))
    assert [row.planted for row in rows] == [1, 0, 1]


def test_plain_networks_are_as_large_and_cost_as_much_as_they_should():
    given = Supplies(added=1.5, training_macs=3e6)
    own = batch().task.host
    found = {arm: carry_out(batch(arm), given) for arm in ("static", "static-macs")}
    found["longer"] = carry_out(batch("longer"), given)
    assert all(kept == () for _, kept in found.values())
    added = {arm: figures(rows, "added") for arm, (rows, _) in found.items()}
    assert ((added["static"] > 1.3) & (added["static"] <= 1.5)).all()
    assert_array_equal(added["static-macs"], added["static"])
    assert not added["longer"].any()
    assert not figures(found["static"][0], "planted").any()
    for arm in ("static-macs", "longer"):
        rows, _ = found[arm]
        decision = 3 * own.macs * rows[0].macs * 2 * 64
        assert_allclose(figures(rows, "training_macs"), 3e6, atol=decision / 2)


def test_final_topologies_are_trained_from_the_start_each_on_its_own_host(early):
    _, kept = early
    bare = replace(kept[1], stages=np.zeros_like(kept[1].stages))
    rows, _ = carry_out(batch("scratch"), Supplies(recordings=(kept[0], bare, kept[2])))
    same = batch()
    for at, one in ((0, kept[0]), (1, bare), (2, kept[2])):
        host = topology(same.task.host, one)
        alone = judge_plain(host, same.task, HOSTS, BLOCK, same.world, stage="evidence")
        assert rows[at].test == alone.test[at]
        assert rows[at].added == alone.added[at]
    assert rows[1].added == 0 < rows[0].added


def test_a_topology_has_the_units_that_were_active_at_the_end():
    one = recorded()
    one.stages[-1] = [Stage.FOSSILIZED, Stage.TRAINING, Stage.HOLDING, Stage.DORMANT]
    one.blueprints[-1] = [0, 1, 1, -1]
    assert topology(MlpHost((5, 6, 3)), one) == MlpHost((5, 6 + 8 + 16, 3))
    assert topology(MlpHost((5, 6, 7, 3)), one) == MlpHost((5, 6 + 8 + 16, 7, 3))
    image = CnnHost((1, 8, 8), (4, 8), 3)
    assert topology(image, one) == CnnHost((1, 8, 8), (4 + 8 + 16, 8), 3)
    one.stages[-1, 1] = Stage.COOLING
    assert topology(MlpHost((5, 6, 7, 3)), one) == MlpHost((5, 30, 23, 3))


def test_an_arm_without_what_it_is_made_from_is_refused():
    with pytest.raises(BadInput, match="replay needs what Tamiyo did on 3 hosts; got"):
        carry_out(batch("replay"), Supplies())
    with pytest.raises(BadInput, match="needs the folder of a controller"):
        carry_out(batch("tamiyo"), Supplies())
