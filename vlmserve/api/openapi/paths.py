"""Where the API's description is found."""

from __future__ import annotations

DOCUMENT_PATH = "/openapi.json"
PAGE_PATH = "/docs"
# Swagger UI's, which the page asks for beside itself
SCRIPT_PATH = "/docs/swagger-ui-bundle.js"
STYLE_PATH = "/docs/swagger-ui.css"
DESCRIPTION_PATHS = frozenset((DOCUMENT_PATH, PAGE_PATH, SCRIPT_PATH, STYLE_PATH))
