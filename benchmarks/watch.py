"""What does a page of `esper watch --web` cost, with a million steps and live?

The first table opens a store of a million steps in Chromium, and appends a round while
the page is open. The second trains with the page open in every other round and compares
the CPU time of the training process.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from subprocess import PIPE, Popen
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any, Final

import numpy as np

from benchmarks import timing
from benchmarks.round import SMALL, without_evaluation
from benchmarks.timing import Report
from esper.runs.records import RoundRecord
from esper.runs.run import STORE, Run
from esper.runs.store import Store
from esper.runs.train_config import DEFAULT, Budget, preset
from esper.training.loop import OnRoundEnd
from esper.training.train import begin_run
from esper.watch.reading import run_id
from tests.browser import open_browser
from tests.runs.stores import record

ENVS, STEPS = 16, 32
LOADED: Final = "figure .area canvas"
CPU_ROUNDS: Final = 41


def run(rounds: int = CPU_ROUNDS) -> list[Report]:
    """Measure the page of a large store and the cost for a training."""
    return [large_store(), training(4 if timing.QUICK else rounds)]


@contextmanager
def served(root: Path) -> Iterator[tuple[str, int]]:
    """Address and process of a server in a process of its own."""
    command = [sys.executable, "-m", "esper.cli", "watch", "--web", "--port", "0"]
    with Popen([*command, "--runs", str(root)], stdout=PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[1], server.pid
        finally:
            server.terminate()


def add_rounds(store: Store, first: int, last: int) -> int:
    """Add rounds of all environments; returns the number of steps."""
    stream, env = np.random.default_rng(0), np.tile(np.arange(ENVS), STEPS)
    for number in range(first, last + 1):
        where = {"round": number, "task": "letter", "episode": number}
        begin = (number - 1) * STEPS
        step = np.repeat(np.arange(STEPS), ENVS) + begin + 1
        names = ("reward", "score", "loss", "added", "budget_left")
        seen = {name: stream.random(len(env)) for name in names}
        store.add("steps", **where, step=step, env=env, **seen)
        seed = {"stage_from": "DORMANT", "stage_to": "TRAINING", "blueprint": "widen"}
        store.add(
            "events",
            **where,
            **seed,
            what="planted",
            step=begin + 3,
            env=np.arange(ENVS),
            slot=0,
        )
        store.add("episodes", **where, step=begin + STEPS, env=np.arange(ENVS))
        store.add_round(record(number))
    store.flush()
    return (last - first + 1) * ENVS * STEPS


def large_store() -> Report:
    """Open a store of a million steps and append to it."""
    import psutil

    report = Report(
        "A store of a million steps",
        ("what", "measured", "allowed"),
        notes=["Times are the longest of three."],
    )
    last = 20 if timing.QUICK else 1_954
    with TemporaryDirectory() as name:
        root = Path(name)
        made = Run.create(root, "large", "", {"rng_seed": 0, "tasks": ["letter"]})
        store = Store(made.path / STORE, made.id)
        with made, store, open_browser() as browser:
            store.begin_attempt()
            steps = add_rounds(store, 1, last)
            size = (made.path / STORE).stat().st_size
            with served(root) as (address, process):
                sent: list[int] = []
                page: Any = browser.new_page()
                page.on(
                    "requestfinished",
                    lambda request: sent.append(
                        request.sizes()["responseBodySize"]
                        if "stream" not in request.url
                        else 0
                    ),
                )
                opened, updated = [], []
                for attempt in range(3):
                    page.goto("about:blank")
                    sent.clear()
                    began = perf_counter()
                    page.goto(f"{address}#view=learning&run={run_id('large')}")
                    page.wait_for_selector(LOADED)
                    opened.append(perf_counter() - began)
                    payload = sum(sent)
                    page.wait_for_selector("#state[data-position]")
                    began = perf_counter()
                    add_rounds(store, last + attempt + 1, last + attempt + 1)
                    shown = f"{last + attempt + 1:,}"
                    page.wait_for_selector(f"[data-fact=round] :text-is('{shown}')")
                    updated.append(perf_counter() - began)
                for view in ("hosts", "comparison", "runs"):
                    page.goto(f"{address}#view={view}&run={run_id('large')}")
                    page.wait_for_selector(f"main[data-view={view}]")
                memory = psutil.Process(process).memory_info().rss
    report.add("steps in the store", steps, None)
    report.add("size of the store, MB", size / 1e6, None)
    report.add("seconds until the page is open", max(opened), 2)
    report.add("seconds until a new round is shown", max(updated), 1)
    report.add("bytes of the page and its data, kB", payload / 1e3, 200)
    report.add("memory of the server, MB", memory / 1e6, 150)
    return report


def training(rounds: int) -> Report:
    """CPU time of rounds with and without an open page."""
    config = SMALL if timing.QUICK else preset(DEFAULT)
    config = replace(config, budget=Budget(rounds=rounds))
    spent: dict[bool, list[float]] = {False: [], True: []}
    with TemporaryDirectory() as name, open_browser() as browser:
        config = without_evaluation(config, Path(name))
        page: Any = browser.new_page()
        with served(Path(config.runs)) as (address, _):
            since, is_open = 0.0, False

            def toggle(record: RoundRecord) -> None:
                nonlocal since, is_open
                if record.round > 1:  # the first one compiles
                    spent[is_open].append(process_time() - since)
                is_open = not is_open
                page.goto("about:blank")
                if is_open:
                    page.goto(f"{address}#view=learning")
                    page.wait_for_selector(LOADED)
                since = process_time()

            begin_run(config, [OnRoundEnd(toggle)])
            page.close()
    pairs = [*zip(spent[True], spent[False], strict=False)]
    without = median(spent[False])
    report = Report(
        f"Training: {' and '.join(config.tasks)}, {config.num_envs} environments each",
        ("what", "CPU seconds per round", "% of a round without", "allowed %"),
        notes=[f"Medians of {len(pairs)} pairs of rounds, which alternate."],
    )
    more = median(one - other for one, other in pairs)
    shown = median(spent[True])
    report.add("no page", without, 100.0, None)
    report.add("an open page", shown, 100 * shown / without, None)
    report.add("difference, pair by pair", more, 100 * more / without, 2)
    return report
