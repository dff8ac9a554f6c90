"""`vlmserve bench live`: the parts run on a server of their own, and the figures are those of that server."""

import json

import pytest

from vlmserve import cli


@pytest.mark.slow
def test_a_short_soak(tmp_path, capsys):
    file = tmp_path / "figures.json"
    words = ["bench", "live", "--parts", "soak", "--soak-seconds", "8", "--viewers", "2", "--side", "56"]
    assert cli.main([*words, "--window", "sliding", "--json", str(file)]) == 0
    measures = {one["name"]: one for one in json.loads(file.read_text())["measures"]["soak"]}
    assert 0 < measures["lag of a temporal patch"]["spread"]["median"] < 8
    assert measures["failed questions"]["spread"]["most"] == 0
    assert measures["memory of api at the end"]["spread"]["least"] > 10
    assert "lag of a temporal patch, 99th of 100" in measures
    assert "2 viewers" in capsys.readouterr().out
