"""`vlmserve warmup --url`: a real server with a key, and one that is difficult."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import openai

from tests.processors.clips import make_clip
from tests.processors.web import closed_port
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.commands.served import fake_server
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
from tests.vlmserve.server_process import ServerProcess
from vlmserve.ipc.messages import FinishReason


def test_a_running_server_is_warmed(tmp_path, capsys):
    model, cache = make_checkpoint("qwen2_vl", tmp_path / "model"), tmp_path / "cache"
    media, failed, journal = fill_badly(tmp_path / "media"), tmp_path / "failed.jsonl", tmp_path / "done.jsonl"
    manifest = tmp_path / "requests.jsonl"
    part = {"type": "image_url", "image_url": {"url": "media/a.png", "detail": "low"}, "max_pixels": 3136}
    manifest.write_text(json.dumps({"messages": [{"role": "user", "content": [part]}]}))
    words = [sys.executable, "-m", "vlmserve.cli", "serve", model, "--port", "0", "--num-threads", "1"]
    flags = ["--max-total-tokens", "4096", "--served-model-name", "m", "--embedding-cache-dir", cache]
    server = ServerProcess([*map(str, words), *map(str, flags)], tmp_path / "run", VLMSERVE_API_KEY="key")
    try:
        url = f"http://127.0.0.1:{server.port()}"
        sources = [media, manifest, "--url", url, "--errors", failed, "--resume", journal, "--pin"]
        assert "a valid API key is needed" in complaint(capsys, 1, *sources, "--api-key", "wrong")
        first = warmup(capsys, *sources, "--api-key", "key", status=1)
        assert (first["done"], first["failed"], first["notes"]) == (4, 1, [])
        assert first["encoded"] == len(entries(cache)) > 4
        assert entries(cache, ".pin") == entries(cache)
        assert [Path(error["source"]).name for error in lines(failed)] == ["broken.png"]
        again = warmup(capsys, *sources, "--api-key", "key", status=1)
        assert (again["done"], again["skipped"]) == (0, 4)
        journal.unlink()
        again = warmup(capsys, *sources, "--api-key", "key", status=1)
        assert (again["done"], again["encoded"], again["found"]) == (4, 0, first["encoded"])

        figure = "vlmserve:temporal_patches_encoded_total"
        before = [line for line in server.get("metrics")[1].splitlines() if line.startswith(figure)]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as client:
            part = {"type": "image_url", "image_url": {"url": data_url((media / "a.png").read_bytes())}}
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": [part]}], max_tokens=2, temperature=0
            )
        assert [line for line in server.get("metrics")[1].splitlines() if line.startswith(figure)] == before
        assert before[0].endswith(f" {float(first['encoded'])}")
    finally:
        server.end()
    # offline it is all there, too
    summary = warmup(capsys, model, media, manifest, "--embedding-cache-dir", cache, status=1)
    assert summary["encoded"] == 0


def test_without_a_disk_the_user_is_told_and_nothing_counts_as_finished(checkpoint, tmp_path, capsys):
    journal = tmp_path / "done.jsonl"
    with fake_server(checkpoint) as (served, url):
        words = [fill(tmp_path / "media"), "--url", f"{url}/v1/", "--resume", journal]
        summary = warmup(capsys, *words)
        assert summary["done"] == 3
        assert "no embeddings on disk" in summary["notes"][0]
        assert journal.read_text() == ""
        served.assert_idle()
        assert "vlmserve: error: " in complaint(capsys, 1, *words, "--pin")


def test_a_busy_server_is_asked_again(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vlmserve.commands.warmup.run._WAITS_S", (0.0, 0.0, 0.0))
    busy = FinishReason(type="error", status=429, message="busy")
    (tmp_path / "a.png").write_bytes(png(1))

    def busy_twice(message):
        scheduler.fail_with = busy if len(scheduler.encodes) < 3 else None
        return answer(message)

    with fake_server(checkpoint) as (served, url):
        scheduler, answer = served.scheduler, served.scheduler._encoded
        words = [tmp_path / "a.png", "--url", url]
        monkeypatch.setattr(scheduler, "_encoded", busy_twice)
        assert warmup(capsys, *words)["done"] == 1
        assert len(scheduler.encodes) == 3
        scheduler.fail_with = busy
        monkeypatch.setattr(scheduler, "_encoded", answer)
        assert "busy" in complaint(capsys, 1, *words)
        assert len(scheduler.encodes) == 3 + 4
        scheduler.fail_with = FinishReason(type="error", status=500, message="broken picture")
        assert warmup(capsys, *words, status=1)["failed"] == 1


def test_a_body_that_is_too_large_is_one_failure(checkpoint, tmp_path, capsys):
    failed = tmp_path / "failed.jsonl"
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(2, 600, 600))
    with fake_server(checkpoint, max_body_mib=0.05) as (_, url):
        words = [f"{tmp_path}/*.png", "--url", url, "--errors", failed]
        assert warmup(capsys, *words, status=1)["done"] == 1
    (error,) = lines(failed)
    assert error["code"] == "body_too_large"
    assert "--max-body-mib" in error["message"]


def test_requests_are_sent_with_all_their_knobs(checkpoint, tmp_path, capsys):
    (tmp_path / "a.png").write_bytes(png(1, 224, 224))
    (tmp_path / "clip.mp4").write_bytes(make_clip(12, width=56, height=56))
    with fake_server(checkpoint, {"low_detail_tokens": 16}) as (served, url):
        files = openai.OpenAI(base_url=f"{url}/v1", api_key="none").files
        uploaded = files.create(file=("b.png", png(2, 224, 224)), purpose="vision").id
        parts = [
            {"type": "image_url", "image_url": {"url": "a.png"}},
            {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}},
            {"type": "image", "image": "a.png", "max_pixels": 3136},
            {"type": "video_url", "video_url": {"url": "clip.mp4"}, "nframes": 4},
            {"type": "video", "video": ["a.png", "a.png", "a.png"]},
            {"type": "video", "video": ["a.png", {"file_id": uploaded}, "a.png"]},
        ]
        request = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": {"min_pixels": 10_000}}
        (tmp_path / "requests.jsonl").write_text(json.dumps(request))
        assert warmup(capsys, tmp_path / "requests.jsonl", "--url", url)["done"] == 1
    (asked,) = served.scheduler.encodes
    grids = [item.grid_thw for item in asked.items]
    assert grids[:3] == [(1, 16, 16), (1, 8, 8), (1, 4, 4)]
    assert [grid[0] for grid in grids[3:]] == [2, 2, 2]
    assert grids[3][1] * grids[3][2] * 14**2 >= 10_000


def test_a_server_that_cannot_write_ends_the_run(checkpoint, tmp_path, capsys, monkeypatch):
    journal = tmp_path / "done.jsonl"
    (tmp_path / "a.png").write_bytes(png(1))

    def unsaved(message):
        output = answer(message)
        return replace(output, items=tuple(replace(item, saved=False) for item in output.items))

    with fake_server(checkpoint) as (served, url):
        answer = served.scheduler._encoded
        monkeypatch.setattr(served.scheduler, "_encoded", unsaved)
        told = complaint(capsys, 1, tmp_path / "a.png", "--url", url, "--resume", journal)
    assert "the server could not write to its embedding cache" in told
    assert journal.read_text() == ""


def test_no_server_is_one_clear_error(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    url = f"http://127.0.0.1:{closed_port()}"
    told = complaint(capsys, 1, tmp_path, "--url", url)
    assert told.count("vlmserve: error: ") == 1
    assert f"no answer from {url}/v1/warmup" in told
