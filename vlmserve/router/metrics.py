"""The figures of a router, and those of its servers, each with a label for its server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE_LATEST
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from vlmserve.router.workers import Workers

PREFIX = "vlmserve:router_"
LABEL = "server"
_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
)


class RouterMetrics(Collector):
    """The figures of one router. longest_turn_s: of the event loop."""

    def __init__(self, workers: Workers, longest_turn_s: Callable[[], float]) -> None:
        self._workers = workers
        self._longest_turn_s = longest_turn_s
        self._registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, text, labels, registry=self._registry)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(PREFIX + name, text, (LABEL,), registry=self._registry, buckets=_SECONDS)

        self._http = counter("http_requests", "HTTP requests by status", "status")
        self._refused = counter("requests_refused", "Requests that were turned away", "reason")
        self._requests = counter("requests", "Answers of a server", LABEL, "status")
        self._failures = counter(
            "failures", "Requests that a server did not answer, or not to the end", LABEL, "reason"
        )
        self._websockets = Gauge(PREFIX + "websockets_open", "WebSockets", (LABEL,), registry=self._registry)
        self._messages = counter("websocket_messages", "Messages of WebSockets", LABEL, "direction")
        self._first = histogram("time_to_first_byte_seconds", "Until an answer began, all tries together")
        self._whole = histogram("request_seconds", "Until the whole answer")
        self._registry.register(self)

    def observe_http(self, path: str, status: int) -> None:
        """Count an answered HTTP request."""
        self._http.labels(str(status)).inc()

    def observe_refusal(self, reason: str) -> None:
        """Count an HTTP request that was turned away. reason: the code of its error."""
        self._refused.labels(reason).inc()

    def answered(self, server: str, status: int, seconds: float) -> None:
        """Count an answer that begins."""
        self._requests.labels(server, str(status)).inc()
        self._first.labels(server).observe(seconds)

    def ended(self, server: str, seconds: float) -> None:
        """Count an answer that has ended."""
        self._whole.labels(server).observe(seconds)

    def failed(self, server: str, reason: str) -> None:
        """Count a request that a server did not answer."""
        self._failures.labels(server, reason).inc()

    def open_websockets(self, server: str, more: int) -> None:
        """Count a WebSocket that was opened (1) or has ended (-1)."""
        self._websockets.labels(server).inc(more)

    def passed(self, server: str, direction: str) -> None:
        """Count a message of a WebSocket."""
        self._messages.labels(server, direction).inc()

    def collect(self) -> Iterable[Metric]:
        """Yield what the servers are like now."""
        turn = GaugeMetricFamily(PREFIX + "event_loop_longest_turn_seconds", "The event loop's longest turn of late")
        turn.add_metric((), self._longest_turn_s())
        healthy = GaugeMetricFamily(PREFIX + "server_healthy", "1 if a server gets requests", labels=(LABEL, "role"))
        in_flight = GaugeMetricFamily(PREFIX + "requests_in_flight", "Requests at a server", labels=(LABEL,))
        tokens = GaugeMetricFamily(PREFIX + "tokens_in_flight", "A guess of their tokens to compute", labels=(LABEL,))
        for worker in self._workers:
            healthy.add_metric((worker.url, worker.role), float(worker.state == "healthy"))
            in_flight.add_metric((worker.url,), worker.in_flight)
            tokens.add_metric((worker.url,), self._workers.load_of(worker))
        return turn, healthy, in_flight, tokens

    def own(self) -> list[Metric]:
        """Return the router's figures. Call this in the event loop."""
        return list(self._registry.collect())


class _Collected(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def joined(own: Iterable[Metric], pages: Mapping[str, bytes]) -> bytes:
    """Return the figures of a router and of its servers in the Prometheus text format. pages: of /metrics, by URL."""
    families: dict[str, Metric] = {family.name: family for family in own}
    for url, page in pages.items():
        for family in text_string_to_metric_families(page.decode()):
            there = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            there.samples += [sample._replace(labels={LABEL: url, **sample.labels}) for sample in family.samples]
    return generate_latest(_Collected(families.values()))
