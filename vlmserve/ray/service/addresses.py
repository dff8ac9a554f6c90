"""Where the servers of an app listen that work for its other servers (`--role prefill`, `--role encode`)."""

from __future__ import annotations

import time

# A server that says nothing for so long is gone. Each one says so at every health check.
_FORGOTTEN_S = 60.0


class Addresses:
    """A deployment of one replica that the others tell their URLs, and ask for those of others."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], tuple[float, tuple[str, ...]]] = {}

    def put(self, role: str, replica: str, urls: tuple[str, ...]) -> None:
        """Note the URLs of a replica."""
        self._known[role, replica] = time.monotonic(), urls

    def get(self, role: str) -> list[tuple[str, ...]]:
        """Return the URLs of each replica of a role."""
        oldest = time.monotonic() - _FORGOTTEN_S
        return [urls for (of, _), (told, urls) in sorted(self._known.items()) if of == role and told >= oldest]
