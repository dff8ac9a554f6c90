"""Logprobs of rows of logits: of one token each, of the likeliest tokens, and of tokens that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch.nn.functional import pad

from vlmserve.executor.model_worker_batch import LogprobRows, PromptLogprobRows, RowLogprobs
from vlmserve_common.compute.transfers import Upload, transfers_for

_TILE_BYTES = 64 * 2**20
"""Logits of so many rows of a prompt are there at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLogprobs:
    """`RowLogprobs` on the device."""

    logprobs: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor
    asked: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that `on_host` takes, once they are on the host."""
        return tuple(getattr(self, name) for name in _NAMES)

    @staticmethod
    def on_host(arrays: Sequence[np.ndarray]) -> RowLogprobs:
        """Make `RowLogprobs` of the arrays of `tensors`."""
        return RowLogprobs(**dict(zip(_NAMES, arrays, strict=True)))


_NAMES = tuple(field.name for field in fields(DeviceLogprobs))


class LogprobInputs:
    """A request for logprobs of rows, on its way to the device. width: how many of the likeliest tokens are named."""

    def __init__(self, rows: LogprobRows, upload: Upload) -> None:
        self.width = max(int(rows.tops.max(initial=0)), 0)
        cut = np.flatnonzero(rows.top_ps < 1)
        self.temperatures = upload.add(rows.temperatures) if (rows.temperatures != 1).any() else None
        self.cut = (upload.add(cut), upload.add(rows.top_ps[cut])) if len(cut) else None
        asked = len(rows.asked_rows) > 0
        self.asked = (upload.add(rows.asked_rows), upload.add(rows.asked_ids)) if asked else None


class PromptTile:
    """A part of the prompt tokens whose logprobs are wanted, on its way to the device."""

    def __init__(self, asked: PromptLogprobRows, tile: slice, upload: Upload) -> None:
        self.tokens = upload.add(asked.tokens[tile])
        self.targets = upload.add(asked.targets[tile])
        self.inputs = LogprobInputs(_part(asked.rows, tile), upload)


def row_logprobs(logits: torch.Tensor, targets: torch.Tensor, inputs: LogprobInputs) -> DeviceLogprobs:
    """Compute logprobs of logits float32 [R, vocab]. targets: int64 [R], the token of each row that `logprobs` and
    `ranks` are of."""
    normal = _log_distribution(logits, inputs)
    chosen = normal.gather(1, targets[:, None])
    top_logprobs, top_ids = normal.topk(min(inputs.width, normal.shape[1]), dim=-1)
    return DeviceLogprobs(
        logprobs=chosen[:, 0],
        ranks=(normal > chosen).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        asked=normal.new_zeros(0) if inputs.asked is None else normal[tuple(part.tensor for part in inputs.asked)],
    )


def prompt_tiles(asked: PromptLogprobRows, vocab: int, upload: Upload) -> list[PromptTile]:
    """Divide prompt tokens into tiles: the logits of a whole prompt may be gigabytes."""
    step = max(_TILE_BYTES // (4 * vocab), 1)
    return [PromptTile(asked, slice(start, start + step), upload) for start in range(0, len(asked.tokens), step)]


def sent_tiles(asked: PromptLogprobRows, vocab: int, device: torch.device) -> list[PromptTile]:
    """Send `prompt_tiles` by themselves, and return them."""
    upload = Upload(transfers_for(device))
    tiles = prompt_tiles(asked, vocab, upload)
    upload.send()
    return tiles


def prompt_logprobs(
    hidden: torch.Tensor, tiles: Sequence[PromptTile], compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> DeviceLogprobs:
    """Compute a prompt's logprobs, tile by tile. hidden: [N, hidden], of all tokens of a step. tiles: at least one,
    sent."""
    found = [
        row_logprobs(compute_logits(hidden.index_select(0, tile.tokens.tensor)), tile.targets.tensor, tile.inputs)
        for tile in tiles
    ]
    return found[0] if len(found) == 1 else _join(found)


def _log_distribution(logits: torch.Tensor, inputs: LogprobInputs) -> torch.Tensor:
    """Return log_softmax(logits / temperature), over only the likeliest tokens with a mass of top_p."""
    if inputs.temperatures is not None:
        logits = logits / inputs.temperatures.tensor[:, None]
    normal = torch.log_softmax(logits, dim=-1)
    if inputs.cut is not None:
        index, limit = inputs.cut[0].tensor, inputs.cut[1].tensor[:, None]
        values, ids = normal[index].sort(-1, descending=True)
        before = values.exp().cumsum(-1) - values.exp()  # mass of the better tokens
        values = torch.log_softmax(values.masked_fill((before > 0) & (before >= limit), -torch.inf), dim=-1)
        normal[index] = torch.empty_like(values).scatter_(1, ids, values)
    return normal


def _part(rows: LogprobRows, tile: slice) -> LogprobRows:
    first, last = np.searchsorted(rows.asked_rows, [tile.start, tile.stop])
    return LogprobRows(
        tops=rows.tops[tile],
        temperatures=rows.temperatures[tile],
        top_ps=rows.top_ps[tile],
        asked_rows=rows.asked_rows[first:last] - tile.start,
        asked_ids=rows.asked_ids[first:last],
    )


def _join(tiles: list[DeviceLogprobs]) -> DeviceLogprobs:
    width = max(tile.top_ids.shape[1] for tile in tiles)
    parts = ([getattr(tile, name) for tile in tiles] for name in _NAMES)
    # of rows of likeliest tokens, all as many
    wide = ([pad(one, (0, width - one.shape[1])) if one.ndim > 1 else one for one in part] for part in parts)
    return DeviceLogprobs(**dict(zip(_NAMES, map(torch.cat, wide), strict=True)))
