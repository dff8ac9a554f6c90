"""Clients that keep so many picture requests in flight, on a simulated clock with costs measured on a CPU of two cores.

`python -m tests.vlmserve.scheduler.closed_loops` prints what each rule of decoding beside encoding makes of them.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs
from tests.vlmserve.scheduler.simulator import Arrival, Costs, Simulation

NEW = 64
"""Tokens of an answer."""
PICTURE, TEXT = 196, 74
"""Tokens of a picture, each of 4 patches, and of the text behind it."""
COSTS = Costs(
    step_s=0.04, decode_row_s=0.001, prompt_token_s=0.7 / (PICTURE + TEXT), patch_s=1.9 / (4 * PICTURE), piece=4
)
"""Of a text model like Qwen3-0.6B, and a tower like Qwen3-VL-2B's with pictures of 784 patches."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """tokens_per_s, gap_s (the 95th percentile between two tokens of an answer) and batch (the mean of decode steps):
    of pictures. stream_gap_s: as gap_s, of a text stream beside them. most: tokens of the best served client, over
    those of the worst."""

    tokens_per_s: float
    batch: float
    gap_s: float
    stream_gap_s: float
    most: float


class ClosedLoops(Simulation):
    """in_flight: requests of each client, each of which is followed by another one, `count` in all. stream: whether
    another client's answer without a picture is made meanwhile."""

    def __init__(self, *, clients: int, in_flight: int, count: int, stream: bool = False, **knobs) -> None:
        self._rng, self._left, self._number = random.Random(1), count, 0
        size = Knobs(
            pool=32768, page=16, rows=64, context=4096, chunk=2048, prefill=8192, mixed=True, depth=2, radix=False
        )
        super().__init__(replace(size, space_rows=4000, max_patches=1024, **knobs), [], costs=COSTS, check_turns=False)
        self.came: dict[str, list[float]] = defaultdict(list)
        self.served: Counter[str] = Counter()
        for number in range(clients * in_flight):
            self._come(f"client{number % clients}")
        if stream:
            ids = [self._rng.randrange(40) for _ in range(8)]
            message = replace(request("stream", ids, new=3000), client="reader")
            self._events.appendleft(Arrival(at_s=0.0, message=message))

    def _come(self, client: str) -> None:
        if not self._left:
            return
        self._left -= 1
        self._number += 1
        ids = [self._rng.randrange(40) for _ in range(PICTURE + TEXT)]
        message = request(f"r{self._number}", ids, [(2, PICTURE, b"%d" % self._number)], new=NEW)
        self._events.append(Arrival(at_s=self.now, message=replace(message, client=client)))

    def take(self, message) -> None:
        super().take(message)
        for one in message.outputs:
            client = self.messages[one.rid].client
            self.came[one.rid] += [self.now] * len(one.token_ids)
            self.served[client] += len(one.token_ids)
            if one.finish_reason is not None:
                self._come(client)

    def measure(self) -> Figures:
        """Run until the last request has come, so that the loops are closed all the time."""
        while self._left:
            assert self.step()
        stats = self.loop.stats().steps
        gaps = {rid: [later - sooner for sooner, later in pairwise(came)] for rid, came in self.came.items()}
        streamed = gaps.pop("stream", [])
        tokens = self.served.total() - len(streamed)
        steps = stats.decode_steps_total
        served = [count for client, count in self.served.items() if client != "reader"]
        return Figures(
            tokens_per_s=tokens / self.now,
            batch=stats.decode_reqs_total / steps - bool(streamed),
            gap_s=float(np.percentile(np.concatenate(list(gaps.values())), 95)),
            stream_gap_s=float(np.percentile(streamed, 95)) if streamed else 0.0,
            most=max(served) / min(served),
        )


def main() -> None:
    """Print a table."""
    rules = {"the default": {}, "nobody waits": {"ceiling": 0.001}, "no limit": {"slowdown": 0.0}}
    print(f"{'':42}{'tokens/s':>10}{'batch':>8}{'gap p95 s':>11}{'stream p95 s':>14}{'most/least':>12}")
    for clients, stream in ((1, False), (4, False), (1, True)):
        for in_flight in (1, 4, 16, 64):
            for name, knobs in rules.items():
                each, count = in_flight // clients, 160 if in_flight == 64 else 40
                if not each:
                    continue
                loops = ClosedLoops(clients=clients, in_flight=each, count=count, stream=stream, **knobs)
                figures = loops.measure()
                what = f"{clients} x {each}{' beside a stream' if stream else ''}, {name}"
                print(
                    f"{what:42}{figures.tokens_per_s:10.1f}{figures.batch:8.1f}{figures.gap_s:11.3f}"
                    f"{figures.stream_gap_s:14.3f}{figures.most:12.2f}"
                )


if __name__ == "__main__":
    main()
