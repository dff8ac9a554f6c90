"""How long requests wait, on a simulated clock: by policy within a client, by service between clients, and to the first
token beside floods of others' work."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs
from tests.vlmserve.scheduler.simulator import Arrival, Costs, Simulation
from vlmserve.scheduler.policy import AGEING, HEAD

MOST_PROMPT, MOST_NEW = 40, 60
REQUESTS = 80
SMALL = Knobs(pool=512, rows=6, context=160, chunk=64, prefill=256, depth=2, conservativeness=1.0, max_patches=256)
DEPTHS = pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])


class Watched(Simulation):
    """began: requests in the order in which their prompts were. gaps: while all clients had requests waiting, between
    the tokens that the most and the least served of them were given."""

    def __init__(self, knobs: Knobs, arrivals: list[Arrival]) -> None:
        super().__init__(knobs, arrivals)
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
@DEPTHS
def test_nobody_is_overtaken_by_more_than_the_policy_says(policy, bound, depth):
    """Of one client's requests, whatever slots and places are short: `bound` later ones begin before, at the most."""
    rng = random.Random(5)
    at, arrivals = 0.0, []
    for number in range(REQUESTS):
        at += rng.choice([0.0, 0.02, 0.2])
        message = text(f"r{number}", rng, prompt=rng.randint(1, MOST_PROMPT), new=rng.randint(1, MOST_NEW))
        arrivals.append(Arrival(at_s=at, message=message))
    simulation = Watched(replace(SMALL, policy=policy, depth=depth, pool=256), arrivals)
    simulation.run()
    assert sorted(simulation.began) == list(range(REQUESTS))
    overtaken = [sum(other > arrival for other in simulation.began[:at]) for at, arrival in enumerate(simulation.began)]
    assert max(overtaken) <= bound
    assert max(overtaken) > 0 or policy not in ("lof", "srtf", "random"), "these do reorder"


@DEPTHS
def test_clients_that_always_have_requests_are_served_alike(depth):
    """However many and large their requests are. They differ by what all places can still be given, at the most."""
    rng = random.Random(6)
    shapes = {"long": (45, MOST_PROMPT, MOST_NEW), "short": (225, 5, 5), "wordy": (90, 5, MOST_NEW)}
    arrivals = [
        Arrival(at_s=0.0, message=text(f"{client}{i}", rng, prompt=prompt, new=new, client=client))
        for client, (count, prompt, new) in shapes.items()
        for i in range(count)
    ]
    simulation = Watched(replace(SMALL, depth=depth), arrivals)
    simulation.run()
    bound = SMALL.rows * (MOST_PROMPT + 2 * MOST_NEW)
    assert len(simulation.gaps) > 100
    assert max(simulation.gaps) <= bound
    assert bound < min(simulation.service.values()) / 3, "that is little of what each was given"


@pytest.mark.parametrize("rows", [16, 2])
@DEPTHS
def test_a_single_request_does_not_wait_for_a_hundred_of_another_client(rows, depth):
    """Also where those have all places: it waits for what is in flight, gets a place, and its prompt is computed in two
    chunks with a token for the others between them."""
    rng = random.Random(7)
    arrivals = [Arrival(at_s=0.0, message=text(f"many{i}", rng, prompt=30, new=60, client="many")) for i in range(100)]
    one = Arrival(at_s=0.3, message=text("one", rng, prompt=30, new=5, client="one"))
    simulation = Simulation(replace(SMALL, rows=rows, depth=depth, pool=2048, mixed=True), [*arrivals, one])
    while "one" not in simulation.finish:
        assert simulation.step()
    assert len(simulation.finish) < 50, "the others go on"
    assert simulation.first_turn["one"] - simulation.arrived_turn["one"] <= 8


def test_tokens_of_an_answer_go_on_beside_many_prompts():
    """A turn of prompts at the most between two tokens."""
    rng = random.Random(11)
    first = text("first", rng, prompt=30, new=60)
    prompts = [Arrival(at_s=0.05, message=text(f"p{i}", rng, prompt=120, new=1, client=f"c{i % 5}")) for i in range(40)]
    simulation = Simulation(replace(SMALL, rows=8, pool=2048), [Arrival(at_s=0.0, message=first), *prompts])
    came: list[int] = []
    while simulation.step():
        if len(simulation.tokens["first"]) > len(came):
            came.append(simulation.turns)
    assert len(came) == 60
    assert max(later - before for before, later in pairwise(came)) <= 2


MAX_STEP_S = 0.2
COSTS = Costs(step_s=0.02, prompt_token_s=0.0004, decode_row_s=0.0001, patch_s=0.0002)
"""A step of one row takes 20 ms, a picture of 4000 patches 0.8 s, its prompt 0.4 s."""


def pictures(count: int) -> list[Arrival]:
    """Ten times as many a second as can be encoded, of three clients."""
    rng = random.Random(9)
    found = []
    for i in range(count):
        message = request(f"picture{i}", [rng.randrange(40) for _ in range(1010)], [(4, 1000, b"%d" % i)], new=8)
        found.append(Arrival(at_s=0.1 * (i // 4), message=replace(message, client=f"pictures{i % 3}")))
    return found


def choices(count: int) -> list[Arrival]:
    """Of one prompt, with long answers."""
    message = text("n", random.Random(10), prompt=300, new=60, client="choices")
    answers = [replace(message, rid=f"n{i}", choice=i, group="n") for i in range(count)]
    return [Arrival(at_s=0.4, message=answer) for answer in answers]


def first_tokens_s(others: list[Arrival], depth: int) -> list[float]:
    """Of short prompts, one at a time."""
    rng = random.Random(8)
    texts = [text(f"text{i}", rng, prompt=30, new=4, client="text") for i in range(10)]
    arrivals = [Arrival(at_s=0.5 + 0.37 * i, message=message) for i, message in enumerate(texts)]
    knobs = Knobs(
        context=1200,
        pool=32768,
        page=16,
        chunk=2048,
        prefill=8192,
        rows=64,
        space_rows=40_000,
        max_patches=8192,
        depth=depth,
        mixed=True,
    )
    simulation = Simulation(knobs, [*others, *arrivals], costs=COSTS, check_turns=False)
    while not all(message.rid in simulation.first_s for message in texts):
        simulation.step()
    return [simulation.ttft_s(message.rid) for message in texts]


@DEPTHS
@pytest.mark.parametrize(
    ("others", "typical"),
    [(pictures(30), [2.0, 2.0]), (choices(128), [2.5, 3.5])],
    ids=["pictures", "n=128"],
)
def test_short_text_comes_soon_beside_a_flood(others, typical, depth):
    """It waits for what is in flight, which takes about as long as its own step: a step of decoding and a slice of
    encoding, or a step of many rows, or two of these. At the worst, it waits for a chunk of a picture's prompt and a
    slice besides."""
    alone = statistics.median(first_tokens_s([], depth))
    beside = first_tokens_s(others, depth)
    assert statistics.median(beside) <= typical[depth - 1] * alone
    assert max(beside) <= typical[depth - 1] * alone + 2 * MAX_STEP_S
