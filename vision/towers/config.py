"""The part of `vision_config` that all towers read alike."""

from __future__ import annotations

from dataclasses import dataclass

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """kernel: (channels, frames, height, width) of a patch. size: the tower's width; out_size: of its embeddings."""

    depth: int
    size: int
    out_size: int
    num_heads: int
    head_dim: int
    merge_size: int
    kernel: tuple[int, int, int, int]
    rope_theta: float

    @classmethod
    def from_fields(
        cls, fields: Fields, *, size_field: str = "hidden_size", out_size_field: str = "out_hidden_size"
    ) -> TowerConfig:
        """Raises CheckpointError for missing or impossible values."""
        size = fields.positive(size_field)
        num_heads = fields.positive("num_heads")
        if size % num_heads or size // num_heads % 4:
            raise CheckpointError(
                f"{fields.where}: {size_field} {size} over {num_heads} heads: a head's dimensions must be a "
                "multiple of 4"
            )
        patch = fields.positive("patch_size")
        return cls(
            depth=fields.positive("depth"),
            size=size,
            out_size=fields.positive(out_size_field),
            num_heads=num_heads,
            head_dim=size // num_heads,
            merge_size=fields.positive("spatial_merge_size", 2),
            # published Qwen2-VL configurations say `in_chans`
            kernel=(
                fields.positive("in_channels", fields.positive("in_chans", 3)),
                fields.positive("temporal_patch_size", 2),
                patch,
                patch,
            ),
            rope_theta=fields.section("rope_parameters").number("rope_theta", 10000.0),
        )
