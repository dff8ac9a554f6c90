"""The settings of a router, besides those that it shares with a server."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from vlmserve.config.settings import ServerSettings
from vlmserve_common.errors import BadRequestError

Role: TypeAlias = Literal["replica", "prefill", "decode", "encode"]
ROLES: tuple[Role, ...] = ("replica", "prefill", "decode", "encode")
DNS = "dns+"
"""What stands before http: in a URL whose name has an address for each of several servers."""

SHARED = (
    *("host", "port", "port_file", "api_key", "api_key_file", "admin_api_key", "allowed_hosts", "allowed_origins"),
    *("max_connections", "header_timeout_s", "keep_alive_timeout_s", "send_timeout_s", "max_body_mib"),
    *("max_bodies_mib", "body_timeout_s", "min_body_bytes_per_s", "max_json_values", "log_level"),
    *("forwarded_allow_ips", "access_log", "shutdown_timeout_s", "load_balance_method"),
)
"""The settings of `vlmserve serve` that a router has, too."""


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """The settings of a router. http: those that it shares with a server. servers: role and URL of each; with `DNS` in
    front, of several.

    The flags of `vlmserve router` describe the rest.
    """

    http: ServerSettings
    servers: tuple[tuple[Role, str], ...]
    upstream_api_key: str | None
    connect_timeout_s: float
    health_check_interval_s: float
    health_check_timeout_s: float
    health_failure_threshold: int
    drain_timeout_s: float


def checked_url(url: str) -> str:
    """Return a server's URL without a slash at its end. Raises BadRequestError."""
    plain = url.rstrip("/")
    try:
        at = urlsplit(plain)
        good = (
            at.scheme in ("http", "https") and at.hostname and not (at.path or at.query or at.fragment or at.username)
        )
        assert at.port != 0
    except (ValueError, AssertionError):
        good = False
    if not good or not re.fullmatch(r"[!-~]+", plain):
        raise BadRequestError(f"{url[:200]!r} is no server's URL; it must be http://HOST:PORT or https://HOST:PORT")
    return plain


def problems_of(servers: Sequence[tuple[Role, str]]) -> list[str]:
    """Return a sentence for each thing that is wrong with the servers of a command line."""
    problems = []
    for role, url in servers:
        try:
            checked_url(url.removeprefix(DNS) if url.startswith(DNS + "http:") else url)
        except BadRequestError as error:
            problems.append(f"--{role}: {error}")
    urls = [url.rstrip("/") for _, url in servers]
    problems += [f"{url} is given twice" for url in dict.fromkeys(urls) if urls.count(url) > 1]
    roles = {role for role, _ in servers}
    if not roles & {"replica", "decode"}:
        problems.append("name the servers that answer: --replica URL... or --decode URL...")
    return problems
