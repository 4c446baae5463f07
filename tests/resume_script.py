"""A training run that can be saved; run as a script it saves itself and dies.

    python -m tests.resume_script FOLDER [CONTROLLER]

trains each of `CASES`, saves it in FOLDER and kills itself. With a controller it writes
the run FOLDER/run, saves itself after some batches and kills itself some batches later.
"""

import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

from esper.grower import Grower
from esper.runs.sinks import Loggers
from tests.growth.hosts import make_batch, make_host

SLOTS = ("first->second", "second->last", "second->second")
BATCHES, PER_DECISION = 30, 5
CASES = [("never", 20), ("never", 18), ("random", 23), ("periodic", 17)]
"""Controllers, and after how many batches a run is saved."""
SAVED, KILLED = 18, 27
"""Batches after which a run with a logger is saved and killed."""
BY_HAND = {
    # batch: (what, slot, manner); at batch 20 every stage is there.
    0: [("plant", "first->second#0", {"blueprint": "widen_x1.5", "tempo": "FAST"})],
    1: [("plant", "second->last#0", {"blueprint": "widen_8", "tempo": "FAST"})],
    2: [("plant", "second->second#0", {"blueprint": "low_rank_4", "tempo": "FAST"})],
    5: [("plant", "second->second#1", {"blueprint": "low_rank_4"})],
    10: [("plant", "first->second#1", {"blueprint": "widen_x1.5", "tempo": "SLOW"})],
    15: [
        ("keep", "first->second#0", {}),
        ("prune", "second->last#0", {"speed": "SLOW", "curve": "COSINE"}),
    ],
    22: [("plant", "second->last#1", {"blueprint": "widen_x2", "tempo": "AT_ONCE"})],
}


class Training:
    """A host with dropout and batch norm, AdamW, a scheduler and a Grower."""

    def __init__(self, controller: str, logger: Loggers = None) -> None:
        self.host = make_host("vector")
        self.optimizer = torch.optim.AdamW(self.host.parameters(), 3e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, BATCHES
        )
        self.by_hand = controller == "never"
        self.grower = Grower(
            self.host,
            self.optimizer,
            SLOTS,
            example=make_batch("vector", 4)[0],
            controller=controller,
            decisions=BATCHES // PER_DECISION,
            blueprints=[
                "widen_8",
                "low_rank_4",
                "residual_mlp",
                "widen_x1.5",
                "widen_x2",
            ],
            tick=PER_DECISION,
            seeds_per_slot=2,
            logger=logger,
        )
        self.batch = 0
        torch.manual_seed(7)

    def run(self, until: int) -> None:
        """Train on, with a decision after every few batches."""
        while self.batch < until:
            for what, slot, manner in BY_HAND.get(self.batch, ()):
                if self.by_hand:
                    getattr(self.grower, what)(slot, **manner)
            x, y = make_batch("vector", 48, rng_seed=self.batch)
            x = x + 0.01 * torch.randn_like(x)
            loss = self.grower.loss(
                lambda x=x, y=y: nn.functional.cross_entropy(self.host(x), y)
            )
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.batch += 1
            if self.batch % PER_DECISION == 0:
                self.grower.step(metric=self.accuracy)

    def accuracy(self) -> float:
        """On rows of its own."""
        x, y = make_batch("vector", 64, rng_seed=999)
        self.host.eval()
        with torch.no_grad():
            right = (self.host(x).argmax(dim=1) == y).float().mean()
        self.host.train()
        return float(right)

    def state_dict(self) -> dict:
        model = self.grower.model
        return {
            "grower": self.grower.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "batch": self.batch,
            "stages": [model.stage(slot).name for slot in model.slots],
        }

    def load_state_dict(self, state: dict) -> None:
        self.grower.load_state_dict(state["grower"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.batch = state["batch"]


def main() -> None:
    torch.set_num_threads(1)
    folder, logged = Path(sys.argv[1]), sys.argv[2:]
    for controller in logged:
        training = Training(controller, folder / "run")
        training.run(SAVED)
        torch.save(training.state_dict(), folder / "state")
        training.run(KILLED)
        for each in training.grower._log._folders:  # a second has not passed
            each.store.flush(durable=False)
    for controller, batch in CASES if not logged else ():
        training = Training(controller)
        training.run(batch)
        torch.save(training.state_dict(), folder / f"{controller}-{batch}")
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
