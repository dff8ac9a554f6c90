"""Conservation: when nobody is there, everything is free or cached."""

from __future__ import annotations

from vlmserve.ipc.messages import SchedulerStats
from vlmserve_common.errors import EngineError


def check_pools(stats: SchedulerStats, *, held_bytes: int, sessions: int, held_states: int = 0) -> None:
    """When idle: free + cached = total, for KV slots, the request pool and states of recurrent layers, and none of the
    encoder's memory is held; else EngineError. sessions: conversations that keep KV locked. held_states: those that are
    neither free nor cached."""
    problems = []
    if stats.kv_locked_tokens and not sessions:
        problems.append(f"{stats.kv_locked_tokens} KV slots are locked")
    free, total = stats.kv_free_tokens, stats.kv_total_tokens
    cached = stats.kv_cached_tokens + stats.kv_locked_tokens
    if free + cached != total:
        problems.append(f"{free} free + {cached} cached KV slots are not {total}")
    if stats.req_pool_free != stats.req_pool_total:
        problems.append(f"{stats.req_pool_free} of {stats.req_pool_total} places in the request pool are free")
    if held_states:
        problems.append(f"{held_states} states of recurrent layers are neither free nor cached")
    if held_bytes:
        problems.append(f"{held_bytes} bytes of embeddings are held")
    if problems:
        raise EngineError("idle, but " + "; ".join(problems))
