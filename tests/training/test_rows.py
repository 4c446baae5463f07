"""What happened to seeds, against a plain loop and in real worlds."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from esper.contracts.actions import HEAD, HEADS, NUM_HEADS, RELEVANT, Op
from esper.contracts.stages import SETTLES_TO, TRANSITIONS, Stage
from esper.environment.growing import GrowingWorld
from esper.runs.streams import stream
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer
from esper.simic.rollout import collect, start
from esper.tamiyo.policy.action_masks import compute_masks
from esper.tamiyo.policy.network import PolicyConfig, TamiyoPolicy
from esper.tamiyo.rule_based import Random
from esper.tasks.catalogue import task
from esper.testing.simulated import SimulatedWorld
from esper.training import rows
from tests.worlds import blank_slots


def listed(changes):
    names = ("env", "slot", "stage_from", "stage_to", "what")
    return [*zip(*(changes[name] for name in names), strict=True)]


def slots(stages, **others):
    stage = torch.tensor([[int(each) for each in row] for row in stages])
    blank = blank_slots(*stage.shape)
    planted = torch.where(stage == Stage.DORMANT, -1, 2)
    return replace(blank, stage=stage, blueprint=planted, **others)


def action(op, slot, **heads):
    row = torch.zeros(1, NUM_HEADS, dtype=torch.int64)
    for head, choice in {"op": int(op), "slot": slot, **heads}.items():
        row[0, HEAD[head]] = choice
    return row


def events_between(before, after, ended=None, actions=None, illegal=None):
    """Without episodes that ended and without illegal actions, unless given."""
    none = torch.zeros(len(before.stage), dtype=torch.bool)
    waits = torch.zeros(len(none), NUM_HEADS, dtype=torch.int64)
    ended, illegal = (none if each is None else each for each in (ended, illegal))
    actions = waits if actions is None else actions
    return rows.events_between(before, after, ended, actions, illegal)


D, T, B, H, F, C = Stage  # in the order of a life


def test_a_change_of_stage_has_a_name():
    for before, after, word in (
        (D, T, "planted"),
        (T, B, "blending"),
        (B, H, "holding"),
        (H, F, "kept"),
        *((stage, C, "pruned") for stage in (T, B, H)),
        *((stage, D, "pruned") for stage in (T, B, H)),
        (C, D, "cleared"),
        (F, D, "jumped"),
        (D, H, "planted"),
        (D, B, "planted"),
        (T, H, "holding"),
        (D, F, "jumped"),
    ):
        changes = events_between(slots([[before]]), slots([[after]]))
        assert listed(changes) == [(0, 0, before.name, after.name, word)]
        assert changes["blueprint"] == [2]


def test_every_step_of_the_table_of_stages_has_a_name_of_its_own():
    steps = {(stage, rule.next) for (_, stage), rule in TRANSITIONS.items()}
    for before, after in steps | {*SETTLES_TO.items()}:
        if before is not after:
            ((*_, word),) = listed(events_between(slots([[before]]), slots([[after]])))
            assert word not in ("jumped", "aimed")


def test_other_changes_than_those_of_stages():
    aging = slots([[T, B, D]])
    older = replace(aging, age=aging.age + 1, alpha=aging.alpha + 0.1)
    assert listed(events_between(aging, older)) == []
    before = slots([[H, H]])
    after = replace(before, alpha_target=torch.tensor([[0.0, 0.7]]))
    changes = events_between(before, after)
    assert listed(changes) == [(0, 1, "HOLDING", "HOLDING", "aimed")]
    before = slots([[T]])
    after = replace(before, blueprint=torch.tensor([[0]]))
    assert listed(events_between(before, after))[0][-1] == "jumped"
    before = slots([[B]], alpha=torch.tensor([[0.4]]))
    after = slots([[H]], alpha=torch.tensor([[0.7]]))
    assert events_between(before, after)["alpha"] == pytest.approx([0.7])


def test_of_an_ended_episode_only_its_last_sentence_is_listed():
    before = slots([[H, T], [H, T]], alpha=torch.full((2, 2), 0.7))
    after = slots([[D, D], [F, T]])
    ended = torch.tensor([True, False])
    actions = action(Op.FOSSILIZE, 0).expand(2, -1).contiguous()
    kept = [(env, 0, "HOLDING", "FOSSILIZED", "kept") for env in (0, 1)]
    assert listed(events_between(before, after, ended=ended)) == kept[1:]
    changes = events_between(before, after, ended=ended, actions=actions)
    assert listed(changes) == kept
    assert changes["alpha"] == pytest.approx([0.7, 0.0])
    refused = torch.tensor([True, False])
    changes = events_between(
        before, after, ended=ended, actions=actions, illegal=refused
    )
    assert listed(changes) == kept[1:]


def test_last_actions_plant_and_aim_too():
    over = {"ended": torch.tensor([True])}
    before, after = slots([[D, H]]), slots([[D, D]])
    planted = action(Op.GERMINATE, 0, blueprint=1)
    changes = events_between(before, after, actions=planted, **over)
    assert listed(changes) == [(0, 0, "DORMANT", "TRAINING", "planted")]
    assert changes["blueprint"] == [1]
    aimed = action(Op.SET_ALPHA, 1, alpha_target=2)
    changes = events_between(before, after, actions=aimed, **over)
    assert listed(changes) == [(0, 1, "HOLDING", "HOLDING", "aimed")]
    waited = action(Op.WAIT, 1)
    assert listed(events_between(before, after, actions=waited, **over)) == []


@settings(max_examples=25)
@given(st.data())
def test_all_slots_at_once_equal_one_after_the_other(data):
    stages = st.lists(
        st.lists(st.sampled_from(Stage), min_size=3, max_size=3), min_size=2, max_size=2
    )
    before, after = slots(data.draw(stages)), slots(data.draw(stages))
    alone = []
    for env in range(2):
        for slot in range(3):
            old = Stage(int(before.stage[env, slot]))
            new = Stage(int(after.stage[env, slot]))
            if old is not new:
                one = events_between(slots([[old]]), slots([[new]]))
                alone.append((env, slot, old.name, new.name, listed(one)[0][-1]))
    assert listed(events_between(before, after)) == alone


def simulated():
    return SimulatedWorld(8, rng_seed=1)


def growing():
    small = replace(task("teacher"), horizon=8)
    return GrowingWorld(small, 2, rng_seed=1)


@pytest.mark.parametrize("make", [simulated, growing])
def test_stages_replayed_from_events_are_the_stages_of_the_world(make):
    world, controller, state = make(), Random(), None
    chance = stream(0, "test")
    seen = world.reset()
    replayed = seen.slots.stage.clone()
    words = set()
    for _ in range(24):
        masks = compute_masks(seen, world.spec)
        actions, state = controller.decide(seen, masks, state, chance)
        result = world.step(actions)
        ended = result.terminated | result.truncated
        changes = events_between(
            seen.slots, result.observation.slots, ended=ended, actions=actions
        )
        for env, slot, before, after, word in listed(changes):
            assert replayed[env, slot] == Stage[before]
            replayed[env, slot] = Stage[after]
            words.add(word)
        replayed[ended] = result.observation.slots.stage[ended]
        assert torch.equal(replayed, result.observation.slots.stage)
        seen = result.observation
    assert {"planted", "pruned", "blending"} <= words
    assert "jumped" not in words


def test_decisions_and_widths_of_the_first_hosts_are_those_of_the_rollout():
    world, chance = growing(), stream(0, "test")
    policy = TamiyoPolicy(
        world.spec, PolicyConfig(width=16, slot_width=8, offer_width=8)
    )
    live, began, widths = start(world, policy), 0, {}
    for _ in range(2):  # the second rollout begins within an episode
        steps, time = [], 12
        buffer = TamiyoRolloutBuffer.for_policy(policy, world.num_envs, time)
        live, _ = collect(policy, world, live, buffer, chance, on_step=steps.append)
        first = torch.stack([step.observation.episode_start for step in steps])
        episode = 1 + began + first.cumsum(dim=0)
        began += int(first[:, 0].sum())
        columns = buffer.columns()
        found = rows.decision_rows(steps, episode, world, columns, 1)
        decided, layers = found["decisions"], found["layers"]
        assert decided["value"].tolist() == columns["values"][:, 0].tolist()
        for t, step in enumerate(steps):
            seen, heads = (json.loads(decided[n][t]) for n in ("features", "heads"))
            score, stage = step.observation.host.score, step.observation.slots.stage
            assert seen["host"]["score"] == pytest.approx(float(score[0]), rel=5e-3)
            assert [each["slot"] for each in seen["seeds"]] == (
                stage[0].nonzero().flatten().tolist()
            )
            action = step.actions[0].tolist()
            used = RELEVANT[action[0]].tolist()
            assert [*heads] == [h.name for h, uses in zip(HEADS, used) if uses]  # noqa: B905
            for name, head in heads.items():
                n = HEAD[name]
                legal, logs = (
                    columns["masks"][t, 0, n],
                    columns["distribution"][t, 0, n],
                )
                assert [*head["legal"].values()] == pytest.approx(
                    logs[legal].exp().tolist(), rel=5e-3
                )
                assert head["chosen"] == [*names_of(world, name)][action[n]]
            for n in (layers["index"] == t).nonzero().flatten().tolist():
                layer, width = int(layers["layer"][n]), int(layers["width"][n])
                assert widths.get(layer) != width or first[t, 0]
                assert layers["episode"][n] == episode[t, 0]
                widths[layer] = width
            units = step.observation.slots.units[0, :2].long().tolist()
            assert [widths[layer] for layer in sorted(widths)] == [*units, 8]
        later = (layers["index"] == time).nonzero().flatten().tolist()
        assert not (later and live.observation.episode_start[0])
        for n in later:
            widths[int(layers["layer"][n])] = int(layers["width"][n])
        assert {*layers["name"]} <= {"0", "2", "4"}
    assert live.observation.episode_start[0]  # the next rollout has these widths


def names_of(world, head):
    spec = world.spec
    return {
        "slot": map(str, range(spec.slots.max_slots)),
        "blueprint": (each.name for each in spec.blueprints),
    }.get(head, HEADS[HEAD[head]].choices)


def test_two_hosts_are_recorded_of_different_worlds_if_there_are_several():
    for worlds, hosts in ((1, [2]), (2, [1, 1]), (3, [1, 1, 0])):
        assert [rows.recorded_hosts(n, worlds) for n in range(worlds)] == hosts
