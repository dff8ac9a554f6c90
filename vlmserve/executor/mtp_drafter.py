"""Guesses tokens with a model's MTP head, and keeps the head's KV up to date: see `models.mtp`."""

from __future__ import annotations

import torch

from vlmserve.executor.step_inputs import DraftInputs
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.models.attention.base import ForwardBatch, ForwardMode
from vlmserve.models.mtp import MTPHead
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.kernels.rows import argmax


class MTPDrafter:
    """The head goes on from the last token's hidden state and position, which are part of a request's state. So they
    come along with chunks, cached prefixes, and states that go back behind wrong guesses.
    """

    def __init__(self, model: VisionLanguageModel, head: MTPHead, cache: RecurrentCache) -> None:
        self._model, self._head, self._cache = model, head, cache

    def draft(self, step: ForwardBatch, inputs: DraftInputs, states: torch.Tensor) -> None:
        """Guess the likeliest next tokens of requests, one behind the other, and write them to the step's input_ids.
        Guesses that are given stay.

        states: int64 [B], of all requests. The guesses' KV goes to the slots of the tokens that they are made from. It
        is made of the head's own output in part, and `extend` replaces it.
        """
        order, table = inputs.order.tensor, step.req_to_token_pool.without_first()
        rows, firsts, lens = step.req_pool_indices[order], step.extend_start_loc[order], inputs.prefix_lens.tensor
        owners = states[order]
        hidden, positions = self._cache.hidden[owners], self._cache.positions[owners].t()
        ids = step.input_ids[firsts]
        given = inputs.given.tensor.split(inputs.counts)
        for number, count in enumerate(inputs.counts):
            rows, firsts, lens, hidden = (part[:count] for part in (rows, firsts, lens, hidden))
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                input_ids=ids[:count],
                positions=positions[:, :count] + number,
                req_pool_indices=rows,
                seq_lens=lens + number,  # an entry fewer than there are tokens, this one included
                extend_start_loc=torch.arange(count + 1, dtype=torch.int32, device=ids.device),
                prefix_lens=[length - 1 + number for length in inputs.host_lens[:count]],
                extend_lens=[1] * count,
                out_cache_loc=step.out_cache_loc[firsts + number],
                req_to_token_pool=table,
                kv_cache=step.kv_cache,
                attn_backend=step.attn_backend,
            )
            step.attn_backend.init_forward_metadata(batch)
            hidden = self._head(self._model.embed_tokens(batch.input_ids), hidden, batch.positions, batch)
            ids = torch.where(given[number] < 0, self._likeliest(hidden), given[number])
            step.input_ids[firsts + number + 1] = ids

    def extend(self, step: ForwardBatch, states: torch.Tensor, embeds: torch.Tensor, hidden: torch.Tensor) -> None:
        """Write the head's KV of a step that is computed, and keep what the next entry of each request is made of.

        states: int64 [B]. embeds [N, hidden]: what the model's first layer got. hidden: [N, hidden], final.
        """
        cache, recurrent = self._cache, step.recurrent
        assert recurrent is not None
        starts, lasts = step.extend_start_loc[:-1], step.extend_start_loc[1:] - 1
        before, positions = hidden.roll(1, 0), step.positions.roll(1, 1)
        before[starts], positions[:, starts] = cache.hidden[states], cache.positions[states].t()
        self._head.store(embeds, before, positions, step)
        cache.hidden[states], cache.positions[states] = hidden[lasts], step.positions[:, lasts].t()
        for span in recurrent.spans:
            for tokens, state in span.kept.items():
                last = span.start + tokens - 1
                cache.hidden[state], cache.positions[state] = hidden[last], step.positions[:, last]
        for guessed in recurrent.guessed:
            assert cache.guesses is not None
            length = guessed.tokens.shape[1]
            cache.guesses.hidden[guessed.rows, :length] = hidden[guessed.tokens]
            cache.guesses.positions[guessed.rows, :length] = step.positions[:, guessed.tokens].permute(1, 2, 0)

    def _likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token int64 [N] of hidden states [N, hidden], the same at all ranks."""
        logits, comm = self._model.compute_logits(hidden), self._model.comm
        if comm.collectives is None:
            return argmax(logits)
        ids = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        return comm.collectives.broadcast(argmax(logits) if comm.shard.samples else ids)
