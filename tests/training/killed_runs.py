"""Runs that are killed and resumed, compared with a run without interruptions.

Every attempt is a fork of one process that has imported and compiled everything. The
child reports its progress over a pipe. It gets SIGKILL from outside after some seconds,
or kills itself right after it sent a given line.
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
"""End of the names of durations, which differ from run to run."""


def small_run(folder, name, rounds=10):
    """A run of about two seconds, with two real tasks and all features."""
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
    """A PPO run of about a second: CartPole with memory."""
    return PPORunConfig(
        env="CartPole-v1",
        memory="mingru",
        num_envs=4,
        rollout_steps=24,
        total_steps=4 * 24 * rounds,
        width=16,
        learning_rate=1e-3,
        epochs=2,
        minibatches=2,
        checkpoint=CheckpointConfig(every=2),
        episodes=1,
        name=name,
        runs=str(folder),
    )


def warm_up():
    """Import and compile what a run needs; forking is safe from one thread only."""
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
        """Seconds until training could start; None if it did not start."""
        return next((float(line[1]) for line in self.said if line[0] == "ready"), None)

    @property
    def saved(self):
        """The last round whose checkpoint was published."""
        return max(
            (int(line[1]) for line in self.said if line[0] == "saved"), default=0
        )

    @property
    def acknowledged(self):
        """Number of rows that were reported as written, by attempt."""
        return {int(line[1]): int(line[2]) for line in self.said if line[0] == "rows"}


def live(config, *, until=None, last_words=None, twin=nullcontext):
    """Start or resume a run, until it ends or is killed.

    Args:
        config: Settings of the run.
        until: Seconds after which it is killed.
        last_words: Beginning of the line after which it kills itself: "ready",
            "round 3", "rows 1" (of the first attempt were written), "saved 4".
        twin: A context manager that injects a bug.
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
    """Report when training starts, rows are written or a checkpoint is published."""
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
    """Hash of a state, without durations."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if not name.endswith(CLOCK):
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            found.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def state_of(path):
    """Hashes of all checkpoints, by step."""
    kept = Run.read(path).checkpoints()
    return {step: digest(kept.load(step).tensors) for step in kept.steps()}


def rows_of(path):
    """Hashes of the valid rows of each table, without row numbers and durations."""
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
    """Comparison of a killed run with a run without interruptions."""

    same_state: bool
    same_rows: bool
    acknowledged: int
    """Rows that were reported as written."""
    lost: int
    """Reported rows that are missing."""
    doubled: int
    """Duplicate row numbers and duplicate steps."""
    missing: int
    """Gaps in the row numbers and missing steps."""
    troubles: list[str] = field(default_factory=list)
    """Other problems, one line each."""

    @property
    def good(self):
        """Whether both runs are equal."""
        same = self.same_state and self.same_rows
        return same and not (self.lost or self.doubled or self.missing or self.troubles)


def audit(path, lives, whole):
    """Compare a run that had these attempts with the whole one."""
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
        troubles.append("it is not marked as complete")
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
    """Attempts that resumed from a checkpoint before the last published one."""
    saved = 0
    for each in lives:
        for attempt in (int(line[2]) for line in each.said if line[0] == "ready"):
            if resumed.get(attempt, 0) < saved:
                yield f"attempt {attempt} went on from {resumed.get(attempt)}"
        saved = max(saved, each.saved)


# Bugs that the audit must find.


def forgotten_normaliser():
    """Does not save the running statistics of returns."""
    kept = tuple(name for name in PPOAgent.STATE if name != "moments")
    return patch.object(PPOAgent, "STATE", kept)


def hasty_store():
    """Reports rows as written when they are only queued."""

    def flush(self, *, durable=True):
        return self._seq + self._waiting

    return patch.object(Store, "flush", flush)


def ghostly_store():
    """Keeps rows that a killed attempt wrote after the checkpoint."""
    begin = Store.begin_attempt

    def begin_attempt(self, resume_round=None, versions=None):
        return begin(self, 1_000_000, versions)

    return patch.object(Store, "begin_attempt", begin_attempt)
