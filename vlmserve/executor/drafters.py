"""What makes guesses: heads that go on from the model's hidden states (see `models.mtp` and `models.eagle`). For a
smaller model that guesses, see `draft_model`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from vlmserve.executor.step_inputs import StepInputs
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode
from vlmserve.models.eagle import EagleHead
from vlmserve.models.mtp import MTPHead
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.kernels.rows import argmax


class Drafter(ABC):
    """Makes the guesses of steps."""

    def __init__(self, model: VisionLanguageModel) -> None:
        self._model = model

    def begin(self, step: ForwardBatch, inputs: StepInputs) -> None:  # noqa: B027  most need not know
        """Note a step, before anything of it is computed."""

    @abstractmethod
    def draft(self, step: ForwardBatch, inputs: StepInputs, rounds: Sequence[Sequence[int]]) -> None:
        """Guess the likeliest next tokens of requests, one behind the other, and write them to the step's input_ids.
        Guesses that are given stay. rounds: see `guess_rounds`."""

    def join(self, rounds: Sequence[Sequence[int]]) -> None:  # noqa: B027  most share no layers
        """Join the collectives of other groups' guesses while this group makes none."""

    @abstractmethod
    def extend(self, step: ForwardBatch, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """Prepare further guesses, when the model has computed the step. hidden: [N, hidden], final."""


def agreed(logits: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """Return the likeliest int64 [N] of the first rank's logits [N, vocab], at all ranks that `comm` connects."""
    if comm.collectives is None:
        return argmax(logits)
    ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    return comm.collectives.broadcast(argmax(logits) if comm.shard.rank == 0 else ids)


def one_token_each(
    step: ForwardBatch,
    ids: torch.Tensor,
    positions: torch.Tensor,
    *,
    rows: torch.Tensor,
    slots: torch.Tensor,
    before: torch.Tensor,
    host_before: list[int],
    **parts: Any,
) -> ForwardBatch:
    """Return a step of one token for each of n requests, in which guesses are made.

    ids, rows (in the request table), slots: int64 [n]. positions: int64 [3, n]. before: int32 [n], and on the host, the
    tokens before. parts: whatever else differs from `step`.
    """
    return replace(
        step,
        forward_mode=ForwardMode.DECODE,
        input_ids=ids,
        positions=positions,
        req_pool_indices=rows,
        seq_lens=before + 1,
        extend_start_loc=torch.arange(len(ids) + 1, dtype=torch.int32, device=ids.device),
        prefix_lens=host_before,
        extend_lens=[1] * len(ids),
        out_cache_loc=slots,
        window_cache_loc=None,
        recurrent=None,
        **parts,
    )


class HeadDrafter(Drafter):
    """Guesses with a head whose entry of token i lies in the KV slot of token i: see `MTPHead`, `EagleHead`. `extend`
    writes the head's KV of the step's tokens."""

    def __init__(self, model: VisionLanguageModel, head: MTPHead | EagleHead) -> None:
        super().__init__(model)
        self._head = head

    def draft(self, step: ForwardBatch, inputs: StepInputs, rounds: Sequence[Sequence[int]]) -> None:
        """See `Drafter`. The guesses' KV goes to the slots of the tokens that they are made from. It is made of the
        head's own output in part, and `extend` replaces it."""
        drafts = inputs.drafts
        assert drafts is not None
        order, table, backend = drafts.order.tensor, step.req_to_token_pool.without_first(), self._backend(step)
        rows, firsts, lens = step.req_pool_indices[order], step.extend_start_loc[order], drafts.prefix_lens.tensor
        hidden, positions = self._last(step, inputs, order)
        ids = step.input_ids[firsts]
        given = drafts.given.tensor.split(drafts.counts)
        for number, count in enumerate(drafts.counts):
            rows, firsts, lens, hidden = (part[:count] for part in (rows, firsts, lens, hidden))
            batch = one_token_each(
                step,
                ids[:count],
                positions[:, :count] + number,
                rows=rows,
                slots=step.out_cache_loc[firsts + number],
                before=lens - 1 + number,  # an entry fewer than there are tokens
                host_before=[length - 1 + number for length in drafts.host_lens[:count]],
                req_to_token_pool=table,
                attn_backend=backend,
            )
            backend.init_forward_metadata(batch)
            with self._model.comm.among(rounds[number]):
                hidden, predicting = self._head(self._embed(batch.input_ids), hidden, batch.positions, batch)
                ids = torch.where(given[number] < 0, self._likeliest(predicting), given[number])
            step.input_ids[firsts + number + 1] = ids
        self.join(rounds[len(drafts.counts) :])

    def join(self, rounds: Sequence[Sequence[int]]) -> None:
        """See `Drafter`."""
        none = torch.empty(0, dtype=torch.int64, device=next(self._head.parameters()).device)
        for sizes in rounds:
            with self._model.comm.among(sizes):
                x = self._embed(none)
                self._head.join(x)
                self._likeliest(x)

    @abstractmethod
    def _last(self, step: ForwardBatch, inputs: StepInputs, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the first entries of requests number `order` int64 [n] are made of, as the head takes it, and
        their positions int64 [3, n]."""

    def _backend(self, step: ForwardBatch) -> AttentionBackend:
        return step.attn_backend

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.embed_tokens(ids)

    def _likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the likeliest token int64 [N] of hidden states [N, hidden], the same at all ranks."""
        comm = self._model.comm
        return comm.own_tokens(agreed(self._model.compute_logits(comm.all_tokens(hidden)), comm))


class MTPDrafter(HeadDrafter):
    """The head goes on from what the model handed on for the last token, and from its position. Both are part of a
    request's state. So they come along with chunks, cached prefixes, and states that go back behind wrong guesses.
    """

    def __init__(self, model: VisionLanguageModel, head: MTPHead, cache: RecurrentCache) -> None:
        super().__init__(model, head)
        self._cache = cache

    def _last(self, step: ForwardBatch, inputs: StepInputs, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert inputs.states is not None
        owners = inputs.states.tensor[order]
        return self._cache.hidden[owners], self._cache.positions[owners].t()

    def extend(self, step: ForwardBatch, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """See `Drafter`."""
        cache, recurrent = self._cache, step.recurrent
        assert recurrent is not None
        assert step.tapped is not None
        assert inputs.states is not None
        states = inputs.states.tensor
        embeds, *streams = step.tapped
        if streams:
            embeds, hidden = embeds[:, : self._model.config.hidden_size], streams[0]
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


class EagleDrafter(HeadDrafter):
    """The head goes on from features that lie in the KV slot of each token. backend: for its heads."""

    def __init__(self, model: VisionLanguageModel, head: EagleHead, backend: AttentionBackend) -> None:
        super().__init__(model, head)
        self._eagle, self._own_backend = head, backend

    def _last(self, step: ForwardBatch, inputs: StepInputs, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert inputs.entry_positions is not None
        positions = inputs.entry_positions.tensor[:, step.extend_start_loc[order]]
        return self._eagle.features(self._slots_before(step, inputs, order), step), positions

    def extend(self, step: ForwardBatch, inputs: StepInputs, hidden: torch.Tensor) -> None:
        """See `Drafter`."""
        assert inputs.entry_positions is not None
        assert step.tapped is not None
        embeds = step.tapped[0]
        slots = step.out_cache_loc.roll(1)
        slots[step.extend_start_loc[:-1]] = self._slots_before(step, inputs)
        if self._eagle.embed_tokens is not None:
            own = self._eagle.embed_tokens(step.input_ids)
            if inputs.given_tokens is not None:  # pictures, which it sees as the model does
                own[inputs.given_tokens.tensor] = embeds[inputs.given_tokens.tensor]
            embeds = own
        self._eagle.store(embeds, self._eagle.features(slots, step), inputs.entry_positions.tensor, step)

    @staticmethod
    def _slots_before(
        step: ForwardBatch, inputs: StepInputs, order: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Return the slot int64 [n] of the last token before the step of requests number `order`; any slot if there is
        none."""
        table = step.req_to_token_pool.req_to_token
        assert inputs.last_places is not None
        return table[step.req_pool_indices[order], inputs.last_places.tensor[order]].long()

    def _backend(self, step: ForwardBatch) -> AttentionBackend:
        return self._own_backend

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        own = self._eagle.embed_tokens
        return super()._embed(ids) if own is None else own(ids)

    def _likeliest(self, hidden: torch.Tensor) -> torch.Tensor:
        head = self._eagle.lm_head
        if head is None:
            return super()._likeliest(hidden)
        if not len(hidden):  # other groups guess, and share nothing of this head
            return hidden.new_empty(0, dtype=torch.int64)
        return self._eagle.target_ids(agreed(head(hidden), self._model.comm.attention))
