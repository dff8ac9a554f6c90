"""What runs on a GPU machine that has little more than torch and transformers: the engine, its tests, its benchmark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_floors import BLOCK

ROOT = Path(__file__).parents[1]
ABSENT = {
    "av",
    "fastapi",
    "flashinfer",
    "gradio",
    "msgspec",
    "openai",
    "prometheus_client",
    "pydantic",
    "python_multipart",
    "qwen_vl_utils",
    "ray",
    "starlette",
    "uvicorn",
    "zmq",
}
_TESTS = "import pytest, sys; sys.exit(pytest.main(['-v', '-rs', *{words!r}]))"
_BENCH = "from vlmserve import cli; sys.exit(cli.main({words!r}))"


def run(code: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLMSERVE_TEST_DEVICE", "cpu")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of packages that are only here
    command = [sys.executable, "-c", BLOCK.format(blocked=ABSENT) + code.format(words=words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpu_tests_are_collected_run_and_say_what_they_lack(monkeypatch):
    said = run(_TESTS, ["tests/gpu", "-k", "float32_answers and defaults and qwen3"], monkeypatch)
    assert "1 passed" in said
    assert "encoder processes talk in msgspec, which is not installed" in said


def test_the_benchmark(monkeypatch):
    words = ["bench", "gpu", "--device", "cpu", "--small", "--rounds", "1", "--parts", "decode"]
    assert "decode step of 4" in run(_BENCH, words, monkeypatch)
