"""What Ray Serve costs: one replica of `vlmserve deploy --run` on a cluster of this machine, beside `vlmserve serve`.

Both have the built-in model and get the same requests in turns, 16 at a time. The CPU time of each kind of process
tells where the rest goes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from vlmserve.commands.bench.api import bodies, send_all
from vlmserve.commands.bench.figures import Measure, Spread, ratios
from vlmserve.commands.bench.processes import children_of, cpu_time
from vlmserve.commands.client.own_server import OwnServer

_RATIO = 0.85
_AT_A_TIME = 16
_LEAST_MS = 0.05
_WORDS = ("--served-model-name", "bench", "--log-level", "warning")


def serve_measures(*, rounds: int, requests: int, tokens: int) -> Iterator[Measure]:
    """Yield the throughput of the app beside that of a server alone, whole answers and streams, and the CPU time of a
    request by kind of process. tokens: of each answer."""
    with ExitStack() as stack:
        alone = stack.enter_context(OwnServer(_WORDS))
        deploy = ("vlmserve.cli", "deploy", "--run", "--address", "local")
        app = stack.enter_context(OwnServer(_WORDS, command=deploy))
        for stream in (False, True):
            asked = bodies(requests, tokens, stream=stream)
            alone_s: list[float] = []
            app_s: list[float] = []
            cpu: dict[str, dict[str, list[float]]] = {"alone": {}, "app": {}}
            for number in range(rounds + 1):
                for side, server, seconds in (("alone", alone, alone_s), ("app", app, app_s)):
                    before = _cpu_by_name(server.pid)
                    wall_s = send_all(server.base_url, asked, at_a_time=_AT_A_TIME).wall_s
                    if not number:  # it warms up
                        continue
                    seconds.append(wall_s)
                    for name, used in _cpu_by_name(server.pid).items():
                        took = 1e3 * (used - before.get(name, 0.0)) / requests
                        cpu[side].setdefault(name, []).append(took)
            kind = "streams" if stream else "whole answers"
            about = f"{requests} {kind} of {tokens} tokens, {_AT_A_TIME} at a time; one machine"
            rates = Spread.of([requests / one for one in alone_s])
            yield Measure(name=f"{kind}: vlmserve serve", spread=rates, unit="requests/s", about=about)
            of_that = ratios(alone_s, app_s)
            yield Measure(name=f"{kind}: the Serve app, of that", spread=of_that, target=_RATIO, about=about)
            for side, by_name in cpu.items():
                for name, values in sorted(by_name.items(), key=lambda item: -sum(item[1])):
                    spread = Spread.of(values)
                    if spread.median >= _LEAST_MS:
                        about = "CPU time of a request"
                        yield Measure(name=f"{kind}, {side}: {name}", unit="ms", spread=spread, about=about)


def _cpu_by_name(pid: int) -> dict[str, float]:
    """Return the CPU seconds of a process and those under it, by what they call themselves."""
    found: dict[str, float] = {}
    for one in [pid, *children_of(pid)]:
        with contextlib.suppress(OSError):  # it has ended
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
            name = words[0].decode(errors="replace").rpartition("/")[2].partition(":replica")[0]
            if not name.startswith("ray::"):
                name = Path(f"/proc/{one}/comm").read_text().strip()
            found[name] = found.get(name, 0.0) + cpu_time(one)
    return found
