"""The machine: system, CPU, memory, shared memory, open files, and GPUs with the attention they get."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve.ipc.private_dir import shared_memory_base
from vlmserve_common.compute.cpus import available_cpus, cpu_name
from vlmserve_common.compute.memory import available_host_memory, show_gib, total_host_memory
from vlmserve_common.installing import pip_install
from vlmserve_common.kernels.build import CannotBuild, best_level, better_level, cache_folder, compiler, cpu_words, find

# The instructions that matter to matrix products, by the kernel's names.
_ON_X86 = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "amx_int8")
_ON_ARM = ("asimd", "sve", "bf16", "i8mm")
_X86, _BFLOAT16_ON_X86 = "fpu", {"avx512_bf16", "amx_bf16"}
_LITTLE_MEMORY = 2 * 2**30
_LITTLE_SHARED, _TOO_LITTLE_SHARED = 2**30, 128 * 2**20
_FEW_FILES = 1024


def machine_findings() -> Iterator[Finding]:
    """Yield all findings about the machine."""
    yield from (system(), cpu(), operators(), memory(), shared_memory(shared_memory_base()), open_files())


def system() -> Finding:
    """Look at the operating system."""
    name, kernel, kind, distribution = platform.system(), platform.release(), platform.machine(), ""
    with contextlib.suppress(OSError):
        distribution = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    text = ", ".join(filter(None, [distribution, f"{name} {kernel} {kind}"]))
    data = {"system": name, "release": kernel, "machine": kind, "distribution": distribution}
    if name == "Linux":
        return Finding("system", text, data=data)
    remedy = "run it on Linux, or in a Linux container"
    return Finding("system", f"{text}: vlmserve is made for Linux", Status.PROBLEM, remedy, data)


def cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Finding:
    """Look at the cores, and their instructions for matrix products."""
    usable, there = available_cpus(), os.cpu_count() or 1
    model, flags = cpu_name(cpuinfo), cpu_words(cpuinfo)
    instructions = [name for name in (*_ON_X86, *_ON_ARM) if name in flags]
    slow = _X86 in flags and not _BFLOAT16_ON_X86 & flags
    text = f"{model}: {usable} of {there} cores usable" if usable != there else f"{model}: {there} cores"
    if instructions:
        text += f"; {' '.join(instructions)}"
    if slow:
        text += "; no bfloat16 products in hardware: they are computed in float32"
    data = {"model": model, "cores": there, "usable_cores": usable, "instructions": instructions}
    return Finding("cpu", text, Status.NOTE if slow else Status.OK, data=data)


def operators(cpuinfo: Path = Path("/proc/cpuinfo"), cache: Path | None = None) -> Finding:
    """Tell what computes on this CPU, and why nothing faster does."""
    words, cache = cpu_words(cpuinfo), cache or cache_folder()
    level = None
    try:
        level = best_level(words)
        better = better_level(level, words)
        lacks = f" (this CPU lacks {', '.join(better[1])} for {better[0]})" if better else ""
        built = find(level, cache)
        where = f"in {built.parent}" if built else f"to be built with {compiler()} at the first start: takes seconds"
        found = Finding("operators", f"for {level}{lacks}, {where}")
    except CannotBuild as error:
        remedy = None if level is None else "install a C++ compiler (apt-get install g++)"
        found = Finding("operators", f"torch's, which are slower: {error}", Status.NOTE, remedy)
    return replace(found, data={"level": level, "folder": str(cache)})


def memory() -> Finding:
    """Look at the memory of the machine, and what limits leave of it."""
    available = available_host_memory()
    total, limit = total_host_memory()
    limited = "" if limit is None else f", of which the control group (container) allows {show_gib(limit)}"
    text = f"{show_gib(total)}{limited}; {show_gib(available)} available"
    data = {"total_bytes": total, "limit_bytes": limit, "available_bytes": available}
    if available >= _LITTLE_MEMORY:
        return Finding("memory", text, data=data)
    remedy = "end other programs, or raise the container's limit (docker run --memory)"
    return Finding("memory", text, Status.NOTE, remedy, data)


def shared_memory(folder: Path) -> Finding:
    """Look at the room for patches of pictures and videos on their way between processes."""
    room = os.statvfs(folder)
    total, free = room.f_frsize * room.f_blocks, room.f_frsize * room.f_bavail
    text = f"{folder}: {show_gib(total)}, {show_gib(free)} free"
    data = {"folder": str(folder), "total_bytes": total, "free_bytes": free}
    if free >= _LITTLE_SHARED:
        return Finding("shared memory", text, data=data)
    text += "; large pictures, videos and many requests at a time may find no room in it"
    remedy = "docker run --shm-size=2g ... (without a container: mount -o remount,size=2g /dev/shm)"
    status = Status.PROBLEM if free < _TOO_LITTLE_SHARED else Status.NOTE
    return Finding("shared memory", text, status, remedy, data)


def open_files() -> Finding:
    """Look at the limit of open files, which connections count towards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, data = f"{soft} at the most", {"soft": soft, "hard": hard}
    if soft == resource.RLIM_INFINITY or soft >= _FEW_FILES:
        return Finding("open files", text, data=data)
    return Finding("open files", f"{text}; each connection is one", Status.NOTE, "ulimit -n 65536", data)


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
