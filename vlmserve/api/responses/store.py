"""Stored responses, which later requests go on from: an SQLite file beside the uploaded files.

The number and the size of responses are limited; the oldest go first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmserve.api.database import Database
from vlmserve.api.errors import not_found
from vlmserve.frontend.openai.json_bodies import json_text
from vlmserve_common.errors import BadRequestError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, previous TEXT, size INTEGER NOT NULL,
    input TEXT NOT NULL, response TEXT NOT NULL
);
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResponse:
    """A stored response. input: its own items, without those of earlier responses. response: the object. previous: the
    id of the response before it."""

    input: list[dict[str, Any]]
    response: dict[str, Any]
    previous: str | None


class ResponseStore(Database):
    """The responses of a folder. most: responses that it keeps; 0 keeps none. most_bytes: the limit of their JSON."""

    def __init__(self, folder: Path, *, most: int, most_bytes: int) -> None:
        super().__init__(folder / "responses.sqlite3", _SCHEMA)
        self._most = most
        self._most_bytes = most_bytes

    def add(self, owner: str, response: dict[str, Any], given: Sequence[dict[str, Any]]) -> None:
        """Keep a response, and forget the oldest beyond the limits. A response larger than the store is not kept."""
        told, items = json_text(response).decode(), json_text(given).decode()
        row = (response["id"], owner, response["previous_response_id"], len(told) + len(items), items, told)
        with self._lock, self._db:
            self._db.execute(
                "INSERT INTO responses (id, owner, previous, size, input, response) VALUES (?, ?, ?, ?, ?, ?)", row
            )
            count, size = self._db.execute("SELECT count(*), total(size) FROM responses").fetchone()
            while count > self._most or size > self._most_bytes:
                seq, freed = self._db.execute("SELECT seq, size FROM responses ORDER BY seq LIMIT 1").fetchone()
                self._db.execute("DELETE FROM responses WHERE seq = ?", (seq,))
                count, size = count - 1, size - freed

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises BadRequestError (404) for an unknown response and another owner's alike."""
        query = "SELECT input, response, previous FROM responses WHERE id = ? AND owner = ?"
        rows = self.rows(query, response_id, owner)
        if not rows:
            raise not_found("response", response_id)
        given, response, previous = rows[0]
        return StoredResponse(input=json.loads(given), response=json.loads(response), previous=previous)

    def conversation(self, owner: str, response_id: str) -> list[dict[str, Any]]:
        """Return all items up to a response, its output included, the oldest first. Raises BadRequestError (404)."""
        return [item for found in reversed(list(self._chain(owner, response_id))) for item in found]

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, so that no request can go on from it any more. Raises BadRequestError (404)."""
        self.find(owner, response_id)
        with self._lock, self._db:
            self._db.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def _chain(self, owner: str, response_id: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the items of responses, the newest first."""
        at: str | None = response_id
        while at is not None:
            try:
                found = self.find(owner, at)
            except BadRequestError as error:
                message = str(error) if at == response_id else f"{error}, which {response_id!r} goes back to"
                raise BadRequestError(
                    f"{message}: it was not stored, or has been deleted (setting --max-stored-responses)",
                    param="previous_response_id",
                    code="previous_response_not_found",
                    status=404,
                ) from None
            yield [*found.input, *found.response["output"]]
            at = found.previous
