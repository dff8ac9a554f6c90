"""The messages between servers. D is the decode server, P the prefill server.

D -> P  Hello                P -> D  Welcome, or Refusal
D -> P  PrefillOrder         P -> D  Computed (one a chunk), Complete, or Failed
D -> P  Renew (each second)  P -> D  Alive
D -> P  Release              P -> D  Released

from a decode server to its own agents: Pull and CancelPull; they answer Pulled
from its agents to those of P: Read, Describe; they answer Rows, Described
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from vlmserve.ipc.messages import TokenizedGenerateReqInput

PROTOCOL = 3
"""Servers with another number do not work together."""
LEASE_S = 30.0
"""A prefill server keeps a room so long after its decode server was heard last."""
RENEW_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerPart:
    """Heads [first, first + heads) of one layer of the KV cache, counted over the whole model; guessing layers come
    behind all others."""

    layer: int
    first: int
    heads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentInfo:
    """Where an agent is, and what it has. host: "" is the host of its server. group: of attention. state: describes
    its part of a request's recurrent state; "" for none. transports: by which it reads and is read, the best first."""

    host: str
    port: int
    group: int
    parts: tuple[LayerPart, ...]
    state: str = ""
    transports: tuple[str, ...] = ("tcp",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """A decode server asks for the prefill server's identity, which it compares with its own. sender: its own name. The
    rooms of its earlier links are given up: it has other ones by now."""

    protocol: int
    sender: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome:
    """identity: what must be equal on both sides, by names for people. max_prompt: tokens of the longest prompt."""

    protocol: int
    identity: dict[str, str]
    agents: tuple[AgentInfo, ...]
    max_prompt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """The message could not be taken, and why."""

    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillOrder:
    """Compute a prompt, and keep the KV of its tokens from `start` on. request: its rid is the room."""

    start: int
    request: TokenizedGenerateReqInput


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """Tokens [start, start + n) are computed: their KV is at `slots` int64 [n] of the agents of `group`."""

    room: str
    group: int
    start: int
    slots: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Complete:
    """All tokens up to `end` are computed. state: where the recurrent state behind them is; -1 without one.
    cached_tokens: of the prompt, found in the prefix cache."""

    room: str
    end: int
    state: int
    cached_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The room's prompt cannot be computed. status: an HTTP status; another server may do it if it is 500 or more.
    param: the request's field that is at fault."""

    room: str
    status: int
    message: str
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    """The decode server lives and wants these rooms."""

    rooms: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """The answer. missing: rooms that are not there."""

    missing: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """The decode server has what it wants of a room, or wants it no longer."""

    room: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """The answer. held: the room's slots were kept until now, so what was read from them is right."""

    room: str
    held: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """Send some KV. cuts: int64 [k, 3], each the number of a part of `AgentInfo` and its heads [a, b), counted from the
    part's first. slots: int64 [n]. state: of a recurrent state; -1 for none."""

    ticket: int
    cuts: np.ndarray
    slots: np.ndarray
    state: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The answer, uint8: the blocks of all cuts one behind the other, each as in `pools.KVPool.gather`.

    error: why there is none; "" if there is.
    """

    ticket: int
    data: np.ndarray
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Describe:
    """Tell where memory is that others read by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """The answer. metadata: NIXL's, uint8; empty if nobody may read. kind: of memory, as NIXL calls it; device: its
    number. tensors: int64 [k, 4], of each tensor its part, heads, address, and bytes of a slot, in the order of
    `pools.KVPool.gather`. states: int64 [k, 2], the address of each tensor of states, and the bytes of one. num_slots,
    num_states: how many there are."""

    metadata: np.ndarray
    kind: str
    device: int
    tensors: np.ndarray
    states: np.ndarray
    num_slots: int
    num_states: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An agent to read from. cuts: of it; own_cuts: where they go; both as in `Read`. has_state: the recurrent state
    comes from here, too. transport: by which."""

    address: str
    cuts: np.ndarray
    own_cuts: np.ndarray
    has_state: bool = False
    transport: str = "tcp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """Read KV of n tokens from other agents into own slots. slots, own_slots: int64 [n]. state, own_state: -1 for
    none."""

    ticket: int
    sources: tuple[Source, ...]
    slots: np.ndarray
    own_slots: np.ndarray
    state: int = -1
    own_state: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class CancelPull:
    """Stop a pull. It is answered as any other."""

    ticket: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Pulled:
    """A pull is over: nothing is written for it any more. error: "" if all has come."""

    ticket: int
    error: str = ""


ToPrefill: TypeAlias = Hello | PrefillOrder | Renew | Release
ToDecode: TypeAlias = Welcome | Refusal | Computed | Complete | Failed | Alive | Released
ToAgent: TypeAlias = Read | Describe | Pull | CancelPull
FromAgent: TypeAlias = Rows | Described | Pulled | Refusal


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """What became of an order, for the scheduler that gave it: nothing writes to its slots any more.

    failure: None if all KV is there. Another server may do better, or this one, if `failure.status` is 500 or more.
    """

    room: str
    cached_tokens: int = 0
    failure: Failed | None = None


class KVPoll(enum.IntEnum):
    """How far a room is, at the decode server. It only moves forward."""

    BOOTSTRAPPING = 0
    WAITING_FOR_INPUT = 1
    TRANSFERRING = 2
    SUCCESS = 3
    FAILED = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """An order from a scheduler to the `KVReceivers`. request: its rid is the room. start: tokens that are here.
    own_slots: int64, those of the tokens from there on. own_state: where the recurrent state goes; -1 for none. group:
    of attention."""

    request: TokenizedGenerateReqInput
    start: int
    own_slots: np.ndarray
    own_state: int = -1
    group: int = 0
