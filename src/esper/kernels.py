"""Plain loops over numpy arrays, compiled to machine code on their first call."""

import inspect
from collections.abc import Callable
from hashlib import sha256
from types import CellType, FunctionType, ModuleType
from typing import Any, cast

import numba

Function = Callable[..., Any]


def kernel(function: Function) -> Function:
    """Compile a loop; its bits are those of the loop as it is written."""
    return _compiled(function)


def fused(function: Function) -> Function:
    """Compile a loop that may fuse products with sums.

    Same input, same bits, but not those of the loop as it is written.
    """
    return _compiled(function, fastmath={"contract"})


def summed(function: Function) -> Function:
    """Compile a loop that may also split its sums over lanes."""
    return _compiled(function, fastmath={"contract", "reassoc", "nsz"})


def fused_with(*modules: ModuleType) -> Callable[[Function], Function]:
    """`fused`, for what calls kernels of other modules.

    Compiled code is kept on disk until the file of its function changes. A free
    variable, which is part of its key, makes it new when one of their files does.
    """
    source = "".join(inspect.getsource(module) for module in modules)
    digest = sha256(source.encode()).hexdigest()

    def decorate(function: Function) -> Function:
        plain = inspect.unwrap(function)
        assert isinstance(plain, FunctionType)
        bound = FunctionType(
            plain.__code__.replace(co_freevars=("digest",)),
            plain.__globals__,
            plain.__name__,
            plain.__defaults__,
            (CellType(digest),),
        )
        bound.__module__, bound.__qualname__ = plain.__module__, plain.__qualname__
        bound.__doc__ = plain.__doc__
        return fused(bound)

    return decorate


def _compiled(function: Function, **more: Any) -> Function:  # noqa: ANN401
    # The test hook wraps annotated functions; the compiler needs what is inside.
    compiler = numba.njit(cache=True, nogil=True, error_model="numpy", **more)
    return cast(Function, compiler(inspect.unwrap(function)))
