"""The log of decisions of a growing model, and its summary on one page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import TypeAdapter

from esper.contracts.stages import Stage, StageChanged
from esper.growth.actions import Receipt
from esper.growth.analysis.host_layers import is_layer, units_axis, units_of
from esper.growth.blueprints.registry import Cost
from esper.growth.model import FOLDED, GrowingModel
from esper.growth.saving.saved_topology import NAME

MAX_SEEDS_LISTED: Final = 16
MAX_CHANGES_LISTED: Final = 8


@dataclass(frozen=True, slots=True)
class GrowthDecision:
    """One decision with its measurements and effects."""

    step: int
    metric: float
    loss: float
    """Mean training loss since the last decision; NaN if `grower.loss` is unused."""
    action: str = ""
    """The controller's action, in words."""
    grew: bool = False
    """Whether the topology or an alpha changed."""
    why_not: str = ""
    """Why no seed was planted; empty if one was."""
    parameters: int = 0
    macs: int = 0
    receipts: tuple[Receipt, ...] = ()
    events: tuple[StageChanged, ...] = ()
    incidents: tuple[str, ...] = ()
    batches: int = 0
    """Batches since the Grower was built."""
    widths: tuple[tuple[str, int], ...] = ()
    """Layers whose width is new since the last decision; 0: there is none now."""

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return self.grew

    def __str__(self) -> str:
        """One line."""
        why = f" ({self.why_not})" if self.why_not else ""
        return (
            f"decision {self.step}: metric {self.metric:.4g}, loss {self.loss:.4g}, "
            f"{self.parameters:,} parameters; {self.action.partition(' (')[0]}{why}"
        )


PLAIN: Final = TypeAdapter(list[GrowthDecision])
"""Converts decisions to plain data and back."""


def layer_widths(model: GrowingModel) -> dict[str, int]:
    """Units of every layer of the host, with those of seeds that have blended in."""
    layers = {
        name: module
        for name, module in model.host.named_modules()
        if is_layer(module) and not f"{name}.".startswith(f"{NAME}.")
    }
    widths = {name: units_of(layer) for name, layer in layers.items()}
    for slot, seed in model.seeds.widening_seeds().items():
        if int(model.seeds.states.stage[0, slot]) != Stage.TRAINING:
            for name in model.seeds.place(slot).widened:
                widths[name] += seed.blueprint.size
    return widths


def first_widths(model: GrowingModel) -> dict[str, int]:
    """Units of every layer before anything grew; of a new block, its original's."""
    found = {}
    for name in layer_widths(model):
        axis = units_axis(model.host.get_submodule(name))
        found[name] = int(model.seeds.sizes[f"{name}.weight"][axis])
    return found


def changes_of(
    before: Mapping[str, int], now: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Layers whose width changed, with the new one; 0 for those that are gone."""
    names = dict.fromkeys((*now, *before))
    return tuple((n, now.get(n, 0)) for n in names if before.get(n, 0) != now.get(n, 0))


def changed_widths(
    widths: Mapping[str, int], decision: GrowthDecision
) -> dict[str, int]:
    """Widths of all layers after a decision, given those before it."""
    now = {**widths, **dict(decision.widths)}
    return {name: width for name, width in now.items() if width}


def outcome(event: StageChanged) -> Literal["planted", "kept", "pruned", ""]:
    """What an event means for a seed; empty for stages in between."""
    if event.before is Stage.DORMANT:
        return "planted"
    if Stage.FOSSILIZED in (event.before, event.after):
        return "kept" if event.after is Stage.FOSSILIZED else ""
    if event.after not in (Stage.COOLING, Stage.DORMANT):
        return ""
    if event.reason == FOLDED:
        return "kept"
    return "" if event.before is Stage.COOLING else "pruned"


def summary(
    model: GrowingModel, history: Sequence[GrowthDecision], notes: Sequence[str] = ()
) -> str:
    """One page: seeds, costs, changes, and why nothing was planted."""
    host, grown, active = model.first_cost, model.count(), model.count(active=True)
    exported = model.count(exported=True)
    lines = [
        f"{len(history)} decisions; parameters {host.parameters:,} -> "
        f"{grown.parameters:,} ({grown.parameters / host.parameters:.2f} x), "
        f"multiply-adds per row {host.macs:,} -> {active.macs:,}"
    ]
    if exported != Cost(grown.parameters, active.macs):
        lines.append(
            f"an export has {exported.parameters:,} parameters and {exported.macs:,} "
            "multiply-adds per row: seeds that do not change the output yet are left "
            "out, linear ones are added to the weights of their layers"
        )
    if history:
        first, last = history[0], history[-1]
        least, most = (
            pick(history, key=lambda decision: decision.metric) for pick in (min, max)
        )
        lines.append(
            f"metric {first.metric:.4g} at first, {last.metric:.4g} at last; least "
            f"{least.metric:.4g} at decision {least.step}, largest {most.metric:.4g} "
            f"at decision {most.step}"
        )
    lines.append("")
    lines += _seeds(model)
    changes = [decision for decision in history if decision.grew]
    if changes:
        lines += ["", "what changed:"]
        for decision in changes[-MAX_CHANGES_LISTED:]:
            texts = [*map(str, decision.receipts[:3])] or [
                f"{model.slots[e.slot].partition('#')[0]} is {e.after.name.lower()}"
                for e in decision.events[:3]
            ]
            steps = [f"{decision.step:>4}", *[" " * 4] * 3]
            texts = texts or ["an alpha moved"]
            lines += [f"  {s}  {t}" for s, t in zip(steps, texts, strict=False)]
        if (earlier := len(changes) - MAX_CHANGES_LISTED) > 0:
            lines.append(f"  ({earlier} earlier ones are in history)")
    reasons = Counter(decision.why_not for decision in history if decision.why_not)
    if reasons:
        lines += ["", "why nothing was planted:"]
        often = reasons.most_common(4)
        lines += [f"  {count:>4} x  {reason}" for reason, count in often]
    incidents = [i for decision in history for i in decision.incidents]
    if incidents:
        lost = sum(not incident.startswith("removed") for incident in incidents)
        lines += ["", f"what was refused ({lost} batches in all, the last ones here):"]
        lines += [f"  {incident}" for incident in incidents[-4:]]
    lines += [f"\nnote: {note}" for note in notes]
    return "\n".join(lines)


def _seeds(model: GrowingModel) -> list[str]:
    depths, first = dict(reversed(model.depths)), first_widths(model)
    now = layer_widths(model)
    grown = [name for name in now if first[name] != now[name]]
    wide = max(map(len, (*model.slots, *depths, *grown)), default=0)
    lines = [
        f"  {name:<{wide}}  {max(order) + 1} -> "
        f"{len([*model.host.get_submodule(name).children()])} blocks"
        for name, order in depths.items()
    ]
    lines += [f"  {name:<{wide}}  {first[name]} -> {now[name]} units" for name in grown]
    for slot, name in enumerate(model.slots):
        stage = model.stage(name)
        if stage is not Stage.DORMANT:
            kind = model.seeds.blueprint_of(slot).name
            alpha = float(model.seeds.states.alpha[0, slot])
            why = model.why_branches.get(slot, "")
            lines.append(
                f"  {name:<{wide}}  {stage.name:<10}  {kind:<14}  alpha {alpha:.2f}"
                + (f"  (a branch: {why})" if why else "")
            )
    if (more := len(lines) - MAX_SEEDS_LISTED) > 0:
        lines[MAX_SEEDS_LISTED:] = [f"  ({more} more)"]
    return lines or ["  nothing has grown"]
