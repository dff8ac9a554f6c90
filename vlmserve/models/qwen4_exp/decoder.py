"""The decoder of Qwen4Exp."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import nn

from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import ModelConfig
from vlmserve.models.decoder import Decoder
from vlmserve.models.delta_net import GatedDeltaNet
from vlmserve.models.qwen3_5 import QWEN3_5_MOE_DEFAULTS, make_hybrid_mlp, make_mixers, make_rotary
from vlmserve.models.qwen4_exp.ngrams import NGramLayer, ngram_contexts
from vlmserve.models.qwen4_exp.sparse import BlockPlan, SparseAttention
from vlmserve.models.qwen4_exp.streams import HyperConnection, StreamMixer
from vlmserve_common.compute.communicator import ALONE, Communicator
from vlmserve_common.compute.rotary import Rotation

QWEN4_EXP_DEFAULTS = replace(QWEN3_5_MOE_DEFAULTS, has_streams=True)


class StreamsLayer(nn.Module):
    """N-gram embeddings (`ple`) where there are any, a gated delta net (`linear_attn`) or sparse attention
    (`self_attn`), and experts. Each reads the streams and adds to them."""

    def __init__(
        self, config: ModelConfig, comm: Communicator, mixer: GatedDeltaNet | SparseAttention, ple: NGramLayer | None
    ) -> None:
        super().__init__()
        self.ple = ple
        self.self_attn = mixer if isinstance(mixer, SparseAttention) else None
        self.linear_attn = mixer if isinstance(mixer, GatedDeltaNet) else None
        self.mlp = make_hybrid_mlp(config, comm)
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)

    def forward(self, x: torch.Tensor, rotary: Rotation, forward_batch: ForwardBatch) -> torch.Tensor:
        """x [N, streams * hidden] -> the same shape, a new tensor."""
        if self.ple is not None:
            x = self.ple(x, forward_batch)
        mixed, logits = self.attn_hyper_connection.read(x)
        if self.linear_attn is not None:
            out = self.linear_attn(mixed, forward_batch)
        else:
            assert self.self_attn is not None
            out = self.self_attn(mixed, rotary, forward_batch)
        x = self.attn_hyper_connection.write(x, out, logits)
        mixed, logits = self.mlp_hyper_connection.read(x)
        return self.mlp_hyper_connection.write(x, self.mlp(mixed), logits)


class Qwen4ExpDecoder(Decoder):
    """A decoder with several residual streams. dtype: of its computation. Its final norm mixes the streams into one."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, comm: Communicator = ALONE) -> None:
        layers, with_ngrams = [], 0
        for index, mixer in zip(config.own_layers, make_mixers(config, comm, SparseAttention), strict=True):
            ple = None
            if config.ngrams is not None and index in config.ngrams.layers:
                ple = NGramLayer(config, config.ngrams.layers.index(index), with_ngrams, comm)
                with_ngrams += 1
            layers.append(StreamsLayer(config, comm, mixer, ple))
        super().__init__(config, comm, layers, StreamMixer(config), make_rotary(config, dtype))
        assert config.index is not None
        assert config.streams is not None
        self._index, self._streams = config.index, config.streams.count if comm.shard.stage.is_first else 1
        self._ngrams = config.ngrams if with_ngrams else None

    def forward(
        self,
        input_embeds: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        deepstack_index: torch.Tensor | None = None,
        deepstack_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Decoder`. Stages hand all streams on, [N, streams * hidden]."""
        ngrams = None
        if self._ngrams is not None:
            assert forward_batch.recurrent is not None, "a step without states"
            ngrams = ngram_contexts(self._ngrams, forward_batch.input_ids, forward_batch.recurrent)
        step = replace(forward_batch, ngrams=ngrams, blocks=BlockPlan.of(forward_batch, self._index))
        x = input_embeds.repeat(1, self._streams)
        return super().forward(x, positions, step, deepstack_index, deepstack_embeds)

    def join(self) -> None:
        """See `Decoder`: tables of n-grams are shared as the embedding is."""
        assert self.embed_tokens is not None, "groups of ranks have all layers"
        nothing = torch.empty(0, dtype=torch.int64, device=self.embed_tokens.weight.device)
        x = self.embed_tokens(nothing)
        for layer in self.layers:
            streams = cast(StreamsLayer, layer)
            if streams.ple is not None:
                streams.ple.ple_embedding.join(nothing)
            streams.mlp(x)
