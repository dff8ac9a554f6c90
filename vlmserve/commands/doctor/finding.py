"""The findings of checks, and probes in child processes, whose crash is a result, too.

Probes import libraries, which may be missing, broken, or crash. `python -m vlmserve.commands.doctor.finding NAME...`
prints a line of JSON for each probe.
"""

from __future__ import annotations

import enum
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmserve_common.errors import first_line

SAMPLES = Path(__file__).resolve().parents[1] / "demo" / "samples"


def main(names: Sequence[str]) -> int:
    """Run the probes, and return 0: a failure is a result, too."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries that print must not be taken for us
    for name in names:
        kind, _, argument = name.partition(":")
        try:
            answer: dict[str, Any] = {"result": _PROBES[kind](argument)}
        except Exception as error:  # anything may be wrong with an installation
            words = str(error).strip().splitlines()
            answer = {"error": f"{type(error).__name__}: {words[0] if words else 'no reason given'}"}
        print(json.dumps({"name": name, **answer}), file=out, flush=True)
    return 0


def _import(module: str) -> dict[str, Any]:
    if module == "torchvision":
        from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

        make_torchvision_importable()
    importlib.import_module(module)
    return {}


def _torch(_: str) -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpu = {
            "name": torch.cuda.get_device_name(index),
            "capability": list(torch.cuda.get_device_capability(index)),
            "free_bytes": free,
            "total_bytes": total,
            "error": None,
        }
        try:
            ones = torch.ones(8, 8, device=f"cuda:{index}")
            assert float((ones @ ones).sum()) == 512.0
        except Exception as error:  # torch may have no code for this GPU
            gpu["error"] = first_line(error)
        gpus.append(gpu)
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cuda_available": torch.cuda.is_available(),
        "gpus": gpus,
    }


def _picture(kind: str) -> dict[str, Any]:
    """Write a small picture, and read it as the server does."""
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", (32, 24), (200, 60, 30)).save(buffer, kind)
    return _decoded(buffer.getvalue())


def _sample(name: str) -> dict[str, Any]:
    """Read a sample picture, or count the frames of a sample clip."""
    path = SAMPLES / name
    if path.suffix != ".mp4":
        return _decoded(path.read_bytes())
    import av

    with av.open(str(path)) as container:
        return {"frames": sum(1 for _ in container.decode(video=0))}


def _decoded(picture: bytes) -> dict[str, Any]:
    from processors.image.decoding import DecodeLimits, decode_image

    return {"size": list(decode_image(picture, DecodeLimits()).size)}


def _model(name: str) -> dict[str, Any]:
    from vlmserve.commands.doctor.engine_probes import examine_model

    return examine_model(name)


def _attention(_: str) -> dict[str, Any]:
    from vlmserve.commands.doctor.engine_probes import examine_attention

    return examine_attention()


_PROBES: dict[str, Callable[[str], dict[str, Any]]] = {
    "import": _import,
    "torch": _torch,
    "picture": _picture,
    "sample": _sample,
    "model": _model,
    "attention": _attention,
}


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
    command = [sys.executable, "-m", "vlmserve.commands.doctor.finding", *names]
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
