import importlib
import math
import pkgutil
import sys
import types

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

import esper
from esper.contracts.errors import InvalidInputError
from esper.environment.cohort import Cohort
from esper.kernels import fused_with, kernel, summed_with
from esper.tasks.hosts import MlpHost

COMPILERS = [kernel, fused_with(), summed_with()]
LOOP = """
def total(values, count):
    found = values.dtype.type(0)
    for i in range(count):
        found += values[i] * values[i]
    return found
"""


def written():
    """A function that lies in no file: there is nowhere to keep it."""
    room = {}
    exec(LOOP, room)
    return room["total"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_loop_that_cannot_be_kept_is_compiled_all_the_same(compiler):
    values = np.linspace(-1, 2, 1001, dtype=np.float32)
    found = compiler(written())(values, 1001)
    assert math.isclose(found, float((values.astype(float) ** 2).sum()), rel_tol=1e-4)


@pytest.fixture
def loops(tmp_path, monkeypatch):
    """A folder with a module that has one kernel."""
    text = f"from esper.kernels import kernel\n\n@kernel{LOOP}"
    (tmp_path / "kept_loops.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("kept_loops", None)


def loaded_from_disk():
    """Call the kernel of the module, imported anew; whether it was not compiled."""
    sys.modules.pop("kept_loops", None)
    total = importlib.import_module("kept_loops").total
    assert total(np.ones(3), 3) == 3
    return bool(total.stats.cache_hits)


@pytest.mark.parametrize("ending", [".nbi", ".nbc"])
def test_damaged_code_on_disk_is_compiled_anew_and_replaced(loops, ending):
    assert not loaded_from_disk()
    (file,) = (loops / "__pycache__").glob(f"*{ending}")
    whole = file.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for damaged in (b"", whole[:-1], flipped):
        file.write_bytes(damaged)
        assert not loaded_from_disk()
        assert loaded_from_disk()


def test_code_that_cannot_be_written_is_compiled_all_the_same(loops):
    assert not loaded_from_disk()
    (file,) = (loops / "__pycache__").glob("*.nbi")
    file.unlink()
    file.mkdir()  # which nobody can write, not even root
    assert not loaded_from_disk()


def test_hosts_are_refused_where_numba_does_not_compile(monkeypatch):
    monkeypatch.setattr("numba.config.DISABLE_JIT", True)
    assert kernel(written())(np.ones(3), 3) == 3
    with pytest.raises(InvalidInputError, match="NUMBA_DISABLE_JIT is set"):
        Cohort(1, MlpHost((2, 3, 2)))


def bits(function):
    """What the key of kept code is made of, besides the function's own bytes."""
    return function.py_func.__closure__[0].cell_contents


def test_flags_and_sources_are_part_of_what_code_is_kept_under(monkeypatch):
    one, other = types.ModuleType("one"), types.ModuleType("other")
    monkeypatch.setattr("inspect.getsource", lambda module: module.__name__)
    compilers = [*COMPILERS, fused_with(part=True), fused_with(one), fused_with(other)]
    keys = {bits(compiler(written())) for compiler in compilers}
    monkeypatch.setenv("ESPER_DEBUG", "1")
    keys.add(bits(kernel(written())))
    assert len(keys) == 7


@pytest.mark.parametrize("compiler", COMPILERS)
def test_in_debug_mode_an_index_out_of_bounds_is_refused(compiler, monkeypatch):
    monkeypatch.setenv("ESPER_DEBUG", "1")
    checked, values = compiler(written()), np.ones(8, dtype=np.float32)
    assert checked(values, 8) == 8
    with pytest.raises(IndexError):
        checked(values, 9)


PARTS = """
def part(values, start):
    found = values.dtype.type(0)
    for i in range(start, len(values)):
        if values[i] > 0:
            found += values[i] * values[i]
        elif values[i] < -1:
            found -= values[i] * values[i] * values[i]
    return found

def whole(values):
    return part(values, 0) + part(values, 1) * part(values, 2)
"""


def test_a_part_is_written_into_its_caller():
    """Whatever an inliner would do by itself on this processor."""
    room = {}
    exec(PARTS, room)
    room["part"] = summed_with(part=True)(room["part"])
    caller = fused_with()(room["whole"])
    caller(np.linspace(-2, 2, 64, dtype=np.float32))
    (code,) = caller.inspect_llvm().values()
    assert not [row for row in code.splitlines() if " call " in row and "4part" in row]


def test_whatever_kernels_call_is_a_part_or_compiled_as_it_is_written():
    found, wrong = 0, []
    for entry in pkgutil.walk_packages(esper.__path__, "esper."):
        if entry.name.startswith("esper.cli"):
            continue
        room = vars(importlib.import_module(entry.name))
        for caller in [kept for kept in room.values() if isinstance(kept, Dispatcher)]:
            code, names = caller.py_func.__code__, caller.py_func.__globals__
            for callee in map(names.get, code.co_names):
                if isinstance(callee, Dispatcher):
                    options = callee.targetoptions
                    found += 1
                    if options["fastmath"] and not options["forceinline"]:
                        wrong.append(callee.py_func.__qualname__)
    assert found > 20
    assert not wrong
