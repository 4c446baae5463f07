"""All plots of a report; what a run has no numbers for is not drawn."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.stages import Stage
from esper.experiment.statistics import Floats, Interval
from esper.experiment.summary import ArmSummary
from esper.report.data import Columns, LastEpisodes, RunData, SeedCounts, StageSpan
from esper.report.style import (
    LINES,
    WIDTH,
    Number,
    Plot,
    add_axes,
    add_rectangle,
    add_text,
    label_ends,
    light,
    new_figure,
    one_line,
    plot_style,
    render,
    spread,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS: Final = 150
"""Rounds that are drawn as dots, at most."""
BLUEPRINTS: Final = 14
"""Blueprints that are shown; the others are added up."""
OTHERS: Final = "all others"
ROW: Final = 26
"""Pixels of one row of a chart of arms or blueprints."""
LANE, BAR, GAP = 11, 9.5, 6
"""Pixels of a slot's lane, of a bar in it, and between two environments."""
LETTER: Final = 4.6
"""Pixels of a letter on a bar, about."""
STAGES: Final[Mapping[str, tuple[str, str]]] = {
    Stage.TRAINING.name: ("training", "training beside the host"),
    Stage.BLENDING.name: ("blending", "blending in"),
    Stage.HOLDING.name: ("holding", "holding"),
    Stage.FOSSILIZED.name: ("kept", "kept for good"),
    Stage.COOLING.name: ("cooling", "cooling, pruned"),
}
"""Colour and label of each stage."""
SIMPLE: Final = {"never": "amber", "random": "purple"}
"""Colours of the simplest baselines."""
ACTION_LABELS: Final = {
    "planted": "plant",
    "blending": "blend in",
    "aimed": "set alpha",
    "pruned": "prune",
    "kept": "keep",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """Evaluations of one task."""

    periodic: Sequence[tuple[int, Interval]] = ()
    """Round and return of the policy during training, always on the same hosts."""
    arms: Sequence[ArmSummary] = ()
    """All arms at the end, lowest return first."""

    @property
    def final(self) -> Interval | None:
        """Return of the policy at the end."""
        learned = [arm.returns for arm in self.arms if arm.learned]
        return learned[-1] if learned else None

    @property
    def levels(self) -> dict[str, ArmSummary]:
        """Arms that a learning curve is held against, by their labels."""
        found = {arm.name: arm for arm in self.arms if arm.name in SIMPLE}
        if (best := self.best) and best.name not in SIMPLE:
            found[f"{best.name}, best"] = best
        return found

    @property
    def best(self) -> ArmSummary | None:
        """The highest of those that do not learn."""
        return next((arm for arm in reversed(self.arms) if not arm.learned), None)

    def colour(self, arm: ArmSummary) -> str:
        """Of one arm in all plots."""
        if arm.learned:
            return "blue"
        return SIMPLE.get(arm.name, "green" if arm is self.best else "grey")


def draw_plots(
    run: RunData, results: Mapping[str, TaskResults]
) -> dict[str, list[Plot]]:
    """All plots of a run, by section of the page."""
    tasks = [*run.tasks, *(task for task in results if task not in run.tasks)]
    files = {task: f"{index}-{_slug(task)}" for index, task in enumerate(tasks, 1)}
    sections: dict[str, list[Plot]] = {
        name: [] for name in ("comparison", "learning", "seeds", "blueprints", "heads")
    }
    with plot_style():
        for task in tasks:
            name, result = files[task], results.get(task, TaskResults())
            if result.arms:
                sections["comparison"] += [
                    forest_plot(f"arms-{name}", task, result),
                    size_scatter(f"size-{name}", task, result),
                ]
            if task in run.returns:
                sections["learning"].append(
                    learning_curve(f"learning-{name}", task, run.returns[task], result)
                )
            if task in run.last_episodes:
                episodes = run.last_episodes[task]
                sections["seeds"].append(swimlanes(f"seeds-{name}", task, episodes))
            if task in run.seed_counts:
                counts = run.seed_counts[task]
                sections["blueprints"] += [
                    planted_heatmap(f"planted-{name}", task, counts),
                    outcome_bars(f"outcomes-{name}", task, counts),
                ]
        at = run.actions["round"]
        if sections["blueprints"] and len(at):
            actions = [(ACTION_LABELS[k], at, run.actions[k]) for k in ACTION_LABELS]
            grown = [
                (task, run.returns[task]["round"], run.returns[task]["added"])
                for task in tasks
                if task in run.returns
            ]
            sections["blueprints"] += [
                line_plot("actions", "Actions per hundred decisions", actions),
                line_plot("grown", "Parameters added by the end, in multiples", grown),
            ]
        order = [*HEAD_NAMES, *run.heads]
        heads = {head: run.heads[head] for head in order if head in run.heads}
        for figure, title in (
            ("entropy", "Entropy of each head"),
            ("kl", "KL of each head in an update"),
        ):
            lines = [(head, one["round"], one[figure]) for head, one in heads.items()]
            if lines:
                sections["heads"].append(line_plot(figure, title, lines))
        sections["updates"] = _update_plots(run)
    return sections


def _update_plots(run: RunData) -> list[Plot]:
    rounds = run.rounds
    at = rounds["round"]
    if not len(at):
        return []
    steps = np.diff(rounds["env_steps"], prepend=0.0)
    seconds = np.diff(rounds["seconds"], prepend=0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        speed = np.where(seconds > 0.0, steps / seconds, np.nan)
        taken = rounds["steps_taken"] / rounds["steps_planned"]
    title = "Share of steps that were clipped"
    clipped, explained = rounds["clip_fraction"], rounds["explained_variance"]
    plots = [
        update_plot("clipped", title, at, clipped, healthy=(0.02, 0.3)),
        update_plot("explained", "Explained variance of returns", at, explained),
        update_plot("taken", "Share of planned optimiser steps taken", at, taken),
        update_plot("speed", "Decisions per second", at, speed),
    ]
    if run.refused:
        plots.append(update_plot("refused", "Refused steps", at, rounds["refused"]))
    return plots


def forest_plot(name: str, task: str, results: TaskResults) -> Plot:
    """The return of every arm with its interval, the best on top."""
    ordered = results.arms[::-1]
    title = f"Return on {one_line(task, 24)}, 95 % intervals"
    figure = new_figure(title, WIDTH, 64 + ROW * len(ordered))
    axes = add_axes(figure, left=104, right=14)
    for row, arm in enumerate(ordered):
        at, colour = arm.returns, results.colour(arm)
        axes.plot([at.low, at.high], [row, row], color=light(colour), lw=2.2)
        _point(axes, at.estimate, row, colour)
    _rows(axes, [one_line(arm.name, 16) for arm in ordered])
    axes.margins(x=0.04)
    axes.grid(visible=True, axis="x")
    values = ", ".join(f"{one_line(arm.name)} {arm.returns:.3f}" for arm in ordered)
    return render(figure, name, f"{title}: {values}.")


def size_scatter(name: str, task: str, results: TaskResults) -> Plot:
    """Test score with its interval against parameters."""
    title = f"Test score on {one_line(task, 18)} against size"
    figure = new_figure(title, WIDTH, 290)
    axes = add_axes(figure, right=84, bottom=42)
    for arm in results.arms:
        at, colour = arm.test, results.colour(arm)
        _point(axes, arm.parameters, at.estimate, colour, bounds=at)
    axes.margins(x=0.12, y=0.1)
    axes.set_xlim(left=min(0.9, axes.get_xlim()[0]))
    axes.set_xlabel("parameters, in multiples of the host's", labelpad=4)
    box = axes.get_window_extent()
    ordered = sorted(results.arms, key=lambda arm: arm.test.estimate)
    points = [(arm.parameters, arm.test.estimate) for arm in ordered]
    levels = [float(axes.transData.transform(point)[1]) for point in points]
    heights = spread(levels, 12.0, box.y0, box.y1)
    for arm, point, level, height in zip(ordered, points, levels, heights, strict=True):
        colour = results.colour(arm).replace("grey", "muted")
        offset = (9, height - level + 7 * (height == level))
        add_text(axes, one_line(arm.name, 16), point, offset, colour=colour)
    values = ", ".join(
        f"{one_line(arm.name)} {arm.test.estimate:.3f} at "
        f"{arm.parameters:.2g} times the host"
        for arm in results.arms
    )
    return render(figure, name, f"{title}: {values}.")


def learning_curve(
    name: str, task: str, returns: Columns, results: TaskResults
) -> Plot:
    """Returns of a task over rounds, beside what others reach."""
    figure = new_figure(f"Return on {one_line(task, 32)}", WIDTH, 270)
    axes = add_axes(figure, right=118)
    labels = []
    for label, arm in results.levels.items():
        name_of, level = results.colour(arm), arm.returns
        colour = light(name_of)
        axes.axhspan(level.low, level.high, color=colour, alpha=0.07, lw=0)
        axes.axhline(level.estimate, color=colour, lw=1.2, ls=(0, (4, 3)))
        labels.append((level.estimate, one_line(label, 18), name_of))
    rounds, mean = returns["round"], returns["return"]
    if len(rounds):
        _each_round(axes, rounds, mean, "grey")
        smooth = smoothed(mean)
        axes.plot(rounds, smooth, color=light("muted"))
        if np.isfinite(smooth[-1]):
            labels.append((float(smooth[-1]), "training", "muted"))
    last = float(rounds[-1]) if len(rounds) else 1.0
    for number, at in results.periodic:
        _point(axes, number, at.estimate, "blue", bounds=at, size=6)
    final = results.final
    if final is not None:
        # A little to the right, so that it does not hide the last round.
        _point(axes, last * 1.03, final.estimate, "blue", bounds=final, marker="D")
        labels.append((final.estimate, "Tamiyo, at the end", "blue"))
    elif results.periodic:
        level = results.periodic[-1][1]
        labels.append((level.estimate, "Tamiyo, same hosts", "blue"))
    _round_axis(axes, last * (1.06 if final is not None else 1.0))
    axes.margins(y=0.08)
    label_ends(axes, labels)
    span = f"from {_first(mean)} to {_first(mean[::-1])}" if len(rounds) else "absent"
    alt = (
        f"Learning curve on {one_line(task)}: mean return of training episodes {span}; "
        f"{len(results.periodic)} evaluations in between; levels of "
        f"{', '.join(map(one_line, results.levels)) or 'no other arm'}."
    )
    return render(figure, name, alt)


def update_plot(
    name: str,
    title: str,
    rounds: Floats,
    values: Floats,
    healthy: tuple[float, float] | None = None,
) -> Plot:
    """One figure of the PPO update over rounds; the green band is healthy."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(title, WIDTH, 170)
    axes = add_axes(figure, right=48)
    if healthy is not None:
        axes.axhspan(*healthy, color=light("green"), alpha=0.1, lw=0)
    _each_round(axes, rounds, values, "blue")
    axes.plot(rounds, smoothed(values), color=light("blue"))
    _round_axis(axes, float(rounds[-1]))
    axes.margins(y=0.12)
    low, high = axes.get_ylim()
    if name != "explained":  # the only figure that may be negative
        axes.set_ylim(bottom=0.0)
    elif high - low < 1e-6:  # do not zoom in on the rounding of a constant
        axes.set_ylim(low - 0.1, high + 0.1)
    axes.yaxis.set_major_locator(MaxNLocator(4))
    ends = f"{_first(values)} at first, {_first(values[::-1])} at last"
    return render(figure, name, f"{title} over rounds: {ends}.")


def line_plot(
    name: str, title: str, lines: Sequence[tuple[str, Floats, Floats]]
) -> Plot:
    """Several curves from zero on, each with its name at its end.

    Args:
        name: Of the files.
        title: What is drawn.
        lines: Name, rounds and values of each.
    """
    figure = new_figure(title, WIDTH, 270)
    axes = add_axes(figure, right=104)
    labels, ends, last = [], [], 1.0
    for index, (label, rounds, values) in enumerate(lines):
        colour, line = LINES[index % len(LINES)], smoothed(values)
        axes.plot(rounds, values, color=light(colour), lw=0.7, alpha=0.3)
        axes.plot(rounds, line, color=light(colour))
        last = max(last, float(rounds[-1]))
        if np.isfinite(line[-1]):
            labels.append((float(line[-1]), one_line(label, 14), colour))
        ends.append(f"{one_line(label)} {_first(line[-1:])}")
    _round_axis(axes, last)
    axes.margins(y=0.06)
    axes.set_ylim(bottom=0)
    label_ends(axes, labels)
    return render(figure, name, f"{title}, over rounds; at the end: {', '.join(ends)}.")


def planted_heatmap(name: str, task: str, counts: Sequence[SeedCounts]) -> Plot:
    """Share of seeds by blueprint and slot, in the first and the last rounds."""
    order = _blueprint_rows(counts)
    slots = sorted({count.slot for count in counts})
    title = f"Planted on {one_line(task, 32)}"
    figure = new_figure(title, WIDTH, 88 + ROW * len(order))
    width, most = (WIDTH - 128) / 2, []
    for left, third, label in (
        (104, "early", "first third of the rounds"),
        (104 + width + 18, "late", "last third"),
    ):
        axes = add_axes(figure, left=left, right=WIDTH - left - width, top=58)
        cells = {(row, slot): 0 for row in order for slot in slots}
        for count in counts:
            if count.third == third:
                cells[_row(count, order), count.slot] += count.planted
        total, largest = max(1, sum(cells.values())), max(1, *cells.values())
        for (row, slot), planted in cells.items():
            if planted:
                x, y = slots.index(slot), order.index(row)
                # Behind text: at full strength it could not be read.
                alpha = 0.06 + 0.6 * planted / largest
                add_rectangle(
                    axes, (x - 0.47, y - 0.45), (0.94, 0.9), "blue", alpha=alpha
                )
                share = f"{100 * planted / total:.0f}"
                add_text(axes, share, (x, y), size=9.5, align="center")
        _rows(axes, order if third == "early" else [""] * len(order))
        axes.set_xlim(-0.5, len(slots) - 0.5)
        axes.set_xticks(range(len(slots)), map(str, slots))
        axes.set_xlabel("slot; shares in %", labelpad=2)
        axes.spines["bottom"].set_visible(False)
        axes.tick_params(axis="x", length=0)
        axes.set_title(label, size=10.5, color=light("muted"), loc="left", pad=6)
        row, slot = max(cells, key=lambda cell: cells[cell])
        share = f"{100 * cells[row, slot] / total:.0f} %"
        most.append(f"{label}: most often {row} in slot {slot}, {share}")
    alt = f"Share of seeds planted on {one_line(task)}; {'; '.join(most)}."
    return render(figure, name, alt)


def outcome_bars(name: str, task: str, counts: Sequence[SeedCounts]) -> Plot:
    """Shares of each blueprint's seeds that were kept, pruned, or neither."""
    order = _blueprint_rows(counts)
    title = f"Outcome of seeds on {one_line(task, 24)}"
    figure = new_figure(title, WIDTH, 88 + ROW * len(order))
    axes = add_axes(figure, left=104, right=52, top=58)
    totals = {row: [0, 0, 0] for row in order}
    for count in counts:
        total = totals[_row(count, order)]
        total[0] += count.kept
        total[1] += count.planted - count.kept - count.pruned
        total[2] += count.pruned
    outcomes = (("kept", "kept"), ("neither", "training"), ("pruned", "cooling"))
    for row, numbers in enumerate(totals.values()):
        start, planted = 0.0, max(1, sum(numbers))
        for number, (_, colour) in zip(numbers, outcomes, strict=True):
            share = 100 * number / planted
            add_rectangle(axes, (start, row - 0.35), (share, 0.7), colour)
            if share >= 9:
                middle = (start + share / 2, row)
                add_text(axes, f"{share:.0f}", middle, size=9.5, align="center")
            start += share
        add_text(axes, f"{sum(numbers):,}", (100, row), (6, 0), colour="muted", size=10)
    top = (0, 1)
    for index, (label, colour) in enumerate(outcomes):
        x = 70 * index
        where = "axes fraction"
        add_text(axes, "■", top, (x, 12), where=where, colour=colour, size=13)
        add_text(axes, label, top, (x + 15, 12), where=where, colour="muted")
    _rows(axes, order)
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 50, 100], ["0", "50", "100 %"])
    kept = [
        f"{row} {100 * numbers[0] / max(1, sum(numbers)):.0f} % kept"
        for row, numbers in totals.items()
    ]
    return render(figure, name, f"{title}: {', '.join(kept)}.")


def swimlanes(name: str, task: str, episodes: LastEpisodes) -> Plot:
    """Stages of every seed: one lane for each slot of each environment."""
    slots = 1 + max((span.slot for span in episodes.spans), default=0)
    envs = sorted(episodes.lengths)
    pitch = slots * LANE + GAP
    figure = new_figure(one_line(task, 40), WIDTH, 64 + len(envs) * pitch)
    axes = add_axes(figure, left=34, right=10)
    longest = max(1, *episodes.lengths.values())
    axes.set_xlim(0, longest)
    axes.set_ylim(len(envs) * pitch, 0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    tops = {env: index * pitch + GAP / 2 for index, env in enumerate(envs)}
    for env, top in tops.items():
        for slot in range(slots):
            size = (episodes.lengths[env], BAR)
            add_rectangle(axes, (0.0, top + slot * LANE), size, "rule", alpha=0.35)
    axes.set_yticks([top + slots * LANE / 2 for top in tops.values()], map(str, envs))
    fraction, offset = "axes fraction", (-6, 8)
    add_text(axes, "env", (0, 1), offset, where=fraction, colour="muted", align="right")
    axes.set_xlabel("decision of the episode", labelpad=2)
    tooltips: dict[str, str] = {}
    for span in episodes.spans:
        gid = f"tip{len(tooltips)}"
        tooltips[gid] = _tooltip(span)
        colour = STAGES.get(span.stage, ("grey", ""))[0]
        corner = (span.start, tops[span.env] + span.slot * LANE)
        size = (span.end - span.start, BAR)
        add_rectangle(axes, corner, size, colour, edge=0.6, gid=gid)
    pixels = (WIDTH - 44) / longest
    seeds = 0
    for _, one in groupby(episodes.spans, lambda s: (s.env, s.slot, s.seed)):
        spans, seeds = [*one], seeds + 1
        first = spans[0]
        letters = int(((spans[-1].end - first.start) * pixels - 4) / LETTER)
        if letters >= min(4, len(first.blueprint)):
            at = (first.start, tops[first.env] + first.slot * LANE + BAR / 2)
            add_text(axes, one_line(first.blueprint, letters), at, (2.5, 0), size=8)
    kept = sum(span.stage == Stage.FOSSILIZED.name for span in episodes.spans)
    alt = (
        f"Swimlanes of {one_line(task)}: {seeds} seeds in the last episodes of "
        f"{len(envs)} environments, {kept} of them kept."
    )
    return render(figure, name, alt, tooltips)


def smoothed(values: Floats) -> Floats:
    """Mean of the rounds around each, about a tenth of them, without missing ones."""
    reach = len(values) // 20
    known = np.isfinite(values)
    counts = np.concatenate([[0], np.cumsum(known)])
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    at = np.arange(len(values))
    low, high = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        means: Floats = (sums[high] - sums[low]) / (counts[high] - counts[low])
    return means


def _tooltip(span: StageSpan) -> str:
    label = STAGES.get(span.stage, ("", span.stage.lower()))[1]
    return (
        f"{one_line(span.blueprint)}, {label}: decision {span.start} to {span.end} "
        f"(environment {span.env}, slot {span.slot})"
    )


def _point(
    axes: "Axes",
    x: Number,
    y: Number,
    colour: str,
    *,
    bounds: Interval | None = None,
    marker: str = "o",
    size: Number = 7,
) -> None:
    if bounds is not None:
        axes.plot([x, x], [bounds.low, bounds.high], color=light(colour), lw=1.3)
    edge = light("background")
    axes.plot([x], [y], marker, color=light(colour), ms=size, mec=edge, mew=1)


def _each_round(axes: "Axes", rounds: Floats, values: Floats, colour: str) -> None:
    """Every round by itself: a dot, or if they are very many a point of a pale line."""
    if len(rounds) <= DOTS:
        axes.plot(rounds, values, "o", color=light(colour), ms=3, alpha=0.45, mew=0)
    else:
        axes.plot(rounds, values, color=light(colour), lw=0.7, alpha=0.35)


def _round_axis(axes: "Axes", last: float) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlim(-0.01 * last - 0.2, max(last, 1.0) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    where, offset = "axes fraction", (6, -13)
    add_text(axes, "round", (1, 0), offset, where=where, colour="muted", va="baseline")


def _rows(axes: "Axes", labels: Sequence[str]) -> None:
    """One row for each label, the first on top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False)


def _blueprint_rows(counts: Sequence[SeedCounts]) -> list[str]:
    """Blueprints, the most planted first."""
    planted: dict[str, int] = {}
    for count in counts:
        planted[count.blueprint] = planted.get(count.blueprint, 0) + count.planted
    ordered = sorted(planted, key=lambda name: (-planted[name], name))
    rows = [one_line(name, 16) for name in ordered[:BLUEPRINTS]]
    return [*dict.fromkeys(rows), *([OTHERS] if len(ordered) > BLUEPRINTS else [])]


def _row(count: SeedCounts, order: Sequence[str]) -> str:
    name = one_line(count.blueprint, 16)
    return name if name in order else OTHERS


def _first(values: Floats) -> str:
    known = values[np.isfinite(values)]
    return f"{known[0]:.3g}" if len(known) else "unknown"


def _slug(task: str) -> str:
    """A task's name as part of the name of a file; the number before it is enough."""
    return re.sub("[^a-z0-9]+", "-", task.lower()).strip("-")[:32] or "task"
