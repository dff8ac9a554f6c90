"""`vlmserve deploy` without a cluster: the config, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import yaml

from vlmserve import cli
from vlmserve.ray.service.deploy import reason_of
from vlmserve.ray.service.plan import read_plan
from vlmserve.ray.service.versions import check_version
from vlmserve_common.errors import SettingsError


def test_the_config_has_what_was_given_and_no_keys(capsys) -> None:
    words = ["Qwen/Qwen3-VL-2B-Instruct", "--tp-size", "2", "--replicas", "2", "--port", "9000", "--api-key", "sesame"]
    assert cli.main(["deploy", *words]) == 0
    printed = capsys.readouterr().out
    assert "sesame" not in printed
    assert printed.startswith("# Set VLMSERVE_API_KEY on the nodes")
    config = yaml.safe_load(printed)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 9000}
    [app] = config["applications"]
    assert app["import_path"] == "vlmserve.ray:build_app"
    assert app["args"] == {"model": "Qwen/Qwen3-VL-2B-Instruct", "tp-size": "2", "replicas": 2}
    again = read_plan(app["args"])
    assert (again.settings.engine.tp_size, again.deployment.replicas) == (2, 2)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--replicas", "2", "--front", "off"], "--front is 'off'"),
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size (here --tp-size) is 0"),
        (["--max-replicas", "1", "--replicas", "2"], "--max-replicas is 1"),
    ],
)
def test_wrong_settings_end_with_a_line_and_status_2(words: list[str], complaint: str, capsys) -> None:
    assert cli.main(["deploy", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"vlmserve: error: {complaint}")
    assert len(captured.err.splitlines()) == 1


def test_another_version_on_a_node_is_named() -> None:
    check_version("1.2", "1.2")
    with pytest.raises(SettingsError, match=r"has vlmserve 1\.2, and the app was built with 1\.3: install the same"):
        check_version("1.3", "1.2")


def test_a_failed_deployment_tells_its_replica_s_reason() -> None:
    message = (
        "The deployment failed to start 3 times in a row. Error:\nTraceback (most recent call last):\n  File ...\n"
        "vlmserve_common.errors.CheckpointError: there is no folder '/nowhere'\n\nmore"
    )
    app = SimpleNamespace(deployments={"Server": SimpleNamespace(message=message)})
    assert reason_of(SimpleNamespace(applications={"x": app}), "x") == "there is no folder '/nowhere'"
    assert reason_of(SimpleNamespace(applications={}), "x") is None
