"""docs/metrics.md names what /metrics has, and nothing else."""

from __future__ import annotations

import re

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from tests.vlmserve.server.fake_engine import MODEL
from tests.vlmserve.server_process import ROOT

PAGE = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_has_every_metric_with_its_type_and_labels(client: TestClient) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    served = {}
    for family in text_string_to_metric_families(client.get("/metrics").text):
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
        if not name.endswith("_created"):
            served[name] = (family.type, labels)
    rows = re.findall(r"^\| `(vlmserve:\w+)` \| (\w+) \|([^|]*)\|", PAGE, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == served
    assert len(rows) == len(served)


def test_its_queries_are_of_metrics_that_there_are() -> None:
    known = set(re.findall(r"^\| `(vlmserve:\w+)`", PAGE, re.MULTILINE))
    (queries,) = re.findall(r"```promql\n(.*?)```", PAGE, re.DOTALL)
    asked = {name.removesuffix("_bucket") for name in re.findall(r"vlmserve:\w+", queries)}
    assert asked
    assert asked <= known
