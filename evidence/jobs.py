"""Everything that a protocol asks for, in order, and what each job waits for.

    controllers, search, bandit
    task by task: learning rates of every arm, then everybody on the first block
    ablations, trained and judged on the first block
    the same for the other blocks

A job is a training or a batch: one arm on the hosts of one block, side by side. The
learning rate of a counted batch is what tuning found, so it is no part of its name.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from evidence.protocol import Protocol, evidence_task

TUNING, COUNTED = "tuning", "counted"
TRAINING, SEARCH, BANDIT = "training", "search", "bandit"
KINDS: Final = (TRAINING, SEARCH, BANDIT, TUNING, COUNTED)
"""What jobs there are."""
ALL: Final = "all"
"""The setting of what is the same in all of them."""
NOBODY: Final = -1
"""The member of an arm that has none."""

BY_MEMBER: Final = ("tamiyo", "replay", "replay-elsewhere")
"""Arms that there are several of, one for each controller."""
AFTER_TAMIYO: Final = (
    "random",
    "replay",
    "replay-elsewhere",
    "static",
    "static-macs",
    "longer",
    "scratch",
)
"""Arms that are made from what Tamiyo did."""
TIED: Final = {"replay-elsewhere": "replay"}
"""Arms that train at the learning rate of another; ablations at that of tamiyo."""


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to be done."""

    id: str
    kind: str
    arm: str
    member: int = NOBODY
    task: str = ""
    setting: str = ""
    block: int = 0
    rate: float | None = None
    """The one that is tried; None: what tuning has found."""
    needs: tuple[str, ...] = ()
    """Jobs that must be done before."""


def all_jobs(protocol: Protocol) -> list[Job]:
    """All that there is to do, most important first."""
    first, *others = protocol.blocks
    jobs = [*_learning(protocol)]
    for task in protocol.tasks:
        jobs += [*_tuning(task, protocol), *_counted(task, first, protocol)]
    jobs += [*_trained_without(protocol), *_counted_without(first, protocol)]
    for block in others:
        for task in protocol.tasks:
            jobs += _counted(task, block, protocol)
        jobs += _counted_without(block, protocol)
    return jobs


def rate_arm(arm: str, protocol: Protocol) -> str:
    """The arm at whose learning rate an arm is counted."""
    return "tamiyo" if arm in protocol.ablations.without else TIED.get(arm, arm)


def elsewhere(task: str, protocol: Protocol) -> str:
    """The next task like this one whose hosts hold as many seeds."""
    at = protocol.tasks.index(task)
    others = (*protocol.tasks[at + 1 :], *protocol.tasks[:at])

    def held(name: str) -> int:
        places = len(evidence_task(name, protocol).host.slots)
        return protocol.slots // places * places

    def alike(name: str) -> tuple[str, int]:
        found = evidence_task(name, protocol)
        return found.host.kind, found.horizon

    same = [name for name in others if held(name) == held(task)]
    # Best one of the same kind and length, of which nothing must be cut off.
    same.sort(key=lambda name: alike(name) != alike(task))
    return same[0] if same else task


def members_of(arm: str, protocol: Protocol) -> tuple[int, ...]:
    """Which controllers an arm is run with."""
    if arm in protocol.ablations.without:
        return tuple(range(protocol.ablations.members))
    if arm in BY_MEMBER:
        return tuple(range(protocol.controllers.count))
    return (NOBODY,)


def settings_of(arm: str, task: str, protocol: Protocol) -> tuple[str, ...]:
    """The settings that an arm is counted at on a task."""
    if arm == "never":
        return (ALL,)
    if arm in protocol.rents_only or task in protocol.rents_only_tasks:
        return protocol.rents
    return tuple(protocol.settings)


def _learning(protocol: Protocol) -> Iterator[Job]:
    for member in range(protocol.controllers.count):
        yield Job(f"training/tamiyo/{member}", TRAINING, "tamiyo", member)
    first = () if protocol.search_env_steps else ("training/tamiyo/0",)
    if "searched" in protocol.arms:
        yield Job("search", SEARCH, "searched", needs=first)
    if "bandit" in protocol.arms:
        yield Job("bandit", BANDIT, "bandit", needs=first)


def _tuning(task: str, protocol: Protocol) -> Iterator[Job]:
    """Every arm at every learning rate."""
    for arm in protocol.arms:
        if arm not in TIED:
            yield from _rates_of(arm, task, protocol)


def _rates_of(arm: str, task: str, protocol: Protocol) -> Iterator[Job]:
    settings = (ALL,) if arm == "never" else protocol.rents
    member = 0 if arm in BY_MEMBER else NOBODY
    needs = _made_by(arm, member)
    if arm in AFTER_TAMIYO:
        needs = tuple(job.id for job in _rates_of("tamiyo", task, protocol))
    for rate in protocol.rates:
        for setting in settings:
            yield Job(
                f"tuning/{task}/{arm}/{setting}/{rate:g}",
                TUNING,
                arm,
                member,
                task,
                setting,
                protocol.tuning.block,
                rate,
                needs,
            )


def _counted(task: str, block: int, protocol: Protocol) -> Iterator[Job]:
    """Everybody on the hosts of a block."""
    for arm in protocol.arms:
        for setting in settings_of(arm, task, protocol):
            for member in members_of(arm, protocol):
                yield _count(arm, member, task, setting, block, protocol)


def _count(
    arm: str, member: int, task: str, setting: str, block: int, protocol: Protocol
) -> Job:
    tuned = _rates_of(rate_arm(arm, protocol), task, protocol)
    needs = (*_made_by(arm, member), *(job.id for job in tuned))
    if arm in AFTER_TAMIYO:
        where = elsewhere(task, protocol) if arm == "replay-elsewhere" else task
        if arm in BY_MEMBER:
            who: tuple[int, ...] = (member,)
        else:
            who = (0,) if arm == "scratch" else members_of("tamiyo", protocol)
        needs += tuple(_counted_id("tamiyo", m, where, setting, block) for m in who)
    name = _counted_id(arm, member, task, setting, block)
    return Job(name, COUNTED, arm, member, task, setting, block, None, needs)


def _trained_without(protocol: Protocol) -> Iterator[Job]:
    # One of each first: what is not done for want of time is missing evenly.
    for member in range(protocol.ablations.members):
        for arm in protocol.ablations.without:
            yield Job(f"training/{arm}/{member}", TRAINING, arm, member)


def _counted_without(block: int, protocol: Protocol) -> Iterator[Job]:
    for task in protocol.ablations.tasks or protocol.tasks:
        for arm in protocol.ablations.without:
            for setting in protocol.rents:
                for member in members_of(arm, protocol):
                    yield _count(arm, member, task, setting, block, protocol)


def _made_by(arm: str, member: int) -> tuple[str, ...]:
    """The job that makes who decides."""
    if arm in ("searched", "bandit"):
        return ("search" if arm == "searched" else "bandit",)
    if arm in AFTER_TAMIYO or member == NOBODY:
        return ()
    return (f"training/{arm}/{member}",)


def _counted_id(arm: str, member: int, task: str, setting: str, block: int) -> str:
    return f"counted/{task}/{arm}/{member}/{setting}/{block}"
