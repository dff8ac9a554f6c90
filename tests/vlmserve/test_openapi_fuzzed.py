"""Requests made of the OpenAPI document by schemathesis, good ones and bad ones, to every route of a real server: none
fails in the server, and all answers are as documented."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.config import SchemathesisConfig
from schemathesis.schemas import BaseSchema
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.vlmserve.server_process import serving
from vlmserve.api.app import all_operations
from vlmserve.api.openapi import openapi_document

MODEL = "tiny"
MOST_TOKENS = 2
# What limits the length of an answer.
LENGTHS = {
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/sessions/{session_id}/ask": "max_completion_tokens",
}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# What would hold up the requests that come after.
UNDONE_BY = {
    "/pause_generation": "/continue_generation",
    "/start_profile": "/stop_profile",
    "/release_memory_occupation": "/resume_memory_occupation",
}


def _schema(most: int, *, edges: bool) -> BaseSchema:
    """most: random examples of each operation. edges: also those at and beyond the edges of its schema, one for each
    field and limit."""
    settings = {
        "seed": 1,
        "generation": {"max-examples": most, "deterministic": True, "database": "none"},
        "phases": {"coverage": {"enabled": edges}},
    }
    config = SchemathesisConfig.from_dict(settings)
    document = openapi_document(all_operations(), model=MODEL, keys=False, admin_key=False)
    return schemathesis.openapi.from_dict(document, config=config)


@pytest.fixture(scope="module")
def small_schema() -> BaseSchema:
    return _schema(10, edges=False)


@pytest.fixture(scope="module")
def large_schema() -> BaseSchema:
    return _schema(200, edges=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its URL."""
    folder = tmp_path_factory.mktemp("fuzzed")
    flags = ("--served-model-name", MODEL, "--profile-dir", str(folder))
    with serving(folder / "run", *flags) as process:
        yield f"http://127.0.0.1:{process.port()}"


def _a_session(server: str) -> str:
    """The id of an open session, the only one."""
    for session in httpx.get(server + "/v1/sessions").json()["data"]:
        httpx.delete(f"{server}/v1/sessions/{session['id']}")
    return httpx.post(server + "/v1/sessions", json={}).json()["id"]


def _try(case: schemathesis.Case, server: str) -> None:
    body = case.body
    if isinstance(body, dict):
        if isinstance(body.get("model"), str):
            body["model"] = MODEL  # any other has no way past the first check
        name = LENGTHS.get(case.operation.path)
        if name and (body.get(name) is None or (isinstance(body[name], int) and body[name] > MOST_TOKENS)):
            body[name] = MOST_TOKENS
        if case.operation.path.endswith("/standing"):
            body["keep"] = True  # refused: without, it goes on until frames come
        if isinstance(body.get("timeout"), int | float):
            body["timeout"] = 60.0  # a short one is a 504, rightly
        if isinstance(body.get("world_size"), int):
            body["world_size"] = min(body["world_size"], 65535)
            body["rank_offset"] = max(1, body["world_size"])  # beyond the last: or else it waits a minute for a trainer
    if case.path_parameters.get("session_id") and case.method == "POST":
        case.path_parameters["session_id"] = _a_session(server)
    case.call_and_validate(base_url=server, checks=CHECKS, timeout=60)
    if case.operation.path in UNDONE_BY:
        httpx.post(server + UNDONE_BY[case.operation.path], timeout=60)


# Of fixtures, since making the requests takes seconds: not of those who collect tests.
@schemathesis.pytest.from_fixture("small_schema").parametrize()
def test_a_few_requests_to_every_route(case: schemathesis.Case, server: str) -> None:
    _try(case, server)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # making the requests takes most of it, on a busy machine
@schemathesis.pytest.from_fixture("large_schema").parametrize()
def test_many_requests_to_every_route(case: schemathesis.Case, server: str) -> None:
    _try(case, server)
