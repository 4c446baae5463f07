"""What a checkpoint says of itself, as JSON in one form only.

A manifest holds the size and SHA-256 of the state, and a SHA-256 of itself: written
again it gives the same bytes, so any changed byte shows. The digest tells of damage; it
is no signature.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

import torch

from esper import __version__
from esper.contracts.errors import BadInput
from esper.experiment.storage.disk import said
from esper.experiment.storage.tensor_file import MAX_BYTES, recognise

SCHEMA: Final = 1
STATE: Final = "state.safetensors"
MAX_MANIFEST: Final = 1 << 20
MAX_STEP: Final = 10**12


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    """How far the run was."""
    score: float | None
    """How good it was; the checkpoint with the highest is kept."""
    facts: Mapping[str, Any]
    """What the run wants to know again: configuration digest, action space."""
    made_by: Mapping[str, str]
    """Versions of Esper, PyTorch and Python."""
    size: int
    """Bytes of the state."""
    sha256: str
    """Digest of the state."""


def write_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest that `read_manifest` will accept."""
    score = manifest.score
    if score is not None and not isfinite(score):
        raise BadInput(f"score must be finite or None, got {score}.")
    body = {
        "schema": SCHEMA,
        "step": manifest.step,
        "score": None if score is None else float(score),
        "facts": manifest.facts,
        "made_by": manifest.made_by,
        "files": {STATE: {"bytes": manifest.size, "sha256": manifest.sha256}},
    }
    try:
        data = _seal(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadInput(
            f"facts must be what JSON holds, all finite: {said(str(error))}."
        ) from error
    if len(data) > MAX_MANIFEST:
        raise BadInput(
            f"facts make a manifest of {len(data):,} bytes, at most {MAX_MANIFEST:,}; "
            "store large things elsewhere."
        )
    return data


def read_manifest(name: str, data: bytes) -> Manifest:
    """Refuse any byte that `write_manifest` would not have written.

    Args:
        name: What the file is called in an error.
        data: All of it, or more than `MAX_MANIFEST` bytes of it.
    """
    if len(data) > MAX_MANIFEST:
        raise BadInput(f"{name} is larger than {MAX_MANIFEST:,} bytes; use another.")
    try:
        body = json.loads(data.decode("ascii"))
        version = body.pop("schema")
        if type(version) is not int:
            raise TypeError("schema")
        if version != SCHEMA:
            raise BadInput(
                f"{name} has schema {said(str(version))}, Esper {__version__} reads "
                f"{SCHEMA}; use the Esper that wrote it."
            )
        del body["sha256"]
        if _seal({"schema": version, **body}) != data:
            raise KeyError("sha256")
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(
            f"{name} is {recognise(data) or 'damaged'}; use another checkpoint."
        ) from error
    match body:
        case {
            "step": int(step),
            "score": int() | float() | None as score,
            "facts": dict(facts),
            "made_by": dict(versions),
            "files": {"state.safetensors": {"bytes": int(size), "sha256": str(sha256)}},
        } if (
            len(body) == 5
            and len(body["files"]) == 1
            and 0 <= step <= MAX_STEP
            and 0 < size <= MAX_BYTES
        ):
            return Manifest(
                step=step,
                score=None if score is None else float(score),
                facts=facts,
                made_by={name: str(version) for name, version in versions.items()},
                size=size,
                sha256=sha256,
            )
    raise BadInput(
        f"{name} is not as Esper writes it: it must list {STATE} alone, of at most "
        f"{MAX_BYTES:,} bytes; use another checkpoint."
    )


def made_by() -> dict[str, str]:
    """Versions that a checkpoint is made with."""
    return {
        "esper": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _seal(body: Mapping[str, Any]) -> bytes:
    """JSON in its one form, with a digest of itself."""
    digest = hashlib.sha256(_text(body).encode()).hexdigest()
    return _text({**body, "sha256": digest}).encode()


def _text(value: object) -> str:
    return json.dumps(value, allow_nan=False, indent=1, sort_keys=True) + "\n"
