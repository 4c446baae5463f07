"""What tests write into stores, and how they look at it."""

from contextlib import closing
from dataclasses import fields

import numpy as np
import torch

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.stages import Stage
from esper.runs.database import open_store, rows
from esper.runs.records import EvalResult, RoundRecord
from esper.runs.store import Store
from esper.simic.agent.metrics import HeadRecord, UpdateRecord

ENVS = 4


def record(number: int, **changed) -> RoundRecord:
    heads = {
        name: HeadRecord(0.01 * index, 0.5, 1.0, 0.1)
        for index, name in enumerate(HEAD_NAMES)
    }
    figures = {
        "policy_loss": -0.01,
        "value_loss": 0.4,
        "clip_fraction": 0.1,
        "clamped": 0.0,
        "grad_norm": 0.7,
        "kl": 0.01,
        "last_kl": 0.02,
        "explained_variance": 0.3,
        "steps_planned": 8,
        "steps_taken": 8,
        "stopped_at": None,
        "refused": 0,
        "heads": heads,
    }
    known = {
        name: changed.pop(name) for name in {"mean_score", "added"} & changed.keys()
    }
    return RoundRecord(
        **known,
        learning_rate=1e-3,
        round=number,
        rounds=10,
        env_steps=number * ENVS,
        seconds=float(number),
        mean_return=0.1 * number,
        update=UpdateRecord(**(figures | changed)),
    )


def add_steps(store, number: int, step: int | None = None, **changed) -> None:
    figures = {
        "episode": torch.ones(ENVS, dtype=torch.int64),
        "reward": torch.full((ENVS,), float(number)),
        "score": torch.rand(ENVS),
        "loss": torch.rand(ENVS),
        "added": torch.zeros(ENVS),
        "budget_left": torch.full((ENVS,), torch.inf),
    }
    store.add(
        "steps",
        env=range(ENVS),
        round=number,
        step=number if step is None else step,
        task="letter",
        **(figures | changed),
    )


def add_event(store, number, word, before, after, *, slot=0, step=None, env=0):
    store.add(
        "events",
        round=number,
        step=number if step is None else step,
        task="letter",
        episode=1,
        env=env,
        slot=slot,
        what=word,
        stage_from=before.name,
        stage_to=after.name,
        blueprint="large",
        alpha=0.5,
    )


def add_end(store, number: int, step: int, env: int = 0) -> None:
    one = torch.ones(1)
    store.add(
        "episodes",
        round=number,
        step=step,
        task="letter",
        env=torch.tensor([env]),
        episode=torch.tensor([1]),
        **{"return": one * 0.5},
        score=one * 0.75,
        test=one * 0.7,
        added=one,
        macs=one * 2,
        panicked=torch.tensor([False]),
    )


def ask(path, query):
    with closing(open_store(path)) as db:
        return db.execute(query).fetchall()


def read(path, table):
    with closing(open_store(path)) as db:
        return [*rows(db, table)]


def seqs(path, attempt):
    query = f"SELECT seq FROM all_rows WHERE attempt = {attempt} ORDER BY seq"
    return [seq for (seq,) in ask(path, query)]


def fill(path):
    """A small run that has something in every table and was resumed once."""
    with Store(path) as store:
        store.begin_attempt(versions={"torch": "2.10"})
        add_steps(store, 1)
        add_event(store, 1, "planted", Stage.DORMANT, Stage.TRAINING)
        store.add_round(record(1, mean_score=0.5, added=1.0))
        add_steps(store, 2)
        add_event(store, 2, "pruned", Stage.TRAINING, Stage.DORMANT)
        store.add_round(record(2))
    with Store(path) as store:
        store.begin_attempt(1)
        add_steps(store, 2)
        add_event(store, 2, "blending", Stage.TRAINING, Stage.BLENDING)
        add_event(store, 2, "planted", Stage.DORMANT, Stage.TRAINING, slot=1)
        add_event(store, 2, "aimed", Stage.BLENDING, Stage.BLENDING, step=3)
        add_event(store, 2, "holding", Stage.BLENDING, Stage.HOLDING, step=4)
        add_event(store, 2, "kept", Stage.HOLDING, Stage.FOSSILIZED, step=5)
        add_end(store, 2, step=6)
        store.add_round(record(2))
        figures = np.array([0.1, 0.2])
        result = EvalResult(
            **{
                field.name: figures
                for field in fields(EvalResult)
                if field.name != "panicked"
            },
            panicked=np.array([False, True]),
        )
        about = {"stage": "test", "controller": "early", "task": "letter"}
        store.add_evaluation(result, round=2, **about)
        store.add_note(2, "host", "resumed on another machine")
