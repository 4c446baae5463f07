"""Every form for one sample in float64, position by position, with plain loops."""

from collections.abc import Callable
from math import erf, exp, sqrt

import numpy as np

from esper.contracts.blueprints import Form
from esper.growth.blueprints.geometry import Geometry, Layout

Array = np.ndarray
Params = dict[str, Array]


def form_of_one_sample(
    form: Form,
    params: Params,
    h: Array,
    geometry: Geometry,
    middle: Callable[[Array], Array],
) -> Array:
    """What a form gives for `h` without a batch axis."""
    if form is Form.WIDEN:
        return _widen(params, h, geometry, middle)
    if form is Form.LOW_RANK and geometry.beside and geometry.outlet_kernel:
        k = geometry.outlet_kernel
        pads = [(p, p) for p in k.padding]
        down = convolution(h, params["first"], None, k.stride, pads, k.dilation, 1)
        return channels(down, params["last"], None, geometry.outlet_layout)
    return FORMS[form](params, h, geometry.outlet_layout)


def convolution(x, weight, bias, stride, pads, dilation, groups) -> Array:
    """`x [C, ...]` by `weight [O, C / groups, ...]`, one product at a time."""
    padded = np.pad(x, [(0, 0), *pads])
    size = weight.shape[2:]
    out_shape = tuple(
        (length - d * (k - 1) - 1) // s + 1
        for length, k, s, d in zip(
            padded.shape[1:], size, stride, dilation, strict=True
        )
    )
    per_group = weight.shape[0] // groups
    result = np.zeros((weight.shape[0], *out_shape))
    for out in range(weight.shape[0]):
        group = out // per_group
        for place in np.ndindex(*out_shape):
            total = 0.0 if bias is None else bias[out]
            for channel in range(weight.shape[1]):
                for offset in np.ndindex(*size):
                    at = tuple(
                        p * s + o * d
                        for p, s, o, d in zip(
                            place, stride, offset, dilation, strict=True
                        )
                    )
                    source = group * weight.shape[1] + channel
                    total += weight[(out, channel, *offset)] * padded[(source, *at)]
            result[(out, *place)] = total
    return result


def channels(h, weight, bias, layout) -> Array:
    """A map over channels at every position."""
    matrix = weight.reshape(weight.shape[:2]).T if layout.channels_first else weight
    rows = _rows(h, layout)
    mixed = [row @ matrix + (0.0 if bias is None else bias) for row in rows]
    return _back(np.array(mixed), h, layout)


def gelu(x: Array) -> Array:
    """x times the chance that a normal number is below it."""
    return np.vectorize(lambda v: v * 0.5 * (1.0 + erf(v / sqrt(2.0))))(x)


def _neighbours(h, weight, bias, layout, groups) -> Array:
    size = weight.shape[-1]
    count = weight.ndim - 2
    one = (1,) * count
    if layout is Layout.SEQUENCE:
        pads = [(size - 1, 0)]
        return convolution(h.T, weight, bias, one, pads, one, groups).T
    pads = [(size // 2, size // 2)] * count
    return convolution(h, weight, bias, one, pads, one, groups)


def _scale_shift(params, h, layout) -> Array:
    rows = [row * params["last"] + params["last_bias"] for row in _rows(h, layout)]
    return _back(np.array(rows), h, layout)


def _squeeze_excite(params, h, layout) -> Array:
    rows = _rows(h, layout)
    result = []
    for t, row in enumerate(rows):
        seen = rows[: t + 1] if layout is Layout.SEQUENCE else rows
        pooled = sum(seen) / len(seen)
        hidden = np.maximum(pooled @ params["first"] + params["first_bias"], 0.0)
        logits = hidden @ params["last"] + params["last_bias"]
        gate = np.array([2.0 / (1.0 + exp(-logit)) - 1.0 for logit in logits])
        result.append(row * gate)
    return _back(np.array(result), h, layout)


def _two_matrix(params, h, layout) -> Array:
    return channels(
        channels(h, params["first"], None, layout), params["last"], None, layout
    )


def _residual_mlp(params, h, layout) -> Array:
    hidden = gelu(channels(h, params["first"], params["first_bias"], layout))
    return channels(hidden, params["last"], params["last_bias"], layout)


def _depthwise(params, h, layout) -> Array:
    width = params["last"].shape[0]
    return _neighbours(h, params["last"], params["last_bias"], layout, width)


def _conv(params, h, layout) -> Array:
    return _neighbours(gelu(h), params["last"], params["last_bias"], layout, 1)


def _bottleneck(params, h, layout) -> Array:
    down = gelu(channels(h, params["first"], params["first_bias"], layout))
    if layout is Layout.VECTOR:
        mixed = down @ params["between"] + params["between_bias"]
    else:
        between = params["between"]
        mixed = _neighbours(down, between, params["between_bias"], layout, 1)
    return channels(gelu(mixed), params["last"], params["last_bias"], layout)


def _attention(params, h, layout) -> Array:
    rows = []
    for row in _rows(h, layout):
        spread = sqrt(((row - row.mean()) ** 2).mean() + 1e-5)
        rows.append((row - row.mean()) / spread)
    heads, depth = params["first"].shape[-2:]
    result = []
    for t, row in enumerate(rows):
        seen = rows[: t + 1] if layout is Layout.SEQUENCE else rows
        joined = []
        for head in range(heads):
            to_query, to_key, to_value = (
                params["first"][:, part, head] for part in range(3)
            )
            scores = [
                (row @ to_query) @ (other @ to_key) / sqrt(depth) for other in seen
            ]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= weights.sum()
            values = [other @ to_value for other in seen]
            joined.append(sum(w * v for w, v in zip(weights, values, strict=True)))
        result.append(np.concatenate(joined) @ params["last"] + params["last_bias"])
    return _back(np.array(result), h, layout)


def _widen(params, h, geometry, middle) -> Array:
    def host_layer(x, weight, bias, kernel) -> Array:
        if kernel is None:
            return x @ weight + (0.0 if bias is None else bias)
        pads = [(p, p) for p in kernel.padding]
        return convolution(x, weight, bias, kernel.stride, pads, kernel.dilation, 1)

    units = host_layer(h, params["first"], params["first_bias"], geometry.inlet_kernel)
    return host_layer(middle(units), params["last"], None, geometry.outlet_kernel)


def _rows(h: Array, layout: Layout) -> list[Array]:
    """The channels at each position."""
    if not layout.channels_first:
        return list(h.reshape(-1, h.shape[-1]))
    return list(h.reshape(h.shape[0], -1).T)


def _back(rows: Array, h: Array, layout: Layout) -> Array:
    """The inverse of `_rows`, with as many channels as the rows have."""
    if not layout.channels_first:
        return rows.reshape(*h.shape[:-1], rows.shape[1])
    return rows.T.reshape(rows.shape[1], *h.shape[1:])


FORMS = {
    Form.SCALE_SHIFT: _scale_shift,
    Form.SQUEEZE_EXCITE: _squeeze_excite,
    Form.LOW_RANK: _two_matrix,
    Form.RESIDUAL_MLP: _residual_mlp,
    Form.BOTTLENECK: _bottleneck,
    Form.DEPTHWISE: _depthwise,
    Form.CONV: _conv,
    Form.ATTENTION: _attention,
}
