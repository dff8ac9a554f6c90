"""A checkpoint: whether its files are whole, and whether it fits into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve.config.model_path import DEFAULT_MODEL, NotDownloadedError, resolve_model
from vlmserve_common.compute.memory import show_gib
from vlmserve_common.errors import CheckpointError

_SUMS = "SHA256SUMS"


def model_folder(model: str) -> Path | Finding:
    """Return the folder of a checkpoint on this machine. Nothing is downloaded for it."""
    try:
        return resolve_model(model, download=False)
    except NotDownloadedError as error:
        fetch = f"vlmserve serve {model} fetches it, if the hub has it"
        return Finding(name=model, text=str(error), status=Status.NOTE, remedy=fetch)
    except CheckpointError as error:
        return Finding(name=model, text=str(error), status=Status.PROBLEM, remedy="name a folder, or a hub id")
    except ImportError as error:
        return Finding(name=model, text=f"cannot be looked for: {error}", status=Status.NOTE)


def files_finding(folder: Path = DEFAULT_MODEL) -> Finding:
    """Compare the files of the built-in model with their checksums."""
    try:
        sums = [line.split(maxsplit=1) for line in (folder / _SUMS).read_text(encoding="ascii").splitlines()]
        wrong = [name for digest, name in sums if _digest(folder / name) != digest]
    except OSError as error:
        wrong = [f"{error.filename}: {error.strerror}"]
    return Finding(
        name="files",
        text=f"not as they were made: {', '.join(wrong)}" if wrong else f"{len(sums)} files of {folder} are whole",
        status=Status.PROBLEM if wrong else Status.OK,
        remedy="install vlmserve again (in a checkout: git checkout -- assets)" if wrong else None,
        data={"folder": str(folder), "wrong": wrong},
    )


def model_findings(name: str, probed: Probed) -> Iterator[Finding]:
    """Yield the findings of a probe by `engine_probes.examine_model`. name: for people."""
    facts = probed.result
    if facts is None:
        yield Finding(
            name=name,
            text=f"not examined: {probed.error}" if probed.lacks_module else f"cannot be served: {probed.error}",
            status=Status.NOTE if probed.lacks_module else Status.PROBLEM,
        )
        return
    yield Finding(
        name=name,
        text=f"{facts['family']}, all tensors there; weights of {show_gib(facts['weight_bytes'])} in {facts['dtype']}, "
        f"context {facts['context']}",
        data=facts,
    )
    if facts["error"] is not None:
        yield Finding(
            name="memory for it",
            text=facts["error"],
            status=Status.PROBLEM,
            remedy="take a smaller model, a machine with more memory, or end other programs",
        )
        return
    weights, cache = facts["weight_bytes"], facts["kv_tokens"] * facts["kv_bytes_per_token"]
    yield Finding(
        name="memory for it",
        text=f"of {show_gib(facts['free_bytes'])} free on {facts['device']}, weights take {show_gib(weights)} and, by "
        f"default, the KV cache {show_gib(cache)}: {facts['kv_tokens']} tokens of {facts['kv_bytes_per_token']} bytes"
        + (f"; recurrent states take {show_gib(facts['state_bytes'])}" if facts["state_bytes"] else ""),
    )


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
