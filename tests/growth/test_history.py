"""What happened, in words and as plain data; and the hand that does it."""

import json

import pytest
import torch

from esper.contracts.actions import HEAD, Op
from esper.contracts.errors import BadInput, IllegalAction
from esper.contracts.events import StageChanged
from esper.contracts.stages import Stage
from esper.growth.hand import Hand
from esper.growth.history import Decision, Receipt, from_plain, summary, to_plain
from esper.growth.optimiser import Newborn
from esper.growth.words import in_words, sentence
from tests.growth.hosts import grow


def decision(step=0, **changed) -> Decision:
    event = StageChanged(
        env=0,
        slot=1,
        step=step,
        before=Stage.DORMANT,
        after=Stage.TRAINING,
        reason="GERMINATE was said",
    )
    known = {
        "step": step,
        "metric": 0.5,
        "loss": 1.25,
        "said": "plant widen_8 in a->b#0",
        "grew": True,
        "why_not": "",
        "parameters": 10,
        "macs": 20,
        "receipts": (Receipt("GERMINATE", "a->b#0", "widen_8", 0.0, "as built"),),
        "events": (event,),
        "incidents": ("refused: the loss is not finite (nan)",),
    }
    return Decision(**{**known, **changed})


def test_a_decision_survives_being_plain_data():
    plain = to_plain(decision())
    assert from_plain(json.loads(json.dumps(plain))) == decision()
    assert bool(decision())
    assert not bool(decision(grew=False))


def test_the_page_tells_what_changed_why_not_and_what_was_not_let_through():
    model = grow("vector")
    model.plant("second#0", "residual_mlp")
    waits = [
        decision(step, grew=False, receipts=(), why_not="no slot is free", metric=0.9)
        for step in (1, 2)
    ]
    page = summary(model, [decision(), *waits], ["a note"])
    for part in (
        "3 decisions; parameters 353 -> ",
        "metric 0.5 at first, 0.9 at last",
        "second#0",
        "TRAINING",
        "residual_mlp",
        "GERMINATE a->b#0 widen_8: output changed by 0 (as built)",
        "2 x  no slot is free",
        "refused: the loss is not finite (nan)",
        "note: a note",
    ):
        assert part in page
    assert "no seed is planted" in summary(grow("vector"), [])


def test_sentences_go_to_numbers_and_back():
    spec, slots = grow("vector").spec, ["a#0", "b#0"]
    said = {"slot": 1, "blueprint": 5, "style": "SCALE", "tempo": "SLOW"}
    row = sentence(Op.GERMINATE, {**said, "alpha_target": "MOST"})
    assert row.shape == (1, len(HEAD))
    told = in_words(row, slots, spec)
    assert told == "plant widen_8 in b#0 (SCALE, SLOW, MOST)"
    assert in_words(sentence(Op.WAIT, {}), slots, spec) == "wait"
    assert in_words(sentence(Op.ADVANCE, {"slot": 0}), slots, spec) == "advance a#0"
    prune = sentence(Op.PRUNE, {"slot": 0, "alpha_curve": "COSINE"})
    assert in_words(prune, slots, spec) == "prune a#0 (INSTANT, COSINE)"
    with pytest.raises(BadInput, match="did you mean 'SLOW'"):
        sentence(Op.PRUNE, {"alpha_speed": "SLOWW"})


def hand_of(model) -> Hand:
    return Hand(model, torch.optim.Adam(model.host.parameters()), Newborn())


def test_parameters_join_and_leave_with_their_seed():
    model = grow("vector")
    hand = hand_of(model)
    group = hand._optimizer.param_groups[0]["params"]
    host = len(group)
    slot = "first->second#0"
    receipt = hand.change(lambda: model.plant(slot, "widen_8"), Op.GERMINATE, slot)
    assert (receipt.op, receipt.slot, receipt.blueprint) == (
        "GERMINATE",
        slot,
        "widen_8",
    )
    assert receipt.jump == 0.0
    group = hand._optimizer.param_groups[0]["params"]
    assert {id(p) for p in group} == {id(p) for p in model.parameters()}
    hand.let_pass()
    hand.change(lambda: model.prune(slot), Op.PRUNE, slot)
    hand.let_pass()
    assert len(hand._optimizer.param_groups[0]["params"]) == host
    receipts, events = hand.collect()
    assert [e.after for e in events] == [Stage.TRAINING, Stage.COOLING, Stage.DORMANT]
    assert events[-1].reason == "it had cooled down"
    assert [r.op for r in receipts] == ["GERMINATE", "PRUNE"]
    assert hand.collect() == ((), ())


def test_what_is_refused_leaves_the_optimiser_alone():
    model = grow("vector")
    hand = hand_of(model)
    before = [*hand._optimizer.param_groups[0]["params"]]
    slot = "second#0"
    with pytest.raises(IllegalAction):
        hand.change(lambda: model.advance(slot), Op.ADVANCE, slot)
    with pytest.raises(BadInput):
        hand.change(lambda: model.plant(slot, "widen_8"), Op.GERMINATE, slot)
    assert len(hand._optimizer.param_groups[0]["params"]) == len(before)
    assert hand.collect() == ((), ())


def test_an_optimiser_that_cannot_train_a_seed_gives_its_slot_back():
    model = grow("vector")
    matrices = [p for p in model.host.parameters() if p.ndim == 2]
    for parameter in model.host.parameters():
        parameter.requires_grad_(parameter.ndim == 2)
    hand = Hand(model, torch.optim.Muon(matrices), None)
    slot = "second#0"
    with pytest.raises(BadInput, match="Muon trains matrices only"):
        hand.change(lambda: model.plant(slot, "residual_mlp"), Op.GERMINATE, slot)
    assert model.stage(slot) is Stage.DORMANT
    assert not model.seeds
