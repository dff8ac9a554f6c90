"""Runs over made-up items, answered by a captioner that needs no model."""

from __future__ import annotations

import asyncio
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import blake3

from tests.vlmserve.commands.warmup.media import lines, png
from vlmserve.commands.batch.item import ChatRequest, Found, MediumItem
from vlmserve.commands.caption.feed import Feed, ItemShard, Shared
from vlmserve.commands.caption.journal import CaptionJournal, ErrorsFile
from vlmserve.commands.caption.opening import CaptionSettings
from vlmserve.commands.caption.outputs.base import Output
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.commands.caption.result import CaptionTally
from vlmserve.commands.caption.run import CaptionRun, CaptionStopped
from vlmserve.commands.caption.session import choose_journal, choose_output
from vlmserve_common.errors import BadRequestError

PNG = png(1)


def content(number: int) -> bytes:
    """Begins as a picture; another one for each number."""
    return PNG[:64] + str(number).encode()


def caption_of(data: bytes) -> str:
    return f"caption {blake3.blake3(data).hexdigest(4)}"


def item(name: str, data: bytes | None = None, **fields: Any) -> MediumItem:
    """data: None cannot be read."""

    def read() -> bytes:
        if data is None:
            raise BadRequestError(f"cannot read {name!r}", code="unreadable")
        return data

    signature = None if data is None else f"file {name} {blake3.blake3(data).hexdigest(8)}"
    return MediumItem(id=name, signature=signature or "file gone", read=read, fields={"id": name, **fields})


def answer(*texts: str) -> dict[str, Any]:
    choices = [
        {"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        for index, text in enumerate(texts)
    ]
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    return {"id": "chatcmpl-1", "object": "chat.completion", "model": "fake", "choices": choices, "usage": usage}


def medium_of(request: ChatRequest) -> bytes:
    for part in request.messages[-1]["content"]:
        if part["type"] in ("image", "video"):
            return part[part["type"]]
    raise AssertionError("no medium")


class FakeCaptioner:
    """Answers by the medium's bytes; `asked` has them in order. hook: may raise instead. most: before it stops."""

    model = "fake"
    identity = "fake 1"
    engines = 1

    def __init__(self, hook: Callable[[ChatRequest], None] | None = None, *, most: int | None = None) -> None:
        self.asked: list[bytes] = []
        self.requests: list[ChatRequest] = []
        self._hook = hook
        self._most = most

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        data = medium_of(request)
        if len(self.asked) == self._most:
            raise CaptionStopped("no server answers")
        self.asked.append(data)
        self.requests.append(request)
        await asyncio.sleep(0)
        if self._hook is not None:
            self._hook(request)
        return answer(*[caption_of(data)] * request.options.get("n", 1))

    def notes(self) -> list[str]:
        return []

    async def close(self) -> None:
        pass


def output_settings(output: Path | None, **more: Any) -> dict[str, Any]:
    defaults = {"suffix": ".txt", "overwrite": False, "items_per_file": 4}
    return {"output": None if output is None else str(output), **defaults, **more}


def run_once(
    found: Iterable[Found],
    output: Mapping[str, Any],
    *,
    captioner: FakeCaptioner | None = None,
    prompts: Prompts | None = None,
    settings: CaptionSettings | None = None,
    journal_settings: dict[str, Any] | None = None,
    errors: Path | None = None,
    folders: Iterable[Path] = (),
    shard: ItemShard | None = None,
    limit: int | None = None,
    retry_failed: bool = False,
    restart: bool = False,
) -> CaptionTally:
    """One run from beginning to end, as `vlmserve caption` puts it together."""
    tally = CaptionTally()
    sink: Output = choose_output(**output)
    path = choose_journal(output["output"], list(folders), shard or ItemShard())
    path.parent.mkdir(parents=True, exist_ok=True)
    errors_file = ErrorsFile(errors)
    with CaptionJournal(path) as journal:
        try:
            if restart:
                sink.discard(journal)
                journal.forget()
            sink.begin(journal)
            journal.begin(journal_settings or {"prompt": "Describe it."})
            errors_file.begin(journal.failures())
            asked = prompts or Prompts("Describe it.")
            shared = Shared(prompts=asked, journal=journal, output=sink, errors=errors_file, tally=tally)
            feed = Feed(iter(found), shared, shard=shard or ItemShard(), limit=limit, retry_failed=retry_failed)
            run = CaptionRun(feed, captioner or FakeCaptioner(), settings or CaptionSettings(concurrency=3), shared)
            try:
                asyncio.run(run.run())
            finally:
                run.close()
            sink.finish()
        finally:
            errors_file.close()
            sink.close()
        errors_file.write_anew(journal.failures())
    return tally


def captions_in(output: Path) -> list[tuple[str, str]]:
    """(id, caption) of everything that an output holds, in its order; parts by their numbers."""
    return [(record["id"], record["caption"]) for record in _records(output)]


def _records(output: Path) -> Iterator[dict[str, Any]]:
    if output.suffix == ".jsonl":
        yield from lines(output)
    elif output.is_dir():
        for path in sorted(output.rglob("*.txt")):
            yield {"id": str(path.relative_to(output).with_suffix("")), "caption": path.read_text().removesuffix("\n")}
    elif output.suffix == ".parquet":
        import pyarrow.parquet as pq

        for path in sorted(output.parent.glob(output.name.replace("%05d", "*"))):
            yield from pq.read_table(path).to_pylist()
    else:
        for path in sorted(output.parent.glob(output.name.replace("%05d", "*"))):
            with tarfile.open(path) as tar:
                for member in tar:
                    if member.name.endswith(".json"):
                        file = tar.extractfile(member)
                        assert file is not None
                        yield json.loads(file.read())
