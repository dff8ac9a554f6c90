"""`vlmserve bench soak`: thousands of requests, many of them left by their clients; does anything grow?

A server with small caches is started. After each stretch of the load it becomes idle, and its processes are looked at:
memory, descriptors, files (Linux). Caches fill during the warm-up and are bounded by their settings. What still grows
after that is a leak.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import httpx2

from vlmserve.commands.bench.figures import bench_parser, write_json
from vlmserve.commands.bench.processes import MIB, children_of
from vlmserve.commands.bench.soak_requests import FILES, Mix, SoakClients
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import above_zero, not_negative, positive


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The resources of all processes of a server after `requests` requests.

    `pss` is in bytes, by the name of the process; shared pages are divided among their owners, so the sum is the
    server's memory. `descriptors` include sockets. `blocks` are files of shared memory, and `files` those of the
    temporary directory.
    """

    requests: int
    pss: dict[str, int]
    processes: int
    threads: int
    descriptors: int
    sockets: int
    blocks: int
    files: int

    @property
    def memory(self) -> int:
        """The bytes of all processes."""
        return sum(self.pss.values())


def take_sample(pid: int, temporary: Path, requests: int) -> Sample:
    """Look at a server and all processes under it. temporary: its TMPDIR and XDG_RUNTIME_DIR."""
    pss: Counter[str] = Counter()
    threads = 0
    targets: list[str] = []
    pids = [pid, *children_of(pid)]
    for one in pids:
        folder = Path(f"/proc/{one}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
            name = (folder / "comm").read_text().strip()
            pss[name if one != pid else "api"] += _pss(folder / "smaps_rollup")
            threads += len(os.listdir(folder / "task"))
            for fd in (folder / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    targets.append(os.readlink(fd))
    shared = {target for target in targets if target.startswith("/dev/shm/vlmserve-") and os.path.isdir(target)}
    return Sample(
        requests=requests,
        pss=dict(sorted(pss.items())),
        processes=len(pids),
        threads=threads,
        descriptors=len(targets),
        sockets=sum(target.startswith("socket:") for target in targets),
        blocks=sum(len(os.listdir(folder)) for folder in shared),
        files=sum(len(names) for _, _, names in os.walk(temporary)),
    )


COUNTS = tuple(field.name for field in fields(Sample) if field.name not in ("requests", "pss"))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Something that must not grow. found, limit: in `unit`."""

    name: str
    found: float
    limit: float
    unit: str

    @property
    def bounded(self) -> bool:
        """True if it stays within the limit."""
        return self.found <= self.limit

    def __str__(self) -> str:
        verdict = "" if self.bounded else ": IT GROWS"
        return f"{self.name:<16} {self.found:>8.0f} of at most {self.limit:g} {self.unit}{verdict}"


def growth(samples: Sequence[Sample], *, bytes_per_request: float) -> list[Growth]:
    """Return the growth of everything from the first sample (after the warm-up) to the last.

    Memory grows by the median slope between any two samples of the last half, for each process and for all that last.
    A single step, such as a pool's page that is written to for the first time, does not count. Media processes are
    left out of the sum: the server replaces them, and a new small one would hide growth elsewhere. Threads may
    reach a new most once in the last half: a pool starts one when work first overlaps, which may be late. Other counts
    of the last sample may not be above the most of the first quarter.
    """
    late = samples[len(samples) // 2 :]
    memory = {f"of {name}": [one.pss.get(name, 0) for one in late] for name in samples[-1].pss}
    lasting = [values for name, values in memory.items() if not name.startswith("of media-")]
    memory = {"memory": list(map(sum, zip(*lasting, strict=True)))} | memory
    found = [
        Growth(name=name, found=_slope(late, values), limit=bytes_per_request, unit="bytes a request")
        for name, values in memory.items()
    ]
    early = samples[: max(1, len(samples) // 4)]
    most_threads = [max(one.threads for one in samples[:end]) for end in range(len(samples) // 2, len(samples) + 1)]
    found.append(Growth(name="threads", found=len(set(most_threads)) - 1, limit=1, unit="new mosts in the last half"))
    for name in (name for name in COUNTS if name != "threads"):
        most = max(getattr(sample, name) for sample in early)
        found.append(Growth(name=name, found=getattr(samples[-1], name), limit=most, unit="early in the run"))
    return found


def _slope(samples: Sequence[Sample], values: Sequence[int]) -> float:
    points = [(one.requests, value) for one, value in zip(samples, values, strict=True)]
    return statistics.median(
        (after[1] - one[1]) / (after[0] - one[0]) for one, after in itertools.combinations(points, 2)
    )


def table(samples: Sequence[Sample]) -> str:
    """Return a table with a line for each sample."""
    names = list(dict.fromkeys(name for sample in samples for name in sample.pss))
    titles = [f"{name[:12]:>13}" for name in names] + [f"{name[:11]:>12}" for name in COUNTS]
    lines = ["  requests  MiB: all" + "".join(titles)]
    for one in samples:
        memory = "".join(f"{one.pss.get(name, 0) / MIB:>13.1f}" for name in names)
        counts = "".join(f"{getattr(one, name):>12}" for name in COUNTS)
        lines.append(f"{one.requests:>10} {one.memory / MIB:>9.1f}{memory}{counts}")
    return "\n".join(lines)


def _pss(file: Path) -> int:
    """Return the bytes of the line `Pss:  1234 kB`."""
    return next(int(line.split()[1]) * 1024 for line in file.read_text().splitlines() if line.startswith("Pss:"))


# Caches are full when the warm-up ends and evict from then on. KV slots run out now and then.
_SMALL = (
    *("--max-model-len", "4096", "--max-total-tokens", "6144", "--chunked-prefill-size", "256"),
    *("--max-running-requests", "16", "--max-sessions", "16"),
    *("--encoder-cache-mib", "4", "--processor-cache-mib", "4"),
)
_MODEL = "soak"
_IDLE_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.2
_ABOUT = """\
Sends thousands of requests of all kinds to a server of its own, a part of them cut off by their clients: in the body,
while they wait, in the stream. Checks that memory, descriptors, sockets, threads, processes, shared blocks and
temporary files do not grow, that pools balance, and that every other answer is right. Exit status 1 if not.
"""


def main(argv: Sequence[str]) -> int:
    """Run the soak, print tables, and return 1 if anything grows or an answer is wrong."""
    parser = bench_parser("soak", _ABOUT, usage="%(prog)s [options] [-- FLAGS ...]")
    add = parser.add_argument
    add("--requests", type=positive, default=20_000, help="requests in all", metavar="N")
    add("--warm-up", type=positive, default=2000, help="requests before the first look", metavar="N")
    add("--every", type=positive, default=1000, help="requests between two looks", metavar="N")
    text = "part of the requests that clients leave, of 1; some of these are answered before"
    add("--cut-off", type=float, default=0.46, help=text, metavar="X")
    add("--concurrency", type=positive, default=16, help="requests at a time", metavar="N")
    text = "limit of the bytes by which memory grows with a request: median slope of the last half"
    add("--bytes-per-request", type=above_zero, default=1024, help=text, metavar="N")
    add("--seed", type=not_negative, default=0, help="seed of all requests", metavar="N")
    add("server_flags", nargs="*", metavar="-- FLAGS", help="flags for the server, a MODEL too")
    args = parser.parse_args(argv)
    figures = _soak(args)
    write_json(args, figures)
    return int(not figures["passed"])


def _soak(args: argparse.Namespace) -> dict[str, Any]:
    mix = Mix(_MODEL, seed=args.seed, cut_off=args.cut_off)
    samples: list[Sample] = []
    pools: list[str] = []
    words = ["--served-model-name", _MODEL, "--log-level", "warning", *_SMALL, *args.server_flags]
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        own = {"TMPDIR": folder, "XDG_RUNTIME_DIR": folder}
        with OwnServer(words, own, startup_timeout_s=600.0) as server:
            clients = SoakClients(server.base_url, mix.request, at_a_time=args.concurrency)
            started = time.perf_counter()
            done = 0
            for end in [*range(args.warm_up, args.requests, args.every), args.requests]:
                asyncio.run(clients.run(range(done, end)))
                done = end
                _delete_files(server.base_url)
                pools += [f"after {done}: {problem}" for problem in _await_idle(server.base_url)]
                samples.append(_settled(server.pid, Path(folder), done))
                told = f"{clients.cut_off} cut off, {time.perf_counter() - started:.0f} s"
                print(f"{done} requests, {told}, {samples[-1].memory / MIB:.1f} MiB", file=sys.stderr, flush=True)
            wall_s = time.perf_counter() - started
    return _report(args, samples, clients, pools, wall_s)


def _delete_files(url: str) -> None:
    """Delete the uploads whose clients left before they did: the server rightly keeps these."""
    with httpx2.Client(base_url=url, timeout=_IDLE_WITHIN_S, trust_env=False) as http:
        while files := http.get(FILES).raise_for_status().json()["data"]:
            for file in files:
                http.delete(f"{FILES}/{file['id']}").raise_for_status()


def _await_idle(url: str) -> list[str]:
    """Wait until nothing is left of any request; return what does not balance then."""
    with httpx2.Client(base_url=url, timeout=_IDLE_WITHIN_S, trust_env=False) as http:
        deadline = time.monotonic() + _IDLE_WITHIN_S
        while True:
            info = http.get("/server_info").raise_for_status().json()
            held = _held_bytes(http.get("/metrics").raise_for_status().text)
            stats = info["scheduler"]
            left = {
                "requests of the API process": info["num_pending"],
                "running requests": stats["num_running_reqs"],
                "waiting requests": stats["num_waiting_reqs"],
                "bytes of embeddings held": held,
                "KV slots that nobody has": stats["kv_total_tokens"]
                - sum(stats[f"kv_{kind}_tokens"] for kind in ("free", "cached", "locked")),
                "places of the request pool taken": stats["req_pool_total"] - stats["req_pool_free"],
            }
            problems = [f"{count} {what}" for what, count in left.items() if count]
            if not problems or time.monotonic() > deadline:
                return problems
            time.sleep(_LOOK_EVERY_S)


def _held_bytes(metrics: str) -> float:
    lines = [line for line in metrics.splitlines() if line.startswith("vlmserve:embedding_cache_held_bytes")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else float("nan")


def _settled(pid: int, folder: Path, requests: int) -> Sample:
    """Look until two looks agree: by then the server has closed the connections that clients have closed."""
    deadline = time.monotonic() + _IDLE_WITHIN_S
    before = take_sample(pid, folder, requests)
    while True:
        time.sleep(_LOOK_EVERY_S)
        now = take_sample(pid, folder, requests)
        if now.descriptors == before.descriptors or time.monotonic() > deadline:
            return now
        before = now


def _report(
    args: argparse.Namespace, samples: Sequence[Sample], clients: SoakClients, pools: Sequence[str], wall_s: float
) -> dict[str, Any]:
    grown: list[Growth] = growth(samples, bytes_per_request=args.bytes_per_request)
    passed = all(one.bounded for one in grown) and not pools and not clients.wrong
    print(f"{args.requests} requests in {wall_s:.0f} s, {clients.cut_off} of them cut off\n\n{table(samples)}\n")
    print("\n".join(map(str, grown)))
    for (kind, outcome), count in sorted(clients.outcomes.items()):
        print(f"  {kind:<28} {outcome:<24} {count:>6}")
    for problem in (*pools, *clients.wrong):
        print(f"not right: {problem}")
    print("nothing grows" if passed else "FAILED")
    return {
        "passed": passed,
        "seconds": wall_s,
        "cut_off": clients.cut_off,
        "outcomes": {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(clients.outcomes.items())},
        "wrong": clients.wrong,
        "pools": list(pools),
        "growth": [asdict(one) | {"bounded": one.bounded} for one in grown],
        "samples": [asdict(one) for one in samples],
        "cpus": os.cpu_count(),
    }
