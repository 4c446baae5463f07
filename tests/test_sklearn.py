"""Estimators whose network grows keep the promises of scikit-learn."""

import pickle

import numpy as np
import pytest

pytest.importorskip("sklearn")
from sklearn.datasets import load_diabetes, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import cross_val_score
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from esper.sklearn import GrowingClassifier, GrowingRegressor

SHORT = pytest.mark.filterwarnings("ignore:max_iter=:UserWarning")
QUICK = {"max_iter": 15, "n_iter_no_change": 3, "tol": 0.0}


@pytest.mark.slow  # minutes: some hundred small fits
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks(
    [GrowingClassifier(max_iter=60), GrowingRegressor(max_iter=60)]
)
def test_all_checks_of_scikit_learn_pass(estimator, check):
    check(estimator)


def digits(rows=300):
    x, y = load_digits(return_X_y=True)
    return x[:rows], np.array([f"digit {label}" for label in y[:rows]])


@pytest.mark.parametrize("value", [0, -1, 2.5])
@pytest.mark.parametrize(
    "name", ["hidden_layers", "start", "batch_size", "max_iter", "n_iter_no_change"]
)
@pytest.mark.parametrize("kind", [GrowingClassifier, GrowingRegressor])
def test_counts_below_one_are_refused_in_one_line(kind, name, value):
    x, y = np.ones((30, 2)), np.arange(30) % 2
    line = f"^{name} must be a whole number of at least 1, got {value}\\.$"
    with pytest.raises(ValueError, match=line):
        kind(**{name: value}).fit(x, y)


def test_a_fit_that_max_iter_ends_is_warned_of_as_in_scikit_learn():
    x, y = digits(60)
    with pytest.warns(ConvergenceWarning, match="max_iter=2 was reached"):
        GrowingClassifier(max_iter=2, random_state=0).fit(x, y)
    with pytest.warns(ConvergenceWarning):
        MLPClassifier(max_iter=2, random_state=0).fit(x, y)
    model = GrowingClassifier(n_iter_no_change=1, tol=0.5, random_state=0)
    assert model.fit(x, y).n_iter_ < 200  # without a warning, which would be an error


@SHORT
def test_a_classifier_grows_and_keeps_its_best_network():
    x, y = digits()
    model = GrowingClassifier(random_state=0, **QUICK).fit(x, y)
    assert model.hidden_layer_sizes_[0] > 16
    assert type(model.network_).__name__ == "Sequential"
    assert "planted widen_x2" in model.summary_
    assert 3 < model.n_iter_ <= 15
    assert model.score(x, y) > 0.9
    proba = model.predict_proba(x[:5])
    assert proba.shape == (5, 10)
    assert (model.classes_[proba.argmax(1)] == model.predict(x[:5])).all()
    again = GrowingClassifier(random_state=0, **QUICK).fit(x, y)
    assert (again.predict_proba(x) == model.predict_proba(x)).all()
    other = pickle.loads(pickle.dumps(model))
    assert (other.predict_proba(x) == model.predict_proba(x)).all()
    # What remains is the network of the least loss, not the last one.
    losses = model.validation_losses_
    short = GrowingClassifier(random_state=0, **QUICK)
    short.max_iter = 1 + int(np.argmin(losses))
    assert (short.fit(x, y).predict_proba(x) == model.predict_proba(x)).all()


@SHORT
def test_a_network_that_is_best_before_it_grows_is_what_remains():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(60, 4)), random.integers(0, 2, 60)
    model = GrowingClassifier(random_state=0, **QUICK).fit(x, y)
    assert np.argmin(model.validation_losses_) < len(model.validation_losses_) - 1
    assert model.hidden_layer_sizes_ == (16,)
    assert "plant" in model.summary_


@SHORT
def test_a_regressor_grows_in_two_layers_and_fits_into_a_pipeline():
    x, y = load_diabetes(return_X_y=True)
    model = GrowingRegressor(hidden_layers=2, random_state=0, **QUICK)
    scores = cross_val_score(make_pipeline(MinMaxScaler(), model), x, y, cv=3)
    assert scores.mean() > 0.3
    assert len(model.fit(x, y).hidden_layer_sizes_) == 2
    assert model.predict(x[:3]).shape == (3,)
