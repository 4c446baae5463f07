"""Scikit-learn classifier and regressor with an MLP that grows during `fit`.

    GrowingClassifier().fit(X, y).predict(X)

The MLP starts small. By default its hidden layers double whenever the compute spent has
grown fourfold (`controller="doubling"`). Training stops when the validation loss stops
falling, and the best network is kept as a plain module. Inputs and regression targets
are standardized.
"""

import warnings
from copy import deepcopy
from functools import partial
from itertools import pairwise
from math import ceil, inf
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from esper.contracts.checks import require_int
from esper.contracts.errors import InvalidInputError
from esper.grower import Grower
from esper.growth.model import GrowingModel
from esper.growth.saving.export import export
from esper.tamiyo.registry import ControllerChoice

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.model_selection import train_test_split
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ImportError as error:  # pragma: no cover
    raise InvalidInputError(
        "esper.sklearn needs scikit-learn: pip install '.[sklearn]'."
    ) from error

Floats = NDArray[np.float64]
Rows = Any
"""Array-like."""

MIN_ROWS_TO_SPLIT: Final = 20
"""With fewer rows, the validation split is the training split."""
LR_DECAY: Final = 0.1
"""Factor of the learning rate after the first plateau."""
EXAMPLE_ROWS: Final = 8
UNLIMITED_BUDGET: Final = 1e6
COUNTS: Final = ("hidden_layers", "start", "batch_size", "max_iter", "n_iter_no_change")
"""Arguments that must be positive integers."""
SEED_OPTIONS: Final[dict[str, Any]] = {
    "blueprints": ["widen_x1.25", "widen_x1.5", "widen_x2", "widen_x4"],
    "seeds_per_slot": 8,
}


class GrowingEstimator(BaseEstimator):  # type: ignore[misc]
    """Base class of the classifier and the regressor.

    Args:
        hidden_layers: Number of hidden layers.
        start: Initial units of each hidden layer.
        controller: Controller that decides when to grow; see `esper.Grower`.
        learning_rate: Learning rate of AdamW; it falls to a tenth at the end.
        weight_decay: Weight decay of AdamW.
        batch_size: Rows per batch.
        max_iter: Maximum number of epochs.
        n_iter_no_change: Epochs without improvement after which the learning rate
            falls, and then training stops.
        tol: Minimum relative improvement of the loss.
        validation_fraction: Fraction of the rows in the validation split.
        random_state: Seed or `RandomState` of all random numbers.
    """

    def __init__(
        self,
        hidden_layers: int = 1,
        start: int = 16,
        controller: ControllerChoice = "doubling",
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 64,
        max_iter: int = 200,
        n_iter_no_change: int = 10,
        tol: float = 1e-3,
        validation_fraction: float = 0.1,
        random_state: Any = None,  # noqa: ANN401
    ) -> None:
        self.hidden_layers = hidden_layers
        self.start = start
        self.controller = controller
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.n_iter_no_change = n_iter_no_change
        self.tol = tol
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def _fit(self, X: Floats, y: NDArray[Any], outputs: int) -> None:  # noqa: N803
        """Standardize the inputs and grow a network; `y` is the target of the loss."""
        for name in COUNTS:
            require_int(name, getattr(self, name))
        random = check_random_state(self.random_state)
        rng_seed = int(random.randint(2**31 - 1))
        self._mean, self._scale = X.mean(axis=0), X.std(axis=0)
        self._scale = np.where(self._scale > 0, self._scale, 1.0)
        inputs = torch.tensor((X - self._mean) / self._scale, dtype=torch.float32)
        train, held = self._split(y, random)
        data = inputs, torch.tensor(y)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng_seed)
            host = _mlp(X.shape[1], self.start, self.hidden_layers, outputs)
        optimizer = torch.optim.AdamW(
            host.parameters(), self.learning_rate, weight_decay=self.weight_decay
        )
        grower = Grower(
            host,
            optimizer,
            "auto",
            example=inputs[:EXAMPLE_ROWS],
            controller=self.controller,
            budget=UNLIMITED_BUDGET,
            stop="anytime",
            mode="min",
            rng_seed=rng_seed,
            **SEED_OPTIONS,
        )
        generator = torch.Generator().manual_seed(rng_seed)
        best = self._train(
            grower, [x[train] for x in data], [x[held] for x in data], generator
        )
        plain = export(
            GrowingModel(best, "auto", inputs[:EXAMPLE_ROWS], **SEED_OPTIONS)
        )
        # In double precision, predictions do not depend on the batch.
        self.network_: nn.Module = plain.double().eval()
        self.hidden_layer_sizes_ = tuple(
            layer.out_features
            for layer in [*self.network_.children()][:-1]
            if isinstance(layer, nn.Linear)
        )
        self.summary_ = grower.summary()

    def _train(
        self,
        grower: Grower,
        train: list[Tensor],
        held: list[Tensor],
        generator: torch.Generator,
    ) -> nn.Module:
        """Train until the validation loss has stopped falling twice.

        Returns a copy of the network with the lowest validation loss.
        """
        host = grower.model.host
        optimizer = grower.optimizer
        least, best = inf, deepcopy(host)
        waited, self.n_iter_, last = 0, 0, False
        self.validation_losses_: list[float] = []
        while self.n_iter_ < self.max_iter:
            self.n_iter_ += 1
            order = torch.randperm(len(train[0]), generator=generator)
            for rows in order.split(self.batch_size):
                batch = [part[rows] for part in train]
                loss = grower.loss(partial(self._loss_of, host, *batch))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                now = float(self._loss_of(host, *held))
            self.validation_losses_.append(now)
            waited += 1
            if now < least * (1 - self.tol):
                least, best, waited = now, deepcopy(host), 0
            grower.step(metric=now)
            if waited >= self.n_iter_no_change:
                if last:
                    return best
                for group in optimizer.param_groups:
                    group["lr"] *= LR_DECAY
                waited, last = 0, True
        warnings.warn(
            f"max_iter={self.max_iter} was reached before the loss converged. "
            "Increase max_iter.",
            ConvergenceWarning,
            stacklevel=4,
        )
        return best

    def _split(self, y: NDArray[Any], random: Any) -> tuple[Any, Any]:  # noqa: ANN401
        """Rows of the training split and of the validation split."""
        rows = np.arange(len(y))
        if len(rows) < MIN_ROWS_TO_SPLIT:
            return rows, rows
        classes, counts = np.unique(y, return_counts=True)
        held = ceil(self.validation_fraction * len(rows))
        stratify = y.dtype.kind == "i" and counts.min() > 1 and held >= len(classes)
        train, held = train_test_split(
            rows, test_size=held, random_state=random, stratify=y if stratify else None
        )
        return train, held

    def _outputs(self, X: Rows) -> Tensor:  # noqa: N803
        """Outputs of the network."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)  # noqa: N806
        with torch.no_grad():
            result: Tensor = self.network_(torch.tensor((X - self._mean) / self._scale))
        return result

    def _loss_of(self, host: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(host(x), y)

    def _loss(self, output: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class GrowingClassifier(ClassifierMixin, GrowingEstimator):  # type: ignore[misc]
    """A classifier that grows; arguments as in `GrowingEstimator`."""

    def fit(self, X: Rows, y: Rows) -> "GrowingClassifier":  # noqa: N803
        """Fit and grow the network."""
        X, y = validate_data(self, X, y, dtype=np.float64)  # noqa: N806
        check_classification_targets(y)
        self.classes_, targets = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"{type(self).__name__} needs 2 classes, got 1 class.")
        self._fit(X, targets.astype(np.int64), len(self.classes_))
        return self

    def predict_proba(self, X: Rows) -> Floats:  # noqa: N803
        """Class probabilities."""
        found: Floats = self._outputs(X).softmax(dim=1).numpy()
        return found

    def predict(self, X: Rows) -> NDArray[Any]:  # noqa: N803
        """Most probable classes."""
        indices = self._outputs(X).argmax(dim=1).numpy()  # refuses an unfitted one
        found: NDArray[Any] = self.classes_[indices]
        return found

    def _loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(output, y)


class GrowingRegressor(RegressorMixin, GrowingEstimator):  # type: ignore[misc]
    """A regressor that grows; arguments as in `GrowingEstimator`."""

    def fit(self, X: Rows, y: Rows) -> "GrowingRegressor":  # noqa: N803
        """Fit and grow the network."""
        X, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)  # noqa: N806
        y = np.asarray(y, dtype=np.float64)
        self._target_mean, scale = y.mean(), y.std()
        self._target_scale = scale if scale > 0 else 1.0
        targets = (y - self._target_mean) / self._target_scale
        self._fit(X, targets.astype(np.float32), 1)
        return self

    def predict(self, X: Rows) -> Floats:  # noqa: N803
        """Predicted targets."""
        output = self._outputs(X)[:, 0].numpy()
        found: Floats = output * self._target_scale + self._target_mean
        return found

    def _loss(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output[:, 0], y)


def _mlp(inputs: int, width: int, layers: int, outputs: int) -> nn.Sequential:
    """Linear layers with ReLU between them."""
    sizes = [inputs, *[width] * layers, outputs]
    modules: list[nn.Module] = []
    for before, after in pairwise(sizes):
        modules += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*modules[:-1])
