import math
import types

import numpy as np
import pytest

from esper.kernels import fused, fused_with, kernel, summed

LOOP = """
def total(values):
    found = values.dtype.type(0)
    for value in values:
        found += value * value
    return found
"""


def written():
    """A function that lies in no file: there is nowhere to keep it."""
    room = {}
    exec(LOOP, room)
    return room["total"]


@pytest.mark.parametrize("compiler", [kernel, fused, summed])
def test_a_loop_that_cannot_be_kept_is_compiled_all_the_same(compiler):
    values = np.linspace(-1, 2, 1001, dtype=np.float32)
    found = compiler(written())(values)
    assert math.isclose(found, float((values.astype(float) ** 2).sum()), rel_tol=1e-4)


def bits(function):
    """What the key of kept code is made of, besides the function's own bytes."""
    return function.py_func.__closure__[0].cell_contents


def test_flags_and_sources_are_part_of_what_code_is_kept_under(monkeypatch):
    one, other = types.ModuleType("one"), types.ModuleType("other")
    monkeypatch.setattr("inspect.getsource", lambda module: module.__name__)
    keys = {
        bits(compiler(written()))
        for compiler in (kernel, fused, summed, fused_with(one), fused_with(other))
    }
    assert len(keys) == 5
