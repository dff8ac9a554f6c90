"""GPUs: what the system has, what its driver tells, and what the installed PyTorch can do with them."""

from __future__ import annotations

import platform
import subprocess
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Status
from vlmserve.commands.doctor.packages import pip_install
from vlmserve.commands.doctor.probing import Probed
from vlmserve_common.compute.memory import show_gib

_QUERY = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader,nounits"]
_NVIDIA, _DISPLAY = "0x10de", "0x03"
_PYPI = "https://pypi.org/simple"


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvidia:
    """gpus: name, memory and driver of each, as the driver tells. in_machine: whether there is one, driver or not.
    trouble: what nvidia-smi complains of."""

    gpus: tuple[str, ...]
    in_machine: bool
    trouble: str | None = None


def ask_nvidia(pci: Path = Path("/sys/bus/pci/devices")) -> Nvidia:
    """Without PyTorch."""
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
    """torch: the probe's; what fails to be imported is told elsewhere."""
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


def _gpu(device: str, gpu: dict[str, typing.Any], torch_version: str) -> Finding:
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


def _build(nvidia: Nvidia, torch: dict[str, typing.Any]) -> Finding:
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
    """PyPI's builds for x86-64 Linux have CUDA; a version that ends with +cpu is not from there."""
    if platform.machine() != "x86_64":
        return "install a PyTorch with CUDA as https://pytorch.org/get-started/locally says"
    return pip_install("--force-reinstall", "--index-url", _PYPI, f"torch=={version.partition('+')[0]}")


def _is_nvidia(device: Path) -> bool:
    try:
        vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == _NVIDIA and kind.startswith(_DISPLAY)
