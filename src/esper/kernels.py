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
put into a free variable, which is part of its key. Each file ends with the SHA-256 of
the rest, because nothing syncs them: what a loss of power or a full disk has damaged is
compiled and written anew. It detects damage, not forgery, like Python's own caches.

With ESPER_DEBUG=1 in the environment every index is checked: an access out of bounds
raises IndexError instead of reading or writing whatever lies there.
"""

import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any, Final

import numba
from llvmlite import binding as llvm  # type: ignore[import-untyped]
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

from esper.contracts.errors import InvalidInputError

Function = Callable[..., Any]
Decorator = Callable[[Function], Function]
FUSED: Final = ("contract",)
SUMMED: Final = ("contract", "reassoc", "nsz")
DIGEST: Final = 32
"""Bytes at the end of a file of compiled code."""


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


def require_compiler() -> None:
    """Refuse to train hosts where numba is told not to compile."""
    if getattr(numba.config, "DISABLE_JIT", 0):
        raise InvalidInputError(
            "NUMBA_DISABLE_JIT is set, but hosts are trained by compiled loops; unset "
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
    compiled: Any = numba.njit(**options)(bound)
    if isinstance(compiled, Dispatcher):  # else numba is told not to compile
        with suppress(RuntimeError):  # nowhere to keep it: every process compiles anew
            compiled._cache = VerifiedCache(bound)  # type: ignore[attr-defined]
    found: Function = compiled
    return found


class VerifiedCache(FunctionCache):  # type: ignore[misc]
    """Compiled code of one function on disk; what is damaged counts as missing."""

    def __init__(self, function: Function) -> None:
        super().__init__(function)
        self._cache_file = VerifiedFiles(
            self._cache_path,
            self._impl.filename_base,
            self._impl.locator.get_source_stamp(),
        )

    def save_overload(self, *what: object) -> None:
        """Write compiled code, unless the disk refuses."""
        with suppress(OSError):
            super().save_overload(*what)


class VerifiedFiles(IndexDataCacheFile):  # type: ignore[misc]
    """Files that end with their digest, which unpickling does not reach."""

    def _load_index(self) -> dict[object, str]:
        return super()._load_index() if _is_whole(self._index_path) else {}

    def _load_data(self, name: str) -> object:
        if not _is_whole(self._data_path(name)):
            raise FileNotFoundError  # which is taken for code that is not there
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
    return sha256(data[:-DIGEST]).digest() == data[-DIGEST:]
