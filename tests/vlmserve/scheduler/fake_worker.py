"""A worker without a model whose answers depend on every token a request's slots really hold.

Its "KV cache" stores, per slot, what was computed there; the next token is a hash of the whole history read back
through the request table. A slot that is freed too early, shared wrongly or written twice changes the answer.
"""

import hashlib

import numpy as np

from vlmserve.executor.model_worker_batch import (
    ModelWorkerBatch,
    ModelWorkerResult,
    PromptLogprobRows,
    RowLogprobs,
    SamplingBatchInfo,
)
from vlmserve.memory.recurrent_states import BLANK

VOCAB = 50


def next_token(history: list[tuple]) -> int:
    return int.from_bytes(hashlib.sha256(repr(history).encode()).digest()[:4], "little") % VOCAB


def answer(prompt: list[tuple], length: int, delta: int, matcher=None) -> list[int]:
    """What a request must be answered: prompt is [(what, position), ...]. matcher: of its grammar."""
    history, out = list(prompt), []
    while len(out) < length and not (matcher is not None and matcher.is_over):
        token = next_token(history)
        if matcher is not None:
            token = next_allowed(token, matcher.next_mask())
            matcher.accept(token)
        out.append(token)
        history.append((("id", out[-1]), (len(history) + delta,) * 3))
    return out


def next_allowed(token: int, mask: np.ndarray) -> int:
    """The first token from this one on whose bit is 1."""
    while not mask[token // 32] >> token % 32 & 1:
        token = (token + 1) % VOCAB
    return token


def guess(history: list[tuple]) -> int:
    """A guess of the next token, which is right more often than not."""
    token = next_token(history)
    return token if token % 3 else (token + 1) % VOCAB


def score(history: list[tuple], token: int) -> float:
    """The "logprob" of a token behind a history, which is different for every other history."""
    digest = hashlib.sha256(repr((history, int(token))).encode()).digest()
    return -float(int.from_bytes(digest[:3], "little")) / 2**20


class FakeWorker:
    def __init__(self, num_slots: int, rows: int, context: int, *, window: int = 0) -> None:
        self.kv: list[tuple | None] = [None] * num_slots
        self.window_kv: dict[int, tuple | None] = {}
        self.window = window
        self.table, self.window_table = np.zeros((2, rows, context), np.int64)
        self.host: dict[int, tuple | None] = {}
        self.last = np.zeros(rows, np.int64)
        self.batches: list[ModelWorkerBatch] = []
        self.fail_at: int | None = None
        self.states: dict[int, list[tuple]] = {BLANK: []}
        self.guessed: dict[int, tuple[int, list[tuple]]] = {}  # before the last step with guesses, and behind it
        self.resumed = 0

    def forward(self, batch: ModelWorkerBatch) -> tuple:
        self.batches.append(batch)
        if self.fail_at == batch.step:
            raise RuntimeError("broken on purpose")
        for job in batch.kv_copies:
            here, there = job.device_slots.tolist(), job.host_slots.tolist()
            if job.direction == "to_host":
                self.host.update((to, self.kv[of]) for of, to in zip(here, there, strict=True))
            else:
                for of, to in zip(there, here, strict=True):
                    self.kv[to] = self.host[of]
        owners = np.repeat(batch.req_pool_indices, batch.seq_lens - batch.prefix_lens)
        ids = np.where(batch.input_ids < 0, self.last[owners], batch.input_ids)
        what = [("id", int(i)) for i in ids]
        for part in batch.mm_embeds:
            for k, row in enumerate(part.embeds.tolist()):
                what[part.token + k] = ("media", *row)
        for prefix in batch.prefix_slots:
            self.table[prefix.req_pool_idx, : len(prefix.slots)] = prefix.slots
            self.window_table[prefix.req_pool_idx, : len(prefix.window_slots)] = prefix.window_slots
        assert len(set(batch.out_cache_loc.tolist())) == len(batch.out_cache_loc), "a slot is written twice"
        for copy in batch.state_copies:
            assert copy.target != BLANK
            self.states[copy.target] = self.states[copy.source]
            self.resumed += copy.source != BLANK
        at = 0
        histories, before, drafts, made_here = [], [], [], False
        num_drafts = batch.num_drafts if len(batch.num_drafts) else np.zeros(len(batch.seq_lens), np.int64)
        parts = zip(batch.req_pool_indices, batch.prefix_lens, batch.seq_lens, num_drafts, strict=True)
        for row, start, end, guesses in parts:
            for position in range(start, end):
                slot = int(batch.out_cache_loc[at])
                if position >= end - guesses:
                    made_here |= batch.input_ids[at] < 0
                    if batch.input_ids[at] < 0:
                        what[at] = "id", guess([self.kv[slot] for slot in self.table[row, :position]])
                    drafts.append(what[at][1])
                self.table[row, position] = slot
                self.kv[slot] = (what[at], tuple(batch.positions[:, at].tolist()))
                at += 1
            histories.append([self.kv[slot] for slot in self.table[row, :end]])
            before += [(histories[-1], position + 1) for position in range(start, end)]
        self._write_windows(batch, histories)
        self._advance_states(batch, histories, num_drafts)
        asked = batch.prompt_logprobs
        scores = None if asked is None else self._scores([before[token] for token in asked.tokens], asked)
        counts = batch.hidden_counts if len(batch.hidden_counts) else [1] * len(batch.hidden_tokens)
        hidden = [
            [sum(score(history[:end], 0) for history, end in before[token + 1 - count : token + 1])]
            for token, count in zip(batch.hidden_tokens, counts, strict=True)
        ]
        return batch, before, scores, np.array(hidden, np.float32).reshape(-1, 1), drafts if made_here else []

    def _write_windows(self, batch: ModelWorkerBatch, histories: list[list]) -> None:
        """What lies in the window of a token must be what its request's slots hold."""
        if not self.window:
            return
        assert len(set(batch.window_cache_loc.tolist())) == len(batch.out_cache_loc), "a slot is written twice"
        at, parts = 0, list(zip(batch.req_pool_indices, batch.prefix_lens, batch.seq_lens, histories, strict=True))
        for row, start, end, history in parts:
            for position in range(start, end):
                self.window_table[row, position] = batch.window_cache_loc[at]
                self.window_kv[int(batch.window_cache_loc[at])] = history[position]
                at += 1
        for row, start, end, history in parts:
            seen = slice(max(0, start + 1 - self.window), end)
            kept = [self.window_kv.get(slot) for slot in self.window_table[row, seen].tolist()]
            assert kept == history[seen], "a window of other tokens"

    def _advance_states(self, batch: ModelWorkerBatch, histories: list[list], num_drafts: np.ndarray) -> None:
        """What a state is of must be what its request's slots hold."""
        states = batch.states.tolist()
        advanced = {}
        for job in batch.state_advances:
            start, history = self.guessed[job.row]
            assert self.states[job.source] == history[:start], "a state of other tokens goes on"
            assert start < start + job.tokens <= len(history)
            assert job.target not in {BLANK, *advanced}
            advanced[job.target] = history[: start + job.tokens]
        self.states |= advanced
        kept = [snapshot.target for snapshot in batch.state_snapshots]
        assert len({*states, *kept}) == len(states) + len(kept), "a state is written twice"
        rows = batch.req_pool_indices.tolist()
        parts = zip(states, rows, batch.prefix_lens, histories, num_drafts, strict=bool(states))
        for state, row, start, history, guesses in parts:
            assert self.states[state] == history[:start], "a state of other tokens"
            if guesses:
                self.guessed[row] = start, history
            else:
                self.states[state] = history
        for snapshot in batch.state_snapshots:
            history = histories[snapshot.index]
            end = int(batch.prefix_lens[snapshot.index]) + snapshot.tokens
            assert batch.prefix_lens[snapshot.index] < end <= len(history)
            self.states[snapshot.target] = history[:end]

    @staticmethod
    def _scores(rows: list[tuple[list, int]], asked: PromptLogprobRows) -> RowLogprobs:
        known = [history[:end] for history, end in rows]
        width = max(int(asked.rows.tops.max(initial=0)), 0)
        best = np.array([[next_token(history)] * width for history in known], np.int64).reshape(len(known), width)
        pairs = zip(asked.rows.asked_rows, asked.rows.asked_ids, strict=True)
        return RowLogprobs(
            logprobs=np.array([score(h, t) for h, t in zip(known, asked.targets, strict=True)], np.float32),
            ranks=np.array([len(history) for history in known], np.int64),
            top_ids=best,
            top_logprobs=best.astype(np.float32),
            asked=np.array([score(known[row], token) for row, token in pairs], np.float32),
        )

    def sample(self, forwarded: tuple, info: SamplingBatchInfo) -> ModelWorkerResult:
        batch, before, scores, hidden, drafts = forwarded
        histories = [before[token][0][: before[token][1]] for token in info.token_indices]
        of_output = [] if info.logprobs is None else zip(info.logprobs.asked_rows, info.logprobs.asked_ids, strict=True)
        tokens = [next_token(history) for history in histories]
        for row, mask in zip(info.masked_rows, info.bitmasks, strict=True):
            tokens[row] = next_allowed(tokens[row], mask)
        self.last[batch.req_pool_indices[info.batch_indices]] = tokens
        none = np.zeros((len(tokens), 0))
        return ModelWorkerResult(
            step=batch.step,
            compute_s=0.001 * len(batch.input_ids),
            next_token_ids=np.array(tokens, dtype=np.int64),
            logprobs=np.full(len(tokens), np.nan, np.float32),
            top_ids=none.astype(np.int64),
            top_logprobs=none.astype(np.float32),
            asked_logprobs=np.array([score(histories[row], token) for row, token in of_output], np.float32),
            prompt_logprobs=scores,
            hidden_states=hidden,
            drafts=np.array(drafts, np.int64) if drafts else None,
        )
