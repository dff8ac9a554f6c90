"""GET /openapi.json, and /docs: Swagger UI with all its files from here, so that it works without internet."""

from __future__ import annotations

import functools
from importlib.resources import as_file, files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import FileResponse, Response

from vlmserve.api.openapi.document import openapi_document
from vlmserve.api.openapi.paths import DOCUMENT_PATH, PAGE_PATH, SCRIPT_PATH, STYLE_PATH
from vlmserve.api.streaming import json_text

_FILES_OF = "fastapi_offline"  # the package that brings Swagger UI
# Nobody's server is asked whether the document is valid.
_PARAMETERS = {"validatorUrl": None}


def add_pages(app: FastAPI, *, model: str, keys: bool, admin_key: bool) -> None:
    """Register them. model, keys, admin_key: as of `openapi_document`, which is made when it is first asked for."""

    @functools.cache
    def document() -> bytes:
        return json_text(openapi_document(model=model, keys=keys, admin_key=admin_key))

    def show_document() -> Response:
        return Response(document(), media_type="application/json")

    def show_page() -> Response:
        # Relative, since a proxy may have the server under a prefix. The icon is an empty one.
        return get_swagger_ui_html(
            openapi_url=DOCUMENT_PATH.removeprefix("/"),
            title="vlmserve",
            swagger_js_url=SCRIPT_PATH.removeprefix("/"),
            swagger_css_url=STYLE_PATH.removeprefix("/"),
            swagger_favicon_url="data:,",
            swagger_ui_parameters=_PARAMETERS,
        )

    app.add_api_route(DOCUMENT_PATH, show_document, methods=["GET"], include_in_schema=False)
    app.add_api_route(PAGE_PATH, show_page, methods=["GET"], include_in_schema=False)
    for path in (SCRIPT_PATH, STYLE_PATH):
        app.add_api_route(path, functools.partial(_file, path), methods=["GET"], include_in_schema=False)


def _file(path: str) -> Response:
    """One of Swagger UI's."""
    with as_file(files(_FILES_OF) / "static" / path.rpartition("/")[2]) as file:
        return FileResponse(file)
