"""What a request asks of whichever replica gets it, as far as routing goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from vlmserve.ipc.messages import (
    BatchTokenizedGenerateReqInput,
    EncodeReqInput,
    TokenizedGenerateReqInput,
)

BLOCK_TOKENS = 32
"""Prefixes are known in steps of so many tokens: finer costs time for each request, coarser misses short prompts."""
_KEY_BYTES = 16
# An answer's length is not known ahead. Tokens of an answer each take a step, though one that is shared.
_ANSWER_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """rids: of the answers. tokens: of the prompt. answer: about how many come of all answers together.

    prefix: a key of each whole block of the prompt, and all before it. media: of each medium its digest and its tokens.
    session: whose KV it goes on from; "" is none. replica: the one that it asks for.
    """

    rids: tuple[str, ...]
    tokens: int = 0
    answer: int = 0
    prefix: tuple[bytes, ...] = ()
    media: tuple[tuple[bytes, int], ...] = ()
    session: str = ""
    replica: int | None = None

    @property
    def work(self) -> int:
        """Tokens to compute where nothing of the prompt is known; those of media once more, for the vision tower."""
        return self.tokens + sum(tokens for _, tokens in self.media)


def demands(
    message: TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput,
) -> Iterator[tuple[TokenizedGenerateReqInput | BatchTokenizedGenerateReqInput | EncodeReqInput, Demand]]:
    """The parts of a message that may go to different replicas, and what each asks for. Answers to one prompt (a
    `group`) are one part."""
    if isinstance(message, EncodeReqInput):
        # these have no places in a prompt; the tower takes four patches for a token
        media = tuple((item.digest, int(np.prod(item.grid_thw)) // 4) for item in message.items)
        yield message, Demand(rids=(message.rid,), media=media)
        return
    if isinstance(message, TokenizedGenerateReqInput):
        yield message, demand_of((message,))
        return
    groups: dict[str, list[TokenizedGenerateReqInput]] = defaultdict(list)
    for request in message.requests:
        groups[request.group].append(request)
    for requests in groups.values():
        whole = message if len(groups) == 1 else BatchTokenizedGenerateReqInput(requests=tuple(requests))
        yield whole, demand_of(requests)


def demand_of(requests: list[TokenizedGenerateReqInput] | tuple[TokenizedGenerateReqInput, ...]) -> Demand:
    """What requests that must stay together ask for; the first one stands for all prompts."""
    first = requests[0]
    items = first.mm_inputs.items if first.mm_inputs is not None else ()
    limits = (request.sampling_params.max_new_tokens for request in requests)
    return Demand(
        rids=tuple(request.rid for request in requests),
        tokens=len(first.input_ids),
        answer=sum(_ANSWER_TOKENS if limit is None else min(limit, _ANSWER_TOKENS) for limit in limits),
        prefix=tuple(prefix_keys(first)),
        media=tuple((item.digest, item.num_tokens) for item in items),
        session=first.session_id,
        replica=first.data_parallel_rank,
    )


def prefix_keys(request: TokenizedGenerateReqInput) -> Iterator[bytes]:
    """A key for each whole block of a prompt: equal keys mean equal prompts up to there, media included."""
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
        yield digest.digest(length=_KEY_BYTES)
