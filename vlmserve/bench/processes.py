"""A server under test, and the memory of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from vlmserve.common.errors import EngineError

MIB = 1024 * 1024


class BenchServer:
    """`vlmserve serve` in processes of its own, on a port of the system's choosing. A context manager."""

    def __init__(self, model: Path, flags: Sequence[str] = (), *, startup_timeout_s: float = 600.0) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vlmserve-bench-")
        port_file = Path(self._folder.name) / "port"
        command = [sys.executable, "-m", "vlmserve.cli", "serve", str(model), "--port", "0"]
        command += ["--port-file", str(port_file), "--served-model-name", "bench", "--log-level", "warning", *flags]
        self._process = subprocess.Popen(command)
        deadline = time.monotonic() + startup_timeout_s
        while not port_file.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise EngineError(f"the server did not start: {' '.join(command)}")
            time.sleep(0.1)  # waiting for another process, not synchronising with it
        self.base_url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        self.model = "bench"

    def memory(self, field: str = "VmHWM") -> int:
        """Bytes summed over the server's processes: VmHWM is each one's peak, VmRSS what it holds now."""
        return sum(process_memory(pid, field) for pid in [self._process.pid, *children_of(self._process.pid)])

    def close(self) -> None:
        """Stop the server and wait for it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._folder.cleanup()

    def __enter__(self) -> BenchServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def children_of(pid: int) -> list[int]:
    """All descendants of a process (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def process_memory(pid: int, field: str) -> int:
    """A field of /proc/PID/status in bytes; 0 where there is none."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def own_peak_memory() -> int:
    """This process's peak memory in bytes."""
    return process_memory(os.getpid(), "VmHWM")
