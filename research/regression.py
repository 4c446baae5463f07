"""Does a regression on recordings decide as well as a policy?

Scripts of a recorded host form a tree whose branches share random numbers. For every
recorded choice, a model learns from a few columns what it was worth, less that of
waiting at the same node, as a fraction of the never-grown host's errors, under drawn
rents. What follows a choice is decided by the model itself: in the first fit all wait
after it, each further one follows the fit before. The controller takes the choice that
is predicted to be worth most, if that is above 0.

The table is of recordings that were not fitted to: the worth of the leaf to which each
model leads, if it can only choose among what was recorded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy.typing import NDArray
from torch import Generator, Tensor

from benchmarks import timing
from benchmarks.timing import Report
from esper.contracts.actions import HEAD, NUM_HEADS, ActionMasks, ActionSpec, Op
from esper.contracts.errors import InvalidInputError
from esper.contracts.world import ControllerState, Observation
from esper.environment.clock import stop_weights
from esper.evaluation.statistics import mean_interval
from esper.tamiyo.policy.heads import relevant
from esper.training.recordings import RecordConfig, Recording, read_recordings, record

Floats = NDArray[np.float64]
RENTS: Final = (0.001, 0.1)
"""Between which rents are drawn for every recording ..."""
DRAWS: Final = 4
"""... so often."""
FITS: Final = 3
WORST: Final = 1.0
"""Size of a difference in worth, at most: beyond it all are equally good or bad."""
COLUMNS: Final = (
    "error",
    "score_slope",
    "loss",
    "loss_slope",
    "progress",
    "compute",
    "plateau",
    "log_rent",
    "added",
    "log_units",
    "depth",
    "cost",
    "macs",
    "price",
)
JUDGED: Final = (0.002, 0.01, 0.04)


def models() -> Mapping[str, Any]:
    """The regressions, unfitted."""
    try:
        from sklearn.ensemble import HistGradientBoostingRegressor
        from sklearn.linear_model import RidgeCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import PolynomialFeatures, StandardScaler
    except ImportError:
        raise InvalidInputError(
            "regressions need scikit-learn; pip install it."
        ) from None
    return {
        "ridge": make_pipeline(
            StandardScaler(),
            PolynomialFeatures(2, include_bias=False),
            StandardScaler(),
            RidgeCV(alphas=np.logspace(-1, 4, 6)),
        ),
        "boosting": HistGradientBoostingRegressor(
            max_iter=200,
            learning_rate=0.05,
            max_leaf_nodes=15,
            min_samples_leaf=50,
            early_stopping=False,
            random_state=0,
        ),
    }


def run(recordings: str | None = None, held_out: float = 0.25) -> Report:
    """Fit both models to some recordings and try them on the others.

    Args:
        recordings: Folder of `esper record`; none: a few are made.
        held_out: Share of the recordings that nothing is fitted to.
    """
    if recordings is None:
        number = 2 if timing.QUICK else 24
        with TemporaryDirectory() as folder:
            record(RecordConfig(stop="end", tasks=number), Path(folder))
            found = read_recordings(Path(folder))
    else:
        found = read_recordings(Path(recordings))
    first = len(found) - max(1, int(held_out * len(found)))
    if first < 1:
        raise InvalidInputError("there is one recording; give at least two.")
    report = Report(
        f"fitted to {first} recordings, tried on {len(found) - first}: share of errors",
        ("model", *(f"rent {rent:g} [95 %]" for rent in JUDGED)),
    )
    chance = np.random.default_rng(0)
    others = {
        rent: [tree for one in found[first:] for tree in trees_of(one, rent)]
        for rent in JUDGED
    }
    for name in models():
        model = fitted(name, found[:first], chance)
        figures = []
        for trees in others.values():
            worth = np.array([tree.followed(model.predict)[0][0, 0] for tree in trees])
            figures.append(f"{mean_interval(worth):+.3f}")
        report.add(name, *figures)
    return report


def fitted(
    name: str, recordings: Sequence[Recording], chance: np.random.Generator
) -> Any:  # noqa: ANN401
    """A model that foretells what a choice is worth beyond waiting."""
    model = models()[name]
    trees = [
        tree
        for recording in recordings
        for rent in np.exp(chance.uniform(*map(log, RENTS), DRAWS))
        for tree in trees_of(recording, float(rent), chance)
    ]
    predict: Callable[[Floats], Floats] = lambda rows: np.full(len(rows), -1.0)  # noqa: E731
    for _ in range(FITS):
        rows, targets = [], []
        for tree in trees:
            counted, gain = tree.gains(predict)
            rows.append(tree.columns[counted])
            targets.append(gain)
        model.fit(np.concatenate(rows), np.clip(np.concatenate(targets), -WORST, WORST))
        predict = model.predict
    return model


@dataclass(frozen=True)
class Tree:
    """One recorded host under one rent."""

    columns: Floats
    """Of what each script did at each decision, `[script, time, column]`."""
    acts: NDArray[np.bool_]
    """Whether it did anything but wait, `[script, time]`."""
    same: NDArray[np.bool_]
    """Whether two scripts did the same before a moment, `[script, other, moment]`."""
    worth: Floats
    """Of the whole episode, less that of the first script, which waits."""

    def followed(self, predict: Callable[[Floats], Floats]) -> tuple[Floats, Floats]:
        """Worth at and after every node if the best foretold choice is always taken.

        Returns:
            Worth of the node that each script is in, and of the one that its own choice
            leads to, `[script, time]`.
        """
        foretold = np.zeros(self.acts.shape)
        if self.acts.any():
            foretold[self.acts] = predict(self.columns[self.acts])
        nodes, after = np.zeros(self.acts.shape), np.zeros(self.acts.shape)
        value = self.worth
        for time in reversed(range(self.acts.shape[1])):
            after[:, time] = value
            # A choice of 0 is no better than waiting, and a script that waits is first.
            here = np.where(self.same[..., time], foretold[None, :, time], -np.inf)
            value = value[here.argmax(axis=1)]
            nodes[:, time] = value
        return nodes, after

    def gains(
        self, predict: Callable[[Floats], Floats]
    ) -> tuple[NDArray[np.bool_], Floats]:
        """Every recorded choice once, and its worth less that of waiting."""
        _, after = self.followed(predict)
        scripts = len(self.worth)
        earlier = np.tri(scripts, k=-1, dtype=bool)[..., None]
        again = (self.same[..., 1:] & earlier).any(axis=1)
        waits = self.same[..., :-1] & ~self.acts[None]
        counted = self.acts & ~again & waits.any(axis=1)
        waiting = np.take_along_axis(after, waits.argmax(axis=1), axis=0)
        return counted, (after - waiting)[counted]


def trees_of(
    recording: Recording, rent: float, chance: np.random.Generator | None = None
) -> Iterator[Tree]:
    """The hosts of a recording under a rent, and an end that is drawn if not known.

    Args:
        recording: Of some hosts.
        rent: Of all of them.
        chance: What the end is drawn from; None: it is the recording's own.
    """
    clock, scripts = recording.clock, recording.scripts
    last = clock.horizon
    if clock.stop == "anytime" and chance is not None:
        last = int(chance.integers(last // 2, last, endpoint=True))
    rents = torch.full((recording.envs,), rent)
    observation = recording.observed(rents, torch.full_like(rents, torch.inf))
    actions = recording.tensor("actions")
    columns = columns_of(observation)
    index = choice_index(actions.flatten(0, 1), observation)
    taken = columns[torch.arange(len(index)), index]
    taken = taken.unflatten(0, actions.shape[:2])[:, :last]
    weights = torch.zeros(clock.horizon + 1)
    weights[: last + 1] = stop_weights(clock.times()[: last + 1], clock.stop)
    worth = recording.objective(rents, weights)[:, last]
    for begin in range(0, recording.envs, scripts):
        own = slice(begin, begin + scripts)
        done = actions[own, :last]
        agree = (done[:, None] == done[None]).all(dim=-1)
        begins = torch.ones_like(agree[..., :1])
        same = torch.cat((begins, agree), dim=-1).cumprod(dim=-1).bool()
        yield Tree(
            columns=taken[own].double().numpy(),
            acts=(done[..., HEAD["op"]] != Op.WAIT).numpy(),
            same=same.numpy(),
            worth=(worth[own] - worth[begin]).double().numpy(),
        )


def columns_of(observation: Observation) -> Float[Tensor, "env choice column"]:
    """`COLUMNS` of planting every blueprint in every slot, then of every pruning."""
    host, slots, offers = observation.host, observation.slots, observation.offers
    kinds = offers.parameters.shape[2]
    cost = torch.cat((offers.parameters.flatten(1), -slots.parameters), dim=1)
    macs = torch.cat((offers.macs.flatten(1), -slots.parameters), dim=1)

    def of_slot(figure: Float[Tensor, "env slot"]) -> Float[Tensor, "env choice"]:
        return torch.cat((figure.repeat_interleave(kinds, dim=1), figure), dim=1)

    error = 1 - host.score
    rent = host.rent.clamp(min=1e-6)
    own = {
        "error": error,
        "log_rent": rent.log(),
        "log_units": of_slot(slots.units.clamp(min=1).log()),
        "depth": of_slot(slots.depth),
        "cost": cost,
        "macs": macs,
        "price": (rent / error.clamp(min=0.02))[:, None] * cost,
    }
    columns = [own[name] if name in own else getattr(host, name) for name in COLUMNS]
    wide = [c if c.dim() == 2 else c[:, None].expand_as(cost) for c in columns]
    return torch.stack(wide, dim=2).nan_to_num().clamp(-1e3, 1e3)


def choice_index(
    actions: Int64[Tensor, "env head"], observation: Observation
) -> Int64[Tensor, " env"]:
    """Which of the choices of `columns_of` an action is; 0 if it is none of them."""
    slots, kinds = observation.offers.parameters.shape[1:]
    op, slot, kind = (actions[:, HEAD[name]] for name in ("op", "slot", "blueprint"))
    plants, prunes = op == Op.GERMINATE, op == Op.PRUNE
    return plants * (slot * kinds + kind) + prunes * (slots * kinds + slot)


@dataclass(frozen=True)
class Regression:
    """Makes controllers that decide by a fitted model."""

    name: str
    model: Any

    def __call__(self, spec: ActionSpec) -> "BestForetold":
        """A controller; the model knows neither slots nor blueprints by number."""
        return BestForetold(self.model.predict)


class BestForetold:
    """Takes the legal choice that is foretold to be worth most, if more than waiting.

    Args:
        predict: Worth beyond waiting of rows of `COLUMNS`.
    """

    def __init__(self, predict: Callable[[Floats], Floats]) -> None:
        self._predict = predict

    def decide(
        self,
        observation: Observation,
        masks: ActionMasks,
        state: ControllerState,
        generator: Generator,
    ) -> tuple[Int64[Tensor, "env head"], ControllerState]:
        """The best choice everywhere."""
        legal = legal_choices(observation, masks)
        foretold = torch.zeros(legal.shape, dtype=torch.float64)
        if bool(legal.any()):
            rows = columns_of(observation)[legal].double().numpy()
            foretold[legal] = torch.from_numpy(self._predict(rows))
        gain, best = foretold.masked_fill(~legal, 0.0).max(dim=1)
        slots, kinds = observation.offers.parameters.shape[1:]
        prunes = best >= slots * kinds
        slot = torch.where(prunes, best - slots * kinds, best // kinds)
        # The other heads have one choice each where seeds take part at once.
        actions = masks.fixed.int().argmax(dim=2)
        assert actions.shape[1] == NUM_HEADS
        op = torch.where(prunes, Op.PRUNE.value, Op.GERMINATE.value)
        actions[:, HEAD["op"]] = torch.where(gain > 0, op, Op.WAIT.value)
        actions[:, HEAD["slot"]] = slot
        actions[:, HEAD["blueprint"]] = best % kinds
        return torch.where(relevant(actions), actions, 0), None


def legal_choices(
    observation: Observation, masks: ActionMasks
) -> Bool[Tensor, "env choice"]:
    """Legal plantings, and the pruning of the youngest seed."""
    plants = masks.blueprint & masks.slot[:, Op.GERMINATE, :, None]
    prunable = masks.slot[:, Op.PRUNE]
    youngest = observation.slots.age.masked_fill(~prunable, 1 << 40).argmin(dim=1)
    order = torch.arange(prunable.shape[1])
    prunes = prunable & (order == youngest[:, None])
    return torch.cat((plants.flatten(1), prunes), dim=1)
