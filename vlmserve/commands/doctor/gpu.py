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
        return Finding(name="driver", text="; ".join(nvidia.gpus), data=data)
    if not nvidia.in_machine:
        return Finding(name="driver", text="no NVIDIA GPU: models run on the CPU", data=data)
    why = f"nvidia-smi says: {nvidia.trouble}" if nvidia.trouble else "there is no nvidia-smi"
    text = f"there is an NVIDIA GPU, and no driver that works: {why}"
    remedy = "install NVIDIA's driver; in a container, start it with docker run --gpus all"
    return Finding(name="driver", text=text, status=Status.NOTE, remedy=remedy, data=data)


def _gpu(device: str, gpu: dict[str, Any], torch_version: str) -> Finding:
    major, minor = gpu["capability"]
    room = f"{show_gib(gpu['total_bytes'])}, {show_gib(gpu['free_bytes'])} free"
    text = f"{gpu['name']}, compute capability {major}.{minor}: {room}"
    status, remedy = Status.OK, None
    if gpu["error"]:
        text, status = f"{text}; it computes nothing: {gpu['error']}", Status.PROBLEM
        remedy = _cuda_build(torch_version)
    elif major < 8:
        text, status = f"{text}; bfloat16 needs compute capability 8.0", Status.NOTE
        remedy = "start with --dtype float16"
    return Finding(name=device, text=text, status=status, remedy=remedy, data=gpu)


def _build(nvidia: Nvidia, torch: dict[str, Any]) -> Finding:
    version, cuda = torch["version"], torch["cuda"]
    data = {name: torch[name] for name in ("version", "cuda", "hip", "cuda_available")}
    built = f"CUDA {cuda}" if cuda else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    text = f"{version} is built for {built}"
    if torch["cuda_available"] or not nvidia.gpus:
        return Finding(name="torch build", text=text, data=data)
    if cuda:
        text += f", and finds no GPU that it can use: the driver may be too old for CUDA {cuda}, or "
        text, remedy = text + "CUDA_VISIBLE_DEVICES hides it", "update NVIDIA's driver"
    else:
        text, remedy = f"{text}, and leaves the NVIDIA GPU unused", _cuda_build(version)
    return Finding(name="torch build", text=text, status=Status.PROBLEM, remedy=remedy, data=data)


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
            yield Finding(name="attention", text=f"its trial failed: {probed.error}", status=Status.PROBLEM)
        return
    if facts["device"] is None:
        text = "on the CPU: our own operators where the CPU has them, else torch's"
        yield Finding(name="attention", text=text, data=facts)
        return
    yield _compiler(facts["compiler"])
    for name, why_not in facts["why_not"].items():
        version = facts["versions"][name]
        yield Finding(
            name=name,
            text=f"{version or 'not installed'}: {'its trial passes' if why_not is None else why_not}",
            status=Status.OK if why_not is None else Status.NOTE,
            data={"version": version, "why_not": why_not},
        )
    yield _attention(facts)


def _compiler(path: str | None) -> Finding:
    if path is not None:
        return Finding(name="C compiler", text=f"{path}, which Triton's kernels need", data={"path": path})
    return Finding(
        name="C compiler",
        text="there is none, and Triton's kernels need one at every first start",
        status=Status.NOTE,
        remedy="apt-get install gcc, or set CC",
        data={"path": None},
    )


def _attention(facts: dict[str, Any]) -> Finding:
    backend, slow = facts["backend"], facts["backend"] == "torch"
    text = f"{backend}, by --attention-backend auto, tried with {facts['heads']}"
    return Finding(
        name="attention",
        text=text + ("; it is slow on a GPU" if slow else ""),
        status=Status.NOTE if slow else Status.OK,
        data=facts,
    )
