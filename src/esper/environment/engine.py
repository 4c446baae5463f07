r"""Compiled training of growing networks, one environment after the other.

    train     hosts and seeds, on all minibatches until the next decision
    measure   correctly classified rows of every host, or its squared errors

The vector `w` holds all weights of an environment and `s` its activations and their
gradients, laid out by `NetworkLayout`. Rows of a minibatch are the last axis, so inner
loops run along memory. Weight (o, i, tap) of a block is at
`offset + (o * ins + i) * taps + tap`; images are zero-padded by one pixel. Activations
of a seed's units are scaled by its alpha; blocks of an inactive seed are skipped.

Sums are split over lanes and fused with products; equal inputs give equal bits. The
optimizer is AdamW (Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101), with a
step count for each block:

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    p <- p - r (w p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

Nothing here checks bounds: `Task.splits` checks rows and labels. ESPER_DEBUG=1 does.
"""

import math

import numpy as np

from esper.environment import network_layout
from esper.kernels import fused_with, summed_with
from esper.tasks.hosts import CONV

B1, B2, EPS = 0.9, 0.999, 1e-8
REST1, REST2 = 1 - B1, 1 - B2
"""Computed in float64: 1 - 0.999 in float32 is wrong in the fifth digit."""
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.4286068203094172e-6
TAYLOR = tuple(1 / math.factorial(n) for n in range(11, -1, -1))

entry = fused_with(network_layout)
fused = fused_with(network_layout, part=True)
summed = summed_with(network_layout, part=True)

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@entry
def train(
    features, labels, picked, steps, rates, v, mean, square, clocks, g, s, bits,
    layers, blocks, counts, alphas, training, decay,
):  # fmt: skip
    """Train every host and its seeds; return mean losses of hosts and shadow passes.

    Args:
        features: Training rows `[env, example, in]`; one set may serve all.
        labels: Labels `[env, example]` in the dtype of the weights.
        picked: Row indices of each minibatch, `[env, step, row]`.
        steps: Number of minibatches per environment.
        rates: Learning rate of every minibatch, `[env, step]`.
        v: Weights `[env, parameter]`.
        mean: First moments of AdamW; same shape.
        square: Second moments of AdamW; same shape.
        clocks: Optimizer steps of each block, `[env, block]`.
        g: Buffer for the gradients of one environment.
        s: Buffer for its activations.
        bits: `s` viewed as integers.
        layers: Layers of every network, `[env, layer]`.
        blocks: Blocks of every network, `[env, block]`.
        counts: Number of blocks of every network.
        alphas: Alpha of every seed in the host's own pass, `[env, step, slot]`.
        training: Whether a seed trains in the shadow pass, with alpha 1.
        decay: Weight decay.
    """
    envs, _, rows = picked.shape
    owners = alphas.shape[2] + 1
    loss, shadow = np.zeros(envs, v.dtype), np.zeros(envs, v.dtype)
    y, bottom = np.empty(rows, v.dtype), np.int64(0)
    scale, young = np.ones(owners, v.dtype), np.zeros(owners, np.bool_)
    moved = np.zeros(blocks.shape[1], np.bool_)
    for e in range(envs):
        mine, w, lay, block = e % len(features), v[e], layers[e], blocks[e][: counts[e]]
        top, shadows = lay[len(lay) - 1], 0
        _clear_borders(s, lay, rows)
        for n in range(steps[e]):
            for r in range(rows):
                y[r] = labels[mine, picked[e, n, r]]
            _gather(features[mine], picked[e, n], s, lay[0])
            scale[1:] = alphas[e, n]
            moved[:] = False
            young[:] = False
            _forward(w, s, rows, lay, block, scale, bottom)
            loss[e] += _loss(s, bits, top, rows, y)
            _backward(w, g, s, rows, lay, block, scale, young, moved, bottom)
            start = np.int64(len(lay))
            for b in block:
                if b.out_owner > 0 and training[e, n, b.out_owner - 1]:
                    young[b.out_owner] = True
                    scale[b.out_owner] = 1
                    start = min(start, b.layer)
            if start < len(lay):
                _forward(w, s, rows, lay, block, scale, start)
                shadow[e] += _loss(s, bits, top, rows, y)
                _backward(w, g, s, rows, lay, block, scale, young, moved, start)
                shadows += 1
            for i in range(len(block)):
                if moved[i]:
                    b = block[i]
                    clocks[e, i] += 1
                    adamw(
                        w, g, mean[e], square[e], b.offset, b.length, rates[e, n],
                        clocks[e, i], decay,
                    )  # fmt: skip
        loss[e] /= max(steps[e], 1)
        shadow[e] /= max(shadows, 1)
    return loss, shadow


@entry
def measure(features, labels, wanted, v, s, layers, blocks, counts, rows, alphas):
    """Count the first `wanted` examples that each host classifies correctly.

    With one output, return the sum of squared errors. Arguments are as in `train`.
    """
    found = np.zeros(v.shape[0], np.float64)
    best, guess = np.empty(rows, v.dtype), np.empty(rows, np.int64)
    picked, bottom = np.empty(rows, np.int64), np.int64(0)
    scale = np.ones(alphas.shape[1] + 1, v.dtype)
    for e in range(v.shape[0]):
        mine, lay, block = e % len(features), layers[e], blocks[e][: counts[e]]
        last = lay[len(lay) - 1]
        scale[1:] = alphas[e]
        examples = wanted[e]
        _clear_borders(s, lay, rows)
        for begin in range(0, examples, rows):
            for r in range(rows):  # pad the last minibatch
                picked[r] = min(begin + r, examples - 1)
            _gather(features[mine], picked, s, lay[0])
            _forward(v[e], s, rows, lay, block, scale, bottom)
            z = s[last.z * rows : (last.z + last.outputs) * rows]
            if last.outputs == 1:
                for r in range(min(rows, examples - begin)):
                    error = np.float64(z[r]) - labels[mine, begin + r]
                    found[e] += error * error
                continue
            best[:] = z[:rows]
            guess[:] = 0
            for o in range(1, last.outputs):
                for r in range(rows):
                    more = z[o * rows + r] > best[r]
                    best[r] = z[o * rows + r] if more else best[r]
                    guess[r] = o if more else guess[r]
            for r in range(min(rows, examples - begin)):
                found[e] += guess[r] == labels[mine, begin + r]
    return found


@fused
def _clear_borders(s, layers, rows):
    """Zero the padding that convolutions read; its place differs by network."""
    for own in layers:
        if own.kind == CONV:
            s[own.x * rows : (own.x + own.inputs * own.padded) * rows] = 0
            s[own.gz * rows : (own.gz + own.outputs * own.padded) * rows] = 0


@fused
def _gather(features, picked, s, first):
    """Copy rows to the inputs of the first layer, transposed and padded."""
    rows, start = len(picked), first.x * len(picked)
    padded = first.kind == CONV
    for c in range(first.inputs):
        for h in range(first.high):
            at = c * first.high + h
            to = line_at(first, c, h) if padded else at
            for i in range(first.wide):
                line = s[start + (to + i) * rows : start + (to + i + 1) * rows]
                example = features[:, at * first.wide + i]
                for r in range(rows):
                    line[r] = example[picked[r]]


@fused
def _forward(w, s, rows, layers, blocks, scale, start):
    """Compute the outputs of every layer from `start` on."""
    for n in range(start, len(layers)):
        own = layers[n]
        spots = own.high * own.wide * rows
        for b in blocks[own.biases : own.weights]:
            if scale[b.out_owner] > 0:
                fill(s, own.z * rows + b.out * spots, w, b.offset, b.outs, spots)
        for b in blocks[own.weights : own.end]:
            if scale[b.out_owner] > 0 and scale[b.in_owner] > 0:
                apply(
                    own, rows, w, b.offset, b.ins * own.taps, own.taps, s,
                    own.x * rows + b.into * own.padded * rows, b.ins,
                    own.z * rows + b.out * spots, b.outs,
                )  # fmt: skip
        if n + 1 < len(layers):
            after = layers[n + 1]
            for b in blocks[own.biases : own.weights]:
                if scale[b.out_owner] > 0:
                    x = (after.x + b.out * after.each * after.padded) * rows
                    activate(
                        s, own.z * rows + b.out * spots, own, b.outs, x,
                        after.kind == CONV, rows,
                    )  # fmt: skip
                    length = b.outs * after.each * after.padded * rows
                    _scale(s, x, length, scale[b.out_owner])


@fused
def _backward(w, g, s, rows, layers, blocks, scale, young, moved, start):
    """Compute gradients down to layer `start` and set `moved` of the blocks that learn.

    Every active block learns; in a shadow pass, only blocks of seeds in training.
    """
    shadow = False
    for q in range(len(young)):
        shadow |= young[q]
    for n in range(len(layers) - 1, start - 1, -1):
        own = layers[n]
        spots, edged = own.high * own.wide * rows, own.padded * rows
        if n > start:
            s[own.gx * rows : own.gx * rows + own.inputs * spots] = 0
        for i in range(own.biases, own.end):
            b = blocks[i]
            if not (scale[b.out_owner] > 0 and scale[b.in_owner] > 0):
                continue
            gz = own.gz * rows + b.out * edged
            learns = not shadow or young[b.out_owner] or young[b.in_owner]
            moved[i] |= learns
            if i < own.weights:
                if learns:
                    bias_gradient(s, gz, b.outs, edged, g, b.offset)
                continue
            if learns:
                weight_gradient(
                    own, rows, g, b.offset, b.ins * own.taps, own.taps, s,
                    own.x * rows + b.into * edged, b.ins, gz, b.outs,
                )  # fmt: skip
            if n > start:
                apply_transposed(
                    own, rows, w, b.offset, b.ins * own.taps, own.taps, s,
                    own.gx * rows + b.into * spots, b.ins, gz, b.outs,
                )  # fmt: skip
        if n > start:
            before = layers[n - 1]
            for b in blocks[before.biases : before.weights]:
                if scale[b.out_owner] > 0:
                    gx = (own.gx + b.out * own.each * own.high * own.wide) * rows
                    length = b.outs * own.each * own.high * own.wide * rows
                    _scale(s, gx, length, scale[b.out_owner])
                    activate_back(
                        s, gx, (before.z + b.out * before.high * before.wide) * rows,
                        before, b.outs, (before.gz + b.out * before.padded) * rows,
                        rows,
                    )  # fmt: skip


@fused
def _scale(s, at, length, factor):
    """Multiply a range; a factor of 1 changes no bit."""
    if factor != 1:
        for i in range(at, at + length):
            s[i] *= factor


@fused
def _loss(s, bits, last, rows, y):
    """Return the mean cross-entropy or squared error; write its gradient to `gz`."""
    real, outputs = s.dtype.type, last.outputs
    if outputs == 1:
        return _squared_error(s, last, rows, y)
    z = s[last.z * rows : (last.z + outputs) * rows].reshape(outputs, rows)
    g = s[last.gz * rows : (last.gz + outputs) * rows].reshape(outputs, rows)
    whole = bits[last.gz * rows : (last.gz + outputs) * rows].reshape(outputs, rows)
    high, total, rest = z[0].copy(), np.zeros(rows, s.dtype), np.empty(rows, s.dtype)
    for o in range(1, outputs):
        for r in range(rows):
            high[r] = high[r] if high[r] >= z[o, r] else z[o, r]
    shift, bias, least = (23, 127, -87.0) if s.itemsize == 4 else (52, 1023, -700.0)
    for o in range(outputs):
        for r in range(rows):  # exp(t) = 2^n exp(rest), |rest| <= ln(2) / 2
            t = z[o, r] - high[r]
            t = real(least) if t < real(least) else t
            n = np.floor(t * real(LOG2E) + real(0.5))
            whole[o, r] = (bits.dtype.type(n) + bits.dtype.type(bias)) << shift
            rest[r] = t - n * real(LN2_HIGH) - n * real(LN2_LOW)
        for r in range(rows):
            power = real(TAYLOR[0])
            for c in TAYLOR[1:]:
                power = power * rest[r] + real(c)
            g[o, r] *= power
            total[r] += g[o, r]
    loss, share = real(0), real(1) / real(rows)
    for r in range(rows):
        loss += high[r] + np.log(total[r]) - z[np.int64(y[r]), r]
        total[r] = share / total[r]
    for o in range(outputs):
        for r in range(rows):
            g[o, r] *= total[r]
    for r in range(rows):
        g[np.int64(y[r]), r] -= share
    return loss * share


@fused
def _squared_error(s, last, rows, y):
    """Return the mean squared error; write its gradient to `gz`."""
    real = s.dtype.type
    loss, share = real(0), real(1) / real(rows)
    for r in range(rows):
        error = s[last.z * rows + r] - y[r]
        loss += error * error
        s[last.gz * rows + r] = real(2) * share * error
    return loss * share


# Maps, activations and the optimiser.


@fused
def activate(s, z, own, units, x, padded, rows):
    """Apply ReLU, and 2 x 2 max pooling after a convolution."""
    zero = s.dtype.type(0)
    if own.kind != CONV:
        pre, post = s[z : z + units * rows], s[x : x + units * rows]
        for i in range(units * rows):
            post[i] = zero if pre[i] <= zero else pre[i]
        return
    half, edge = own.wide // 2, 1 if padded else 0
    for unit in range(units):
        for h in range(own.high // 2):
            line = unit * (own.high // 2 + 2 * edge) + h + edge
            to = x + (line * (half + 2 * edge) + edge) * rows
            at = z + (unit * own.high + 2 * h) * own.wide * rows
            for c in range(half):
                a, b = _pair(s, at + 2 * c * rows, rows)
                d, e = _pair(s, at + (own.wide + 2 * c) * rows, rows)
                post = s[to + c * rows : to + (c + 1) * rows]
                for r in range(rows):
                    high = b[r] if a[r] < b[r] else a[r]
                    low = e[r] if d[r] < e[r] else d[r]
                    best = low if high < low else high
                    post[r] = zero if best <= zero else best


@fused
def activate_back(s, g, z, own, units, gz, rows):
    """Backpropagate through the activation and pooling."""
    zero = s.dtype.type(0)
    if own.kind != CONV:
        length = units * rows
        pre, given, back = s[z : z + length], s[g : g + length], s[gz : gz + length]
        for i in range(length):
            back[i] = zero if pre[i] <= zero else given[i]
        return
    half = own.wide // 2
    for unit in range(units):
        if own.high % 2 or own.wide % 2:  # lines that no pool reads
            for h in range(own.high):
                at = gz + line_at(own, unit, h) * rows
                s[at : at + own.wide * rows] = zero
        for h in range(own.high // 2):
            to = gz + line_at(own, unit, 2 * h) * rows
            under = to + (own.wide + 2) * rows
            at = z + (unit * own.high + 2 * h) * own.wide * rows
            below = at + own.wide * rows
            start = g + (unit * (own.high // 2) + h) * half * rows
            for c in range(half):
                i = 2 * c * rows
                a, b = _pair(s, at + i, rows)
                d, e = _pair(s, below + i, rows)
                ga, gb = _pair(s, to + i, rows)
                gd, ge = _pair(s, under + i, rows)
                given = s[start + c * rows : start + (c + 1) * rows]
                for r in range(rows):
                    high = a[r] if a[r] >= b[r] else b[r]
                    low = d[r] if d[r] >= e[r] else e[r]
                    back = given[r] if (high if high >= low else low) > zero else zero
                    top = back if high >= low else zero
                    left = top if a[r] >= b[r] else zero
                    rest = zero if high >= low else back
                    first = rest if d[r] >= e[r] else zero
                    ga[r], gb[r] = left, top - left
                    gd[r], ge[r] = first, rest - first


@fused
def _pair(s, at, rows):
    """Two neighbouring pixels."""
    return s[at : at + rows], s[at + rows : at + 2 * rows]


@fused
def apply(own, rows, w, base, by_out, by_in, s, x, inputs, z, outputs):
    """Add the layer's map of x to z."""
    if own.kind == CONV:
        turn = np.int64(0)
        _apply_conv(own, rows, w, base, by_out, by_in, turn, s, x, inputs, z, outputs)
    else:
        _apply_dense(rows, w, base, by_out, by_in, s, x, inputs, z, outputs)


@fused
def apply_transposed(own, rows, w, base, by_out, by_in, s, gx, inputs, gz, outputs):
    """Add the transposed map of gz to gx, the gradient of the inputs."""
    if own.kind == CONV:
        turn = np.int64(8)
        _apply_conv(own, rows, w, base, by_in, by_out, turn, s, gz, outputs, gx, inputs)
    else:
        _apply_dense(rows, w, base, by_in, by_out, s, gz, outputs, gx, inputs)


@summed
def weight_gradient(own, rows, g, base, by_out, by_in, s, x, inputs, gz, outputs):
    """Compute the gradient of the weights."""
    if own.kind == CONV:
        _conv_gradient(own, rows, g, base, by_out, by_in, s, x, inputs, gz, outputs)
        return
    zero = s.dtype.type(0)
    given = s[x : x + inputs * rows].reshape(inputs, rows)
    for o in range(outputs):
        back, i = s[gz + o * rows : gz + (o + 1) * rows], 0
        while i + 4 <= inputs:
            x0, x1, x2, x3 = given[i], given[i + 1], given[i + 2], given[i + 3]
            a = b = c = d = zero
            for r in range(rows):
                a += back[r] * x0[r]
                b += back[r] * x1[r]
                c += back[r] * x2[r]
                d += back[r] * x3[r]
            at = base + o * by_out + i * by_in
            g[at], g[at + by_in] = a, b
            g[at + 2 * by_in], g[at + 3 * by_in] = c, d
            i += 4
        while i < inputs:
            a = zero
            for r in range(rows):
                a += back[r] * given[i, r]
            g[base + o * by_out + i * by_in] = a
            i += 1


@fused
def _apply_dense(rows, w, base, by_out, by_in, s, x, inputs, z, outputs):
    """Apply a dense layer, eight inputs at a time."""
    given = s[x : x + inputs * rows].reshape(inputs, rows)
    for o in range(outputs):
        out, i, at = s[z + o * rows : z + (o + 1) * rows], 0, base + o * by_out
        while i + 8 <= inputs:
            x0, x1, x2, x3 = given[i], given[i + 1], given[i + 2], given[i + 3]
            x4, x5, x6, x7 = given[i + 4], given[i + 5], given[i + 6], given[i + 7]
            a, b = w[at], w[at + by_in]
            c, d = w[at + 2 * by_in], w[at + 3 * by_in]
            e, f = w[at + 4 * by_in], w[at + 5 * by_in]
            g, h = w[at + 6 * by_in], w[at + 7 * by_in]
            for r in range(rows):
                one = out[r] + a * x0[r] + b * x1[r] + c * x2[r] + d * x3[r]
                out[r] = one + e * x4[r] + f * x5[r] + g * x6[r] + h * x7[r]
            i, at = i + 8, at + 8 * by_in
        while i < inputs:
            a, x0 = w[at], given[i]
            for r in range(rows):
                out[r] += a * x0[r]
            i, at = i + 1, at + by_in


@fused
def _apply_conv(own, rows, w, base, by_out, by_in, turn, s, x, inputs, z, outputs):
    """Apply a convolution, one output line at a time; `turn` 8 flips the kernel."""
    length, step = own.wide * rows, 1 - turn // 4
    k = np.empty(9, s.dtype)
    for o in range(outputs):
        for line in range(own.high):
            at = z + (o * own.high + line) * length
            out = s[at : at + length]
            for i in range(inputs):
                for t in range(9):
                    k[t] = w[base + o * by_out + i * by_in + turn + step * t]
                a, b, c, d, e, f, g, h, j = k
                at = x + (line_at(own, i, line) - 1) * rows
                h0, h1, h2 = _shifted(s, at, length, rows)
                a0, a1, a2 = _shifted(s, at - length - 2 * rows, length, rows)
                u0, u1, u2 = _shifted(s, at + length + 2 * rows, length, rows)
                for r in range(length):
                    one = out[r] + a * a0[r] + b * a1[r] + c * a2[r]
                    two = one + d * h0[r] + e * h1[r] + f * h2[r]
                    out[r] = two + g * u0[r] + h * u1[r] + j * u2[r]


@fused
def _shifted(s, at, length, rows):
    """Views of a line, shifted for the three columns of a kernel."""
    one, two = at + rows, at + 2 * rows
    return s[at : at + length], s[one : one + length], s[two : two + length]


@summed
def _conv_gradient(own, rows, grads, base, by_out, by_in, s, x, inputs, gz, outputs):
    """Compute the gradient of a convolution's weights, nine sums at a time."""
    zero, length = s.dtype.type(0), own.wide * rows
    for o in range(outputs):
        for n in range(inputs):
            a = b = c = d = e = f = g = h = i = zero
            for line in range(own.high):
                at = gz + line_at(own, o, line) * rows
                back = s[at : at + length]
                at = x + (line_at(own, n, line) - 1) * rows
                h0, h1, h2 = _shifted(s, at, length, rows)
                a0, a1, a2 = _shifted(s, at - length - 2 * rows, length, rows)
                u0, u1, u2 = _shifted(s, at + length + 2 * rows, length, rows)
                for r in range(length):
                    grad = back[r]
                    a += grad * a0[r]
                    b += grad * a1[r]
                    c += grad * a2[r]
                    d += grad * h0[r]
                    e += grad * h1[r]
                    f += grad * h2[r]
                    g += grad * u0[r]
                    h += grad * u1[r]
                    i += grad * u2[r]
            at = base + o * by_out + n * by_in
            for t, total in enumerate((a, b, c, d, e, f, g, h, i)):
                grads[at + t] = total


@fused
def line_at(own, channel, h):
    """Return the offset of a line of a padded image, in positions."""
    return (channel * (own.high + 2) + h + 1) * (own.wide + 2) + 1


@fused
def fill(s, z, w, bias, units, length):
    """Set all positions to the bias of their unit."""
    for unit in range(units):
        s[z + unit * length : z + (unit + 1) * length] = w[bias + unit]


@summed
def bias_gradient(s, gz, units, length, g, bias):
    """Compute the gradient of biases; padding is zero."""
    for unit in range(units):
        back, total = s[gz + unit * length : gz + (unit + 1) * length], s.dtype.type(0)
        for i in range(length):
            total += back[i]
        g[bias + unit] = total


@fused
def adamw(weights, gradients, means, squares, start, length, rate, clock, decay):
    """Update `length` weights from `start` on; `clock` is their step count."""
    real = weights.dtype.type
    scale1 = real(1 / (1 - B1**clock))
    scale2 = real(1 / math.sqrt(1 - B2**clock))
    far, shrink, eps = real(rate), real(rate * decay), real(EPS)
    w, g = weights[start : start + length], gradients[start : start + length]
    m, q = means[start : start + length], squares[start : start + length]
    for i in range(length):
        m[i] = real(B1) * m[i] + real(REST1) * g[i]
        q[i] = real(B2) * q[i] + real(REST2) * g[i] * g[i]
        w[i] -= shrink * w[i] + far * (m[i] * scale1 / (math.sqrt(q[i]) * scale2 + eps))
