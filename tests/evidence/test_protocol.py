"""A protocol is read whole, or refused in one line that says what is wrong."""

import pytest

from esper.contracts.errors import BadInput
from evidence.protocol import (
    evidence_task,
    evidence_world,
    protocol_of,
    read_protocol,
    sha,
    training_of,
)
from tests.evidence.protocols import TINY, text_of, tiny


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('["vowel"]', '["vowl"]'), "no task 'vowl'; did you mean 'vowel'?"),
        (('rents = ["low"]', 'rents = ["lwo"]'), "no 'lwo'; did you mean 'low'?"),
        (("rates = [1.0]", "rate = [1.0]"), "no setting 'rate'; did you mean 'rates'?"),
        (("rates = [1.0]", "rates = [0]"), "rates must be greater than 0; got 0"),
        (("rates = [1.0]", "rates = [1, 1]"), "rates has something twice"),
        (("block = 7", "block = 0"), "tuning.block 0 is counted too"),
        (("hosts = 2", "hosts = 11"), "tuning.hosts must be less than or equal to 10"),
        (
            ("low = [0.001, 4.0]", "low = [0.001]"),
            "Field required; got [0.001]",
        ),
        (("low = [0.001, 4.0]", "low = [0.001, -1]"), "budget must be a finite number"),
        (('rents = ["low"]', "slots = 4"), "there is no 'rents'"),
        (("rates = [1.0]", 'arms = ["never"]'), "'tamiyo' is missing"),
        (("vowel = [6]", "letter = [6]"), "hosts: there is no 'letter'"),
        (("vowel = [6]", "vowel = []"), "expected hidden widths of an MLP, got ()"),
        (("vowel = [6]", "vowel = [6, 6, 6, 6, 6]"), "vowel has 5 places"),
        (('envs = "2"', 'env = "2"'), "there is no option '--env'; did you mean"),
        (('envs = "2"', 'envs = "0"'), "envs must be greater than or equal to 1"),
        (('"quick"', '"quik"'), "did you mean 'quick'?"),
        (("without-looking]", "early]"), "'early' cannot be an ablation's name"),
        (("counted = 0.5", "count = 0.5"), "projection: there is no 'count'"),
        (("[hosts]", "[hosts"), "expected TOML"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(change, words):
    with pytest.raises(BadInput) as refused:
        tiny(change)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_is_known_by_its_bytes(tmp_path):
    protocol, data = read_protocol(TINY)
    assert data == TINY.read_bytes()
    assert protocol == tiny()
    assert sha(data) != sha(data + b"\n")
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        read_protocol(tmp_path / "no.toml")


@pytest.mark.parametrize("widths", [(6,), (6, 5), (6, 5, 4, 3)])
def test_every_host_can_hold_four_seeds_and_has_data_of_its_own(widths):
    protocol = tiny(("vowel = [6]", f"vowel = {[*widths]}"))
    task = evidence_task("vowel", protocol)
    world = evidence_world(task, "low", 0.5, protocol)
    assert task.host.widths == (10, *widths, 11)
    assert task.varied
    assert world.seeds_per_slot * len(task.host.slots) == 4
    assert (world.rent, world.budget, world.rate) == (0.001, 4.0, 0.5)
    assert world.blueprints == ("widen_8", "widen_16", "widen_32")


def test_a_convolutional_host_is_offered_what_fits_it():
    protocol = tiny(
        ('["vowel"]', '["mnist5k", "vowel"]'),
        ('measure_every" = "10000"', 'blueprints" = "low_rank_4"'),
    )
    task = evidence_task("mnist5k", protocol)
    world = evidence_world(task, "low", 1.0, protocol)
    assert world.blueprints == ("widen_8", "widen_16")
    assert world.seeds_per_slot == 2
    with pytest.raises(BadInput, match="without-looking: nothing that may be planted"):
        evidence_world(task, "low", 1.0, protocol, "without-looking")


def test_every_controller_has_a_random_seed_of_its_own():
    protocol = tiny(
        ("members = 1", "members = 3"),
        ("[projection]", '[ablations.without.more]\nenvs = "3"\n[projection]'),
    )
    arms = [("tamiyo", 2), ("without-looking", 3), ("more", 3)]
    made = [training_of(arm, n, protocol) for arm, count in arms for n in range(count)]
    assert len({config.rng_seed for config in made}) == 8
    assert [config.envs for config in made] == [2] * 5 + [3] * 3
    assert all(config.judging.controllers == () for config in made)
    assert training_of("tamiyo", 1, protocol).rng_seed == 1


def test_what_an_ablation_takes_from_the_world_is_missing_where_it_is_judged():
    protocol = tiny()
    task = evidence_task("vowel", protocol)
    without = evidence_world(task, "low", 1.0, protocol, "without-looking")
    whole = evidence_world(task, "low", 1.0, protocol, "tamiyo")
    assert (without.measure_every, whole.measure_every) == (10_000, 4)
    assert (without.rent, without.horizon) == (whole.rent, whole.horizon)


def test_the_text_of_a_protocol_must_be_text():
    with pytest.raises(BadInput, match="expected TOML"):
        protocol_of(text_of().encode() + b"\xff")
