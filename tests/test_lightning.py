"""A Lightning module grows while its Trainer fits it."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.contracts.errors import InvalidInputError
from tests.growth.hosts import everything, make_batch, make_host

pytest.importorskip("lightning")
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torchmetrics import MeanMetric

from esper.lightning import GrowCallback

pytestmark = pytest.mark.filterwarnings("ignore")


class Classifier(LightningModule):
    """As a user would write it; nothing of it knows of growing."""

    def __init__(self):
        super().__init__()
        self.net = make_host("vector")
        self.net.drop.p = 0.0  # Lightning does not put random streams back
        self.mean = MeanMetric()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.mean(loss.detach())
        self.log("train_loss", loss)
        self.log("train_mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "rows": len(x)}

    def validation_step(self, batch, index):
        x, y = batch
        self.log("acc", (self(x).argmax(dim=1) == y).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 3e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def loader(rows):
    return DataLoader(TensorDataset(*make_batch("vector", rows)), 16)


def growing(host="", **options):
    prefix = "" if host else "net."
    pairs = [("first", "second"), ("second", "last")]
    options = {"controller": "early", "tick": 2, "seeds_per_slot": 2, **options}
    return GrowCallback(
        [f"{prefix}{a}->{prefix}{b}" for a, b in pairs],
        example=make_batch("vector", 4)[0],
        monitor="acc",
        host=host,
        **options,
    )


def fit(folder, epochs, callback, ckpt_path=None, module=None, **options):
    torch.manual_seed(0)
    module = Classifier() if module is None else module
    kept = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    usual = {"accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, kept],
        num_sanity_val_steps=0,
        **{"max_epochs": epochs, **usual, **options},
    )
    trainer.fit(module, loader(64), loader(32), ckpt_path=ckpt_path)
    return module


@pytest.mark.parametrize("host", ["", "net"])
def test_a_module_grows_and_its_checkpoints_hold_what_grew(host, tmp_path):
    callback = growing(host, decisions=4)
    module = fit(tmp_path / "whole", 4, callback)
    grower = callback.grower
    assert len(grower.history) == 4
    assert grower.model.seeds
    assert grower._batches + grower._compute > 0
    assert "training_step" not in vars(module)
    trained = [id(p) for g in grower.optimizer.param_groups for p in g["params"]]
    assert sorted(trained) == sorted(id(p) for p in module.parameters())
    checkpoint = torch.load(tmp_path / "whole" / "epoch=3.ckpt", weights_only=False)
    rebuilt = esper.rebuild(Classifier(), checkpoint["state_dict"])
    x = make_batch("vector", 16)[0]
    assert torch.equal(module.eval()(x), rebuilt.eval()(x))
    # Resumed after two epochs, the rest is the same to the bit.
    other = growing(host, decisions=4)
    first = tmp_path / "whole" / "epoch=1.ckpt"
    again = fit(tmp_path / "again", 4, other, ckpt_path=first)
    assert [d.action for d in other.grower.history] == [
        d.action for d in grower.history
    ]
    assert everything(again) == everything(module)


def test_a_seed_in_training_is_computed_twice_and_logged_once(tmp_path):
    ends = []
    for plant in (False, True):

        class Planting(GrowCallback):
            def on_train_epoch_start(self, trainer, pl_module, plant=plant):
                if plant and trainer.current_epoch == 1:
                    self.grower.plant("first->second#0", "widen_8", tempo="SLOW")

        callback = Planting(
            ["first->second"],
            example=make_batch("vector", 4)[0],
            monitor="acc",
            host="net",
            controller="never",
            tick=100,
        )
        # Clipping would let the seed have a part in the norm.
        module = fit(tmp_path / str(plant), 3, callback, gradient_clip_val=None)
        logged = module.trainer.logged_metrics
        figures = [float(logged[name]) for name in ("train_loss", "train_mean")]
        ends.append([everything(module.net, seeds=False), figures])
    assert callback.grower.model.training_seeds()
    assert ends[0] == ends[1]
    norms = [
        m for m in module.net.esper_seeds.modules() if isinstance(m, nn.BatchNorm1d)
    ]
    assert int(norms[0].num_batches_tracked) == 8


class Scaled(Classifier):
    """Has a parameter outside the host, and leaves some batches out."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * self.net(x)

    def training_step(self, batch, index):
        return None if index == 1 else super().training_step(batch, index)


@pytest.mark.parametrize(
    ("options", "decisions"),
    [
        ({"check_val_every_n_epoch": 2}, 2),
        ({"check_val_every_n_epoch": 3}, 1),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, 4),
        ({"max_steps": 4, "accumulate_grad_batches": 1}, 1),
        ({"max_epochs": -1, "max_steps": 12, "check_val_every_n_epoch": 2}, 3),
        ({"max_epochs": -1, "max_steps": 8}, 4),
    ],
)
def test_ordinary_settings_of_a_trainer_are_understood(options, decisions, tmp_path):
    callback, module = growing("net"), Scaled()
    callback.options.pop("decisions", None)
    fit(tmp_path, 4, callback, module=module, **options)
    assert len(callback.grower.history) == callback.grower.decisions == decisions
    assert float(module.scale.detach()) != 1.0


def test_a_module_grows_in_mixed_precision(tmp_path):
    callback = growing(decisions=4)
    module = fit(tmp_path, 4, callback, precision="bf16-mixed")
    assert callback.grower.model.host.net.first.out_features > 12
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in module.parameters())
    assert callback.grower.history[-1].loss < callback.grower.history[0].loss
    checkpoint = torch.load(tmp_path / "epoch=3.ckpt", weights_only=False)
    rebuilt = esper.rebuild(Classifier(), checkpoint["state_dict"])
    assert everything(rebuilt) == everything(module)


@pytest.mark.slow
def test_two_ranks_grow_the_same_module_and_resume_it(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "tests.lightning_script"]
    subprocess.run([*command, str(tmp_path)], check=True, timeout=500)
    first, second = (
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)
    )
    assert first == second
    whole, again = first
    assert len(whole["actions"]) == 4
    assert whole["seeds"]
    assert whole == again


def test_what_the_callback_cannot_do_is_refused_in_one_line(tmp_path):
    class Manual(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    plain = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    with pytest.raises(InvalidInputError, match="needs automatic optimization"):
        fit(tmp_path, 1, growing(), module=Manual(), **plain)
    missing = growing()
    missing.monitor = "f1"
    with pytest.raises(InvalidInputError, match="'f1' was not logged"):
        fit(tmp_path, 1, missing)
