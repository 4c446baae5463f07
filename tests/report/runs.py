"""Small runs for reports: every round is one episode of every environment.

In each episode environment 0 plants the first blueprint in slot 0 at decision 1 and
keeps it at decision 4, and plants the second in slot 1, which it prunes at decision 3.
Environment 1 plants the second in slot 1 at decision 2 and does nothing more.
"""

from dataclasses import fields

import numpy as np
import torch

from esper.contracts.stages import Stage
from esper.runs.records import EvalResult
from esper.runs.run import Run
from esper.runs.store import Store
from tests.runs.stores import record

STEPS = 5
ENVS = 2
TASKS = ("letter", "digits")
BLUEPRINTS = ("small", "large")
ARMS = ("Tamiyo", "never", "random", "early", "static")
D, T, B, H, K = (
    Stage.DORMANT,
    Stage.TRAINING,
    Stage.BLENDING,
    Stage.HOLDING,
    Stage.FOSSILIZED,
)
HISTORY = (
    (1, 0, 0, "planted", D, T, 0),
    (1, 0, 1, "planted", D, T, 1),
    (2, 0, 0, "blending", T, B, 0),
    (2, 1, 1, "planted", D, T, 1),
    (3, 0, 0, "holding", B, H, 0),
    (3, 0, 1, "pruned", T, D, 1),
    (4, 0, 0, "kept", H, K, 0),
)
"""Decision, environment, slot, word, before, after, blueprint."""


def config(tasks=TASKS):
    names = ", ".join(f'"{task}"' for task in tasks)
    return f"tasks = [{names}]\nnum_envs = {ENVS}\n"


def make_run(
    folder,
    name="fern",
    *,
    tasks=TASKS,
    blueprints=BLUEPRINTS,
    rounds=6,
    arms=ARMS,
    notes=(),
    toml=None,
    finished=True,
):
    """Create a run with data for every section of a report; returns its folder."""
    folder.mkdir(exist_ok=True)
    text = config(tasks) if toml is None else toml
    with Run.create(folder, name, text, {"rng_seed": 0}) as run:
        with Store(run.path / "events.sqlite", run.id) as store:
            store.begin_attempt(versions={"esper": "0.1", "torch": "2.10"})
            play(store, tasks, blueprints, range(1, rounds + 1))
            evaluate(store, tasks, arms, rounds)
            for kind, line in notes:
                store.add_note(rounds, kind, line)
        if finished:
            run.finish({"rounds": rounds})
    return run.path


def play(store, tasks, blueprints, numbers):
    for number in numbers:
        for task in tasks:
            _episode(store, number, task, blueprints)
        store.add_round(record(number))


def evaluate(store, tasks, arms, last):
    """Add the final evaluation of all arms and periodic ones of the first arm."""
    stream = np.random.default_rng(0)
    for task in tasks:
        noise = stream.normal(0.0, 0.01, 12)
        for index, arm in enumerate(arms):
            store.add_evaluation(
                results(0.5 - 0.05 * index + noise + stream.normal(0, 0.01, 12)),
                round=last,
                stage="test",
                controller=arm,
                task=task,
            )
        if arms and last:
            for number in range(2, last + 1, 2):
                store.add_evaluation(
                    results(0.3 + 0.02 * number + noise),
                    round=number,
                    stage="validation",
                    controller=arms[0],
                    task=task,
                )


def results(returns):
    figures = {item.name: returns + 0.1 for item in fields(EvalResult)}
    panicked = np.zeros(len(returns), dtype=bool)
    return EvalResult(**(figures | {"returns": returns, "panicked": panicked}))


def _episode(store, number, task, blueprints):
    where = {"round": number, "task": task, "episode": number}
    start = (number - 1) * STEPS
    for step, env, slot, word, before, after, blueprint in HISTORY:
        store.add(
            "events",
            **where,
            step=start + step,
            env=env,
            slot=slot,
            what=word,
            stage_from=before.name,
            stage_to=after.name,
            blueprint=blueprints[blueprint],
            alpha=0.5,
        )
    figure = torch.full((ENVS,), 0.1 * number)
    store.add(
        "episodes",
        **where,
        step=start + STEPS,
        env=torch.arange(ENVS),
        **{"return": figure + torch.tensor([0.0, 0.2])},
        score=figure,
        test=figure,
        added=figure,
        macs=figure,
        panicked=torch.zeros(ENVS, dtype=torch.bool),
    )
