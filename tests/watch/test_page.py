"""The page in a real Chromium, while real trainings run."""

import os
import signal
import sqlite3
import time
from contextlib import closing, suppress
from multiprocessing import get_context
from pathlib import Path

import pytest

from esper.runs.run import STORE, Run
from esper.runs.store import Store
from tests.browser import open_browser
from tests.watch.serving import (
    PRELOADED,
    TASK,
    fill,
    run_command,
    run_grower,
    serving,
    shown_run,
)

AXE = Path(__file__).with_name("axe.min.js")
VIEWS = ("runs", "learning", "hosts", "comparison")
NEWEST = "FROM live_rounds ORDER BY round DESC"
WAIT = 240_000
"""Milliseconds to wait for a training on a busy machine."""


@pytest.fixture(scope="module")
def browser():
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A server for a run that fills every view."""
    root = tmp_path_factory.mktemp("watch") / "runs"
    shown_run(root)
    with serving(root) as server:
        yield server


def visit(browser, *, width=1280, dark=False):
    """A page in a window of its own, and what its console says."""
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if dark else "light",
    )
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.set_default_timeout(WAIT)
    return page, errors


def see(page, server, name, view, **more):
    page.goto("about:blank")
    page.goto(server.page(name, view, **more))
    page.wait_for_selector(f"main[data-view={view}]")


def until(page, name, value):
    """Wait until a fact of the view of learning is this text."""
    page.wait_for_selector(f"dd[data-fact='{name}'] :text-is('{value}')")


def fact(page, name):
    return page.inner_text(f"dd[data-fact='{name}']")


def query(path, sql):
    with closing(sqlite3.connect(f"file:{path / STORE}?mode=ro", uri=True)) as db:
        return db.execute(sql).fetchone()


def pause(training, path):
    """Stop a process, as Ctrl-Z does, when its store has two rounds."""
    newest = (0,)
    while newest[0] < 2:
        assert training.is_alive()
        time.sleep(0.02)
        with suppress(sqlite3.OperationalError):  # there is no store yet
            newest = query(path, f"SELECT round {NEWEST}") or newest
    os.kill(training.pid, signal.SIGSTOP)


def task_of(path):
    return query(path, "SELECT task FROM live_steps")[0]


@pytest.fixture
def start(monkeypatch):
    """Starts processes and kills those that are left at the end."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    begun, context = [], get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)

    def begin(target, *arguments):
        begun.append(context.Process(target=target, args=arguments))
        begun[-1].start()
        return begun[-1]

    yield begin
    for process in begun:
        process.kill()
        process.join()


SMALL = ("--workers=0", "--world.horizon=4", "--num_envs=2", "--start_from=none")
SMALL += ("--tasks=teacher", "--evaluation.controllers=never,early")
SMALL += ("--evaluation.hosts=2", "--evaluation.every=16", "--checkpoint.every=3")


@pytest.mark.timeout(580)
def test_a_page_follows_three_trainings_from_the_first_second_to_the_last(
    browser, start, tmp_path
):
    root = tmp_path / "runs"
    root.mkdir()
    path = root / "fern"
    page, errors = visit(browser)
    with serving(root) as server:
        page.goto(f"{server.address}#view=runs")
        page.wait_for_selector("text=There are no runs in this folder.")
        into = f"--runs={root}"
        rounds = ("--budget.rounds=32", into, "--name=fern")
        training = start(run_command, "train", *SMALL, *rounds)
        pause(training, path)  # else it may end before the page is asked
        page.wait_for_selector("tbody th:has-text('fern')")
        page.click("tbody th a:has-text('fern')")
        page.wait_for_selector("main[data-view=learning]")
        # Rows are seen before any checkpoint asks for them.
        page.wait_for_selector("dd[data-fact=round] :text-matches('^[2-9]|^[1-3].')")
        assert page.inner_text("#state") == "running"
        training.kill()
        training.join()
        env = ("CartPole-v1", "--total_steps=2048", "--seed=1")
        agent = start(run_command, "ppo", *env, into)
        grower = start(run_grower, root / "mine")
        page.wait_for_selector("#state.state-stopped")
        seen = int(fact(page, "round"))
        resumed = start(run_command, "train", f"--resume={path}", "--workers=0")
        page.wait_for_selector("#state.state-running")
        until(page, "processes", 2)
        page.wait_for_selector("#state.state-finished")
        for process in (resumed, agent, grower):
            process.join()
            assert process.exitcode == 0
        until(page, "round", 32)
        assert 2 <= seen <= 32
        steps, mean = query(path, f"SELECT env_steps, mean_return {NEWEST}")
        assert fact(page, "environment steps") == f"{steps:,}"
        assert float(fact(page, "return")) == pytest.approx(mean, rel=1e-3)
        assert page.locator("figure.empty").count() == 0
        see(page, server, "fern", "comparison")
        assert page.locator("tbody tr").count() == 3
        see(page, server, "fern", "hosts")
        assert page.locator(".hosts li").count() == 2
        score, episode = query(
            path, "SELECT score, episode FROM live_steps ORDER BY step DESC, env DESC"
        )
        host = page.inner_text("li[data-host='teacher/1']")
        assert f"episode {episode}, ended" in host
        shown = host.partition("score ")[2].split()[0]
        assert float(shown) == pytest.approx(score, rel=1e-3)
        (ppo,) = {each.name for each in root.iterdir()} - {"fern", "mine"}
        see(page, server, ppo, "learning")
        steps, kl = query(root / ppo, f"SELECT env_steps, kl {NEWEST}")
        assert fact(page, "environment steps") == f"{steps:,}"
        kls = page.inner_text("figure:has(b:text-is('KL')) .value")
        assert float(kls) == pytest.approx(kl, rel=1e-2)
        # Its scores are not measured: a frame and a word of a colour of their own.
        empty = page.inner_text("figure.empty:has(b:text-is('Score')) .unmeasured")
        assert empty == "not measured"
        see(page, server, "mine", "hosts")
        widths = page.inner_text(".hosts li .small").partition("widths ")[2]
        layers = query(
            root / "mine",
            "SELECT group_concat(width, '–') FROM (SELECT layer, width, max(step) "
            "FROM live_layers GROUP BY layer ORDER BY layer)",
        )
        assert widths == layers[0]
        see(page, server, "mine", "hosts", task=task_of(root / "mine"), env=0)
        page.wait_for_selector(".head .bar")
    page.wait_for_selector("#state:has-text('no connection')")
    assert {each for each in errors if "net::ERR" not in each} == set()
    page.close()


def test_new_rows_are_appended_and_a_reconnected_page_misses_none(browser, tmp_path):
    path = shown_run(tmp_path / "runs", rounds=2)
    page, errors = visit(browser)
    with serving(tmp_path / "runs") as server:
        see(page, server, "fern", "learning")
        with Store(path / STORE, Run.read(path).id) as store:
            store.begin_attempt(2)
            fill(store, [3])
            store.flush()
            until(page, "round", 3)
            page.wait_for_selector("figure .area[aria-label*='3 values']")
            page.context.set_offline(True)
            fill(store, [4, 5])
            store.flush()
            page.context.set_offline(False)
            page.wait_for_selector("figure .area[aria-label*='5 values']")
        of = "getComputedStyle(document.querySelector('figure .{}')).color"
        missing, known = map(page.evaluate, map(of.format, ("unmeasured", "value")))
        assert missing != known
        assert {each for each in errors if "net::ERR" not in each} == set()
    page.close()


def test_every_figure_of_a_decision_is_shown_and_keys_step_through(browser, shown):
    page, errors = visit(browser)
    see(page, shown, "fern", "hosts", task=TASK, env=0)
    page.wait_for_selector("text=wait at 15")
    text = page.inner_text("main")
    for part in ("decision 15", "5 of 5", "reward 0.1", "90.0 %", "GERMINATE", "rent"):
        assert part in text
    assert page.get_attribute("svg.network", "aria-label").endswith("hidden1 48")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("text=wait at 14")
    assert page.get_attribute("svg.network", "aria-label").endswith("hidden1 24")
    assert "slot 0: kept widen_x2" in page.inner_text("main")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("text=wait at 12")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("text=later kept at decision 14")
    for key, view in zip("1234", VIEWS, strict=True):
        page.keyboard.press(key)
        page.wait_for_selector(f"main[data-view={view}]")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.matches(':focus-visible')")
    assert errors == []
    page.close()


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_every_view_is_accessible_and_fits(browser, shown, width, dark):
    page, errors = visit(browser, width=width, dark=dark)
    assert AXE.stat().st_size > 100_000
    for view in (*VIEWS, "host"):
        more = {"task": TASK, "env": 0} if view == "host" else {}
        see(page, shown, "fern", "hosts" if more else view, **more)
        page.wait_for_timeout(200)
        page.evaluate(AXE.read_text("utf-8"))
        found = page.evaluate("axe.run()")["violations"]
        serious = [
            (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], view
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        back = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (back == "rgb(21, 25, 29)") is dark
    assert errors == []
    page.close()
