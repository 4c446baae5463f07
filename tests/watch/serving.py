"""A server of its own, requests to it byte by byte, and stores to show."""

import http.client
import json
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

import esper.report
from esper.cli import main
from esper.runs.run import STORE, Run
from esper.runs.store import Store
from esper.watch.reading import run_id
from tests.cli.calls import command, environment
from tests.report.runs import evaluate, play
from tests.resume_script import BATCHES, Training

TASK, BLUEPRINTS = "letter", ("widen_x2", "widen_x4")
HEADS = {"op": {"chosen": "WAIT", "legal": {"WAIT": 0.9, "GERMINATE": 0.1}}}
FEATURES = {"host": {"score": 0.4, "rent": None}, "seeds": [], "offers": {}}


@dataclass(frozen=True)
class Server:
    """A running `esper watch --web`."""

    address: str
    process: subprocess.Popen

    @property
    def host(self):
        return urlsplit(self.address).netloc

    def page(self, name, view="learning", **more):
        """The address of a view of the run in a folder of this name."""
        rest = "".join(f"&{key}={quote(str(value))}" for key, value in more.items())
        return f"{self.address}#view={view}&run={run_id(name)}{rest}"

    def get(self, path, headers=None, method="GET"):
        """Status, headers and text of an answer; `headers` replaces the host's."""
        link = http.client.HTTPConnection(self.host, timeout=20)
        try:
            link.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers or [("Host", self.host)]:
                link.putheader(name, value)
            link.endheaders()
            answer = link.getresponse()
            return answer.status, answer.headers, answer.read().decode()
        finally:
            link.close()

    def json(self, path):
        status, _, text = self.get(path)
        return status, json.loads(text)

    def send(self, data):
        """The first bytes that are answered to raw bytes; none if it hangs up."""
        host, _, port = self.host.partition(":")
        link = socket.create_connection((host, int(port)), timeout=20)
        with link, suppress(OSError):
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            return link.recv(65_536).decode("latin1")
        return ""


@contextmanager
def serving(root, *options):
    """`esper watch --web` for a folder, until the end of the block."""
    arguments = ("watch", "--web", "--port", "0", "--runs", str(root), *options)
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(PYTHONUNBUFFERED="1"),
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("Open http://127.0.0.1:"), line
        yield Server(line.split()[1], process)
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()


PRELOADED = ["tests.watch.serving", "esper.training.train", "esper.rl.training"]
"""Modules that trainings share, since each import takes seconds."""


def run_command(*arguments):
    """Run a command without its report, in a process of its own."""
    esper.report.write_report = lambda path: path
    sys.exit(main(arguments))


def run_grower(path):
    """Grow a network with the trained controller; writes a run."""
    training = Training("tamiyo", [path])
    training.run(BATCHES)
    training.grower.close()


def shown_run(root, name="fern", *, task=TASK, rounds=3, **options):
    """Create a run that fills every view; returns its folder."""
    root.mkdir(exist_ok=True)
    facts = {"rng_seed": 0, "tasks": [task]}
    toml = f"[budget]\nrounds = {rounds}\n"
    with Run.create(root, name, toml, facts) as run:
        with Store(run.path / STORE, run.id) as store:
            store.begin_attempt()
            fill(store, range(1, rounds + 1), task, **options)
            evaluate(store, [task], ("Tamiyo", "never"), rounds)
        run.finish({"rounds": rounds})
    return run.path


def fill(store, rounds, task=TASK, blueprints=BLUEPRINTS, heads=HEADS, seen=FEATURES):
    """Add rounds of which every host is recorded in detail."""
    for number in rounds:
        where = {"round": number, "task": task, "episode": number, "env": 0}
        for index, width in enumerate((16, 24)):
            store.add(
                "layers",
                **where,
                step=5 * number - 4,
                layer=index,
                name=f"hidden{index}",
                width=width,
            )
        for step in range(5 * number - 4, 5 * number + 1):
            figures = {"score": 0.01 * step, "loss": 1 / step, "reward": 0.1}
            store.add("steps", **where, step=step, **figures)
            store.add(
                "decisions",
                **where,
                step=step,
                action=f"wait at {step}",
                value=0.5,
                features=json.dumps(seen),
                heads=json.dumps(heads),
            )
        store.add("layers", **where, step=5 * number, layer=1, name="hidden1", width=48)
        play(store, [task], blueprints, [number])
