"""OpenTelemetry traces: a span for each chat request, and one below it for each stage (`--otlp-traces-endpoint`).

Nothing is passed through the engine: spans are made when a request has ended, from the seconds of its stages. Names and
attributes follow the semantic conventions for generative AI (opentelemetry.io/docs/specs/semconv/gen-ai). Only this
file imports OpenTelemetry, and only if traces are asked for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from vlmserve.config.checks import SettingsError
from vlmserve_common.installing import install
from vlmserve_common.version import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanProcessor

    from vlmserve.frontend.request_stats import RequestStats, Timings

TRACED_ROUTES = frozenset(("/v1/chat/completions",))
_EXPORT_TIMEOUT_S = 3.0  # which the server's end may take, where no collector answers
_CONTEXT_HEADERS = frozenset((b"traceparent", b"tracestate"))
# field of a chat request -> attribute
_ASKED = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stop": "gen_ai.request.stop_sequences",
}


@dataclass(slots=True)
class EndedAnswers:
    """The statistics of a request's choices, each with its end in Unix nanoseconds."""

    ended: list[tuple[int, RequestStats]] = field(default_factory=list)
    clock_ns: Callable[[], int] = time.time_ns

    def add(self, stats: RequestStats) -> None:
        """Add a choice that has ended."""
        self.ended.append((self.clock_ns(), stats))


def asked_of(request: object) -> dict[str, Any]:
    """Return the attributes of a chat request, without anything of its messages."""
    given = [(attribute, getattr(request, name, None)) for name, attribute in _ASKED.items()]
    return {attribute: value for attribute, value in given if value is not None}


def check_extra() -> None:
    """Raise SettingsError if OpenTelemetry is not installed."""
    for package in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp"):
        if find_spec(package) is None:
            raise SettingsError(f"--otlp-traces-endpoint needs OpenTelemetry: {install('otel')}")


def otlp_processor(endpoint: str) -> SpanProcessor:
    """Return a processor that sends spans to a collector by OTLP over HTTP, in a thread of its own."""
    check_extra()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S))


class RequestTracer:
    """Makes spans of ended requests. model_name: the model's name for clients. processor: gets the spans."""

    def __init__(self, model_name: str, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ours = {"service.version": __version__}
        if "OTEL_SERVICE_NAME" not in os.environ:
            ours["service.name"] = "vlmserve"
        self._model_name = model_name
        self._provider = TracerProvider(resource=Resource.create(ours), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("vlmserve", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        route: str,
        status: int,
        headers: Iterable[tuple[bytes, bytes]],
        began_ns: int,
        state: Mapping[str, Any],
    ) -> None:
        """Make the spans of a request that ends now. The parent is the client's span, if the client sent a
        `traceparent`.

        status: the HTTP status. headers: the client's, raw. began_ns: Unix time. state: the request's own, with its
        `request_id`, its `answers`, and if it came so far `asked` (of `asked_of`) and `error_code`.
        """
        from opentelemetry import trace

        names = {name.lower(): value.decode("latin-1") for name, value in headers}
        carrier = {name.decode(): value for name, value in names.items() if name in _CONTEXT_HEADERS}
        ended = state["answers"].ended
        span = self._tracer.start_span(
            f"chat {self._model_name}",
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            attributes=self._attributes(route, status, state, [stats for _, stats in ended]),
            start_time=began_ns,
        )
        if status >= 500 or any(stats.finish == "error" for _, stats in ended):
            span.set_status(trace.StatusCode.ERROR)
        below = trace.set_span_in_context(span)
        for index, (ended_ns, stats) in enumerate(ended):
            self._stages(below, index, ended_ns, stats)
        span.end(time.time_ns())

    def close(self) -> None:
        """Send the waiting spans, which may block for seconds."""
        self._provider.shutdown()

    def _attributes(
        self, route: str, status: int, state: Mapping[str, Any], answers: Sequence[RequestStats]
    ) -> dict[str, Any]:
        found: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "vlmserve",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,
            "vlmserve.request_id": state["request_id"],
            **state.get("asked", {}),
        }
        if status >= 400:
            found["error.type"] = state.get("error_code") or str(status)
        if not answers:
            return found
        media = answers[0].media
        first = [stats.timings.first_token_s for stats in answers if stats.timings.first_token_s is not None]
        return {
            **found,
            "gen_ai.response.id": answers[0].rid.rpartition("-")[0],
            "gen_ai.response.finish_reasons": [stats.finish for stats in answers],
            "gen_ai.usage.input_tokens": sum(stats.prompt_tokens for stats in answers),
            "gen_ai.usage.output_tokens": sum(stats.completion_tokens for stats in answers),
            "gen_ai.usage.cache_read.input_tokens": sum(stats.cached_tokens for stats in answers),
            "vlmserve.images": media.images,
            "vlmserve.videos": media.videos,
            **({"vlmserve.time_to_first_token_s": min(first)} if first else {}),
        }

    def _stages(self, below: Context, index: int, ended_ns: int, stats: RequestStats) -> None:
        for name, start_s, end_s in stages_of(stats.timings):
            if index and name in ("fetch", "preprocess"):
                continue  # which all choices have in common
            attributes: dict[str, Any] = {"vlmserve.choice": index}
            if name == "encode":
                attributes["vlmserve.cached"] = bool(stats.timings.encode_cached)
            arrived_ns = ended_ns - round(stats.timings.total_s * 1e9)
            span = self._tracer.start_span(
                name, context=below, attributes=attributes, start_time=arrived_ns + round(start_s * 1e9)
            )
            span.end(arrived_ns + round(end_s * 1e9))


def stages_of(timings: Timings) -> Iterator[tuple[str, float, float]]:
    """Return the stages of a request, with their begin and end in seconds from its arrival."""
    prepared, queue_s = timings.prepare_s, timings.queue_s
    if timings.fetch_s is not None and timings.preprocess_s is not None:
        fetched = prepared - timings.preprocess_s
        yield "fetch", fetched - timings.fetch_s, fetched
        yield "preprocess", fetched, prepared
    if timings.encode_s is not None:
        yield "encode", prepared, prepared + timings.encode_s
    if queue_s is None:
        return
    began = prepared + (timings.encode_s or 0.0) + queue_s
    if timings.first_token_s is not None and timings.prefill_s is not None:
        began = timings.first_token_s - timings.prefill_s  # the same, unless it began before all was encoded
    yield "queue", began - queue_s, began
    if timings.prefill_s is not None:
        yield "prefill", began, began + timings.prefill_s
        if timings.decode_s is not None:
            yield "decode", began + timings.prefill_s, began + timings.prefill_s + timings.decode_s
