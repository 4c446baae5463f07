"""Loops over numpy arrays, compiled with numba on their first call.

    kernel        strict floating-point order
    fused_with    products may be fused with sums
    summed_with   sums may also be reordered

All three are deterministic. A fused or summed kernel may only call kernels with
`part=True`, which are inlined; others may round differently when loaded from the cache.
Compiled code is cached on disk. The cache key includes the flags and the source of the
given modules, and each file ends with its SHA-256, so damaged files are compiled again.
With ESPER_DEBUG=1 in the environment, an index out of bounds raises IndexError.
"""

import inspect
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, Final

import numba
import numpy as np
import torch
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

from esper.contracts.errors import InvalidInputError

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
FUSED: Final = ("contract",)
SUMMED: Final = ("contract", "reassoc", "nsz")
DIGEST_BYTES: Final = 32


def kernel(function: Function) -> Function:
    """Compile a loop with strict floating-point order."""
    return _compiled(function, (), ())


def fused_with(*modules: ModuleType, part: bool = False) -> Decorator:
    """Compile a loop; products may be fused with sums.

    Args:
        modules: Modules that it imports constants or other kernels from.
        part: Inline it into the kernels that call it.
    """
    return lambda function: _compiled(function, modules, FUSED, part)


def summed_with(*modules: ModuleType, part: bool = False) -> Decorator:
    """Compile like `fused_with`; sums may also be reordered."""
    return lambda function: _compiled(function, modules, SUMMED, part)


def versions() -> dict[str, str]:
    """Return everything that must be equal on two machines for equal results."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "kernels": str(llvm.get_host_cpu_name()),
    }


def require_compiler() -> None:
    """Raise an error if numba's compiler is disabled."""
    if getattr(numba.config, "DISABLE_JIT", 0):
        raise InvalidInputError(
            "NUMBA_DISABLE_JIT is set, but hosts are trained by compiled loops. Unset "
            "it."
        )


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
    # Type checks of the tests wrap annotated functions; compile the inner function.
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
    compiled: Any = numba.njit(**options)(bound)
    if isinstance(compiled, Dispatcher):  # False if the compiler is disabled
        with suppress(RuntimeError):  # no place for a cache: every process compiles
            compiled._cache = VerifiedCache(bound)  # type: ignore[attr-defined]
    found: Function = compiled
    return found


class VerifiedCache(FunctionCache):  # type: ignore[misc]
    """Disk cache of one function that ignores damaged files."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._cache_file = VerifiedFiles(
            self._cache_path,
            self._impl.filename_base,
            self._impl.locator.get_source_stamp(),
        )

    def save_overload(self, *what: object) -> None:
        """Write compiled code; ignore errors of the disk."""
        with suppress(OSError):
            super().save_overload(*what)


class VerifiedFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Cache files that end with their digest, which unpickling ignores."""

    def _load_index(self) -> dict[object, str]:
        return super()._load_index() if _is_whole(self._index_path) else {}

    def _load_data(self, name: str) -> object:
        if not _is_whole(self._data_path(name)):
            raise FileNotFoundError  # numba then compiles again
        return super()._load_data(name)

    @contextmanager
    def _open_for_write(self, path: str) -> Iterator[BytesIO]:
        content = BytesIO()
        yield content
        data = content.getvalue()
        with super()._open_for_write(path) as file:
            file.write(data + sha256(data).digest())


def _is_whole(path: str) -> bool:
    try:
        data = Path(path).read_bytes()
    except OSError:
        return False
    return sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]
