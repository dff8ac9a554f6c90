"""Embeddings that a caller gives in place of a prompt's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from processors.hashing import digest_fields
from vlmserve.ipc.messages import InputEmbeds
from vlmserve_common.errors import BadRequestError

_PARAM = "input_embeds"


def read_input_embeds(given: Any) -> InputEmbeds:
    """Read embeddings that a caller gives. given: [L, hidden], a numpy array of floats or a torch tensor of float32,
    bfloat16 or float16, which float32 holds as they are. Raises BadRequestError for anything else, and for values that
    are not finite."""
    if type(given).__module__ == "torch" and hasattr(given, "detach"):
        given = given.detach().cpu().float().numpy() if given.is_floating_point() else given.detach().cpu().numpy()
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or given.ndim != 2:
        kind = f"an array of {given.dtype}, {list(given.shape)}" if isinstance(given, np.ndarray) else type(given)
        raise _refusal(f"is {kind}; it must be a tensor of floats, [tokens, hidden size]")
    rows = np.ascontiguousarray(given, dtype=np.float32)
    if not np.isfinite(rows).all():
        bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise _refusal(f"has a value in row {bad} that is not finite in float32")
    digests = [np.frombuffer(digest_fields([b"vlmserve input embeds 1", row.data]), dtype=np.uint8) for row in rows]
    return InputEmbeds(rows=rows, digests=np.stack(digests) if digests else np.zeros((0, 32), dtype=np.uint8))


def check_input_embeds(rows: np.ndarray, *, hidden_size: int) -> None:
    """BadRequestError unless rows are as wide as the model's."""
    if rows.shape[1] != hidden_size:
        raise _refusal(f"has rows of {rows.shape[1]} elements; the model's hidden size is {hidden_size}")


def _refusal(what: str) -> BadRequestError:
    return BadRequestError(f"{_PARAM} {what}", param=_PARAM, code="invalid_value")
