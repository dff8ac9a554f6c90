"""`vlmserve doctor`: checks everything, prints the findings, and exits with 1 if there is a problem."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Status, run_probes
from vlmserve.commands.doctor.machine import ask_nvidia, attention_findings, gpu_findings, machine_findings
from vlmserve.commands.doctor.model import PROBES, files_finding, media_findings, model_findings, model_folder
from vlmserve.commands.doctor.packages import extra_findings, needed_findings, read_requirements
from vlmserve.config.flags import CommandParser
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve_common.version import __version__

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
    parser = CommandParser(prog="vlmserve doctor", usage="%(prog)s [MODEL] [--json]", description=_ABOUT)
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a checkpoint folder, or a Hugging Face hub id")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    report = examine(args.model)
    counts = {status: sum(one.status is status for found in report.values() for one in found) for status in Status}
    if args.json:
        findings = [{"section": section, **asdict(one)} for section, found in report.items() for one in found]
        tally = {"problems": counts[Status.PROBLEM], "notes": counts[Status.NOTE]}
        json.dump({"version": __version__, **tally, "findings": findings}, sys.stdout, indent=2)
        print()
    else:
        _print(report, counts)
    return int(counts[Status.PROBLEM] > 0)


def examine(model: str | None) -> dict[str, list[Finding]]:
    """Return all findings by section. Two child processes import the libraries; this one imports none."""
    needed, extras = read_requirements()
    folder = None if model is None else model_folder(model)
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
