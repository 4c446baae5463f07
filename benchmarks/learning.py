"""How much of the exact optimum does Tamiyo reach on the simulated world?

She is trained from as many random seeds as asked, judged on instances that no training
saw, beside those that do not learn. About two minutes for each training.
"""

from benchmarks.timing import Report
from esper.experiment.studies.study import StudyConfig, run_study


def run(
    rounds: int | None = None,
    repeats: int = 1,
    ablations: bool = False,
    rng_seed: int = 0,
) -> list[Report]:
    """Train, judge and print the tables, which are the result."""
    run_study(
        StudyConfig(
            rounds=rounds, repeats=repeats, ablations=ablations, rng_seed=rng_seed
        )
    )
    return []
