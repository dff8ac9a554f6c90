"""The inputs of sampling besides logits, on their way to the device in one copy."""

from __future__ import annotations

import numpy as np

from vlmserve.executor.logprobs import LogprobInputs
from vlmserve.executor.model_worker_batch import LogprobRows, SamplingBatchInfo
from vlmserve_common.compute.transfers import Upload, Uploaded

# Below, logits divided by it may overflow, and the choice is the greedy one anyway.
MIN_TEMPERATURE = 1e-5


class SamplerInputs:
    """The sampling inputs of a step; a part that no request needs is None. Numbers that shapes and branches depend on
    stay on the host."""

    def __init__(self, info: SamplingBatchInfo, vocab: int, upload: Upload) -> None:
        more = len(info.in_flight_rows) > 0
        repeated = len(info.seen_rows) > 0 or (more and (info.repetition != 1).any())
        self.repeated = Repeated(info, upload) if repeated else None
        counted = len(info.count_rows) > 0 or (more and (info.presence.any() or info.frequency.any()))
        self.counted = Counted(info, vocab, upload) if counted else None
        self.bias = None
        if len(info.bias_rows):
            self.bias = tuple(upload.add(part) for part in (info.bias_rows, info.bias_ids, info.bias_values))
        self.allowed = None
        if len(info.allowed_rows):
            self.allowed = upload.add(info.allowed_rows), upload.add(info.allowed_ids)
        self.masked = None
        if len(info.masked_rows):
            self.masked = upload.add(info.masked_rows), upload.add(info.bitmasks)
        random = np.flatnonzero(info.temperatures >= MIN_TEMPERATURE)
        self.random = RandomRows(info, random, vocab, upload) if len(random) else None
        self.wanted = np.flatnonzero(info.num_logprobs >= 0)
        self.logprobs = None
        if len(self.wanted):
            self.logprobs = upload.add(self.wanted), LogprobInputs(_rows(info, self.wanted), upload)


class Repeated:
    """Tokens of requests with a repetition penalty; tokens in flight come last. All tokens have their row among the S
    and penalties. Known tokens have ids."""

    def __init__(self, info: SamplingBatchInfo, upload: Upload) -> None:
        rows = np.concatenate([info.seen_rows, info.in_flight_rows])
        self.rows = upload.add(rows)
        self.known_ids = upload.add(info.seen_ids)
        self.penalties = upload.add(info.repetition[rows])


class Counted:
    """Tokens of requests with a frequency or presence penalty; tokens in flight come last. All tokens have their row
    among the S and penalties. Known tokens have row * vocab + id, ascending, and how often each was produced."""

    def __init__(self, info: SamplingBatchInfo, vocab: int, upload: Upload) -> None:
        rows = np.concatenate([info.count_rows, info.in_flight_rows])
        self.known = len(info.count_rows)
        self.rows = upload.add(rows)
        self.known_ids = upload.add(info.count_ids)
        self.keys = upload.add(info.count_rows * vocab + info.count_ids)
        self.counts = upload.add(info.count_values.astype(np.float32))
        self.frequency = upload.add(info.frequency[rows])
        self.presence = upload.add(info.presence[rows])
        self.row_keys = upload.add(info.in_flight_rows * vocab)


class RandomRows:
    """The rows of the S that are not greedy. keep: how many of the likeliest tokens are candidates at the most; None:
    all, in no order."""

    def __init__(self, info: SamplingBatchInfo, rows: np.ndarray, vocab: int, upload: Upload) -> None:
        top_ks, top_ps, min_ps = info.top_ks[rows], info.top_ps[rows], info.min_ps[rows]
        self.index = upload.add(rows)
        self.temperatures = upload.add(info.temperatures[rows])
        self.seeds = upload.add(info.seeds[rows])
        self.output_indices = upload.add(info.output_indices[rows])
        limited = (top_ks > 0) & (top_ks < vocab)
        self.keep: int | None = None
        self.limits: tuple[Uploaded, Uploaded] | None = None
        if limited.any() or (top_ps < 1).any():
            # only as many candidates are sorted as the largest top_k needs
            self.keep = min(int(top_ks.max()), vocab) if limited.all() else vocab
            self.limits = upload.add(np.where(limited, top_ks, vocab)), upload.add(top_ps)
        self.min_ps = upload.add(min_ps) if (min_ps > 0).any() else None


def _rows(info: SamplingBatchInfo, wanted: np.ndarray) -> LogprobRows:
    """Return the logprobs that are wanted of the rows `wanted`, ascending. No other rows may want any."""
    given = info.logprobs
    if given is None:
        ones, none = np.ones(len(wanted), dtype=np.float32), np.zeros(0, dtype=np.int64)
        return LogprobRows(
            tops=info.num_logprobs[wanted], temperatures=ones, top_ps=ones, asked_rows=none, asked_ids=none
        )
    return LogprobRows(
        tops=info.num_logprobs[wanted],
        temperatures=given.temperatures[wanted],
        top_ps=given.top_ps[wanted],
        asked_rows=np.searchsorted(wanted, given.asked_rows),
        asked_ids=given.asked_ids,
    )
