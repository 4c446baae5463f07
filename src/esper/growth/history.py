"""The log of a growing model, decision by decision, and its summary on one page."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import TypeAdapter

from esper.contracts.stages import Stage, StageChanged
from esper.growth.blueprints.seed import Cost
from esper.growth.model import GrowingModel
from esper.growth.topology import Receipt

SEEDS: Final = 16
CHANGES: Final = 8
"""Seeds and changes listed on one page."""


@dataclass(frozen=True, slots=True)
class GrowthDecision:
    """One decision and what was known and done then."""

    step: int
    metric: float
    loss: float
    """Mean training loss since the decision before; NaN if `grower.loss` is unused."""
    action: str = ""
    """The controller's action, in words."""
    grew: bool = False
    """Whether anything in the network's topology or blending changed."""
    why_not: str = ""
    """Why it did not plant, in words; empty if it did."""
    parameters: int = 0
    macs: int = 0
    receipts: tuple[Receipt, ...] = ()
    events: tuple[StageChanged, ...] = ()
    incidents: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything changed."""
        return self.grew

    def __str__(self) -> str:
        """One line."""
        why = f" ({self.why_not})" if self.why_not else ""
        return (
            f"decision {self.step}: metric {self.metric:.4g}, loss {self.loss:.4g}, "
            f"{self.parameters:,} parameters; {self.action}{why}"
        )


PLAIN: Final = TypeAdapter(list[GrowthDecision])
"""Decisions as plain data, for saving, and back."""


def summary(
    model: GrowingModel, history: Sequence[GrowthDecision], notes: Sequence[str] = ()
) -> str:
    """One page: what grew, what it cost, and why nothing grew when nothing did."""
    host, grown, active = model.analysis, model.count(), model.count(active=True)
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
        for decision in changes[-CHANGES:]:
            lines.append(f"  {decision.step:>4}  {decision.action}")
            lines += [f"        {receipt}" for receipt in decision.receipts[:2]]
        if len(changes) > CHANGES:
            lines.append(f"  ({len(changes) - CHANGES} earlier ones are in history)")
    reasons = Counter(decision.why_not for decision in history if decision.why_not)
    if reasons:
        lines += ["", "why nothing was planted:"]
        often = reasons.most_common(4)
        lines += [f"  {count:>4} x  {reason}" for reason, count in often]
    troubles = [i for decision in history for i in decision.incidents]
    if troubles:
        lost = sum(not trouble.startswith("removed") for trouble in troubles)
        lines += ["", f"what was refused ({lost} batches in all, the last ones here):"]
        lines += [f"  {trouble}" for trouble in troubles[-4:]]
    lines += [f"\nnote: {note}" for note in notes]
    return "\n".join(lines)


def _seeds(model: GrowingModel) -> list[str]:
    """One line for every seed."""
    states = model.states
    wide = max(map(len, model.slots))
    lines = []
    for slot, name in enumerate(model.slots):
        stage = model.stage(name)
        if stage is not Stage.DORMANT:
            kind = model.spec.blueprints[int(states.blueprint[0, slot])].name
            alpha = float(states.alpha[0, slot])
            lines.append(
                f"  {name:<{wide}}  {stage.name:<10}  {kind:<14}  alpha {alpha:.2f}"
            )
    if len(lines) > SEEDS:
        lines[SEEDS:] = [f"  ({len(lines) - SEEDS} more)"]
    return lines or ["  no seed is planted"]
