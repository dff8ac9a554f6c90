"""`vlmserve doctor` as a user runs it: here, and where nothing is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.default_model import copy_default_model
from tests.vlmserve.server_process import ROOT


def run(*words: str, python: Path | str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "vlmserve.cli", "doctor", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of this machine and a model whose weights are cut off."""
    folder = tmp_path_factory.mktemp("model")
    copy_default_model(folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    done = run(str(folder), "--json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert done.returncode == 1
    return report


def section(report: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in report["findings"] if one["section"] == name}


def test_this_installation_is_well(report: dict[str, Any]) -> None:
    found = {name: section(report, name) for name in ("vlmserve", "media", "built-in model")}
    assert {one["status"] for each in found.values() for one in each.values()} == {"ok"}
    assert found["vlmserve"]["torch"]["data"]["import_error"] is None
    assert found["media"]["pictures"]["data"]["formats"][:3] == ["PNG", "JPEG", "WEBP"]
    assert found["media"]["sample video"]["data"]["frames"] == 32
    model = found["built-in model"]["model"]["data"]
    assert model["family"] == "qwen3_vl"
    assert model["kv_tokens"] > 0
    assert section(report, "machine")["memory"]["data"]["available_bytes"] > model["weight_bytes"]
    assert section(report, "GPU")["attention"]["status"] == "ok"
    assert section(report, "extras")["demo"]["status"] == "ok"


def test_a_broken_model_is_a_problem(report: dict[str, Any]) -> None:
    [broken] = section(report, "MODEL").values()
    assert broken["status"] == "problem"
    assert "truncated" in broken["text"]
    statuses = [one["status"] for one in report["findings"]]
    assert (statuses.count("problem"), statuses.count("note")) == (report["problems"], report["notes"])
    of_machine = [one for one in report["findings"] if one["section"] in ("machine", "GPU")]
    assert report["problems"] == 1 + sum(one["status"] == "problem" for one in of_machine)


def test_where_nothing_is_installed_it_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = run(python=tmp_path / "bare" / "bin" / "python")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert any(line.split()[:5] == ["problem", "torch", "is", "not", "installed,"] for line in lines)
    installs = f"-c {ROOT}/constraints.txt -e {ROOT}"
    assert sum(line.endswith(installs) for line in lines) == 1, "one command for all packages"
    assert any(line.endswith(f"-e '{ROOT}[demo]'") for line in lines)
    assert "not examined: ModuleNotFoundError: No module named 'torch'" in done.stdout
    assert any(line.split()[:2] == ["ok", "memory"] for line in lines)
    assert "Traceback" not in done.stdout


def test_a_library_that_crashes_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 11)")
    (tmp_path / "numpy.py").write_text("raise OSError('libblas.so.3: not found')")
    done = run(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert "is installed, and cannot be imported: it crashed the process (SIGSEGV)" in done.stdout
    assert "is installed, and cannot be imported: OSError: libblas.so.3: not found" in done.stdout
    assert "-m pip install --force-reinstall 'torch>=" in done.stdout


def test_a_wrong_command_line_ends_with_2() -> None:
    done = run("a", "b")
    assert done.returncode == 2
    assert "vlmserve doctor: error: " in done.stderr
