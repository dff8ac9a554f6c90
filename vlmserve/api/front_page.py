"""GET /: a page with the name of the served model and a small chat, or the same facts as JSON."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from vlmserve.api.auth import FRONT_PATH, PAGE_PATH
from vlmserve_common.version import __version__

_TEXT = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")


def _hash_of(element: str) -> str:
    """Return a Content-Security-Policy's source for the page's only element of this name."""
    [content] = re.findall(f"<{element}>(.*?)</{element}>", _TEXT, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _headers() -> dict[str, str]:
    """Return the page's headers. It loads nothing, asks this server alone, and is in no other page's frame."""
    policy = (
        f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; connect-src 'self'; "
        "img-src data:; media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",  # the next server at this address may have another model
        "Vary": "Accept",
    }


def add_front_page(app: FastAPI, *, model: str, family: str, max_model_len: int, keys: bool) -> None:
    """Add the page. family: the checkpoint's model_type. max_model_len: in tokens. keys: clients need an API key."""
    facts = {"model": model, "family": family, "context": f"{max_model_len:,}", "version": __version__}
    shown = {name: html.escape(fact) for name, fact in facts.items()} | {"key": "" if keys else "hidden"}
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: shown[place[1]], _TEXT)
    headers = _headers()
    in_json = {
        "name": "vlmserve",
        "version": __version__,
        "model": model,
        "family": family,
        "max_model_len": max_model_len,
        "docs": PAGE_PATH,
    }

    def show_front_page(request: Request) -> Response:
        accepted = request.headers.get("accept", "")
        if "application/json" in accepted and "text/html" not in accepted:
            return JSONResponse(in_json, headers={"Vary": "Accept"})
        return Response(page, media_type="text/html", headers=headers)

    app.add_api_route(FRONT_PATH, show_front_page, methods=["GET", "HEAD"], include_in_schema=False)
