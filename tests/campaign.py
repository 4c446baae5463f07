"""Kill, damage, forge and break everything, and count what is lost, hangs or escapes.

    python -m tests.campaign                     all of it, about forty minutes
    python -m tests.campaign --scale 0.05        a twentieth of the trials
    python -m tests.campaign --parts stores      some parts

Every part is split into batches with seeds of their own. What a batch found is appended
to a file, so that a campaign that was interrupted goes on where it was. At the end
there is one table; the exit code counts the bad trials.
"""

import argparse
import contextlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import esper
from esper.cli import COMMANDS, main
from esper.contracts.actions import ActionSpec
from esper.contracts.errors import EsperError, EsperWarning
from esper.contracts.state import leaves
from esper.files import manifest_of, pack
from esper.growth.saving.serialization import rebuild
from esper.report import write_report
from esper.report.data import read_run
from esper.rl.ppo import PPO
from esper.runs.checkpoint import CheckpointFolder
from esper.runs.controllers import load_controller
from esper.runs.run import STORE, Run
from esper.runs.settings import as_toml
from esper.runs.store import Store, export
from esper.runs.train_config import (
    PRESETS,
    CheckpointConfig,
    EvalConfig,
    World,
    from_toml,
    resolve,
)
from esper.training.loop import Callback
from esper.training.recordings import read_recording, read_recordings
from esper.training.train import begin_run, resume_run
from tests import forgeries, mutants
from tests.cli.calls import command, environment
from tests.cli.test_generated import generated, options_of
from tests.growth import exploits
from tests.growth.hosts import make_batch, make_host
from tests.hostile_envs import HOSTILE, faults_of, register, run_hostile
from tests.rl.environments import SIZES
from tests.runs.disks import RefusingDisk
from tests.runs.stores import fill
from tests.runs.test_checkpoint import Bomb, filled, mutate, same, state
from tests.runs.test_train_config import mutated
from tests.test_grown import grown
from tests.training.killed_runs import small_run
from tests.training.test_train import simulated

LONGEST = 60.0
"""Seconds after which a trial hangs."""
LARGEST_LOG = 8.0
"""MB of a store's log at most."""
ERRORS = (28, 5, 30, 122)
"""ENOSPC, EIO, EROFS and EDQUOT."""


class Hung(BaseException):
    """A trial took too long."""


@dataclass
class Outcome:
    """What became of some trials."""

    trials: int = 0
    lost: int = 0
    """Trials after which something was missing, wrong or accepted that is none."""
    hung: int = 0
    tracebacks: int = 0
    executed: int = 0
    """Trials in which code from a file ran, or something was opened or connected."""
    slowest: float = 0.0
    """Seconds of a trial."""
    peak: float = 0.0
    """MB that a batch added to what the process has had."""
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Trials that must not be."""
        return self.lost + self.hung + self.tracebacks + self.executed

    def lose(self, why: str) -> None:
        """Count a trial as lost."""
        self.lost += 1
        self.notes.append(why[:200])

    @contextlib.contextmanager
    def trial(self, what: str, seconds: float = LONGEST):
        """One trial; what Esper refuses in one line is no failure."""
        self.trials += 1
        began = time.perf_counter()
        before = signal.signal(signal.SIGALRM, _hang)
        timer = signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        except EsperError as error:
            if len(str(error)) > 300 or not str(error).isprintable():
                self.lose(f"{what}: not one short line: {str(error)[:99]!r}")
        except Hung:
            self.hung += 1
            self.notes.append(f"{what}: hung")
        except Exception:
            self.tracebacks += 1
            self.notes.append(f"{what}: {traceback.format_exc(limit=-3)[-400:]}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, *timer)
            signal.signal(signal.SIGALRM, before)
            self.slowest = max(self.slowest, time.perf_counter() - began)


def _hang(number, frame):
    raise Hung


# Storage.


def kills(count, seed, folder):
    """Runs killed at random moments, in a process of one thread; see benchmarks.

    One in three is a run of PPO.
    """
    script = (
        "import json, random, sys, torch; torch.set_num_threads(1)\n"
        "from pathlib import Path\n"
        "from benchmarks.resume import DEATHS, Trials, crash_points, warm_up\n"
        "from tests.training.killed_runs import small_ppo\n"
        "warm_up(); trials = Trials(Path(sys.argv[1]), rounds=6)\n"
        "agents = Trials(Path(sys.argv[1]), 6, small_ppo)\n"
        "chance = random.Random(int(sys.argv[3]))\n"
        "for n in range(int(sys.argv[2])):\n"
        "    which = agents if n % 3 == 2 else trials\n"
        "    found, lives = which.at_random(DEATHS[n % len(DEATHS)], chance)\n"
        "    killed = sum(life.killed for life in lives)\n"
        "    print(json.dumps([found.good, killed, str(found)[:200]]), flush=True)\n"
        "for crash in crash_points(trials).rows:\n"
        "    print(json.dumps([not crash[3], crash[1], str(crash)]), flush=True)\n"
    )
    outcome, began = Outcome(), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder), str(count), str(seed)],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    for line in done.stdout.splitlines():
        good, killed, text = json.loads(line)
        outcome.trials += killed
        if not good:
            outcome.lose(text)
    if done.returncode:
        outcome.lose(done.stderr[-200:])
    outcome.slowest = (time.perf_counter() - began) / max(outcome.trials, 1)
    return outcome


def disk_errors(count, seed, folder):
    """An error of the system at every call of a save and of a new run."""
    outcome = Outcome()
    for number in range(count):
        code, at = ERRORS[number % len(ERRORS)], number // len(ERRORS) % 16
        place = folder / str(number)
        place.mkdir()
        filled(place, 1)
        made = CheckpointFolder(place / "checkpoints", RefusingDisk(at, code), keep=1)
        with outcome.trial(f"save, call {at}, error {code}"):
            made.publish(2, state(2), {})
        with outcome.trial(f"run, call {at}, error {code}"):
            Run.create(place, "run", "", {}, disk=RefusingDisk(at, code)).close()
        left = CheckpointFolder(place / "checkpoints").latest()
        if left is None or not same(left.tensors, state(left.manifest.step)):
            outcome.lose(f"no state after error {code} at call {at}")
        if (place / "run").exists() and not (place / "run" / "config.toml").exists():
            outcome.lose(f"half a run after error {code} at call {at}")
        shutil.rmtree(place)
    return outcome


def signals(count, seed, folder):
    """One or two signals at random moments of a command, which then goes on."""
    outcome, chance = Outcome(), random.Random(seed)
    for number in range(count):
        name, once = f"run{number}", chance.random() < 0.5
        size = ["--budget.rounds", "6", "--num_envs", "4", "--checkpoint.every", "1"]
        begin = ["train", "--preset", "simulated", "--runs", str(folder), *size]
        path = folder / name
        process = subprocess.Popen(
            command(*begin, "--name", name, "--rng_seed", "0"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            # A campaign in the background ignores Ctrl-C, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        with outcome.trial(f"signals of {name}", 10 * LONGEST):  # it starts slowly
            while process.poll() is None and not (path / STORE).exists():
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 1.0))
            for pause in [0.0] if once else [0.0, chance.uniform(0, 0.2)]:
                time.sleep(pause)
                process.send_signal(chance.choice([signal.SIGINT, signal.SIGTERM]))
            told = process.communicate(timeout=LONGEST)[1]
            if process.returncode not in (0, 130, 143, -2, -15):
                outcome.lose(f"exit {process.returncode}: {told[-99:]}")
            if "Traceback" in told:
                outcome.lose(told[-200:])
            if Run.read(path).finished is None:
                resume_run(path)
            if Run.read(path).checkpoints().latest().manifest.step != 6:
                outcome.lose(f"{name} did not go on to its end")
        process.kill()
        shutil.rmtree(path, ignore_errors=True)
    return outcome


# Damage.


def checkpoints(count, seed, folder):
    """Checkpoints that were flipped, cut, spliced, swapped or forged."""
    outcome, chance = Outcome(), random.Random(seed)
    made, marker = filled(folder, 1, 2), folder / "ran"
    place = made.path / "000002.safetensors"
    good, other = (
        (made.path / f"00000{step}.safetensors").read_bytes() for step in (2, 1)
    )
    for _ in range(count):
        place.write_bytes(mutate(chance, good, other, marker))
        with outcome.trial("checkpoint"):
            made.load(2)
            outcome.lose("a damaged checkpoint was loaded")
    outcome.executed += marker.exists()
    return outcome


def damaged_store(chance, file):
    """Damage a store in one way; returns whether it must be noticed."""
    kind = chance.choice(("flip", "flip", "cut", "splice", "type", "row"))
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    if kind == "flip":
        for _ in range(chance.choice((1, 1, 8, 64))):
            data[chance.randrange(len(data))] = chance.randrange(256)
    elif kind == "cut":
        del data[at:]
    elif kind == "splice":
        data[at : at + 512] = data[: len(data) - at][:512]
    if kind in ("flip", "cut", "splice"):
        file.write_bytes(data)
        return
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        tables = [
            name
            for (name,) in db.execute(
                "SELECT name FROM sqlite_schema WHERE type = 'table'"
            )
        ]
        table = chance.choice(tables)
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        junk = chance.choice((-1, 2**62, 1e308, "x" * 99_999, "\x1b[2J", None, b"\0"))
        if kind == "type":  # loosen the table, write nonsense, swear that it is strict
            (text,) = db.execute(
                "SELECT sql FROM sqlite_schema WHERE name = ?", [table]
            ).fetchone()
            _rewrite(file, table, text.replace(" STRICT,", "").replace(" STRICT", ""))
        with (
            contextlib.suppress(sqlite3.Error),
            closing(sqlite3.connect(file, isolation_level=None)) as other,
        ):
            other.execute(f'UPDATE {table} SET "{chance.choice(columns)}" = ?', [junk])
        if kind == "type":
            _rewrite(file, table, text)


def _rewrite(file, table, text):
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.execute("UPDATE sqlite_schema SET sql = ? WHERE name = ?", [text, table])
        (version,) = db.execute("PRAGMA schema_version").fetchone()
        db.execute(f"PRAGMA schema_version = {version + 1}")


def stores(count, seed, folder):
    """Stores with other bytes, lengths, types and values."""
    outcome, chance = Outcome(), random.Random(seed)
    with Run.create(folder, "run", 'tasks = ["letter"]\n', {}) as run:
        path = run.path
    fill(path / STORE)
    with closing(sqlite3.connect(path / STORE)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = (path / STORE).read_bytes()
    for number in range(count):
        for end in ("", "-wal", "-shm"):
            (path / f"{STORE}{end}").unlink(missing_ok=True)
        (path / STORE).write_bytes(whole)
        damaged_store(chance, path / STORE)
        with outcome.trial("report of a store"):
            read_run(path)
        if number % 40 == 0:
            with outcome.trial("page of a store"):
                write_report(path)
        if number % 4 == 0:
            shutil.rmtree(path / "out", ignore_errors=True)
            with outcome.trial("export of a store"):
                export(path / STORE, path / "out", "csv")
            with outcome.trial("writing to a store"), Store(path / STORE) as store:
                store.begin_attempt(1)
    return outcome


def configurations(count, seed, folder):
    """Settings with other bytes and lines."""
    outcome, chance = Outcome(), random.Random(seed)
    texts = [as_toml(config) for config in PRESETS.values()]
    file = folder / "damaged.toml"
    for _ in range(count):
        file.write_bytes(mutated(chance, chance.choice(texts)))
        with outcome.trial("settings"):
            config = resolve({"config": [file]})
            if from_toml(as_toml(config)) != config:
                outcome.lose("settings were not read back")
    return outcome


def command_lines(count, seed, folder):
    """Random command lines, most of them wrong."""
    outcome, chance = Outcome(), random.Random(seed)
    options = {name: options_of(name) for name in COMMANDS}
    with contextlib.chdir(folder):
        for _ in range(count):
            arguments = generated(chance, options)
            out, err = io.StringIO(), io.StringIO()
            with (
                outcome.trial(str(arguments)[:99]),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                code = main(arguments)
                if code not in (0, 2, 5) or "Traceback" in err.getvalue():
                    outcome.lose(f"exit {code}: {str(arguments)[:99]}")
        if left := os.listdir(folder):
            outcome.lose(f"left over: {left[:3]}")
    return outcome


# Hostile files.


INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib"))


class Watch:
    """What this process executes, imports, starts or connects to while it is on."""

    EVENTS = frozenset(
        (
            *("exec", "compile", "import", "pickle.find_class", "ctypes.dlopen"),
            *("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen"),
            "socket.connect",
        )
    )

    def __init__(self):
        self.on, self.seen = False, list[str]()
        sys.addaudithook(self._look)

    def _look(self, event, arguments):
        if not self.on or event not in self.EVENTS:
            return
        # A module of the installation that is imported late is no file's doing.
        code = arguments[0] if event == "exec" else None
        if not getattr(code, "co_filename", "").startswith(INSTALLED):
            self.seen.append(f"{event} {str(arguments)[:80]}")

    @contextlib.contextmanager
    def __call__(self):
        self.on = True
        try:
            yield
        finally:
            self.on = False


WATCH = Watch()


def hostile_files(count, seed, folder):
    """Files that are code, bombs or lies, given to everything that reads files."""
    outcome, chance, marker = Outcome(), random.Random(seed), folder / "ran"
    config = simulated(folder)
    path = begin_run(config).path
    newest = path / "checkpoints" / "000004.safetensors"
    whole = {name: (path / name).read_bytes() for name in ("config.toml", STORE)}
    whole["checkpoints/000004.safetensors"] = good = newest.read_bytes()
    about = manifest_of({}, 4, 9.0)
    corpus = [
        *(pickle.dumps(Bomb(marker), protocol=p) for p in range(6)),
        b"PK\x03\x04" + pickle.dumps(Bomb(marker)),
        b"#!/bin/sh\ntouch ran\n",
        b"import os; os.system('touch ran')",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"<html>404</html>",
        (1 << 62).to_bytes(8, "little") + b"{" * 99,
        pack({"a": torch.zeros(4)}, about),
        *(good[:n] for n in (8, 100, len(good) - 1)),
        b"\0" * 4096,
        b"[" * 100_000,
        b"!!python/object/apply:os.system ['touch ran']",
    ]
    loads = (
        ("a controller", lambda: load_controller(path)),
        ("a report", lambda: read_run(path)),
        ("a list", lambda: Run.list(folder)),
        ("settings", lambda: from_toml(Run.read(path).config_toml)),
        ("resume", lambda: resume_run(path)),
    )
    for _, load in loads:  # imports what it needs
        with contextlib.suppress(EsperError):
            load()
    (path / "finished.json").unlink()
    with watched(outcome, marker):
        for _ in range(count):
            name, data = chance.choice([*whole]), chance.choice(corpus)
            (path / name).write_bytes(data)
            with (path / name).open("r+b") as file:
                if chance.random() < 0.2:
                    file.truncate(3 << 30)  # a sparse file
            for what, load in loads[:4]:
                with outcome.trial(f"{what} of {name}"), WATCH():
                    load()
            for kept, content in whole.items():
                (path / kept).unlink()
                (path / kept).write_bytes(content)
    with WATCH():  # the unsafe twin must be seen
        pickle.loads(pickle.dumps(Bomb(marker))).close()
    if not WATCH.seen or not marker.exists():
        outcome.lose("the unsafe twin was not seen")
    WATCH.seen.clear()
    return outcome


@contextlib.contextmanager
def watched(outcome, marker=None):
    """Counts what is executed, and the memory that is taken, into an outcome."""
    WATCH.seen.clear()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome.peak = (after - before) / 1e3
    ours = [line for line in WATCH.seen if not line.startswith("import ")]
    outcome.executed += len(ours) + (marker is not None and marker.exists())
    outcome.notes += ours[:3]
    WATCH.seen.clear()


def agents(count, seed, folder):
    """Agents with other facts and tensors, sealed again."""
    outcome, chance = Outcome(), random.Random(seed)
    file, seen = folder / "agent.safetensors", np.zeros(4, np.float32)
    good = [forgeries.agent(memory) for memory in ("mingru", "lstm", "none")]
    file.write_bytes(good[0])
    PPO.load(file).predict(seen, action_masks=np.ones(sum(SIZES)))
    with watched(outcome):
        for _ in range(count):
            file.write_bytes(forgeries.resealed(chance, chance.choice(good)))
            with outcome.trial("agent", 10.0), WATCH():
                PPO.load(file)
    return outcome


def flipped_recordings(count, seed, folder):
    """Recordings with flipped bits, or cut: none may be read."""
    outcome, chance = Outcome(), random.Random(seed)
    file = folder / "000000.safetensors"
    with watched(outcome):
        for _ in range(count):
            file.write_bytes(forgeries.flipped(chance, forgeries.recording()))
            with outcome.trial("flipped recording", 10.0), WATCH():
                read_recording(file)
                outcome.lose("a damaged recording was read")
    return outcome


def forged_recordings(count, seed, folder):
    """Recordings with other facts and tensors, sealed again, or no files at all."""
    outcome, chance = Outcome(), random.Random(seed)
    file, other = folder / "000000.safetensors", folder / "other"
    os.mkfifo(other)
    with watched(outcome):
        for number in range(count):
            file.unlink(missing_ok=True)
            if number % 10 == 0:
                file.symlink_to(chance.choice(("/dev/zero", other, "/dev/stdin")))
            elif number % 10 == 1:
                os.mkfifo(file)
            else:
                data = forgeries.resealed(chance, forgeries.recording())
                file.write_bytes(data)
            with outcome.trial("forged recording", 10.0), WATCH():
                found = read_recordings(folder)[0]
                terms = torch.zeros(found.envs), torch.ones(found.envs)
                found.observed(*terms)
                found.objective(terms[0])
    return outcome


def controllers(count, seed, folder):
    """Folders of controllers with other manifests and weights."""
    outcome, chance = Outcome(), random.Random(seed)
    with watched(outcome):
        for _ in range(count):
            forgeries.controller(chance, folder)
            with outcome.trial("controller", 10.0), WATCH():
                load_controller(folder)(ActionSpec())
    return outcome


def topologies(count, seed, folder):
    """Grown networks with other topologies, and one that would run code."""
    outcome, chance, marker = Outcome(), random.Random(seed), folder / "ran"
    host, x = make_host("vector").eval(), make_batch("vector", 4)[0]
    state = {n: t.clone() for n, t in grown().model.host.state_dict().items()}
    topology, file = exploits.read(state), folder / "network.safetensors"
    names = exploits.every_callable()
    with watched(outcome, marker):
        for number in range(count):
            kind = chance.choice(("mutated", "mutated", "text", "function", "exploit"))
            forged = exploits.written(state, exploits.mutated(topology, chance))
            if kind == "text":
                text = json.dumps(topology).encode()
                forged = exploits.written(state, exploits.damaged_text(text, chance))
            elif kind == "function":
                step = exploits.step(chance.choice(names), ["x"])
                forged = exploits.with_steps(state, [step])
            elif kind == "exploit":
                forged = exploits.forged_state(state, marker, chance.choice((1, 2)))
            host = make_host("vector").eval()
            file.write_bytes(pack(forged, finite=False))
            with outcome.trial(f"topology, {kind}", 10.0), WATCH():
                made = esper.load(file, host) if number % 2 else rebuild(host, forged)
                if kind != "exploit":
                    with contextlib.suppress(RuntimeError):  # of a seed in a pass
                        made(x)
                else:
                    made(x)
                    outcome.lose("a network that runs code was loaded")
    with WATCH():  # the unsafe twin must be seen
        exploits.believe(exploits.chain(f"open({str(marker)!r}, 'w').close()"), x)
    if not WATCH.seen or not marker.exists():
        outcome.lose("the unsafe twin was not seen")
    WATCH.seen.clear()
    return outcome


def environments(count, seed, folder):
    """Environments that raise, hang, exit or lie, in both commands."""
    outcome = Outcome()
    register()
    for number, name in enumerate(sorted(HOSTILE)[:count]):
        for verb in ("doctor", "ppo"):
            with outcome.trial(f"{verb} {name}", 40.0):
                found = run_hostile(name, verb, folder / str(number))
                for fault in faults_of(name, verb, found):
                    outcome.lose(f"{verb} {name}: {fault}")
    return outcome


# Numbers.


class Break(Callback):
    """Puts a broken number at a random place of the learner or the world, once."""

    def __init__(self, chance):
        self._chance, self.where = chance, ""
        self._round = chance.randrange(1, 3)

    def on_rollout(self, trainer, rollout):
        if self.where or trainer.round != self._round:
            return
        trainer.algorithm.shards = [
            replace(s, world={**s.world}) for s in trainer.algorithm.shards
        ]
        worlds = [shard.world for shard in trainer.algorithm.shards]
        found = leaves(trainer.algorithm.agent, "agent") | leaves(worlds, "worlds")
        known = {n: t for n, t in found.items() if t.is_floating_point() and t.numel()}
        self.where = self._chance.choice(sorted(known))
        value = self._chance.choice((torch.nan, torch.inf, -torch.inf, 3e38, 1e-44))
        with torch.no_grad():
            flat = known[self.where].reshape(-1)
            flat[self._chance.randrange(flat.numel())] = value
        self.where += f" = {value}"


def numbers(count, seed, folder):
    """Broken numbers at any tensor of the learner and the world."""
    outcome, chance = Outcome(), random.Random(seed)
    for number in range(count):
        broken, name = Break(chance), f"run{number}"
        own = simulated(folder, name) if number % 4 else small_run(folder, name, 4)
        with outcome.trial("a broken number"):
            try:
                path = begin_run(own, [broken]).path
                newest = Run.read(path).checkpoints().latest()
                if newest is None or newest.manifest.step != 4:
                    outcome.lose(f"{broken.where}: the run did not go on")
            except EsperError as error:
                outcome.lose(f"{broken.where}: {error}")
        shutil.rmtree(folder / f"run{number}", ignore_errors=True)
    return outcome


# Time.


class Measure(Callback):
    """Memory, open files, bytes of the log and CPU time of every round."""

    def __init__(self):
        self.rows, self._last = list[tuple[float, ...]](), time.process_time()

    def on_round_end(self, trainer, record):
        now = time.process_time()
        path = Path(trainer.config.runs) / trainer.config.name / f"{STORE}-wal"
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))
        log = path.stat().st_size if path.exists() else 0
        self.rows.append((pages * 4096 / 1e6, files, log / 1e6, now - self._last))
        self._last = now


def soak(count, seed, folder):
    """A long training in which hosts grow and are pruned; what a round takes, fitted.

    A policy that knows nothing does all that is legal, about as often.
    """
    outcome, measure = Outcome(trials=count), Measure()
    config = replace(
        small_run(folder, "soak", count),
        world=World(horizon=12, decision_every=1),
        evaluation=EvalConfig(every=count, controllers=()),
        checkpoint=CheckpointConfig(every=1),
        rng_seed=seed,
    )
    begin_run(config, [measure])
    table = np.array(measure.rows)[len(measure.rows) // 4 :]
    at = np.arange(len(table))
    names = ("RSS MB", "files", "WAL MB", "CPU s")
    for name, values in zip(names, table.T, strict=True):
        slope, error = _slope(at, values)
        drift = slope * len(at)
        outcome.notes.append(
            f"soak: {name} mean {values.mean():.4g}, slope {slope:.2g} ± {error:.2g}"
        )
        if name == "WAL MB":  # a sawtooth: SQLite empties it at 4 MB
            if values.max() > LARGEST_LOG:
                outcome.lose(f"the log has {values.max():.0f} MB")
        elif slope > 3 * error and drift > 0.05 * values.mean():
            outcome.lose(f"{name} drifts by {drift:.3g} over {len(at)} rounds")
    return outcome


def _slope(at, values):
    """The slope of a line through values, and its standard error in ten blocks."""
    parts = [p for p in np.array_split(np.arange(len(at)), 10) if len(p)]
    x = np.array([at[p].mean() for p in parts])
    y = np.array([np.median(values[p]) for p in parts])
    if len(parts) < 4:
        return 0.0, 0.0
    (slope, _), covariance = np.polyfit(x, y, 1, cov=True)
    return float(slope), float(np.sqrt(covariance[0, 0]))


def broken_code(count, seed, folder):
    """Mutants of learner and growth, each of which a test must catch."""
    outcome = Outcome()
    step = len(mutants.MUTANTS) / count
    for mutant in (mutants.MUTANTS[int(step * number)] for number in range(count)):
        outcome.trials += 1
        if not mutants.caught(mutant):
            outcome.lose(f"survived: {mutant.what}")
    return outcome


@dataclass(frozen=True)
class Part:
    """Trials of one kind."""

    run: Callable[[int, int, Path], Outcome]
    trials: int
    """At full size."""
    batches: int = 1
    least: int = 1


PARTS = {
    "kills": Part(kills, 60, 6),
    "disk errors": Part(disk_errors, 128, 2),
    "signals": Part(signals, 20, 4),
    "checkpoints": Part(checkpoints, 10_000, 10),
    "stores": Part(stores, 2_000, 10),
    "settings": Part(configurations, 5_000, 5),
    "command lines": Part(command_lines, 5_000, 5),
    "hostile files": Part(hostile_files, 250, 5),
    "agents": Part(agents, 1_000, 5),
    "flipped recordings": Part(flipped_recordings, 3_000, 5),
    "forged recordings": Part(forged_recordings, 200, 2),
    "controllers": Part(controllers, 500, 5),
    "topologies": Part(topologies, 1_000, 5),
    "environments": Part(environments, len(HOSTILE)),
    "broken numbers": Part(numbers, 1_000, 20),
    "soak": Part(soak, 1_500, least=40),
    "mutants": Part(broken_code, len(mutants.MUTANTS), 1),
}


def play(name: str, batch: int, scale: float) -> Outcome:
    """One batch of a part."""
    part = PARTS[name]
    count = max(round(part.trials * scale / part.batches), part.least)
    with tempfile.TemporaryDirectory(prefix="esper-campaign-") as folder:
        return part.run(count, 1_000 * batch + 1, Path(folder))


def show(found: list[dict]) -> int:
    """Print the table; returns how many trials were bad."""
    head = ("part", "trials", "lost", "hung", "tracebacks", "executed", "slowest, s")
    print(f"\n| {' | '.join(head)} | peak, MB | seconds |\n|{'---|' * 9}")
    bad, notes = 0, []
    for name in PARTS:
        rows = [row for row in found if row["part"] == name]
        if rows:
            sums = [sum(row[k] for row in rows) for k in ("trials", *head[2:6])]
            worst = max(row["slowest"] for row in rows)
            peak = max(row["peak"] for row in rows)
            seconds = sum(row["seconds"] for row in rows)
            cells = (name, *sums, f"{worst:.2f}", f"{peak:.0f}", f"{seconds:.0f}")
            print(f"| {' | '.join(map(str, cells))} |")
            bad += sum(sums[1:])
            notes += [f"{name}: {note}" for row in rows for note in row["notes"][:5]]
    print(*notes, sep="\n")
    print(f"{bad} bad trials")
    return bad


def run() -> int:
    """Play what is left and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the trials")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--out", type=Path, default=Path("build/campaign.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", EsperWarning)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = options.out.read_text().splitlines() if options.out.exists() else []
    found = [json.loads(line) for line in lines]
    found = [row for row in found if row["scale"] == options.scale]
    known = {(row["part"], row["batch"]) for row in found}
    for name in options.parts:
        for batch in range(PARTS[name].batches):
            if (name, batch) in known:
                continue
            began = time.perf_counter()
            outcome = play(name, batch, options.scale)
            seconds = time.perf_counter() - began
            about = {"part": name, "batch": batch, "scale": options.scale}
            found.append({**about, "seconds": seconds, **asdict(outcome)})
            with options.out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
            print(
                f"{name} {batch + 1}/{PARTS[name].batches}: {outcome.trials} trials, "
                f"{outcome.bad} bad, {seconds:.0f} s",
                flush=True,
            )
    return min(show(found), 99)


if __name__ == "__main__":
    sys.exit(run())
