"""`vlmserve bench api`: it runs, and counts what comes."""

from __future__ import annotations

import json

import pytest

from vlmserve.commands.bench.api import bodies, main, send_all
from vlmserve.commands.bench.fake_engine import STEP_VARIABLE
from vlmserve.commands.client.own_server import OwnServer
from vlmserve_common.errors import EngineError


@pytest.mark.slow
def test_all_figures_are_taken(tmp_path):
    file = tmp_path / "api.json"
    words = ["--rounds", "1", "--requests", "3", "--streams", "4", "--tokens", "8", "--step-ms", "1"]
    assert main([*words, "--json", str(file)]) == 0
    measures = json.loads(file.read_text())["measures"]
    assert (len(measures["fake"]), len(measures["real"])) == (5, 3)
    figures = [one for made in measures.values() for one in made]
    assert all(one["spread"]["least"] > 0 for one in figures)
    assert [one["target"] for one in figures if one["met"] is not None] == [3.0, 3.0, 0.05, 0.85]


def test_the_client_counts_events_and_tells_refusals():
    words = ["--served-model-name", "bench", "--log-level", "warning"]
    command = ("vlmserve.commands.bench.fake_engine",)
    with OwnServer(words, {STEP_VARIABLE: "20"}, command=command) as server:
        streamed = send_all(server.base_url, bodies(3, 5, stream=True), at_a_time=2)
        # a role first, five tokens, the end, and [DONE]; tokens may come together where the machine is busy
        assert 3 * 3 < streamed.events <= 3 * 8
        assert send_all(server.base_url, bodies(1, 5, stream=False), at_a_time=2).events == 0
        with pytest.raises(EngineError, match=r"404.*'other'"):
            send_all(server.base_url, [bodies(1, 1, stream=False)[0] | {"model": "other"}], at_a_time=1)
