"""Chooses a replica for each request, by the work in flight at each replica and the prefixes that each has cached.

A replica that had the same prompt's beginning or the same pictures has most of the work done. The best match wins if it
saves a good part of the work and its replica has not much more to do than the idlest one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Method = Literal["affinity", "round_robin", "shortest_queue"]


BLOCK_TOKENS = 32
"""The length of a block in tokens: shorter ones cost time for each request, longer ones miss short prompts."""
KEY_BYTES = 16
"""The length of a block's key."""
ANSWER_TOKENS = 256
"""The tokens of an answer whose length is not known ahead. Each takes a step, though one that is shared."""


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


MOST_KEYS = 2**17
"""The number of keys kept: some 20 MiB, for prefixes of 4 million tokens."""


class KnownKeys:
    """Keys and the replicas that each was sent to: a guess of their caches, in bounded memory. The least recently sent
    key is forgotten first.

    most: keys that are kept.
    """

    def __init__(self, *, most: int = MOST_KEYS) -> None:
        self._most = most
        self._replicas: OrderedDict[bytes, int] = OrderedDict()  # a bit for each replica

    def __len__(self) -> int:
        return len(self._replicas)

    def longest(self, prefix: Sequence[bytes], size: int) -> list[int]:
        """Return how many keys each of `size` replicas has, from the first one on and without a gap."""
        lengths, left = [0] * size, -1
        for number, key in enumerate(prefix, 1):
            left &= self._replicas.get(key, 0)
            if not left:
                break
            for replica in range(size):
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

    def clear(self, replica: int | None = None) -> None:
        """Forget the keys of a replica, or of all."""
        mask = 0 if replica is None else ~(1 << replica)
        self._replicas = OrderedDict((key, left) for key, bits in self._replicas.items() if (left := bits & mask))


_WORTH = 0.5
"""The part of a request's work that a match must save."""
_APART_TIMES = 1.5


class ReplicaRouter:
    """Chooses among `size` replicas, and among those added later. The same calls always lead to the same choices. Not
    thread-safe.

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
        self._known = KnownKeys(most=most_keys)
        self._most_sessions = most_sessions
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._in_flight: dict[str, tuple[int, int]] = {}  # rid -> replica, tokens
        self._loads = [0] * size
        self._answers = [0] * size
        self._placed = [0] * size
        self._others = [0] * size
        self._vacant: list[int] = []
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

    def add(self) -> int:
        """Add a replica, and return its number, which may be that of one that was removed."""
        if self._vacant:
            replica = self._vacant.pop()
            self._placed[replica] = max(self._placed)
            return replica
        self._loads.append(0)
        self._answers.append(0)
        self._others.append(0)
        self._placed.append(max(self._placed, default=0))  # or it would get all requests until it has had as many
        self.size += 1
        return self.size - 1

    def remove(self, replica: int) -> None:
        """Remove a replica for which nothing is in flight."""
        assert not self._loads[replica], f"{self._loads[replica]} tokens are in flight at replica {replica}"
        self.forget(replica)
        self._sessions = OrderedDict((name, at) for name, at in self._sessions.items() if at != replica)
        self._others[replica] = 0
        self._vacant.append(replica)

    def told(self, replica: int, tokens: int) -> None:
        """Note the tokens in flight at a replica for others than this router."""
        self._others[replica] = tokens

    def place(self, demand: Demand, among: Sequence[int] | None = None) -> int:
        """Choose the replica for a request, and count it as in flight there. among: the choice; None: all."""
        saved = self._saved(demand)
        replica = self._choose(demand, saved, range(self.size) if among is None else among)
        self._known.sent(demand.prefix, replica)
        self._known.sent((digest for digest, _ in demand.media), replica)
        if demand.session:
            self.remember(demand.session, replica)
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

    def forget(self, replica: int | None = None) -> None:
        """Forget the prefixes and media of a replica, or of all: the caches are empty."""
        self._known.clear(replica)

    def _choose(self, demand: Demand, saved: list[int], among: Sequence[int]) -> int:
        if demand.replica is not None:
            return demand.replica
        if self._sessions.get(demand.session) in among:
            return self._sessions[demand.session]
        open_ones = [replica for replica in among if self._answers[replica] < self._most_answers] or among
        if self._method == "round_robin":
            replica = min(open_ones, key=lambda one: (one - self._turn) % self.size)
            self._turn = replica + 1
            return replica
        idlest = min(open_ones, key=self._busyness)
        if self._method == "shortest_queue":
            return idlest
        best = min(open_ones, key=lambda replica: (-saved[replica], *self._busyness(replica)))
        least, most = (self._loads[replica] + self._others[replica] for replica in (idlest, best))
        worth = saved[best] > 0 and saved[best] >= _WORTH * demand.work
        return best if worth and most <= max(least + self._apart_tokens, least * _APART_TIMES) else idlest

    def _busyness(self, replica: int) -> tuple[int, int, int]:
        # where nothing is in flight they take turns
        return self._loads[replica] + self._others[replica], self._placed[replica], replica

    def _saved(self, demand: Demand) -> list[int]:
        """Return the tokens of `Demand.work` that each replica has cached, as far as is known."""
        saved = [length * BLOCK_TOKENS for length in self._known.longest(demand.prefix, self.size)]
        for digest, tokens in demand.media:
            for replica in range(self.size):
                saved[replica] += tokens * self._known.has(digest, replica)
        return saved

    def remember(self, session: str, replica: int) -> None:
        """Send the requests of a session to a replica from now on."""
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
