"""Who asks for an answer: a request's client, or a batch that it left here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request

from vlmserve.api.auth import client_of, owner_of, tenant_of
from vlmserve.frontend.request_stats import RequestStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """client: takes turns with others. owner: whose files, sessions and stored answers are its own. tenant: see
    `GenerateReqInput`. ended: is told what became of each choice. priority: in place of what requests leave out; lower
    goes first."""

    client: str = ""
    owner: str = ""
    tenant: str = ""
    ended: Callable[[RequestStats], None] | None = None
    priority: int = 0


def caller_of(request: Request) -> Caller:
    """Of an HTTP request."""
    return Caller(
        client=client_of(request),
        owner=owner_of(request),
        tenant=tenant_of(request),
        ended=request.state.answers.add,
    )
