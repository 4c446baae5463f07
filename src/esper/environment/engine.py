r"""Compiled training of hosts, one environment after the other: the CPU engine.

    train   hosts and seeds, on all minibatches until the next decision
    count   correctly classified rows of every host

All weights of an environment are one vector `w`, its activations and their gradients
another, `s`, laid out by `MemoryLayout`; rows of a minibatch are the last axis, so that
every inner loop runs along memory. Weight (o, i, tap) of a map is at
`weight + o * by_out + i * by_in + tap`; an image that a convolution reads is padded
with zeros, one pixel wide. A seed is two maps, computed at its own size, and only where
its alpha is not 0. Environments share no number: each is computed as if alone, to the
bit.

Sums are split over lanes and products fused with them: the same input gives the same
bits, wherever it lies. The optimiser is AdamW (Loshchilov & Hutter 2019,
https://arxiv.org/abs/1711.05101), with a step count for the host and one per seed:

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    p <- p - r (w p + (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

A stretch of weights that is not stepped does not move by a bit. `Cohort` checks shapes,
dtypes and indices before it calls in.
"""

import math

import numpy as np

from esper.environment import memory_layout
from esper.kernels import fused_with, summed_with
from esper.tasks import hosts
from esper.tasks.hosts import CONV

RELU, LINEAR, GELU = 1, 2, 3
"""Activation between two maps."""
B1, B2, EPS = 0.9, 0.999, 1e-8
REST1, REST2 = 1 - B1, 1 - B2
"""Taken before rounding: 1 - 0.999 in float32 is wrong in the fifth digit."""
NEWBORN_RATE, NEWBORN_STEPS = 3.0, 200.0
"""Learning rate of a newborn against the host's, and steps until it is equal."""
ROOT_HALF = math.sqrt(0.5)
ROOT_TURN = 1 / math.sqrt(2 * math.pi)
LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.4286068203094172e-6
TAYLOR = tuple(1 / math.factorial(n) for n in range(11, -1, -1))

entry = fused_with(memory_layout, hosts)
fused = fused_with(memory_layout, hosts, part=True)
summed = summed_with(memory_layout, hosts, part=True)

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@entry
def train(
    features, labels, picked, rates, v, mean, square, clocks, g, s, bits, layout,
    size, act, alphas, shadow_alphas, training, decay, kept,
):  # fmt: skip
    """Train every host and its seeds on its minibatches, one after the other.

    Returns the mean losses of the hosts, and those of their shadow passes.

    Args:
        features: Rows to train on, `[env, example, in]`; one set may serve all.
        labels: Their labels `[env, example]`.
        picked: Which rows make each minibatch, `[env, step, row]`.
        rates: Learning rate of every minibatch, `[env, step]`.
        v: Weights `[env, parameter]`; `mean` and `square` are what AdamW remembers.
        mean: See `v`.
        square: See `v`.
        clocks: Steps taken by host and seeds, `[env, 1 + slot]`.
        g: Room for the gradients of one environment.
        s: Room for its activations, zero at first.
        bits: `s` as whole numbers.
        layout: Maps of the layers and of the slots; how many weights are the host's.
        size: Units of every seed, `[env, slot]`; 0 where there is none.
        act: Its activation.
        alphas: Alpha in the host's own pass; 0 for a seed in training.
        shadow_alphas: Alpha in the shadow pass.
        training: 1 where it trains in the shadow pass.
        decay: Weight decay.
        kept: Where to leave the hosts' activations at the end; may be empty.
    """
    layers, firsts, lasts, host = layout
    envs, steps, rows = picked.shape
    seeds, places = (firsts, lasts), len(layers) - 1
    loss, beside = np.zeros(envs, v.dtype), np.zeros(envs, v.dtype)
    y, bottom, top = np.empty(rows, np.int64), np.int64(0), len(layers) - 1
    for e in range(envs):
        mine = e % len(features)
        w, k, a = v[e], size[e], act[e]
        start = top + 1
        for q in range(len(firsts)):
            if training[e, q] > 0:
                start = min(start, q % places + 1)
        for n in range(steps):
            for r in range(rows):
                y[r] = labels[mine, picked[e, n, r]]
            _gather(features[mine], picked[e, n], s, layers[0])
            for shadow in range(2 if start <= top else 1):
                low = start if shadow == 1 else bottom
                alpha, learns, total = alphas[e], alphas[e], loss
                if shadow == 1:
                    alpha, learns, total = shadow_alphas[e], training[e], beside
                _forward(w, s, rows, layers, seeds, k, a, alpha, low)
                total[e] += _loss(s, bits, layers[top], rows, y)
                _backward(w, g, s, rows, layers, seeds, k, a, alpha, learns, low)
                if len(kept) > 0 and n == steps - 1 and shadow == 0:
                    copy(s[: kept.shape[1]], kept[e])
            rate = rates[e, n]
            clocks[e, 0] += 1
            adamw(w, g, mean[e], square[e], bottom, host, rate, clocks[e, 0], decay)
            for q in range(len(firsts)):
                if k[q] > 0 and (alphas[e, q] > 0 or training[e, q] > 0):
                    old = min(clocks[e, q + 1] / NEWBORN_STEPS, 1.0)
                    own = rate * (1 + (NEWBORN_RATE - 1) * (1 - old))
                    clocks[e, q + 1] += 1
                    _move_seed(
                        w, g, mean[e], square[e], firsts[q], lasts[q], k[q], a[q],
                        own, clocks[e, q + 1], decay,
                    )  # fmt: skip
        loss[e] /= steps
        beside[e] /= steps
    return loss, beside


@fused
def _move_seed(w, g, mean, square, first, last, units, act, rate, clock, decay):
    """One step of a seed; a form without a bias has none to move."""
    read = units * first.inputs * first.taps
    written = units * (last.inputs // first.outputs) * last.outputs * last.taps
    adamw(w, g, mean, square, first.weight, read, rate, clock, decay)
    adamw(w, g, mean, square, last.weight, written, rate, clock, decay)
    if act != LINEAR:
        adamw(w, g, mean, square, first.bias, units, rate, clock, decay)
    if act == GELU:
        adamw(w, g, mean, square, last.bias, last.outputs, rate, clock, decay)


@entry
def count(features, labels, wanted, v, s, layout, rows, size, act, alphas):
    """Correctly classified examples of every host; 0 where it is not wanted.

    `features [env, example, in]` and `labels [env, example]`; one set may serve all.
    """
    layers, firsts, lasts, _ = layout
    seeds = (firsts, lasts)
    examples, last = labels.shape[1], layers[len(layers) - 1]
    right = np.zeros(v.shape[0], np.int64)
    best, guess = np.empty(rows, v.dtype), np.empty(rows, np.int64)
    picked, bottom = np.empty(rows, np.int64), np.int64(0)
    for e in range(v.shape[0]):
        mine = e % len(features)
        for begin in range(0, examples if wanted[e] else 0, rows):
            for r in range(rows):  # the last minibatch may be filled up
                picked[r] = min(begin + r, examples - 1)
            _gather(features[mine], picked, s, layers[0])
            _forward(v[e], s, rows, layers, seeds, size[e], act[e], alphas[e], bottom)
            z = s[last.z * rows : (last.z + last.outputs) * rows]
            copy(z[:rows], best)
            guess[:] = 0
            for o in range(1, last.outputs):
                for r in range(rows):
                    more = z[o * rows + r] > best[r]
                    best[r] = z[o * rows + r] if more else best[r]
                    guess[r] = o if more else guess[r]
            for r in range(min(rows, examples - begin)):
                right[e] += guess[r] == labels[mine, begin + r]
    return right


@fused
def _gather(features, picked, s, first):
    """Rows to where the first layer reads them, turned and within its border."""
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
def _forward(w, s, rows, layers, seeds, size, act, alpha, start):
    """Outputs of every layer from `start` on."""
    one, relu = s.dtype.type(1), np.int64(RELU)
    firsts, lasts = seeds
    for n in range(start, len(layers)):
        own = layers[n]
        fill(own, rows, w, s, own.outputs)
        apply(own, rows, w, one, s, own.inputs, own.outputs)
        for q in range(len(firsts)):
            first, last, units = firsts[q], lasts[q], size[q]
            if q % (len(layers) - 1) != n - 1 or units == 0 or not alpha[q] > 0:
                continue
            if act[q] == LINEAR:
                u = first.z * rows
                s[u : u + units * first.high * first.wide * rows] = 0
            else:
                fill(first, rows, w, s, units)
            apply(first, rows, w, one, s, first.inputs, units)
            activate(first, last, rows, s, units, act[q])
            read = units * (last.inputs // first.outputs)
            apply(last, rows, w, alpha[q], s, read, last.outputs)
            if act[q] == GELU:
                z = last.z * rows
                for o in range(last.outputs):
                    bias = alpha[q] * w[last.bias + o]
                    for r in range(rows):
                        s[z + o * rows + r] += bias
        if n + 1 < len(layers):
            activate(own, layers[n + 1], rows, s, own.outputs, relu)


@fused
def _backward(w, g, s, rows, layers, seeds, size, act, alpha, learns, start):
    """Gradients down to layer `start`; the host's own only if that is the first."""
    one, relu = s.dtype.type(1), np.int64(RELU)
    firsts, lasts = seeds
    for n in range(len(layers)):
        own = layers[n]
        at = own.gx * rows
        s[at : at + own.inputs * own.high * own.wide * rows] = 0
    for n in range(len(layers) - 1, start - 1, -1):
        own, before = layers[n], layers[max(n - 1, 0)]
        for q in range(len(firsts)):
            is_here = q % (len(layers) - 1) == n - 1
            is_active = is_here and size[q] > 0 and alpha[q] > 0
            if is_active and (learns[q] > 0 or n - 1 > start):
                _seed_backward(
                    w, g, s, rows, firsts[q], lasts[q], size[q], act[q], alpha[q],
                    learns[q] > 0, n - 1 > start,
                )  # fmt: skip
        if start == 0:
            weight_gradient(own, rows, g, one, s, own.inputs, own.outputs)
            bias_gradient(own, rows, g, one, s, own.outputs)
        if n > start:
            apply_transposed(own, rows, w, one, s, own.inputs, own.outputs)
            activate_back(before, own, rows, s, before.outputs, relu)


@fused
def _seed_backward(w, g, s, rows, first, last, units, act, alpha, learns, further):
    """Gradients of one seed and, if asked, of its inlet."""
    one, read = s.dtype.type(1), units * (last.inputs // first.outputs)
    at = last.gx * rows
    s[at : at + read * last.high * last.wide * rows] = 0
    apply_transposed(last, rows, w, alpha, s, read, last.outputs)
    activate_back(first, last, rows, s, units, act)
    if learns:
        weight_gradient(last, rows, g, alpha, s, read, last.outputs)
        weight_gradient(first, rows, g, one, s, first.inputs, units)
        bias_gradient(first, rows, g, one, s, units)
        if act == GELU:
            bias_gradient(last, rows, g, alpha, s, last.outputs)
    if further:
        apply_transposed(first, rows, w, one, s, first.inputs, units)


@fused
def _loss(s, bits, last, rows, y):
    """Mean cross-entropy; its gradient goes to `gz` of the last layer."""
    real, outputs = s.dtype.type, last.outputs
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
        loss += high[r] + np.log(total[r]) - z[y[r], r]
        total[r] = share / total[r]
    for o in range(outputs):
        for r in range(rows):
            g[o, r] *= total[r]
    for r in range(rows):
        g[y[r], r] -= share
    return loss * share


# Maps, activations and the optimiser.


@fused
def activate(own, after, rows, s, units, act):
    """Outputs of a map to inputs of the next; after a convolution, pooled 2 x 2."""
    real, zero = s.dtype.type, s.dtype.type(0)
    z, x = own.z * rows, after.x * rows
    if own.kind != CONV:
        pre, post = s[z : z + units * rows], s[x : x + units * rows]
        if act == LINEAR:
            copy(pre, post)
        elif act == GELU:
            for i in range(units * rows):
                rise = real(0.5) + real(0.5) * math.erf(pre[i] * real(ROOT_HALF))
                post[i] = pre[i] * rise
        else:
            for i in range(units * rows):
                post[i] = zero if pre[i] <= zero else pre[i]
        return
    half, edge = own.wide // 2, 1 if after.kind == CONV else 0
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
def activate_back(own, after, rows, s, units, act):
    """Gradient before the activation (and pooling), from that after it."""
    real, zero = s.dtype.type, s.dtype.type(0)
    g, z, gz = after.gx * rows, own.z * rows, own.gz * rows
    if own.kind != CONV:
        length = units * rows
        pre, given, back = s[z : z + length], s[g : g + length], s[gz : gz + length]
        if act == LINEAR:
            copy(given, back)
        elif act == GELU:
            for i in range(length):
                t = pre[i]
                bell = real(ROOT_TURN) * math.exp(real(-0.5) * t * t)
                rise = real(0.5) + real(0.5) * math.erf(t * real(ROOT_HALF)) + t * bell
                back[i] = given[i] * rise
        else:
            for i in range(length):
                back[i] = zero if pre[i] <= zero else given[i]
        return
    half = own.wide // 2
    for unit in range(units):
        if own.high % 2 or own.wide % 2:  # what no pool reads
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
def apply(own, rows, w, scale, s, inputs, outputs):
    """Add the map of its inputs to its outputs."""
    _apply(
        own, rows, w, own.by_out, own.by_in, np.int64(0), scale, s,
        own.x * rows, inputs, own.z * rows, outputs,
    )  # fmt: skip


@fused
def apply_transposed(own, rows, w, scale, s, inputs, outputs):
    """Add the transposed map of the gradient at the outputs to that at the inputs."""
    _apply(
        own, rows, w, own.by_in, own.by_out, np.int64(8), scale, s,
        own.gz * rows, outputs, own.gx * rows, inputs,
    )  # fmt: skip


@fused
def _apply(own, rows, w, by_out, by_in, turn, scale, s, x, inputs, z, outputs):
    if own.kind == CONV:
        _apply_conv(own, rows, w, by_out, by_in, turn, scale, s, x, inputs, z, outputs)
    else:
        _apply_dense(own, rows, w, by_out, by_in, scale, s, x, inputs, z, outputs)


@summed
def weight_gradient(own, rows, g, scale, s, inputs, outputs):
    """The gradient of a map's weights."""
    if own.kind == CONV:
        _conv_gradient(own, rows, g, scale, s, inputs, outputs)
        return
    zero, by_in, x, gz = s.dtype.type(0), own.by_in, own.x * rows, own.gz * rows
    given = s[x : x + inputs * rows].reshape(inputs, rows)
    for o in range(outputs):
        back, i = s[gz + o * rows : gz + (o + 1) * rows], 0
        at = own.weight + o * own.by_out
        while i + 4 <= inputs:
            x0, x1, x2, x3 = given[i], given[i + 1], given[i + 2], given[i + 3]
            a = b = c = d = zero
            for r in range(rows):
                a += back[r] * x0[r]
                b += back[r] * x1[r]
                c += back[r] * x2[r]
                d += back[r] * x3[r]
            g[at], g[at + by_in] = scale * a, scale * b
            g[at + 2 * by_in], g[at + 3 * by_in] = scale * c, scale * d
            i, at = i + 4, at + 4 * by_in
        while i < inputs:
            a = zero
            for r in range(rows):
                a += back[r] * given[i, r]
            g[at] = scale * a
            i, at = i + 1, at + by_in


@fused
def _apply_dense(own, rows, w, by_out, by_in, scale, s, x, inputs, z, outputs):
    """A dense map, eight inputs at a time."""
    given = s[x : x + inputs * rows].reshape(inputs, rows)
    for o in range(outputs):
        out, i, at = s[z + o * rows : z + (o + 1) * rows], 0, own.weight + o * by_out
        while i + 8 <= inputs:
            x0, x1, x2, x3 = given[i], given[i + 1], given[i + 2], given[i + 3]
            x4, x5, x6, x7 = given[i + 4], given[i + 5], given[i + 6], given[i + 7]
            a, b = scale * w[at], scale * w[at + by_in]
            c, d = scale * w[at + 2 * by_in], scale * w[at + 3 * by_in]
            e, f = scale * w[at + 4 * by_in], scale * w[at + 5 * by_in]
            g, h = scale * w[at + 6 * by_in], scale * w[at + 7 * by_in]
            for r in range(rows):
                one = out[r] + a * x0[r] + b * x1[r] + c * x2[r] + d * x3[r]
                out[r] = one + e * x4[r] + f * x5[r] + g * x6[r] + h * x7[r]
            i, at = i + 8, at + 8 * by_in
        while i < inputs:
            a, x0 = scale * w[at], given[i]
            for r in range(rows):
                out[r] += a * x0[r]
            i, at = i + 1, at + by_in


@fused
def _apply_conv(own, rows, w, by_out, by_in, turn, scale, s, x, inputs, z, outputs):
    """A convolution of padded images, one line of the result at a time.

    `turn` is 8 to read the kernel from its end, else 0.
    """
    length, step = own.wide * rows, 1 - turn // 4
    k = np.empty(9, s.dtype)
    for o in range(outputs):
        for line in range(own.high):
            at = z + (o * own.high + line) * length
            out = s[at : at + length]
            for i in range(inputs):
                at = own.weight + o * by_out + i * by_in + turn
                for t in range(9):
                    k[t] = scale * w[at + step * t]
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
    """A line as three neighbouring columns of a kernel see it."""
    one, two = at + rows, at + 2 * rows
    return s[at : at + length], s[one : one + length], s[two : two + length]


@summed
def _conv_gradient(own, rows, grads, scale, s, inputs, outputs):
    """The gradient of a convolution's weights, nine sums at a time."""
    zero, length = s.dtype.type(0), own.wide * rows
    x, gz = own.x * rows, own.gz * rows
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
            at = own.weight + o * own.by_out + n * own.by_in
            for t, total in enumerate((a, b, c, d, e, f, g, h, i)):
                grads[at + t] = scale * total


@fused
def line_at(own, channel, h):
    """Offset of a line of a padded image, in positions."""
    return (channel * (own.high + 2) + h + 1) * (own.wide + 2) + 1


@fused
def copy(values, target):
    """Values to the target."""
    for i in range(len(values)):
        target[i] = values[i]


@fused
def fill(own, rows, w, s, outputs):
    """Biases to all outputs."""
    z, length = own.z * rows, own.high * own.wide * rows
    for o in range(outputs):
        s[z + o * length : z + (o + 1) * length] = w[own.bias + o]


@summed
def bias_gradient(own, rows, g, scale, s, outputs):
    """The gradient of biases; a border adds nothing."""
    gz, length = own.gz * rows, own.padded * rows
    for o in range(outputs):
        back, total = s[gz + o * length : gz + (o + 1) * length], s.dtype.type(0)
        for i in range(length):
            total += back[i]
        g[own.bias + o] = scale * total


@fused
def adamw(weights, gradients, means, squares, start, length, rate, clock, decay):
    """Move `length` weights from `start` on; this is their `clock`-th step."""
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
