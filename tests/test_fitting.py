"""Training and growing in one call."""

import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import esper
from esper.contracts.errors import InvalidInputError
from esper.fitting import accuracy, fit
from esper.tasks.data import split
from esper.tasks.datasets import digits


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def pairs(rows=24, batch=8, targets="classes"):
    x = torch.randn(rows, 3)
    y = (x.sum(1) > 0).long() if targets == "classes" else x[:, :2]
    return [*zip(x.split(batch), y.split(batch), strict=True)]


def short(model=None, train=None, val=None, **options):
    chosen = {"loss": cross_entropy, "epochs": 3, "progress": False, **options}
    model = net() if model is None else model
    train = pairs() if train is None else train
    return fit(model, train, pairs() if val is None else val, **chosen)


@pytest.fixture(scope="module")
def fitted():
    torch.manual_seed(0)
    parts = split(digits(), rng_seed=0)
    train, val = (
        TensorDataset(part.features, part.labels) for part in (parts.train, parts.test)
    )
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()
    ).append(nn.Linear(8, 10))
    result = fit(
        model,
        DataLoader(train, 32, shuffle=True),
        DataLoader(val, 256),
        loss=nn.CrossEntropyLoss(),
        epochs=10,
        learning_rate=1e-2,
        blueprints=["widen_8", "widen_16"],
        progress=False,
    )
    return result, parts.test


def test_it_learns_grows_and_returns_a_plain_module_after_the_last_epoch(fitted):
    result, test = fitted
    batch = [(test.features, test.labels)]
    assert accuracy(result.model, batch) > 0.9
    assert type(result.model) is nn.Sequential
    homes = {type(module).__module__.split(".")[0] for module in result.model}
    assert homes == {"torch"}
    assert not any(module._forward_hooks for module in result.model.modules())
    grown = sum(p.numel() for p in result.model.parameters())
    assert grown > result.grower.model.first_cost.parameters
    host = result.grower.model.host.eval()
    torch.testing.assert_close(
        result.model(test.features), host(test.features), rtol=1e-4, atol=1e-4
    )
    assert not result.model.training
    assert [decision.step for decision in result.history] == [*range(10)]
    assert result.summary == result.grower.summary()
    assert result.history[-1].metric == accuracy(host, batch)


def test_lines_for_each_epoch_without_a_terminal_and_none_without_progress(capsys):
    assert esper.fit is fit
    short(progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [
        f"Sequential: epoch {epoch}/3" for epoch in (1, 2, 3)
    ]
    assert "loss" in lines[0]
    assert "metric" in lines[0]
    short(progress=False)
    assert capsys.readouterr() == ("", "")


def test_classes_are_measured_by_accuracy():
    result = short(controller="never")
    assert 0.0 <= result.history[0].metric <= 1.0
    assert result.grower._scorer.score(0.25) == 0.25


def test_numbers_are_measured_by_the_loss_on_the_validation_batches():
    val = pairs(rows=20, batch=8, targets="numbers")  # the last batch is smaller
    result = short(
        loss=mse_loss, train=pairs(targets="numbers"), val=val, controller="never"
    )
    x, y = (torch.cat(part) for part in zip(*val, strict=True))
    with torch.no_grad():
        expected = float(mse_loss(result.model(x), y))
    assert result.history[-1].metric == pytest.approx(expected, rel=1e-5)
    assert result.history[-1].metric < result.history[0].metric


def test_a_custom_metric_is_called_in_eval_mode_without_gradients():
    seen = []

    def metric(model):
        seen.append((model.training, torch.is_grad_enabled()))
        return 0.5

    result = short(metric=metric)
    assert {*seen} == {(False, False)}
    assert [decision.metric for decision in result.history] == [0.5] * 3


def test_without_an_optimizer_the_learning_rate_rises_and_falls_once():
    rates = []
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    try:
        short(epochs=4, controller="never", learning_rate=1e-2)
    finally:
        handle.remove()
    assert len(rates) == 4 * 3
    peak = rates.index(max(rates))
    assert 0.9e-2 < rates[peak] <= 1e-2
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] < 1e-5


def test_a_custom_optimizer_keeps_its_learning_rate():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    short(model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.125


def test_the_model_is_trained_in_training_mode():
    modes = []
    model = net()
    model[1].register_forward_hook(lambda m, *_: modes.append(m.training))
    model.eval()
    short(model, controller="never", slots=["0->2"], metric=lambda model: 0.5)
    tries = 2  # of the loss, in eval mode
    assert modes[:tries] == [False, False]
    # Three epochs of three batches and nothing else came with training on: a survey
    # calls it twice.
    assert modes.count(True) == 2 + 3 * 3


class Endless(IterableDataset):
    def __iter__(self):
        return iter(pairs())


BAD = {
    "epochs": (dict(epochs=0), "epochs must be at least 1, got 0."),
    "empty": (dict(train=[]), "train_loader is empty. Pass at least one batch (x, y)."),
    "empty val": (dict(val=[]), "val_loader is empty"),
    "no rows": (
        dict(train=[(torch.zeros(0, 3), torch.zeros(0).long())]),
        "train_loader yields an empty batch [0, 3].",
    ),
    "dictionary": (
        dict(train=[{"x": torch.ones(2, 3)}]),
        "train_loader must yield pairs (x, y) of tensors, got dict. Use esper.Grower",
    ),
    "three": (
        dict(val=[(torch.ones(2, 3), 1, 2)]),
        "val_loader must yield pairs (x, y) of tensors, got tuple of Tensor, int, int",
    ),
    "iterator": (
        dict(train=iter([])),
        "train_loader must be a DataLoader or a list of batches, got list_iterator",
    ),
    "no length": (
        dict(train=DataLoader(Endless(), batch_size=None)),
        "train_loader has no length, which the learning-rate schedule needs",
    ),
    "input": (
        dict(train=[(torch.ones(2, 7), torch.zeros(2).long())]),
        "the model cannot be called with the x [2, 7] of train_loader: RuntimeError",
    ),
    "target": (
        dict(val=[(torch.ones(2, 3), torch.zeros(5).long())]),
        "the loss failed on the model's output [2, 2] and y [5] (torch.int64) of val",
    ),
    "many losses": (
        dict(loss=nn.CrossEntropyLoss(reduction="none")),
        "the loss must be one number, as a tensor, got [8].",
    ),
    "slots": (dict(slots=["0->3"]), "the host has no module '3'; did you mean"),
    "controller": (dict(controller="erly"), "did you mean 'early'?"),
    "mode": (dict(mode="min"), "mode belongs to your own metric"),
    "rate": (dict(learning_rate=0.0), "learning_rate must be positive, got 0.0."),
    "no model": (dict(model=nn.ReLU()), "an nn.Module with parameters, got ReLU"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_one_line_and_changes_nothing(name):
    options, message = BAD[name]
    model = options.get("model", net())
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InvalidInputError, match=re.escape(message)) as refused:
        short(**{**options, "model": model})
    assert "\n" not in str(refused.value)
    after = [*model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_on_the_way_takes_the_hooks_off_the_model():
    model = net()

    def metric(model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        short(model, metric=metric)
    assert not any(module._forward_hooks for module in model.modules())
