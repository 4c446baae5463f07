"""Plain loops over numpy arrays, compiled to machine code on their first call.

    kernel        its bits are those of the loop as it is written
    fused_with    products may be fused with sums
    summed_with   and sums may be split over lanes

Same input, same bits, in all three. What a fused or summed kernel calls must be a part:
it is written into its caller. A call by name would find the callee compiled alone in
the process that compiles both, but the caller's own copy where the caller is loaded
from disk, and the two may round differently.

Compiled code is kept on disk until the file of its function changes. What else it
depends on, its flags and the modules that it takes constants or other kernels from, is
put into a free variable, which is part of its key.

With ESPER_DEBUG=1 in the environment every index is checked: an access out of bounds
raises IndexError instead of reading or writing whatever lies there.
"""

import inspect
import os
from collections.abc import Callable
from hashlib import sha256
from types import CellType, FunctionType, ModuleType
from typing import Any

import numba
from llvmlite import binding as llvm  # type: ignore[import-untyped]

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
FUSED = ("contract",)
SUMMED = ("contract", "reassoc", "nsz")


def kernel(function: Function) -> Function:
    """Compile a loop as it is written."""
    return _compiled(function, (), ())


def fused_with(*modules: ModuleType, part: bool = False) -> Decorator:
    """Compile a loop that depends on these modules; products may be fused with sums.

    Args:
        modules: Where it takes constants or other kernels from.
        part: Whether other kernels call it.
    """
    return lambda function: _compiled(function, modules, FUSED, part)


def summed_with(*modules: ModuleType, part: bool = False) -> Decorator:
    """As `fused_with`; and sums may be split over lanes."""
    return lambda function: _compiled(function, modules, SUMMED, part)


def compiled_for() -> str:
    """The processor that kernels are compiled for; another one may round otherwise."""
    return str(llvm.get_host_cpu_name())


def _compiled(
    function: Function,
    modules: tuple[ModuleType, ...],
    flags: tuple[str, ...],
    part: bool = False,
) -> Function:
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "fastmath": set(flags),
        "forceinline": part,
        "boundscheck": os.environ.get("ESPER_DEBUG", "0") not in ("", "0"),
    }
    # The test hook wraps annotated functions; the compiler needs what is inside.
    plain = inspect.unwrap(function)
    assert isinstance(plain, FunctionType)
    source = "".join(inspect.getsource(module) for module in modules)
    key = f"{flags}{part}{options['boundscheck']}{source}"
    bound = FunctionType(
        plain.__code__.replace(co_freevars=("digest",)),
        plain.__globals__,
        plain.__name__,
        plain.__defaults__,
        (CellType(sha256(key.encode()).hexdigest()),),
    )
    bound.__module__, bound.__qualname__ = plain.__module__, plain.__qualname__
    bound.__doc__ = plain.__doc__
    try:
        compiled: Function = numba.njit(cache=True, **options)(bound)
    except RuntimeError:  # nowhere to keep it: every process compiles anew
        compiled = numba.njit(**options)(bound)
    return compiled
