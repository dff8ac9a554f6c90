"""Checks pictures that arrive as embeddings, before anything else sees them.

Such a picture is a safetensors file with `image_embeds` [tokens, width], as the checkpoint's vision tower makes them,
and `image_grid_thw` [1, 3], the picture's patches in time, height and width. A family with DeepStack also has rows for
its decoder's first layers. They come as `deepstack_embeds` [layers, tokens, width], or appended to the main rows:
`image_embeds` [tokens, width * (1 + layers)]. Safetensors files hold only numbers, so reading them runs no code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    import torch

_CODE = "invalid_image_embeds"
_ROWS, _DEEPSTACK, _GRID = "image_embeds", "deepstack_embeds", "image_grid_thw"
_DTYPES = ("float32", "bfloat16", "float16")
# float16's largest: above it, a norm's squares overflow even in float32
_LARGEST = 65504.0


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsShape:
    """Row sizes of a checkpoint's tower. `width`: elements of a main row. `deepstack`: how many rows of that width
    follow it."""

    width: int
    deepstack: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GridLimits:
    """Limits of a grid. `merge_size`: patches a side that become one row. `patch_size`: pixels a side of a patch.
    `max_pixels`: the largest area."""

    merge_size: int
    patch_size: int
    max_pixels: int


def parse_embeds(data: bytes) -> dict[str, torch.Tensor]:
    """Read the tensors of a safetensors file. Raises BadRequestError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        return load(data)
    except (
        SafetensorError,
        KeyError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # such as sizes beyond int64
        raise _bad(f"the data is not a safetensors file: {error}") from None


def check_embeds(
    given: Mapping[str, Any], shape: EmbedsShape, limits: GridLimits
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Check tensors and return their rows and grid.

    `given`: tensors or arrays by name. Returns read-only float32 [tokens, width * (1 + deepstack)] and (t, h, w) in
    patches. Raises BadRequestError, which says what was expected.
    """
    names = [_ROWS, _GRID] + [_DEEPSTACK] * bool(shape.deepstack)
    for name in given:
        if name not in names:
            raise _bad(f"unknown tensor {str(name)[:80]!r}; there may be {', '.join(names)}")
    for name in (_ROWS, _GRID):
        if name not in given:
            raise _bad(f"the tensor {name} is missing")
    tensors = {name: _tensor(name, value) for name, value in given.items()}
    grid = _check_grid(tensors[_GRID], limits)
    rows = _join(tensors[_ROWS], tensors.get(_DEEPSTACK), grid[1] * grid[2] // limits.merge_size**2, shape)
    if not bool((rows.abs() <= _LARGEST).all()):  # false for NaN
        raise _bad(f"{_ROWS} has values that are not finite, or beyond {_LARGEST:g}")
    array = rows.numpy()
    array.flags.writeable = False
    return array, grid


def _tensor(name: str, value: Any) -> torch.Tensor:
    import torch

    try:
        return torch.as_tensor(value).detach().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise _bad(f"{name} is no tensor: {error}") from None


def _check_grid(tensor: torch.Tensor, limits: GridLimits) -> tuple[int, int, int]:
    if _dtype(tensor) not in ("int64", "int32") or tuple(tensor.shape) not in ((1, 3), (3,)):
        raise _bad(f"{_GRID} is {_describe(tensor)}; it must be int64 [1, 3]: patches in time, height and width")
    t, h, w = tensor.flatten().tolist()
    merge = limits.merge_size
    if t != 1 or h < merge or w < merge or h % merge or w % merge:
        raise _bad(f"{_GRID} is {[t, h, w]}; a picture's is 1, then height and width, multiples of {merge}")
    pixels = h * w * limits.patch_size**2
    if pixels > limits.max_pixels:
        raise _bad(
            f"{_GRID} is {[t, h, w]}, a picture of {pixels} pixels; the limit is {limits.max_pixels} (setting "
            "--max-pixels)"
        )
    return t, h, w


def _join(rows: torch.Tensor, deepstack: torch.Tensor | None, tokens: int, shape: EmbedsShape) -> torch.Tensor:
    """Return a float32 copy [tokens, width * (1 + deepstack)], contiguous, that shares no memory with the caller's."""
    import torch

    whole = shape.width * (1 + shape.deepstack)
    alone = [tokens, whole if deepstack is None else shape.width]
    _check_rows(_ROWS, rows, alone)
    if deepstack is None:
        return rows.to(torch.float32, copy=True).contiguous()
    _check_rows(_DEEPSTACK, deepstack, [shape.deepstack, tokens, shape.width])
    return torch.cat([rows.float(), *deepstack.float()], dim=-1)


def _check_rows(name: str, tensor: torch.Tensor, expected: list[int]) -> None:
    if _dtype(tensor) not in _DTYPES or list(tensor.shape) != expected:
        raise _bad(
            f"{name} is {_describe(tensor)}; with this {_GRID} and this checkpoint it must be float32, bfloat16 or "
            f"float16 {expected}"
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bad(message: str) -> BadRequestError:
    return BadRequestError(message, code=_CODE)
