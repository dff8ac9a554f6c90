"""A request on the scheduler's side: its lengths, its tokens, and its place in memory."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import numpy as np

from vlmserve.ipc.messages import FinishReason, Guesses, SamplingParams, TokenizedGenerateReqInput
from vlmserve.memory.radix_tree import RadixNode
from vlmserve.scheduler.grammar.matcher import Matcher
from vlmserve.scheduler.req_life import MOVES, PooledStates, PromptScores, ReqStatus, ReqTimes
from vlmserve.scheduler.req_media import ReqMedia

TURNS_PER_CHOICE = 8
"""The second of several answers to a prompt waits as if so many more requests had come before it, and so on."""


class GuessRate:
    """How often guesses are right, given that those before were. smooth: the weight of a new one."""

    _REST = 16

    def __init__(self, first: float, *, smooth: float = 0.2) -> None:
        self.rate = first
        self._smooth = smooth
        self._passed = 0

    def note(self, guesses: int, right: int) -> None:
        """Note that so many guesses were made, of which the first ones were right."""
        for is_right in [True] * right + [False] * (right < guesses):
            self.rate += self._smooth * (is_right - self.rate)

    def worth(self, most: int, *, least_likely: float) -> int:
        """Return how many tokens are worth guessing. Where none is, one is tried now and then."""
        if self.rate < least_likely:
            self._passed = (self._passed + 1) % self._REST
            return not self._passed
        return min(most, int(math.log(least_likely) / math.log(min(self.rate, 0.99))))


class Req:
    """A request between arrival and its last token.

    Lengths, in tokens of prompt + output (asserted by `check`). A step advances `kv_len` when it is scheduled, as if it
    had been computed, and `kv_committed_len` when its result has come; `kv_allocated_len` is where its slots end:

        |<- protected_len ->|
        |<- kv_committed_len: KV is there ->|<- steps in flight ->|
        |<- kv_len ----------------------------------------------->|<- extend_len: not scheduled yet ->|
        |<- fill_len: tokens of the prompt, of the output, and `in_flight` ones that only the worker knows ->|

    drafts: guesses of its next tokens, in a step that is in flight; -1 for those that the worker makes. They count
    among the tokens in flight; wrong ones are dropped, together with their KV. is_forced: a grammar left one text on,
    and this is the text. guess_rate, forced_rate: of either kind of guesses. guesses: those that were checked.

    The first `protected_len` of its KV slots belong to the prefix cache. The request has locked them, and `last_node`
    is the lock's handle. The slots from there to kv_len are the request's own.
    window_start: it holds the slots of layers with windows from this token on, where a page begins.
    prefix_unsent: the worker does not know yet which slots hold the first kv_len tokens.
    state: the request's state of recurrent layers, if the model has such layers and the request has a place. state_lag:
    how many of the committed tokens are not in that state yet, because they were computed as guesses.
    namespace: in the prefix cache; salt: the part of it that its client has given.
    flow: the requests that it takes turns with, see `WaitingQueue`.
    awaits_kv: its KV is on its way from another server, so its slots beyond kv_len are written to. computed_here: it is
    not to be ordered elsewhere (again).
    prefetch: under way while more of its prefix is read from disk.
    grammar: has taken all of `output_ids`. grammar_compiles: the request waits for it.
    adapter_waits: steps that had no room for its adapter.
    arrival counts requests as they come. turn is the arrival, and more for later ones of several answers to one prompt.
    """

    def __init__(
        self,
        message: TokenizedGenerateReqInput,
        *,
        key_ids: np.ndarray,
        media: ReqMedia,
        max_new_tokens: int,
        eos_token_ids: frozenset[int],
        arrival: int,
        times: ReqTimes | None = None,
    ) -> None:
        params = message.sampling_params
        self.rid = message.rid
        self.origin_input_ids = message.input_ids
        self.mm_inputs = message.mm_inputs
        self.sampling_params: SamplingParams = params
        self.returns = message.returns
        asks = bool(message.returns.token_ids_logprob)
        self.num_logprobs = 0 if message.num_logprobs is None and asks else message.num_logprobs
        self.input_embeds = message.input_embeds
        self.logits_processors = message.logits_processors
        self.begin_scores()
        self.priority = message.priority
        self.flow = f"{message.client} {'media' if message.mm_inputs is not None else 'text'}"
        self.client = message.client
        self.unattended = message.unattended
        self.namespace = self.salt = message.cache_salt.encode()
        self.adapter = message.adapter
        self.adapter_waits = 0
        self.prefetch: Future[Any] | None = None
        self.awaits_kv = self.computed_here = False
        self.grammar_compiles = False
        self.grammar: Matcher | None = None
        self.session_id = message.session_id
        self.group = message.group or message.rid
        self.key_ids = key_ids
        self.media = media
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.arrival = arrival
        self.turn = arrival + TURNS_PER_CHOICE * message.choice
        self.is_penalised = bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty not in (None, 1)
        )
        # the host needs all its tokens to sample the next one: see `ScheduleBatch.samples_late`
        self.samples_by_history = bool(message.logits_processors) or params.grammar is not None
        self.times = times or ReqTimes()

        self.status = ReqStatus.WAITING
        self.waited_for_encoder = False
        self.output_ids: list[int] = []
        self.in_flight = 0
        self.drafts: tuple[int, ...] = ()
        self.is_forced = False
        self.guesses = Guesses()
        self.guess_rate: GuessRate | None = None
        self.forced_rate = GuessRate(0.9)
        self.req_pool_idx: int | None = None
        self.state: int | None = None
        self.state_lag = 0
        self.kv_len = 0
        self.kv_allocated_len = 0
        self.kv_committed_len = 0
        self.protected_len = 0
        self.window_start = 0
        self.last_node: RadixNode | None = None
        self.prefix_unsent = False
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.reported = False
        self.prompt_len = len(message.input_ids)
        self.position_delta = 0 if message.mm_inputs is None else message.mm_inputs.mrope_position_delta

    def move_to(self, status: ReqStatus) -> None:
        """Change the status, as far as `MOVES` allows it."""
        assert status in MOVES[self.status], (self.rid, self.status, status)
        self.status = status

    @property
    def is_finished(self) -> bool:
        """Return True if it has its last token, or was ended before."""
        return self.status is ReqStatus.FINISHED

    @property
    def may_draft(self) -> bool:
        """Return True if its next tokens may be guessed: all tokens so far are known, and no logits processor looks at
        them one by one."""
        return not self.in_flight and not self.logits_processors and self.returns.hidden_states != "all"

    def begin_scores(self) -> None:
        """Begin with what is made of its prompt's logprobs and hidden states; again, if weights have changed."""
        ids, returns = self.origin_input_ids, self.returns
        self.prompt_scores = PromptScores(ids, returns) if returns.prompt_logprobs is not None else None
        self.pooled = None if returns.pooling is None else PooledStates(returns.pooling, len(ids))

    @property
    def matchable_len(self) -> int:
        """Return how many of its tokens may come from the prefix cache: not the last one, and none whose logprobs or
        hidden states are needed."""
        needs = (self.prompt_scores, self.pooled)
        return min([self.fill_len - 1, *(need.matchable_len for need in needs if need is not None)])

    @property
    def prompt_token_ids(self) -> np.ndarray:
        """int64: those of the prompt; none where embeddings stand in their place."""
        return self.origin_input_ids if self.input_embeds is None else self.origin_input_ids[:0]

    @property
    def asks_more_of_logprobs(self) -> bool:
        """Whether it wants more than logprobs of its tokens and of the likeliest, or of another distribution."""
        returns = self.returns
        return bool(returns.token_ids_logprob or returns.temp_scaled_logprobs or returns.top_p_normalized_logprobs)

    @property
    def fill_len(self) -> int:
        """Tokens of prompt and output; of the last `in_flight` only the worker knows which they are."""
        return self.prompt_len + len(self.output_ids) + self.in_flight

    @property
    def extend_len(self) -> int:
        """Return how many tokens no step has been scheduled for."""
        return self.fill_len - self.kv_len

    @property
    def remaining_new_tokens(self) -> int:
        """Return how many output tokens are still allowed, besides those in flight."""
        return self.max_new_tokens - len(self.output_ids) - self.in_flight

    def finish(self, reason: FinishReason) -> None:
        """End the request for this reason."""
        self.move_to(ReqStatus.FINISHED)
        self.finish_reason = reason

    def fill_ids(self, start: int, end: int) -> np.ndarray:
        """Return the real token ids [start, end) of prompt + output, int64; -1 for a token in flight."""
        known = self.prompt_len + len(self.output_ids)
        if end <= known:
            return self._slice(self.origin_input_ids, start, end)
        unknown = np.full(end - max(start, known), -1, dtype=np.int64)
        unknown[: len(self.drafts)] = self.drafts
        return (
            unknown if start >= known else np.concatenate([self._slice(self.origin_input_ids, start, known), unknown])
        )

    def token_at(self, index: int) -> int:
        """Return the id of an output token; -1 for a token in flight."""
        index -= self.prompt_len
        return self.output_ids[index] if index < len(self.output_ids) else -1

    def radix_key(self, end: int) -> np.ndarray:
        """Return the prefix cache key of tokens [0, end): ids, with media pads replaced by their pad values."""
        return self._slice(self.key_ids, 0, end)

    def _slice(self, prompt: np.ndarray, start: int, end: int) -> np.ndarray:
        if end <= self.prompt_len:
            return prompt[start:end]
        output = self.output_ids[max(start - self.prompt_len, 0) : end - self.prompt_len]
        ids = np.array(output, dtype=np.int64)
        return ids if start >= self.prompt_len else np.concatenate([prompt[start:], ids])

    def positions(self, start: int, end: int) -> np.ndarray:
        """Return M-RoPE positions, int64 [3, end - start]. A generated token sits at index + delta."""
        positions = self.given_positions(start, end)
        return self.media.place_chosen(positions, start) if self.media.chooses else positions

    def given_positions(self, start: int, end: int) -> np.ndarray:
        """Return `positions` as they were before embeddings were chosen; see `ReqMedia.place_chosen`."""
        media = self.mm_inputs
        if media is not None and end <= self.prompt_len:
            return media.mrope_positions[:, start:end]
        positions = np.empty((3, end - start), dtype=np.int64)
        positions[:] = np.arange(start, end)
        if media is not None:
            prompt = media.mrope_positions[:, start:]
            positions += media.mrope_position_delta
            positions[:, : prompt.shape[1]] = prompt
        return positions

    def append_output(self, token_id: int) -> FinishReason | None:
        """Append a sampled token. Returns why it is the last one, or None if it is not."""
        self.output_ids.append(token_id)
        if token_id in self.stop_ids:
            return FinishReason(type="stop", matched=token_id)
        if self.grammar is not None:
            self.grammar.accept(token_id)
            if self.grammar.failure:
                return self._ungrammatical(self.grammar.failure)
            if self.grammar.is_over:  # by a token that ends other answers (ignore_eos)
                return FinishReason(type="stop", matched=token_id)
        if len(self.output_ids) >= self.max_new_tokens:
            return FinishReason(type="length")
        return None

    def _ungrammatical(self, why: str) -> FinishReason:
        spec = self.sampling_params.grammar
        assert spec is not None, self.rid
        message = f"{spec.param} cannot be followed beyond {len(self.output_ids)} tokens of the answer: {why}"
        return FinishReason(type="error", status=400, message=message, param=spec.param)

    def check(self) -> None:
        """Assert the length model."""
        lengths = self.protected_len, self.kv_committed_len, self.kv_len, self.kv_allocated_len, self.fill_len
        assert min(lengths) >= 0, (self.rid, lengths)
        assert tuple(sorted(lengths)) == lengths, (self.rid, lengths)
        assert 0 <= self.in_flight <= self.max_new_tokens - len(self.output_ids), (self.rid, self.in_flight)
        assert self.req_pool_idx is not None or self.kv_len == 0, self.rid
