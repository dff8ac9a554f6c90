"""The embedding store in several processes, also killed ones."""

from __future__ import annotations

import time
from contextlib import ExitStack
from multiprocessing import active_children
from random import Random

import pytest

from tests.vision.store_helpers import (
    HEADER,
    bytes_on_disk,
    entry_files,
    file_of,
    holds,
    key,
    open_store,
    rows,
    temporary_files,
)
from tests.vision.store_processes import put_for_ever, received, use, worker
from vision.cache.stats import TierStats

SIZE = HEADER + 1024


def test_a_killed_writer_loses_nothing_that_it_confirmed(tmp_path, caplog):
    random = Random(0)
    confirmed, cut_off = [], 0
    for kill in range(12):
        first, width = 1000 * kill, random.choice((64, 1024, 8192))  # 1 KiB to 128 KiB
        form = {"width": width}
        with worker(put_for_ever, tmp_path, first, width, random.randrange(1, 30)) as (_, connection):
            seen = received(connection)
        assert seen == list(range(first, first + len(seen)))
        confirmed += [(number, form) for number in seen]
        cut_off += len(temporary_files(tmp_path))
        store = open_store(tmp_path, clock=lambda: time.time() + 1000)
        assert temporary_files(tmp_path) == []
        assert all(holds(store, number, **form) for number in seen)
        holds(store, first + len(seen), **form)  # there or not, but not wrong
        assert store.put(key(first + 999), rows(first + 999))
    assert cut_off > 0
    store = open_store(tmp_path)
    assert all(holds(store, number, **form) for number, form in confirmed)
    assert all(file_of(tmp_path, n).with_suffix(".pin").exists() for n, _ in confirmed if n % 5 == 0)
    assert len(confirmed) > 8
    assert "damaged" not in caplog.text


def test_processes_read_write_and_evict_at_once(tmp_path):
    limit = 30 * SIZE
    with ExitStack() as stack:
        workers = [stack.enter_context(worker(use, tmp_path, seed, limit, 60, 400)) for seed in range(3)]
        for _, connection in workers:
            assert connection.recv() == "ready"
        for _, connection in workers:
            connection.send("go")
        results = [received(connection) for _, connection in workers]
    for [stats, *warnings] in results:
        assert isinstance(stats, TierStats), stats
        assert stats.hits + stats.misses == 400
        assert warnings == []
        assert stats.hits > 0
    assert sum(stats.evictions for [stats, *_] in results) > 0
    assert bytes_on_disk(tmp_path) < limit * 3 // 2
    assert temporary_files(tmp_path) == []
    store = open_store(tmp_path, limit=limit)
    there = len(entry_files(tmp_path))
    assert there >= 20
    assert sum(holds(store, number) for number in range(60)) == there
    assert all(holds(store, number) for number in range(3))  # pinned


@pytest.fixture(autouse=True)
def _no_left_over_workers():
    yield
    assert active_children() == []
