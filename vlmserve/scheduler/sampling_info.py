"""How the requests of a step are sampled: of what is known when their turn comes (see `Scheduler.run_batch`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmserve.executor.model_worker_batch import LogitsProcessing, SamplingBatchInfo
from vlmserve.scheduler.logprob_rows import output_rows
from vlmserve.scheduler.req import Req

_NO_FLOATS = np.zeros(0, dtype=np.float32)
_NO_IDS = np.zeros(0, dtype=np.int64)


def sampling_info(
    batch_indices: Sequence[int], reqs: Sequence[Req], output_indices: Sequence[int]
) -> SamplingBatchInfo:
    """batch_indices: which requests of the step get a token. reqs: these. output_indices: of that token in its answer.

    Penalties and logits processors are of the tokens that are known now: those in flight must have come, for requests
    that have any.
    """
    params = [req.sampling_params for req in reqs]
    bias = [(i, token, value) for i, p in enumerate(params) if p.logit_bias for token, value in p.logit_bias.items()]
    counts: list[tuple[int, int, int]] = []
    seen: list[np.ndarray] = []
    seen_of: list[int] = []
    processing: list[LogitsProcessing] = []
    for i, (req, p) in enumerate(zip(reqs, params, strict=True)):
        if not req.samples_by_history:
            continue
        known = np.asarray(req.output_ids[: output_indices[i]], dtype=np.int64)
        if p.presence_penalty or p.frequency_penalty:
            ids, times = np.unique(known, return_counts=True)
            counts.extend((i, token, n) for token, n in zip(ids.tolist(), times.tolist(), strict=True))
        if p.repetition_penalty != 1:
            seen.append(np.unique(np.concatenate([req.prompt_token_ids, known])))
            seen_of.append(i)
        processing += [
            LogitsProcessing(
                row=i, name=call.name, params=call.params, prompt_ids=req.prompt_token_ids, output_ids=known
            )
            for call in req.logits_processors
        ]
    num_logprobs = [-1 if req.num_logprobs is None else req.num_logprobs for req in reqs]

    def floats(values: list[float]) -> np.ndarray:
        return np.array(values, dtype=np.float32) if values else _NO_FLOATS

    def ints(values: Sequence[int]) -> np.ndarray:
        return np.array(values, dtype=np.int64) if values else _NO_IDS

    return SamplingBatchInfo(
        batch_indices=ints(batch_indices),
        temperatures=floats([p.temperature for p in params]),
        top_ps=floats([p.top_p for p in params]),
        top_ks=ints([p.top_k for p in params]),
        min_ps=floats([p.min_p for p in params]),
        seeds=ints([p.seed for p in params]),
        output_indices=ints(output_indices),
        num_logprobs=ints(num_logprobs),
        bias_rows=ints([row for row, _, _ in bias]),
        bias_ids=ints([token for _, token, _ in bias]),
        bias_values=floats([value for _, _, value in bias]),
        count_rows=ints([row for row, _, _ in counts]),
        count_ids=ints([token for _, token, _ in counts]),
        count_values=ints([n for _, _, n in counts]),
        presence=floats([p.presence_penalty for p in params]),
        frequency=floats([p.frequency_penalty for p in params]),
        seen_rows=np.repeat(ints(seen_of), [len(ids) for ids in seen]) if seen else _NO_IDS,
        seen_ids=np.concatenate(seen) if seen else _NO_IDS,
        repetition=floats([p.repetition_penalty for p in params]),
        logprobs=output_rows(reqs, num_logprobs),
        processing=tuple(processing),
    )
