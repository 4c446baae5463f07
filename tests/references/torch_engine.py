"""The cohort in torch operations: the slow twin of the compiled engine.

Each network is read from its vector as whole layers; units that take no part are left
out by selection, never by a zero factor: NaN times 0 is NaN.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int64, Num
from torch import Tensor

from esper.environment.cohort import Cohort
from esper.environment.engine import B1, B2, EPS, REST1, REST2
from esper.environment.network_layout import NetworkLayout
from esper.tasks.hosts import CONV


class TorchCohort(Cohort):
    """A cohort that trains and scores with autograd, network by network."""

    def train(self, features, labels, picked, alpha, training, rates, steps=None):
        """Train every host; see `Cohort.train`."""
        if steps is None:
            steps = torch.full((self.envs,), picked.shape[1])
        return train(self, features, labels, picked, steps, alpha, training, rates)

    def score(self, features, labels, alpha, wanted=None):
        """Score every host; see `Cohort.score`."""
        if wanted is None:
            wanted = torch.full((self.envs,), labels.shape[1])
        found = measure(self, features, labels, alpha.to(self.values.dtype), wanted)
        return self._share(found, labels, wanted)


def indices(layout: NetworkLayout, layer: int) -> tuple[Tensor, Tensor]:
    """Positions of a layer's weights `[out, in, tap]` and biases in the vector."""
    own = layout.layers[layer]
    bias = torch.empty(own["outputs"], dtype=torch.int64)
    weight = bias.new_empty(own["outputs"], own["inputs"], own["taps"])
    for block in layout.blocks[own["biases"] : own["end"]]:
        at = int(block["offset"]) + torch.arange(int(block["length"]))
        out = slice(block["out"], block["out"] + block["outs"])
        if block["ins"]:
            into = slice(block["into"], block["into"] + block["ins"])
            weight[out, into] = at.view(int(block["outs"]), int(block["ins"]), -1)
        else:
            bias[out] = at
    return weight, bias


def layer(cohort: Cohort, env: int, index: int) -> tuple[Tensor, Tensor]:
    """Weights `[out, in, tap]` and biases of a layer, seeds included."""
    weight, bias = indices(cohort.layouts[env], index)
    return cohort.values[env, weight], cohort.values[env, bias]


def forward(
    layout: NetworkLayout,
    vector: Float[Tensor, " parameter"],
    x: Float[Tensor, "row input"],
    scale: Float[Tensor, " owner"],
) -> Float[Tensor, "row output"]:
    """Logits of one network; activations of each owner's units are scaled."""
    own = layout.shapes[0]
    if own.kind == CONV:
        x = x.view(-1, own.inputs, own.high, own.wide)
    inputs = None
    for n, own in enumerate(layout.shapes):
        weight, bias = indices(layout, n)
        owners = torch.cat(
            [torch.full((part.units,), part.owner) for part in layout.axes[n]]
        )
        used = scale[owners] > 0
        weight, bias = vector[weight[used]], vector[bias[used]]
        if inputs is not None:
            each = int(layout.layers[n]["each"])
            weight = weight[:, inputs.repeat_interleave(each)]
        if own.kind == CONV:
            x = F.conv2d(x, weight.unflatten(2, (3, 3)), bias, padding=1)
        else:
            x = F.linear(x.flatten(1), weight.squeeze(2), bias)
        if n + 1 < len(layout.shapes):
            x = F.relu(x)
            x = F.max_pool2d(x, 2) if own.kind == CONV else x
            factor = scale[owners[used]]
            x = x * factor.view(-1, *[1] * (x.ndim - 2))
        inputs = used
    return x


def _loss(outputs: Float[Tensor, "row output"], y: Num[Tensor, " row"]) -> Tensor:
    """Mean cross-entropy, or squared error of one output."""
    if outputs.shape[1] == 1:
        return F.mse_loss(outputs[:, 0], y.to(outputs))
    return F.cross_entropy(outputs, y)


def train(
    cohort: Cohort,
    features: Float[Tensor, "_ example input"],
    labels: Num[Tensor, "_ example"],
    picked: Int64[Tensor, "env step row"],
    steps: Int64[Tensor, " env"],
    alpha: Float[Tensor, "env step slot"],
    training: Bool[Tensor, "env step slot"],
    rates: Float[Tensor, "env step"],
) -> tuple[Tensor, Tensor]:
    """Train every host on its minibatches; see `Cohort.train`."""
    losses = cohort.values.new_zeros(cohort.envs)
    shadow_losses = torch.zeros_like(losses)
    for env, count in enumerate(steps.tolist()):
        layout, mine, shadows = cohort.layouts[env], env % len(features), 0
        size = layout.parameters
        number, out_owner, in_owner = _owners(layout)
        w, mean, square = (
            rows[env, :size] for rows in (cohort.values, cohort.mean, cohort.square)
        )
        for step in range(count):
            rows = picked[env, step]
            x, y = features[mine, rows], labels[mine, rows]
            scale = F.pad(alpha[env, step].to(w), (1, 0), value=1.0)
            vector = w.detach().clone().requires_grad_()
            loss = _loss(forward(layout, vector, x, scale), y)
            (gradient,) = torch.autograd.grad(loss, vector)
            losses[env] += loss.detach()
            move = (scale[out_owner] > 0) & (scale[in_owner] > 0)
            young = F.pad(training[env, step], (1, 0))
            if bool(young.any()):
                scale = torch.where(young, 1.0, scale)
                loss = _loss(forward(layout, vector, x, scale), y)
                (shadow,) = torch.autograd.grad(loss, vector)
                shadow_losses[env] += loss.detach()
                shadows += 1
                learns = (scale[out_owner] > 0) & (scale[in_owner] > 0)
                learns &= young[out_owner] | young[in_owner]
                gradient = torch.where(learns, shadow, gradient)
                move = move | learns
            clocks = cohort.clocks[env]
            clocks[number[move].unique()] += 1
            clock = clocks[number].double()
            _adamw(
                w, gradient, mean, square, move, rates[env, step], clock, cohort.decay
            )
        losses[env] /= max(count, 1)
        shadow_losses[env] /= max(shadows, 1)
    return losses, shadow_losses


@torch.no_grad()
def measure(
    cohort: Cohort,
    features: Float[Tensor, "_ example input"],
    labels: Num[Tensor, "_ example"],
    alpha: Float[Tensor, "env slot"],
    wanted: Int64[Tensor, " env"],
) -> Float64[Tensor, " env"]:
    """Correctly classified rows, or the sum of squared errors; see `Cohort.score`."""
    found = torch.zeros_like(wanted, dtype=torch.float64)
    for env, rows in enumerate(wanted.tolist()):
        layout, mine = cohort.layouts[env], env % len(features)
        scale = F.pad(alpha[env], (1, 0), value=1.0)
        outputs = forward(
            layout,
            cohort.values[env, : layout.parameters],
            features[mine, :rows],
            scale,
        )
        if outputs.shape[1] == 1:
            error = outputs[:, 0].double() - labels[mine, :rows]
            found[env] = error.square().sum()
        else:
            found[env] = (outputs.argmax(dim=1) == labels[mine, :rows]).sum()
    return found


def _owners(layout: NetworkLayout) -> list[Tensor]:
    """Block of each parameter, and who owns its two ends."""
    found = torch.empty(3, layout.parameters, dtype=torch.int64)
    for number, block in enumerate(layout.blocks):
        at = slice(block["offset"], block["offset"] + block["length"])
        found[0, at] = number
        found[1, at], found[2, at] = int(block["out_owner"]), int(block["in_owner"])
    return list(found)


@torch.no_grad()
def _adamw(
    w: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    move: Bool[Tensor, " parameter"],
    rate: Float[Tensor, ""],
    clock: Float[Tensor, " parameter"],
    decay: float,
) -> None:
    """One step of the parameters that move, in place."""
    first = B1 * mean + REST1 * gradient
    second = B2 * square + REST2 * gradient.square()
    unbiased = first / (1 - B1**clock).to(w)
    spread = second.sqrt() / (1 - B2**clock).sqrt().to(w)
    step = rate * (decay * w + unbiased / (spread + EPS))
    for kept, new in ((mean, first), (square, second), (w, w - step)):
        kept.copy_(torch.where(move, new, kept))
