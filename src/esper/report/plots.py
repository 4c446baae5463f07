"""Draws all plots of a report; a plot without data is left out."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np

from esper.contracts.actions import HEAD_NAMES
from esper.contracts.messages import one_line
from esper.contracts.stages import Stage
from esper.evaluation.statistics import Floats, Interval
from esper.evaluation.summary import ArmSummary
from esper.report.data import Columns, LastEpisodes, RunData, SeedCounts, StageSpan
from esper.report.style import (
    LIGHT,
    LINE_COLOURS,
    WIDTH,
    Plot,
    new_figure,
    plot_style,
    render,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_BLUEPRINTS: Final = 14
"""Number of blueprints with a row of their own; the others share one."""
OTHERS: Final = "all others"
ROW_HEIGHT: Final = 26
"""Pixels per controller or blueprint."""
LANE_HEIGHT: Final = 11
"""Pixels per slot; the gap between two environments is half of it."""
LETTER_WIDTH: Final = 4.6
"""Approximate pixels per letter on a bar."""
STAGES: Final[Mapping[str, tuple[str, str]]] = {
    Stage.TRAINING.name: ("training", "training"),
    Stage.BLENDING.name: ("blending", "blending"),
    Stage.HOLDING.name: ("holding", "holding"),
    Stage.FOSSILIZED.name: ("kept", "kept"),
    Stage.COOLING.name: ("cooling", "pruned, fading out"),
}
"""Colour and label of each stage."""
BASELINES: Final = {"never": "amber", "random": "purple"}
"""Colours of the baselines that every learning curve shows."""
ACTION_LABELS: Final = {
    "planted": "plant",
    "blending": "blend",
    "aimed": "set alpha",
    "pruned": "prune",
    "kept": "keep",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResults:
    """Evaluations of one task."""

    periodic: Sequence[tuple[int, Interval]] = ()
    """Round and return of the policy on the validation hosts."""
    arms: Sequence[ArmSummary] = ()
    """All arms in the final evaluation, lowest return first."""

    @property
    def best(self) -> ArmSummary | None:
        """The arm with the highest return that is not learned."""
        return next((arm for arm in reversed(self.arms) if not arm.learned), None)

    def colour(self, arm: ArmSummary) -> str:
        """The colour of an arm in all plots."""
        other = "green" if arm is self.best else "grey"
        return LIGHT["blue" if arm.learned else BASELINES.get(arm.name, other)]


def draw_plots(
    run: RunData, results: Mapping[str, TaskResults]
) -> dict[str, list[Plot]]:
    """Returns all plots of a run, by section of the page."""
    tasks = [*run.tasks, *(task for task in results if task not in run.tasks)]
    sections: dict[str, list[Plot]] = {
        name: [] for name in ("comparison", "learning", "seeds", "blueprints", "heads")
    }
    with plot_style():
        for index, task in enumerate(tasks, 1):
            name, result = f"{index}-{_slug(task)}", results.get(task, TaskResults())
            if result.arms:
                plot = forest_plot(f"arms-{name}", task, result)
                sections["comparison"].append(plot)
            if task in run.returns:
                plot = learning_curve(
                    f"learning-{name}", task, run.returns[task], result
                )
                sections["learning"].append(plot)
            if task in run.last_episodes:
                plot = swimlanes(f"seeds-{name}", task, run.last_episodes[task])
                sections["seeds"].append(plot)
            if counts := run.seed_counts.get(task):
                sections["blueprints"] += [
                    planted_heatmap(f"planted-{name}", task, counts),
                    outcome_bars(f"outcomes-{name}", task, counts),
                ]
        at = run.actions["round"]
        if sections["blueprints"] and len(at):
            actions = {ACTION_LABELS[k]: (at, run.actions[k]) for k in ACTION_LABELS}
            grown = {
                task: (run.returns[task]["round"], run.returns[task]["added"])
                for task in tasks
                if task in run.returns
            }
            sections["blueprints"] += [
                line_plot("actions", "Actions per hundred decisions", actions),
                line_plot("grown", "Added parameters, multiple of the host", grown),
            ]
        heads = [h for h in dict.fromkeys((*HEAD_NAMES, *run.heads)) if h in run.heads]
        for figure, title in (
            ("entropy", "Entropy per head"),
            ("kl", "KL divergence per head"),
        ):
            lines = {h: (run.heads[h]["round"], run.heads[h][figure]) for h in heads}
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
    explained, clipped = rounds["explained_variance"], rounds["clip_fraction"]
    return [
        line_plot(name, title, {title: (at, values)}, healthy)
        for name, title, values, healthy in (
            ("clipped", "Clip fraction", clipped, (0.02, 0.3)),
            ("explained", "Explained variance", explained, None),
            ("taken", "Fraction of planned optimiser steps", taken, None),
            ("speed", "Decisions per second", speed, None),
            ("refused", "Skipped optimiser steps", rounds["refused"], None),
        )
        if name != "refused" or run.refused
    ]


def forest_plot(name: str, task: str, results: TaskResults) -> Plot:
    """Return, test score and size of every arm, best arm first."""
    ordered = results.arms[::-1]
    title = f"Controllers on {one_line(task, 24)}, 95 % intervals"
    figure = new_figure(title, 84 + ROW_HEIGHT * len(ordered))
    returns, test, size = figure.subplots(1, 3, sharey=True)
    for row, arm in enumerate(ordered):
        colour = results.colour(arm)
        for axes, at in ((returns, arm.returns), (test, arm.test)):
            axes.plot([at.low, at.high], [row, row], color=colour)
            axes.plot(at.estimate, row, "o", color=colour)
        size.plot(arm.parameters, row, "o", color=colour)
    for axes, label in ((returns, "return"), (test, "test score"), (size, "size, ×")):
        _rows(axes, [one_line(arm.name, 16) for arm in ordered])
        axes.set_title(label)
        axes.grid(visible=True, axis="x")
        axes.locator_params(axis="x", nbins=3)
        axes.margins(x=0.1)
    size.axvline(1.0, color=LIGHT["muted"], lw=0.8)
    values = ", ".join(
        f"{one_line(arm.name)} {arm.returns:.3f}, test score {arm.test.estimate:.3f} "
        f"at {arm.parameters:.2g} times the host"
        for arm in ordered
    )
    return render(figure, name, f"Return on {one_line(task, 24)}: {values}.")


def learning_curve(
    name: str, task: str, returns: Columns, results: TaskResults
) -> Plot:
    """Return on a task over rounds, with the levels of baselines."""
    figure = new_figure(f"Return on {one_line(task, 32)}", 290)
    axes = figure.subplots()
    rounds, mean = returns["round"], returns["return"]
    axes.plot(rounds, mean, ".", color=LIGHT["grey"], alpha=0.45, mew=0)
    axes.plot(rounds, smoothed(mean), color=LIGHT["muted"], label="training")
    levels = [
        arm for arm in results.arms if arm.name in BASELINES or arm is results.best
    ]
    for arm in levels:
        level, colour = arm.returns, results.colour(arm)
        axes.axhspan(level.low, level.high, color=colour, alpha=0.07, lw=0)
        label = one_line(arm.name, 18) + ", best" * (arm.name not in BASELINES)
        axes.axhline(level.estimate, color=colour, lw=1.2, ls="--", label=label)
    points = [(number, at, "o", 5) for number, at in results.periodic]
    final = [arm.returns for arm in results.arms if arm.learned][-1:]
    # Shifted to the right, so that it does not hide the last round.
    points += [(rounds.max(initial=1.0) * 1.03, at, "D", 7) for at in final]
    for number, at, marker, size in points:
        axes.plot([number] * 2, [at.low, at.high], color=LIGHT["blue"], lw=1.3)
        label = "Tamiyo, test hosts" if final else "Tamiyo, validation hosts"
        axes.plot(
            number,
            at.estimate,
            marker,
            color=LIGHT["blue"],
            ms=size,
            label=label if at is points[-1][1] else None,
        )
    _round_axis(figure, axes)
    alt = (
        f"Learning curve on {one_line(task)}: mean return of training episodes from "
        f"{_first(mean)} to {_first(mean[::-1])}; {len(results.periodic)} periodic "
        f"evaluations; levels of "
        f"{', '.join(one_line(arm.name) for arm in levels) or 'no other arm'}."
    )
    return render(figure, name, alt)


def line_plot(
    name: str,
    title: str,
    lines: Mapping[str, tuple[Floats, Floats]],
    healthy: tuple[float, float] | None = None,
) -> Plot:
    """Smoothed curves over rounds, with a dot for each round.

    `lines` has rounds and values by label; a single line gets no legend. `healthy` is
    the usual range, drawn as a green band.
    """
    figure = new_figure(title, 170 if len(lines) == 1 else 290)
    axes = figure.subplots()
    if healthy is not None:
        axes.axhspan(*healthy, color=LIGHT["green"], alpha=0.1, lw=0)
    ends = []
    for index, (label, (rounds, values)) in enumerate(lines.items()):
        colour, line = LIGHT[LINE_COLOURS[index % len(LINE_COLOURS)]], smoothed(values)
        axes.plot(rounds, values, ".", color=colour, ms=4, alpha=0.3, mew=0)
        axes.plot(rounds, line, color=colour, label=one_line(label, 18))
        ends.append(f"{one_line(label)} {_first(values)} to {_first(line[::-1])}")
    low, high = axes.get_ylim()
    if low >= 0.0 or name != "explained":  # only this can be negative
        axes.set_ylim(bottom=0.0)
    elif high - low < 1e-6:  # a constant and its rounding errors
        axes.set_ylim(low - 0.1, high + 0.1)
    _round_axis(figure, axes, legend=len(lines) > 1)
    return render(figure, name, f"{title} over rounds: {', '.join(ends)}.")


def planted_heatmap(name: str, task: str, counts: Sequence[SeedCounts]) -> Plot:
    """Percentage of seeds by blueprint and slot, in the first and last third."""
    order = _blueprint_rows(counts)
    slots = sorted({count.slot for count in counts})
    title = f"Seeds on {one_line(task, 32)}, % by slot"
    figure = new_figure(title, 84 + ROW_HEIGHT * len(order))
    most = []
    for axes, third, label in zip(
        figure.subplots(1, 2, sharey=True),
        ("early", "late"),
        ("first third of the rounds", "last third"),
        strict=True,
    ):
        cells: Counter[tuple[str, int]] = Counter()
        for count in counts:
            if count.third == third:
                cells[_row(count, order), count.slot] += count.planted
        total, largest = max(1, cells.total()), max(1, *cells.values(), 1)
        for (row, slot), planted in cells.items():
            if planted:
                x, y = slots.index(slot), order.index(row)
                # Lighter than the text on it.
                alpha = 0.06 + 0.6 * planted / largest
                axes.barh(y, 0.94, 0.9, x - 0.47, color=LIGHT["blue"], alpha=alpha)
                share = f"{100 * planted / total:.0f}"
                axes.text(x, y, share, ha="center", va="center_baseline")
        _rows(axes, order)
        axes.set_xlim(-0.5, len(slots) - 0.5)
        axes.set_xticks(range(len(slots)), map(str, slots))
        axes.set_title(label)
        for (row, slot), planted in cells.most_common(1):
            share = f"{100 * planted / total:.0f} %"
            most.append(f"{label}: most often {row} in slot {slot}, {share}")
    alt = f"Percentage of seeds planted on {one_line(task)}; {'; '.join(most)}."
    return render(figure, name, alt)


def outcome_bars(name: str, task: str, counts: Sequence[SeedCounts]) -> Plot:
    """Percentage of seeds that were kept, pruned or neither, by blueprint."""
    order = _blueprint_rows(counts)
    title = f"Outcome of seeds on {one_line(task, 24)}, %"
    figure = new_figure(title, 84 + ROW_HEIGHT * len(order))
    axes = figure.subplots()
    numbers = np.zeros((3, len(order)))
    for count in counts:
        neither = count.planted - count.kept - count.pruned
        numbers[:, order.index(_row(count, order))] += count.kept, neither, count.pruned
    planted = numbers.sum(axis=0)
    shares = 100 * numbers / np.maximum(planted, 1)
    starts = np.cumsum(shares, axis=0) - shares
    for label, colour, share, start in zip(
        ("kept", "neither", "pruned"),
        ("kept", "training", "cooling"),
        shares,
        starts,
        strict=True,
    ):
        bars = axes.barh(
            range(len(order)), share, 0.7, start, color=LIGHT[colour], label=label
        )
        written = [f"{one:.0f}" if one >= 9 else "" for one in share]
        axes.bar_label(bars, written, label_type="center")
    _rows(axes, [f"{row} ({n:,.0f})" for row, n in zip(order, planted, strict=True)])
    axes.set_xlim(0, 100)
    figure.legend(loc="outside lower left", ncols=3)
    kept = [f"{row} {s:.0f} % kept" for row, s in zip(order, shares[0], strict=True)]
    return render(figure, name, f"{title}: {', '.join(kept)}.")


def swimlanes(name: str, task: str, episodes: LastEpisodes) -> Plot:
    """Stages of every seed, with one lane per slot and environment."""
    slots = 1 + max((span.slot for span in episodes.spans), default=0)
    envs = sorted(episodes.lengths)
    height, longest = slots + 0.5, max([1, *episodes.lengths.values()])
    figure = new_figure(one_line(task, 40), 80 + len(envs) * height * LANE_HEIGHT)
    axes = figure.subplots()
    axes.set_xlim(0, longest)
    axes.set_ylim(max(1, len(envs)) * height, 0)
    axes.grid(visible=False, axis="y")
    middles = [height * (index + 0.5) for index in range(len(envs))]
    axes.set_yticks(middles, map(str, envs))
    axes.set_xlabel("decision of the episode")
    axes.set_ylabel("env")
    top = {env: height * index + 0.75 for index, env in enumerate(envs)}
    for env, length in episodes.lengths.items():
        lanes = [top[env] + slot for slot in range(slots)]
        axes.barh(lanes, length, 0.9, color=LIGHT["rule"], alpha=0.35)
    tooltips: dict[str, str] = {}
    for span in episodes.spans:
        gid = f"tip{len(tooltips)}"
        tooltips[gid] = _tooltip(span)
        colour = LIGHT[STAGES.get(span.stage, ("grey", ""))[0]]
        at, wide = top[span.env] + span.slot, span.end - span.start
        axes.barh(at, wide, 0.9, span.start, color=colour, gid=gid)
    seeds = 0
    for _, one in groupby(episodes.spans, lambda s: (s.env, s.slot, s.seed)):
        spans, seeds = [*one], seeds + 1
        first = spans[0]
        share = (spans[-1].end - first.start) / longest
        letters = int((share * (WIDTH - 44) - 4) / LETTER_WIDTH)
        if letters >= min(4, len(first.blueprint)):
            text, at = one_line(first.blueprint, letters), top[first.env] + first.slot
            axes.text(first.start, at, f" {text}", size=8, va="center_baseline")
    kept = sum(span.stage == Stage.FOSSILIZED.name for span in episodes.spans)
    alt = (
        f"Swimlanes of {one_line(task)}: {seeds} seeds in the last episodes of "
        f"{len(envs)} environments, {kept} of them kept."
    )
    return render(figure, name, alt, tooltips)


def smoothed(values: Floats) -> Floats:
    """Centred moving average over a tenth of the values; NaN is ignored."""
    if not len(values):
        return values
    window = np.ones(2 * (len(values) // 20) + 1)
    known = np.isfinite(values)
    sums, counts = (
        np.convolve(np.pad(one, len(window) // 2), window, mode="valid")
        for one in (np.where(known, values, 0.0), known.astype(np.float64))
    )
    means: Floats = np.where(counts > 0.0, sums / np.maximum(counts, 1.0), np.nan)
    return means


def _tooltip(span: StageSpan) -> str:
    label = STAGES.get(span.stage, ("", span.stage.lower()))[1]
    return (
        f"{one_line(span.blueprint)}, {label}: decision {span.start} to {span.end} "
        f"(environment {span.env}, slot {span.slot})"
    )


def _round_axis(figure: "Figure", axes: "Axes", *, legend: bool = True) -> None:
    axes.locator_params(axis="x", nbins=6, integer=True, min_n_ticks=1)
    axes.locator_params(axis="y", nbins=5)
    axes.set_xlabel("round")
    if legend:
        figure.legend(loc="outside lower left", ncols=4, fontsize="small")


def _rows(axes: "Axes", labels: Sequence[str]) -> None:
    """Label the rows of a chart from top to bottom."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(visible=False)


def _blueprint_rows(counts: Sequence[SeedCounts]) -> list[str]:
    """Labels of blueprints, most frequent first."""
    planted: Counter[str] = Counter()
    for count in sorted(counts, key=lambda count: count.blueprint):
        planted[count.blueprint] += count.planted
    names = [name for name, _ in planted.most_common()]
    rows = [one_line(name, 16) for name in names[:MAX_BLUEPRINTS]]
    return [*dict.fromkeys(rows), *([OTHERS] if len(names) > MAX_BLUEPRINTS else [])]


def _row(count: SeedCounts, order: Sequence[str]) -> str:
    name = one_line(count.blueprint, 16)
    return name if name in order else OTHERS


def _first(values: Floats) -> str:
    known = values[np.isfinite(values)]
    return f"{known[0]:.3g}" if len(known) else "unknown"


def _slug(task: str) -> str:
    """The name of a task as part of a file name."""
    return re.sub("[^a-z0-9]+", "-", task.lower()).strip("-")[:32] or "task"
