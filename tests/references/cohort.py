"""One host after the other in plain PyTorch: what a cohort must be equal to.

A host is the network itself, its seeds are modules. A seed that the host does not feel
learns from a second forward pass, in which it has alpha 1 and the host is detached. One
`torch.optim.AdamW` per host; a newborn's step is stretched by the rule of growing
models.
"""

import torch
import torch.nn.functional as F
from torch import nn

from esper.contracts.blueprints import Form
from esper.contracts.stages import Stage


class PlainSeed(nn.Module):
    """`last(act(first(h)))`, with the kinds of layers that the host has there."""

    def __init__(self, blueprint, params, before, own, middle):
        super().__init__()
        self.form, units = blueprint.form, blueprint.size
        biased = self.form is not Form.LOW_RANK
        dtype = own.weight.dtype
        if isinstance(before, nn.Conv2d):
            self.first = nn.Conv2d(before.in_channels, units, 3, padding=1, dtype=dtype)
            weight, width = params["first"], before.out_channels
        else:
            self.first = nn.Linear(before.in_features, units, biased, dtype=dtype)
            weight, width = params["first"].T, before.out_features
        ends = self.form is Form.RESIDUAL_MLP
        if isinstance(own, nn.Conv2d):
            self.last = nn.Conv2d(
                units, own.out_channels, 3, padding=1, bias=ends, dtype=dtype
            )
        else:
            inputs = own.in_features // width * units
            self.last = nn.Linear(inputs, own.out_features, ends, dtype=dtype)
        with torch.no_grad():
            self.first.weight.copy_(weight)
            if biased:
                self.first.bias.copy_(params["first_bias"])
            for parameter in self.last.parameters():
                parameter.zero_()
        self.middle = {
            Form.WIDEN: middle,
            Form.LOW_RANK: nn.Identity(),
            Form.RESIDUAL_MLP: nn.GELU(),
        }[self.form]
        self.stage, self.alpha, self.age = Stage.TRAINING, 0.0, 0

    def forward(self, h):
        return self.last(self.middle(self.first(h)))


def frozen(layer, h):
    """What a layer says, learning nothing."""
    weight, bias = layer.weight.detach(), layer.bias.detach()
    if isinstance(layer, nn.Conv2d):
        return F.conv2d(h, weight, bias, padding=1)
    return F.linear(h, weight, bias)


class PlainHost(nn.Module):
    """A network with seeds by slot, and its optimiser."""

    def __init__(self, network, *, rate, decay, newborn=(3.0, 200), **more):
        super().__init__()
        marks = [i for i, m in enumerate(network) if any(True for _ in m.parameters())]
        self.layers = nn.ModuleList(network[i] for i in marks)
        ends = [*marks[1:], len(network)]
        self.between = [network[a + 1 : b] for a, b in zip(marks, ends, strict=True)]
        self.seeds = nn.ModuleDict()
        self.newborn = newborn
        self.optimizer = torch.optim.AdamW(
            self.parameters(), lr=rate, weight_decay=decay, **more
        )

    @property
    def places(self):
        return len(self.layers) - 1

    def plant(self, slot, blueprint, params):
        place = slot % self.places
        before, own = self.layers[place], self.layers[place + 1]
        seed = PlainSeed(blueprint, params, before, own, self.between[place])
        self.seeds[str(slot)] = seed
        self.optimizer.param_groups[0]["params"].extend(seed.parameters())

    def uproot(self, slot):
        leaving = {id(p) for p in self.seeds[str(slot)].parameters()}
        held = self.optimizer.param_groups[0]["params"]
        held[:] = [parameter for parameter in held if id(parameter) not in leaving]
        del self.seeds[str(slot)]

    def live(self, slot, stage, alpha):
        self.seeds[str(slot)].stage = Stage(stage)
        self.seeds[str(slot)].alpha = alpha

    def forward(self, x, *, shadow=False):
        inputs = [x]
        for n, layer in enumerate(self.layers):
            z = frozen(layer, inputs[n]) if shadow else layer(inputs[n])
            for slot, seed in self.seeds.items():
                training = seed.stage is Stage.TRAINING
                alpha = float(shadow) if training else seed.alpha
                if int(slot) % self.places == n - 1 and alpha > 0:
                    z = z + alpha * seed(inputs[n - 1])
            inputs.append(self.between[n](z))
        return z

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        loss.backward()
        newborns = [
            parameter
            for seed in self.seeds.values()
            if seed.stage is Stage.TRAINING
            for parameter in seed.parameters()
        ]
        if newborns:
            beside = F.cross_entropy(self(x, shadow=True), y)
            found = torch.autograd.grad(beside, newborns)
            for parameter, gradient in zip(newborns, found, strict=True):
                parameter.grad = gradient
        self._move()
        return loss.detach()

    def _move(self):
        """One step of the optimiser, longer for the young."""
        factor, steps = self.newborn
        young = [s for s in self.seeds.values() if s.age < steps and factor != 1.0]
        held = [[p.detach().clone() for p in seed.parameters()] for seed in young]
        self.optimizer.step()
        with torch.no_grad():
            for seed, before in zip(young, held, strict=True):
                stretch = 1.0 + (factor - 1.0) * (1.0 - seed.age / steps)
                for parameter, old in zip(seed.parameters(), before, strict=True):
                    parameter.copy_(old + stretch * (parameter - old))
        for seed in self.seeds.values():
            if any(p.grad is not None for p in seed.parameters()):
                seed.age += 1
