"""`vlmserve warmup` without a server: what is on disk afterwards, engines that start warm with it, interrupted runs."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processors.web import Server, serve
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.commands.warmup.media import (
    complaint,
    data_url,
    entries,
    fill,
    fill_badly,
    lines,
    png,
    warmup,
)
from tests.vlmserve.server_process import PATIENCE_S, ROOT
from vision.cache.store import EmbeddingStore
from vision.workers import process_backend
from vision.workers.settings import WorkerSettings
from vlmserve import LLM, SamplingOverrides, cli
from vlmserve_common.errors import EngineError

SAMPLING = SamplingOverrides(temperature=0.0, max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("model"))


def ask(model: Path, cache: Path | None, parts: list[dict], **options):
    """The answers to one question about each part, and how much was encoded."""
    with LLM(
        str(model), num_threads=1, max_total_tokens=4096, embedding_cache_dir=None if cache is None else str(cache)
    ) as llm:
        text = {"type": "text", "text": "What is this?"}
        chats = [[{"role": "user", "content": [part, text]}] for part in parts]
        answers = [answer.token_ids for answer in llm.chat_batch(chats, SAMPLING, **options)]
        return answers, llm.stats().encoder.encoded


def test_a_folder_is_encoded_once_and_engines_start_warm(model, tmp_path, capsys):
    media, cache, failed = fill_badly(tmp_path / "media"), tmp_path / "cache", tmp_path / "failed.jsonl"
    words = [model, media, "--embedding-cache-dir", cache, "--errors", failed]
    first = warmup(capsys, *words, status=1)
    assert (first["total"], first["done"], first["failed"], first["ignored"], first["found"]) == (4, 3, 1, 1, 0)
    assert first["encoded"] == len(entries(cache)) > 4, "two pictures and a clip"
    (error,) = lines(failed)
    assert error["source"] == str(media / "broken.png")
    assert (error["param"], error["code"]) == (None, "invalid_image")
    assert entries(cache, ".pin") == set()

    again = warmup(capsys, *words, "--pin", status=1)
    assert (again["encoded"], again["found"], again["done"]) == (0, first["encoded"], 3)
    assert entries(cache, ".pin") == entries(cache)

    parts = [
        {"type": "image", "image": media / "a.png"},
        {"type": "image", "image": media / "below" / "b"},
        {"type": "video", "video": media / "clip.mp4"},
    ]
    cold, _ = ask(model, None, parts)
    warm, encoded = ask(model, cache, parts)
    assert encoded == 0
    assert warm == cold


def test_requests_with_knobs_in_a_jsonl_file(model, tmp_path, capsys):
    media, cache, failed = fill(tmp_path / "media"), tmp_path / "cache", tmp_path / "failed.jsonl"
    small = {"type": "image_url", "image_url": {"url": "media/a.png", "detail": "low"}, "max_pixels": 3136}
    clip = {"type": "video", "video": (media / "clip.mp4").as_uri(), "nframes": 4}
    frames = {"type": "video", "video": ["media/a.png", data_url(png(9))], "sample_fps": 1}
    kwargs = {"min_pixels": 20000}

    def line(*parts: dict, **more: object) -> str:
        return json.dumps({"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}], **more})

    manifest = tmp_path / "requests.jsonl"
    manifest.write_text(
        "\n".join(
            [
                line(small, clip, model="any", max_tokens="a few"),
                "",
                line(frames),
                line({"type": "image", "image": "media/a.png"}, mm_processor_kwargs=kwargs),
                json.dumps({"messages": [{"role": "user", "content": "no picture"}]}),
                "{no JSON",
                line({"type": "image_url", "image_url": {"url": "media/gone.png"}}),
                line({"type": "image", "image": "media/a.png", "min_pixel": 3}),
                line({"type": "image_embeds", "image_embeds": "AAAA"}),
                line({"type": "image", "image": "media/a.png"}, mm_processor_kwargs={"wrong": 1}),
                line({"type": "file", "file": {"file_id": "file-1"}}),
            ]
        )
    )
    summary = warmup(capsys, model, manifest, "--embedding-cache-dir", cache, "--errors", failed, status=1)
    assert (summary["done"], summary["failed"], summary["encoded"]) == (4, 6, len(entries(cache)))
    errors = {error["source"].removeprefix(f"{tmp_path}/"): error for error in lines(failed)}
    assert [(place, errors[place]["param"], errors[place]["code"]) for place in sorted(errors)] == [
        ("requests.jsonl:10", "mm_processor_kwargs.wrong", "invalid_value"),
        ("requests.jsonl:11", "messages[0].content[0].file.file_id", None),
        ("requests.jsonl:6", None, "invalid_line"),
        ("requests.jsonl:7", "messages[0].content[0]", "invalid_media_url"),
        ("requests.jsonl:8", "messages[0].content[0].min_pixel", "invalid_value"),
        ("requests.jsonl:9", "messages[0].content[0]", "unsupported_content"),
    ]
    picture = {"type": "image", "image": media / "a.png"}
    small = {**picture, "detail": "low", "max_pixels": 3136}
    clip["video"] = media / "clip.mp4"
    frames["video"] = [(media / "a.png").read_bytes(), png(9)]
    assert ask(model, cache, [small, clip, frames])[1] == 0
    assert ask(model, cache, [picture], mm_processor_kwargs=kwargs)[1] == 0
    assert ask(model, cache, [picture])[1] == 1, "without the knobs it is another one"


def test_lists_standard_input_patterns_and_urls(model, tmp_path, capsys, monkeypatch):
    media, cache = fill(tmp_path / "media"), tmp_path / "cache"
    (media / "list.txt").write_text("# pictures\na.png\n\n  below/b  \nfile://nowhere\n")
    stdin = io.BytesIO(f"{media / 'a.png'}\n".encode())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(stdin))
    failed = tmp_path / "failed.jsonl"
    with serve() as web:
        web.RequestHandlerClass.get_picture = lambda handler, _: handler.answer(200, png(7))
        words = [media / "list.txt", "-", f"{media}/below/*", data_url(png(5)), web.url("/picture"), web.url("/good")]
        flags = ["--embedding-cache-dir", cache, "--errors", failed]
        summary = warmup(capsys, model, *words, *flags, "--allow-private-media", status=1)
        assert (summary["total"], summary["done"], summary["failed"]) == (8, 6, 2)
        assert len(entries(cache)) == 4
        assert sorted(error["code"] for error in lines(failed)) == ["invalid_media_url", "unsupported_content"]
        warmup(capsys, model, web.url("/picture"), *flags, status=1)
        assert "not public" in lines(failed)[0]["message"] or "private" in lines(failed)[0]["message"]
    for setting in ("--max-image-pixels", "--media-max-bytes"):
        warmup(capsys, model, media / "a.png", *flags, setting, "100", status=1)
        assert f"the limit is 100 (setting {setting})" in lines(failed)[0]["message"]


def test_a_run_is_resumed_by_its_journal(model, tmp_path, capsys, monkeypatch):
    media, cache, journal = fill(tmp_path / "media"), tmp_path / "cache", tmp_path / "done.jsonl"
    words = [model, media, "--embedding-cache-dir", cache, "--resume", journal]
    put, stored, flushed = EmbeddingStore.put, set(), []

    def watched_put(self, key, *args, **more):
        done = put(self, key, *args, **more)
        stored.add(key.hex())
        return done

    def watched_fsync(fd):
        if os.readlink(f"/proc/self/fd/{fd}") == str(journal):
            flushed.append(lines(journal))
            assert stored.issuperset(flushed[-1][-1]["keys"]), "no line is ahead of its entries"

    with monkeypatch.context() as patch:
        patch.setattr(EmbeddingStore, "put", watched_put)
        patch.setattr(os, "fsync", watched_fsync)
        assert warmup(capsys, *words)["done"] == 3
    assert [len(there) for there in flushed] == [1, 2, 3], "each line is on disk before it counts"
    kept = journal.read_bytes()
    assert warmup(capsys, *words)["skipped"] == 3
    assert journal.read_bytes() == kept

    # without what was done last, cut off in the middle, and with lines that are none
    journal.write_bytes(b"[1]\n\xff\xfe\n" + kept[:-20])
    torn = warmup(capsys, *words)
    assert (torn["skipped"], torn["done"], torn["encoded"]) == (2, 1, 0)
    assert warmup(capsys, *words)["skipped"] == 3

    # an entry was evicted, and a file has changed
    picture = next(
        json.loads(line) for line in journal.read_bytes().splitlines() if b"a.png" in line and line[-1:] == b"}"
    )
    next(cache.rglob(f"{picture['keys'][0]}.safetensors")).unlink()
    (media / "below" / "b").write_bytes(png(22))
    after = warmup(capsys, *words)
    assert (after["skipped"], after["done"], after["encoded"]) == (1, 2, 2)

    # what other settings make is something else
    other = warmup(capsys, *words, "--max-pixels", "4096")
    assert (other["skipped"], other["done"]) == (0, 3)
    assert warmup(capsys, *words, "--pin")["skipped"] == 0
    assert entries(cache, ".pin")
    assert warmup(capsys, *words)["skipped"] == 3

    # a request is another one when its files have changed
    requests = tmp_path / "requests.jsonl"
    part = {"type": "image", "image": "media/a.png"}
    requests.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}]}))
    asked = [model, requests, *words[2:]]
    assert [warmup(capsys, *asked)["skipped"] for _ in range(2)] == [0, 1]
    (media / "a.png").write_bytes(png(3))
    assert warmup(capsys, *asked)["encoded"] == 1


def test_a_full_cache_ends_the_run_with_one_clear_error(model, tmp_path, capsys):
    media, cache, failed = tmp_path / "media", tmp_path / "cache", tmp_path / "failed.jsonl"
    media.mkdir()
    for number in range(8):
        (media / f"{number}.png").write_bytes(png(number))
    warmup(capsys, model, media / "0.png", "--embedding-cache-dir", tmp_path / "one")
    (entry,) = (tmp_path / "one").rglob("*.safetensors")
    words = [model, media, "--embedding-cache-dir", cache, "--errors", failed]
    words += ["--embedding-cache-gib", 2 * entry.stat().st_size / 2**30]
    told = complaint(capsys, 1, *words, "--pin")
    assert told.count("vlmserve: error: ") == 1
    assert f"the embedding cache in {cache} is full: pinned entries leave no" in told
    assert failed.read_text() == ""
    assert len(entries(cache)) == 2
    assert complaint(capsys, 1, model, media, "--embedding-cache-dir", failed).count("--embedding-cache-dir") == 1

    words[3] = tmp_path / "another"
    summary = warmup(capsys, *words)
    assert summary["done"] == 8
    assert "entries were evicted for new ones" in summary["notes"][0]


def test_a_disk_that_fails_ends_the_run(model, tmp_path, capsys, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    media, cache = fill(tmp_path / "media"), tmp_path / "cache"
    monkeypatch.setattr("vision.cache.store.write_file", fail)
    told = complaint(capsys, 1, model, media, "--embedding-cache-dir", cache)
    assert f"vlmserve: error: the embedding cache in {cache} cannot be written: [Errno 28] No space left" in told


def test_a_picture_that_the_tower_fails_on_stops_nobody_else(model, tmp_path, capsys, monkeypatch):
    from vision.towers.runner import TowerRunner

    steps = TowerRunner.steps

    def steps_of_small(self, patches, limits):
        if any(patch.num_patches > 40 for patch in patches):
            raise RuntimeError("too large")
        return (yield from steps(self, patches, limits))

    monkeypatch.setattr(TowerRunner, "steps", steps_of_small)
    media, cache, failed = tmp_path / "media", tmp_path / "cache", tmp_path / "failed.jsonl"
    media.mkdir()
    for number, side in enumerate((64, 64, 256, 64)):
        (media / f"{number}.png").write_bytes(png(number, side, side))
    words = [model, media, "--embedding-cache-dir", cache, "--errors", failed]
    assert warmup(capsys, *words, status=1)["done"] == 3
    (error,) = lines(failed)
    assert error["message"] == "a picture or video could not be encoded: RuntimeError: too large"
    assert error["code"] == "engine_error"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("nowhere --embedding-cache-dir DIR", "INPUT 'nowhere': No such file or directory"),
        (".", "--embedding-cache-dir"),
        ("MODEL --embedding-cache-dir DIR", "is a model: name an INPUT"),
        (". --embedding-cache-dir DIR --encoder-dp-size -1", "--encoder-dp-size is -1"),
        (". --embedding-cache-dir DIR --concurrency 0", "--concurrency is 0"),
        ("MODEL . --url http://127.0.0.1:1 --embedding-cache-dir DIR", "--url"),
    ],
)
def test_a_wrong_command_line_ends_with_2(model, tmp_path, capsys, words, told):
    given = [str({"MODEL": model, "DIR": tmp_path / "cache"}.get(word, word)) for word in words.split()]
    assert cli.main(["warmup", *given]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("a.png --errors a.png", "INPUT and --errors are one file, 'a.png'"),
        ("*.png --errors a.png", "INPUT and --errors"),
        ("list.jsonl --resume link.jsonl", "INPUT and --resume"),
        ("*.jsonl --resume link.jsonl", "INPUT and --resume"),
        ("a.png --resume new --errors new", "--resume and --errors are one file, 'new'"),
    ],
)
def test_no_file_has_two_uses(model, tmp_path, capsys, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "list.jsonl").write_text('{"image": "a.png"}\n')
    os.link("list.jsonl", "link.jsonl")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert cli.main(["warmup", str(model), *words.split(), "--embedding-cache-dir", "cache"]) == 2
    assert told in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_its_processes_start_as_the_command_line_says(model, tmp_path, capsys, monkeypatch):
    def told(settings: WorkerSettings) -> None:
        raise EngineError(f"{settings.log_level}, {settings.startup_timeout_s:g} s, at {settings.ready_by:g}")

    monkeypatch.setattr(process_backend, "ProcessBackend", told)
    words = [model, fill(tmp_path / "media"), "--embedding-cache-dir", tmp_path / "cache", "--encoder-dp-size", "1"]
    said = complaint(capsys, 1, *words, "--log-level", "error", "--startup-timeout-s", "7.5")
    assert said == "vlmserve: error: error, 7.5 s, at inf\n"


@pytest.fixture
def web():
    with serve() as web:
        yield web


def interrupted(number: int, web: Server, words: list[object]) -> tuple[int, str, str]:
    """Run the command until it asks the web server for what never comes, and send it a signal; status and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLMSERVE_")}
    command = [sys.executable, "-m", "vlmserve.cli", "warmup", *map(str, words), "--num-threads", "1", "--json"]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # tests that a shell runs in the background ignore it, and so would their children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert web.stalled.wait(PATIENCE_S)
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_what_is_confirmed_survives(number, model, web, tmp_path, capsys):
    cache, journal, listed = tmp_path / "cache", tmp_path / "done.jsonl", tmp_path / "list.txt"
    names = [f"{place}.png" for place in range(4)]
    for place, name in enumerate(names):
        (tmp_path / name).write_bytes(png(place))
    words = [model, listed, "--embedding-cache-dir", cache, "--resume", journal]
    listed.write_text("\n".join([*names[:2], web.url("/stall"), *names[2:]]))
    # one at a time: when the third is asked for, two are done
    status, out, err = interrupted(number, web, [*words, "--concurrency", "1", "--allow-private-media"])
    assert len(lines(journal)) == 2, "each line is there once its entries are"
    assert all(set(line["keys"]) <= entries(cache) for line in lines(journal))
    if number == signal.SIGINT:
        assert status == 130
        summary = json.loads(out)
        assert (summary["interrupted"], summary["done"], summary["total"]) == (True, 2, 5)
        assert "Traceback" not in err
    listed.write_text("\n".join(names))
    summary = warmup(capsys, *words)
    assert (summary["skipped"], summary["done"], summary["encoded"]) == (2, 2, 2)


def test_encoder_processes_make_the_same_entries(model, tmp_path, capsys):
    for place in range(6):
        (tmp_path / f"{place}.png").write_bytes(png(place, 40 + 20 * place, 60))
    words = [model, f"{tmp_path}/*.png", "--embedding-cache-dir", tmp_path / "cache"]
    summary = warmup(capsys, *words, "--encoder-dp-size", "2")
    assert (summary["done"], summary["encoded"]) == (6, 6)
    summary = warmup(capsys, *words)
    assert (summary["encoded"], summary["found"]) == (0, 6)
