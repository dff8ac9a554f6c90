"""Every metric and label that the board asks for is on the page of /metrics."""

from __future__ import annotations

import json
import re

from tests.vlmserve.server_process import ROOT

BOARD = json.loads((ROOT / "configs" / "grafana" / "vlmserve.json").read_text(encoding="utf-8"))
ROW = re.compile(r"^\| `(vlmserve:\w+)` \| (\w+) \|([^|]*)\|", re.MULTILINE)
SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}


def samples() -> dict[str, set[str]]:
    """Names of samples and their labels, of docs/metrics.md; another test compares that with the server."""
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return {
        name + suffix: {"model_name", "le", *re.findall(r"`(\w+)`", labels)}
        for name, kind, labels in ROW.findall(page)
        for suffix in SUFFIXES[kind]
    }


def test_its_queries_are_of_metrics_that_there_are() -> None:
    known = samples()
    queries = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"vlmserve:\w+", query)}
    assert len(asked) > 30
    assert asked <= known.keys()
    for query in queries:
        for name, filters in re.findall(r"(vlmserve:\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)=~?\"", filters)) <= known[name]
        assert query.count("(") == query.count(")")


def test_panels_stand_beside_each_other() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in BOARD["panels"]]
    assert len(set(places)) == len(places) == 12
    assert {panel["id"] for panel in BOARD["panels"]} == set(range(1, 13))
