"""The machine: system, CPU, memory, shared memory, open files."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Status
from vlmserve.ipc.private_dir import shared_memory_base
from vlmserve_common.compute.cpus import available_cpus, cpu_name
from vlmserve_common.compute.memory import available_host_memory, show_gib, total_host_memory
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
