"""Which figures a run gets; what it has no numbers for is not drawn."""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from esper.contracts.actions import HEAD_NAMES
from esper.report.arms import ArmPoint, forest, size_scatter
from esper.report.choices import choice_map, outcome_bars
from esper.report.curves import (
    Judgements,
    health_curve,
    learning_curve,
    named_curves,
)
from esper.report.facts import Facts
from esper.report.ink import Drawing, house_style
from esper.report.lives import swimlanes

DEED_WORDS = {
    "planted": "plant",
    "blending": "blend in",
    "aimed": "set alpha",
    "pruned": "prune",
    "kept": "keep",
}


def draw(
    facts: Facts,
    judged: Mapping[str, Judgements],
    arms: Mapping[str, Sequence[ArmPoint]],
) -> dict[str, list[Drawing]]:
    """All figures of a run, by the section that they stand in.

    Args:
        facts: What the run says of itself.
        judged: What stands beside the learning curve of each task.
        arms: Who was judged on each task at the end.
    """
    tasks = [*facts.tasks, *(task for task in arms if task not in facts.tasks)]
    files = {task: f"{index}-{_slug(task)}" for index, task in enumerate(tasks, 1)}
    with house_style():
        return {
            "worth": [
                draw_arms(f"{kind}-{files[task]}", task, arms[task])
                for task in tasks
                if task in arms
                for kind, draw_arms in (("arms", forest), ("size", size_scatter))
            ],
            "learning": [
                learning_curve(
                    f"learning-{files[task]}",
                    task,
                    facts.returns[task],
                    judged.get(task, Judgements()),
                )
                for task in tasks
                if task in facts.returns
            ],
            "lives": [
                swimlanes(f"lives-{files[task]}", task, facts.lives[task])
                for task in tasks
                if task in facts.lives
            ],
            "choices": _choices(facts, tasks, files),
            "heads": _heads(facts),
            "health": _health(facts),
        }


def _choices(
    facts: Facts, tasks: Sequence[str], files: Mapping[str, str]
) -> list[Drawing]:
    drawings = [
        draw_choices(f"{kind}-{files[task]}", task, facts.choices[task])
        for task in tasks
        if task in facts.choices
        for kind, draw_choices in (("planted", choice_map), ("became", outcome_bars))
    ]
    if drawings and len(facts.deeds["round"]):
        rounds = facts.deeds["round"]
        deeds = [(word, rounds, facts.deeds[deed]) for deed, word in DEED_WORDS.items()]
        title = "What is done, per hundred decisions"
        drawings.append(named_curves("deeds", title, deeds))
        grown = [
            (task, facts.returns[task]["round"], facts.returns[task]["added"])
            for task in tasks
            if task in facts.returns
        ]
        title = "Parameters added by the end, in multiples"
        drawings.append(named_curves("grown", title, grown))
    return drawings


def _heads(facts: Facts) -> list[Drawing]:
    if not facts.heads:
        return []
    known = {head: facts.heads[head] for head in HEAD_NAMES if head in facts.heads}
    heads = {**known, **facts.heads}  # in the order of a sentence
    return [
        named_curves(
            figure,
            title,
            [(head, rows["round"], rows[figure]) for head, rows in heads.items()],
        )
        for figure, title in (
            ("entropy", "Entropy of each head"),
            ("kl", "KL of each head in an update"),
        )
    ]


def _health(facts: Facts) -> list[Drawing]:
    rounds = facts.rounds
    at = rounds["round"]
    if not len(at):
        return []
    steps = np.diff(rounds["env_steps"], prepend=0.0)
    seconds = np.diff(rounds["seconds"], prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(seconds > 0.0, steps / seconds, np.nan)
        taken = rounds["steps_taken"] / rounds["steps_planned"]
    found = [
        health_curve(
            "clipped",
            "Share of steps that were clipped",
            at,
            rounds["clip_fraction"],
            healthy=(0.02, 0.3),
            floor=0.0,
        ),
        health_curve(
            "explained",
            "Explained variance of returns",
            at,
            rounds["explained_variance"],
        ),
        health_curve(
            "taken", "Share of planned optimiser steps taken", at, taken, floor=0.0
        ),
        health_curve("speed", "Decisions per second", at, speed, floor=0.0),
    ]
    if facts.refused:
        found.append(
            health_curve("refused", "Refused steps", at, rounds["refused"], floor=0.0)
        )
    return found


def _slug(task: str) -> str:
    """A task's name as part of the name of a file; the number before it is enough."""
    return re.sub("[^a-z0-9]+", "-", task.lower()).strip("-")[:32] or "task"
