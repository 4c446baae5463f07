"""A run as one page: what it is, what it was worth, and what happened in it.

The page asks nobody for anything: styles and figures are in it, there is no script, and
its own policy forbids the browser to load or run what a name might smuggle in. What a
run has no figures for is said in one sentence.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from esper import __version__
from esper.report.facts import SHOWN, Facts
from esper.report.ink import Drawing
from esper.report.lives import STAGES
from esper.report.markup import (
    Markup,
    element,
    raw,
    table,
    together,
)
from esper.report.sheet import style_sheet
from esper.report.worth import Worth

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
MARK: Final = "esper report"
"""By which a page of ours is known from a file that somebody else wrote."""
ENDS: Final = {
    "finished": "The run is complete.",
    "running": "The run is still going on; this is what it has written so far.",
    "stopped": "The run stopped before its end; it can be resumed.",
}
Drawings = Mapping[str, Sequence[Drawing]]
"""The figures of each section, by the section's name."""


def page(facts: Facts, drawings: Drawings, worth: Worth) -> str:
    """The whole page.

    Args:
        facts: What the run says of itself.
        drawings: The figures.
        worth: What everybody was worth.
    """
    sections = [
        ("worth", "What it was worth", _worth(drawings, worth.tables())),
        ("learning", "Learning", _learning(facts, drawings)),
        ("lives", "The lives of seeds", _lives(facts, drawings)),
        ("choices", "What was chosen, and where", _choices(drawings)),
        ("heads", "How decided each head is", _heads(drawings)),
        ("health", "Health of the updates", _health(facts, drawings)),
        ("run", "The run itself", _run(facts)),
    ]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content=f"{MARK} {__version__}"),
        element("title", f"{facts.name} – Esper"),
        element("style", raw(style_sheet())),
    )
    contents = element(
        "nav",
        element(
            "ul",
            *(
                element("li", element("a", title, href=f"#{mark}"))
                for mark, title, _ in sections
            ),
        ),
        aria_label="Contents",
    )
    body = element(
        "body",
        element(
            "header",
            element("p", "Esper run", classes="kicker"),
            element("h1", facts.name),
            element("p", headline(facts), classes="lede"),
            _verdict(worth.verdict()),
            _tiles(facts),
            contents,
        ),
        element(
            "main",
            *(
                element("section", element("h2", title), content, id=mark)
                for mark, title, content in sections
            ),
        ),
        element("footer", _footer(facts)),
    )
    return f'<!doctype html>\n<html lang="en">{head}\n{body}</html>\n'


def headline(facts: Facts) -> str:
    """What the run is, in two sentences."""
    tasks = listed(facts.tasks) or "no task"
    if not facts.last_round:
        who = "were judged" if facts.evaluations else "have not been judged yet"
        return f"Controllers {who} on {tasks}; nobody was trained. {ENDS[facts.state]}"
    return (
        f"Tamiyo was trained on {tasks} for {facts.last_round:,} "
        f"round{'s' * (facts.last_round != 1)}: {facts.env_steps:,} decisions in "
        f"{duration(facts.seconds)}. {ENDS[facts.state]}"
    )


def listed(names: Sequence[str]) -> str:
    """Names in a sentence."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def duration(seconds: float) -> str:
    """Time in the two largest units."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours:,} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{seconds:.3g} s"


def _verdict(words: list[str]) -> Markup:
    if not words:
        return together()
    return element("div", *(element("p", line) for line in words), classes="verdict")


def _tiles(facts: Facts) -> Markup:
    speed = facts.env_steps / facts.seconds if facts.seconds else 0.0
    tiles = {
        "rounds": f"{facts.last_round:,}",
        "decisions": f"{facts.env_steps:,}",
        "training time": duration(facts.seconds),
        "decisions per second": f"{speed:,.0f}",
    }
    if not facts.last_round:
        hosts = {(row["task"], row["host"]) for row in facts.evaluations}
        arms = {row["controller"] for row in facts.evaluations}
        tiles = {
            "tasks": str(len(facts.tasks)),
            "controllers": str(len(arms)),
            "hosts": str(len(hosts)),
        }
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value))
            for name, value in tiles.items()
        ),
        classes="tiles",
    )


def _figure(drawing: Drawing, caption: str = "", *, wide: bool = False) -> Markup:
    shown = raw(drawing.inline)
    if wide:
        inner = element("div", shown, classes="lanes")
        shown = element(
            "div",
            inner,
            classes="scroll",
            tabindex="0",
            role="group",
            aria_label=drawing.alt,
        )
    words = (element("figcaption", caption),) if caption else ()
    return element("figure", shown, *words)


def _grid(drawings: Sequence[Drawing], *, wide: bool = False) -> Markup:
    return element(
        "div", *(_figure(drawing, wide=wide) for drawing in drawings), classes="grid"
    )


def _none(sentence: str) -> Markup:
    return element("p", sentence, classes="none")


def _worth(drawings: Drawings, comparison: Markup) -> Markup:
    if not comparison:
        return _none(
            "No controller has been judged in this run yet, so nothing can be said "
            "about its worth."
        )
    return together(_grid(drawings["worth"]), comparison)


def _learning(facts: Facts, drawings: Drawings) -> Markup:
    if not drawings["learning"]:
        return _none("No episode has ended in training, so there is no curve.")
    text = (
        "Grey: mean return of the episodes of each round, with chance in the choices; "
        "the line is the mean of the rounds around it. Blue dots: Tamiyo watched on "
        "hosts that are the same each time. Blue diamond and bands: everybody judged "
        "at the end on other hosts; only these can be held against each other. Bars "
        "and bands are 95 % intervals over hosts."
    )
    return together(element("p", text, classes="quiet"), _grid(drawings["learning"]))


def _lives(facts: Facts, drawings: Drawings) -> Markup:
    if not drawings["lives"]:
        return _none("No episode has ended in training, so there are no lives to show.")
    more = [
        f"{task} ({lives.envs})"
        for task, lives in facts.lives.items()
        if lives.envs > SHOWN
    ]
    text = (
        "The last complete episode of each environment. A lane is a slot, a bar one "
        "stage of a seed; the name is its blueprint. Rest the pointer on a bar to read "
        "it."
    )
    if more:
        text += f" Only the first {SHOWN} environments are shown of {listed(more)}."
    legend = element(
        "ul",
        *(
            element("li", element("i", style=f"background:var(--{colour})"), words)
            for colour, words in STAGES.values()
        ),
        classes="legend",
    )
    return together(
        element("p", text, classes="quiet"), legend, _grid(drawings["lives"], wide=True)
    )


def _choices(drawings: Drawings) -> Markup:
    if not drawings["choices"]:
        return _none("Nothing was planted in training.")
    text = (
        "Shares of all seeds that were planted on a task in the first and in the last "
        "third of the rounds, and what became of the seeds of all rounds. Neither kept "
        "nor pruned are those that the end of the episode overtook."
    )
    return together(element("p", text, classes="quiet"), _grid(drawings["choices"]))


def _heads(drawings: Drawings) -> Markup:
    if not drawings["heads"]:
        return _none("No update was made, so there is nothing to say about heads.")
    text = (
        "Entropy is 1 when a head chooses blindly and 0 when it is certain; a head "
        "that never had a choice is at 0. KL says how far an update moved each head."
    )
    return together(element("p", text, classes="quiet"), _grid(drawings["heads"]))


def _health(facts: Facts, drawings: Drawings) -> Markup:
    if not drawings["health"]:
        return _none("No update was made.")
    refused = (
        "No optimiser step was refused."
        if not facts.refused
        else f"{facts.refused:,} optimiser steps were refused because a gradient or "
        "the KL was not finite: look at rewards and observations."
    )
    text = f"{refused} A green band is where a figure is at home."
    return together(element("p", text, classes="quiet"), _grid(drawings["health"]))


def _run(facts: Facts) -> Markup:
    attempts: list[list[object]] = [
        [
            str(attempt.number),
            element("span", _moment(attempt.started), classes="nowrap"),
            _began(attempt.resumed_after),
            _counts(attempt.last_round),
            f"{attempt.rows:,}",
            str(attempt.versions.get("esper", "")),
            str(attempt.versions.get("torch", "")),
        ]
        for attempt in facts.attempts
    ]
    notes: list[list[object]] = [[str(number), *rest] for number, *rest in facts.notes]
    versions: list[list[object]] = [
        [name, listed(list(map(str, value))) if isinstance(value, list) else value]
        for name, value in facts.versions.items()
    ]
    headers = ["attempt", "began (UTC)", "from", "counts", "rows", "Esper", "PyTorch"]
    parts = [
        table("Processes that wrote this run", headers, attempts, numbers=False)
        if attempts
        else _none("No process has written to the store.")
    ]
    if notes:
        caption = "What the run noted"
        parts.append(table(caption, ["round", "kind", "text"], notes, numbers=False))
    else:
        parts.append(_none("The run noted nothing out of the ordinary."))
    return together(
        *parts,
        element(
            "details",
            element("summary", "Configuration"),
            element("pre", element("code", facts.config_toml)),
        ),
        element(
            "details",
            element("summary", "Versions and machine"),
            table("As the run began", ["what", "value"], versions, numbers=False),
        ),
    )


def _moment(started: str) -> str:
    """A time of the store as people write it."""
    return started.partition("+")[0].replace("T", " ")


def _began(resumed_after: int | None) -> str:
    return "the start" if resumed_after is None else f"round {resumed_after}"


def _counts(last_round: int | None) -> str:
    if last_round is None:
        return "all of it"
    return f"up to round {last_round}" if last_round > 0 else "none of it"


def _footer(facts: Facts) -> str:
    version = facts.versions.get("esper", "unknown")
    return f"Made by Esper {__version__} of a run of Esper {version}."
