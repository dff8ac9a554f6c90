"""What an engine does with its caches when memory goes, over fake workers."""

from types import SimpleNamespace
from typing import Any, cast

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.engine.weights.changing import EngineWeights
from vlmserve.ipc.weight_messages import ReleaseMemoryReq


def test_copies_between_tiers_are_not_made_when_their_memory_is_gone() -> None:
    rig = Rig(Knobs(host_pages=16))
    rig.run(request("a", [*range(1, 21)], new=4))
    rig.kv.prefix_cache.evict(8)
    jobs = rig.kv.prefix_cache.take_copy_jobs()
    assert jobs
    cast(Any, rig.kv.prefix_cache)._jobs = [*jobs]
    own = SimpleNamespace(memory=SimpleNamespace(released=frozenset()), missing=frozenset(), obey=lambda order: ("", 8))
    EngineWeights(rig.loop, cast(Any, own)).handle(ReleaseMemoryReq(tags=("kv_cache",)))
    assert rig.kv.prefix_cache.take_copy_jobs() == ()
