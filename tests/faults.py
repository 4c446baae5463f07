"""Harm workers, clusters and drivers in a real training, and count what is lost.

    python -m tests.faults                          all of it, about two hours
    python -m tests.faults --times 1                every fault once
    python -m tests.faults --parts bits campaigns   some parts

A small training on real tasks is played here, alone. Then it is played by workers that
are killed, stopped, broken or cut off. It must come to the same weights and the same
rows of the store, to the bit; or end in one line and do so when it is resumed. Nothing
may be left running, and nothing may take longer than the undisturbed training, from a
cold start, and the deadline and ten seconds. The exit code is 1 if anything is amiss.

Deeds that a worker does to itself wait for the middle of a job: for a host's step. They
share one pool, or cluster, until one of them ends its driver. Processes are told apart
by a variable of their environment.
"""

import argparse
import json
import os
import queue
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from esper.contracts.errors import EsperError, WorkersError
from esper.environment.growing import GrowingWorld
from esper.runs.run import Run
from esper.runs.settings import as_toml
from esper.runs.train_config import CheckpointConfig, EvalConfig
from esper.training.controller_ppo import play_shard
from esper.training.loop import OnRoundEnd
from esper.training.recordings import RecordConfig, record
from esper.training.train import begin_run, resume_run
from esper.workers.jobs import Workers, workers
from tests.cli.calls import assert_one_line, command, environment
from tests.training.killed_runs import digest, rows_of, small_run

TAG = "ESPER_FAULTS"
"""Environment variable of all processes of some trials."""
DEADLINE = 20.0
SLACK = 10.0
"""Seconds that a trial may take beyond deadline and cold start."""
FIRST = 600.0
"""Seconds until a driver must be ready, on the slowest of machines."""
EVERY = 4
"""Results of a campaign after which a worker is killed, again and again."""
ROUNDS = 4
ENGINES = ("processes", "ray")
PRIVATE = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the driver finds 127.0.0.1
}


def training(folder, name, rounds=ROUNDS):
    """Two real tasks; judged twice on the way and at the end."""
    return replace(
        small_run(folder, name, rounds),
        evaluation=EvalConfig(every=rounds // 2, hosts=1, controllers=("never",)),
        checkpoint=CheckpointConfig(every=1),
    )


def outcome_of(path):
    """The last weights and all rows of a run that is complete."""
    run = Run.read(path)
    if run.finished is None:
        return None
    kept = run.checkpoints()
    return digest(kept.load(max(kept.steps())).tensors), rows_of(path)


# Processes.


def tagged(tag, kind=""):
    """Processes with a tag in their environment, and some words in their command."""
    found = []
    for each in Path("/proc").iterdir():
        if not each.name.isdigit() or int(each.name) == os.getpid():
            continue
        with suppress(OSError):
            if f"{TAG}={tag}".encode() in (each / "environ").read_bytes().split(b"\0"):
                told = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                if kind in told:
                    found.append(int(each.name))
    return found


def workers_of(tag):
    """Processes that do jobs, or will."""
    kinds = ("spawn_main", "ray::IDLE", "ray::do_checked_job", "default_worker.py")
    found = {pid for kind in kinds for pid in tagged(tag, kind)}
    return sorted(found - {*tagged(tag, "/raylet/raylet")})  # knows how to start them


def born(pid):
    """When a process was started, in ticks of the system."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return 0


def kill(pid, number=signal.SIGKILL):
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def left_over(tag, seconds=75.0):
    """Commands of the processes that outlive what started them; they are killed.

    Agents of a raylet that was killed try for a minute to tell somebody.
    """
    until = time.monotonic() + seconds
    while (left := tagged(tag)) and time.monotonic() < until:
        time.sleep(0.2)
    found = []
    for pid in left:
        with suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "))
        kill(pid)
    return found


# Results.


@dataclass
class Row:
    """What became of the trials of one fault."""

    fault: str
    engine: str
    times: int = 0
    same: int = 0
    """Trials that ended by themselves, with the same bits."""
    resumable: int = 0
    """Trials that ended in one line and had the same bits after a resume."""
    hung: int = 0
    orphans: int = 0
    longest: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self):
        lost = self.times - self.same - self.resumable
        return bool(lost or self.hung or self.orphans or not self.times)

    def add(self, ended, seconds, note=""):
        """One trial: "same", "resumable", "hung" or what else became of it."""
        self.times += 1
        self.longest = max(self.longest, seconds)
        if ended in ("same", "resumable", "hung"):
            setattr(self, ended, getattr(self, ended) + 1)
        if ended != "same":
            self.notes.append(f"{self.fault}, {self.engine}: {ended} {note}"[:400])

    def leave(self, commands):
        """Processes were left running."""
        self.orphans += len(commands)
        self.notes += [f"{self.fault}, {self.engine}: left {c}"[:300] for c in commands]

    def line(self):
        cells = (self.times, self.same, self.resumable, self.hung, self.orphans)
        cells = (self.fault, self.engine, *cells, f"{self.longest:.0f}")
        return f"| {' | '.join(map(str, cells))} |"


HEAD = ("fault", "engine", "times", "same bits", "resumable", "hung", "orphans")


# What a worker does to itself.


@contextmanager
def in_a_host(deed):
    """Do something in the middle of the next host's training, once."""
    step, steps = GrowingWorld.step, iter(range(99))

    def harmed(self, actions):
        if next(steps) == 1:
            deed()
        return step(self, actions)

    GrowingWorld.step = harmed
    try:
        yield
    finally:
        GrowingWorld.step = step


def breaks():
    raise ZeroDivisionError("a host broke")


def myself(number):
    return lambda: os.kill(os.getpid(), number)


def misshapen(result):
    """A rollout that lacks an environment; figures that are none."""
    columns = {name: column[:1, :1] for name, column in result.columns.items()}
    return replace(result, columns=columns)


INSIDE = {
    "killed": myself(signal.SIGKILL),
    "stopped": myself(signal.SIGSTOP),
    "exception in a host": breaks,
}
"""Deeds in the middle of a job."""


def harmed(deed, phase, mark, function, shared, job):
    """A job, whose first worker in this phase does something bad."""
    now = "rollout" if function is play_shard else "judging"
    try:
        due = phase == now and not os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        due = False
    if due and deed == "wrong shape":
        return misshapen(function(shared, job))
    with in_a_host(INSIDE[deed]) if due else nullcontext():
        return function(shared, job)


# Faults that a driver lives through: one driver, many trials.


@dataclass(frozen=True)
class Fault:
    """Something that happens in a training."""

    deed: str
    phase: str
    engines: tuple[str, ...] = ENGINES
    env: dict[str, str] = field(default_factory=dict)

    def __str__(self):
        return f"{self.deed}, {self.phase}"


LIVED = [
    Fault("killed", "start"),
    Fault("killed", "rollout"),
    Fault("killed", "judging"),
    Fault("killed", "idle"),
    Fault("stopped", "rollout"),
    Fault("stopped", "judging"),
    Fault("exception in a host", "rollout"),
    Fault("exception in a host", "judging"),
    Fault("wrong shape", "rollout"),
    Fault("object store full", "spilled", ("ray",)),
    # Rollouts are small here: let them take the way of large ones.
    Fault(
        "object store full",
        "not spilled",
        ("ray",),
        {
            "RAY_automatic_object_spilling_enabled": "0",
            "RAY_max_direct_call_object_size": "1000",
        },
    ),
]


def fill(pool):
    """Objects that leave no room in the store of a cluster."""
    ray, held = pool._ray, []
    for size in (16 << 20, 1 << 20, 1 << 16, 1 << 12):
        with suppress(ray.exceptions.ObjectStoreFullError):
            for _ in range(20):
                held.append(ray.put(np.zeros(size, dtype=np.uint8)))
    return held


@contextmanager
def harm(fault, pool, mark):
    """Let a fault happen in what is trained meanwhile."""
    tag, chance = os.environ[TAG], random.Random()
    give, threads, calls, held = pool._submit, [], [], []
    if fault.deed == "object store full":
        held = fill(pool)
    elif fault.phase in ("start", "idle"):
        before = set(workers_of(tag))
        if fault.phase == "start":
            for pid in before:
                kill(pid)
            threads.append(threading.Thread(target=kill_new, args=(tag, before)))
            threads[0].start()
    else:
        wrap = partial(partial, harmed, fault.deed, fault.phase, str(mark))
        pool._submit = lambda function, *what: give(wrap(function), *what)

    def between(record):
        calls.append(record.round)
        if fault.phase == "idle" and record.round == 2:
            for pid in chance.sample(workers_of(tag), 1):
                kill(pid)
            time.sleep(chance.choice((0, 1)))

    try:
        yield OnRoundEnd(between)
    finally:
        pool._submit = give
        held.clear()
        for thread in threads:
            thread.join()


def kill_new(tag, before):
    """Kill one of the workers that are being started."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if new := {*workers_of(tag)} - before:
            time.sleep(random.uniform(0, 2))
            kill(min(new))
            return
        time.sleep(0.05)


def drive(numbers, engine, times, folder):
    """Play trials of some faults, and say in lines of JSON what became of them."""
    torch.set_num_threads(1)
    folder, ray = Path(folder), "local" if engine == "ray" else None

    def tell(*what):
        print(json.dumps(what), flush=True)

    with workers(2, ray=ray, deadline=DEADLINE) as pool:
        begin_run(training(folder, "cold"), [], pool)
        whole = outcome_of(folder / "cold")
        tell("ready", json.dumps(whole))
        for number in json.loads(numbers):
            for trial in range(int(times)):
                path = folder / f"fault{number}-{trial}"
                tell(*lived_through(LIVED[number], pool, path, whole))
    tell("over", "")


def lived_through(fault, pool, path, whole):
    """What became of one trial, and what was said."""
    ended, note, mark = "same", "", path.with_suffix(".mark")
    try:
        with harm(fault, pool, mark) as callback:
            begin_run(training(path.parent, path.name), [callback], pool)
    except WorkersError as error:
        ended, note = "resumable", str(error)
        resume_run(path, [], pool)
    if fault.phase in ("rollout", "judging") and not mark.exists():
        ended = "nothing happened"
    if outcome_of(path) != whole:
        ended = "other bits"
    return ended, note


def lived(numbers, engine, times, fresh, whole):
    """Rows of faults that a driver should live through; one that does not is replaced.

    Faults of the same environment have one driver, since a cluster starts slowly.
    """
    waiting = [*numbers]
    while waiting:
        first = LIVED[waiting[0]]
        now = [number for number in waiting if LIVED[number].env == first.env]
        tag, began = secrets.token_hex(8), time.monotonic()
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                "import sys; from tests.faults import drive; drive(*sys.argv[1:])",
                *map(str, (now, engine, times, fresh())),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**{TAG: tag}, **first.env),
        )
        said, limit = heard(process), FIRST
        rows = {number: Row(str(LIVED[number]), engine) for number in now}
        order = [number for number in now for _ in range(times)]
        number, ended = now[0], ""
        while ended != "over":
            try:
                ended, note = json.loads(said.get(timeout=limit))
            except (queue.Empty, TypeError):
                died = process.poll()
                why = "hung" if died is None else f"the driver ended with {died}"
                rows[order[0] if order else now[-1]].add(why, time.monotonic() - began)
                break
            seconds = time.monotonic() - began
            began += seconds
            if ended == "ready":
                limit = seconds + DEADLINE + SLACK
                if json.loads(note) != json.loads(json.dumps(whole)):
                    rows[number].add("other bits than alone", seconds)
            elif ended != "over":
                number = order.pop(0)
                rows[number].add(ended, seconds, note)
                if order and order[0] != number:
                    yield rows[number]
        else:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
        process.kill()
        last = order[0] if order else now[-1]
        rows[last].leave(left_over(tag))
        process.wait()
        yield rows[last]
        done = [number for number in rows if rows[number].times]
        waiting = [number for number in waiting if number not in done]


def heard(process):
    """The lines that a process says in JSON, and None when it has ended."""
    lines = queue.Queue()

    def hear():
        for line in process.stdout:
            if line.startswith("["):  # Ray speaks too
                lines.put(line)
        lines.put(None)

    threading.Thread(target=hear, daemon=True).start()
    return lines


# Faults that end a driver: one for each trial.


def raylet(process, tag):
    for pid in tagged(tag, "/raylet/raylet"):
        kill(pid)


def driver(process, tag):
    process.kill()


def interrupt(process, tag):
    process.send_signal(signal.SIGINT)


def interrupt_twice(process, tag):
    for pid in workers_of(tag)[:1]:
        kill(pid, signal.SIGSTOP)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(1)


ENDING = {
    "raylet killed": (raylet, ("ray",), (6,)),
    "driver killed": (driver, ENGINES, (-9,)),
    "Ctrl-C": (interrupt, ENGINES, (130,)),
    # The second one may find an interpreter that is ending and no longer handles it.
    "Ctrl-C twice, a worker stopped": (interrupt_twice, ENGINES, (130, -signal.SIGINT)),
}
"""What is done, to which engines, and the exit codes that may come of it."""


def ending(fault, engine, times, folder, whole):
    """Trials of a fault that ends the command, which is then resumed here."""
    row, (deed, _, codes) = Row(fault, engine), ENDING[fault]
    options = ["--workers", "2", "--deadline", f"{DEADLINE:g}"]
    options += ["--ray"] if engine == "ray" else []
    for trial in range(times):
        path, tag = folder / f"run{trial}", secrets.token_hex(8)
        file, told = folder / f"{trial}.toml", folder / f"{trial}.err"
        file.write_text(as_toml(training(folder, path.name)))
        with told.open("w") as err:
            process = subprocess.Popen(
                command("train", "--config", str(file), *options),
                stdout=subprocess.DEVNULL,
                stderr=err,
                env=environment(**{TAG: tag}),
                # Whatever runs in the background ignores Ctrl-C, and so do children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        second, until = (
            path / "checkpoints/000002.safetensors",
            time.monotonic() + FIRST,
        )
        while not second.exists() and process.poll() is None:
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        time.sleep(random.uniform(0, 0.5))
        deed(process, tag)
        began = time.monotonic()
        try:
            code = process.wait(DEADLINE + SLACK)
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        seconds = time.monotonic() - began
        row.leave(left_over(tag))
        row.add(outcome_of_command(path, whole, code, codes, told.read_text()), seconds)
    return row


def outcome_of_command(path, whole, code, codes, told):
    """What became of a command: its exit code, None if it hung, and what it said."""
    if code is None:
        return "hung"
    if code and code not in codes:
        return f"exit code {code}: {told}"
    if code not in (0, -signal.SIGKILL, -signal.SIGINT, 130):
        try:
            assert_one_line(told)
        except AssertionError:
            return f"not one line: {told}"
    if Run.read(path).finished is None:
        resume_run(path)
    if outcome_of(path) != whole:
        return "other bits"
    return "resumable" if code else "same"


# The same bits whoever plays.


def bits(folder, rounds=20):
    """Rows for the same training with several kinds and numbers of workers."""
    begin_run(training(folder, "whole", rounds))
    whole, rows = outcome_of(folder / "whole"), []

    def play(name, pools):
        row, began = Row("none, 20 rounds", name), time.monotonic()
        own, path = training(folder, f"run{len(rows)}", rounds), None
        share = rounds if len(pools) == 1 else 3

        def tell(record):
            if len(pools) > 1 and record.round % share == 0:
                signal.raise_signal(signal.SIGINT)

        number = 0
        while path is None or Run.read(path).finished is None:
            pool = pools[number % len(pools)]
            if path is None:
                path = begin_run(own, [OnRoundEnd(tell)], pool).path
            else:
                resume_run(path, [OnRoundEnd(tell)], pool)
            number += 1
        same = outcome_of(path) == whole
        row.add("same" if same else "other bits", time.monotonic() - began)
        rows.append(row)
        print(row.line(), flush=True)

    with workers(1) as one, workers(2) as two, workers(4) as four:
        for count, pool in ((1, one), (2, two), (4, four)):
            play(f"{count} processes", [pool])
        play("0, 1, 2, 4 by turns", [Workers(), two, one, four])
        if find_spec("ray"):
            with workers(2, ray="local") as ray:
                play("ray", [ray])
                play("ray, 0, 4 by turns", [ray, Workers(), four])
    return rows


# Several nodes.


def cluster(times, folder, whole):
    """A training on three nodes, one of which dies, in a process of its own."""
    row, tag = Row("node killed", "ray, 3 nodes"), secrets.token_hex(8)
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from tests.faults import drive_cluster as d; d(*sys.argv[1:])",
            *map(str, (times, folder)),
        ],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(
            **{TAG: tag, "RAY_AUTH_TOKEN": secrets.token_hex(32)}, **PRIVATE
        ),
    )
    timer = threading.Timer(FIRST + times * 5 * (DEADLINE + SLACK), process.kill)
    timer.start()
    for line in process.stdout:
        if line.startswith("["):
            ended, seconds, note = json.loads(line)
            row.add(ended, seconds, note)
    process.wait()
    timer.cancel()
    if row.times < times:
        row.add(f"the driver ended with {process.returncode}", 0.0)
    row.leave(left_over(tag))
    for trial in range(times):
        if outcome_of(folder / f"run{trial}") != whole:
            row.same -= 1
    return row


def drive_cluster(times, folder):
    """Three nodes of one core; one of those without the driver is killed each time."""
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    folder = Path(folder)
    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    node["node_ip_address"] = "127.0.0.1"
    nodes = Cluster(initialize_head=True, head_node_args=node)
    others = [nodes.add_node(**node) for _ in range(2)]
    nodes.wait_for_nodes()
    with workers(3, ray=nodes.address, deadline=DEADLINE) as pool:
        begin_run(training(folder, "cold"), [], pool)
        for trial in range(int(times)):
            doomed, timers = others.pop(0), []

            def kill_node(record, doomed=doomed, timers=timers):
                if record.round == 1:
                    remove = partial(nodes.remove_node, doomed, allow_graceful=False)
                    timers.append(threading.Timer(random.uniform(0, 1), remove))
                    timers[0].start()

            began, ended, note = time.monotonic(), "same", ""
            try:
                config = training(folder, f"run{trial}")
                begin_run(config, [OnRoundEnd(kill_node)], pool)
            except EsperError as error:
                ended, note = "ended", str(error)
            timers[0].join()
            seconds = time.monotonic() - began
            print(json.dumps((ended, seconds, note)), flush=True)
            others.append(nodes.add_node(**node))
            nodes.wait_for_nodes()
    nodes.shutdown()


# Campaigns.


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def campaign(kind, folder, pool=0, ray=None):
    """Make some recordings, or count parts of the evidence."""
    from research.evidence import BLIND, Part, counted

    if kind == "recordings":
        with workers(pool, ray=ray) as who:
            record(RecordConfig(tasks=24, scripts=8), folder, who)
        return
    common = {"question": "known", "task": "drawn 0", "rent": None, "hosts": 1}
    parts = [Part(arm=arm, rates=(1.0, 2.0), **common) for arm in BLIND]
    counted(parts, folder, pool or 1, "parts", ray)


def campaigns(folder):
    """Recordings and parts of the evidence, while workers die again and again."""
    script = (
        "import sys; from tests.faults import drive_campaign as d; d(*sys.argv[1:])"
    )
    rows = []
    for kind in ("recordings", "evidence"):
        campaign(kind, folder / kind)
        for engine in ENGINES:
            if engine == "ray" and not find_spec("ray"):
                continue
            row = Row(f"{kind}, worker killed after every {EVERY} results", engine)
            tag, there = secrets.token_hex(8), folder / f"{kind} {engine}"
            began, killed = time.monotonic(), 0
            process = subprocess.Popen(
                [sys.executable, "-c", script, kind, engine, str(there)],
                env=environment(**{TAG: tag}),
                stderr=subprocess.DEVNULL,
            )
            while process.poll() is None and time.monotonic() < began + 3 * FIRST:
                time.sleep(0.05)
                found = workers_of(tag)
                if found and len([*there.glob("*.*")]) >= EVERY * (killed + 1):
                    kill(min(found, key=born))  # its job has not been lost just now
                    killed += 1
            hung = process.poll() is None
            process.kill()
            process.wait()
            same = contents(there) == contents(folder / kind)
            ended = "hung" if hung else "same" if same and killed else "other results"
            row.add(ended, time.monotonic() - began, f"exit {process.returncode}")
            row.notes.append(f"{row.fault}, {engine}: {killed} workers were killed")
            row.leave(left_over(tag))
            rows.append(row)
            print(row.line(), flush=True)
    return rows


def drive_campaign(kind, engine, there):
    """One campaign, to its end."""
    torch.set_num_threads(1)
    campaign(kind, Path(there), 2, "local" if engine == "ray" else None)


# All of it.


PARTS = ("bits", "faults", "cluster", "campaigns")


def play(options, folder):
    """Rows of all parts, printed as they come."""

    def fresh():
        return Path(tempfile.mkdtemp(dir=folder))

    rows, engines = [], ENGINES if find_spec("ray") else ENGINES[:1]
    if "bits" in options.parts:
        rows += bits(fresh())
    whole = None
    if {"faults", "cluster"} & {*options.parts}:
        whole = outcome_of(begin_run(training(fresh(), "whole")).path)

    def chosen(fault, own):
        if options.only and not any(word in fault for word in options.only):
            return []
        return [each for each in own if each in engines and each in options.engines]

    if "faults" in options.parts:
        for engine in engines:
            numbers = [
                number
                for number, fault in enumerate(LIVED)
                if engine in chosen(str(fault), fault.engines)
            ]
            for row in lived(numbers, engine, options.times, fresh, whole):
                rows.append(row)
                print(row.line(), *row.notes, sep="\n", flush=True)
            for fault, (_, own, _) in ENDING.items():
                if engine in chosen(fault, own):
                    rows.append(ending(fault, engine, options.times, fresh(), whole))
                    print(rows[-1].line(), *rows[-1].notes, sep="\n", flush=True)
    if "cluster" in options.parts and "ray" in engines:
        rows.append(cluster(options.times, fresh(), whole))
        print(rows[-1].line(), *rows[-1].notes, sep="\n", flush=True)
    if "campaigns" in options.parts:
        rows += campaigns(fresh())
    return rows


def run():
    """Play and print the table; 1 if anything was lost, hung or left running."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--times", type=int, default=10, help="trials of each fault")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=[*PARTS])
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=[*ENGINES])
    parser.add_argument("--only", nargs="*", help="faults with one of these words")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not find_spec("ray"):
        print("Ray is not installed: its faults are left out.")
    with tempfile.TemporaryDirectory(prefix="esper-faults-") as folder:
        rows = play(options, folder)
    print(f"\n| {' | '.join(HEAD)} | longest, s |\n|{'---|' * 8}")
    print(*(row.line() for row in rows), sep="\n")
    print(*(note for row in rows for note in row.notes), sep="\n")
    bad = [row for row in rows if row.bad]
    print(f"{len(bad)} of {len(rows)} faults lost, hung or left something.")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(run())
