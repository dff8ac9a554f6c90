"""The parts of the families' towers, and the cost of encoding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from vision.towers.attention import attention_cost, segment_attention
from vision.towers.grids import (
    Grid,
    LayerInputs,
    Segments,
    StaticSegments,
    check_grids,
    frame_lengths,
    patch_coordinates,
)
from vision.towers.pieces import (
    TORCH_ROWS,
    UNLIMITED,
    Kind,
    Piece,
    PieceLimits,
    Steps,
    even_tiles,
    finish,
    limited_tiles,
)
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.compute.activations import Activation, activation
from vlmserve_common.compute.linear import Linear, PatchProjection
from vlmserve_common.compute.lora import ActiveAdapters
from vlmserve_common.compute.rotary import Rotation, inverse_frequencies, rotation
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.errors import CheckpointError

if TYPE_CHECKING:
    from vision.towers.audio import AudioTower
    from vision.towers.tower_graphs import CapturedTower

NORM_EPS = 1e-6
# Most rows that go through products together: the inner rows of an MLP are several times as wide.
_MOST_ROWS = 2048


def _linears(module: nn.Module) -> list[Linear]:
    return [child for child in module.modules() if isinstance(child, Linear)]


def product_flops(module: nn.Module) -> float:
    """Return the floating-point operations of a module's products with weights, for one row.

    Call it before the weights are packed for the operators.
    """
    return sum(2.0 * linear.weight.numel() for linear in _linears(module) if linear.weight is not None)


def product_rows(
    module: nn.Module,
    compute: Callable[[slice], torch.Tensor],
    count: int,
    flops: float,
    limits: PieceLimits,
    out: torch.Tensor | None = None,
) -> Steps[torch.Tensor]:
    """Compute `count` rows by compute(rows), some at a time; return all of them, in `out` if that is given.

    `module`: has the products. `flops`: operations of these for a row.
    """
    plain = [linear.weight for linear in _linears(module) if linear.weight is not None]
    tiles: Iterable[slice]
    if not plain:
        tiles = limited_tiles(count, flops, limits, Kind.PRODUCT, most=_MOST_ROWS)
    else:
        tiles = even_tiles(count, -(-count // -(-count // TORCH_ROWS)) if plain[0].is_cpu else count)
    for rows in tiles:
        yield Piece(Kind.PRODUCT, flops * (rows.stop - rows.start))
        part = compute(rows)
        if out is None and rows.stop - rows.start == count:
            return part
        if out is None:
            out = part.new_empty(count, *part.shape[1:])
        out[rows] = part
        del part  # not kept while the work waits
    assert out is not None
    return out


class VisionTower(nn.Module):
    """A vision tower, as the encoder sees it.

    `spatial_merge_size`: patches merged per side. `out_hidden_size`: width of the main embeddings.
    `num_deepstack_layers`: embeddings of that width behind the main one, one for each tapped layer. `full_attention`:
    layers that attend to a whole temporal patch instead of windows; None for all. `window_patches`: in a whole window.
    `rotary`: positions. `adapters`: those that may change it. `is_there`: whether the model has one. `ears`: the tower
    for sounds, whose embeddings have `out_hidden_size` elements, too.
    """

    is_there: bool = True
    spatial_merge_size: int
    out_hidden_size: int
    num_deepstack_layers: int = 0
    full_attention: frozenset[int] | None = None
    window_patches: int = 0
    _graphs: CapturedTower | None = None
    adapters: ActiveAdapters | None = None
    ears: AudioTower | None

    def __init__(
        self,
        config: TowerConfig,
        make_norm: Callable[[], nn.Module],
        make_mlp: Callable[[], nn.Module],
        merger: PatchMerger,
        *,
        embed_bias: bool = False,
    ) -> None:
        super().__init__()
        self.ears = None
        self.spatial_merge_size = config.merge_size
        self.out_hidden_size = config.out_size
        self.patch_embed = PatchEmbed(config.kernel, config.size, bias=embed_bias)
        self.blocks = nn.ModuleList(VisionBlock(config, make_norm, make_mlp()) for _ in range(config.depth))
        self.merger = merger
        self.rotary = AxialRotary(config.head_dim, config.rope_theta)

    def forward(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid], kept: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Encode a packed batch. Every embedding depends on its own temporal patch only.

        `pixel_values`: float32 [P, channels * frames * patch**2], all items' patches in the processor's order.
        `grid_thw`: every item's patches in time, height and width. `kept`: which of them are there, see
        `grids.kept_patches`; they keep their positions, and attend to each other. Returns embeddings [P / merge**2,
        out_hidden_size * (1 + num_deepstack_layers)] in the tower's dtype. Raises ValueError when grids and pixels do
        not fit.
        """
        return finish(self.steps(pixel_values, grid_thw, UNLIMITED, kept))

    def steps(
        self,
        pixel_values: torch.Tensor,
        grid_thw: Sequence[Grid],
        limits: PieceLimits,
        kept: torch.Tensor | None = None,
    ) -> Steps[torch.Tensor]:
        """Run `forward` in pieces. The bits do not depend on the limits."""
        check_grids(grid_thw, len(pixel_values), self.spatial_merge_size, kept)
        inputs = yield from self.input_steps(pixel_values, grid_thw, limits, kept)
        changed = self.adapters is not None and self.adapters.adapters
        if self._graphs is not None and not changed and self._graphs.fits(inputs):
            yield Piece(Kind.PRODUCT, len(inputs.x) * sum(block.flops for block in self.layers()))
            embeds = self._graphs.run(inputs)
        else:
            embeds = yield from self.layer_steps(inputs, limits)
        return embeds if inputs.order is None else torch.empty_like(embeds).index_copy_(0, inputs.order, embeds)

    def attach_graphs(self, graphs: CapturedTower) -> None:
        """Replay the layers of batches that fit from now on."""
        self._graphs = graphs

    def input_steps(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid], limits: PieceLimits, kept: torch.Tensor | None
    ) -> Steps[LayerInputs]:
        """Prepare the inputs of the layers: data that depend on the grids, and the embedded patches."""
        x = yield from self.token_steps(pixel_values, grid_thw, limits, kept)
        rotary = self.rotary(patch_coordinates(grid_thw, self.spatial_merge_size, kept), x.device)
        return LayerInputs(x=x, rotary=rotary, segments=(Segments(frame_lengths(grid_thw, kept), x.device),))

    def token_steps(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid], limits: PieceLimits, kept: torch.Tensor | None
    ) -> Steps[torch.Tensor]:
        """Embed the patches: [P, size]."""
        return (yield from self.patch_embed.steps(pixel_values, limits))

    def layer_steps(self, inputs: LayerInputs, limits: PieceLimits) -> Steps[torch.Tensor]:
        """Run all blocks and mergers; return embeddings [P / merge**2, out_hidden_size * (1 + num_deepstack_layers)].

        The first segments are whole frames. With windows, the second ones are for blocks without full attention.
        """
        x = inputs.x
        for index, block in enumerate(self.layers()):
            full = self.full_attention is None or index in self.full_attention
            yield from block.steps(x, inputs.rotary, inputs.segments[0 if full else 1], limits)
        out = x.new_empty(len(x) // self.spatial_merge_size**2, self.out_hidden_size)
        yield from self.merger.steps(x, limits, out)
        return out

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it computes in."""
        return self.patch_embed.proj.dtype

    @property
    def row_width(self) -> int:
        """The elements of an embedding, DeepStack's included."""
        return self.out_hidden_size * (1 + self.num_deepstack_layers)

    @property
    def head_dim(self) -> int:
        return self.patch_embed.width // self.layers()[0].attn.num_heads

    def layers(self) -> list[VisionBlock]:
        """Return the blocks, first to last."""
        return [block for block in self.blocks if isinstance(block, VisionBlock)]

    def mergers(self) -> list[PatchMerger]:
        """Return all modules that make embeddings."""
        return [self.merger]


class PatchEmbed(nn.Module):
    """Flattened patches -> tokens."""

    def __init__(self, kernel: tuple[int, int, int, int], size: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(kernel, size, bias=bias)
        self.width = size
        self.flops = product_flops(self)

    def steps(self, pixel_values: torch.Tensor, limits: PieceLimits) -> Steps[torch.Tensor]:
        """float32 [P, patch elements] -> [P, size] in the weights' dtype."""

        def embed(rows: slice) -> torch.Tensor:
            return self.proj(pixel_values[rows].to(self.proj.dtype))

        return (yield from product_rows(self, embed, len(pixel_values), self.flops, limits))


class AxialRotary:
    """Two-dimensional rotary positions: half of the frequencies turn with the row, half with the column."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self._frequencies = inverse_frequencies(head_dim // 2, theta)

    def __call__(self, coordinates: torch.Tensor, device: torch.device) -> Rotation:
        """Convert coordinates int64 [2, P] on the CPU to float32 cos and signed sin [P, 1, head_dim] on the device."""
        angles = coordinates[:, :, None].float() * self._frequencies
        cos, sin = rotation(torch.cat((angles[0], angles[1]), dim=-1), torch.float32)
        return to_device(cos, device), to_device(sin, device)


class VisionAttention(nn.Module):
    """Full attention inside each segment."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(size, 3 * size, bias=True)
        self.proj = Linear(size, size, bias=True)
        self._qkv_flops, self._proj_flops = product_flops(self.qkv), product_flops(self.proj)

    def steps(
        self,
        x: torch.Tensor,
        norm: nn.Module,
        rotary: Rotation,
        segments: Segments | StaticSegments,
        limits: PieceLimits,
    ) -> Steps[None]:
        """Add attention over norm(x) to x [P, size]."""

        def project(rows: slice) -> torch.Tensor:
            return self.qkv(norm(x[rows])).unflatten(1, (3, self.num_heads, -1))

        def add(rows: slice) -> torch.Tensor:
            return self.proj(attended[rows].flatten(1), residual=x[rows])

        qkv = yield from product_rows(self.qkv, project, len(x), self._qkv_flops, limits)
        attended = yield from segment_attention(qkv, rotary, segments, limits)
        del qkv
        yield from product_rows(self.proj, add, len(x), self._proj_flops, limits, out=x)


class VisionMLP(nn.Module):
    """fc2(act(fc1(x))) with the family's layer names."""

    def __init__(self, names: tuple[str, str], sizes: tuple[int, int, int], act: Activation) -> None:
        super().__init__()
        self._names = names
        for name, size, out in zip(names, sizes, sizes[1:], strict=False):
            self.add_module(name, Linear(size, out, bias=True))
        self.act = act

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [P, sizes[0]] to [P, sizes[2]], added to `residual`."""
        first, second = (self.get_submodule(name) for name in self._names)
        return second(first(x, self.act), residual=residual)


class VisionBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: TowerConfig, make_norm: Callable[[], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = make_norm()
        self.norm2 = make_norm()
        self.attn = VisionAttention(config.size, config.num_heads)
        self.mlp = mlp
        self._mlp_flops = product_flops(mlp)
        self.flops = product_flops(self.attn) + self._mlp_flops

    def steps(
        self, x: torch.Tensor, rotary: Rotation, segments: Segments | StaticSegments, limits: PieceLimits
    ) -> Steps[None]:
        """Change x [P, size] to the block's output."""

        def add(rows: slice) -> torch.Tensor:
            out: torch.Tensor = self.mlp(self.norm2(x[rows]), residual=x[rows])
            return out

        yield from self.attn.steps(x, self.norm1, rotary, segments, limits)
        yield from product_rows(self.mlp, add, len(x), self._mlp_flops, limits, out=x)


class PatchMerger(nn.Module):
    """Merges neighbouring tokens (merge x merge) into one embedding.

    `flops`: operations of one embedding's products; subclasses set it.
    """

    flops: float

    def __init__(self, config: TowerConfig) -> None:
        super().__init__()
        self._joined = config.merge_size**2
        self._merged_size = config.size * self._joined

    def steps(self, x: torch.Tensor, limits: PieceLimits, out: torch.Tensor) -> Steps[None]:
        """Merge x [P, size] into out [P / joined, out_size], which may be some columns of a tensor."""

        def merge(rows: slice) -> torch.Tensor:
            merged: torch.Tensor = self(x[rows.start * self._joined : rows.stop * self._joined])
            return merged

        yield from product_rows(self, merge, len(out), self.flops, limits, out=out)


class QwenPatchMerger(PatchMerger):
    """The merger of Qwen2-VL and Qwen2.5-VL."""

    def __init__(self, config: TowerConfig, norm: nn.Module) -> None:
        super().__init__(config)
        self.ln_q = norm
        self.mlp = VisionMLP(("0", "2"), (self._merged_size, self._merged_size, config.out_size), activation("gelu"))
        self.flops = product_flops(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [P, size] -> [P / joined, out_size]."""
        return self.mlp(self.ln_q(x).view(-1, self._merged_size))


@dataclass(frozen=True, kw_only=True)
class TowerConfig:
    """The part of `vision_config` that all towers share.

    `kernel`: (channels, frames, height, width) of a patch. `size`: the tower's width. `out_size`: its embeddings'
    width.
    """

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
        """Read the fields. Raises CheckpointError for missing or impossible values."""
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


def encoding_flops(tower: VisionTower, patches: int) -> float:
    """Return the floating-point operations for a temporal patch of so many patches. The tower may be on the meta
    device.

    Products with weights and attention over the whole temporal patch are counted. Attention over windows, norms and
    rotations are small beside these and left out.
    """
    return _products(tower, patches) + 4.0 * _full_layers(tower) * _width(tower) * patches**2


def encoding_cost(tower: VisionTower, patches: int) -> Mapping[Kind, float]:
    """Return the total cost of the pieces of `VisionTower.steps` for a temporal patch of so many patches.

    Small windows at its edges count as whole ones, and preparing values is left out.
    """
    full, width = _full_layers(tower), _width(tower)
    attention = full * attention_cost(patches, patches, width)
    windowed = len(tower.blocks) - full
    if windowed:
        attention += windowed * attention_cost(patches, min(patches, tower.window_patches), width)
    return {Kind.PRODUCT: _products(tower, patches), Kind.ATTENTION: attention}


def _products(tower: VisionTower, patches: int) -> float:
    layers = tower.patch_embed.flops + sum(block.flops for block in tower.layers())
    return layers * patches + sum(merger.flops for merger in tower.mergers()) * patches / tower.spatial_merge_size**2


def _full_layers(tower: VisionTower) -> int:
    return len(tower.blocks) if tower.full_attention is None else len(tower.full_attention)


def _width(tower: VisionTower) -> int:
    return tower.patch_embed.width
