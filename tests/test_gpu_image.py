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
_ENGINE = """
from vlmserve import LLM
with LLM("", device="cpu", cpu_kernels="off", attention_backend="triton", gpu_kernels="triton") as llm:
    print(len(llm.chat([{{"role": "user", "content": "Hi"}}], max_tokens=2, ignore_eos=True).token_ids), "tokens")
"""
_LATE = [
    "vision.towers.tower_graphs",
    "vlmserve.models.attention.flashinfer_backend",
    "vlmserve.commands.doctor.engine_probes",
    "vlmserve.engine.graph_planning",
    "vlmserve.commands.bench.gpu.measures",
    "vlmserve_common.checkpoint.fp8",
    "vlmserve_common.compute.graphs",
    "vlmserve_common.kernels.gpu.catalogue",
    "vlmserve_common.kernels.gpu.fp8",
]
_BENCH = "from vlmserve import cli; sys.exit(cli.main({words!r}))"


def run(code: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VLMSERVE_TEST_DEVICE", "cpu")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # of packages that are only here
    command = [sys.executable, "-c", BLOCK.format(blocked=ABSENT) + code.format(words=words)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpu_tests_are_collected_run_and_say_what_they_lack(monkeypatch):
    """One of each kind: the engine, attention, fused operators, FP8."""
    some = (
        "float32_answers and defaults and qwen3",
        "backends_attend and triton-mixed-torch.float32",
        "test_norms and float32",
        "test_products and group",
    )
    said = run(_TESTS, ["tests/gpu", "-k", " or ".join(f"({one})" for one in some)], monkeypatch)
    assert f"{len(some)} passed" in said, said
    assert "encoder processes talk in msgspec, which is not installed" in said


def test_kernel_tests_are_collected(monkeypatch):
    words = ["tests/vlmserve_common/kernels", "-k", "triton", "--collect-only"]
    assert "test_triton_extend.py" in run(_TESTS, words, monkeypatch)


@pytest.mark.slow
def test_the_benchmark(monkeypatch):
    words = ["bench", "gpu", "--device", "cpu", "--small", "--rounds", "1", "--parts", "decode"]
    assert "decode step of 4" in run(_BENCH, words, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shape", ["2b", "8b", "qwen2.5-7b"])
def test_the_whole_benchmark(shape, monkeypatch):
    """All parts but those that only a GPU has."""
    words = ["bench", "gpu", "--device", "cpu", "--small", "--rounds", "1", "--model-shape", shape]
    said = run(_BENCH, words, monkeypatch)
    assert ": not measured:" not in said


@pytest.mark.slow
def test_the_trace(monkeypatch, tmp_path):
    words = ["bench", "trace", "--device", "cpu", "--requests", "2", "--images", "1", "--image-size", "64"]
    said = run(_BENCH, [*words, "--output-tokens", "4", "--output", str(tmp_path / "trace.json")], monkeypatch)
    assert "decode of 2" in said


def test_the_engine_with_all_kernels_for_gpus(monkeypatch):
    """By Triton's interpreter."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run(_ENGINE, [], monkeypatch).endswith("2 tokens\n")


def test_what_only_a_gpu_loads(monkeypatch):
    """Modules that are imported late, on a GPU alone."""
    run("import importlib\nfor name in {words!r}: importlib.import_module(name)", _LATE, monkeypatch)
