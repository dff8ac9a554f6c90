"""Logprobs of rows of logits: of a token each, of the likeliest, and of tokens that were asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from vlmserve.executor.model_worker_batch import LogprobRows, PromptLogprobRows, RowLogprobs

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

    def to_host(self) -> RowLogprobs:
        """Waits for the device."""
        return RowLogprobs(
            logprobs=self.logprobs.cpu().numpy(),
            ranks=self.ranks.cpu().numpy(),
            top_ids=self.top_ids.cpu().numpy(),
            top_logprobs=self.top_logprobs.cpu().numpy(),
            asked=self.asked.cpu().numpy(),
        )


def row_logprobs(logits: torch.Tensor, targets: torch.Tensor, rows: LogprobRows) -> DeviceLogprobs:
    """logits: float32 [R, vocab]. targets: int64 [R], the token of each row that `logprobs` and `ranks` are of."""
    device = logits.device
    normal = _log_distribution(logits, rows)
    chosen = normal.gather(1, targets[:, None])
    width = max(int(rows.tops.max(initial=0)), 0)
    top_logprobs, top_ids = normal.topk(min(width, normal.shape[1]), dim=-1)
    asked = (torch.from_numpy(rows.asked_rows).to(device), torch.from_numpy(rows.asked_ids).to(device))
    return DeviceLogprobs(
        logprobs=chosen[:, 0],
        ranks=(normal > chosen).sum(dim=-1) + 1,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        asked=normal[asked],
    )


def prompt_logprobs(
    hidden: torch.Tensor, asked: PromptLogprobRows, compute_logits: Callable[[torch.Tensor], torch.Tensor], vocab: int
) -> DeviceLogprobs:
    """hidden: [N, hidden], of all tokens of a step. Tile by tile: the logits of a whole prompt may be gigabytes."""
    step = max(_TILE_BYTES // (4 * vocab), 1)
    tiles = []
    for start in range(0, len(asked.tokens), step):
        tile = slice(start, start + step)
        tokens = torch.from_numpy(asked.tokens[tile]).to(hidden.device)
        targets = torch.from_numpy(asked.targets[tile]).to(hidden.device)
        tiles.append(row_logprobs(compute_logits(hidden.index_select(0, tokens)), targets, _part(asked.rows, tile)))
    return tiles[0] if len(tiles) == 1 else _join(tiles)


def _log_distribution(logits: torch.Tensor, rows: LogprobRows) -> torch.Tensor:
    """log_softmax of logits / temperature, of the likeliest tokens only that have a mass of top_p."""
    if (rows.temperatures != 1).any():
        logits = logits / torch.from_numpy(rows.temperatures).to(logits.device)[:, None]
    normal = torch.log_softmax(logits, dim=-1)
    cut = np.flatnonzero(rows.top_ps < 1)
    if len(cut):
        index = torch.from_numpy(cut).to(logits.device)
        limit = torch.from_numpy(rows.top_ps[cut]).to(logits.device)[:, None]
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

    def wide(part: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(part, (0, width - part.shape[1]))

    return DeviceLogprobs(
        logprobs=torch.cat([tile.logprobs for tile in tiles]),
        ranks=torch.cat([tile.ranks for tile in tiles]),
        top_ids=torch.cat([wide(tile.top_ids) for tile in tiles]),
        top_logprobs=torch.cat([wide(tile.top_logprobs) for tile in tiles]),
        asked=torch.cat([tile.asked for tile in tiles]),
    )
