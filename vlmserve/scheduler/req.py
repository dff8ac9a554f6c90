"""One request's whole life on the scheduler's side."""

from __future__ import annotations

import numpy as np

from vlmserve.memory.radix_cache import RadixNode
from vlmserve.messages import FinishReason, SamplingParams, TokenizedGenerateReqInput, TokenLogprobs
from vlmserve.scheduler.req_media import ReqMedia
from vlmserve.scheduler.req_times import ReqTimes


class Req:
    """A request between arrival and its last token.

    Lengths, in tokens of prompt + output (asserted by `check`):

        |<- protected_len ->|
        |<- kv_len: KV is there ->|<- extend_input_len: this forward ->|<- still to come ->|

    The first `protected_len` of its KV slots belong to the prefix cache and are locked by this request (`last_node`
    is the lock's handle); those from there to kv_len are the request's own. prefix_unsent: the worker does
    not know yet which slots hold its first kv_len tokens.
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
        self.num_logprobs = message.num_logprobs
        self.key_ids = key_ids
        self.media = media
        self.max_new_tokens = max_new_tokens
        self.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
        self.arrival = arrival
        self.times = times or ReqTimes()

        self.output_ids: list[int] = []
        self.req_pool_idx: int | None = None
        self.kv_len = 0
        self.extend_input_len = 0
        self.protected_len = 0
        self.last_node: RadixNode | None = None
        self.prefix_unsent = False
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.reported = False

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.origin_input_ids)

    @property
    def fill_len(self) -> int:
        """Tokens known so far: prompt and output."""
        return self.prompt_len + len(self.output_ids)

    @property
    def remaining_new_tokens(self) -> int:
        """Output tokens still allowed."""
        return self.max_new_tokens - len(self.output_ids)

    @property
    def completes(self) -> bool:
        """Whether this forward reaches the last known token, so that a new one is sampled."""
        return self.kv_len + self.extend_input_len == self.fill_len

    def fill_ids(self, start: int, end: int) -> np.ndarray:
        """Real token ids [start, end) of prompt + output, int64."""
        return self._slice(self.origin_input_ids, start, end)

    def radix_key(self, end: int) -> np.ndarray:
        """The prefix cache key of tokens [0, end): ids, with media pads replaced by their pad values."""
        return self._slice(self.key_ids, 0, end)

    def _slice(self, prompt: np.ndarray, start: int, end: int) -> np.ndarray:
        if end <= self.prompt_len:
            return prompt[start:end]
        output = self.output_ids[max(start - self.prompt_len, 0) : end - self.prompt_len]
        ids = np.array(output, dtype=np.int64)
        return ids if start >= self.prompt_len else np.concatenate([prompt[start:], ids])

    def positions(self, start: int, end: int) -> np.ndarray:
        """M-RoPE positions int64 [3, end - start]; a generated token sits at index + delta."""
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

    def append_output(self, token_id: int) -> None:
        """Take the sampled token and decide whether it was the last."""
        self.output_ids.append(token_id)
        if token_id in self.stop_ids:
            self.finish_reason = FinishReason(type="stop", matched=token_id)
        elif len(self.output_ids) >= self.max_new_tokens:
            self.finish_reason = FinishReason(type="length")

    def logprobs_of(
        self, token_id: int, logprob: float, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> TokenLogprobs | None:
        """This request's logprobs entry for a token, cut to the number it asked for."""
        if self.num_logprobs is None:
            return None
        return TokenLogprobs(
            token_id=token_id,
            logprob=float(logprob),
            top_ids=tuple(top_ids[: self.num_logprobs].tolist()),
            top_logprobs=tuple(top_logprobs[: self.num_logprobs].tolist()),
        )

    def check(self) -> None:
        """Assert the length model."""
        assert 0 <= self.protected_len <= self.kv_len, (self.rid, self.protected_len, self.kv_len)
        assert self.kv_len + self.extend_input_len <= self.fill_len, (self.rid, self.kv_len, self.extend_input_len)
        assert len(self.output_ids) <= self.max_new_tokens, (self.rid, len(self.output_ids))
        assert (self.req_pool_idx is None) == (self.kv_len == 0 and self.extend_input_len == 0), self.rid
