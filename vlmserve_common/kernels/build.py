"""Builds the operators for a CPU, once, and keeps the library under a name that is a hash of its sources and flags.

`python -m vlmserve_common.kernels.build [FOLDER]` builds for all levels of this architecture. It needs no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpp"
SHIPPED = Path(__file__).parent / "lib"
LEVEL_VARIABLE = "VLMSERVE_CPU_LEVEL"
"""Environment variable with the highest level to use, so that a new CPU computes as an older one does."""
# The end of a library that was written completely: loading half of one can kill the process.
_WHOLE = b"vlmserve: whole\n"
_FLAGS = (
    "-std=c++20",
    "-O3",
    "-fPIC",
    "-pthread",
    "-Wall",
    "-Wno-psabi",
    "-fno-math-errno",
    "-fno-trapping-math",
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
_BF16 = (*_AVX512, "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni")
# The levels, the best first: the words of /proc/cpuinfo that a CPU must have, and the compiler's flags.
LEVELS: Mapping[str, tuple[frozenset[str], tuple[str, ...]]] = MappingProxyType(
    {
        "amx": (
            frozenset(("avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")),
            (*_BF16, "-mamx-tile", "-mamx-bf16"),
        ),
        "avx512_bf16": (frozenset(("avx512f", "avx512bw", "avx512vbmi", "avx512_vnni", "avx512_bf16")), _BF16),
        "avx512": (frozenset(("avx512f", "avx512bw", "avx512dq", "avx512vl")), _AVX512),
        "avx2": (frozenset(("avx2", "fma", "f16c")), _AVX2),
    }
)


class CannotBuild(Exception):
    """There is no library for this CPU, and none can be made; the text says why."""


def cache_folder() -> Path:
    """Return the folder of built libraries, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlmserve" / "kernels"


def cpu_words(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the features of this CPU in the words of Linux, or nothing if they are not known."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    return frozenset()


def best_level(words: Collection[str], machine: str = platform.machine()) -> str:
    """Return the best level of a CPU with these words, at most the one that VLMSERVE_CPU_LEVEL names if it is set.

    Raises CannotBuild for a CPU that the operators were not written for, and for a level that does not exist.
    """
    if machine in ("aarch64", "arm64"):
        return "arm64"
    levels = list(LEVELS)
    highest = os.environ.get(LEVEL_VARIABLE) or levels[0]
    if highest not in levels:
        raise CannotBuild(f"{LEVEL_VARIABLE} is {highest!r}, and the levels are {', '.join(levels)}")
    for level in levels[levels.index(highest) :]:
        if LEVELS[level][0] <= set(words):
            return level
    lacking = ", ".join(sorted(LEVELS["avx2"][0] - set(words)))
    raise CannotBuild(f"there are none for a CPU without {lacking}")


def better_level(level: str, words: Collection[str]) -> tuple[str, tuple[str, ...]] | None:
    """Return the next better level and the words that this CPU lacks for it, or None for the best level."""
    above = list(LEVELS)[: list(LEVELS).index(level)] if level in LEVELS else []
    return (above[-1], tuple(sorted(LEVELS[above[-1]][0] - set(words)))) if above else None


def library(level: str, cache: Path) -> tuple[Path, contextlib.ExitStack, str]:
    """Find the library of a level, shipped or in `cache`, or build it and keep it there. CannotBuild.

    Returns its file, a context to close once the file is loaded, and a remark for people ("" if there is none).
    """
    done = contextlib.ExitStack()
    found = find(level, cache)
    if found is not None:
        return found, done, ""
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache):
            found = find(level, cache)
            if found is None:
                log.info("building the operators for this kind of CPU (%s): takes seconds, once", level)
                found = build(level, cache)
        return found, done, ""
    except OSError as error:
        folder = Path(done.enter_context(tempfile.TemporaryDirectory(prefix="vlmserve-kernels-")))
        return build(level, folder), done, f"they cannot be kept in {cache} ({error.strerror}): built at every start"


def find(level: str, cache: Path) -> Path | None:
    """Return the library if it is shipped or in `cache`."""
    name = file_name(level)
    return next((folder / name for folder in (SHIPPED, cache) if _is_whole(folder / name)), None)


def _is_whole(file: Path) -> bool:
    try:
        with file.open("rb") as library:
            library.seek(-len(_WHOLE), os.SEEK_END)
            return library.read() == _WHOLE
    except OSError:
        return False


def file_name(level: str) -> str:
    """Return the file name of the library that these sources and flags make."""
    made_of = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        made_of.update(source.name.encode() + source.read_bytes())
    made_of.update(repr(_flags(level)).encode())
    return f"vlmserve-{level}-{made_of.hexdigest()[:16]}.so"


def build(level: str, folder: Path) -> Path:
    """Build the library of a level into a folder and return its file. CannotBuild; OSError if it cannot be written."""
    program = compiler()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".building-") as work:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [str(Path(work) / f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(max(1, min(len(sources), os.cpu_count() or 1))) as threads:
            commands = (
                [program, *_flags(level), "-c", str(source), "-o", made]
                for source, made in zip(sources, objects, strict=True)
            )
            list(threads.map(_run, commands))
        made = Path(work) / file_name(level)
        _run([program, "-shared", "-pthread", *objects, "-o", str(made)])
        with made.open("ab") as library:
            library.write(_WHOLE)
        return made.replace(folder / made.name)


def _flags(level: str) -> tuple[str, ...]:
    return (*_FLAGS, *(LEVELS[level][1] if level in LEVELS else ()))


def compiler() -> str:
    """Return the C++ compiler of this machine. CannotBuild."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if shutil.which(name):
            return name
    raise CannotBuild("there is no C++ compiler (g++ or clang++; CXX names another)")


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)
    except subprocess.TimeoutExpired:
        raise CannotBuild(f"{command[0]} was not done after 600 s") from None
    except OSError as error:
        raise CannotBuild(f"{command[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        why = errors[0].strip()[:200] if errors else f"exit status {done.returncode}, without a word"
        raise CannotBuild(f"{command[0]} failed: {why}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that one process builds while all that started with it wait."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Build for all kinds of CPU of this architecture, for a folder that is shipped."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    folder.mkdir(parents=True, exist_ok=True)
    for level in ("arm64",) if platform.machine() in ("aarch64", "arm64") else LEVELS:
        print(build(level, folder))


if __name__ == "__main__":
    main()
