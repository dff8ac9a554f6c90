"""`vlmserve cache`: what it shows, what it removes, and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vision.store_helpers import ABOUT, FINGERPRINT, HEADER, entry_files, file_of, holds, key, open_store, rows
from vision.cache.folder import EmbeddingFolder
from vlmserve import cli

SIZE = HEADER + 1024
OTHER = bytes([0xAB]) * 32
DAY = 86400.0


@pytest.fixture
def now():
    return time.time()


@pytest.fixture
def cache(tmp_path, now):
    """Entries 0 to 4, used so many days ago, of which 4 is pinned; and 10 of another model, used half a day ago."""
    store = open_store(tmp_path)
    other = open_store(tmp_path, fingerprint=OTHER, about={**ABOUT, "model": "another"})
    for number in range(5):
        assert store.put(key(number), rows(number), pin=number == 4)
        os.utime(file_of(tmp_path, number), (now - number * DAY,) * 2)
    assert other.put(key(10), rows(10))
    os.utime(file_of(tmp_path, 10, OTHER), (now - DAY / 2,) * 2)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> str:
    assert cli.main(["cache", *map(str, words)]) == status
    return capsys.readouterr().out


def run_json(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> object:
    return json.loads(run(capsys, *words, "--json", status=status))


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(["cache", *map(str, words)])
    assert caught.value.code == 2
    return capsys.readouterr().err


def left(folder: Path) -> set[int]:
    files = set(entry_files(folder))
    return {n for n in range(5) if file_of(folder, n) in files} | {
        n for n in (10,) if file_of(folder, n, OTHER) in files
    }


# --- ls and stats


def test_ls_lists_the_last_used_first(cache, now, capsys):
    listed = run_json(capsys, "ls", cache)
    assert [item["key"] for item in listed] == [key(n).hex() for n in (0, 10, 1, 2, 3, 4)]
    assert listed[1] == {
        "key": key(10).hex(),
        "rows": 8,
        "width": 64,
        "dtype": "BF16",
        "bytes": SIZE,
        "used": pytest.approx(now - DAY / 2),
        "pinned": False,
        "fingerprint": OTHER.hex(),
        "model": "another",
    }
    assert [item["pinned"] for item in listed] == [False] * 5 + [True]
    assert [item["key"] for item in run_json(capsys, "ls", cache, "--limit", 1)] == [key(0).hex()]
    lines = run(capsys, "ls", cache, "--limit", "2").splitlines()
    assert len(lines) == 3
    assert lines[2].split()[:7] == [key(10).hex()[:16], "8", "x", "64", "BF16", "1.5", "KiB"]
    assert lines[2].endswith("another")


def test_ls_says_what_it_cannot_read(cache, capsys):
    file_of(cache, 0).write_bytes(b"")
    os.utime(file_of(cache, 0))
    (cache / "v1" / FINGERPRINT.hex() / "about.json").unlink()
    [item] = run_json(capsys, "ls", cache, "--limit", 1)
    assert (item["key"], item["rows"], item["dtype"], item["model"]) == (key(0).hex(), None, None, "?")
    assert "damaged" in run(capsys, "ls", cache)


def test_stats_count_model_by_model(cache, capsys):
    summary = run_json(capsys, "stats", cache)
    assert (summary["entries"], summary["bytes"], summary["pinned"]) == (6, 6 * SIZE, 1)
    first, second = summary["fingerprints"]
    assert first == {"fingerprint": FINGERPRINT.hex(), "about": ABOUT, "entries": 5, "bytes": 5 * SIZE, "pinned": 1}
    assert (second["about"]["model"], second["entries"], second["pinned"]) == ("another", 1, 0)
    lines = run(capsys, "stats", cache).splitlines()
    assert lines[1].split()[:6] == [FINGERPRINT.hex()[:16], "5", "7.5", "KiB", "1", "a"]
    assert lines[-1].split() == ["total", "6", "9.0", "KiB", "1"]


def test_looking_marks_nothing_as_used(cache, capsys):
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    for command in ("ls", "stats", "verify"):
        run(capsys, command, cache)
    run(capsys, "prune", cache, "--max-size", "0", "--unpin", "--dry-run")
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


# --- verify


def test_verify_names_what_is_bad(cache, capsys):
    assert run(capsys, "verify", cache) == "6 entries, 0 bad\n"
    damaged = file_of(cache, 2)
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    file_of(cache, 3).write_bytes(file_of(cache, 1).read_bytes())
    printed = run(capsys, "verify", cache, status=1)
    assert f"BAD: {damaged}: its content is not what was written under this key\n" in printed
    assert printed.endswith("6 entries, 2 bad\n")
    assert left(cache) == {0, 1, 2, 3, 4, 10}
    found = run_json(capsys, "verify", cache, "--remove", status=1)
    assert {(bad["key"], bad["removed"]) for bad in found["bad"]} == {(key(2).hex(), True), (key(3).hex(), True)}
    assert left(cache) == {0, 1, 4, 10}
    assert run(capsys, "verify", cache) == "4 entries, 0 bad\n"


def test_verify_removes_nothing_that_it_could_not_read(cache, capsys, monkeypatch):
    def broken(file: object, key: bytes) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("vlmserve.commands.cache.read_entry", broken)
    printed = run(capsys, "verify", cache, "--remove", status=1)
    assert "it cannot be read: Input/output error\n" in printed
    assert printed.endswith("6 entries, 6 bad\n")
    assert len(left(cache)) == 6


# --- prune


@pytest.mark.parametrize(
    ("flags", "stays"),
    [
        (["--older-than", "36h"], {0, 1, 4, 10}),
        (["--older-than", "129600s", "--unpin"], {0, 1, 10}),
        (["--older-than", "12w"], {0, 1, 2, 3, 4, 10}),
        (["--max-size", f"{4 * SIZE}"], {0, 1, 4, 10}),
        (["--max-size", f"{4 * SIZE}", "--unpin"], {0, 1, 2, 10}),
        (["--max-size", "3 KiB"], {0, 4}),
        (["--max-size", "0"], {4}),
        (["--max-size", "1.5 GB"], {0, 1, 2, 3, 4, 10}),
        (["--max-size", f"{3 * SIZE}", "--older-than", "3600m"], {0, 4, 10}),
        (["--fingerprint", OTHER.hex()], {0, 1, 2, 3, 4}),
        (["--fingerprint", "ab"], {0, 1, 2, 3, 4}),
        (["--fingerprint", "AB", "--older-than", "1d"], {0, 1, 2, 3, 4, 10}),
        (["--fingerprint", "0001", "--max-size", f"{2 * SIZE}"], {0, 4, 10}),
        (["--all-but", "ab"], {4, 10}),
        (["--all-but", "ab", "--unpin"], {10}),
        (["--all-but", "ab", "--all-but", "00"], {0, 1, 2, 3, 4, 10}),
        (["--fingerprint", "ab", "--fingerprint", "00"], {4}),
    ],
)
def test_prune_removes_what_the_flags_say(cache, flags, stays, capsys):
    everything = left(cache)
    dry = run_json(capsys, "prune", cache, *flags, "--dry-run")
    assert left(cache) == everything
    done = run_json(capsys, "prune", cache, *flags)
    assert left(cache) == stays
    assert done == {**dry, "dry_run": False}
    assert {item["key"] for item in done["removed"]} == {key(n).hex() for n in everything - stays}
    assert (done["removed_bytes"], done["left_bytes"]) == (len(everything - stays) * SIZE, len(stays) * SIZE)
    assert file_of(cache, 4).with_suffix(".pin").exists() == (4 in stays)


def test_prune_says_what_it_did(cache, capsys):
    flags = ["prune", cache, "--older-than", "36h"]
    assert run(capsys, *flags, "--dry-run") == (
        "would remove 2 entries, 3.0 KiB; 4 are left, 6.0 KiB, 1 of them pinned\n"
    )
    assert run(capsys, *flags).startswith("removed 2 entries")
    assert run(capsys, *flags).startswith("removed 0 entries")


def test_prune_leaves_no_empty_folders(cache, capsys):
    file_of(cache, 10, OTHER).with_suffix(".pin").touch()
    file_of(cache, 10, OTHER).unlink()
    run(capsys, "prune", cache, "--fingerprint", "ab")
    assert EmbeddingFolder(cache).fingerprints() == [FINGERPRINT.hex(), OTHER.hex()]  # its pin waits for an entry
    run(capsys, "prune", cache, "--fingerprint", "ab", "--unpin")
    assert [path.name for path in (cache / "v1").iterdir() if path.is_dir()] == [FINGERPRINT.hex()]
    assert len(left(cache)) == 5


def test_a_store_goes_on_beside_it(cache, capsys):
    store = open_store(cache)
    run(capsys, "prune", cache, "--max-size", "0", "--unpin")
    assert list((cache / "v1").iterdir()) == [cache / "v1" / "lock"]
    assert not holds(store, 0)
    assert store.put(key(0), rows(0))
    assert holds(store, 0)
    assert run_json(capsys, "stats", cache)["fingerprints"][0]["about"] == ABOUT


def test_prune_waits_for_an_eviction_under_way(cache, capsys):
    with ThreadPoolExecutor(1) as pool:
        with EmbeddingFolder(cache).locked(wait=True):
            waiting = pool.submit(run, capsys, "prune", cache, "--max-size", "0")
            with pytest.raises(TimeoutError):
                waiting.result(0.05)
            assert len(left(cache)) == 6
        assert waiting.result(60).startswith("removed 5 entries")


# --- the command line


def test_the_folder_may_come_from_the_environment(cache, capsys, monkeypatch):
    monkeypatch.delenv("VLMSERVE_EMBEDDING_CACHE_DIR", raising=False)
    assert "DIR, or VLMSERVE_EMBEDDING_CACHE_DIR" in refused(capsys, "stats")
    monkeypatch.setenv("VLMSERVE_EMBEDDING_CACHE_DIR", str(cache))
    assert run_json(capsys, "stats")["entries"] == 6
    assert "there is no folder '/no/such'" in refused(capsys, "stats", "/no/such")


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "prune --max-size 0", "prune --max-size 0 --dry-run"])
def test_an_empty_folder_is_an_empty_cache(tmp_path, command, capsys):
    assert "0" in run(capsys, *command.split(), tmp_path).replace("no", "0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "say what to remove: --max-size, --older-than, --fingerprint or --all-but"),
        (["--unpin"], "say what to remove"),
        (["--all-but", "cd"], "0 fingerprints begin with 'cd'; there are: 0001"),
        (["--fingerprint", ""], "2 fingerprints begin with ''"),
        (["--fingerprint", "ab", "--all-but", "00"], "not allowed with"),
        (["--max-size", "10 GiBi"], "'10 GiBi' is not a size such as 500MiB or 10GiB"),
        (["--max-size", "-1"], "--max-size"),
        (["--older-than", "7"], "'7' is not an age such as 30m, 12h, 7d or 2w"),
        (["--older-than", "nan"], "'nan' is not an age"),
        (["--max-siz", "1"], "there is no --max-siz; did you mean --max-size?"),
    ],
)
def test_prune_removes_nothing_by_mistake(cache, flags, complaint, capsys):
    assert complaint in refused(capsys, "prune", cache, *flags)
    assert len(left(cache)) == 6


@pytest.mark.parametrize("words", [[], ["lss"], ["ls", "--limit", "0"]])
def test_a_wrong_command_line_ends_with_2(words, capsys):
    assert "error:" in refused(capsys, *words)


def test_a_folder_that_cannot_be_written_ends_with_1(cache, capsys, monkeypatch):
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "unlink", refuse)
    assert cli.main(["cache", "prune", str(cache), "--max-size", "0"]) == 1
    assert "vlmserve: error: [Errno 13] Permission denied" in capsys.readouterr().err


def test_it_starts_without_torch(cache):
    code = (
        "import sys; from vlmserve import cli; cli.main(['cache', 'verify', sys.argv[1]]);"
        "print(*{'torch', 'transformers', 'pydantic'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(cache)], capture_output=True, text=True, check=True)
    assert done.stdout == "6 entries, 0 bad\n\n"
