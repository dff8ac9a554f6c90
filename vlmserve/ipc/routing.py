"""Chooses a replica for each request, by the work in flight at each replica and the prefixes that each has cached.

A replica that had the same prompt's beginning or the same pictures has most of the work done. The best match wins if it
saves a good part of the work and its replica has not much more to do than the idlest one.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from blake3 import blake3

from vlmserve.ipc.messages import BatchTokenizedGenerateReqInput, EncodeReqInput, TokenizedGenerateReqInput

Method = Literal["affinity", "round_robin", "shortest_queue"]


BLOCK_TOKENS = 32
"""The length of a block in tokens: shorter ones cost time for each request, longer ones miss short prompts."""
_KEY_BYTES = 16
# An answer's length is not known ahead. Tokens of an answer each take a step, though one that is shared.
_ANSWER_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """The work of one prompt's answers, and the caches that would save some of it.

    rids: the answers. tokens: of the prompt. answer: a guess of the tokens of all answers together. prefix: a key for
    each whole block of the prompt and all before it. media: digest and tokens of each medium. session: the conversation
    whose KV it goes on from; "" is none. replica: the one that the request asks for.
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
        """Return the tokens to compute if nothing is cached. Media count twice, once for the vision tower."""
        return self.tokens + sum(tokens for _, tokens in self.media)


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
        answer=sum(_ANSWER_TOKENS if limit is None else min(limit, _ANSWER_TOKENS) for limit in limits),
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
        yield digest.digest(length=_KEY_BYTES)


MOST_KEYS = 2**17
"""The number of keys kept: some 20 MiB, for prefixes of 4 million tokens."""


class KnownKeys:
    """Keys and the replicas that each was sent to: a guess of their caches, in bounded memory. The least recently sent
    key is forgotten first.

    size: number of replicas. most: keys that are kept.
    """

    def __init__(self, size: int, *, most: int = MOST_KEYS) -> None:
        self._everybody = (1 << size) - 1
        self._size = size
        self._most = most
        self._replicas: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica

    def __len__(self) -> int:
        return len(self._replicas)

    def longest(self, prefix: Sequence[bytes]) -> list[int]:
        """Return how many keys each replica has, from the first one on and without a gap."""
        lengths, left = [0] * self._size, self._everybody
        for number, key in enumerate(prefix, 1):
            left &= self._replicas.get(key, 0)
            if not left:
                break
            for replica in range(self._size):
                if left >> replica & 1:
                    lengths[replica] = number
        return lengths

    def has(self, key: bytes, replica: int) -> bool:
        """Return whether the key was sent to the replica."""
        return bool(self._replicas.get(key, 0) >> replica & 1)

    def sent(self, keys: Iterable[bytes], replica: int) -> None:
        """Note that keys went to a replica. The last key is forgotten first: the keys before it are useful without
        it."""
        for key in reversed(list(keys)):
            self._replicas[key] = self._replicas.get(key, 0) | 1 << replica
            self._replicas.move_to_end(key)
        while len(self._replicas) > self._most:
            self._replicas.popitem(last=False)

    def clear(self) -> None:
        """Forget all keys."""
        self._replicas.clear()


_WORTH = 0.5
"""The part of a request's work that a match must save."""
_APART_TIMES = 1.5


class ReplicaRouter:
    """Chooses among `size` replicas. The same calls always lead to the same choices. Not thread-safe.

    A replica with most_answers in flight is full, and is left out while another has room; not by a session or a
    request that names it. The replica of a match may have apart_tokens more in flight than the idlest one, or half as
    many again. The router remembers most_keys keys and most_sessions sessions. It forgets first those used least
    recently.
    """

    def __init__(
        self,
        size: int,
        *,
        method: Method = "affinity",
        most_answers: int = 2**31,
        apart_tokens: int = 4096,
        most_keys: int = MOST_KEYS,
        most_sessions: int = 2**14,
    ) -> None:
        self.size = size
        self._method = method
        self._most_answers = most_answers
        self._apart_tokens = apart_tokens
        self._known = KnownKeys(size, most=most_keys)
        self._most_sessions = most_sessions
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._in_flight: dict[str, tuple[int, int]] = {}  # rid -> replica, tokens
        self._loads = [0] * size
        self._answers = [0] * size
        self._placed = [0] * size
        self._turn = 0

    @property
    def loads(self) -> tuple[int, ...]:
        """Return the tokens in flight at each replica: of prompts, without matched prefixes, and a guess for
        answers."""
        return tuple(self._loads)

    @property
    def placed(self) -> tuple[int, ...]:
        """Return how many requests each replica got since the start."""
        return tuple(self._placed)

    @property
    def num_in_flight(self) -> int:
        """Return the number of answers that have not ended: zero when idle."""
        return len(self._in_flight)

    def place(self, demand: Demand) -> int:
        """Choose the replica for a request, and count it as in flight there."""
        saved = self._saved(demand)
        replica = self._choose(demand, saved)
        self._known.sent(demand.prefix, replica)
        self._known.sent((digest for digest, _ in demand.media), replica)
        if demand.session:
            self._remember(demand.session, replica)
        tokens = demand.work - saved[replica] + demand.answer
        for index, rid in enumerate(demand.rids):  # all answers to a prompt end apart
            share = tokens * (index + 1) // len(demand.rids) - tokens * index // len(demand.rids)
            self.end(rid)
            self._in_flight[rid] = replica, share
            self._loads[replica] += share
            self._answers[replica] += 1
        self._placed[replica] += 1
        return replica

    def replica_of(self, rid: str) -> int | None:
        """Return the replica that makes an answer; None if the answer has ended or never was."""
        found = self._in_flight.get(rid)
        return None if found is None else found[0]

    def end(self, rid: str) -> None:
        """Note the end of an answer, if it was in flight."""
        found = self._in_flight.pop(rid, None)
        if found is not None:
            replica, tokens = found
            self._loads[replica] -= tokens
            self._answers[replica] -= 1

    def forget(self) -> None:
        """Forget the prefixes and media: the caches are empty."""
        self._known.clear()

    def _choose(self, demand: Demand, saved: list[int]) -> int:
        if demand.replica is not None:
            return demand.replica
        if demand.session in self._sessions:
            return self._sessions[demand.session]
        everywhere = range(self.size)
        open_ones = [replica for replica in everywhere if self._answers[replica] < self._most_answers] or everywhere
        if self._method == "round_robin":
            replica = min(open_ones, key=lambda one: (one - self._turn) % self.size)
            self._turn = replica + 1
            return replica
        idlest = min(open_ones, key=self._busyness)
        if self._method == "shortest_queue":
            return idlest
        best = min(open_ones, key=lambda replica: (-saved[replica], *self._busyness(replica)))
        limit = max(self._loads[idlest] + self._apart_tokens, self._loads[idlest] * _APART_TIMES)
        worth = saved[best] > 0 and saved[best] >= _WORTH * demand.work
        return best if worth and self._loads[best] <= limit else idlest

    def _busyness(self, replica: int) -> tuple[int, int, int]:
        # where nothing is in flight they take turns
        return self._loads[replica], self._placed[replica], replica

    def _saved(self, demand: Demand) -> list[int]:
        """Return the tokens of `Demand.work` that each replica has cached, as far as is known."""
        saved = [length * BLOCK_TOKENS for length in self._known.longest(demand.prefix)]
        for digest, tokens in demand.media:
            for replica in range(self.size):
                saved[replica] += tokens * self._known.has(digest, replica)
        return saved

    def _remember(self, session: str, replica: int) -> None:
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
