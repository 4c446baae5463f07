"""Products along the rows of a minibatch: dense maps, convolutions, what lies between.

Everything lies in flat vectors, a row of the minibatch last. Weight (o, i, tap) of a
map is at `base + o * by_out + i * by_in + tap`. An image that a convolution reads has a
border of zeros one pixel wide. Sums are split over lanes and products fused with them:
the same input gives the same bits, wherever it lies.
"""

import math

import numpy as np

from esper.environment import chart
from esper.environment.chart import CONV
from esper.kernels import fused_with, summed_with

RELU, LINEAR, GELU = 1, 2, 3
"""What a unit does between two maps."""
ROOT_HALF = math.sqrt(0.5)
ROOT_TURN = 1 / math.sqrt(2 * math.pi)

fused, summed = fused_with(chart, part=True), summed_with(chart, part=True)

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call"


@fused
def between(s, z, own, units, act, x, framed, rows):
    """What units say; after a convolution they are pooled, two by two."""
    real, zero = s.dtype.type, s.dtype.type(0)
    if own.kind != CONV:
        told, said = s[z : z + units * rows], s[x : x + units * rows]
        if act == LINEAR:
            copy(told, said, 0)
        elif act == GELU:
            for i in range(units * rows):
                rise = real(0.5) + real(0.5) * math.erf(told[i] * real(ROOT_HALF))
                said[i] = told[i] * rise
        else:
            for i in range(units * rows):
                said[i] = zero if told[i] <= zero else told[i]
        return
    half, edge = own.wide // 2, 1 if framed else 0
    for unit in range(units):
        for h in range(own.high // 2):
            line = unit * (own.high // 2 + 2 * edge) + h + edge
            to = x + (line * (half + 2 * edge) + edge) * rows
            at = z + (unit * own.high + 2 * h) * own.wide * rows
            for c in range(half):
                a, b = _pair(s, at + 2 * c * rows, rows)
                d, e = _pair(s, at + (own.wide + 2 * c) * rows, rows)
                said = s[to + c * rows : to + (c + 1) * rows]
                for r in range(rows):
                    high = b[r] if a[r] < b[r] else a[r]
                    low = e[r] if d[r] < e[r] else d[r]
                    best = low if high < low else high
                    said[r] = zero if best <= zero else best


@fused
def between_back(s, g, z, own, units, act, gz, rows):
    """The gradient at what units were told, from that at what they said."""
    real, zero = s.dtype.type, s.dtype.type(0)
    if own.kind != CONV:
        length = units * rows
        told, given, back = s[z : z + length], s[g : g + length], s[gz : gz + length]
        if act == LINEAR:
            copy(given, back, 0)
        elif act == GELU:
            for i in range(length):
                t = told[i]
                bell = real(ROOT_TURN) * math.exp(real(-0.5) * t * t)
                rise = real(0.5) + real(0.5) * math.erf(t * real(ROOT_HALF)) + t * bell
                back[i] = given[i] * rise
        else:
            for i in range(length):
                back[i] = zero if told[i] <= zero else given[i]
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
            felt = g + (unit * (own.high // 2) + h) * half * rows
            for c in range(half):
                i = 2 * c * rows
                a, b = _pair(s, at + i, rows)
                d, e = _pair(s, below + i, rows)
                ga, gb = _pair(s, to + i, rows)
                gd, ge = _pair(s, under + i, rows)
                given = s[felt + c * rows : felt + (c + 1) * rows]
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
def through(own, rows, w, base, by_out, by_in, scale, s, x, inputs, z, outputs):
    """Add to z what a map says of x."""
    if own.kind == CONV:
        turn = np.int64(0)
        _convolve(
            own, rows, w, base, by_out, by_in, turn, scale, s, x, inputs, z, outputs
        )
    else:
        _mix(rows, w, base, by_out, by_in, scale, s, x, inputs, z, outputs)


@fused
def back_through(own, rows, w, base, by_out, by_in, scale, s, gx, inputs, gz, outputs):
    """Add to gx what gz means for the inputs of a map: the map turned round."""
    if own.kind == CONV:
        turn = np.int64(8)
        _convolve(
            own, rows, w, base, by_in, by_out, turn, scale, s, gz, outputs, gx, inputs
        )
    else:
        _mix(rows, w, base, by_in, by_out, scale, s, gz, outputs, gx, inputs)


@summed
def learn(own, rows, g, base, by_out, by_in, scale, s, x, inputs, gz, outputs):
    """The gradient of a map's weights."""
    if own.kind == CONV:
        _correlate(own, rows, g, base, by_out, by_in, scale, s, x, inputs, gz, outputs)
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
            g[at], g[at + by_in] = scale * a, scale * b
            g[at + 2 * by_in], g[at + 3 * by_in] = scale * c, scale * d
            i += 4
        while i < inputs:
            a = zero
            for r in range(rows):
                a += back[r] * given[i, r]
            g[base + o * by_out + i * by_in] = scale * a
            i += 1


@fused
def _mix(rows, w, base, by_out, by_in, scale, s, x, inputs, z, outputs):
    """A dense map, eight inputs at a time."""
    given = s[x : x + inputs * rows].reshape(inputs, rows)
    for o in range(outputs):
        out, i, at = s[z + o * rows : z + (o + 1) * rows], 0, base + o * by_out
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
def _convolve(own, rows, w, base, by_out, by_in, turn, scale, s, x, inputs, z, outputs):
    """A convolution of framed images, one line of the result at a time.

    `turn` is 8 to read the kernel from its end, else 0.
    """
    length, step = own.wide * rows, 1 - turn // 4
    k = np.empty(9, s.dtype)
    for o in range(outputs):
        for line in range(own.high):
            at = z + (o * own.high + line) * length
            out = s[at : at + length]
            for i in range(inputs):
                for t in range(9):
                    k[t] = scale * w[base + o * by_out + i * by_in + turn + step * t]
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
def _correlate(own, rows, grads, base, by_out, by_in, scale, s, x, inputs, gz, outputs):
    """The gradient of a convolution's weights, nine sums at a time."""
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
                    felt = back[r]
                    a += felt * a0[r]
                    b += felt * a1[r]
                    c += felt * a2[r]
                    d += felt * h0[r]
                    e += felt * h1[r]
                    f += felt * h2[r]
                    g += felt * u0[r]
                    h += felt * u1[r]
                    i += felt * u2[r]
            at = base + o * by_out + n * by_in
            for t, total in enumerate((a, b, c, d, e, f, g, h, i)):
                grads[at + t] = scale * total


@fused
def line_at(own, channel, h):
    """Where a line of a framed image begins, in positions."""
    return (channel * (own.high + 2) + h + 1) * (own.wide + 2) + 1


@fused
def copy(values, target, start):
    """Values to a place of the target."""
    for i in range(len(values)):
        target[start + i] = values[i]


@fused
def fill(s, z, w, bias, units, length):
    """Biases to everywhere."""
    for unit in range(units):
        s[z + unit * length : z + (unit + 1) * length] = w[bias + unit]


@summed
def sum_rows(s, gz, units, length, g, bias, scale):
    """The gradient of biases; a border adds nothing."""
    for unit in range(units):
        back, total = s[gz + unit * length : gz + (unit + 1) * length], s.dtype.type(0)
        for i in range(length):
            total += back[i]
        g[bias + unit] = scale * total
