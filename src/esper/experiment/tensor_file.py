"""Tensors by name as the bytes of a safetensors file, from any source.

    8 bytes: length of the header | header: JSON | numbers, tensor after tensor

What a file declares is checked before memory is allocated for it: the header is at most
1 MiB, names at most 10,000 tensors of known kinds, and they fill the rest of the file
without gap or overlap. Nothing in a file is ever executed. Numbers that are not finite
are refused unless the caller names the tensor.
"""

import json
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from esper.contracts.errors import BadInput
from esper.contracts.state import Tensors
from esper.experiment.messages import quoted

LENGTH: Final = 8
MAX_HEADER: Final = 1 << 20
MAX_TENSORS: Final = 10_000
MAX_BYTES: Final = 4 << 30
MAX_RANK: Final = 16
OPENING: Final = LENGTH + MAX_HEADER
"""How many bytes of a file are enough to check its header."""

KINDS: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

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
    if not 0 < len(tensors) <= MAX_TENSORS:
        raise BadInput(
            f"expected 1 to {MAX_TENSORS:,} tensors, got {len(tensors):,}; join some."
        )
    for name, tensor in tensors.items():
        if name == "__metadata__" or not name.isprintable():
            raise BadInput(f"a tensor cannot be called {quoted(name)}; rename it.")
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise BadInput(f"tensor {quoted(name)} is sparse or has no data; fill it.")
        if tensor.dtype not in KINDS.values():
            raise BadInput(
                f"tensor {quoted(name)} is {tensor.dtype}; convert it to a known kind."
            )
    ready = {name: part.detach().cpu().contiguous() for name, part in tensors.items()}
    if strange := _strange(ready, may_be_nan):
        raise BadInput(f"{strange} and is not saved; go back to a good checkpoint.")
    try:
        data: bytes = save_bytes(ready)
    except RuntimeError as error:
        raise BadInput("two tensors share memory; clone one before saving.") from error
    header = int.from_bytes(data[:LENGTH], "little")
    if header > MAX_HEADER or len(data) > MAX_BYTES:
        raise BadInput(
            f"the state has {len(data):,} bytes, {header:,} of them names; at most "
            f"{MAX_BYTES:,} and {MAX_HEADER:,} are saved. Use fewer hosts."
        )
    return data


def unpack(name: str, data: bytes, may_be_nan: Collection[str] = ()) -> Tensors:
    """The tensors in the bytes of a file, on the CPU.

    Args:
        name: What the file is called in an error.
        data: All of it.
        may_be_nan: As for `pack`.
    """
    check_header(name, data[:OPENING], len(data))
    try:
        tensors: Tensors = load_bytes(data)
    except SafetensorError as error:
        raise _refusal(name, quoted(str(error))) from error
    if strange := _strange(tensors, may_be_nan):
        raise _refusal(name, strange)
    return tensors


def check_header(name: str, opening: bytes, size: int) -> None:
    """Refuse a file whose header does not describe exactly its bytes.

    Args:
        name: What the file is called in an error.
        opening: Its first `OPENING` bytes, or all if it has fewer.
        size: How many bytes it has.
    """
    if disguise := recognise(opening):
        raise BadInput(f"{name} is {disguise}; Esper reads safetensors only.")
    if not LENGTH < size <= MAX_BYTES:
        raise _refusal(name, f"it has {size:,} bytes, expected 9 to {MAX_BYTES:,}")
    length = int.from_bytes(opening[:LENGTH], "little")
    if not 2 <= length <= min(MAX_HEADER, size - LENGTH):
        raise _refusal(name, f"its header claims {length:,} bytes of {size:,}")
    try:
        header = json.loads(
            opening[LENGTH : LENGTH + length].decode(), object_pairs_hook=_once
        )
    except (ValueError, RecursionError) as error:
        raise _refusal(name, "its header is not JSON") from error
    if not isinstance(header, dict) or not 0 < len(header) <= MAX_TENSORS:
        raise _refusal(name, f"its header must name 1 to {MAX_TENSORS:,} tensors")
    spans = sorted(_span(name, tensor, entry) for tensor, entry in header.items())
    end = 0
    for start, stop in spans:
        if start != end:
            raise _refusal(name, f"its tensors leave a gap or overlap at byte {end:,}")
        end = stop
    if end != size - LENGTH - length:
        raise _refusal(
            name, f"its tensors need {end:,} bytes, it has {size - LENGTH - length:,}"
        )


def recognise(opening: bytes) -> str:
    """What a file is that is not what it should be, or nothing if unknown."""
    start = opening[:64].lstrip().lower()
    for sign, what in DISGUISES:
        if opening.startswith(sign) or start.startswith(sign):
            return what
    return ""


def _span(name: str, tensor: str, entry: Any) -> tuple[int, int]:  # noqa: ANN401
    """Where one tensor's numbers stand."""
    match entry:
        case {
            "dtype": str(kind),
            "shape": list(shape),
            "data_offsets": [start, stop],
        } if len(entry) == 3 and all(type(n) is int for n in (*shape, start, stop)):
            pass
        case _:
            raise _refusal(name, f"{quoted(tensor)} is not described as a tensor")
    if kind not in KINDS:
        raise _refusal(name, f"{quoted(tensor)} has unknown kind {quoted(kind)}")
    if len(shape) > MAX_RANK or min(shape, default=0) < 0:
        raise _refusal(name, f"{quoted(tensor)} has an impossible shape")
    each = KINDS[kind].itemsize
    # A zero beside huge lengths makes no bytes, but strides that no integer holds.
    if prod(max(length, 1) for length in shape) * each > MAX_BYTES:
        raise _refusal(name, f"{quoted(tensor)} is larger than {MAX_BYTES:,} bytes")
    if start < 0 or stop - start != prod(shape) * each:
        raise _refusal(name, f"{quoted(tensor)} does not fill bytes {start} to {stop}")
    return start, stop


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that is there twice; of two readers each might take another."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _strange(tensors: Mapping[str, Tensor], may_be_nan: Collection[str]) -> str:
    """Which tensor holds what no tensor should hold, or nothing."""
    for name, values in tensors.items():
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
