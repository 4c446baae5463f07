"""A thousand faults, all contained.

A small host with dropout and batch norm trains with seeds in three stages. One number
is spoilt at one site at one moment: NaN, +Inf, -Inf, 3e38, -3e38, or a million times
what it was. The fault is contained if

- after the next decision no weight, buffer or moment is NaN, infinite or beyond 1e30;
- a batch that was refused left weights, buffers and moments as they were, to the bit;
- after going back, weights, buffers and moments are the snapshot's, to the bit;
- a fault in a seed that trains beside the host changes no bit of the host, of the
  active seeds, and of their moments;
- stages, alphas and history go on, and active seeds stay where they are;
- training goes on and its loss is about that of the run without a fault; after a
  spike, which may be too small to be seen, it is not worse than guessing;
- what was not finite is in the history, with its reason.

The same faults without a guard must not be contained: the test can fail.
"""

import random
import subprocess
import sys
from functools import cache
from math import log
from statistics import mean

import pytest
import torch
from torch import Tensor, nn

from esper.contracts.stages import Stage
from esper.grower import Grower
from esper.growth.safety import GovernorConfig, all_finite
from tests.growth.hosts import make_batch, make_host

VALUES = {
    "nan": lambda x: torch.nan,
    "inf": lambda x: torch.inf,
    "-inf": lambda x: -torch.inf,
    "3e38": lambda x: 3e38,
    "-3e38": lambda x: -3e38,
    "spike": lambda x: 1e6 * x,
}
ACTIVE = ("first->second#0", "second->second#0")
TRAINING = ("first->second#1",)
SITES = [
    "loss",
    "input",
    *(
        f"{whose} {what}"
        for whose in ("host", "active", "training")
        for what in ("gradient", "weight", "buffer", "moment", "output")
        if (whose, what) != ("host", "output")
    ),
]
PER_SITE = 63  # times 16 sites: 1,008 faults
BATCHES, PER_DECISION = 18, 2
SLOTS = ("first->second", "second->second")


class Run:
    """A host in training with seeds in several stages, ready to be spoilt."""

    def __init__(self, governor: GovernorConfig | None) -> None:
        host = make_host("vector")
        self.optimizer = torch.optim.AdamW(host.parameters(), 3e-3, foreach=True)
        self.grower = Grower(
            host,
            self.optimizer,
            SLOTS,
            example=make_batch("vector", 4)[0],
            controller="never",
            blueprints=["widen_8", "low_rank_4"],
            seeds_per_slot=2,
            governor=governor,
        )
        self.model = self.grower.model
        torch.manual_seed(0)
        self.grower.plant(ACTIVE[0], "widen_8", tempo="FAST")
        self.grower.plant(ACTIVE[1], "low_rank_4", tempo="SLOW")
        self.train(range(99, 102))
        for slot in ACTIVE:
            self.grower.advance(slot)
        self.train(range(102, 105))
        self.grower.advance(ACTIVE[0])
        self.train(range(105, 108))
        self.grower.keep(ACTIVE[0])
        self.grower.plant(TRAINING[0], "widen_8")
        self.train(range(108, 141))
        stages = [self.model.stage(slot) for slot in (*ACTIVE, *TRAINING)]
        assert stages == [
            Stage.FOSSILIZED,
            Stage.BLENDING,
            Stage.TRAINING,
        ]
        self.start = self.grower.state_dict()
        self.start = torch.utils._pytree.tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x, self.start
        )

    def train(self, batches) -> None:
        for batch in batches:
            self.batch(batch)
            if batch % PER_DECISION == PER_DECISION - 1:
                self.grower.step(metric=0.5)

    def batch(self, number: int, spoil=lambda site, tensor=None: tensor) -> float:
        x, y = _batch(number)
        x = spoil("input", x)
        spoil("state")

        def closure():
            return nn.functional.cross_entropy(self.model.host(x), y)

        loss = spoil("loss", self.grower.loss(closure))
        self.optimizer.zero_grad()
        loss.backward()
        spoil("gradient")
        self.optimizer.step()
        return float(loss.detach())

    def seeds(self, slots) -> list[nn.Module]:
        names = [f"slot_{self.model.index(slot)}" for slot in slots]
        return [self.model.seeds[name] for name in names if name in self.model.seeds]

    def modules(self, whose: str) -> list[nn.Module]:
        if whose == "host":
            return [self.model.host]
        return self.seeds(ACTIVE if whose == "active" else TRAINING)

    def moments(self, modules) -> list[Tensor]:
        return [
            self.optimizer.state[p][key]
            for module in modules
            for p in module.parameters()
            if p in self.optimizer.state
            for key in ("exp_avg", "exp_avg_sq")
        ]

    def tensors(self, modules) -> list[Tensor]:
        weights = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return [*weights, *self.moments(modules)]

    def bits(self, *whose: str) -> list[Tensor]:
        modules = [module for one in whose for module in self.modules(one)]
        return [tensor.detach().clone() for tensor in self.tensors(modules)]


@cache
def _batch(number: int) -> tuple[Tensor, Tensor]:
    return make_batch("vector", rows=16, rng_seed=number)


@cache
def guarded() -> Run:
    return Run(GovernorConfig())


@cache
def unguarded() -> Run:
    return Run(None)


@cache
def clean() -> tuple[list[float], dict[int, list[Tensor]]]:
    """Losses of the run without a fault, and its state after every decision."""
    run = guarded()
    run.grower.load_state_dict(run.start)
    losses, states = [], {}
    for number in range(BATCHES):
        losses.append(run.batch(number))
        if number % PER_DECISION == PER_DECISION - 1:
            run.grower.step(metric=0.5)
            states[number] = run.bits("host", "active")
    return losses, states


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def spoilt(tensor: Tensor, value: str, dice: random.Random) -> None:
    """Spoil one number in place."""
    flat = tensor.detach().view(-1)
    place = dice.randrange(flat.numel())
    flat[place] = VALUES[value](float(flat[place]))


def fault(run: Run, site: str, value: str, seed: int) -> list[str]:
    """Spoil one number in the middle of training; what was not contained, in words."""
    dice = random.Random(f"{site} {value} {seed}")
    moment = dice.randrange(PER_DECISION + 1)
    whose, _, what = site.partition(" ")
    handles = []

    def spoil(where, tensor=None):
        if number != moment:
            return tensor
        if where == site == "loss":
            return tensor * VALUES[value](1.0)
        if where == site == "input":
            tensor = tensor.clone()
            spoilt(tensor, value, dice)
            return tensor
        modules = run.modules(whose)
        if where == "state" and what in ("weight", "buffer", "moment"):
            found = {
                "weight": [p for m in modules for p in m.parameters()],
                "buffer": [
                    b for m in modules for b in m.buffers() if b.is_floating_point()
                ],
                "moment": run.moments(modules),
            }[what]
            spoilt(dice.choice(found), value, dice)
        elif where == "state" and what == "output":
            seed = dice.choice(modules)

            def once(module, args, answer):
                answer = answer.clone()
                spoilt(answer, value, dice)
                return answer

            handles.append(seed.register_forward_hook(once))
        elif where == "gradient" and what == "gradient":
            found = [p.grad for m in modules for p in m.parameters()]
            if value == "spike":
                for gradient in found:
                    gradient.mul_(1e6)
            else:
                spoilt(dice.choice(found), value, dice)
        return tensor

    usual = 1.5 * (log(5) if value == "spike" else mean(clean()[0])) + 0.2
    run.grower.load_state_dict(run.start)
    trouble, losses, decided = [], [], len(run.grower.history)
    incidents = run.grower.safety.incidents
    for number in range(BATCHES):
        known = len(incidents)
        before = run.bits("host", "active", "training") if number >= moment else []
        falls = run.grower.safety.rollbacks
        losses.append(run.batch(number, spoil))
        while handles:
            handles.pop().remove()
        fresh = incidents[known:]
        gone_back = any(line.startswith("rolled back") for line in fresh)
        if any(line.startswith("refused") and "only" not in line for line in fresh):
            # What was spoilt before the batch was not the batch's doing.
            spoilt_before = number == moment and what in ("weight", "buffer", "moment")
            if not spoilt_before and not same(
                before, run.bits("host", "active", "training")
            ):
                trouble.append("a refused batch changed something")
        if gone_back and falls == 0:
            kept = run.grower.safety.snapshot
            names = dict(run.model.named_parameters())
            for name, tensor in {**names, **dict(run.model.named_buffers())}.items():
                if not torch.equal(kept.tensors[name], tensor):
                    trouble.append(f"{name} is not the snapshot's")
            for name, parameter in names.items():
                for key, held in kept.state.get(name, {}).items():
                    if not torch.equal(held, run.optimizer.state[parameter][key]):
                        trouble.append(f"{key} of {name} is not the snapshot's")
        if number % PER_DECISION == PER_DECISION - 1:
            run.grower.step(metric=0.5)
            incidents = run.grower.safety.incidents
            if number < moment:
                continue
            if not all_finite(run.tensors([run.model]), 1e30):
                trouble.append(f"not finite after the decision at batch {number}")
            if whose == "training" and not same(
                clean()[1][number], run.bits("host", "active")
            ):
                trouble.append("the host changed")
            if number > moment + 1 and max(losses[-2:]) <= usual:
                break
    else:
        trouble.append(f"the losses are {losses}, usually below {usual}")
    history = run.grower.history[decided:]
    # An infinite answer may be harmless: tanh makes it 1.
    loud = ("nan",) if what == "output" else ("nan", "inf", "-inf")
    if value in loud and not any(d.incidents for d in history):
        trouble.append("nothing was reported")
    if len(history) != len(losses) // PER_DECISION:
        trouble.append("decisions are missing")
    if len(run.seeds(ACTIVE)) != len(ACTIVE):
        trouble.append("an active seed is gone")
    return trouble


def contained(site: str, seeds: range) -> int:
    """How many faults of a site were tried; all are contained."""
    for seed in seeds:
        value = [*VALUES][seed % len(VALUES)]
        assert fault(guarded(), site, value, seed) == [], (site, value, seed)
    return len(seeds)


@pytest.mark.parametrize("site", SITES)
def test_a_fault_is_contained(site):
    contained(site, range(3))


@pytest.mark.slow
def test_a_thousand_faults_are_contained():
    """In a process of its own, which runs without checking every annotation."""
    code = "from tests.test_grower_faults import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1000


def main() -> None:
    """Try every site; one number is printed."""
    torch.set_num_threads(1)
    print(sum(contained(site, range(PER_SITE)) for site in SITES))


@pytest.mark.parametrize("site", SITES)
def test_without_a_guard_the_same_faults_are_not_contained(site):
    assert fault(unguarded(), site, "nan", 0)
