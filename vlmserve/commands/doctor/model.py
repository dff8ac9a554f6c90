"""Whether pictures, videos and a checkpoint can be read, and whether the checkpoint fits into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve.commands.doctor.packages import pip_install
from vlmserve.config.model_path import DEFAULT_MODEL, NotDownloadedError, resolve_model
from vlmserve_common.compute.memory import show_gib
from vlmserve_common.errors import CheckpointError

_PICTURES = ("PNG", "JPEG", "WEBP", "AVIF")
_OPTIONAL = ("AVIF",)  # Pillow may be built without it
_SAMPLES = {"shapes.png": "sample picture", "rolling.mp4": "sample video"}

PROBES = (*(f"picture:{kind}" for kind in _PICTURES), *(f"sample:{name}" for name in _SAMPLES))


def media_findings(probed: Mapping[str, Probed]) -> Iterator[Finding]:
    """Yield the findings of probes by the names of PROBES."""
    readable = [kind for kind in _PICTURES if probed[f"picture:{kind}"].error is None]
    if readable:
        yield Finding("pictures", f"{', '.join(readable)} can be read", data={"formats": readable})
    for kind in _PICTURES:
        found = probed[f"picture:{kind}"]
        if found.error is not None:
            yield _unread(kind, found, "pillow", optional=kind in _OPTIONAL)
    for sample, name in _SAMPLES.items():
        found = probed[f"sample:{sample}"]
        if found.error is not None:
            yield _unread(name, found, "av" if sample.endswith(".mp4") else "pillow")
        else:
            yield Finding(name, f"{sample} is read as it should be", data=found.result or {})


def _unread(name: str, found: Probed, package: str, *, optional: bool = False) -> Finding:
    if found.lacks_module:
        return Finding(name, f"not tried: {found.error}", Status.NOTE)
    status = Status.NOTE if optional else Status.PROBLEM
    remedy = pip_install("--force-reinstall", package)
    return Finding(name, f"cannot be read: {found.error}", status, remedy)


_SUMS = "SHA256SUMS"


def model_folder(model: str) -> Path | Finding:
    """Return the folder of a checkpoint on this machine. Nothing is downloaded for it."""
    try:
        return resolve_model(model, download=False)
    except NotDownloadedError as error:
        fetch = f"vlmserve serve {model} fetches it, if the hub has it"
        return Finding(model, str(error), Status.NOTE, fetch)
    except CheckpointError as error:
        return Finding(model, str(error), Status.PROBLEM, "name a folder, or a hub id")
    except ImportError as error:
        return Finding(model, f"cannot be looked for: {error}", Status.NOTE)


def files_finding(folder: Path = DEFAULT_MODEL) -> Finding:
    """Compare the files of the built-in model with their checksums."""
    try:
        sums = [line.split(maxsplit=1) for line in (folder / _SUMS).read_text(encoding="ascii").splitlines()]
        wrong = [name for digest, name in sums if _digest(folder / name) != digest]
    except OSError as error:
        wrong = [f"{error.filename}: {error.strerror}"]
    data = {"folder": str(folder), "wrong": wrong}
    if not wrong:
        return Finding("files", f"{len(sums)} files of {folder} are whole", data=data)
    remedy = "install vlmserve again (in a checkout: git checkout -- assets)"
    return Finding("files", f"not as they were made: {', '.join(wrong)}", Status.PROBLEM, remedy, data)


def model_findings(name: str, probed: Probed) -> Iterator[Finding]:
    """Yield the findings of a probe by `engine_probes.examine_model`. name: for people."""
    facts = probed.result
    if facts is None:
        if probed.lacks_module:
            yield Finding(name, f"not examined: {probed.error}", Status.NOTE)
        else:
            yield Finding(name, f"cannot be served: {probed.error}", Status.PROBLEM)
        return
    weights = show_gib(facts["weight_bytes"])
    text = f"{facts['family']}, all tensors there; weights of {weights} in {facts['dtype']}, context {facts['context']}"
    yield Finding(name, text, data=facts)
    if facts["error"] is not None:
        remedy = "take a smaller model, a machine with more memory, or end other programs"
        yield Finding("memory for it", facts["error"], Status.PROBLEM, remedy)
        return
    tokens, each = facts["kv_tokens"], facts["kv_bytes_per_token"]
    text = f"of {show_gib(facts['free_bytes'])} free on {facts['device']}, weights take {weights} and, by default, "
    text += f"the KV cache {show_gib(tokens * each)}: {tokens} tokens of {each} bytes"
    text += f"; recurrent states take {show_gib(facts['state_bytes'])}" if facts["state_bytes"] else ""
    yield Finding("memory for it", text)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
