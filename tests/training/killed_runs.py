"""Runs that are killed, gone on with, and held against one that nobody disturbed.

Every attempt is a fork of one process that has imported and compiled everything, so
that it costs what the run costs. The child says over a pipe how far it is. It is killed
with SIGKILL from outside at some second, or kills itself right after some words.
"""

import hashlib
import os
import select
import signal
import sqlite3
import traceback
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from unittest.mock import patch

import torch

from esper.files import unfinished
from esper.rl.settings import PPORunConfig
from esper.rl.training import KIND, begin_ppo, made, resume_ppo
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.database import TABLES
from esper.runs.run import STORE, Run
from esper.runs.store import Store
from esper.runs.train_config import (
    Budget,
    CheckpointConfig,
    EvalConfig,
    Learner,
    TrainConfig,
    World,
    from_toml,
)
from esper.simic.agent.ppo import PPOAgent, PPOConfig
from esper.tamiyo.policy.network import PolicyConfig
from esper.training.loop import OnRoundEnd
from esper.training.train import begin_run, resume_run
from esper.training.worlds import world_of

HORIZON, ENVS = 4, 2
CLOCK = "seconds"
"""The end of the name of what differs from run to run: how long it took."""


def small_run(folder, name, rounds=10):
    """Two real tasks, all that a run has, and about two seconds."""
    return TrainConfig(
        tasks=("teacher", "mnist1d"),
        num_envs=ENVS,
        name=name,
        runs=str(folder),
        budget=Budget(rounds=rounds),
        world=World(horizon=HORIZON, decision_every=2),
        learner=Learner(
            ppo=PPOConfig(epochs=2, minibatches=2),
            policy=PolicyConfig(width=16, slot_width=8, offer_width=8),
        ),
        start_from=None,
        evaluation=EvalConfig(every=5, hosts=1, controllers=("never",)),
        checkpoint=CheckpointConfig(every=2),
    )


def small_ppo(folder, name, rounds=10):
    """CartPole with memory, all that such a run has, and about a second."""
    return PPORunConfig(
        env="CartPole-v1",
        memory="mingru",
        num_envs=4,
        rollout_steps=24,
        total_steps=4 * 24 * rounds,
        width=16,
        ppo=PPOConfig(epochs=2, minibatches=2),
        checkpoint=CheckpointConfig(every=2),
        episodes=1,
        name=name,
        runs=str(folder),
    )


def warm_up():
    """Import and compile what a run needs; a fork must come from one thread."""
    torch.optim.Adam([torch.zeros(1)])  # imports half of torch
    config = small_run("nowhere", "never")
    for number in range(len(config.tasks)):
        world = world_of(config, number)
        world.reset()
        for _ in range(HORIZON + 1):
            world.step(torch.zeros(ENVS, len(world.spec.sizes), dtype=torch.int64))
    made(small_ppo("nowhere", "never")).learn(1)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads; set OMP_NUM_THREADS=1"


@dataclass(frozen=True)
class Life:
    """One attempt, from its fork to its end."""

    said: list[list[str]]
    seconds: float
    killed: bool

    @property
    def ready(self):
        """Seconds until it could go on; None if it did not come so far."""
        return next((float(line[1]) for line in self.said if line[0] == "ready"), None)

    @property
    def saved(self):
        """The last round whose checkpoint was published."""
        return max(
            (int(line[1]) for line in self.said if line[0] == "saved"), default=0
        )

    @property
    def acknowledged(self):
        """Rows that it was told are written, by attempt."""
        return {int(line[1]): int(line[2]) for line in self.said if line[0] == "rows"}


def live(config, *, until=None, last_words=None, twin=nullcontext):
    """Begin or go on with a run, until it ends, a second has come or words were said.

    Args:
        config: Of the run.
        until: Seconds after which it is killed.
        last_words: What it says, or begins to say, before it kills itself: "ready",
            "round 3", "rows 1" (of the first attempt were written), "saved 4".
        twin: A context in which something is done badly.
    """
    hearing, saying = os.pipe()
    began = perf_counter()
    child = os.fork()
    if not child:
        os.close(hearing)
        _live_in_child(config, saying, began, last_words, twin)
    os.close(saying)
    heard = b""
    with open(hearing, "rb", buffering=0) as pipe:
        while True:
            left = None if until is None else max(began + until - perf_counter(), 0)
            if not select.select([pipe], [], [], left)[0]:
                os.kill(child, signal.SIGKILL)
                until = None
            elif part := pipe.read(1 << 16):
                heard += part
            else:
                break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = [line.split(" ", 2) for line in heard.decode().splitlines()]
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a run ended with {code}: {said[-1:]}")
    return Life(said, perf_counter() - began, code != 0)


def _live_in_child(config, pipe, began, last_words, twin):
    def say(*words):
        line = " ".join(map(str, words))
        os.write(pipe, f"{line}\n".encode())
        if last_words and f"{line} ".startswith(f"{last_words} "):
            os.kill(os.getpid(), signal.SIGKILL)

    def tell(record):
        say("round", record.round)

    code = 1
    try:
        with twin(), _told(say, began):
            path, told = Path(config.runs) / config.name, [OnRoundEnd(tell)]
            trains = isinstance(config, TrainConfig)
            if path.exists():
                (resume_run if trains else resume_ppo)(path, told)
            else:
                (begin_run if trains else begin_ppo)(config, told)
        code = 0
    except BaseException:
        say("error", repr(traceback.format_exc()))
    finally:
        os._exit(code)


@contextmanager
def _told(say, began):
    """Say when an attempt is ready, rows are written, a checkpoint is published."""
    begin, flush, publish = Store.begin_attempt, Store.flush, CheckpointFolder.publish

    def told_begin(self, *what, **more):
        attempt = begin(self, *what, **more)
        say("ready", perf_counter() - began, attempt)
        return attempt

    def told_flush(self, **more):
        seq = flush(self, **more)
        say("rows", self._attempt, seq)
        return seq

    def told_publish(self, step, *what, **more):
        path = publish(self, step, *what, **more)
        say("saved", step)
        return path

    with (
        patch.object(Store, "begin_attempt", told_begin),
        patch.object(Store, "flush", told_flush),
        patch.object(CheckpointFolder, "publish", told_publish),
    ):
        yield


def digest(tensors):
    """One number for a state, but for how long it took."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if not name.endswith(CLOCK):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def state_of(path):
    """Every checkpoint that is kept, by step."""
    kept = Run.read(path).checkpoints()
    return {step: digest(kept.load(step).tensors) for step in kept.steps()}


def rows_of(path):
    """All rows that count, in order, but for their names and how long it took."""
    found = {}
    with closing(sqlite3.connect(path / STORE)) as db:
        for table in TABLES:
            shown = db.execute(f"SELECT * FROM live_{table} LIMIT 0").description
            names = [name for name, *_ in shown if name not in ("attempt", "seq")]
            kept = ", ".join(f'"{name}"' for name in names if not name.endswith(CLOCK))
            question = f"SELECT {kept} FROM live_{table} ORDER BY attempt, seq"
            rows = repr(db.execute(question).fetchall())
            found[table] = hashlib.sha256(rows.encode()).hexdigest()
    return found


@dataclass(frozen=True)
class Audit:
    """What a run is like after its deaths, beside the one that nobody disturbed."""

    same_state: bool
    same_rows: bool
    acknowledged: int
    """Rows that were said to be written."""
    lost: int
    """Of these, rows that are not there."""
    doubled: int
    """Rows of the same name, and steps that count twice."""
    missing: int
    """Holes in the count of rows, and steps that do not count."""
    troubles: list[str] = field(default_factory=list)
    """What else is wrong, one line each."""

    @property
    def good(self):
        """Whether it is the same run."""
        same = self.same_state and self.same_rows
        return same and not (self.lost or self.doubled or self.missing or self.troubles)


def audit(path, lives, whole):
    """Hold a run that lived these lives against the whole one."""
    run, expected = Run.read(path), 0
    if run.versions["kind"] != KIND:  # PPO writes no row for every step
        config = from_toml(run.config_toml)
        expected = config.budget.rounds * HORIZON * ENVS * len(config.tasks)
    acknowledged = {}
    for each in lives:
        acknowledged |= each.acknowledged
    with closing(sqlite3.connect(path / STORE)) as db:

        def ask(question):
            return db.execute(question).fetchall()

        names = {
            attempt: (rows, count, distinct, top)
            for attempt, rows, count, distinct, top in ask(
                "SELECT attempt, rows, count(seq), count(DISTINCT seq), "
                "ifnull(max(seq), 0) FROM attempts LEFT JOIN all_rows USING (attempt) "
                "GROUP BY attempt"
            )
        }
        steps, once = ask(
            "SELECT count(*), count(DISTINCT printf('%d %d %s %d', round, step, task, "
            "env)) FROM live_steps"
        )[0]
        (sound,) = ask("PRAGMA integrity_check")[0]
        resumed = dict(ask("SELECT attempt, ifnull(resumed_after, 0) FROM attempts"))
        notes = ask("SELECT kind, text FROM live_notes WHERE kind <> 'test'")
    troubles = [] if sound == "ok" else [f"the store: {sound}"]
    troubles += [f"note {kind}: {text}" for kind, text in notes]
    troubles += [f"left over: {left}" for left in unfinished(path / "checkpoints")]
    if run.finished is None:
        troubles.append("it does not know that it is complete")
    troubles += _went_back(lives, resumed)
    nothing = (0, 0, 0, 0)
    return Audit(
        same_state=state_of(path) == state_of(whole),
        same_rows=rows_of(path) == rows_of(whole),
        acknowledged=sum(acknowledged.values()),
        lost=sum(
            max(seq - names.get(attempt, nothing)[1], 0)
            for attempt, seq in acknowledged.items()
        ),
        doubled=sum(count - distinct for _, count, distinct, _ in names.values())
        + (steps - once),
        missing=sum(
            abs(top - distinct) + abs(rows - count)
            for rows, count, distinct, top in names.values()
        )
        + (expected - once),
        troubles=troubles,
    )


def _went_back(lives, resumed):
    """Attempts that went on from before the last checkpoint that was published."""
    saved = 0
    for each in lives:
        for attempt in (int(line[2]) for line in each.said if line[0] == "ready"):
            if resumed.get(attempt, 0) < saved:
                yield f"attempt {attempt} went on from {resumed.get(attempt)}"
        saved = max(saved, each.saved)


# What must be caught.


def forgotten_normaliser():
    """Saves all but the running statistics of returns."""
    kept = tuple(name for name in PPOAgent.STATE if name != "moments")
    return patch.object(PPOAgent, "STATE", kept)


def hasty_store():
    """Says that rows are written when they are queued."""

    def flush(self, *, durable=True):
        return self._seq + self._waiting

    return patch.object(Store, "flush", flush)


def ghostly_store():
    """Lets rows count that a dead attempt wrote after the checkpoint."""
    begin = Store.begin_attempt

    def begin_attempt(self, resume_round=None, versions=None):
        return begin(self, 1_000_000, versions)

    return patch.object(Store, "begin_attempt", begin_attempt)
