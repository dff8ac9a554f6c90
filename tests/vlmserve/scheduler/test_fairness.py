"""How long requests wait, on a simulated clock: by policy within a client, by service between clients, and to the first
token beside floods of others' work."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.simulator import Arrival, Costs, Setup, Simulation
from vlmserve.scheduler.policy import AGEING, HEAD

MOST_PROMPT, MOST_NEW = 40, 60


class Watched(Simulation):
    """began: requests in the order in which their prompts were. gaps: while all clients had requests waiting, between
    the tokens that the most and the least served of them were given."""

    def __init__(self, setup: Setup, arrivals: list[Arrival]) -> None:
        super().__init__(setup, arrivals)
        self.began: list[int] = []
        self.service: Counter[str] = Counter()
        self.gaps: list[float] = []
        self._clients = {arrival.message.client for arrival in arrivals}
        queue = self.scheduler.waiting_queue
        self._charge, self._set_in_progress = queue.charge, queue.set_in_progress
        queue.charge, queue.set_in_progress = self._note_charge, self._note_in_progress

    def _note_charge(self, req, cost) -> None:
        self.service[req.client] += cost
        self._charge(req, cost)

    def _note_in_progress(self, req, on) -> None:
        if on and req.arrival not in self.began:
            self.began.append(req.arrival)
        self._set_in_progress(req, on)

    def check(self) -> None:
        super().check()
        if {req.client for req in self.scheduler.waiting_queue} == self._clients:
            given = [self.service[client] for client in self._clients]
            self.gaps.append(max(given) - min(given))


def text(rid: str, rng: random.Random, *, prompt: int, new: int, client: str = ""):
    return replace(request(rid, [rng.randrange(40) for _ in range(prompt)], new=new), client=client)


@pytest.mark.parametrize(
    ("policy", "bound"),
    [
        ("fcfs", 0),
        ("lpm", MOST_PROMPT / AGEING),
        ("dfs-weight", HEAD),
        ("lof", MOST_NEW / AGEING),
        ("srtf", (MOST_PROMPT + MOST_NEW) / AGEING),
        ("random", HEAD),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_nobody_is_overtaken_by_more_than_the_policy_says(policy, bound, depth):
    """Of one client's requests, whatever slots and places are short: `bound` later ones begin before, at the most."""
    rng = random.Random(5)
    at, arrivals = 0.0, []
    for number in range(150):
        at += rng.choice([0.0, 0.02, 0.2])
        message = text(f"r{number}", rng, prompt=rng.randint(1, MOST_PROMPT), new=rng.randint(1, MOST_NEW))
        arrivals.append(Arrival(at_s=at, message=message))
    simulation = Watched(Setup(policy=policy, depth=depth, pool=256, rows=6), arrivals)
    simulation.run()
    assert sorted(simulation.began) == list(range(150))
    overtaken = [
        sum(other > arrival for other in simulation.began[:at]) for at, arrival in enumerate(simulation.began)
    ]
    assert max(overtaken) <= bound
    assert max(overtaken) > 0 or policy not in ("lof", "srtf", "random"), "these do reorder"


@pytest.mark.parametrize("depth", [1, 2])
def test_clients_that_always_have_requests_are_served_alike(depth):
    """However many and large their requests are. They differ by what all places can still be given, at the most."""
    rng = random.Random(6)
    shapes = {"long": (60, MOST_PROMPT, MOST_NEW), "short": (300, 5, 5), "wordy": (120, 5, MOST_NEW)}
    arrivals = [
        Arrival(at_s=0.0, message=text(f"{client}{i}", rng, prompt=prompt, new=new, client=client))
        for client, (count, prompt, new) in shapes.items()
        for i in range(count)
    ]
    setup = Setup(depth=depth, rows=6, pool=512)
    simulation = Watched(setup, arrivals)
    simulation.run()
    bound = setup.rows * (MOST_PROMPT + 2 * MOST_NEW)
    assert len(simulation.gaps) > 100
    assert max(simulation.gaps) <= bound
    assert bound < min(simulation.service.values()) / 3, "that is little of what each was given"


def test_a_single_request_does_not_wait_for_a_hundred_of_another_client():
    rng = random.Random(7)
    arrivals = [
        Arrival(at_s=0.0, message=text(f"many{i}", rng, prompt=30, new=60, client="many")) for i in range(100)
    ]
    one = text("one", rng, prompt=30, new=5, client="one")
    for rows, limit in ((16, 6), (2, 6)):
        simulation = Simulation(Setup(rows=rows, pool=16 * 128, costs=Costs()), [*arrivals, Arrival(at_s=0.3, message=one)])
        simulation.run()
        waited = simulation.first_turn["one"] - simulation.arrived_turn["one"]
        print(rows, waited)


ENGINE = Setup(context=4096, pool=65536, page=16, chunk=2048, prefill=8192, rows=64, space_rows=40_000, max_patches=8192, check=False)


def ttfts(others, *, prompt, costs, depth) -> list[float]:
    rng = random.Random(8)
    texts = [text(f"text{i}", rng, prompt=prompt, new=16, client="text") for i in range(20)]
    arrivals = [Arrival(at_s=0.5 + 0.37 * i, message=message) for i, message in enumerate(texts)]
    simulation = Simulation(replace(ENGINE, costs=costs, depth=depth), [*others, *arrivals]).run()
    return [simulation.ttft_s(message.rid) for message in texts]


def pictures(count):
    rng = random.Random(9)
    found = []
    for i in range(count):
        message = request(f"picture{i}", [rng.randrange(40) for _ in range(1010)], [(4, 1000, b"%d" % i)], new=8)
        found.append(Arrival(at_s=0.1 * (i // 4), message=replace(message, client="pictures%d" % (i % 3))))
    return found


def choices(n):
    rng = random.Random(10)
    message = text("n", rng, prompt=300, new=200, client="choices")
    return [
        Arrival(at_s=0.4, message=replace(message, rid=f"n{i}", choice=i, group="n")) for i in range(n)
    ]


def main():
    for depth in (1,2):
        costs=Costs(step_s=0.02, prompt_token_s=0.0004, decode_row_s=0.0001, patch_s=0.0002)
        for prompt in (30, 100, 400):
            alone = ttfts([], prompt=prompt, costs=costs, depth=depth)
            for name, others in (("pictures", pictures(40)), ("n=128", choices(128))):
                beside = ttfts(others, prompt=prompt, costs=costs, depth=depth)
                print(depth, prompt, name, "alone %.3f beside median %.3f max %.3f" % (statistics.median(alone), statistics.median(beside), max(beside)), [round(x/statistics.median(alone),1) for x in sorted(beside)[-6:]])
if __name__ == "__main__":
    main()
