"""The log's form, the same in every process."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, process: str) -> None:
    """Log to stderr from now on. level: "debug", "info" ...; process: a short name shown in every line."""
    logging.basicConfig(
        level=level.upper(),
        format=f"%(asctime)s %(levelname)-7s {process}: %(message)s",
        datefmt="%H:%M:%S",
        stream=sys.stderr,
        force=True,
    )
    for chatty in ("httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "filelock", "asyncio", "PIL"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
