"""What a learned controller was worth, in one or two sentences."""

from esper.experiment.config import STATIC
from esper.experiment.summary import Duel, Summary, TaskSummary

PLAIN = ("never", "random")
"""Whom every controller must beat first of all."""


def headline(summary: Summary) -> list[str]:
    """One sentence for each learned arm, over all tasks if that can be said."""
    tables = [summary.aggregate] if summary.aggregate else list(summary.tasks)
    return [
        sentence
        for table in tables
        for name in dict.fromkeys(duel.name for duel in table.duels)
        for sentence in _sentences(name, table)
    ]


def _sentences(name: str, table: TaskSummary) -> list[str]:
    own = {duel.other: duel for duel in table.duels if duel.name == name}
    arm = next(arm for arm in table.arms if arm.name == name)
    each = "each of " if table.tasks > 1 else ""
    where = f"{table.hosts} unseen hosts of {each}{table.task}"
    said = [f"{name}'s return on {where}: {arm.returns:.3f}."]
    for other in PLAIN:
        if other in own:
            said.append(_against(own[other]))
    rest = [row.name for row in table.arms if row.name in own and row.name not in PLAIN]
    best = [row for row in rest if row not in STATIC][-1:]  # lowest return comes first
    for other in (*best, *(row for row in rest if row in STATIC)):
        kind = "the best of the others, " if other in best else "the plain network, "
        said.append(_against(own[other], kind))
    return [" ".join(said)]


def _against(duel: Duel, kind: str = "") -> str:
    gap, other = duel.returns.difference, f"{kind}{duel.other}"
    figures = f"by {gap:+.3f}, p = {duel.returns.adjusted:.2g}"
    if duel.returns.shown:
        side = "Above" if gap.estimate > 0 else "Below"
        return f"{side} {other} {figures}."
    return f"No difference is shown from {other} ({figures})."
