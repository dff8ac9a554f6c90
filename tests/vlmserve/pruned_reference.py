"""What `transformers` answers if tokens of a picture or clip are left out: before the tower, or behind it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tests import hf_env  # noqa: F401  (before transformers)

# isort: split
import numpy as np
import torch
from torch.nn import functional as F
from transformers.vision_utils import (
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from processors.pruning import kept_counts
from tests.vlmserve.reference import Answer, Reference

MERGE = 2


def encode(visual: Any, pixels: torch.Tensor, grid: torch.Tensor, kept: torch.Tensor) -> list[torch.Tensor]:
    """Embeddings of the kept places of one medium, and DeepStack's. kept: bool [places of the grid]."""
    patches = kept.repeat_interleave(MERGE**2)
    frames = kept.view(int(grid[0, 0]), -1).sum(1) * MERGE**2
    given: dict[str, Any] = {
        "position_ids": get_vision_position_ids(grid, MERGE)[patches],
        "cu_seqlens": F.pad(frames.cumsum(0), (1, 0)).int(),
    }
    if hasattr(visual, "pos_embed"):
        found = get_vision_interpolation_indices_and_weights(
            grid, visual.num_grid_per_side, "bilinear", True, spatial_merge_size=MERGE
        )
        given["interp_indices"], given["interp_weights"] = (part[patches] for part in found)
    if hasattr(visual, "window_size"):
        index, ends = get_vision_window_index(grid, MERGE, visual.window_size, visual.patch_size)
        there = kept[index]
        number = kept.cumsum(0) - 1
        counts = [int(there[a // 4 : b // 4].sum()) * 4 for a, b in itertools.pairwise(ends.tolist())]
        given["window_index"] = number[index[there]]
        given["cu_window_seqlens"] = torch.tensor([0, *np.cumsum([n for n in counts if n])]).int()
    out = visual(pixels[patches], grid_thw=grid, return_dict=True, **given)
    return [out.pooler_output, *getattr(out, "deepstack_features", [])]


def repeats(pixels: torch.Tensor, grid: tuple[int, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool [places]: what is encoded, and what of that stays; place by place."""
    t, rows, columns = grid[0], grid[1] // MERGE, grid[2] // MERGE
    places = pixels.reshape(t, rows, columns, -1)
    encoded, stays = torch.ones(2, t, rows, columns, dtype=torch.bool)
    for n in range(t):
        for y in range(rows):
            for x in range(columns):
                around = [(y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)]
                inside = all(0 <= b < rows and 0 <= a < columns for b, a in around)
                if inside and all(torch.equal(places[n, y, x], places[n, b, a]) for b, a in around):
                    encoded[n, y, x] = False
                stays[n, y, x] = not n or not torch.equal(places[n, y, x], places[n - 1, y, x])
        if not (encoded & stays)[n].any():
            encoded[n, 0, 0] = stays[n, 0, 0] = True
    return encoded.view(-1), stays.view(-1)[encoded.view(-1)]


def changed(rows: torch.Tensor, patches: int, rate: float) -> torch.Tensor:
    """bool [places]: the first temporal patch whole, of the others the tokens that change most."""
    each = rows.view(patches, -1, rows.shape[-1])
    kept = torch.zeros(each.shape[:2], dtype=torch.bool)
    for n, count in enumerate(kept_counts(patches, each.shape[1], rate) or [each.shape[1]] * patches):
        likeness = [float(F.cosine_similarity(a, b, dim=0)) for a, b in zip(each[n], each[max(n - 1, 0)], strict=True)]
        kept[n, sorted(range(len(likeness)), key=lambda at: (likeness[at], at))[:count]] = True
    return kept.view(-1)


class PrunedReference(Reference):
    """Of conversations with one picture or one clip."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tokens = 0  # of the medium, that stayed

    @torch.no_grad()
    def pruned(self, messages: list[dict], max_tokens: int, rate: float = 0.0) -> Answer:
        """rate: of EVS, for a clip; 0 leaves exact repeats out."""
        inputs, model = self._inputs(messages), self.model.model
        kind = "video" if inputs.get("video_grid_thw") is not None else "image"
        pixels = inputs["pixel_values_videos" if kind == "video" else "pixel_values"]
        grid = inputs[f"{kind}_grid_thw"]
        whole = torch.ones(int(grid.prod()) // MERGE**2, dtype=torch.bool)
        if rate:
            rows = encode(model.visual, pixels, grid, whole)
            kept = stays = changed(rows[0], int(grid[0, 0]), rate)
        else:
            kept, stays = repeats(pixels, tuple(grid[0].tolist()))
            rows = encode(model.visual, pixels, grid, kept)
            kept = kept.masked_scatter(kept, stays)
        rows = [part[stays] for part in rows]
        self.tokens = int(kept.sum())
        names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw", "second_per_grid_ts")
        given = {name: inputs[name] for name in names if inputs.get(name) is not None}
        if "second_per_grid_ts" in given:
            given["second_per_grid_ts"] = torch.as_tensor(given["second_per_grid_ts"])
        positions, _ = model.get_rope_index(**given)
        ids = inputs["input_ids"]
        pads = ids[0] == getattr(self.model.config, f"{kind}_token_id")
        there = ~pads
        there[pads] = kept
        embeds = model.get_input_embeddings()(ids)[:, there]
        embeds[0, pads[there]] = rows[0]
        after = int(positions.max()) + 1
        positions, seen = positions[..., there], pads[there]
        found: list[tuple[int, float, float]] = []
        for _ in range(max_tokens):
            deep = {}
            if rows[1:]:
                deep = {"visual_pos_masks": seen[None], "deepstack_visual_embeds": rows[1:]}
            out = model.language_model(inputs_embeds=embeds.clone(), position_ids=positions, use_cache=False, **deep)
            logprobs = torch.log_softmax(self.model.lm_head(out.last_hidden_state[0, -1]).float(), -1)
            best = logprobs.topk(2)
            found.append((int(best.indices[0]), float(best.values[0]), float(best.values[0] - best.values[1])))
            token = model.get_input_embeddings()(best.indices[None, :1])
            embeds = torch.cat([embeds, token], dim=1)
            positions = torch.cat([positions, torch.full_like(positions[..., :1], after)], dim=-1)
            after += 1
            seen = torch.cat([seen, torch.zeros(1, dtype=torch.bool)])
        columns = [list(column) for column in zip(*found, strict=True)]
        return Answer(int(there.sum()), *columns)
