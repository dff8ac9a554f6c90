"""How the operators' library is found, built and kept, and what is said where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from vlmserve_common.kernels import build, library

X86 = "x86_64"
OLD = frozenset(("fpu", "sse4_2", "avx"))


@pytest.fixture(autouse=True)
def all_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tests use every level, whatever the environment allows."""
    monkeypatch.delenv(build.LEVEL_VARIABLE, raising=False)


@pytest.fixture
def one_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A library of one small function, for a CPU of any kind, in place of the operators; the folder it is kept in."""
    sources = tmp_path / "cpp"
    sources.mkdir()
    (sources / "configure.cpp").write_text('extern "C" void vs_configure(int, int) {}\n')
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(library, "SIGNATURES", {"vs_configure": "nn"})
    monkeypatch.setattr(library, "best_level", lambda words: "plain")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield tmp_path / "cache" / "vlmserve" / "kernels"
    library.activate("off", threads=1)
    library.load.cache_clear()


@pytest.mark.parametrize(("level", "words"), [(level, words) for level, (words, _) in build.LEVELS.items()])
def test_each_kind_of_cpu_gets_its_own(level: str, words: frozenset[str]) -> None:
    assert build.best_level(words | OLD, X86) == level


def test_the_environment_limits_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    best = build.LEVELS["amx"][0] | build.LEVELS["avx512"][0] | build.LEVELS["avx2"][0]
    found = []
    for highest in ("", *build.LEVELS):
        monkeypatch.setenv(build.LEVEL_VARIABLE, highest)
        found.append(build.best_level(best, X86))
    assert found == ["amx", *build.LEVELS]
    monkeypatch.setenv(build.LEVEL_VARIABLE, "sse9")
    with pytest.raises(build.CannotBuild, match=r"VLMSERVE_CPU_LEVEL is 'sse9', and the levels are amx, .*avx2$"):
        build.best_level(best, X86)


def test_a_cpu_without_avx2_gets_none_and_is_told_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("model name\t: Old\nflags\t\t: fpu sse4_2 avx fma f16c\n")
    words = build.cpu_words(tmp_path / "cpuinfo")
    with pytest.raises(build.CannotBuild, match=r"a CPU without avx2$"):
        build.best_level(words, X86)
    monkeypatch.setattr(library, "cpu_words", lambda: words)
    monkeypatch.setattr(library, "best_level", lambda words: build.best_level(words, X86))
    assert (
        library.activate("auto", threads=1)
        == "torch's operators, which are slower: there are none for a CPU without avx2"
    )
    assert library.active() is None


def test_what_is_lacking_for_the_next_kind() -> None:
    assert build.better_level("avx2", build.LEVELS["avx2"][0] | {"avx512f", "avx512bw"}) == (
        "avx512",
        ("avx512dq", "avx512vl"),
    )
    assert build.better_level("amx", ()) is None


def test_it_is_built_once_and_kept(one_function: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.activate("auto", threads=1) == "operators for plain"
    assert [file.name for file in one_function.glob("*.so")] == [build.file_name("plain")]
    monkeypatch.setenv("CXX", "/bin/false")
    library.load.cache_clear()
    assert library.activate("auto", threads=1) == "operators for plain"


@pytest.mark.parametrize("content", [b"", b"\x7fELF half of a library"])
def test_a_half_written_one_is_built_again(one_function: Path, content: bytes) -> None:
    one_function.mkdir(parents=True)
    (one_function / build.file_name("plain")).write_bytes(content)
    assert library.activate("auto", threads=1) == "operators for plain"


def test_a_wrong_one_is_not_used(one_function: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "SIGNATURES", {"vs_configure": "nn", "vs_of_another_version": "p"})
    said = library.activate("auto", threads=1)
    assert said.startswith("torch's operators, which are slower: ")
    assert "cannot be loaded" in said
    assert "vs_of_another_version" in said
    assert library.active() is None


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/bin/false", "/bin/false failed: exit status 1"),
        ("", "there is no C++ compiler (g++ or clang++; CXX names another)"),
    ],
)
def test_no_compiler_or_a_broken_one(
    one_function: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", "")
    assert library.activate("auto", threads=1).startswith(f"torch's operators, which are slower: {reason}")
    assert library.active() is None
    assert not list(one_function.glob(".building*"))


def test_a_folder_that_cannot_be_written_to(one_function: Path) -> None:
    one_function.parent.parent.mkdir()
    one_function.parent.touch()  # a file where the folder should be
    said = library.activate("auto", threads=1)
    assert said == f"operators for plain; they cannot be kept in {one_function} (Not a directory): built at every start"
    assert library.active() is not None


def test_of_several_processes_one_builds(one_function: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had to wait for the lock finds what the other built."""
    lock, builds, real = build.fcntl.flock, [], build.build

    def counted(level: str, folder: Path) -> None:
        builds.append(os.getpid())
        real(level, folder)

    def after_another(file: IO[str], kind: int) -> None:
        real("plain", one_function)
        lock(file, kind)

    monkeypatch.setattr(build, "build", counted)
    monkeypatch.setattr(build.fcntl, "flock", after_another)
    assert library.activate("auto", threads=1) == "operators for plain"
    assert builds == []
