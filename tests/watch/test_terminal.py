"""`esper watch` in a terminal: real runs through a pseudo-terminal, and odd stores."""

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from math import nan

import pytest
import torch
from rich.cells import cell_len
from rich.console import Console
from torch.nn.functional import cross_entropy

from esper import Grower
from esper.runs.progress import BARS
from esper.runs.run import STORE, Run
from esper.runs.store import Store
from esper.watch.reading import open_run
from esper.watch.terminal import STAGES, STALLED, Picture
from tests.cli.calls import call, environment
from tests.growth.hosts import make_batch, make_host
from tests.report.runs import make_run
from tests.runs.stores import record

HOSTILE = "[red]x[/red][/]\x1b[2J\x1b]0;pwn\x07\u202e\r\nend"
SHOWN = "[red]x[/red][/]?[2J?]0;pwn????end"
PATIENCE = 60
WATCH = "import sys, pathlib; from esper.watch.terminal import watch; "
WATCH += "watch(pathlib.Path(sys.argv[1]))"
TRAIN = "import sys, pathlib; from tests.training import killed_runs as k; "
TRAIN += "from esper.training.train import begin_run as train; "
TRAIN += "from esper.rl.training import begin_ppo as ppo; kind = sys.argv[2]; "
TRAIN += "{'train': train, 'ppo': ppo}[kind]("
TRAIN += "{'train': k.small_run, 'ppo': k.small_ppo}[kind](pathlib.Path(sys.argv[1]),"
TRAIN += " 'fern', 12))"


class Watcher:
    """A process that watches a run through a pseudo-terminal of its own."""

    def __init__(self, run, columns, lines=50):
        self._end, inner = pty.openpty()
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(inner, termios.TIOCSWINSZ, size)
        self._process = subprocess.Popen(
            [sys.executable, "-c", WATCH, str(run)],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment(TERM="xterm-256color", COLUMNS=None, LINES=None),
        )
        os.close(inner)
        self.columns, self.output = columns, b""

    def until(self, *words):
        """The last whole picture, as soon as it has all words."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if select.select([self._end], [], [], 0.3)[0]:
                self.output += os.read(self._end, 1 << 16)
                continue
            whole = self.output.decode(errors="ignore").split("\x1b[H")[-1]
            picture = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", whole)
            if all(word in picture for word in words):
                return picture
        raise AssertionError(f"no {words} in {picture}")

    def ended(self):
        """Its exit code and what it wrote after Ctrl-C."""
        self._process.send_signal(signal.SIGINT)
        while True:
            try:
                part = os.read(self._end, 1 << 16)
            except OSError:  # the other end is closed
                part = b""
            if not part:
                break
            self.output += part
        os.close(self._end)
        return self._process.wait(PATIENCE)


@pytest.mark.parametrize("kind", ["train", "ppo"])
def test_real_runs_are_followed_from_before_they_begin_to_their_end(kind, tmp_path):
    run = tmp_path / "fern"
    watchers = [Watcher(run, columns) for columns in (80, 140)]
    for one in watchers:
        one.until("▲ ", "fern is no run")
    subprocess.run([sys.executable, "-c", TRAIN, str(tmp_path), kind], check=True)
    for one in watchers:
        picture = one.until("finished", "round 12")
        assert one.ended() == 0
        assert one.output.startswith(b"\x1b[?1049h")
        assert one.output.rstrip().endswith(b"\x1b[?25h")
        assert b"\x1b[?1049l" in one.output[-200:]
        assert "Traceback" not in picture
        lines = picture.splitlines()
        assert max(map(cell_len, lines)) <= one.columns
        with open_run(run) as reader:
            last, events = reader.rounds()[-1], reader.events(1)
            head, hosts = reader.heads()[-1], reader.hosts()
            for label, value in (
                ("return", last.mean_return),
                ("KL", last.kl),
                ("clip fraction", last.clip_fraction),
                ("explained variance", last.explained_variance),
                (f"entropy {head.head}", head.entropy),
            ):
                shown = rf"^{label} +[{BARS} ]+ ([●▲] )?{value:.3g} "
                assert re.search(shown, picture, re.M), label
            if kind == "ppo":
                assert "validation score   ◌ ◌ not measured" in picture
                assert "none: this run trains an agent" in picture
                continue
            for host in hosts:
                cells = {slot.slot: STAGES[slot.stage][0] for slot in host.slots}
                row = next(x for x in lines if f"{host.task:<14} {host.env:>3}  " in x)
                assert f"{host.score:.3g}" in row
                for slot, sign in cells.items():
                    assert row.partition(f"{host.score:.3g}")[2].strip()[slot] == sign
            assert events[0].what in picture


def drawn(path, columns=100, *, colours=False, silent=0):
    file = io.StringIO()
    console = Console(
        file=file,
        width=columns,
        force_terminal=colours,
        color_system="standard" if colours else None,
    )
    with open_run(path) as reader:
        console.print(Picture(reader, (columns, 99), silent))
    return file.getvalue()


def test_a_run_is_printed_once_without_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    make_run(tmp_path, tasks=("letter",))
    result = call(capsys, "watch", "fern", "--runs", str(tmp_path), "--once")
    assert (result.code, result.err) == (0, "")
    assert "\x1b" not in result.out
    assert max(map(cell_len, result.out.splitlines())) <= 80
    assert "fern  training  finished  round 6" in result.out
    assert re.search(r"^letter +0  ◌ not measured  K·  ", result.out, re.M)
    assert call(capsys, "watch", "fern", "--runs", str(tmp_path)).out == result.out
    monkeypatch.setattr("esper.cli.watch.find_spec", lambda name: None)
    assert 'pip install ".[web]"' in call(capsys, "watch", "--web").err


def stored(folder, *records, finished=True):
    """The folder of a run with these rounds."""
    with Run.create(folder, "fern", "", {"rng_seed": 0, "tasks": ["letter"]}) as run:
        with Store(run.path / STORE, run.id) as store:
            store.begin_attempt()
            for one in records:
                store.add_round(one)
            store.add_note(1, "refused", "a loss was not finite")
        if finished:
            run.finish({"rounds": len(records)})
    return run.path


def test_problems_are_alarms_and_missing_figures_never_look_healthy(tmp_path):
    good = [record(number) for number in range(1, 6)]
    bad = record(6, clip_fraction=nan, explained_variance=-9.0, refused=3)
    text = drawn(stored(tmp_path, *good, bad, finished=False), colours=True)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    for line in (
        "▲ stopped before its end",
        "▲ 3 optimizer steps were skipped: not finite",
        "▲ clip fraction is nan: too much is clipped",
        "▲ explained variance is -9: useless",
        "▲ refused: a loss was not finite",
        "◌ curves with gaps: 1",
    ):
        assert f"\n{line}" in plain, line
    assert "no alarms" not in plain
    assert re.search(r"^KL .* ● 0.01$", plain, re.M)
    assert re.search(r"^clip fraction .* ▲ nan$", plain, re.M)
    assert re.search(r"^validation score .* ◌ not measured$", plain, re.M)
    signs = {sign: {*re.findall(rf"\x1b\[([0-9;]*)m{sign} ", text)} for sign in "●▲◌"}
    assert signs == {"●": {"32"}, "▲": {"1;31"}, "◌": {"35"}}


def test_a_run_without_telemetry_has_no_healthy_sign(tmp_path):
    with Run.create(tmp_path, "fern", "", {"rng_seed": 0}) as run:
        with Store(run.path / STORE, run.id) as store:
            store.begin_attempt()
            store.add("rounds", round=[1, 2], env_steps=[1, 2])
        text = drawn(run.path)
        assert "◌ time left not measured" in text
        assert "nothing new" not in text
        assert "▲ nothing new for 2 min" in drawn(run.path, silent=STALLED)
    assert "●" not in text
    assert "no alarms" not in text
    for label in ("return", "validation score", "KL", "clip", "explained", "entropy"):
        assert re.search(rf"^{label}.* ◌ not measured$", text, re.M), label
    assert re.search(r"^return +◌◌ ◌ not measured$", text, re.M)


def test_a_grower_shows_its_metric_its_widths_and_its_seeds(tmp_path):
    host = make_host("vector")
    optimizer = torch.optim.SGD(host.parameters(), 0.1)
    grower = Grower(
        host,
        optimizer,
        ["first->second"],
        example=make_batch("vector", 4)[0],
        controller="never",
        logger=tmp_path / "mine",
    )
    grower.plant("first->second#0", "widen_8", tempo="AT_ONCE")
    for number in range(3):
        x, y = make_batch("vector", 8)
        loss = grower.loss(lambda x=x, y=y: cross_entropy(host(x), y))
        loss.backward()
        optimizer.step()
        grower.step(metric=0.25 * number)
    grower.close()
    text = drawn(tmp_path / "mine", 140)
    assert "mine  grower  finished  round 3/30" in text
    assert re.search(r"^metric +▁▅█ 0.5 ", text, re.M)
    assert re.search(rf"^loss +\S+ {grower.history[-1].loss:.3g} ", text, re.M)
    widths = " ".join(str(width) for width in (20, 12, 5))
    assert re.search(rf"Vectors +0  0.5 +H[·]*  {widths}", text)
    assert "planted widen_8" in text
    assert "KL" not in text


@pytest.mark.parametrize("columns", [80, 140])
@pytest.mark.parametrize("colours", [True, False])
def test_hostile_text_stays_text(columns, colours, tmp_path):
    path = make_run(
        tmp_path,
        tasks=(HOSTILE, "letter"),
        blueprints=(HOSTILE, "small"),
        notes=[("gap", HOSTILE), ("gap", "x" * 9_000)],
    )
    text = drawn(path, columns, colours=colours)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert all(sign.isprintable() for sign in plain if sign != "\n")
    assert colours or plain == text
    assert f"▲ gap: {SHOWN}" in plain
    assert f"kept {SHOWN}" in plain
    assert max(map(cell_len, plain.splitlines())) <= columns
    assert len([line for line in plain.splitlines() if "xxx" in line]) == 1
