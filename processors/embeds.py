"""Checks pictures and videos that arrive as embeddings, before anything else sees them.

Such a picture is a safetensors file with `image_embeds` [tokens, width], as the checkpoint's vision tower makes them,
and `image_grid_thw` [1, 3], the picture's patches in time, height and width. A family with DeepStack also has rows for
its decoder's first layers. They come as `deepstack_embeds` [layers, tokens, width], or appended to the main rows:
`image_embeds` [tokens, width * (1 + layers)]. Safetensors files hold only numbers, so reading them runs no code.

A video has `video_embeds` and `video_grid_thw` in their place. Its times are `second_per_grid_ts` [1], the seconds
between temporal patches, and `timestamps` [t], the seconds at which each of them is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from processors.inputs import Modality
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    import torch

_DEEPSTACK, _INTERVAL, _TIMES = "deepstack_embeds", "second_per_grid_ts", "timestamps"
_DTYPES = ("float32", "bfloat16", "float16")
# float16's largest: above it, a norm's squares overflow even in float32
_LARGEST = 65504.0
_LATEST_S = 1e6
_USUAL_INTERVAL_S = 1.0  # two frames of two a second, as where processors of transformers are not told


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsShape:
    """Row sizes of a checkpoint's tower. `width`: elements of a main row. `deepstack`: how many rows of that width
    follow it."""

    width: int
    deepstack: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GridLimits:
    """Limits of a grid. `merge_size`: patches a side that become one row. `patch_size`: pixels a side of a patch.
    `max_pixels`: the largest area. `max_patches`: the most temporal patches of a video."""

    merge_size: int
    patch_size: int
    max_pixels: int
    max_patches: int = 1


def parse_embeds(data: bytes, modality: Modality = Modality.IMAGE) -> dict[str, torch.Tensor]:
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
        raise _bad(modality, f"the data is not a safetensors file: {error}") from None


def check_embeds(
    given: Mapping[str, Any], shape: EmbedsShape, limits: GridLimits, modality: Modality = Modality.IMAGE
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Check tensors and return their rows and grid.

    `given`: tensors or arrays by name. Returns read-only float32 [tokens, width * (1 + deepstack)] and (t, h, w) in
    patches. Raises BadRequestError, which says what was expected.
    """
    rows_name, grid_name = f"{modality}_embeds", f"{modality}_grid_thw"
    names = [rows_name, grid_name] + [_DEEPSTACK] * bool(shape.deepstack)
    names += [_INTERVAL, _TIMES] if modality is Modality.VIDEO else []
    for name in given:
        if name not in names:
            raise _bad(modality, f"unknown tensor {str(name)[:80]!r}; there may be {', '.join(names)}")
    for name in (rows_name, grid_name):
        if name not in given:
            raise _bad(modality, f"the tensor {name} is missing")
    tensors = {name: _tensor(modality, name, value) for name, value in given.items()}
    grid = _check_grid(modality, tensors[grid_name], limits)
    tokens = grid[0] * grid[1] * grid[2] // limits.merge_size**2
    rows = _join(modality, tensors[rows_name], tensors.get(_DEEPSTACK), tokens, shape)
    if not bool((rows.abs() <= _LARGEST).all()):  # false for NaN
        raise _bad(modality, f"{rows_name} has values that are not finite, or beyond {_LARGEST:g}")
    array = rows.numpy()
    array.flags.writeable = False
    return array, grid


def check_times(given: Mapping[str, Any], patches: int, depth: int) -> tuple[float, tuple[float, ...]]:
    """Check the times of a video; return the seconds between temporal patches, and those at which each of them is.

    `patches`: how many there are. `depth`: frames of one. A time that is not given follows from the other one, or from
    two frames a second. Raises BadRequestError.
    """
    interval = _seconds(given, _INTERVAL, 1)
    times = _seconds(given, _TIMES, patches)
    if interval is not None:
        step = interval[0]
    else:
        step = (times[-1] - times[0]) / (patches - 1) if times and patches > 1 else _USUAL_INTERVAL_S
    if not step > 0:
        raise _bad(Modality.VIDEO, f"{_INTERVAL} is {step:g}; it must be above 0")
    if times is None:  # in the middle between a patch's first frame and its last
        times = tuple(step * (place + (depth - 1) / (2 * depth)) for place in range(patches))
    if any(later < earlier for earlier, later in pairwise(times)):
        raise _bad(Modality.VIDEO, f"{_TIMES} must not go back in time")
    return step, times


def _seconds(given: Mapping[str, Any], name: str, count: int) -> tuple[float, ...] | None:
    if name not in given:
        return None
    tensor = _tensor(Modality.VIDEO, name, given[name]).flatten()
    if not tensor.is_floating_point() or len(tensor) != count:
        raise _bad(
            Modality.VIDEO, f"{name} is {_describe(tensor)}; with this video_grid_thw it must be float32 [{count}]"
        )
    if not bool(((tensor >= 0) & (tensor <= _LATEST_S)).all()):
        raise _bad(Modality.VIDEO, f"{name} has seconds that are not between 0 and {_LATEST_S:g}")
    return tuple(tensor.tolist())


def _tensor(modality: Modality, name: str, value: Any) -> torch.Tensor:
    import torch

    try:
        return torch.as_tensor(value).detach().cpu()
    except (RuntimeError, TypeError, ValueError) as error:
        raise _bad(modality, f"{name} is no tensor: {error}") from None


def _check_grid(modality: Modality, tensor: torch.Tensor, limits: GridLimits) -> tuple[int, int, int]:
    name = f"{modality}_grid_thw"
    if _dtype(tensor) not in ("int64", "int32") or tuple(tensor.shape) not in ((1, 3), (3,)):
        what = "int64 [1, 3]: patches in time, height and width"
        raise _bad(modality, f"{name} is {_describe(tensor)}; it must be {what}")
    t, h, w = tensor.flatten().tolist()
    merge, video = limits.merge_size, modality is Modality.VIDEO
    if (t < 1 if video else t != 1) or h < merge or w < merge or h % merge or w % merge:
        one = "video's is 1 or more" if video else "picture's is 1"
        raise _bad(modality, f"{name} is {[t, h, w]}; a {one}, then height and width, multiples of {merge}")
    if video and t > limits.max_patches:
        raise _bad(
            modality,
            f"{name} is {[t, h, w]}, a video of {t} temporal patches; the limit is {limits.max_patches} (setting "
            "--max-video-frames)",
        )
    pixels = h * w * limits.patch_size**2
    if pixels > limits.max_pixels:
        raise _bad(
            modality,
            f"{name} is {[t, h, w]}, a picture of {pixels} pixels; the limit is {limits.max_pixels} (setting "
            "--max-pixels)",
        )
    return t, h, w


def _join(
    modality: Modality, rows: torch.Tensor, deepstack: torch.Tensor | None, tokens: int, shape: EmbedsShape
) -> torch.Tensor:
    """Return a float32 copy [tokens, width * (1 + deepstack)], contiguous, that shares no memory with the caller's."""
    import torch

    whole = shape.width * (1 + shape.deepstack)
    alone = [tokens, whole if deepstack is None else shape.width]
    _check_rows(modality, f"{modality}_embeds", rows, alone)
    if deepstack is None:
        return rows.to(torch.float32, copy=True).contiguous()
    _check_rows(modality, _DEEPSTACK, deepstack, [shape.deepstack, tokens, shape.width])
    return torch.cat([rows.float(), *deepstack.float()], dim=-1)


def _check_rows(modality: Modality, name: str, tensor: torch.Tensor, expected: list[int]) -> None:
    if _dtype(tensor) not in _DTYPES or list(tensor.shape) != expected:
        raise _bad(
            modality,
            f"{name} is {_describe(tensor)}; with this {modality}_grid_thw and this checkpoint it must be float32, "
            f"bfloat16 or float16 {expected}",
        )


def _describe(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)} {list(tensor.shape)}"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _bad(modality: Modality, message: str) -> BadRequestError:
    return BadRequestError(message, code=f"invalid_{modality}_embeds")
