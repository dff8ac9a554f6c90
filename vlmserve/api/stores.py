"""What requests leave here besides files, in the same folder."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from vlmserve.api.batches.journal import BatchJournal
from vlmserve.api.file_store import FileStore
from vlmserve.api.responses.store import ResponseStore
from vlmserve.config.settings import ServerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class Stores:
    """responses: for those that go on from them. batches: those to be answered, and their finished lines."""

    responses: ResponseStore
    batches: BatchJournal


def open_stores(files: FileStore, settings: ServerSettings, stack: ExitStack) -> Stores:
    """To be closed by `stack`. Raises EngineError for files that cannot be used."""
    responses = ResponseStore(
        files.folder, most=settings.max_stored_responses, most_bytes=settings.max_stored_response_bytes
    )
    stack.callback(responses.close)
    batches = BatchJournal(files.folder)
    stack.callback(batches.close)
    return Stores(responses=responses, batches=batches)
