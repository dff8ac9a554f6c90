"""The text decoder that the families share. Each family adds its own attention layer and rotary positions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import nn

from vlmserve.models.attention.base import ForwardBatch, Projected, RadixAttention, RunLayers, position_and_store
from vlmserve.models.config import ModelConfig
from vlmserve_common.checkpoint.weights import WeightRules
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.experts import SparseMLP, pack_experts
from vlmserve_common.compute.layers import Embedding, GatedMLP, RMSNorm, VocabEmbedding
from vlmserve_common.compute.linear import MergedLinear, pack_linears, row_linear
from vlmserve_common.compute.lora import ActiveAdapters, AdaptedLayers
from vlmserve_common.compute.rotary import MRotary, Rotation
from vlmserve_common.compute.shard import Cut
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.attention import HeadNorms
from vlmserve_common.kernels.decoder import DecoderLayers, LayerWeights, MLPWeights
from vlmserve_common.kernels.quantized import Mode


class DecoderAttention(nn.Module):
    """Grouped-query attention over the KV cache. Subclasses may normalise heads of q and k: `norms`. in_features: by
    default the hidden size."""

    def __init__(
        self,
        config: ModelConfig,
        comm: Communicator,
        layer_id: int,
        *,
        qkv_bias: bool,
        out_bias: bool,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, comm, own = config.head_dim, comm.attention, config.of_part()
        shard = comm.shard
        q_size, what = config.num_heads * config.head_dim, "num_attention_heads * head_dim"
        q, kv = shard.cut(q_size, what), shard.cut_kv(config.num_kv_heads, config.head_dim)
        parts: dict[str, int | Cut] = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if shard.is_whole:
            parts = {"q_proj": q.size, "k_proj": kv.size, "v_proj": kv.size}
        self.qkv_proj = MergedLinear(in_features or config.hidden_size, parts, bias=qkv_bias)
        self.o_proj = row_linear(q_size, config.hidden_size, bias=out_bias, comm=comm, what=what)
        window = config.window if config.own_layers.start + layer_id in config.windowed else 0
        self.attn = RadixAttention(
            own.num_heads, config.head_dim, config.head_dim**-0.5, own.num_kv_heads, layer_id, window=window
        )

    def norms(self) -> HeadNorms | None:
        """Return the norms that heads of q and k go through before they are turned; None without norms."""
        return None

    def divide_keys(self, by: float) -> bool:
        """Divide keys by a power of two, and multiply queries by it, in the weights. Return False if that is
        impossible."""
        norms = self.norms()
        if norms is not None:  # behind which nothing is left of a factor before
            norms.q_weight.mul_(by)
            norms.k_weight.div_(by)
            return True
        return self.qkv_proj.scale_parts({"q_proj": by, "k_proj": 1 / by})

    def divide_values(self, by: float) -> bool:
        """Divide values by a power of two, and multiply attention's output by it, in the weights. Return False if that
        is impossible."""
        if self.qkv_proj.weight is None or self.o_proj.weight is None:
            return False
        return self.qkv_proj.scale_parts({"v_proj": 1 / by}) and self.o_proj.scale(by)

    def forward(
        self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden], added to `residual`."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        return self.o_proj(self.attn(qkv, rotary, self.norms(), forward_batch), residual=residual)

    def store(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> None:
        """Write the keys and values of x [N, in_features] to the cache, and attend to nothing."""
        qkv = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        position_and_store(Projected(qkv, rotary, self.norms()), self.attn, forward_batch)


class DecoderLayer(nn.Module):
    """Pre-norm transformer layer."""

    def __init__(self, config: ModelConfig, self_attn: DecoderAttention, mlp: GatedMLP | SparseMLP) -> None:
        super().__init__()
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """x [N, hidden] -> [N, hidden], a new tensor."""
        x = self.self_attn(self.input_layernorm(x), rotary, forward_batch, residual=x)
        return self.mlp(self.post_attention_layernorm(x), residual=x)

    def forward_pending(
        self, x: torch.Tensor, pending: torch.Tensor | None, rotary: Rotation, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Compute `forward` of x + pending. The result is still to be added to x, which the next norm does in the same
        launch. pending: the result of the layer before."""
        normed = self.input_layernorm(x) if pending is None else self.input_layernorm.add(pending, x)
        attended = self.self_attn(normed, rotary, forward_batch)
        return self.mlp(self.post_attention_layernorm.add(attended, x))

    def packed(self) -> LayerWeights | None:
        """Return the weights for operators that compute whole layers; None unless all of them are packed."""
        attention, mlp = self.self_attn, _packed_mlp(self.mlp)
        qkv, out = attention.qkv_proj.packed, attention.o_proj.packed
        if qkv is None or out is None or mlp is None or getattr(attention.o_proj, "sum_bias", None) is not None:
            return None
        return LayerWeights(
            attention_norm=self.input_layernorm.weight,
            mlp_norm=self.post_attention_layernorm.weight,
            head_norms=attention.norms(),
            qkv=qkv,
            out=out,
            mlp=mlp,
            window=attention.attn.window,
        )

    def product_names(self) -> tuple[str, str, str, str]:
        """Return the names by which adapters find the products of `packed`; "" for experts."""
        mlp = self.mlp
        products = [self.self_attn.qkv_proj, self.self_attn.o_proj]
        products += [] if isinstance(mlp, SparseMLP) else [mlp.gate_up_proj, mlp.down_proj]
        names = [one.adapters[1] if one.adapters is not None else "" for one in products]
        qkv, out, gate_up, down = [*names, "", ""][:4]
        return qkv, out, gate_up, down


def _packed_mlp(mlp: GatedMLP | SparseMLP) -> MLPWeights | None:
    if isinstance(mlp, SparseMLP):
        if mlp.gate.packed is None or mlp.experts.packed is None:
            return None
        first = mlp.first_expert
        if first is None:
            return None
        gate_up, down = mlp.experts.packed
        return MLPWeights(gate_up=gate_up, down=down, router=mlp.gate.packed, chosen=mlp.gate.chosen, first=first)
    if mlp.gate_up_proj.packed is None or mlp.down_proj.packed is None:
        return None
    return MLPWeights(gate_up=mlp.gate_up_proj.packed, down=mlp.down_proj.packed)


def make_mlp(config: ModelConfig, comm: Communicator, layer_id: int) -> GatedMLP | SparseMLP:
    """Make a layer's MLP, sparse or dense as the configuration says."""
    size, act, experts = config.hidden_size, activation(config.hidden_act), config.experts
    if experts is not None and layer_id in experts.sparse_layers:
        return SparseMLP(size, experts.intermediate_size, experts.count, experts.chosen, act, comm)
    return GatedMLP(size, config.intermediate_size, act, bias=False, comm=comm)


def make_embedding(config: ModelConfig, comm: Communicator) -> Embedding | VocabEmbedding | None:
    """Make the embedding of the first stage, and of the last one if it is the head, too, or if what guesses there needs
    it; None for other stages."""
    stage = comm.shard.stage
    if not stage.is_first and not (stage.is_last and (config.tie_word_embeddings or config.embeds_last)):
        return None
    if comm.shard.is_whole:
        return Embedding(config.vocab_size, config.hidden_size)
    return VocabEmbedding(config.vocab_size, config.hidden_size, comm)


class StageLayers(nn.ModuleList):
    """A pipeline stage's layers, from number `first` on of `whole`. Their weights are named by these numbers, as in the
    checkpoint; an index counts from the first layer here."""

    def __init__(self, layers: Iterable[nn.Module], *, first: int, whole: int) -> None:
        super().__init__()
        self.first, self.whole = first, whole
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def rules(self, rules: WeightRules) -> WeightRules:
        """Extend the whole model's `rules` so that tensors of other stages are passed over. What this stage needs is a
        parameter, and so never ignored."""
        others = [str(number) for number in range(self.whole) if not 0 <= number - self.first < len(self)]
        if not others:
            return rules
        elsewhere = (
            rf"\blayers\.(?:{'|'.join(others)})\.",
            r"\bembed_tokens\.weight$",
            r"(?:^|[._])model\.norm\.weight$",
            r"(?:^|[._])model\.hyper_connection_mixer\.",
        )
        return replace(rules, ignored=(*rules.ignored, *elsewhere))


class Taps(Protocol):
    """Reads the input of some layers, once all of them are computed."""

    def write(self, tapped: torch.Tensor, forward_batch: ForwardBatch) -> None:
        """Take what is `tapped` of a step; see `ForwardBatch`."""


class Decoder(nn.Module):
    """Embedding, layers and final norm, or a pipeline stage's part of these.

    layers: those here, in order. norm: the final one, of the last stage only. rotary: positions -> the angles that
    attention layers turn by. tapped, taps: see `tap`. adapters: see `attach_adapters`.
    """

    def __init__(
        self, config: ModelConfig, comm: Communicator, layers: Iterable[nn.Module], norm: nn.Module, rotary: MRotary
    ) -> None:
        super().__init__()
        part = config.of_part()
        self.embed_tokens = make_embedding(config, comm)
        self.layers = StageLayers(layers, first=config.own_layers.start, whole=config.num_layers)
        self.norm = norm if comm.shard.stage.is_last else None
        self._rotary = rotary
        self.tapped: tuple[int, ...] = ()
        self._tapped_here: dict[int, int] = {}
        self.taps: Taps | None = None
        self.adapters: ActiveAdapters | None = None
        self._adapted: AdaptedLayers | None = None
        self._comm = comm
        self._packed: DecoderLayers | None = None
        self._whole_layers = partial(
            DecoderLayers,
            heads=part.num_heads,
            kv_heads=part.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            act=config.hidden_act,
        )

    def tap(self, layers: tuple[int, ...], taps: Taps | None = None) -> None:
        """Keep the input of these layers of the whole model, ascending, in each step. The number of all layers stands
        for the output of the last one. taps: reads them, in the last stage."""
        first, is_last = self.layers.first, self.norm is not None
        here = range(first, first + len(self.layers) + is_last)
        self.tapped, self.taps = layers, taps
        self._tapped_here = {layer - first: place for place, layer in enumerate(layers) if layer in here}

    @property
    def num_tapped(self) -> tuple[int, int]:
        """The numbers of layers that are tapped before this stage, and up to its end."""
        first = self.layers.first
        return bisect_left(self.tapped, first), bisect_left(self.tapped, first + len(self.layers))

    def pack(self, mode: Mode | None = None) -> None:
        """Lay all weights of the layers out for this process's operators; see `Linear.pack`."""
        pack_linears(self, mode)
        pack_experts(self, mode)
        packed = [layer.packed() for layer in self.layers if isinstance(layer, DecoderLayer)]
        layers = [layer for layer in packed if layer is not None]
        together = self._comm.collectives
        sums = None if together is None else together.in_operators()
        # operators add up what all have, and exchange no tokens
        adds_up = self._comm.tokens is None and (together is None or sums is not None)
        all_packed = len(layers) == len(self.layers)
        self._packed = self._whole_layers(layers, sums) if adds_up and all_packed else None
        self._adapted = None
        if self.adapters is not None:
            self.attach_adapters(self.adapters)

    def attach_adapters(self, adapters: ActiveAdapters) -> None:
        """Let these adapters change the layers from now on."""
        self.adapters = adapters
        if self._packed is not None:
            self._adapted = self._packed.adapters = AdaptedLayers(
                adapters, [cast(DecoderLayer, layer).product_names() for layer in self.layers]
            )

    def forward(
        self,
        input_embeds: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        deepstack_index: torch.Tensor | None = None,
        deepstack_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute final normalised hidden states [N, hidden] from input_embeds [N, hidden] and positions int64 [3, N].

        Without the last stage, the result is the output of the last layer here. input_embeds may be overwritten; a
        later stage is given the output of the stage before. deepstack_embeds [layers, R, hidden] are added to tokens
        `deepstack_index` int64 [R] behind the first layers, one behind each (DeepStack, arXiv:2406.04334). Rows beyond
        the layers here are for the next stage.
        """
        run = self._run_layers(self._rotary(positions), forward_batch)
        x, done = input_embeds, 0
        deepstack = () if deepstack_embeds is None else deepstack_embeds[: len(self.layers)]
        tapped = x.new_empty((len(self.tapped), *x.shape)) if forward_batch.tapped is None else forward_batch.tapped
        for stop in sorted({*range(1, len(deepstack) + 1), *self._tapped_here, len(self.layers)}):
            if stop > done:
                x = run(x, done, stop)
            if deepstack_index is not None and 0 < stop <= len(deepstack):
                x = x.index_add_(0, deepstack_index, deepstack[stop - 1])
            if stop in self._tapped_here:
                tapped[self._tapped_here[stop]] = x
            done = stop
        if self.taps is not None:
            self.taps.write(tapped, forward_batch)
        return x if self.norm is None else self.norm(x)

    def join(self) -> None:
        """Join the collectives of other groups' steps while this group has no tokens."""
        assert self.embed_tokens is not None, "groups of ranks have all layers"
        x = self.embed_tokens(torch.empty(0, dtype=torch.int64, device=self.embed_tokens.weight.device))
        for layer in self.layers:
            cast(Any, layer).mlp(x)

    def _run_layers(self, rotary: Rotation, forward_batch: ForwardBatch) -> RunLayers:
        """Return a function that runs layers: in one call if the weights and the attention backend allow it, otherwise
        one by one."""
        if self._packed is not None and (self._adapted is None or self._adapted.covers_all):
            whole = forward_batch.attn_backend.whole_layers(self._packed, rotary, forward_batch)
            if whole is not None:
                return whole

        def one_by_one(x: torch.Tensor, first: int, last: int) -> torch.Tensor:
            if fused.usable(x) and isinstance(self.layers[0], DecoderLayer):
                return self._sums_pending(x, rotary, forward_batch, first, last)
            for layer in self.layers[first:last]:
                x = layer(x, rotary, forward_batch)
            return x

        return one_by_one

    def _sums_pending(
        self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch, first: int, last: int
    ) -> torch.Tensor:
        """Return x behind layers first .. last - 1, in its own memory."""
        pending = None
        for layer in self.layers[first:last]:
            pending = cast(DecoderLayer, layer).forward_pending(x, pending, rotary, forward_batch)
        return x if pending is None else x.add_(pending)
