"""Spans of chat requests, as OpenTelemetry's own exporter for tests gets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import CHAT, MODEL, Served, png_url, serving
from vlmserve.api import app, tracing
from vlmserve.api.tracing import stages_of
from vlmserve.config.checks import SettingsError
from vlmserve.frontend.request_stats import Timings
from vlmserve.ipc.messages import FinishReason

PICTURE = {"type": "image_url", "image_url": {"url": png_url()}}
BODY = {"model": MODEL, "messages": [{"role": "user", "content": [PICTURE]}], "max_tokens": 4, "temperature": 0.5}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(app, "otlp_processor", lambda endpoint: SimpleSpanProcessor(exporter))
    return exporter


@pytest.fixture
def served(checkpoint_folder: Path, exporter: InMemorySpanExporter) -> Iterator[Served]:
    with serving(checkpoint_folder, otlp_traces_endpoint="http://collector.example/v1/traces") as served:
        served.scheduler.encodes_pictures = True
        yield served


@pytest.fixture
def post(served: Served) -> Iterator[Callable[..., Any]]:
    with TestClient(served.app, raise_server_exceptions=False) as client:
        yield lambda body=BODY, headers=None: client.post(CHAT, json=body, headers=headers)


def request_span(exporter: InMemorySpanExporter) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The one request's, and those below it."""
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.kind == SpanKind.SERVER]
    below = [span for span in spans if span is not root]
    assert all(span.parent.span_id == root.context.span_id for span in below)
    assert all(span.context.trace_id == root.context.trace_id for span in below)
    return root, below


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_and_its_stages(post: Callable[..., Any], exporter: InMemorySpanExporter, stream: bool) -> None:
    reply = post({**BODY, "stream": stream})
    root, below = request_span(exporter)
    assert root.name == f"chat {MODEL}"
    assert root.parent is None
    found = root.attributes
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == MODEL
    assert (found["gen_ai.request.max_tokens"], found["gen_ai.request.temperature"]) == (4, 0.5)
    assert found["gen_ai.usage.input_tokens"] > 2
    assert found["gen_ai.usage.output_tokens"] == 4
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert found["http.response.status_code"] == 200
    assert found["gen_ai.response.id"] == found["vlmserve.request_id"] == reply.headers["X-Request-Id"]
    assert found["vlmserve.images"] == 1
    assert [span.name for span in below] == ["fetch", "preprocess", "encode", "queue", "prefill", "decode"]
    seconds = {span.name: (span.end_time - span.start_time) / 1e9 for span in below}
    assert (seconds["encode"], seconds["prefill"], seconds["decode"]) == pytest.approx((0.5, 1.0, 3.0))
    assert not any("example" in str(value) or "base64" in str(value) for value in found.values())


def test_the_clients_trace_goes_on(post: Callable[..., Any], exporter: InMemorySpanExporter) -> None:
    post(headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    root, _ = request_span(exporter)
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT


def test_what_the_client_does_not_sample_is_not_sampled(
    post: Callable[..., Any], exporter: InMemorySpanExporter
) -> None:
    assert post(headers={"traceparent": f"00-{TRACE}-{PARENT}-00"}).status_code == 200
    assert exporter.get_finished_spans() == ()


def test_choices_share_what_comes_before_them(post: Callable[..., Any], exporter: InMemorySpanExporter) -> None:
    post({**BODY, "n": 2})
    root, below = request_span(exporter)
    assert root.attributes["gen_ai.usage.output_tokens"] == 8
    assert root.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    names = [span.name for span in below]
    assert (names.count("fetch"), names.count("decode")) == (1, 2)


def test_refused_and_failed_requests(post: Callable[..., Any], served: Served, exporter: InMemorySpanExporter) -> None:
    assert post({**BODY, "temperature": 9}).status_code == 400
    root, below = request_span(exporter)
    assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (400, "invalid_value")
    assert root.status.status_code == StatusCode.UNSET
    assert below == []
    exporter.clear()
    served.scheduler.fail_with = FinishReason(type="error", status=500, message="broken")
    assert post().status_code == 500
    root, _ = request_span(exporter)
    assert root.status.status_code == StatusCode.ERROR


def test_what_began_before_all_was_encoded_overlaps() -> None:
    timings = Timings(
        prepare_s=1.0, first_token_s=6.0, queue_s=0.0, encode_s=4.0, prefill_s=4.5, decode_s=1.0, total_s=7.0
    )
    assert list(stages_of(timings)) == [
        ("encode", 1.0, 5.0),
        ("queue", 1.5, 1.5),
        ("prefill", 1.5, 6.0),
        ("decode", 6.0, 7.0),
    ]


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda package: None)
    with pytest.raises(SettingsError, match=r"--otlp-traces-endpoint needs .*: .* install .*\[otel\]"):
        tracing.check_extra()
