"""A store, a journal and runners of batches over a fake endpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

from vlmserve.api.batches.journal import Batch, BatchJournal
from vlmserve.api.batches.runner import BatchRunner
from vlmserve.api.file_store import FileStore
from vlmserve.api.stores.opening import Stores
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.requests import Caller
from vlmserve_common.process.threads import Threads

URL = "/v1/chat/completions"
Sleep = Callable[[float], Awaitable[None]]
Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


def line(name: Any, **changes: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": URL, "body": {"say": name}, **changes})


async def echo(body: dict[str, Any]) -> dict[str, Any]:
    return {"said": body["say"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


class House:
    """A store, a journal, and runners over them. asked: the bodies that came to the endpoint."""

    def __init__(self, stores: Stores, stack: ExitStack, max_files: int = 5) -> None:
        self.files = FileStore(stores, ServerSettings(engine=EngineArgs(model="m"), max_files=max_files))
        stack.callback(self.files.close)
        self.journal = BatchJournal(stores)
        stack.callback(self.journal.close)
        self.threads = Threads("batch-files", 2)
        stack.callback(self.threads.close)
        self.asked: list[str] = []
        self.owners: list[str] = []
        self.now = 1000.0
        self.room = True
        self.gone = False

    def batch(self, *lines: str, id: str = "batch_1", owner: str = "me") -> Batch:
        with self.files.begin(owner) as upload:
            upload.write("\n".join(lines).encode())
            record = upload.commit(filename="in.jsonl", purpose="batch")
        batch = Batch(
            id=id,
            owner=owner,
            client="c",
            tenant="mine",
            endpoint=URL,
            input_file_id=record.id,
            completion_window="24h",
            metadata={},
            created_at=1000,
            expires_at=2000,
        )
        self.journal.add(batch, 10)
        return batch

    def runner(self, ask: Ask = echo, concurrency: int = 2, sleep: Sleep = asyncio.sleep) -> BatchRunner:
        async def endpoint(body: dict[str, Any], caller: Caller) -> dict[str, Any]:
            assert (caller.tenant, caller.priority) == ("mine", 2**31 - 1)
            self.owners.append(caller.owner)
            self.asked.append(body["say"])
            return await ask(body)

        return BatchRunner(
            self.journal,
            self.files,
            {URL: endpoint},
            ServerSettings(
                engine=EngineArgs(model="m", schedule_policy="priority"),
                batch_concurrency=concurrency,
                max_batch_lines=100,
                max_body_mib=1000 / 2**20,
                max_json_values=100,
            ),
            self.threads,
            has_room=lambda: self.room,
            is_gone=lambda: self.gone,
            clock=lambda: self.now,
            sleep=sleep,
        )

    def found(self) -> Batch:
        return self.journal.find("me", "batch_1")

    def written(self, kind: str) -> list[dict[str, Any]]:
        file_id = getattr(self.found(), f"{kind}_file_id")
        if file_id is None:
            return []
        _, file = self.files.open("me", file_id)
        with file:
            return [json.loads(line) for line in file]


async def all_over(runner: BatchRunner) -> None:
    await asyncio.gather(*runner._tasks.values())


def run_all(house: House, batch: Batch, ask: Ask = echo) -> None:
    async def run() -> None:
        runner = house.runner(ask)
        runner.run(batch)
        await all_over(runner)

    asyncio.run(run())
