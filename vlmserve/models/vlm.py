"""Whole models: decoder and head, and with a vision tower."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn

from vision.towers.blocks import VisionTower
from vision.towers.loading import TOWER_WEIGHT_RULES
from vlmserve.memory.kv_cache import KVShape
from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import ModelConfig
from vlmserve.models.decoder import Decoder
from vlmserve.models.eagle import EagleConfig, EagleHead
from vlmserve.models.mtp import MTPHead
from vlmserve.models.qwen4_exp.ngrams import STORED_HASHES
from vlmserve_common.checkpoint.weights import WeightRules
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.experts import pack_experts
from vlmserve_common.compute.layers import Embedding, VocabEmbedding
from vlmserve_common.compute.linear import (
    Linear,
    VocabLinear,
    Workspace,
    linear,
    pack_linears,
    pack_weight,
    rewrite_rows,
)
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import packed_linear as packed_products
from vlmserve_common.kernels.packed_linear import PackedWeight
from vlmserve_common.kernels.quantized import Mode

OF_THE_MTP_HEAD = r"^mtp\."
# of a head that are packed at a time
_HEAD_ROWS = 4096

WEIGHT_RULES = WeightRules(
    # Both published layouts: `visual.*`, `model.*` (Qwen2-VL, Qwen2.5-VL) and `model.visual.*`,
    # `model.language_model.*` (Qwen3-VL, and all families saved anew by later versions of transformers).
    # `thinker.*` holds the same of Omni models, whose other parts speak.
    prefixes=(
        # the final norm of a model with several residual streams
        ("model.language_model.hyper_connection_mixer.", "language_model.norm."),
        ("model.language_model.", "language_model."),
        ("thinker.model.language_model.", "language_model."),
        ("thinker.lm_head.", "lm_head."),
        *TOWER_WEIGHT_RULES.prefixes,
        ("model.hyper_connection_mixer.", "language_model.norm."),
        ("model.", "language_model."),
        ("thinker.model.", "language_model."),
        # a decoder that was saved without its head
        *((f"{part}.", f"language_model.{part}.") for part in ("layers", "embed_tokens", "norm")),
    ),
    # Constants that old versions of transformers saved along, and the head of a tied model, which is its embedding
    # (an untied model's head is a parameter, and so never ignored). Qwen3.5's head that guesses, if it is not used.
    # Whole numbers of n-gram tables, which are read by themselves.
    ignored=(
        r"\brotary_emb\.inv_freq$",
        *TOWER_WEIGHT_RULES.ignored,
        r"^(thinker\.)?lm_head\.weight$",
        OF_THE_MTP_HEAD,
        STORED_HASHES,
        r"^(talker|token2wav|code2wav)\.",
    ),
)


class LanguageModel(nn.Module):
    """A decoder and a head. A tied model's head is its embedding. Only the last stage of a pipeline has a head.

    config: of the whole model, as `self.whole_config` is; `self.config` has the sizes of this process's part. dtype:
    computed in. comm: the part, with its connections.
    """

    def __init__(self, config: ModelConfig, decoder: Decoder, dtype: torch.dtype, comm: Communicator) -> None:
        super().__init__()
        self.whole_config, self.config = config, config.of_part()
        self.comm = comm
        self.dtype = dtype
        self.language_model = decoder
        self.lm_head = None if config.tie_word_embeddings or not comm.shard.stage.is_last else _head(config)
        self._head_workspace = Workspace()
        self._packed_head: PackedWeight | None = None

    def pack(self, mode: Mode | None = None) -> None:
        """Lay the decoder's and the head's weights out for this process's operators, quantised if `mode` says so. A
        tied head gets a copy. The head's inputs are never rounded."""
        self.language_model.pack(mode)
        mode = "int8" if mode == "w8a8" else mode
        if self.lm_head is not None:
            self.lm_head.pack(mode)
            self._packed_head = self.lm_head.packed
        elif self.comm.shard.stage.is_last and packed_products.can_pack(self._embedding.weight):
            self._packed_head = pack_weight(self._embedding.weight, None, mode)

    def repack_head(self) -> None:
        """Copy a tied head's weight anew: the embedding has changed."""
        if self.lm_head is None and self._packed_head is not None:
            for first, rows in enumerate(self._embedding.weight.split(_HEAD_ROWS)):
                rewrite_rows(self._packed_head, first * _HEAD_ROWS, rows)

    def embed_tokens(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embed input_ids int64 [N] -> [N, hidden]."""
        return self._embedding(input_ids)

    @property
    def _embedding(self) -> Embedding | VocabEmbedding:
        found = self.language_model.embed_tokens
        assert found is not None, "this stage has no embedding"
        return found

    def forward(
        self,
        input_embeds: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        *,
        deepstack_index: torch.Tensor | None = None,
        deepstack_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Decoder.forward`."""
        return self.language_model(input_embeds, positions, forward_batch, deepstack_index, deepstack_embeds)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits float32 [R, vocab] of final hidden states [R, hidden]. All processes that share the model call
        it. The first process gets all logits; each other process gets the logits of its part of the vocabulary."""
        logits, together = self._own_logits(hidden), self.comm.collectives
        if together is None:
            return logits
        parts = together.gather(logits)
        return torch.cat(parts, dim=1)[:, : self.config.vocab_size].contiguous() if parts else logits

    def _own_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._packed_head is not None:
            return packed_products.linear(hidden, self._packed_head, out_dtype=torch.float32)
        if self.lm_head is not None:
            return self.lm_head(hidden).float()
        return linear(hidden, self._embedding.weight, workspace=self._head_workspace).float()


class VisionLanguageModel(LanguageModel):
    """A tower, a decoder and a head, and what guesses further tokens, if anything does. The tower of a model that reads
    text only is a `NoTower`.

    mtp: a head of the checkpoint itself. eagle, draft: see `attach_eagle`, `attach_draft`.
    """

    def __init__(
        self,
        config: ModelConfig,
        visual: VisionTower,
        decoder: Decoder,
        dtype: torch.dtype,
        comm: Communicator,
        mtp: MTPHead | None = None,
    ) -> None:
        super().__init__(config, decoder, dtype, comm)
        if visual.is_there and visual.out_hidden_size != config.hidden_size:
            raise CheckpointError(
                f"config.json: the tower's embeddings have {visual.out_hidden_size} elements, the decoder's "
                f"hidden_size is {config.hidden_size}"
            )
        if visual.num_deepstack_layers > config.num_layers:
            raise CheckpointError(
                f"config.json: {visual.num_deepstack_layers} deepstack_visual_indexes for {config.num_layers} layers"
            )
        self.visual = visual
        self.mtp = mtp
        self.draft: LanguageModel | None = None
        if config.mtp_layers:
            decoder.tap((0,) if config.streams is None else (0, config.num_layers))

    def attach_eagle(self, config: EagleConfig, head: EagleHead | None) -> None:
        """Let a head guess further tokens, before `pack`. head: None where another stage of a pipeline has it."""
        self.language_model.tap(tuple(sorted({0, *config.taps})), head)

    def attach_draft(self, model: LanguageModel) -> None:
        """Let a smaller model guess further tokens, before `pack`. Each process of the first stage has all of it."""
        self.draft = model

    @property
    def eagle(self) -> EagleHead | None:
        """The head of `attach_eagle`."""
        return cast("EagleHead | None", self.language_model.taps)

    @property
    def towers(self) -> tuple[VisionTower, ...]:
        """Its tower, and that of the model that guesses, if it has one."""
        return (self.visual, self.draft.visual) if isinstance(self.draft, VisionLanguageModel) else (self.visual,)

    @property
    def further_kv(self) -> tuple[KVShape, ...]:
        """The shapes of all layers of the KV cache behind those with the model's keys and values: of sparse attention's
        index, and of what guesses."""
        index = self.config.index
        own = () if index is None else (KVShape(1, index.head_dim),) * self.config.num_index_layers
        return (*own, *self.guessing_kv)

    @property
    def guessing_kv(self) -> tuple[KVShape, ...]:
        """The shapes of the last layers of the KV cache, for what guesses."""
        if self.draft is not None:
            config = self.draft.config
            return (KVShape(config.num_kv_heads, config.head_dim),) * config.num_kv_layers
        return self.eagle.kv_shapes if self.eagle is not None else ()

    def pack(self, mode: Mode | None = None) -> None:
        """See `LanguageModel.pack`."""
        super().pack(mode)
        if self.mtp is not None:
            pack_linears(self.mtp, mode)
            pack_experts(self.mtp, mode)
        if self.draft is not None:
            self.draft.pack(mode)


def _head(config: ModelConfig) -> Linear:
    if config.shard.is_whole:
        return Linear(config.hidden_size, config.vocab_size, bias=False)
    return VocabLinear(config.hidden_size, config.vocab_size, config.shard)
