"""KV from one rank's cache to another's: any cut of heads and layers, any dtype, and what goes wrong on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from typing import Any, get_args

import numpy as np
import pytest
import torch

from vlmserve.disaggregation.agent import KVAgent
from vlmserve.disaggregation.links import Link
from vlmserve.disaggregation.messages import (
    AgentInfo,
    CancelPull,
    FromAgent,
    LayerPart,
    Pull,
    Pulled,
    ToAgent,
)
from vlmserve.disaggregation.pools import KVPool, sources
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache, StateShape
from vlmserve_common.errors import EngineError
from vlmserve_common.transport.wire import WireError

SLOTS, HEADS, DIM, KEY = 40, 4, 8, "sixteen characters"
NEEDS_NIXL = pytest.mark.skipif(find_spec("nixl_cu12") is None, reason="nixl-cu12 is not installed")
SHAPE = StateShape(conv=(1, 3, 5), recurrent=(1, 2, 3, 4), conv_dtype=torch.bfloat16, hidden=7)


def pool(layers: Sequence[int], heads: range, dtype=torch.float32, *, seed: int = 0, states: bool = False) -> KVPool:
    """A rank's pool; its content is the same function of layer, head and slot at all ranks of a seed."""
    device = torch.device("cpu")
    cache = KVCache(
        num_slots=SLOTS, num_layers=len(layers), num_kv_heads=len(heads), head_dim=DIM, dtype=dtype, device=device
    )
    for layer, one in zip(layers, cache.layers, strict=True):
        for number, part in enumerate((one.keys, one.values, one.key_scales, one.value_scales)):
            if part is not None:
                noise = torch.Generator().manual_seed(1000 * seed + 10 * layer + number)
                whole = torch.randn((SLOTS, HEADS, *part.shape[2:]), generator=noise) * 30
                part.copy_((whole * bool(seed))[:, heads.start : heads.stop])
    recurrent = None
    if states:
        recurrent = RecurrentCache(3, SHAPE, device)
        for part in (recurrent.conv, recurrent.recurrent, recurrent.hidden, recurrent.positions):
            part.copy_(torch.arange(part.numel()).view(part.shape) % 100 * bool(seed))
    parts = [LayerPart(layer=layer, first=heads.start, heads=len(heads)) for layer in layers]
    return KVPool(cache, parts, recurrent)


WHOLE, LOWER, UPPER = range(HEADS), range(2), range(2, 4)
# other ranks, own ranks: (layers, heads) of each
CUTS = {
    "as here": ([([0, 1], WHOLE)], [([0, 1], WHOLE)]),
    "heads there": ([([0, 1], LOWER), ([0, 1], UPPER)], [([0, 1], WHOLE)]),
    "heads here": ([([0, 1], WHOLE)], [([0, 1], LOWER), ([0, 1], UPPER)]),
    "layers there, heads here": ([([0], WHOLE), ([1], WHOLE)], [([0, 1], LOWER), ([0, 1], UPPER)]),
    "copies of heads there": ([([0, 1], range(3)), ([0, 1], range(1, 4))], [([0], WHOLE), ([1], WHOLE)]),
}


TRANSPORTS = ["tcp", pytest.param("nixl", marks=NEEDS_NIXL)]


def running(of: KVPool, transport: str) -> KVAgent:
    more = {}
    if transport == "nixl":
        from vlmserve.disaggregation.nixl import NixlTransport

        more = {"nixl": NixlTransport(of, KEY)}
    return KVAgent(of, host="127.0.0.1", peer_key=KEY, patience_s=5.0, transports=more)


class Ranks:
    """Running agents, with a link to each of the own ones. transport: the best of them all."""

    def __init__(
        self, there: Sequence[KVPool], here: Sequence[KVPool], *, key: str = KEY, transport: str = "tcp"
    ) -> None:
        self.there, self.here = ([running(one, transport) for one in pools] for pools in (there, here))
        for agent in (*self.there, *self.here):
            agent.start()
        others = [agent.info() for agent in self.there]
        self.sources = [sources(agent.info(), others, "127.0.0.1") for agent in self.here]
        self.links = [
            Link(f"tcp://127.0.0.1:{agent.port}", get_args(ToAgent), get_args(FromAgent), key) for agent in self.here
        ]

    def send(self, number: int, message: Any) -> None:
        self.links[number].send(message)

    def answer(self, number: int = 0) -> Any:
        assert self.links[number].socket.poll(20_000), "no answer"
        return self.links[number].receive()

    def close(self) -> None:
        for link in self.links:
            link.close()
        for agent in (*self.there, *self.here):
            agent.close()


@pytest.fixture(params=TRANSPORTS)
def pair(request) -> Iterator[Ranks]:
    pools = [pool([0], WHOLE, seed=1, states=True)], [pool([0], WHOLE, states=True)]
    with closing(Ranks(*pools, transport=request.param)) as ranks:
        yield ranks


FROM, TO = np.array([3, 4, 5, 20, 7]), np.array([30, 9, 10, 11, 2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_own_slots_hold_what_the_others_slots_held(cut, dtype, transport):
    there, here = CUTS[cut]
    mine = [pool(*one, dtype) for one in here]
    with closing(Ranks([pool(*one, dtype, seed=1) for one in there], mine, transport=transport)) as ranks:
        for number, found in enumerate(ranks.sources):
            assert {source.transport for source in found} == {transport}
            ranks.send(number, Pull(ticket=1, sources=found, slots=FROM, own_slots=TO))
            assert ranks.answer(number) == Pulled(ticket=1)
    for one, about in zip(mine, here, strict=True):
        wanted, cuts = pool(*about, dtype, seed=1), one.whole()
        assert np.array_equal(one.gather(cuts, TO), wanted.gather(cuts, FROM))
        others = np.setdiff1d(np.arange(SLOTS), TO)
        assert np.array_equal(one.gather(cuts, others), pool(*about, dtype).gather(cuts, others)), "and no other slot"


def test_a_state_comes_along(pair):
    pull = Pull(ticket=4, sources=pair.sources[0], slots=FROM[:0], own_slots=TO[:0], state=2, own_state=3)
    pair.send(0, pull)
    assert pair.answer() == Pulled(ticket=4)
    none = np.zeros((0, 3), np.int64)
    there, here = pair.there[0]._pool, pair.here[0]._pool
    assert np.array_equal(here.gather(none, TO[:0], 3), there.gather(none, FROM[:0], 2))
    assert not here.gather(none, TO[:0], 2).any()


def test_slots_that_are_not_there_are_said_to_be_missing(pair):
    pair.send(0, Pull(ticket=1, sources=pair.sources[0], slots=FROM + SLOTS, own_slots=TO))
    assert "there are 40" in pair.answer().error
    pair.send(0, Pull(ticket=2, sources=pair.sources[0], slots=FROM, own_slots=TO))
    assert pair.answer() == Pulled(ticket=2), "the link is as good as before"


def test_an_agent_that_is_gone_ends_a_pull_in_time(pair):
    pair.here[0]._patience_s = 0.3
    pair.there[0].close()
    pair.send(0, Pull(ticket=1, sources=pair.sources[0], slots=FROM, own_slots=TO))
    assert "nothing has come" in pair.answer().error
    pair.send(0, Pull(ticket=2, sources=pair.sources[0], slots=FROM, own_slots=TO))
    pair.send(0, CancelPull(ticket=2))
    assert pair.answer() == Pulled(ticket=2, error="cancelled")


def test_another_key_opens_nothing():
    with closing(Ranks([pool([0], WHOLE)], [pool([0], WHOLE)], key="another one of 16")) as ranks:
        ranks.send(0, CancelPull(ticket=1))
        with pytest.raises(WireError, match="--peer-key differs"):
            ranks.answer()  # it is a refusal, sealed with their key


def test_heads_and_states_that_nobody_has_are_named():
    own = AgentInfo(host="", port=1, group=0, parts=(LayerPart(layer=2, first=0, heads=2),), state="one")
    with pytest.raises(EngineError, match="head 0 of layer 2"):
        sources(own, [pool_info([0, 1])], "host")
    other = AgentInfo(host="", port=1, group=0, parts=(LayerPart(layer=2, first=0, heads=4),), state="another")
    with pytest.raises(EngineError, match="--tp-size and --pp-size must be equal"):
        sources(own, [other], "host")


def pool_info(layers: Sequence[int]) -> AgentInfo:
    parts = tuple(LayerPart(layer=layer, first=0, heads=2) for layer in layers)
    return AgentInfo(host="", port=1, group=0, parts=parts)
