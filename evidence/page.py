"""The page of the evidence, from whatever a campaign has done so far.

`README.md` and its figures are made from the ledger alone, and the same ledger gives
the same bytes. What people have to say stands in `findings.md` beside it and is taken
as it is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Final

from esper.contracts.errors import BadInput
from esper.experiment.files import Disk, publish, storage
from esper.experiment.messages import short
from esper.experiment.statistics import Interval, iqm_interval
from esper.report.style import Plot
from evidence import tables
from evidence.claims import (
    MISSED,
    OPEN,
    REACHED,
    Claim,
    Versus,
    claims,
    compare,
)
from evidence.ledger import LEDGER
from evidence.plots import PRICES, STYLES, draw_plots
from evidence.protocol import ARMS
from evidence.readout import (
    LEARNED,
    Campaign,
    Cells,
    Readout,
    Terms,
    read_campaign,
)

PAGE: Final = "README.md"
FIGURES: Final = "figures"
FINDINGS: Final = "findings.md"
MARK: Final = "<!-- Made by `evidence page`; write in findings.md instead. -->"
LEGEND: Final = (
    "Normalised objective: test score less rent, less that of `never` on the same "
    "seed, as a share of the errors that `never` makes on the task; mean over the "
    "rents. Interquartile means with 95 % intervals: seeds are drawn anew within each "
    "task, and controllers too where an arm has several (where five controllers differ "
    "much, such intervals hold the truth in 90 of 100 cases). n: networks, each the "
    "mean over the rents. P: how often Tamiyo is above the arm on the same seed. p: "
    "paired Wilcoxon of the controllers' mean, Holm over the goals of a task. "
    "Parameters and MACs (multiply-adds per row) are multiples of the host's, training "
    "MACs of those of `never`, which include the looks that every growing host takes "
    "(about a fifth of plain training). `scratch` is made from the first controller's "
    "networks; `random` is matched in number and time, not in size; `bandit` waits "
    "four decisions before it chooses."
)


def write_page(folder: Path, to: Path) -> Path:
    """Write the page and its figures.

    Args:
        folder: Of the campaign.
        to: The folder that they are put in.

    Returns:
        The page.
    """
    campaign = read_campaign(folder)
    file, figures = to / PAGE, to / FIGURES
    _require_room(file)
    findings = to / FINDINGS
    text = ""
    if findings.is_file():
        with storage(findings, "read"):
            text = findings.read_text(encoding="utf-8")
    known = compare_arms(campaign)
    plots = draw_plots(
        known.readout,
        known.tasks,
        known.against,
        known.arms,
        known.resamples,
    )
    lines = page(known, plots, text)
    with storage(figures, "make"):
        figures.mkdir(parents=True, exist_ok=True)
    disk = Disk()
    for plot in plots:
        publish(disk, figures / f"{plot.name}.svg", plot.svg)
    publish(disk, file, "\n".join([*lines, ""]).encode())
    return file


def _require_room(file: Path) -> None:
    """Refuse to write over what somebody wrote by hand."""
    if file.exists():
        with storage(file, "read"):
            known = file.read_bytes()
        if known.strip() and MARK.encode() not in known:
            raise BadInput(
                f"{short(file)} was not made by `evidence page`; move it away, "
                "or name another folder."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a campaign shows."""

    campaign: Campaign
    readout: Readout
    cells: Cells
    """Normalised objectives."""
    tasks: Sequence[str]
    against: Mapping[str, Versus]
    goals: Sequence[Claim]
    arms: Sequence[str]
    """Who has rows, ablations aside."""
    resamples: int


def compare_arms(campaign: Campaign) -> Evidence:
    """Compare everybody."""
    protocol = campaign.protocol
    terms = {
        name: Terms(rent=rent, budget=budget)
        for name, (rent, budget) in protocol.settings.items()
    }
    readout = Readout(campaign.results, terms, protocol.rents)
    cells, tasks = readout.normalised(), list(protocol.tasks)
    against = compare(cells, tasks, resamples=protocol.resamples)
    return Evidence(
        campaign=campaign,
        readout=readout,
        cells=cells,
        tasks=tasks,
        against=against,
        goals=claims(cells, tasks, against),
        arms=[name for name in STYLES if name in readout.arms],
        resamples=protocol.resamples,
    )


def page(known: Evidence, plots: Sequence[Plot] = (), findings: str = "") -> list[str]:
    """Lines of Markdown.

    Args:
        known: What the campaign shows.
        plots: Its figures.
        findings: What people have to say, in Markdown.
    """
    campaign, readout, cells = known.campaign, known.readout, known.cells
    tasks, against, arms = known.tasks, known.against, known.arms
    resamples = known.resamples
    ablations = [name for name in readout.arms if name not in ARMS]
    shown = {
        each.name: f"![{_alt(each.alt)}]({FIGURES}/{each.name}.svg)" for each in plots
    }
    lines = ["# Does a learned controller pay?", MARK, ""]
    lines += [f"**{headline(known)}**", ""]
    lines += [*_setup(campaign, readout), ""]
    lines += _section(
        "Goals that were set beforehand", tables.claims_table(known.goals)
    )
    whole = tables.arms_table(readout, cells, tasks, against, arms, resamples)
    lines += _section("All tasks together", whole, [LEGEND] if whole else [])
    lines += _shown(shown, "forest")
    costly = [line for price in PRICES for line in _shown(shown, price.name)]
    lines += _section("Score against cost", costly[:-1])
    lines += _each_task(readout, cells, tasks, against, arms, resamples)
    lines += _section(
        "At each rent",
        tables.rents_table(readout, tasks, arms, resamples),
        ["Normalised objective over all tasks, with n."],
    )
    lines += _section(
        "At each budget",
        tables.budgets_table(readout, tasks, arms, resamples),
        [
            "Test score in %, mean over the tasks that were run at all budgets, with "
            "n. Budget: parameters that may be added."
        ],
    )
    lines += _section(
        "With something taken away",
        tables.ablations_table(cells, tasks, ablations, resamples),
        [
            "Few controllers each: these intervals are wide. `nothing` is what nothing "
            "was taken from, trained as long as the others."
        ],
    )
    lines += _section(
        "Learning rates that tuning chose",
        tables.rates_table(readout, tasks, [*arms, *ablations]),
        ["As a multiple of the task's own."],
    )
    lines += _section("Training", [tables.training_cost(campaign.trainings)])
    went_wrong = tables.failures(campaign.results, campaign.jobs)
    lines += _section("What failed", _bullets(went_wrong))
    if findings.strip():
        lines += [findings.strip(), ""]
    lines += _commands(plots)
    return lines[:-1]


def headline(known: Evidence) -> str:
    """The outcome in two sentences, whichever way it fell."""
    cells, found = known.cells, known.goals
    done = cells.done(LEARNED, known.tasks)
    if not done:
        return "Nothing has been counted for Tamiyo yet, so there is no result."
    share = _percent(iqm_interval(cells.of(LEARNED, done), resamples=known.resamples))
    many = len(cells.members[LEARNED])
    tasks = f"{len(done)} held-out task{'s' if len(done) != 1 else ''}"
    first = (
        f"On {tasks}, Tamiyo ({many} controller{'s' if many != 1 else ''}) {share} of "
        "the errors of a network that is never grown, net of rent."
    )
    parts = []
    for verdict in (REACHED, MISSED, OPEN):
        named = [claim.short for claim in found if claim.verdict == verdict]
        if named:
            be = "is" if len(named) == 1 else "are"
            parts.append(f"{len(named)} {be} {verdict} ({', '.join(named)})")
    return f"{first} Of {len(found)} goals {'; '.join(parts)}."


def _percent(share: Interval) -> str:
    """A share that was removed, or added if it is below zero."""
    sign, what = (1, "removes") if share.estimate >= 0.0 else (-1, "adds")
    text = f"{what} {100 * sign * share.estimate:.1f} %"
    if not isfinite(share.low):
        return text
    low, high = sorted(100 * sign * end for end in (share.low, share.high))
    doubt = "" if low > 0.0 else "; not distinguished from 0"
    return f"{text} [{low:.1f}, {high:.1f}{doubt}]".replace("-", "−")


def _setup(campaign: Campaign, readout: Readout) -> list[str]:
    protocol = campaign.protocol
    counted = protocol.counted
    rents = ", ".join(f"{readout.terms[name].rent:g}" for name in readout.rents)
    budgets = ", ".join(f"{readout.terms[name].budget:g}" for name in readout.budgets)
    rates = ", ".join(f"{rate:g}" for rate in protocol.rates)
    ended = sum(job["state"] == "done" for job in campaign.jobs)
    versions = ", ".join(f"{k} {v}" for k, v in sorted(campaign.versions.items()))
    lines = [
        f"- Protocol [`{campaign.sha[:12]}`](protocol.md), fixed on {campaign.began} "
        "before anything was counted; no decision, reward or tuning sees test rows.",
        f"- Tasks: {', '.join(protocol.tasks)}; of each "
        f"{counted.blocks * counted.hosts} networks, the same for everybody. "
        f"{protocol.controllers.count} controllers, each trained by itself.",
        f"- Rents {rents} (of the score, for as many parameters as the host has); "
        "their mean is the objective. Budgets: "
        f"{budgets} times the host's parameters.",
        f"- Learning rate of every arm and task: the best of {rates} times the task's "
        f"own, by decision rows of {protocol.tuning.hosts} other networks.",
        f"- {ended} of {len(campaign.jobs)} jobs are done"
        + ("." if ended == len(campaign.jobs) else "; figures may still change."),
    ]
    if versions:
        lines.append(f"- Versions: {versions}.")
    return lines


def _each_task(
    readout: Readout,
    cells: Cells,
    tasks: Sequence[str],
    against: Mapping[str, Versus],
    arms: Sequence[str],
    resamples: int,
) -> list[str]:
    lines: list[str] = []
    for task in tasks:
        rows = tables.task_table(readout, cells, task, against, arms, resamples)
        if rows:
            lines += [f"### {task}", "", *rows, ""]
    return ["## Task by task", "", *lines] if lines else []


def _section(title: str, *parts: Sequence[str]) -> list[str]:
    """A title with what stands below it; nothing if there is nothing to say."""
    if not any(parts[0]):
        return []
    return [f"## {title}", "", *(line for part in parts for line in [*part, ""])]


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"- {line}" for line in lines]


def _shown(figures: Mapping[str, str], name: str) -> list[str]:
    return [figures[name], ""] if name in figures else []


def _alt(text: str) -> str:
    return text.replace("[", "(").replace("]", ")")


def _commands(plots: Sequence[Plot]) -> list[str]:
    names = ", ".join(f"`{FIGURES}/{plot.name}.svg`" for plot in plots)
    what = f"every table above and {names}" if names else "this page"
    return [
        "## Reproduce",
        "",
        "```",
        "python -m evidence run docs/evidence/protocol.toml   # all that is counted",
        "python -m evidence page                              # tables and figures",
        "```",
        "",
        f"The first command trains the controllers and fills `runs/evidence/{LEDGER}`; "
        f"it goes on where it was stopped. The second makes {what} from it.",
        "",
    ]
