"""Thousands of requests of all kinds on a simulated clock: all finish, rightly, nothing leaks, nobody starves."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.vlmserve.scheduler.prompts import expected, request
from tests.vlmserve.scheduler.rig import Knobs
from tests.vlmserve.scheduler.simulator import Arrival, Simulation
from vlmserve.ipc.messages import AbortReq, TokenizedGenerateReqInput

POLICIES = ("fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority")
PICTURES = [bytes([letter]) * 2 for letter in b"abcdefghijklmnop"]


def mixed_traffic(rng: random.Random, count: int, *, policy: str, rate: float) -> list[Arrival]:
    """Text with common beginnings, pictures and clips old and new, several answers to one prompt, five clients one of
    which sends half of it all; some are aborted. rate: requests a second, in bursts."""
    stems = [[rng.randrange(40) for _ in range(rng.randint(8, 60))] for _ in range(6)]
    arrivals: list[Arrival] = []
    at = 0.0
    while sum(isinstance(arrival.message, TokenizedGenerateReqInput) for arrival in arrivals) < count:
        at += rng.choice([0.0, 0.0, rng.expovariate(rate / 3)])
        number = len(arrivals)
        ids = [*rng.choice(stems)[: rng.randint(1, 60)], *(rng.randrange(40) for _ in range(rng.randint(1, 30)))]
        media = []
        kind = rng.random()
        if kind < 0.3 and len(ids) > 12:
            media = [(rng.randint(0, 2), rng.randint(1, 8), rng.choice(PICTURES))]
        elif kind < 0.4 and len(ids) > 16:
            media = [(2, 12, b"-".join(rng.choices(PICTURES, k=rng.choice([2, 3, 4]))))]
        message = request(f"r{number}", ids, media, new=rng.choice([1, 3, 8, 20]), ignore_eos=rng.random() < 0.2)
        message = replace(
            message,
            client=rng.choice(["a", "a", "a", "b", "c", "d"]),
            group=f"g{number}",
            priority=rng.randint(-2, 2) if policy == "priority" else 0,
        )
        choices = rng.choice([1, 1, 1, 1, 1, 5])
        for choice in range(choices):
            one = replace(message, rid=f"r{number}.{choice}", choice=choice)
            arrivals.append(Arrival(at_s=at, message=one))
            if rng.random() < 0.05:
                abort = AbortReq(rid=one.rid, finished=rng.random() < 0.3)
                arrivals.append(Arrival(at_s=at + rng.expovariate(2), message=abort))
    return arrivals


def simulate(seed: int, count: int, *, recurrent: bool = False) -> Counter[str]:
    """Of a random engine; how many ended how, and went on from a snapshot of recurrent layers, if the model has any."""
    rng = random.Random(seed)
    policy = POLICIES[seed % len(POLICIES)]
    page = rng.choice([1, 4, 16])
    knobs = Knobs(
        policy=policy,
        page=page,
        pool=rng.choice([192, 384, 1024]) // page * page,
        rows=rng.choice([3, 8, 24]),
        context=160,
        depth=rng.choice([1, 2, 2]),
        mixed=rng.random() < 0.4,
        radix=rng.random() < 0.8,
        chunk=rng.choice([None, 20, 64]),
        prefill=rng.choice([48, 256]),
        conservativeness=rng.choice([0.1, 1.0]),
        space_rows=rng.choice([6, 40, 1000]),
        max_patches=rng.choice([16, 256]),
    )
    arrivals = mixed_traffic(rng, count, policy=policy, rate=rng.choice([20, 100, 1000]))
    knobs = replace(knobs, snapshots=rng.choice([0, 1, 3, 20, 200]) if recurrent else None)
    simulation = Simulation(knobs, arrivals)
    simulation.run(limit=10**6)
    simulation.check_nothing_is_left()
    messages = [arrival.message for arrival in arrivals]
    aborts = {message.rid: message for message in messages if isinstance(message, AbortReq)}
    ends: Counter[str] = Counter()
    for message in messages:
        if isinstance(message, AbortReq):
            continue
        got, want = simulation.tokens[message.rid], expected(message)
        reason = simulation.finish.get(message.rid)
        if reason is not None and reason.type == "length":
            assert got == want, (seed, message.rid)
        else:
            assert message.rid in aborts, (seed, message.rid, reason)
            assert aborts[message.rid].finished == (reason is None)
            assert got == want[: len(got)], (seed, message.rid)
        ends["unsaid" if reason is None else reason.type] += 1
    ends["resumed"] = simulation.worker.resumed
    return ends


@pytest.mark.parametrize("seed", range(len(POLICIES)))
def test_mixed_traffic(seed):
    ends = simulate(seed, 50)
    assert ends["length"] > 35


def test_mixed_traffic_of_a_hybrid_model():
    """Every state is of the tokens that its request's slots hold, wherever prompts are cut and taken back."""
    ends = sum((simulate(seed, 40, recurrent=True) for seed in range(20, 27)), Counter())
    assert ends["length"] > 200
    assert ends["resumed"] > 50


@pytest.mark.slow
def test_ten_thousand_requests():
    ends = sum((simulate(seed, 500) for seed in range(100, 120)), Counter())
    assert ends.total() - ends["resumed"] >= 10_000
    assert ends["abort"] > 100
    assert ends["unsaid"] > 30
