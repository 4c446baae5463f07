"""Tensors by name as the bytes of a safetensors file, from any source.

safetensors checks that a header describes exactly the bytes behind it. Checked here is
what it lets through: tensors of other kinds, bytes that are no bool, and numbers that
are not finite unless the caller names the tensor. Nothing in a file is ever executed.
"""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from esper.contracts.errors import BadInput
from esper.contracts.state import Tensors
from esper.experiment.messages import quoted

MAX_TENSORS: Final = 10_000
MAX_BYTES: Final = 4 << 30
MAX_RANK: Final = 16
KINDS: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)

DISGUISES: Final = (
    (b"PK\x03\x04", "a zip archive, as torch.save writes"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
    (b"version https://git-lfs", "a Git LFS pointer; fetch it with git lfs pull"),
    (b"<!doctype", "an HTML page; the download went wrong"),
    (b"<html", "an HTML page; the download went wrong"),
    (b"\x1f\x8b", "a gzip archive"),
)


def pack(tensors: Mapping[str, Tensor], may_be_nan: Collection[str] = ()) -> bytes:
    """The bytes of a file that `unpack` will accept.

    Args:
        tensors: On any device; none may share memory with another.
        may_be_nan: Names, or patterns such as `*/first_loss`, of tensors that may hold
            numbers that are not finite.
    """
    for name, tensor in tensors.items():
        if name == "__metadata__" or not name.isprintable():
            raise BadInput(f"a tensor cannot be called {quoted(name)}; rename it.")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise BadInput(f"tensor {quoted(name)} is sparse or has no data; fill it.")
    ready = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    if strange := _strange(ready, may_be_nan):
        raise BadInput(f"{strange} and is not saved; go back to a good checkpoint.")
    try:
        data: bytes = save_bytes(ready)
    except RuntimeError as error:
        raise BadInput("two tensors share memory; clone one before saving.") from error
    if len(data) > MAX_BYTES:
        raise BadInput(
            f"the state has {len(data):,} bytes, at most {MAX_BYTES:,} are saved; use "
            "fewer hosts."
        )
    return data


def unpack(name: str, data: bytes, may_be_nan: Collection[str] = ()) -> Tensors:
    """The tensors in the bytes of a file, on the CPU.

    Args:
        name: What the file is called in an error.
        data: All of it.
        may_be_nan: As for `pack`.
    """
    if disguise := recognise(data):
        raise BadInput(f"{name} is {disguise}; Esper reads safetensors only.")
    try:
        tensors: Tensors = load_bytes(data)
    except SafetensorError as error:
        raise _refusal(
            name, quoted(str(error).rpartition("deserializing: ")[2])
        ) from error
    if strange := _strange(tensors, may_be_nan):
        raise _refusal(name, strange)
    return tensors


def recognise(opening: bytes) -> str:
    """What a file is that is not what it should be, or nothing if unknown."""
    start = opening[:64].lstrip().lower()
    for sign, what in DISGUISES:
        if opening.startswith(sign) or start.startswith(sign):
            return what
    return ""


def _strange(tensors: Mapping[str, Tensor], may_be_nan: Collection[str]) -> str:
    """Which tensor is or holds what no tensor should, or nothing."""
    if not 0 < len(tensors) <= MAX_TENSORS:
        return f"it has {len(tensors):,} tensors, expected 1 to {MAX_TENSORS:,},"
    for name, values in tensors.items():
        if values.dtype not in KINDS or values.ndim > MAX_RANK:
            return f"{quoted(name)} is of unknown kind {values.dtype} or shape"
        if values.dtype is torch.bool:
            if bool((values.view(torch.uint8) > 1).any()):
                return f"{quoted(name)} holds bytes that are no bool"
        elif values.is_floating_point() and not bool(values.isfinite().all()):
            if any(fnmatchcase(name, pattern) for pattern in may_be_nan):
                continue
            return f"{quoted(name)} holds NaN or infinity"
    return ""


def _refusal(name: str, why: str) -> BadInput:
    return BadInput(f"{name} cannot be trusted: {why}; use another checkpoint.")
