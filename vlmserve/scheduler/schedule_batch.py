"""Requests that run together, and the frozen snapshot of a step that goes to the worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmserve.attention.base import ForwardMode
from vlmserve.executor.model_worker_batch import MMEmbeds, ModelWorkerBatch, PrefixSlots, SamplingBatchInfo
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req


class ScheduleBatch:
    """Requests, what the next step does with them, and the pools they use. Mutable; the scheduler's own.

    The slots of prompt chunks (EXTEND) are `PrefillAdder`'s to allocate.
    """

    def __init__(
        self, kv: KVCacheManager, reqs: Sequence[Req] = (), forward_mode: ForwardMode = ForwardMode.DECODE
    ) -> None:
        self.kv = kv
        self.reqs = list(reqs)
        self.forward_mode = forward_mode

    def __len__(self) -> int:
        return len(self.reqs)

    def check_decode_mem(self) -> bool:
        """Whether one more token for every request fits, by eviction if need be. Changes nothing."""
        needed = sum(self.kv.allocator.tokens_needed(req.kv_len, req.kv_len + 1) for req in self.reqs)
        return needed <= self.kv.reachable()

    def retract_decode(self) -> Req:
        """Take the request with the least output (the newest among equals) out to free memory.

        Its tokens stay known, its KV stays cached until evicted, and it will go on as if nothing had happened.
        """
        victim = min(self.reqs, key=lambda req: (len(req.output_ids), -req.arrival))
        self.reqs.remove(victim)
        self.kv.release(victim)
        return victim

    def prepare_for_decode(self) -> None:
        """A slot for the token each request feeds next. `check_decode_mem` must have said yes."""
        for req in self.reqs:
            fits = self.kv.extend(req, 1)
            assert fits, f"no slot for {req.rid} although check_decode_mem found room"

    def mix_with_running(self, running: ScheduleBatch) -> None:
        """Let prompt chunks and the running requests' next tokens share a step."""
        running.prepare_for_decode()
        self.reqs = self.reqs + running.reqs
        self.forward_mode = ForwardMode.MIXED

    def merge_batch(self, other: ScheduleBatch) -> None:
        """Add another batch's requests; those that are in both stay in once."""
        known = {id(req) for req in self.reqs}
        self.reqs = self.reqs + [req for req in other.reqs if id(req) not in known]

    def filter_batch(self, gone: Sequence[Req] = ()) -> None:
        """Drop requests that have finished, and `gone`."""
        self.reqs = [req for req in self.reqs if req.finish_reason is None and req not in gone]

    def get_model_worker_batch(self, step: int) -> ModelWorkerBatch:
        """The step as a message; arrays are fresh copies."""
        reqs = self.reqs
        starts = [req.kv_len for req in reqs]
        ends = [req.kv_len + req.extend_input_len for req in reqs]
        spans = list(zip(reqs, starts, ends, strict=True))
        prefixes = tuple(
            PrefixSlots(req_pool_idx=_req_pool_idx(req), slots=self.kv.slots(req, 0, req.kv_len))
            for req in reqs
            if req.prefix_unsent and req.kv_len
        )
        for req in reqs:
            req.prefix_unsent = False
        return ModelWorkerBatch(
            step=step,
            forward_mode=int(self.forward_mode),
            req_pool_indices=np.array([_req_pool_idx(req) for req in reqs], dtype=np.int64),
            input_ids=np.concatenate([req.fill_ids(a, b) for req, a, b in spans]),
            positions=np.concatenate([req.positions(a, b) for req, a, b in spans], axis=1),
            seq_lens=np.array(ends, dtype=np.int64),
            prefix_lens=np.array(starts, dtype=np.int64),
            out_cache_loc=np.concatenate([self.kv.slots(req, a, b) for req, a, b in spans]),
            prefix_slots=prefixes,
            mm_embeds=_mm_embeds(spans),
            sampling=_sampling_info(reqs),
        )


def _mm_embeds(spans: list[tuple[Req, int, int]]) -> tuple[MMEmbeds, ...]:
    found: list[MMEmbeds] = []
    at = 0
    for req, start, end in spans:
        found += req.media.embeds(start, end, at=at)
        at += end - start
    return tuple(found)


def _req_pool_idx(req: Req) -> int:
    assert req.req_pool_idx is not None, req.rid
    return req.req_pool_idx


def _sampling_info(reqs: list[Req]) -> SamplingBatchInfo:
    """Only requests whose known tokens end with this step get a new token."""
    batch_indices = [i for i, req in enumerate(reqs) if req.completes]
    sampled = [reqs[i] for i in batch_indices]
    params = [req.sampling_params for req in sampled]
    bias = [(i, token, value) for i, p in enumerate(params) for token, value in p.logit_bias.items()]
    counts: list[tuple[int, int, int]] = []
    for i, (req, p) in enumerate(zip(sampled, params, strict=True)):
        if p.presence_penalty or p.frequency_penalty:
            ids, times = np.unique(np.asarray(req.output_ids, dtype=np.int64), return_counts=True)
            counts.extend((i, token, n) for token, n in zip(ids.tolist(), times.tolist(), strict=True))

    seen = [np.unique(req.fill_ids(0, req.fill_len)) for req in sampled if req.sampling_params.repetition_penalty != 1]
    seen_of = [i for i, p in enumerate(params) if p.repetition_penalty != 1]

    def floats(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float32)

    def ints(values: list[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64)

    return SamplingBatchInfo(
        batch_indices=ints(batch_indices),
        temperatures=floats([p.temperature for p in params]),
        top_ps=floats([p.top_p for p in params]),
        top_ks=ints([p.top_k for p in params]),
        min_ps=floats([p.min_p for p in params]),
        seeds=ints([p.seed for p in params]),
        output_indices=ints([len(req.output_ids) for req in sampled]),
        num_logprobs=ints([-1 if req.num_logprobs is None else req.num_logprobs for req in sampled]),
        bias_rows=ints([row for row, _, _ in bias]),
        bias_ids=ints([token for _, token, _ in bias]),
        bias_values=floats([value for _, _, value in bias]),
        count_rows=ints([row for row, _, _ in counts]),
        count_ids=ints([token for _, token, _ in counts]),
        count_values=ints([n for _, _, n in counts]),
        presence=floats([p.presence_penalty for p in params]),
        frequency=floats([p.frequency_penalty for p in params]),
        seen_rows=np.repeat(ints(seen_of), [len(ids) for ids in seen]),
        seen_ids=np.concatenate([ints([]), *seen]),
        repetition=floats([p.repetition_penalty for p in params]),
    )
