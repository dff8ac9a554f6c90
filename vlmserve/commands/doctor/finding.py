"""The findings of checks, and probes in child processes, whose crash is a result, too."""

from __future__ import annotations

import enum
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PATIENCE_S = 120.0


class Status(enum.StrEnum):
    """How good or bad a finding is."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. remedy: a command, or words that say what to do. data: figures for --json."""

    name: str
    text: str
    status: Status = Status.OK
    remedy: str | None = None
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """The result of a probe, or the error of one that failed."""

    result: dict[str, Any] | None = None
    error: str | None = None

    @property
    def lacks_module(self) -> bool:
        """True if it failed only because a package is not there."""
        return self.error is not None and self.error.startswith("ModuleNotFoundError")


def run_probes(names: Sequence[str], *, patience_s: float = _PATIENCE_S) -> dict[str, Probed]:
    """Run each probe once, one after the other. If a probe ends its process, the rest run in another process."""
    found: dict[str, Probed] = {}
    left = list(dict.fromkeys(names))
    while left:
        how, lines = _run(left, patience_s)
        for line in lines:
            message = json.loads(line)
            found[message["name"]] = Probed(result=message.get("result"), error=message.get("error"))
        left = [name for name in left if name not in found]
        if left:  # they run in order: the first one broke the process
            found[left.pop(0)] = Probed(error=how)
    return found


def _run(names: Sequence[str], patience_s: float) -> tuple[str, list[str]]:
    """Return how the child ended, and the whole lines that it printed."""
    command = [sys.executable, "-m", "vlmserve.commands.doctor.probes", *names]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience_s, check=False)
    except subprocess.TimeoutExpired as late:
        return f"nothing came of it within {patience_s:g} s", _whole_lines(late.stdout or b"")
    last_words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    if done.returncode < 0:
        how = f"it crashed the process ({signal.Signals(-done.returncode).name})"
    else:
        how = f"it ended the process with status {done.returncode}"
    return ": ".join([how, *last_words]), _whole_lines(done.stdout)


def _whole_lines(output: bytes) -> list[str]:
    return output.decode(errors="replace").split("\n")[:-1]
