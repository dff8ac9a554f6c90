"""`vlmserve bench api` runs, and counts what comes."""

from __future__ import annotations

import json

import pytest

from vlmserve.commands.bench import api
from vlmserve.commands.bench.api import Figure, main
from vlmserve.commands.bench.api_subject import STEP_VARIABLE
from vlmserve.commands.bench.counting_client import send_all
from vlmserve.commands.bench.interleaved import Spread
from vlmserve.commands.client.own_server import OwnServer
from vlmserve_common.errors import EngineError

_WORDS = ["--served-model-name", "bench", "--log-level", "warning"]


@pytest.mark.slow
def test_all_figures_are_taken(tmp_path, capsys):
    file = tmp_path / "api.json"
    words = ["--rounds", "1", "--requests", "3", "--streams", "4", "--tokens", "8", "--step-ms", "1"]
    assert main([*words, "--json", str(file)]) == 0
    figures = {one["name"]: one for one in json.loads(file.read_text())["figures"]}
    assert len(figures) == 8
    assert all(one["spread"]["least"] > 0 for one in figures.values())
    assert [one["target"] for one in figures.values() if one["met"] is not None] == [3.0, 3.0, 0.05, 0.85]
    assert "a token, streamed, 4 at a time" in capsys.readouterr().out


def test_the_client_counts_events_and_tells_refusals():
    with OwnServer(_WORDS, {STEP_VARIABLE: "20"}, command=("vlmserve.commands.bench.api_subject", "serve")) as server:
        streamed = send_all(server.base_url, api._CHATS, api._bodies(3, 5, stream=True), at_a_time=2)
        # a role first, five tokens, the end, and [DONE]; tokens may come together where the machine is busy
        assert 3 * 3 < streamed.events <= 3 * 8
        assert send_all(server.base_url, api._CHATS, api._bodies(1, 5, stream=False), at_a_time=2).events == 0
        with pytest.raises(EngineError, match=r"404.*'other'"):
            send_all(
                server.base_url, api._CHATS, [{**api._bodies(1, 1, stream=False)[0], "model": "other"}], at_a_time=1
            )


def test_targets_have_a_direction():
    spread = Spread(median=2.0, least=1.0, most=3.0)
    assert Figure(name="", unit="", spread=spread).met is None
    assert Figure(name="", unit="", spread=spread, target=1.9).met is False
    assert Figure(name="", unit="", spread=spread, target=1.9, least=True).met is True
