"""What a message to the engine asks of a replica: its work, and the caches that would save some of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from blake3 import blake3

from vlmserve.ipc.messages import BatchTokenizedGenerateReqInput, EncodeReqInput, TokenizedGenerateReqInput
from vlmserve.routing.replicas import ANSWER_TOKENS, BLOCK_TOKENS, KEY_BYTES, Demand

Work: TypeAlias = TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput


def parts_of(message: Work) -> Iterator[Work]:
    """Split a message into parts that may go to different replicas. The answers of one `group` stay together."""
    if not isinstance(message, BatchTokenizedGenerateReqInput):
        yield message
        return
    groups: dict[str, list[TokenizedGenerateReqInput]] = defaultdict(list)
    for request in message.requests:
        groups[request.group].append(request)
    for requests in groups.values():
        yield message if len(groups) == 1 else BatchTokenizedGenerateReqInput(requests=tuple(requests))


def demand_of(message: Work) -> Demand:
    """Return the demand of a message about one prompt, or of its first prompt and all answers."""
    if isinstance(message, EncodeReqInput):
        # these have no places in a prompt; the tower takes four patches for a token
        media = tuple((item.digest, int(np.prod(item.grid_thw)) // 4) for item in message.items)
        return Demand(rids=(message.rid,), media=media)
    requests = message.requests if isinstance(message, BatchTokenizedGenerateReqInput) else (message,)
    first = requests[0]
    items = first.mm_inputs.items if first.mm_inputs is not None else ()
    limits = (request.sampling_params.max_new_tokens for request in requests)
    return Demand(
        rids=tuple(request.rid for request in requests),
        tokens=len(first.input_ids),
        answer=sum(ANSWER_TOKENS if limit is None else min(limit, ANSWER_TOKENS) for limit in limits),
        prefix=tuple(prefix_keys(first)),
        media=tuple((item.digest, item.num_tokens) for item in items),
        session=first.session_id,
        replica=first.data_parallel_rank,
    )


def prefix_keys(request: TokenizedGenerateReqInput) -> Iterator[bytes]:
    """Yield a key for each whole block of a prompt. Equal keys mean equal prompts up to there, media included."""
    rows = request.input_ids if request.input_embeds is None else request.input_embeds.digests
    starting: dict[int, list[bytes]] = defaultdict(list)
    for item in request.mm_inputs.items if request.mm_inputs is not None else ():
        for start, _ in item.offsets:
            starting[start // BLOCK_TOKENS].append(item.digest)
    digest = blake3(request.cache_salt.encode() + b"\0")
    for block in range(len(rows) // BLOCK_TOKENS):
        digest.update(np.ascontiguousarray(rows[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]).tobytes())
        for medium in starting.get(block, ()):
            digest.update(medium)
        yield digest.digest(length=KEY_BYTES)
