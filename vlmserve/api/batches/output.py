"""A batch's files: its answers and its errors, as uploaded files are."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vlmserve.api.batches.journal import BatchJournal
from vlmserve.api.batches.record import Batch
from vlmserve.api.file_store import FileStore

PURPOSE = "batch_output"  # nobody may upload with it


def write_file(files: FileStore, journal: BatchJournal, batch: Batch, kind: str) -> str:
    """The id of the file of the kind "output" or "error", which a server before may have written. Raises
    BadRequestError at a limit of the store, OSError."""
    name = f"{batch.id}_{kind}.jsonl"
    for record in files.files(batch.owner):
        if (record.purpose, record.filename) == (PURPOSE, name):
            return record.id
    with files.begin(batch.owner) as upload:
        for line in journal.lines(batch.id, good=kind == "output"):
            upload.write(line.encode() + b"\n")
        record = upload.commit(filename=name, purpose=PURPOSE, expire_after_s=batch.output_expires_after_s)
        return record.id


def add_up(lines: Iterable[str]) -> dict[str, Any]:
    """The tokens of a batch's answers, as OpenAI's batches tell them."""
    tokens = dict.fromkeys(("input", "output", "cached", "reasoning"), 0)
    for line in lines:
        usage = json.loads(line)["response"]["body"].get("usage") or {}
        of_input = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        tokens["input"] += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        tokens["output"] += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        tokens["cached"] += of_input.get("cached_tokens") or 0
        tokens["reasoning"] += of_output.get("reasoning_tokens") or 0
    return {
        "input_tokens": tokens["input"],
        "input_tokens_details": {"cached_tokens": tokens["cached"]},
        "output_tokens": tokens["output"],
        "output_tokens_details": {"reasoning_tokens": tokens["reasoning"]},
        "total_tokens": tokens["input"] + tokens["output"],
    }
