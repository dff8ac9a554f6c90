"""GPUs: those of the system, the driver's word, the abilities of the installed PyTorch, and the attention they get."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve.commands.doctor.packages import pip_install
from vlmserve_common.compute.memory import show_gib

_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_PYPI = "https://pypi.org/simple"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvidia:
    """The GPUs of NVIDIA. gpus: name, memory and driver of each, as the driver tells. in_machine: True if there is one.

    trouble: the complaint of nvidia-smi.
    """

    gpus: tuple[str, ...]
    in_machine: bool
    trouble: str | None = None


def ask_nvidia(pci: Path = Path("/sys/bus/pci/devices")) -> Nvidia:
    """Ask the system and nvidia-smi, without PyTorch."""
    in_machine = any(_is_nvidia(device) for device in pci.glob("*")) or Path("/dev/nvidia0").exists()
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        trouble = None if isinstance(error, FileNotFoundError) else str(error)
        return Nvidia(gpus=(), in_machine=in_machine, trouble=trouble)
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines() or [f"status {done.returncode}"]
        return Nvidia(gpus=(), in_machine=in_machine, trouble=said[0])
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    gpus = tuple(f"{name}, {memory} MiB, driver {driver}" for name, memory, driver in rows)
    return Nvidia(gpus=gpus, in_machine=in_machine or bool(gpus))


def gpu_findings(nvidia: Nvidia, torch: Probed) -> Iterator[Finding]:
    """Yield the findings. torch: the probe of that name. Failed imports are told elsewhere."""
    yield _driver(nvidia)
    if torch.result is not None:
        yield _build(nvidia, torch.result)
        for index, gpu in enumerate(torch.result["gpus"]):
            yield _gpu(f"cuda:{index}", gpu, torch.result["version"])


def _driver(nvidia: Nvidia) -> Finding:
    data = asdict(nvidia)
    if nvidia.gpus:
        return Finding("driver", "; ".join(nvidia.gpus), data=data)
    if not nvidia.in_machine:
        return Finding("driver", "no NVIDIA GPU: models run on the CPU", data=data)
    why = f"nvidia-smi says: {nvidia.trouble}" if nvidia.trouble else "there is no nvidia-smi"
    text = f"there is an NVIDIA GPU, and no driver that works: {why}"
    remedy = "install NVIDIA's driver; in a container, start it with docker run --gpus all"
    return Finding("driver", text, Status.NOTE, remedy, data)


def _gpu(device: str, gpu: dict[str, Any], torch_version: str) -> Finding:
    major, minor = gpu["capability"]
    room = f"{show_gib(gpu['total_bytes'])}, {show_gib(gpu['free_bytes'])} free"
    text = f"{gpu['name']}, compute capability {major}.{minor}: {room}"
    if gpu["error"]:
        text += f"; it computes nothing: {gpu['error']}"
        return Finding(device, text, Status.PROBLEM, _cuda_build(torch_version), gpu)
    if major < 8:
        text += "; bfloat16 needs compute capability 8.0"
        return Finding(device, text, Status.NOTE, "start with --dtype float16", gpu)
    return Finding(device, text, data=gpu)


def _build(nvidia: Nvidia, torch: dict[str, Any]) -> Finding:
    version, cuda = torch["version"], torch["cuda"]
    data = {name: torch[name] for name in ("version", "cuda", "hip", "cuda_available")}
    built = f"CUDA {cuda}" if cuda else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    text = f"{version} is built for {built}"
    if torch["cuda_available"] or not nvidia.gpus:
        return Finding("torch build", text, data=data)
    if cuda:
        text += f", and finds no GPU that it can use: the driver may be too old for CUDA {cuda}, or "
        text += "CUDA_VISIBLE_DEVICES hides it"
        return Finding("torch build", text, Status.PROBLEM, "update NVIDIA's driver", data)
    text += ", and leaves the NVIDIA GPU unused"
    return Finding("torch build", text, Status.PROBLEM, _cuda_build(version), data)


def _cuda_build(version: str) -> str:
    """Return the command that installs a CUDA build: PyPI has these for x86-64 Linux, and none that end with +cpu."""
    if platform.machine() != "x86_64":
        return "install a PyTorch with CUDA as https://pytorch.org/get-started/locally says"
    return pip_install("--force-reinstall", "--index-url", _PYPI, f"torch=={version.partition('+')[0]}")


def _is_nvidia(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY)


def attention_findings(probed: Probed) -> Iterator[Finding]:
    """Yield the findings of a probe by `engine_probes.examine_attention`. Failed imports are told elsewhere."""
    facts = probed.result
    if facts is None:
        if not probed.lacks_module:
            yield Finding("attention", f"its trial failed: {probed.error}", Status.PROBLEM)
        return
    if facts["device"] is None:
        text = "on the CPU: our own operators where the CPU has them, else torch's"
        yield Finding("attention", text, data=facts)
        return
    path = facts["compiler"]
    if path is not None:
        yield Finding("C compiler", f"{path}, which Triton's kernels need", data={"path": path})
    else:
        text = "there is none, and Triton's kernels need one at every first start"
        yield Finding("C compiler", text, Status.NOTE, "apt-get install gcc, or set CC", {"path": None})
    for name, why_not in facts["why_not"].items():
        version = facts["versions"][name]
        text = f"{version or 'not installed'}: {why_not or 'its trial passes'}"
        data = {"version": version, "why_not": why_not}
        yield Finding(name, text, Status.NOTE if why_not else Status.OK, data=data)
    slow = facts["backend"] == "torch"
    text = f"{facts['backend']}, by --attention-backend auto, tried with {facts['heads']}"
    text += "; it is slow on a GPU" if slow else ""
    yield Finding("attention", text, Status.NOTE if slow else Status.OK, data=facts)
