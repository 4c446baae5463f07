"""One environment after the other, in cache: forward, loss, backward, AdamW.

    train   hosts and seeds, on all minibatches until the next decision
    count   how many rows each host guesses right

All weights of an environment are one vector `w`, all its activations another, `s`, laid
out by `Chart`; rows of a minibatch are the last axis, so that every inner loop runs
along memory. A seed is worked on at its own size, and only where it is felt. Nothing of
one environment can reach another: they share no number, and each is computed as if
alone.
"""

import math

import numpy as np

from esper.environment import adamw as optimiser
from esper.environment import chart as charts
from esper.environment import products
from esper.environment.adamw import adamw
from esper.environment.chart import CONV
from esper.environment.products import (
    GELU,
    LINEAR,
    RELU,
    back_through,
    between,
    between_back,
    copy,
    fill,
    learn,
    line_at,
    sum_rows,
    through,
)
from esper.kernels import fused_with

LOG2E, LN2_HIGH, LN2_LOW = 1.4426950408889634, 0.693145751953125, 1.4286068203094172e-6
whole = fused_with(charts, products, optimiser)
part = fused_with(charts, products, optimiser, part=True)
TAYLOR = tuple(1 / math.factorial(n) for n in range(11, -1, -1))

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@whole
def train(
    features, labels, picked, rates, v, mean, square, clocks, g, s, bits, chart,
    size, act, felt, shadow, training, decay, stretch, youth, kept,
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
        chart: Layers, seeds, and how many weights are the host's.
        size: Units of every seed, `[env, slot]`; 0 where there is none.
        act: What it does between its maps.
        felt: Alpha as the host feels it; 0 for a seed in training.
        shadow: Alpha in the shadow pass.
        training: 1 where it trains in the shadow pass.
        decay: Weight decay.
        stretch: Learning rate of a newborn against the host's.
        youth: Steps until it is equal.
        kept: Where to leave the hosts' activations at the end; may be empty.
    """
    layers, seeds, host = chart
    envs, steps, rows = picked.shape
    loss, beside = np.zeros(envs, v.dtype), np.zeros(envs, v.dtype)
    y, bottom, top = np.empty(rows, np.int64), np.int64(0), len(layers) - 1
    for e in range(envs):
        mine = e % len(features)
        w, k, a = v[e], size[e], act[e]
        start = top + 1
        for q in range(len(seeds)):
            if training[e, q] > 0:
                start = min(start, seeds[q].place + 1)
        for n in range(steps):
            for r in range(rows):
                y[r] = labels[mine, picked[e, n, r]]
            _gather(features[mine], picked[e, n], s, layers[0])
            for shade in range(2 if start <= top else 1):
                low = start if shade == 1 else bottom
                alpha, learns, total = felt[e], felt[e], loss
                if shade == 1:
                    alpha, learns, total = shadow[e], training[e], beside
                _forward(w, s, rows, layers, seeds, k, a, alpha, low)
                total[e] += _loss(s, bits, layers[top], rows, y)
                _backward(w, g, s, rows, layers, seeds, k, a, alpha, learns, low)
                if len(kept) > 0 and n == steps - 1 and shade == 0:
                    copy(s[: kept.shape[1]], kept[e], bottom)
            rate = rates[e, n]
            clocks[e, 0] += 1
            adamw(w, g, mean[e], square[e], bottom, host, rate, clocks[e, 0], decay)
            for q in range(len(seeds)):
                if k[q] > 0 and (felt[e, q] > 0 or training[e, q] > 0):
                    old = min(clocks[e, q + 1] / youth, 1.0)
                    own = rate * (1 + (stretch - 1) * (1 - old))
                    clocks[e, q + 1] += 1
                    _move_seed(
                        w, g, mean[e], square[e], seeds[q], layers, k[q], a[q],
                        own, clocks[e, q + 1], decay,
                    )  # fmt: skip
        loss[e] /= steps
        beside[e] /= steps
    return loss, beside


@part
def _move_seed(w, g, mean, square, seed, layers, units, act, rate, clock, decay):
    """One step of a seed; a form without a bias has none to move."""
    before, own = layers[seed.place], layers[seed.place + 1]
    first = units * before.inputs * before.taps
    last = units * seed.each * own.outputs * own.taps
    adamw(w, g, mean, square, seed.first, first, rate, clock, decay)
    adamw(w, g, mean, square, seed.last, last, rate, clock, decay)
    if act != LINEAR:
        adamw(w, g, mean, square, seed.first_bias, units, rate, clock, decay)
    if act == GELU:
        adamw(w, g, mean, square, seed.last_bias, own.outputs, rate, clock, decay)


@whole
def count(features, labels, asked, v, s, chart, rows, size, act, felt):
    """Examples that every host guesses right, of those that are asked.

    `features [env, example, in]` and `labels [env, example]`; one set may serve all.
    """
    layers, seeds, _ = chart
    examples, last = labels.shape[1], layers[len(layers) - 1]
    right = np.zeros(v.shape[0], np.int64)
    best, guess = np.empty(rows, v.dtype), np.empty(rows, np.int64)
    picked, bottom = np.empty(rows, np.int64), np.int64(0)
    for e in range(v.shape[0]):
        mine = e % len(features)
        for begin in range(0, examples if asked[e] else 0, rows):
            for r in range(rows):  # the last minibatch may be filled up
                picked[r] = min(begin + r, examples - 1)
            _gather(features[mine], picked, s, layers[0])
            _forward(v[e], s, rows, layers, seeds, size[e], act[e], felt[e], bottom)
            z = s[last.z * rows : (last.z + last.outputs) * rows]
            copy(z[:rows], best, bottom)
            guess[:] = 0
            for o in range(1, last.outputs):
                for r in range(rows):
                    more = z[o * rows + r] > best[r]
                    best[r] = z[o * rows + r] if more else best[r]
                    guess[r] = o if more else guess[r]
            for r in range(min(rows, examples - begin)):
                right[e] += guess[r] == labels[mine, begin + r]
    return right


@part
def _gather(features, picked, s, first):
    """Rows to where the first layer reads them, turned and within its border."""
    rows, start = len(picked), first.x * len(picked)
    framed = first.kind == CONV
    for c in range(first.inputs):
        for h in range(first.high):
            at = c * first.high + h
            to = line_at(first, c, h) if framed else at
            for i in range(first.wide):
                line = s[start + (to + i) * rows : start + (to + i + 1) * rows]
                example = features[:, at * first.wide + i]
                for r in range(rows):
                    line[r] = example[picked[r]]


@part
def _forward(w, s, rows, layers, seeds, size, act, felt, start):
    """What every layer says from `start` on."""
    one, relu = s.dtype.type(1), np.int64(RELU)
    for n in range(start, len(layers)):
        own = layers[n]
        z, taps = own.z * rows, own.taps
        fill(s, z, w, own.bias, own.outputs, own.high * own.wide * rows)
        through(
            own, rows, w, own.weight, own.inputs * taps, taps, one, s,
            own.x * rows, own.inputs, z, own.outputs,
        )  # fmt: skip
        for q in range(len(seeds)):
            seed, units = seeds[q], size[q]
            if seed.place != n - 1 or units == 0 or not felt[q] > 0:
                continue
            before, u, hid = layers[n - 1], seed.u * rows, seed.hid * rows
            spots, below = before.high * before.wide * rows, before.taps
            if act[q] == LINEAR:
                s[u : u + units * spots] = 0
            else:
                fill(s, u, w, seed.first_bias, units, spots)
            through(
                before, rows, w, seed.first, before.inputs * below, below, one, s,
                before.x * rows, before.inputs, u, units,
            )  # fmt: skip
            between(s, u, before, units, act[q], hid, own.kind == CONV, rows)
            through(
                own, rows, w, seed.last, taps, own.outputs * taps, felt[q], s,
                hid, units * seed.each, z, own.outputs,
            )  # fmt: skip
            if act[q] == GELU:
                for o in range(own.outputs):
                    told = felt[q] * w[seed.last_bias + o]
                    for r in range(rows):
                        s[z + o * rows + r] += told
        if n + 1 < len(layers):
            after = layers[n + 1]
            framed = after.kind == CONV
            between(s, z, own, own.outputs, relu, after.x * rows, framed, rows)


@part
def _backward(w, g, s, rows, layers, seeds, size, act, felt, learns, start):
    """Gradients down to layer `start`; the host's own only if that is the first."""
    relu = np.int64(RELU)
    for n in range(len(layers)):
        own = layers[n]
        at = own.gx * rows
        s[at : at + own.inputs * own.high * own.wide * rows] = 0
    for n in range(len(layers) - 1, start - 1, -1):
        own, before = layers[n], layers[max(n - 1, 0)]
        for q in range(len(seeds)):
            heard = seeds[q].place == n - 1 and size[q] > 0 and felt[q] > 0
            if heard and (learns[q] > 0 or n - 1 > start):
                _seed_back(
                    w, g, s, rows, own, before, seeds[q], size[q], act[q], felt[q],
                    learns[q] > 0, n - 1 > start,
                )  # fmt: skip
        _layer_back(w, g, s, rows, own, start == 0, n > start)
        if n > start:
            between_back(
                s, own.gx * rows, before.z * rows, before, before.outputs, relu,
                before.gz * rows, rows,
            )  # fmt: skip


@part
def _layer_back(w, g, s, rows, own, learns, further):
    """Gradients of one layer and, if asked, of what it read."""
    one, gz, side = s.dtype.type(1), own.gz * rows, own.inputs * own.taps
    if learns:
        learn(
            own, rows, g, own.weight, side, own.taps, one, s,
            own.x * rows, own.inputs, gz, own.outputs,
        )  # fmt: skip
        sum_rows(s, gz, own.outputs, own.frame * rows, g, own.bias, one)
    if further:
        back_through(
            own, rows, w, own.weight, side, own.taps, one, s,
            own.gx * rows, own.inputs, gz, own.outputs,
        )  # fmt: skip


@part
def _seed_back(w, g, s, rows, own, before, seed, units, act, alpha, learns, further):
    """Gradients of one seed and, if asked, of its inlet."""
    gz, gu, ghid = own.gz * rows, seed.gu * rows, seed.ghid * rows
    taps, below, inputs = own.taps, before.taps, units * seed.each
    one = s.dtype.type(1)
    s[ghid : ghid + inputs * own.high * own.wide * rows] = 0
    back_through(
        own, rows, w, seed.last, taps, own.outputs * taps, alpha, s,
        ghid, inputs, gz, own.outputs,
    )  # fmt: skip
    between_back(s, ghid, seed.u * rows, before, units, act, gu, rows)
    if learns:
        learn(
            own, rows, g, seed.last, taps, own.outputs * taps, alpha, s,
            seed.hid * rows, inputs, gz, own.outputs,
        )  # fmt: skip
        learn(
            before, rows, g, seed.first, before.inputs * below, below, one, s,
            before.x * rows, before.inputs, gu, units,
        )  # fmt: skip
        sum_rows(s, gu, units, before.frame * rows, g, seed.first_bias, one)
        if act == GELU:
            sum_rows(s, gz, own.outputs, rows, g, seed.last_bias, alpha)
    if further:
        back_through(
            before, rows, w, seed.first, before.inputs * below, below, one, s,
            before.gx * rows, before.inputs, gu, units,
        )  # fmt: skip


@part
def _loss(s, bits, last, rows, y):
    """Mean cross-entropy; its gradient goes to where the last layer feels it."""
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
