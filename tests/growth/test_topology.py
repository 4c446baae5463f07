"""Ops on a growing model with its optimiser following, and the log of them."""

import json

import pytest
import torch

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import IllegalActionError, InvalidInputError
from esper.contracts.stages import Stage, StageChanged
from esper.growth.actions import Receipt, action_text, encode_action
from esper.growth.history import PLAIN, GrowthDecision, summary
from tests.growth.hosts import grow


def decision(step=0, **changed) -> GrowthDecision:
    event = StageChanged(
        env=0,
        slot=1,
        step=step,
        before=Stage.DORMANT,
        after=Stage.TRAINING,
        reason="GERMINATE",
    )
    known = {
        "step": step,
        "metric": 0.5,
        "loss": 1.25,
        "action": "plant widen_8 in a->b#0",
        "grew": True,
        "parameters": 10,
        "macs": 20,
        "receipts": (Receipt("GERMINATE", "a->b#0", "widen_8", 0.0),),
        "events": (event,),
        "incidents": ("refused: the loss is not finite (nan)",),
    }
    return GrowthDecision(**{**known, **changed})


def test_a_decision_survives_being_plain_data():
    plain = PLAIN.dump_python([decision()], mode="json")
    assert PLAIN.validate_python(json.loads(json.dumps(plain))) == [decision()]
    assert bool(decision())
    assert not bool(decision(grew=False))


def test_the_summary_lists_changes_reasons_and_incidents():
    model = grow("vector")
    model.plant("second#0", "residual_mlp")
    waits = [
        decision(step, grew=False, receipts=(), why_not="no slot is free", metric=0.9)
        for step in (2, 3)
    ]
    moved = decision(1, action="wait", receipts=())
    page = summary(model, [decision(), moved, *waits], ["a note"])
    for part in (
        "4 decisions; parameters 353 -> ",
        "metric 0.5 at first, 0.9 at last",
        "second#0",
        "TRAINING",
        "residual_mlp",
        "   0  planted widen_8 at a->b\n",
        "   1  second->last is training\n",
        "2 x  no slot is free",
        "what was refused (4 batches in all",
        "refused: the loss is not finite (nan)",
        "note: a note",
    ):
        assert part in page
    assert "nothing has grown" in summary(grow("vector"), [])


def test_actions_go_to_numbers_and_to_words():
    spec, slots = grow("vector").spec, ["a#0", "b#0"]
    choices = {"slot": 1, "blueprint": 5, "style": "SCALE", "tempo": "SLOW"}
    row = encode_action(Op.GERMINATE, **choices, alpha_target="MOST")
    assert row.shape == (1, len(HEAD))
    prune = encode_action(Op.PRUNE, slot=0, alpha_curve="COSINE")
    for action, words in (
        (row, "plant widen_8 in b#0 (SCALE, SLOW, MOST)"),
        (encode_action(Op.WAIT), "wait"),
        (encode_action(Op.ADVANCE, slot=0), "advance a#0"),
        (prune, "prune a#0 (INSTANT, COSINE)"),
    ):
        assert action_text(action, slots, spec) == words
    with pytest.raises(InvalidInputError, match="did you mean 'SLOW'"):
        encode_action(Op.PRUNE, alpha_speed="SLOWW")


def test_parameters_join_and_leave_with_their_seed():
    model = grow("vector")
    optimizer = torch.optim.Adam(model.host.parameters())
    model.train_with(optimizer)
    host = len(optimizer.param_groups[0]["params"])
    slot = "first->second#0"
    how = {"blueprint": "widen_8", "tempo": "SLOW"}
    receipt = model.act(model.encode(Op.GERMINATE, slot, **how))
    assert receipt == Receipt("GERMINATE", slot, "widen_8", 0.0)
    group = optimizer.param_groups[0]["params"]
    assert {id(p) for p in group} == {id(p) for p in model.parameters()}
    model.tick()
    model.act(model.encode(Op.PRUNE, slot))
    assert len(optimizer.param_groups[0]["params"]) == host
    receipts, events = model.collect()
    assert [e.after for e in events] == [Stage.TRAINING, Stage.DORMANT]
    assert events[-1].reason == "PRUNE"
    assert [r.op for r in receipts] == ["GERMINATE", "PRUNE"]
    assert model.collect() == ((), ())


def test_what_is_refused_leaves_the_optimiser_alone():
    model = grow("vector")
    optimizer = torch.optim.Adam(model.host.parameters())
    model.train_with(optimizer)
    before = len(optimizer.param_groups[0]["params"])
    slot = "second#0"
    with pytest.raises(IllegalActionError):
        model.act(model.encode(Op.ADVANCE, slot))
    with pytest.raises(InvalidInputError):
        model.act(model.encode(Op.GERMINATE, slot, blueprint="widen_8"))
    assert len(optimizer.param_groups[0]["params"]) == before
    assert model.collect() == ((), ())


def test_an_optimiser_that_cannot_train_a_seed_gives_its_slot_back():
    model = grow("vector")
    matrices = [p for p in model.host.parameters() if p.ndim == 2]
    for parameter in model.host.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    model.train_with(torch.optim.Muon(matrices))
    slot = "second#0"
    with pytest.raises(InvalidInputError, match="Muon trains matrices only"):
        model.act(model.encode(Op.GERMINATE, slot, blueprint="residual_mlp"))
    assert model.stage(slot) is Stage.DORMANT
    assert not model.seeds
