"""`vlmserve bench soak`: what it asks, what it takes for a leak, and (slow) that the server has none."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from vlmserve.commands.bench.soak import COUNTS, Sample, growth, main
from vlmserve.commands.bench.soak_requests import Mix

MIB = 2**20
LIMIT = 1024.0


@pytest.fixture(scope="module")
def mix() -> Mix:
    return Mix("m", seed=3, cut_off=0.4)


def test_requests_are_known_by_seed_and_number(mix):
    again, other = Mix("m", seed=3, cut_off=0.4), Mix("m", seed=4, cut_off=0.4)
    assert [again.request(number) for number in (5, 2)] == [mix.request(5), mix.request(2)]
    assert other.request(5) != mix.request(5)


def test_all_kinds_come_and_are_left_at_all_places(mix):
    requests = [mix.request(number) for number in range(600)]
    assert len({one.kind for one in requests}) == 14
    cuts = Counter(one.cut.where for one in requests if one.cut is not None)
    assert set(cuts) == {"in its body", "waiting", "in its stream"}
    assert 0.34 < sum(cuts.values()) / len(requests) < 0.46
    assert min(cuts.values()) > 30
    assert len({one.headers["X-Forwarded-For"] for one in requests}) > 595


def samples(**growing: list[int]) -> list[Sample]:
    """Twenty of a server that holds always the same, but for what is given: a count, or the memory of a process."""
    steady = {name: [7] * 20 for name in COUNTS} | {"api": [200 * MIB] * 20, "scheduler": [200 * MIB] * 20} | growing
    return [
        Sample(
            requests=1000 * at,
            pss={name: steady[name][at] for name in ("api", "scheduler")},
            **{name: steady[name][at] for name in COUNTS},
        )
        for at in range(20)
    ]


def grows(seen: list[Sample]) -> list[str]:
    return [one.name for one in growth(seen, bytes_per_request=LIMIT) if not one.bounded]


@pytest.mark.parametrize("name", [name for name in COUNTS if name != "threads"])
def test_one_more_at_the_end_is_growth(name):
    assert grows(samples(**{name: [7] * 19 + [8]})) == [name]
    assert grows(samples(**{name: [8] + [7] * 18 + [8]})) == [], "early in the run there were as many"


def test_threads_that_start_again_and_again_are_growth():
    assert grows(samples(threads=[7 + at // 4 for at in range(20)])) == ["threads"], "one in 4,000 requests"
    assert grows(samples(threads=[7] * 14 + [8] * 6)) == [], "a pool began its last thread late"


FULL, LEAK = [200 * MIB] * 20, [200 * MIB + at * 1000 * 2048 for at in range(20)]  # two KiB a request


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ({}, []),
        ({"api": [100 * MIB + 20 * MIB * min(at, 5) for at in range(20)]}, []),  # caches fill early
        ({"api": [200 * MIB + (at % 2) * 8 * MIB for at in range(20)]}, []),
        ({"api": LEAK}, ["memory", "of api"]),
        ({"scheduler": LEAK, "api": LEAK[::-1]}, ["of scheduler"]),  # what another one frees hides nothing
    ],
)
def test_memory_that_grows_with_requests_is_a_leak(held, found):
    assert grows(samples(**held)) == found


def test_media_processes_that_are_replaced_hide_nothing():
    for api, found in (FULL, []), (LEAK, ["memory", "of api"]):
        seen = [
            replace(one, pss=one.pss | {"media-0": (200 - 5 * at) * MIB}) for at, one in enumerate(samples(api=api))
        ]
        assert grows(seen) == found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nothing_grows_in_a_server(tmp_path: Path, capsys):
    """Fewer requests than `vlmserve bench soak` sends by default: what the allocator keeps goes up and down by 20 MiB
    in a process, so a leak shows from the size of a small picture's values on. Everything else must not grow at all."""
    file = tmp_path / "soak.json"
    words = ["--requests", "2000", "--warm-up", "500", "--every", "100", "--bytes-per-request", "40960"]
    status = main([*words, "--json", str(file)])
    assert status == 0, capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["cut_off"] >= 0.35 * 2000
    assert len(found["samples"]) == 16
