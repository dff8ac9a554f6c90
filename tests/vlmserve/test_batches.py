"""Batches of a real server that is killed in the middle of one: the next goes on."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.vlmserve.server_process import serving

URLS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 3},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 3},
    "/v1/score": {"query": "Hello", "labels": ["a", "b"]},
}


def _batch(ai: openai.OpenAI, lines: list[str], endpoint: Any = "/v1/chat/completions") -> Any:
    file = ai.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return ai.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"a": "b"})


def _ended(ai: openai.OpenAI, batch_id: str) -> Any:
    while (batch := ai.batches.retrieve(batch_id)).status in ("validating", "in_progress", "finalizing", "cancelling"):
        pass
    return batch


def _content(ai: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ai.files.content(file_id).text.splitlines()] if file_id else []


def test_a_killed_server_leaves_one_answer_to_each_line(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    flags = ("--batch-concurrency", "3", "--file-store-dir", str(tmp_path / "files"))

    def line(number: int) -> str:
        messages = [{"role": "user", "content": f"Hello {number}"}]
        body = {"model": "tiny", "messages": messages, "max_tokens": 80, "ignore_eos": True}
        return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})

    with serving(tmp_path / "run", *flags) as first, first.client() as ai:
        batch = _batch(ai, ["{bad", *map(line, range(40)), line(3)])
        while ai.batches.retrieve(batch.id).request_counts.completed < 5:
            pass
        os.killpg(first.process.pid, signal.SIGKILL)
        first.wait()
    journal = sqlite3.connect(tmp_path / "files" / "batches.sqlite3")
    kept = [json.loads(row[0]) for row in journal.execute("SELECT record FROM lines WHERE good")]
    journal.close()
    assert 5 <= len(kept) < 40, "the server was not killed in the middle"

    with serving(tmp_path / "run", *flags) as second, second.client() as ai:
        assert second.await_log(f"batch {batch.id} goes on")
        ended = _ended(ai, batch.id)
        output, errors = _content(ai, ended.output_file_id), _content(ai, ended.error_file_id)
        assert ended.status == "completed"
        assert [one["custom_id"] for one in output] == [f"c{number}" for number in range(40)]
        assert {(one["custom_id"], one["error"]["code"]) for one in errors} == {
            (None, "invalid_json_line"),
            ("c3", "duplicate_custom_id"),
        }
        by_id = {one["custom_id"]: one for one in output}
        assert [by_id[one["custom_id"]] for one in kept] == kept  # what had been answered stayed as it was
        counts = ended.request_counts
        assert (counts.total, counts.completed, counts.failed) == (42, 40, 2)
        assert ended.usage.output_tokens == 40 * 80
        assert [one.id for one in ai.batches.list()] == [batch.id]

        for url, body in URLS.items():
            given = json.dumps({"custom_id": "x", "method": "POST", "url": url, "body": {"model": "tiny", **body}})
            [answer] = _content(ai, _ended(ai, _batch(ai, [given], url).id).output_file_id)
            direct = ai.post("/.." + url, body={"model": "tiny", **body}, cast_to=dict)
            assert answer["response"]["body"].keys() == direct.keys()
        with pytest.raises(openai.ConflictError):
            ai.batches.cancel(batch.id)
