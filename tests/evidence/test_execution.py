"""What a job is made of is what the ledger knows of the right hosts."""

from dataclasses import replace

import pytest

from evidence.execution import Orders
from evidence.jobs import all_jobs
from evidence.ledger import Ledger, Trained
from tests.evidence.protocols import tiny
from tests.evidence.test_ledger import recorded, result

PROTOCOL = tiny(
    ('["vowel"]', '["vowel", "letter"]'),
    ("rates = [1.0]", "rates = [0.5, 1.0]"),
    ("vowel = [6]", "vowel = [6, 6]"),
    ("[counted]\nhosts = 2", "[counted]\nhosts = 3\nblocks = 2"),
)
JOBS = {job.id: job for job in all_jobs(PROTOCOL)}


def known():
    """Of every controller, task, setting and seed something else."""
    for task in PROTOCOL.tasks:
        for arm in ("tamiyo", "replay", "random", "scratch", "never", "static"):
            for rate in PROTOCOL.rates:
                score = 0.9 if (rate == 0.5) == (arm == "tamiyo") else 0.1
                for seed in (70, 71):
                    yield result(
                        stage="tuning",
                        arm=arm,
                        member=0,
                        task=task,
                        rate=rate,
                        score=score,
                        added=rate * seed / 100,
                        seed=seed,
                    )
        for member in (0, 1):
            for seed in (0, 1, 2, 10, 11, 12):
                yield result(
                    arm="tamiyo",
                    member=member,
                    task=task,
                    seed=seed,
                    rate=0.5,
                    added=float(member + seed),
                    training_macs=100.0 * seed,
                )


def recordings():
    for task in PROTOCOL.tasks:
        for member in (0, 1):
            for seed in (0, 1, 2, 10, 11, 12):
                yield replace(recorded(seed), member=member, task=task)
        for rate in PROTOCOL.rates:
            for seed in (70, 71):
                arm = f"tamiyo@{rate:g}"
                yield replace(recorded(seed), arm=arm, member=0, task=task)


@pytest.fixture(scope="module")
def orders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orders")
    with Ledger(folder / "it.sqlite", b"", {}) as ledger:
        trained = Trained(
            name="tamiyo-1",
            arm="tamiyo",
            member=1,
            env_steps=7,
            seconds=0.5,
            run="controllers/tamiyo-1",
            facts="{}",
        )
        found = {"results": [*known()], "recordings": [*recordings()]}
        ledger.finish("it", 0.0, trained=trained, **found)
        yield Orders(PROTOCOL, ledger, folder)


def made(orders, name):
    """The batch of a job, and what it is made from."""
    return orders.of(JOBS[name]).args


def sources(supplies):
    return [(one.task, one.arm, one.member, one.seed) for one in supplies.recordings]


def test_replay_plays_what_was_done_on_the_next_host_of_the_block(orders):
    batch, supplies = made(orders, "counted/vowel/replay/1/low/1")
    assert (batch.block, batch.hosts, batch.member) == (1, 3, 1)
    assert sources(supplies) == [("vowel", "tamiyo", 1, seed) for seed in (11, 12, 10)]


def test_replay_elsewhere_plays_what_was_done_on_another_task(orders):
    _, supplies = made(orders, "counted/vowel/replay-elsewhere/0/low/0")
    assert sources(supplies) == [("letter", "tamiyo", 0, seed) for seed in (0, 1, 2)]


def test_chance_takes_turns_with_tamiyos_controllers(orders):
    _, supplies = made(orders, "counted/vowel/random/-1/low/0")
    assert sources(supplies) == [
        ("vowel", "tamiyo", member, seed) for seed, member in enumerate((0, 1, 0))
    ]


def test_topologies_are_those_of_the_first_controller(orders):
    _, supplies = made(orders, "counted/vowel/scratch/-1/low/0")
    assert sources(supplies) == [("vowel", "tamiyo", 0, seed) for seed in (0, 1, 2)]


def test_size_and_cost_are_means_over_controllers_and_hosts_of_the_block(orders):
    _, supplies = made(orders, "counted/vowel/static/-1/low/1")
    assert supplies.added == pytest.approx(11 + 0.5)
    assert supplies.training_macs == pytest.approx(1100)


def test_arms_made_from_tamiyo_are_tuned_at_its_best_rate(orders):
    batch, supplies = made(orders, "tuning/vowel/replay/low/1")
    assert (batch.rate, batch.world.rate, batch.hosts) == (1.0, 1.0, 2)
    assert sources(supplies) == [("vowel", "tamiyo@0.5", 0, seed) for seed in (71, 70)]
    _, supplies = made(orders, "tuning/vowel/static/low/1")
    assert supplies.added == pytest.approx(0.5 * 0.705)


def test_everybody_is_counted_at_the_rate_that_tuning_found(orders):
    batch, supplies = made(orders, "counted/vowel/tamiyo/1/small/0")
    assert (batch.rate, batch.world.rate, batch.record) == (0.5, 0.5, "tamiyo")
    assert (batch.world.rent, batch.world.budget) == (0.1, 1.0)
    assert supplies.controller.name == "tamiyo-1"
    batch, _ = made(orders, "counted/vowel/replay/1/low/0")
    assert (batch.rate, batch.record) == (1.0, "")
    batch, _ = made(orders, "counted/vowel/replay-elsewhere/1/low/0")
    assert batch.rate == 1.0
    batch, _ = made(orders, "counted/vowel/never/-1/all/0")
    assert (batch.rate, batch.settings) == (1.0, ("low", "small"))
