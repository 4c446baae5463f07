"""One host after the other in plain PyTorch: what a cohort must be equal to.

A host is its layers and its seeds as plain parameters. A seed that the host does not
feel learns from a second forward pass, in which it has alpha 1 and the host is
detached. One `torch.optim.AdamW` per host; a newborn's step is stretched by the rule of
growing models.
"""

import torch
import torch.nn.functional as F
from torch import nn

from esper.contracts.blueprints import Form
from esper.contracts.stages import Stage

ACTIVATIONS = {Form.WIDEN: torch.relu, Form.LOW_RANK: None, Form.RESIDUAL_MLP: F.gelu}


class PlainSeed(nn.Module):
    """`B act(A h + a) + b`; a and b only if the form has them."""

    def __init__(self, blueprint, first, bias, outputs):
        super().__init__()
        self.form = blueprint.form
        self.act = ACTIVATIONS[self.form]
        zeros = torch.zeros(blueprint.size, outputs, dtype=first.dtype)
        self.first, self.last = nn.Parameter(first.clone()), nn.Parameter(zeros)
        self.bias = self.last_bias = None
        if self.form is not Form.LOW_RANK:
            self.bias = nn.Parameter(bias.clone())
        if self.form is Form.RESIDUAL_MLP:
            self.last_bias = nn.Parameter(zeros[0].clone())
        self.stage, self.alpha, self.age = Stage.TRAINING, 0.0, 0

    def forward(self, h):
        if self.bias is None:
            return (h @ self.first) @ self.last
        hidden = self.act(torch.addmm(self.bias, h, self.first))
        if self.last_bias is None:
            return hidden @ self.last
        return torch.addmm(self.last_bias, hidden, self.last)


class PlainHost(nn.Module):
    """Layers with ReLU between them, and seeds by slot."""

    def __init__(self, weights, biases, *, rate, decay, newborn=(3.0, 200), **more):
        super().__init__()
        self.weights = nn.ParameterList([w.detach().clone() for w in weights])
        self.biases = nn.ParameterList([b.detach().clone() for b in biases])
        self.seeds = nn.ModuleDict()
        self.newborn = newborn
        self.optimizer = torch.optim.AdamW(
            self.parameters(), lr=rate, weight_decay=decay, **more
        )

    @property
    def places(self):
        return len(self.weights) - 1

    def plant(self, slot, blueprint, first, bias):
        outputs = self.weights[slot % self.places + 1].shape[1]
        seed = PlainSeed(blueprint, first, bias, outputs)
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
        for layer, (weight, bias) in enumerate(
            zip(self.weights, self.biases, strict=True)
        ):
            if shadow:
                weight, bias = weight.detach(), bias.detach()
            z = torch.addmm(bias, inputs[layer], weight)
            for slot, seed in self.seeds.items():
                training = seed.stage is Stage.TRAINING
                alpha = float(shadow) if training else seed.alpha
                if int(slot) % self.places == layer - 1 and alpha > 0:
                    z = z + alpha * seed(inputs[layer - 1])
            inputs.append(torch.relu(z))
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
