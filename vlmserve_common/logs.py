"""The log's form, the same in every process."""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the request that this code works for, or "" if unknown: log lines about a request begin with its id."""


class _NameRequest(logging.Filter):
    """Adds the request's id to each line that does not name it."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = request_id.get()
        record.request = f"[{name}] " if name and name not in record.getMessage() else ""
        return True


def configure_logging(level: str, process: str) -> None:
    """Log to stderr from now on. level: "debug", "info" ...; process: a short name shown in every line."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s {process}: %(request)s%(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for handler in logging.getLogger().handlers:
        handler.addFilter(_NameRequest())
    for chatty in ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "asyncio", "PIL", "torch"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
