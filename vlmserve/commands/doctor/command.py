"""`vlmserve doctor`: checks everything, prints the findings, and exits with 1 if there is a problem."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Probed, Status, run_probes
from vlmserve.commands.doctor.machine import ask_nvidia, attention_findings, gpu_findings, machine_findings
from vlmserve.commands.doctor.packages import extra_findings, needed_findings, read_requirements
from vlmserve.config.flags import CommandParser
from vlmserve.config.model_path import DEFAULT_MODEL, NotDownloadedError, resolve_model
from vlmserve_common.compute.memory import show_gib
from vlmserve_common.errors import CheckpointError
from vlmserve_common.installing import pip_install
from vlmserve_common.version import __version__

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


def model_folder(model: str, revision: str | None = None) -> Path | Finding:
    """Return the folder of a checkpoint on this machine. Nothing is downloaded for it."""
    try:
        return resolve_model(model, revision, download=False)
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


_ABOUT = """\
Check this machine and installation: versions, GPU, memory, media libraries, optional extras, the built-in model. With
a MODEL: whether its files are whole, and whether it fits. Nothing is downloaded or changed, with one exception: missing
kernels for a GPU are built, which takes minutes, and kept.

Each line is ok, a note, or a problem with what to do about it. The exit status is 1 if there is a problem.
"""
_PATIENCE_WITH_A_GPU_S = 900.0
_COLOURS = {Status.OK: "32", Status.NOTE: "33", Status.PROBLEM: "31"}


def main(argv: Sequence[str]) -> int:
    """Print the findings, and return 1 if there is a problem."""
    parser = CommandParser(prog="vlmserve doctor", usage="%(prog)s [MODEL] [options]", description=_ABOUT)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint folder, or a Hugging Face hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    report = examine(args.model, args.revision)
    counts = {status: sum(one.status is status for found in report.values() for one in found) for status in Status}
    if args.json:
        findings = [{"section": section, **asdict(one)} for section, found in report.items() for one in found]
        tally = {"problems": counts[Status.PROBLEM], "notes": counts[Status.NOTE]}
        json.dump({"version": __version__, **tally, "findings": findings}, sys.stdout, indent=2)
        print()
    else:
        _print(report, counts)
    return int(counts[Status.PROBLEM] > 0)


def examine(model: str | None, revision: str | None = None) -> dict[str, list[Finding]]:
    """Return all findings by section. Two child processes import the libraries; this one imports none."""
    needed, extras = read_requirements()
    folder = None if model is None else model_folder(model, revision)
    modules = [one.module for one in needed if one.installed is not None and one.module not in (None, "torch")]
    folders = [DEFAULT_MODEL, *([folder] if isinstance(folder, Path) else [])]
    slow = ["torch", *(f"model:{each}" for each in folders), "attention"]
    quick = [*(f"import:{module}" for module in modules), *PROBES]
    nvidia = ask_nvidia()
    # kernels for a GPU may have to be built first
    patience = {"patience_s": _PATIENCE_WITH_A_GPU_S} if nvidia.in_machine else {}
    with ThreadPoolExecutor() as threads:
        probing = [threads.submit(run_probes, slow, **patience), threads.submit(run_probes, quick)]
        machine = list(machine_findings())
        files = files_finding()
        probed = {name: found for each in probing for name, found in each.result().items()}
    imports = {module: probed[f"import:{module}"] for module in modules if module} | {"torch": probed["torch"]}
    python = platform.python_version()
    data = {"version": __version__, "python": python, "executable": sys.executable}
    ourselves = Finding("vlmserve", f"{__version__}, Python {python} ({sys.executable})", data=data)
    report = {
        "vlmserve": [ourselves, *needed_findings(needed, imports)],
        "machine": machine,
        "GPU": [*gpu_findings(nvidia, probed["torch"]), *attention_findings(probed["attention"])],
        "media": list(media_findings(probed)),
        "built-in model": [files, *model_findings("model", probed[f"model:{DEFAULT_MODEL}"])],
        "extras": list(extra_findings(extras)),
    }
    if isinstance(folder, Path):
        report["MODEL"] = list(model_findings(str(model), probed[f"model:{folder}"]))
    elif folder is not None:
        report["MODEL"] = [folder]
    return report


def _print(report: Mapping[str, Sequence[Finding]], counts: Mapping[Status, int]) -> None:
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = 2 + max(len(one.name) for found in report.values() for one in found)
    for section, found in report.items():
        print(section)
        remedy = None
        for one in found:
            status = f"\x1b[{_COLOURS[one.status]}m{one.status:9}\x1b[0m" if coloured else f"{one.status:9}"
            print(f"  {status}{one.name:{width}}{one.text}")
            if one.remedy and one.remedy != remedy:
                print(f"  {'':9}{'':{width}}-> {one.remedy}")
            remedy = one.remedy
        print()
    print(f"{_count(counts[Status.PROBLEM], 'problem')}, {_count(counts[Status.NOTE], 'note')}")


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
