"""Probes that import libraries, which may be missing, broken, or crash: they run in a child process.

`python -m vlmserve.commands.doctor.probes NAME...` prints a line of JSON for each probe.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
            gpu["error"] = str(error).strip().splitlines()[0]
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

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
