"""One network after the other in plain PyTorch: what a cohort must be equal to.

Every block between two ranges of units is a layer of its own. A seed that the host does
not see learns from a second forward pass, in which it has alpha 1 and everything else
is frozen. One `torch.optim.AdamW` per network.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import nn

HOST = -1


def error(outputs, y):
    """Cross-entropy; of one output the squared error."""
    if outputs.shape[1] == 1:
        return F.mse_loss(outputs.flatten(), y)
    return F.cross_entropy(outputs, y)


class PlainNetwork:
    """A host with new units by slot, and their optimiser."""

    def __init__(self, network, *, rate, decay):
        marks = [i for i, m in enumerate(network) if any(True for _ in m.parameters())]
        ends = [*marks[1:], len(network)]
        self.between = [network[a + 1 : b] for a, b in zip(marks, ends, strict=True)]
        layers = [network[i] for i in marks]
        self.conv = [isinstance(layer, nn.Conv2d) for layer in layers]
        self.each = [1] + [
            after.weight.shape[1] // before.weight.shape[0]
            for before, after in itertools.pairwise(layers)
        ]
        self.weights = {(n, HOST, HOST): p.weight for n, p in enumerate(layers)}
        self.biases = {(n, HOST): p.bias for n, p in enumerate(layers)}
        self.seeds = {}  # slot -> place, in the order of birth
        held = [*self.weights.values(), *self.biases.values()]
        self.optimizer = torch.optim.AdamW(held, lr=rate, weight_decay=decay)

    @property
    def places(self):
        return len(self.between) - 1

    def owners(self, place):
        """Who has units on an axis, the oldest first."""
        return [HOST, *(s for s, at in self.seeds.items() if at == place)]

    def units(self, place, owner):
        return len(self.biases[place, owner])

    def plant(self, slot, weight, bias):
        """New units that read everything before them; nothing reads them yet."""
        place = slot % self.places
        kernel = (3, 3) if self.conv[place] else ()
        new, start = {}, 0
        for owner in self.owners(place - 1) if place else [HOST]:
            inputs = self.weights[place, HOST, HOST].shape[1]
            if owner != HOST or place:
                inputs = self.units(place - 1, owner) * self.each[place]
            part = weight[:, start : start + inputs].reshape(len(bias), inputs, *kernel)
            new[place, slot, owner] = part
            start += inputs
        kernel = (3, 3) if self.conv[place + 1] else ()
        for owner in self.owners(place + 1):
            inputs = len(bias) * self.each[place + 1]
            new[place + 1, owner, slot] = torch.zeros(
                self.units(place + 1, owner), inputs, *kernel
            )
        dtype = self.weights[0, HOST, HOST].dtype
        new = {key: nn.Parameter(p.to(dtype).clone()) for key, p in new.items()}
        self.weights |= new
        self.biases[place, slot] = nn.Parameter(bias.to(dtype).clone())
        self.seeds[slot] = place
        added = [*new.values(), self.biases[place, slot]]
        self.optimizer.param_groups[0]["params"].extend(added)

    def remove(self, slot):
        gone = {k: p for k, p in self.weights.items() if slot in k[1:]}
        bias = self.biases.pop((self.seeds.pop(slot), slot))
        self.weights = {k: p for k, p in self.weights.items() if k not in gone}
        leaving = {id(p) for p in [*gone.values(), bias]}
        held = self.optimizer.param_groups[0]["params"]
        held[:] = [p for p in held if id(p) not in leaving]

    def forward(self, x, alpha):
        """Logits; seeds without alpha take no part."""
        before = {HOST: x}
        for n, between in enumerate(self.between):
            after = {}
            for to in self.owners(n):
                if to != HOST and alpha[to] <= 0:
                    continue
                z = 0.0
                for since, h in before.items():
                    weight = self.weights[n, to, since]
                    bias = self.biases[n, to] if since == HOST else None
                    if self.conv[n]:
                        z = z + F.conv2d(h, weight, bias, padding=1)
                    else:
                        z = z + F.linear(h.flatten(1), weight, bias)
                after[to] = between(z)
                if to != HOST:
                    after[to] = after[to] * alpha[to]
            before = after
        return after[HOST]

    def train_step(self, x, y, alpha, training):
        """One minibatch; returns the loss of the host's own pass."""
        self.optimizer.zero_grad()
        loss = error(self.forward(x, alpha), y)
        loss.backward()
        young = {slot for slot in self.seeds if training[slot]}
        if young:
            raised = [1.0 if s in young else a for s, a in enumerate(alpha)]
            beside = error(self.forward(x, raised), y)
            learning = [
                p for k, p in [*self.weights.items(), *self.biases.items()]
                if young & set(k[1:])
            ]  # fmt: skip
            found = torch.autograd.grad(beside, learning, allow_unused=True)
            for parameter, gradient in zip(learning, found, strict=True):
                parameter.grad = gradient
        self.optimizer.step()
        return loss.detach()

    def layer(self, n):
        """Weights `[out, in, tap]` and biases of a whole layer, seeds included."""
        rows = []
        for to in self.owners(n):
            before = self.owners(n - 1) if n else [HOST]
            parts = [self.weights[n, to, since] for since in before]
            rows.append(torch.cat(parts, dim=1))
        weight = torch.cat(rows).detach()
        bias = torch.cat([self.biases[n, to] for to in self.owners(n)]).detach()
        return weight.reshape(*weight.shape[:2], -1), bias
