"""Two real servers over one PostgreSQL: what one has, the other has, and what one began, the other ends."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.postgres import PASSWORD, PostgresServer
from tests.vlmserve.server_process import await_that, serving

LINES, TOKENS = 60, 40


def _line(number: int) -> str:
    messages = [{"role": "user", "content": f"Hello {number}"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": TOKENS, "ignore_eos": True}
    return json.dumps({"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body})


def _ended(ai: openai.OpenAI, batch_id: str) -> Any:
    await_that(lambda: ai.batches.retrieve(batch_id).status in ("completed", "cancelled"))
    return ai.batches.retrieve(batch_id)


@pytest.mark.slow
def test_what_one_server_has_and_begins_the_other_has_and_ends(postgres: PostgresServer, tmp_path: Path) -> None:
    url = postgres.new_database()
    (tmp_path / "bytes").mkdir()
    flags = ("--batch-concurrency", "2", "--file-store-url", f"local://{tmp_path / 'bytes'}")
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(serving(tmp_path / name, *flags, VLMSERVE_DATABASE_URL=url)) for name in ("a", "b")
        )
        here, there = stack.enter_context(one.client()), stack.enter_context(other.client())

        # files and responses
        file = here.files.create(file=("in.jsonl", "\n".join(map(_line, range(LINES))).encode()), purpose="batch")
        assert there.files.retrieve(file.id) == file
        unwanted = there.files.create(file=("x", b"1"), purpose="user_data")
        assert here.files.delete(unwanted.id).deleted
        assert [one.id for one in there.files.list()] == [file.id]
        first = here.responses.create(model="tiny", input="Hello", max_output_tokens=4)
        second = there.responses.create(model="tiny", input="Go on", max_output_tokens=4, previous_response_id=first.id)
        assert here.responses.retrieve(second.id) == second

        # a batch is cancelled where nobody works on it
        kind: Any = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = here.batches.create(input_file_id=file.id, **kind)
        assert there.batches.cancel(batch.id).status == "cancelling"
        assert _ended(here, batch.id).status == _ended(there, batch.id).status == "cancelled"

        # the server that works on a batch is killed
        batch = here.batches.create(input_file_id=file.id, **kind)
        await_that(lambda: there.batches.retrieve(batch.id).request_counts.completed >= 5)
        os.killpg(one.process.pid, signal.SIGKILL)
        one.wait()
        kept = there.batches.retrieve(batch.id).request_counts.completed
        assert kept < LINES, "the server was not killed in the middle"
        ended = _ended(there, batch.id)
        assert other.await_log(f"batch {batch.id} goes on")
        answers = [json.loads(text) for text in there.files.content(ended.output_file_id).text.splitlines()]
        assert (ended.status, ended.error_file_id) == ("completed", None)
        assert Counter(answer["custom_id"] for answer in answers) == {f"c{number}": 1 for number in range(LINES)}
        made = other.figures()["generation_tokens_total"]
        assert TOKENS * (LINES - kept) <= made <= TOKENS * (LINES - kept) + 4, "what was answered is not asked again"

        said = "".join(one.log + other.log) + other.get("server_info")[1]
        assert PASSWORD not in said
        assert url not in said
