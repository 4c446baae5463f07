"""A thousand faults, all contained.

A small host with dropout and batch norm trains with seeds in three stages. One number
is spoilt at one site at one moment. The fault is contained if after the next decision
everything is finite; a refused batch changed no bit; after going back everything is the
snapshot's, to the bit; a fault in a seed in training changed no bit of
anything else; active seeds stay, decisions go on, and the loss is soon about that of
the run without a fault (after a spike, which may be too small to be seen, not worse
than guessing); and what was not finite is in the history. The same faults without a
guard must not be contained: the test can fail.
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
SEEDS = {
    "active": ("first->second#0", "second->second#0"),
    "training": ("first->second#1",),
}
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


class Run:
    """A host in training with seeds in several stages, ready to be spoilt."""

    def __init__(self, governor: GovernorConfig | None) -> None:
        host = make_host("vector")
        self.optimizer = torch.optim.AdamW(host.parameters(), 3e-3, foreach=True)
        self.grower = Grower(
            host,
            self.optimizer,
            ("first->second", "second->second"),
            example=make_batch("vector", 4)[0],
            controller="never",
            blueprints=["widen_8", "low_rank_4"],
            seeds_per_slot=2,
            governor=governor,
            tick=100,
        )
        self.model = self.grower.model
        torch.manual_seed(0)
        kept, blending = SEEDS["active"]
        self.grower.plant(kept, "widen_8", tempo="AT_ONCE")
        self.grower.plant(blending, "low_rank_4", tempo="FAST")
        self.train(range(99, 108))
        self.grower.advance(blending)
        self.grower.keep(kept)
        self.grower.plant(*SEEDS["training"], "widen_8")
        self.train(range(108, 141))
        stages = [self.model.stage(s) for slots in SEEDS.values() for s in slots]
        assert stages == [Stage.FOSSILIZED, Stage.BLENDING, Stage.TRAINING]
        self.start = torch.utils._pytree.tree_map(
            lambda x: x.clone() if isinstance(x, Tensor) else x,
            self.grower.state_dict(),
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
        loss = spoil(
            "loss",
            self.grower.loss(
                lambda: nn.functional.cross_entropy(self.model.host(x), y)
            ),
        )
        self.optimizer.zero_grad()
        loss.backward()
        spoil("gradient")
        self.optimizer.step()
        return float(loss.detach())

    def modules(self, *whose: str) -> list[nn.Module]:
        seeds = self.model.seeds
        parts = self.model.host.named_children()
        found = [part for name, part in parts if name != "esper_seeds"]
        found = found if "host" in whose else []
        names = [
            f"slot_{self.model.seeds.index(s)}" for w in whose for s in SEEDS.get(w, ())
        ]
        return found + [seeds[name] for name in names if name in seeds]

    def moments(self, modules) -> list[Tensor]:
        state = self.optimizer.state
        weights = [p for m in modules for p in m.parameters() if p in state]
        return [state[p][key] for p in weights for key in ("exp_avg", "exp_avg_sq")]

    def tensors(self, modules) -> list[Tensor]:
        weights = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        return [*weights, *self.moments(modules)]

    def bits(self, *whose: str) -> list[Tensor]:
        return [t.detach().clone() for t in self.tensors(self.modules(*whose))]

    def unlike_the_snapshot(self) -> list[str]:
        kept, model = self.grower.safety.snapshot, self.model
        names = dict(model.named_parameters())
        live = {**names, **dict(model.named_buffers())}
        wrong = [n for n, t in live.items() if not torch.equal(kept.tensors[n], t)]
        return wrong + [
            f"{key} of {name}"
            for name, parameter in names.items()
            for key, held in kept.state.get(name, {}).items()
            if not torch.equal(held, self.optimizer.state[parameter][key])
        ]


@cache
def _batch(number: int) -> tuple[Tensor, Tensor]:
    return make_batch("vector", rows=16, rng_seed=number)


@cache
def training(*, guarded: bool) -> Run:
    return Run(GovernorConfig() if guarded else None)


@cache
def clean() -> tuple[list[float], dict[int, list[Tensor]]]:
    """Losses of the run without a fault, and its state after every decision."""
    run = training(guarded=True)
    run.grower.load_state_dict(run.start)
    losses, states = [], {}
    for number in range(BATCHES):
        losses.append(run.batch(number))
        if number % PER_DECISION == PER_DECISION - 1:
            run.grower.step(metric=0.5)
            states[number] = run.bits("host", "active")
    return losses, states


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


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
        modules = run.modules(whose)
        if number != moment:
            return tensor
        if where == site == "loss":
            return tensor * VALUES[value](1.0)
        if where == site == "input":
            spoilt(tensor := tensor.clone(), value, dice)
        elif where == "state" and what in ("weight", "buffer", "moment"):
            buffers = [b for m in modules for b in m.buffers() if b.is_floating_point()]
            weights = [p for m in modules for p in m.parameters()]
            moments = run.moments(modules)
            found = {"weight": weights, "buffer": buffers, "moment": moments}[what]
            spoilt(dice.choice(found), value, dice)
        elif where == "state" and what == "output":

            def once(module, args, answer):
                spoilt(answer := answer.clone(), value, dice)
                return answer

            handles.append(dice.choice(modules).register_forward_hook(once))
        elif where == "gradient" and what == "gradient":
            found = [p.grad for m in modules for p in m.parameters()]
            if value == "spike":
                torch._foreach_mul_(found, 1e6)
            else:
                spoilt(dice.choice(found), value, dice)
        return tensor

    usual = 1.5 * (log(5) if value == "spike" else mean(clean()[0])) + 0.2
    run.grower.load_state_dict(run.start)
    trouble, losses, decided = [], [], len(run.grower.history)
    incidents = run.grower.safety.incidents
    for number in range(BATCHES):
        known, falls = len(incidents), run.grower.safety.rollbacks
        before = run.bits("host", "active", "training") if number >= moment else []
        losses.append(run.batch(number, spoil))
        while handles:
            handles.pop().remove()
        fresh = incidents[known:]
        # What was spoilt before the batch was not the batch's doing.
        own = number != moment or what not in ("weight", "buffer", "moment")
        refused = any(i.startswith("refused") and "only" not in i for i in fresh)
        changed = not same(before, run.bits("host", "active", "training"))
        if own and refused and changed:
            trouble.append("a refused batch changed something")
        if falls == 0 and any(line.startswith("rolled back") for line in fresh):
            trouble += run.unlike_the_snapshot()
        if number % PER_DECISION == PER_DECISION - 1:
            run.grower.step(metric=0.5)
            incidents = run.grower.safety.incidents
            if number < moment:
                continue
            if not all_finite(run.tensors([run.model]), 1e30):
                trouble.append(f"not finite after the decision at batch {number}")
            now = run.bits("host", "active")
            if whose == "training" and not same(clean()[1][number], now):
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
    if len(run.modules("active")) != len(SEEDS["active"]):
        trouble.append("an active seed is gone")
    return trouble


def contained(site: str, seeds: range) -> int:
    """How many faults of a site were tried; all are contained."""
    for seed in seeds:
        value = [*VALUES][seed % len(VALUES)]
        assert fault(training(guarded=True), site, value, seed) == [], (value, seed)
    return len(seeds)


@pytest.mark.filterwarnings("ignore:a batch was refused")
@pytest.mark.parametrize("site", SITES)
def test_a_fault_is_contained_and_without_a_guard_it_is_not(site):
    contained(site, range(0, 6, 3))  # NaN, and a number that is too large
    assert fault(training(guarded=False), site, "nan", 0)


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
