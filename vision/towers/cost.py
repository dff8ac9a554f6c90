"""What a picture costs a tower, in arithmetic."""

from __future__ import annotations

from vision.towers.blocks import VisionTower

_PER_PATCH = ("blocks.", "patch_embed.")
_LOOKED_UP = ("pos_embed.",)


def encoding_flops(tower: VisionTower, patches: int) -> float:
    """Floating-point operations for a temporal patch of so many patches: of products with weights, and of attention
    over the whole of it. What windows attend to, norms and rotations are small beside these and left out.

    The tower may be on the meta device.
    """
    merged = patches / tower.spatial_merge_size**2
    weights = {name: weight for name, weight in tower.named_parameters() if weight.ndim == 2}
    products = sum(
        2 * weight.numel() * (patches if name.startswith(_PER_PATCH) else merged)
        for name, weight in weights.items()
        if not name.startswith(_LOOKED_UP)
    )
    layers = {name.split(".")[1] for name in weights if name.startswith("blocks.")}
    full = len(layers) if tower.num_full_attention is None else tower.num_full_attention
    width = weights["patch_embed.proj.weight"].shape[0]
    return products + 4.0 * full * width * patches**2
