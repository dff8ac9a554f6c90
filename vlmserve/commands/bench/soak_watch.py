"""What an idle server holds: memory, descriptors, files; and whether that grows (Linux)."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from vlmserve.commands.bench.processes import MIB, children_of


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
    left out of the sum: the server replaces them, and a new small one would hide growth elsewhere. Counts of the last
    sample may not be above the most of the first quarter.
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
    for name in COUNTS:
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
