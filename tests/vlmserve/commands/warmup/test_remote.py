"""`vlmserve warmup --url`: a real server with a key, and one that is difficult."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path

import openai
import pytest

from tests.processors.clips import make_clip
from tests.processors.web import closed_port
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.api.fake_engine import make_served, real_server, write_checkpoint_folder
from tests.vlmserve.commands.warmup.media import (
    data_url,
    entries,
    fill,
    fill_badly,
    lines,
    png,
    root_logger_kept,
    warmup,
)
from tests.vlmserve.server_process import ServerProcess
from vlmserve import cli
from vlmserve.ipc.messages import FinishReason


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))


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
        with root_logger_kept():
            assert cli.main(["warmup", *map(str, sources), "--api-key", "wrong"]) == 1
        assert "a valid API key is needed" in capsys.readouterr().err
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


def test_without_a_disk_the_user_is_told_and_nothing_counts_as_finished(folder, tmp_path, capsys):
    served, journal = make_served(folder), tmp_path / "done.jsonl"
    with real_server(served.app) as port:
        words = [fill(tmp_path / "media"), "--url", f"http://127.0.0.1:{port}/v1/", "--resume", journal]
        summary = warmup(capsys, *words)
        assert summary["done"] == 3
        assert "no embeddings on disk" in summary["notes"][0]
        assert journal.read_text() == ""
        served.assert_idle()
        with root_logger_kept():
            assert cli.main(["warmup", *map(str, words), "--pin"]) == 1
        assert "vlmserve: error: " in capsys.readouterr().err
    asyncio.run(served.frontend.close())


def test_a_busy_server_is_asked_again(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vlmserve.commands.warmup.remote._WAITS_S", (0.0, 0.0, 0.0))
    served = make_served(folder)
    scheduler, answer = served.scheduler, served.scheduler._encoded
    busy = FinishReason(type="error", status=429, message="busy")
    (tmp_path / "a.png").write_bytes(png(1))

    def busy_twice(message):
        scheduler.fail_with = busy if len(scheduler.encodes) < 3 else None
        return answer(message)

    with real_server(served.app) as port:
        words = [tmp_path / "a.png", "--url", f"http://127.0.0.1:{port}"]
        monkeypatch.setattr(scheduler, "_encoded", busy_twice)
        assert warmup(capsys, *words)["done"] == 1
        assert len(scheduler.encodes) == 3
        scheduler.fail_with = busy
        monkeypatch.setattr(scheduler, "_encoded", answer)
        with root_logger_kept():
            assert cli.main(["warmup", *map(str, words)]) == 1
        assert len(scheduler.encodes) == 3 + 4
        assert "busy" in capsys.readouterr().err
        scheduler.fail_with = FinishReason(type="error", status=500, message="broken picture")
        assert warmup(capsys, *words, status=1)["failed"] == 1
    asyncio.run(served.frontend.close())


def test_a_body_that_is_too_large_is_one_failure(folder, tmp_path, capsys):
    served = make_served(folder, max_body_mib=0.05)
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "b.png").write_bytes(png(2, 600, 600))
    with real_server(served.app) as port:
        failed = tmp_path / "failed.jsonl"
        words = [f"{tmp_path}/*.png", "--url", f"http://127.0.0.1:{port}", "--errors", failed]
        assert warmup(capsys, *words, status=1)["done"] == 1
    (error,) = lines(failed)
    assert error["code"] == "body_too_large"
    assert "--max-body-mib" in error["message"]
    asyncio.run(served.frontend.close())


def test_requests_are_sent_with_all_their_knobs(folder, tmp_path, capsys):
    served = make_served(folder, {"low_detail_tokens": 16})
    (tmp_path / "a.png").write_bytes(png(1, 224, 224))
    (tmp_path / "clip.mp4").write_bytes(make_clip(12, width=56, height=56))
    picture, small = {"url": "a.png"}, {"url": "a.png", "detail": "low"}
    parts = [
        {"type": "image_url", "image_url": picture},
        {"type": "image_url", "image_url": small},
        {"type": "image", "image": "a.png", "max_pixels": 3136},
        {"type": "video_url", "video_url": {"url": "clip.mp4"}, "nframes": 4},
        {"type": "video", "video": ["a.png", "a.png", "a.png"]},
    ]
    request = {"messages": [{"role": "user", "content": parts}], "mm_processor_kwargs": {"min_pixels": 10_000}}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request))
    with real_server(served.app) as port:
        assert warmup(capsys, tmp_path / "requests.jsonl", "--url", f"http://127.0.0.1:{port}")["done"] == 1
    (asked,) = served.scheduler.encodes
    grids = [item.grid_thw for item in asked.items]
    assert grids[:3] == [(1, 16, 16), (1, 8, 8), (1, 4, 4)]
    assert [grid[0] for grid in grids[3:]] == [2, 2]
    assert grids[3][1] * grids[3][2] * 14**2 >= 10_000
    asyncio.run(served.frontend.close())


def test_uploaded_files_stay_as_they_are(folder, tmp_path, capsys):
    """Also among the frames of a list."""
    served = make_served(folder)
    (tmp_path / "a.png").write_bytes(png(1, 224, 224))
    with real_server(served.app) as port:
        url = f"http://127.0.0.1:{port}"
        files = openai.OpenAI(base_url=f"{url}/v1", api_key="none").files
        name = files.create(file=("b.png", png(2, 224, 224)), purpose="vision").id
        part = {"type": "video", "video": ["a.png", {"file_id": name}, "a.png"]}
        request = {"messages": [{"role": "user", "content": [part]}]}
        (tmp_path / "requests.jsonl").write_text(json.dumps(request))
        assert warmup(capsys, tmp_path / "requests.jsonl", "--url", url)["done"] == 1
    (asked,) = served.scheduler.encodes
    assert [item.grid_thw[0] for item in asked.items] == [2]
    asyncio.run(served.frontend.close())


def test_a_server_that_cannot_write_ends_the_run(folder, tmp_path, capsys, monkeypatch):
    served, journal = make_served(folder), tmp_path / "done.jsonl"
    answer = served.scheduler._encoded
    (tmp_path / "a.png").write_bytes(png(1))

    def unsaved(message):
        output = answer(message)
        return replace(output, items=tuple(replace(item, saved=False) for item in output.items))

    monkeypatch.setattr(served.scheduler, "_encoded", unsaved)
    with real_server(served.app) as port, root_logger_kept():
        words = ["warmup", tmp_path / "a.png", "--url", f"http://127.0.0.1:{port}", "--resume", journal]
        assert cli.main([str(word) for word in words]) == 1
    assert "the server could not write to its embedding cache" in capsys.readouterr().err
    assert journal.read_text() == ""
    asyncio.run(served.frontend.close())


def test_no_server_is_one_clear_error(tmp_path, capsys):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    url = f"http://127.0.0.1:{closed_port()}"
    with root_logger_kept():
        assert cli.main(["warmup", str(tmp_path), "--url", url]) == 1
    told = capsys.readouterr().err
    assert told.count("vlmserve: error: ") == 1
    assert f"no answer from {url}/v1/warmup" in told
