"""Whether the return rose while a policy learnt, in one line and in one word.

The rounds of the last fifth against those of the first, with an interval over rounds.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from esper.experiment.statistics import Floats, bootstrap

LEAST: Final = 8
"""Rounds in a fifth below which an interval over rounds would be too narrow."""
BARS: Final = "▁▂▃▄▅▆▇█"
COLUMNS: Final = 60
"""Bars of a sparkline, at most."""


def course(returns: Sequence[float]) -> str:
    """Whether the return rose, in one line: the last fifth against the first.

    Args:
        returns: Mean return of every round, NaN where no episode ended.
    """
    known = _known(returns)
    fifth = len(known) // 5
    if fifth < LEAST:
        return (
            f"Too few rounds to tell whether the return rose: {len(known)}, and "
            f"{5 * LEAST} are needed."
        )
    first, last = known[:fifth], known[-fifth:]
    # Rounds of the two fifths are independent, so that any pairing of them will do.
    rise = bootstrap(np.stack([first, last]), lambda means: means[1] - means[0])
    word = "rose" if rise.low > 0 else "fell" if rise.high < 0 else "did not change"
    clearly = "" if rise.low > 0 or rise.high < 0 else " clearly"
    return (
        f"The return {word}{clearly}: {first.mean():.4f} in the first {fifth} rounds, "
        f"{last.mean():.4f} in the last {fifth}, by {rise:+.4f} (95 % over rounds)."
    )


def sparkline(values: Sequence[float]) -> str:
    """Values as bars from the least to the largest; neighbours share a bar."""
    known = _known(values)
    if not len(known):
        return ""
    parts = np.array_split(known, min(COLUMNS, len(known)))
    means = np.array([part.mean() for part in parts])
    share = (means - means.min()) / max(float(np.ptp(means)), 1e-12)  # all may be equal
    return "".join(BARS[round(level * (len(BARS) - 1))] for level in share.tolist())


def _known(values: Sequence[float]) -> Floats:
    known = np.asarray(values, dtype=np.float64)
    return known[np.isfinite(known)]
