"""Does a classifier that finds its size save the search over sizes?

`GrowingClassifier()` with its defaults against scikit-learn's `MLPClassifier`: with the
size that three-fold cross-validation chooses among five, and with its default size.
Five tables; for each random seed 70 % of the rows are for fitting, which includes the
search, and accuracy is of the rest. Seconds are of the processor, on one thread. Both
see standardised inputs. Intervals are over random seeds.
"""

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.errors import InvalidInputError
from esper.evaluation.statistics import mean_interval
from esper.tasks.datasets import digits, stored

Floats = NDArray[np.float64]
Rows = tuple[Floats, NDArray[np.int64]]
SIZES: Final = (16, 32, 64, 128, 256)
FOLDS: Final = 3
TEST: Final = 0.3
COLUMNS: Final = (
    "table",
    "rows",
    "growing, %",
    "searched, %",
    "default, %",
    "growing - searched, points",
    "growing, s",
    "searched, s",
    "default, s",
    "units: growing",
    "units: searched",
)


def cancer() -> Rows:
    """Breast cancer of scikit-learn, 569 rows."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    return features, labels


def table(name: str) -> Rows:
    """A table that comes with Esper."""
    data = digits() if name == "digits" else stored(name)
    return data.features.flatten(1).double().numpy(), data.labels.numpy()


TABLES: Final[Mapping[str, Callable[[], Rows]]] = {
    "cancer": cancer,
    **{
        name: lambda name=name: table(name)  # type: ignore[misc]
        for name in ("vowel", "digits", "segment", "phoneme")
    },
}


def arms(rng_seed: int) -> dict[str, Any]:
    """The estimators, unfitted."""
    from sklearn.model_selection import GridSearchCV
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    from esper.sklearn import GrowingClassifier

    def mlp() -> Any:  # noqa: ANN401
        return make_pipeline(StandardScaler(), MLPClassifier(random_state=rng_seed))

    sizes = {"mlpclassifier__hidden_layer_sizes": [(units,) for units in SIZES]}
    return {
        "growing": GrowingClassifier(random_state=rng_seed),
        "searched": GridSearchCV(mlp(), sizes, cv=FOLDS),
        "default": mlp(),
    }


def run(seeds: int = 5, first_seed: int = 0) -> Report:
    """One row for each table.

    Args:
        seeds: Random seeds: of the split, of the networks and of the search.
        first_seed: The first of them.
    """
    try:
        import sklearn  # noqa: F401
    except ImportError:
        raise InvalidInputError(
            "the tables need scikit-learn; pip install it."
        ) from None
    names = [*TABLES][:1] if timing.QUICK else [*TABLES]
    if timing.QUICK:
        seeds = 1
    report = Report(f"classifiers of tables, {seeds} random seeds", COLUMNS)
    for name in names:
        features, labels = TABLES[name]()
        found = [
            fitted(features, labels, rng_seed)
            for rng_seed in range(first_seed, first_seed + seeds)
        ]
        report.add(name, len(labels), *_row(found))
    return report


def fitted(features: Floats, labels: NDArray[np.int64], rng_seed: int) -> Any:  # noqa: ANN401
    """Score, seconds and hidden units of every arm."""
    from sklearn.model_selection import train_test_split

    x, x_test, y, y_test = train_test_split(
        features, labels, test_size=TEST, random_state=rng_seed, stratify=labels
    )
    result = {}
    for name, model in arms(rng_seed).items():
        with warnings.catch_warnings(action="ignore"):  # some do not converge
            start = time.process_time()
            model.fit(x, y)
            seconds = time.process_time() - start
        best = getattr(model, "best_estimator_", model)
        units = (
            model.hidden_layer_sizes_[0]
            if name == "growing"
            else best[-1].hidden_layer_sizes
        )
        result[name] = (100 * model.score(x_test, y_test), seconds, np.max(units))
    return result


def _row(found: list[Any]) -> list[str | float]:
    scores, seconds, units = (
        {arm: np.array([one[arm][index] for one in found]) for arm in found[0]}
        for index in range(3)
    )
    difference = mean_interval(scores["growing"] - scores["searched"])
    return [
        *(float(scores[arm].mean()) for arm in scores),
        f"{difference:+.2f}",
        *(float(seconds[arm].mean()) for arm in seconds),
        f"{np.median(units['growing']):g}",
        f"{np.median(units['searched']):g}",
    ]
