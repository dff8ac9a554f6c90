"""The files of a batch: the lines of its input ({"custom_id", "method", "url", "body"}), its answers and its errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import pydantic_core

from vlmserve.api.batches.journal import Batch, BatchJournal, BatchUsage
from vlmserve.api.body import check_values
from vlmserve.api.errors import shortened
from vlmserve.api.file_store import FileStore
from vlmserve_common.errors import BadRequestError

MOST_ID_CHARS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the input. number: counted from 1, with blank lines. problem: (code, message) if the line cannot be
    answered; such a line has no body."""

    number: int
    custom_id: str | None
    body: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None


def count_lines(file: BinaryIO) -> int:
    """Count the lines that are not blank. A large file is read in pieces."""
    count, blank = 0, True
    while chunk := file.read(2**20):
        parts = chunk.split(b"\n")
        for place, part in enumerate(parts):
            blank = blank and not part.strip()
            if place < len(parts) - 1:
                count += not blank
                blank = True
    return count + (not blank)


def read_lines(file: BinaryIO, endpoint: str, *, most_bytes: int, most_values: int) -> Iterator[Line]:
    """Yield all lines that are not blank, good and bad. A file gives the same lines each time.

    most_bytes, most_values: the limits of a line.
    """
    seen: set[str] = set()
    number = 0
    while raw := file.readline(most_bytes + 1):
        number += 1
        if len(raw) > most_bytes and not raw.endswith(b"\n"):
            while rest := file.readline(2**20):
                if rest.endswith(b"\n"):
                    break
            what = f"line {number} is longer than {most_bytes} bytes (setting --max-body-mib)"
            yield Line(number=number, custom_id=None, problem=("line_too_long", what))
        elif raw.strip():
            yield _parsed(raw, number, endpoint, seen, most_values)


def _parsed(raw: bytes, number: int, endpoint: str, seen: set[str], most_values: int) -> Line:
    def bad(code: str, what: str, custom_id: str | None = None) -> Line:
        return Line(number=number, custom_id=custom_id, problem=(code, f"line {number} {what}"))

    try:
        check_values(raw, most_values, f"line {number}")
        given = pydantic_core.from_json(raw, allow_inf_nan=False)
    except BadRequestError as error:
        return Line(number=number, custom_id=None, problem=("too_many_values", str(error)))
    except ValueError as error:
        return bad("invalid_json_line", f"is not valid JSON: {error}")
    if not isinstance(given, dict):
        return bad("invalid_json_line", "is not a JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MOST_ID_CHARS:
        return bad(
            "invalid_custom_id", f"has no custom_id, or one that is not a text of 1 to {MOST_ID_CHARS} characters"
        )
    if custom_id in seen:
        return bad("duplicate_custom_id", f"has the custom_id of an earlier line: {custom_id!r}", custom_id)
    seen.add(custom_id)
    if given.get("method") != "POST":
        return bad(
            "invalid_method", f"has the method {shortened(repr(given.get('method')))}; it must be POST", custom_id
        )
    if given.get("url") != endpoint:
        what = f"has the url {shortened(repr(given.get('url')))}; it must be the batch's endpoint, {endpoint}"
        return bad("invalid_url", what, custom_id)
    unknown = sorted(given.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        return bad("invalid_line", f"has the unknown field {shortened(repr(unknown[0]))}", custom_id)
    if not isinstance(given.get("body"), dict):
        return bad("invalid_body", "has no body, or one that is not an object", custom_id)
    if given["body"].get("stream"):
        return bad("invalid_body", "asks for a stream; answers of batches are whole", custom_id)
    return Line(number=number, custom_id=custom_id, body=given["body"])


PURPOSE = "batch_output"  # no upload may have this purpose


def write_file(files: FileStore, journal: BatchJournal, batch: Batch, kind: str) -> str:
    """Write the file of the kind "output" or "error", unless an earlier server wrote it; return its id. Raises
    BadRequestError at a limit of the store, and OSError."""
    name = f"{batch.id}_{kind}.jsonl"
    for record in files.files(batch.owner):
        if (record.purpose, record.filename) == (PURPOSE, name):
            return record.id
    with files.begin(batch.owner) as upload:
        for line in journal.lines(batch.id, good=kind == "output"):
            upload.write(line.encode() + b"\n")
        record = upload.commit(filename=name, purpose=PURPOSE, expire_after_s=batch.output_expires_after_s)
        return record.id


def add_up(lines: Iterable[str]) -> BatchUsage:
    """Add up the tokens of a batch's answers."""
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
